"""Detection of faults in rows, without a device."""

import time

import numpy as np
import pytest

from gradclip_jax.monitoring._detect import Detector
from gradclip_jax.monitoring._rows import MEASURED, Names, Outcome, Rows

STEPS, UNITS, AT = 400, 5, 300


def clean_rows(*, steps=STEPS, units=UNITS, taps=0, seed=0, width=0.2):
    """Rows of a steady run; norms are lognormal."""
    rng = np.random.default_rng(seed)
    names = Names(
        units=tuple(f"unit_{i}" for i in range(units)),
        taps=tuple(f"tap_{i}" for i in range(taps)),
    )
    rows = Rows.zeros(steps, names)
    rows.step[:], rows.batch_id[:] = np.arange(steps), np.arange(steps)
    flags = Outcome.HAS_LOSS | Outcome.HAS_UNITS | Outcome.HAS_BATCH_ID | Outcome.APPLIED
    rows.outcome[:] = flags | MEASURED[0] | MEASURED[1] | MEASURED[2]
    rows.loss[:] = 3 + 0.1 * rng.normal(size=steps)
    rows.norms[:] = np.exp(width * rng.normal(size=rows.norms.shape))
    rows.norms[:, 2] = 10 + 0.01 * rng.normal(size=rows.norms[:, 2].shape)
    if taps:
        rows.outcome[:] |= int(Outcome.HAS_TAPS)
        rows.taps[..., 1] = np.exp(0.1 * rng.normal(size=rows.taps.shape[:3]))
    add_up(rows)
    return rows, names


def add_up(rows):
    """Set the norms of the whole tree."""
    if rows.norms.shape[2] > 1:
        rows.norms[..., 0] = np.linalg.norm(rows.norms[..., 1:], axis=-1)


def lone_rows(loss, norm=None):
    """Rows of a log with a loss and the norm of the whole tree."""
    rows = Rows.zeros(len(loss), Names())
    rows.step[:], rows.loss[:] = np.arange(len(loss)), loss
    rows.outcome[:] = int(Outcome.HAS_LOSS)
    if norm is not None:
        rows.norms[:, 0, 0] = norm
        rows.outcome[:] |= int(Outcome.HAS_GRADIENT)
    return rows, Names()


def found(rows, names, *, start=AT):
    """The kinds and units of all incidents from a step on."""
    return {
        (incident.kinds, incident.leaf)
        for incident in Detector(names).update(rows)
        if incident.step >= start
    }


def steady(steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return 3 + 0.1 * rng.normal(size=steps), np.exp(0.2 * rng.normal(size=steps))


FAULTS = {
    "leaf": lambda rows: rows.norms[AT, 0].__setitem__(3, 10 * rows.norms[AT, 0, 3]),
    "update": lambda rows: rows.norms[AT, 1].__imul__(100),
    "parameter": lambda rows: rows.norms[AT, 2].__setitem__(3, 1e3),
    "loss": lambda rows: rows.loss.__setitem__(AT, 15.0),
    "norm": lambda rows: rows.norms[AT, 0].__imul__(20),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_an_outlier_is_one_incident_with_its_kind(kind):
    rows, names = clean_rows()
    assert not Detector(names).update(rows)
    FAULTS[kind](rows)
    add_up(rows)
    ((incident),) = Detector(names).update(rows)
    assert incident.step == AT and incident.batch_id == AT
    assert kind in incident.kinds
    assert kind not in ("leaf", "parameter") or incident.leaf == "unit_2"


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "nan"), (np.inf, "infinity")])
def test_non_finite_elements_name_their_unit(value, kind):
    rows, names = clean_rows()
    rows.norms[AT, 0, [0, 2]], rows.nonfinite[AT, [0, 2]] = value, 3
    (incident,) = Detector(names).update(rows)
    assert incident.kinds == (kind,)
    assert (incident.leaf, incident.bad_elements, incident.share) == ("unit_1", 3, 1.0)


def test_a_unit_whose_gradient_becomes_zero_is_reported_once():
    rows, names = clean_rows()
    rows.norms[AT:, 0, 2] = 0
    add_up(rows)
    (incident,) = Detector(names).update(rows)
    assert incident.kinds == ("zero",) and incident.leaf == "unit_1"
    assert incident.step < AT + 20


@pytest.mark.parametrize("units", [0, UNITS])
def test_a_slow_drift_is_reported_with_and_without_units(units):
    rows, names = clean_rows(units=units, steps=AT + 300)
    rows.norms[AT:, 0, -1] *= 1.01 ** np.arange(300)
    add_up(rows)
    first = Detector(names).update(rows)[0]
    assert "drift" in first.kinds and first.leaf == ("unit_4" if units else "")
    assert first.step < AT + np.log(30) / np.log(1.01)


def test_a_growing_tap_is_named_before_the_first_non_finite_value():
    rows, names = clean_rows(taps=4, steps=AT + 31)
    rows.taps[AT:, 2, 0, 1] = np.geomspace(0.2, 200, 31)
    rows.taps[-1, 2, 0, -1] = 0.5
    first = Detector(names).update(rows)[0]
    assert first.kinds == ("tap",) and first.tap == "activation of tap_2"
    assert AT < first.step < AT + 25


@pytest.mark.parametrize("value", [1e3, 1e20, np.nan])
@pytest.mark.parametrize("at", [0, 3, 14])
def test_early_outliers_leave_the_bounds_as_they_are(value, at):
    loss, norm = steady()
    usual = Detector(Names())
    usual.update(lone_rows(loss[:AT], norm[:AT])[0])
    loss[at], norm[at] = value, 1000 * norm[at]
    spoilt = Detector(Names())
    spoilt.update(lone_rows(loss[:AT], norm[:AT])[0])
    last = lone_rows(np.array([1e9]), np.array([1e9]))[0]
    bounds = [detector.update(last)[0] for detector in (usual, spoilt)]
    assert bounds[1].loss_threshold < 1.1 * bounds[0].loss_threshold
    assert bounds[1].norm_threshold < 1.1 * bounds[0].norm_threshold


def test_incidents_do_not_depend_on_how_rows_are_read():
    rows, names = clean_rows(width=0.8, taps=2)
    rows.loss[200:210] = 9
    rows.norms[300:320, 0, 0] = np.nan
    whole = [str(x) for x in Detector(names).update(rows)]
    assert whole
    for size in (1, 7, 50):
        detector = Detector(names)  # the last part is empty
        parts = [rows.take(slice(i, i + size)) for i in range(0, STEPS + size, size)]
        assert [str(x) for part in parts for x in detector.update(part)] == whole


def test_rare_infinite_norms_are_noted_once_and_frequent_ones_are_incidents():
    loss, norm = steady(3500)
    norm[[500, 2000]] = np.inf
    (note,) = Detector(Names()).update(lone_rows(loss, norm)[0])
    assert note.kinds == ("infinity", "note") and note.step == 500
    norm[2100:2900:50] = np.inf
    incidents = Detector(Names()).update(lone_rows(loss, norm)[0])
    assert len(incidents) > 10 and "note" not in incidents[-1].kinds


def test_a_loss_that_becomes_exactly_zero_is_an_incident_and_rounded_losses_are_not():
    loss, _ = steady()
    assert not Detector(Names()).update(lone_rows(np.round(loss * 1e-4, 4))[0])
    loss[AT:] = 0
    (incident,) = Detector(Names()).update(lone_rows(loss)[0])
    assert incident.kinds == ("loss",)


def test_losses_may_be_negative():
    rng = np.random.default_rng(0)
    loss = rng.normal(size=STEPS)
    assert not Detector(Names()).update(lone_rows(loss)[0])
    loss[AT] = 12.0
    (incident,) = Detector(Names()).update(lone_rows(loss)[0])
    assert incident.kinds == ("loss",)


def test_outcomes_of_the_device_become_kinds():
    rows, names = clean_rows()
    skipped = Outcome.SKIPPED | Outcome.SKIPPED_LARGE_NORM | Outcome.HAS_NORM_LIMIT
    rows.outcome[AT:] = (rows.outcome[AT:] & ~int(Outcome.APPLIED)) | int(skipped)
    rows.limits[AT:, 0] = 0.5
    rows.outcome[100] |= int(Outcome.EMPTY_WINDOW)
    rows.outcome[200] |= int(Outcome.REPLICA_DIFFERS)
    rows.device[200] = 3
    window, replica, *skips = Detector(names).update(rows)
    assert window.kinds == ("window",)
    assert replica.kinds == ("replica",) and replica.device == 3
    assert len(skips) == STEPS - AT == skips[-1].streak and skips[-1].first_step == AT
    assert skips[0].kinds == ("norm", "skipped") and skips[0].norm_threshold == 0.5


def test_reading_50_rows_of_300_units_takes_at_most_100_ms():
    rows, names = clean_rows(units=300, steps=400)
    detector, times = Detector(names), []
    for i in range(0, 400, 50):
        start = time.process_time()
        detector.update(rows.take(slice(i, i + 50)))
        times.append(time.process_time() - start)
    assert min(times[2:]) < 0.1


def test_units_that_are_logged_every_50_rows_are_not_zero_in_between():
    rows, names = clean_rows()
    rows.norms[np.arange(STEPS) % 50 > 0, :, 1:] = 0
    rows.outcome[np.arange(STEPS) % 50 > 0] &= ~int(Outcome.HAS_UNITS)
    assert not Detector(names).update(rows)
