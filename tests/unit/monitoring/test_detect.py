"""Detection of faults in rows, without a device."""

import time

import numpy as np
import pytest

from gradclip_jax.monitoring._layout import MEASURED, Names, Outcome
from gradclip_jax.monitoring.host._detect import Detector
from gradclip_jax.monitoring.host._rows import Rows

STEPS, UNITS, AT = 400, 5, 300


def clean_rows(*, steps=STEPS, units=UNITS, taps=0, width=0.2):
    """Rows of a steady run; norms are lognormal."""
    rng = np.random.default_rng(0)
    names = Names([f"unit_{i}" for i in range(units)], (), [f"tap_{i}" for i in range(taps)])
    rows = Rows.zeros(steps, names)
    rows.step[:] = rows.batch_id[:] = np.arange(steps)
    flags = Outcome.HAS_LOSS | Outcome.HAS_UNITS | Outcome.HAS_BATCH_ID | Outcome.HAS_TAPS
    rows.outcome[:] = int(flags | Outcome.APPLIED | sum(MEASURED.values()))
    rows.loss[:] = 3 + 0.1 * rng.normal(size=steps)
    rows.norms[:] = np.exp(width * rng.normal(size=rows.norms.shape))
    rows.norms[:, 2] = 10 + 0.01 * rng.normal(size=rows.norms[:, 2].shape)
    rows.taps[..., 1] = np.exp(0.1 * rng.normal(size=rows.taps.shape[:3]))
    add_up(rows)
    return rows, names


def add_up(rows):
    """Set the norms of the whole tree."""
    if rows.norms.shape[2] > 1:
        rows.norms[..., 0] = np.linalg.norm(rows.norms[..., 1:], axis=-1)


def lone_rows(loss, norm=0.0):
    """Rows of a log with a loss and the norm of the whole tree."""
    rows = Rows.zeros(len(loss), Names())
    rows.step[:], rows.loss[:], rows.norms[:, 0, 0] = np.arange(len(loss)), loss, norm
    rows.outcome[:] = int(Outcome.HAS_LOSS | Outcome.HAS_GRADIENT * (np.max(norm) > 0))
    return rows


def steady(steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return 3 + 0.1 * rng.normal(size=steps), np.exp(0.2 * rng.normal(size=steps))


FAULTS = [
    ("leaf", "norms", (AT, 0, 3), 10, "relative gradient norm rose"),
    ("update", "norms", (AT, 1), 100, "update norm"),
    ("parameter", "norms", (AT, 2, 3), 100, "parameter norm 1e+03 (threshold"),
    ("loss", "loss", AT, 5, "loss 16 (threshold"),
    ("norm", "norms", (AT, 0), 20, "gradient norm"),
]


@pytest.mark.parametrize(("kind", "column", "index", "factor", "sentence"), FAULTS)
def test_an_outlier_is_one_incident_with_its_kind(kind, column, index, factor, sentence):
    rows, names = clean_rows()
    getattr(rows, column)[index] *= factor
    add_up(rows)
    (incident,) = Detector(names).update(rows)
    assert (incident.step, incident.batch_id) == (AT, AT) and kind in incident.kinds
    assert kind not in ("leaf", "parameter") or incident.leaf == "unit_2"
    assert str(incident).startswith(f"step 300, batch 300: applied, {sentence}")


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "nan"), (np.inf, "infinity")])
def test_non_finite_elements_name_their_unit(value, kind):
    rows, names = clean_rows(taps=2)
    rows.norms[AT, 0, [0, 2]], rows.nonfinite[AT, [0, 2]], rows.taps[AT, :, 1, -1] = value, 3, 1
    (incident,) = Detector(names).update(rows)
    assert (incident.kinds, incident.leaf) == ((kind,), "unit_1")
    text = f"gradient norm {value}, 3 non-finite elements, 100 % in unit_1"
    place = "first non-finite cotangent of tap_1"  # the first one in the backward pass
    assert str(incident) == f"step 300, batch 300: applied, {text}; {place}"


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
    first = Detector(names).update(rows)[0]
    assert first.kinds == ("tap",) and "RMS of the activation of tap_2 rose" in str(first)
    assert AT < first.step < AT + 25


@pytest.mark.parametrize(("at", "value"), [(0, 1e3), (3, np.nan), (14, 1e20)])
def test_an_early_outlier_leaves_the_smallest_jump_that_is_reported(at, value):
    smallest = []
    for outlier in None, value:
        loss, norm = steady(500)
        if outlier:
            loss[at], norm[at] = outlier, 1000 * norm[at]
        detector, last = Detector(Names()), lone_rows(np.array([1e9]), np.array([1.0]))
        detector.update(lone_rows(loss, norm))
        smallest.append(detector.update(last)[0].loss_threshold)
    assert smallest[1] < 1.1 * smallest[0] < 5.5


@pytest.mark.parametrize("size", [1, 7, 50, 399])
@pytest.mark.sampled
def test_incidents_do_not_depend_on_how_rows_are_read(size):
    rows, names = clean_rows(width=0.8, taps=2)
    rows.loss[200:210], rows.loss[330:] = 9, rows.loss[330:] * 2
    rows.norms[300:320, 0, 0] = np.nan
    rows.norms[100:150, 0, 2] = rows.norms[160:260, 0, 2] = 0
    rows.norms[250:, 0, 4] *= 1.05 ** np.arange(150)
    rows.outcome[70:90] &= ~int(Outcome.HAS_UNITS | Outcome.HAS_LOSS)
    whole, detector = Detector(names).update(rows), Detector(names)
    assert {"loss", "risen", "drift", "zero", "nan"} <= {kind for x in whole for kind in x.kinds}
    assert any("10 times since step 200" in str(x) for x in whole)
    # The last part is empty.
    parts = [rows.take(slice(i, i + size)) for i in range(0, STEPS + size, size)]
    assert [x for part in parts for x in detector.update(part)] == whole


def test_rare_infinite_norms_are_noted_once_and_frequent_ones_are_incidents():
    loss, norm = steady(1600)
    norm[[*range(8), 500, 800]] = np.inf  # the first ones are those of an initial scale
    detector = Detector(Names())
    (note,) = detector.update(lone_rows(loss, norm))
    assert note.kinds == ("infinity", "note") and note.step == 0
    norm[900:1600:50] = np.inf
    incidents = detector.update(lone_rows(loss, norm))
    assert len(incidents) > 10 and "note" not in incidents[-1].kinds


ISSUE = np.array([2.3 * 0.97**i + 0.1 for i in range(250)] + [0.1 * 1.05**i for i in range(650)])
LOSSES = {
    # name: the losses, the step and the kinds of the first incident, and a part of its sentence
    "early spike": (np.array([2.0, 2.1, 9.0, 2.0]), 2, ("loss", "growth"), "(threshold 6.3)"),
    "never back": (
        np.repeat([2.0, 2.1], [16, 64]),
        59,
        ("risen", "flat"),
        "36 losses are above the high",
    ),
    "zero from then on": (np.append(steady()[0], np.zeros(20)), STEPS + 15, ("loss",), "loss 0"),
    "negative": (np.append(steady()[0] - 3, 12.0), STEPS, ("loss", "growth"), "loss 12"),
    "step up": (np.repeat([2.0, 2.9], [STEPS, 20]), STEPS, ("loss",), "(threshold 2.8)"),
    "slow": (np.append(np.full(STEPS, 2.0), np.linspace(2, 4, 201)), 492, ("risen",), "last 12"),
    "exponential": (ISSUE, 269, ("risen",), "above 1.4 times the highest of the best 12"),
    "NaN from then on": (np.append(steady()[0], [np.nan] * 20), STEPS, ("loss",), "loss nan"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_unusual_loss_is_an_incident_that_says_what_it_is_compared_with(name):
    loss, step, kinds, text = LOSSES[name]
    first = Detector(Names()).update(lone_rows(loss))[0]
    assert (first.step, first.kinds) == (step, kinds) and text in str(first)


@pytest.mark.parametrize("limit", [0.0, 2.5])  # the limits of guards are not in a log
def test_the_threshold_of_a_skipped_loss_is_that_of_the_guard_or_of_the_detector(limit):
    rows = lone_rows(np.append(steady()[0], 12.0))
    rows.outcome[-1] = int(Outcome.HAS_LOSS | Outcome.SKIPPED | Outcome.SKIPPED_LARGE_LOSS)
    rows.limits[-1] = limit
    (incident,) = Detector(Names()).update(rows)
    assert 2 < incident.loss_threshold < 12 and (limit in (0, incident.loss_threshold))


def test_a_loss_that_explodes_after_it_has_fallen_is_an_outlier_and_one_that_only_grows_is_growth():
    exploded = [x.step for x in Detector(Names()).update(lone_rows(ISSUE)) if "loss" in x.kinds]
    assert 5 < ISSUE[exploded[0]] / np.median(ISSUE[exploded[0] - 128 : exploded[0]]) < 20
    fallen = np.append(np.geomspace(3, 0.1, 50), np.geomspace(0.1, 35, 5500))  # as a value loss
    assert {x.kinds for x in Detector(Names()).update(lone_rows(fallen))} == {("risen",)}
    growing = lone_rows(np.geomspace(0.01, 1e3, 300) * np.exp(0.05 * steady(300)[0]))
    growing.loss[20::40] *= 20
    found = Detector(Names()).update(growing)
    assert {"risen", "growth"} <= {kind for x in found for kind in x.kinds}
    assert all("growth" in x.kinds for x in found if "loss" in x.kinds)


def test_a_loss_that_rises_and_falls_all_the_time_is_reported_again_only_if_it_rises_further():
    levels = [1.0, 1.6] * 20
    found = Detector(Names()).update(lone_rows(np.repeat([*levels, 1.0, 2.1], 20)))
    risen = [x.step // 20 for x in found if "risen" in x.kinds]
    assert risen == [1, len(levels) + 1]


def test_a_loss_whose_sign_changes_has_not_risen():
    rng = np.random.default_rng(0)
    loss = np.append(rng.normal(size=200), 5 + rng.normal(size=200))
    assert not any("risen" in x.kinds for x in Detector(Names()).update(lone_rows(loss)))


@pytest.mark.parametrize(("factor", "steps"), [(0.0, [65]), (1e-4, [249]), (0.1, [])])
def test_a_clip_that_starves_the_optimizer_is_reported_once(factor, steps):
    names = Names(clips=("clip_factor",))
    rows = Rows.zeros(400, names)
    rows.step[:], rows.norms[:, :, 0] = np.arange(400), 1.0
    rows.outcome[:] = int(Outcome.APPLIED | sum(MEASURED.values()))
    rows.factors[:] = np.where(np.arange(400) < 50, 1.0, factor)[:, None]
    found = Detector(names).update(rows)
    assert [(x.step, x.kinds) for x in found] == [(step, ("clip",)) for step in steps]


def test_outcomes_of_the_device_become_kinds():
    rows, names = clean_rows(steps=100)
    skipped = Outcome.SKIPPED | Outcome.SKIPPED_LARGE_NORM
    rows.outcome[80:] = (rows.outcome[80:] & ~int(Outcome.APPLIED)) | int(skipped)
    rows.limits[80:, 0] = 0.5
    rows.outcome[50] |= int(Outcome.EMPTY_WINDOW)
    rows.outcome[60] |= int(Outcome.REPLICA_DIFFERS)
    rows.device[60] = 3
    window, replica, *skips = Detector(names).update(rows)
    assert (window.kinds, replica.kinds) == (("window",), ("replica",))
    assert "the parameters on device 3 differ" in str(replica)
    assert len(skips) == 20 == skips[-1].streak and "20 times since step 80" in str(skips[-1])
    assert skips[0].kinds == ("norm",) and "(threshold 0.5)" in str(skips[0])
    assert all("skipped" in str(x) for x in skips)


def test_a_skip_of_a_finite_row_says_that_a_guard_found_non_finite_values_elsewhere():
    rows, names = clean_rows(steps=100)
    skipped = Outcome.SKIPPED | Outcome.SKIPPED_NONFINITE
    rows.outcome[80] = (rows.outcome[80] & ~int(Outcome.APPLIED)) | int(skipped)
    rows.norms[80, 1] = 0
    (incident,) = Detector(names).update(rows)
    assert incident.kinds == ("update",) and not incident.leaf
    reason = "a guard found non-finite values in the window or the step"
    assert str(incident) == f"step 80, batch 80: skipped, {reason}"


def test_reading_50_rows_of_300_units_takes_at_most_100_ms():
    rows, names = clean_rows(units=300, steps=250)
    detector, times = Detector(names), []
    for i in range(0, 250, 50):
        start = time.process_time()
        detector.update(rows.take(slice(i, i + 50)))
        times.append(time.process_time() - start)
    assert min(times[2:]) < 0.1


def test_units_that_are_logged_every_50_rows_are_not_zero_in_between():
    rows, names = clean_rows()
    rows.norms[np.arange(STEPS) % 50 > 0, :, 1:] = 0
    rows.outcome[np.arange(STEPS) % 50 > 0] &= ~int(Outcome.HAS_UNITS)
    assert not Detector(names).update(rows)
