"""The states of docs/recovery.md: what each action needs, which wins, and what resets it."""

import json

import numpy as np
import pytest

from gradclip_jax.diagnostics import Incident
from gradclip_jax.monitoring._layout import Names, Outcome
from gradclip_jax.monitoring.host._evidence import find_evidence
from gradclip_jax.monitoring.host._policy import Policy
from gradclip_jax.monitoring.host._rows import Rows

GOOD = Outcome.HAS_LOSS | Outcome.HAS_GRADIENT | Outcome.HAS_BATCH_ID | Outcome.APPLIED
SKIPPED = GOOD & ~Outcome.APPLIED | Outcome.SKIPPED | Outcome.SKIPPED_NONFINITE
HELD = GOOD & ~Outcome.APPLIED | Outcome.ACCUMULATED
QUIET, NO_CLIPS = 32, Names()


class Run:
    """Rows that are good but where told otherwise; `batch_id` is the step plus an offset."""

    def __init__(self, start=0, saved=(), events=(), names=NO_CLIPS, **options):
        self.policy, self.step, self.offset = Policy(events, **options), start, 0
        self.names, self.rows, self.incidents = names, Rows.zeros(0, names), []
        self.read(0, saved=saved)

    def read(self, count, *, bad=(), kinds=("loss",), saved=None, **columns):
        """Read `count` rows; `bad` are steps with an incident of `kinds`, `columns` are by step."""
        rows = Rows.zeros(count, self.names)
        rows.step[:] = self.step + np.arange(count)
        rows.batch_id[:] = rows.step + self.offset
        rows.loss[:] = 1 / (1 + rows.batch_id)
        rows.outcome[:] = int(GOOD)
        for name, by_step in columns.items():
            for i in np.flatnonzero(np.isin(rows.step, list(by_step))):
                getattr(rows, name)[i] = by_step[rows.step[i]]
        self.incidents += [Incident(step, kinds) for step in bad if step in rows.step]
        self.rows = Rows.concatenate([self.rows, rows]).take(slice(-1024, None))
        self.last = self.policy.update(self.rows, self.incidents, self.step, saved)
        self.step += count
        return self.last.action

    def rewind(self, *, step=None, leave_out=True):
        before, self.step = self.step, self.last.good_step if step is None else step
        if leave_out:
            self.offset += before - self.step
        self.rows = self.rows.take(self.rows.step < self.step)
        self.incidents = [x for x in self.incidents if x.step < self.step]
        self.policy.rewound(self.step)


def test_a_save_is_proposed_after_quiet_rows_and_not_while_a_candidate_waits():
    run = Run(saved=[0])
    assert run.read(QUIET - 1) == "continue"
    assert run.read(1) == "save" and run.last.good_step == 0
    assert run.read(QUIET - 1, saved=[0, 32]) == "continue" and run.last.good_step == 0
    assert run.read(1) == "save" and run.last.good_step == 32


def test_a_suspicious_row_delays_the_save_and_the_confirmation():
    run = Run(saved=[0])
    assert run.read(40, bad=[20], kinds=("leaf",)) == "continue"
    assert run.read(12) == "continue" and run.read(1) == "save"
    run.read(20, bad=[60], saved=[0, 53])
    assert run.read(19) == "continue" and run.last.good_step == 0
    assert run.read(1) == "save" and run.last.good_step == 53
    assert run.read(40, bad=[100], kinds=("infinity", "note")) == "save"


def test_only_checkpoints_that_exist_are_named_also_those_confirmed_within_one_read():
    run = Run()
    run.read(100, bad=[90])
    assert run.last.good_step is None
    assert run.read(0, saved=[40, 58, 60]) == "continue" and run.last.good_step == 58
    run.read(0, saved=[40])
    assert run.last.good_step == 40


def skipped(first, last):
    """Steps with a gradient that is not finite, which a guard skips."""
    steps, norms = range(first, last), np.array([[np.nan], [np.nan], [1.0]])
    columns = {"norms": dict.fromkeys(steps, norms), "outcome": dict.fromkeys(steps, int(SKIPPED))}
    return {"bad": steps, "kinds": ("nan", "skipped"), **columns}


def test_evidence_in_windows_begins_with_their_first_call():
    rows = Rows.zeros(4 * QUIET, NO_CLIPS)
    rows.step[:] = np.arange(len(rows.step))
    rows.outcome[:] = int(HELD)
    rows.outcome[3::4] = int(SKIPPED)
    is_bad = np.zeros(len(rows.step), bool)
    found = find_evidence(rows, is_bad, [], num_rewinds=0, patience=256)
    assert [(x.action, x.first) for x in found] == [("rewind", 0)]


FAILED = {"outcome": {62: int(SKIPPED), 63: int(SKIPPED), 64: int(SKIPPED | Outcome.GUARD_FAILED)}}
WINDOWS = {"outcome": {step: int(HELD) for step in range(100) if step % 4 != 3}}
CASES = {
    "one outlier": ({"bad": [50]}, "save", []),
    "two outliers": ({"bad": [50, 51]}, "save", []),
    "rare outliers": ({"bad": [40, 50, 60]}, "save", []),  # more than 8 other rows lie between
    "stretch": ({"bad": [50, 51, 54, 60]}, "rewind", range(50, 61)),
    "stretch of windows": ({"bad": [43, 47, 51], **WINDOWS}, "rewind", range(40, 52)),
    "growth from the start": ({"bad": range(2, 15), "kinds": ("loss", "growth")}, "save", []),
    "lasting rise": ({"bad": [60], "kinds": ("risen",)}, "save", []),
    "non-finite parameters": (
        {"bad": range(49, 70), "kinds": ("nan",), "norms": dict.fromkeys(range(50, 70), np.nan)},
        "rewind",
        [49, 50],
    ),
    "skipped": (skipped(50, 68), "save", []),
    "skipped for long": (skipped(50, 82), "rewind", range(50, 82)),
    "failed guard": (FAILED, "stop", []),
    "stretch before a failed guard": ({"bad": [40, 41, 42], **FAILED}, "rewind", [40, 41, 42]),
}


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_what_rewinds_to_the_good_step_and_which_batches_are_left_out(case, size):
    run, (columns, action, left_out) = Run(saved=[0]), CASES[case]
    while run.step < 100:
        run.read(size, **columns)
    assert (run.last.action, run.last.good_step) == (action, 0)
    assert run.last.batch_ids == list(left_out)


def test_a_stretch_that_does_not_end_rewinds_after_32_rows_and_twice_as_many_after_a_rewind():
    run = Run(saved=[0])
    run.read(50)
    assert run.read(31, bad=range(50, 81)) != "rewind"
    assert run.read(1, bad=[81]) == "rewind" and len(run.last.batch_ids) == 32
    run.rewind()
    run.read(50)
    assert run.read(63, bad=range(50, 113)) != "rewind"
    assert run.read(1, bad=[113]) == "rewind" and len(run.last.batch_ids) == 32 + 64


def test_a_stretch_goes_on_after_the_thresholds_of_incidents_have_adapted():
    run, loss = Run(saved=[0]), dict.fromkeys(range(50, 70), 30.0) | {75: 10.0}
    run.incidents.append(Incident(50, ("loss",), loss_threshold=15.0))
    assert run.read(100, loss=loss) == "rewind"
    assert run.last.batch_ids == list(range(50, 70))


def test_bad_rows_with_an_ordinary_loss_do_not_extend_a_stretch():
    run = Run(saved=[0])
    loss = {step: 1.0 + 0.1 * (step % 2) for step in range(100)}
    assert run.read(100, bad=(50, 51, 52), kinds=("infinity",), loss=loss) == "rewind"
    assert run.last.batch_ids == [50, 51, 52]


@pytest.mark.parametrize(
    "kinds, rise", [(("risen",), True), (("loss", "growth"), True), (("risen", "flat"), False)]
)
def test_a_rise_is_evidence_where_the_user_asks_for_it_or_the_loss_is_flat(kinds, rise):
    run, loss = Run(saved=[0], rewind_on_rise=rise), dict.fromkeys(range(49, 100), 30.0)
    run.incidents.append(Incident(60, kinds, loss_threshold=15.0))
    assert run.read(100, loss=loss) == "rewind"
    assert run.last.batch_ids[0] == (49 if "risen" in kinds else 60)


@pytest.mark.parametrize(
    "bad", [{"bad": [50, 51, 52]}, {"norms": dict.fromkeys((50, 51, 52), np.nan)}]
)
def test_batches_that_were_not_the_cause_are_given_back_and_the_learning_rate_is_lowered(bad):
    run, actions, left_out = Run(saved=[0]), [], []
    for _ in range(3):
        actions.append(run.read(62, **bad))
        left_out.append(len(run.last.batch_ids))
        assert run.read(48) == actions[-1]  # until the run is rewound
        assert run.last.num_rewinds == len(actions)
        run.rewind()
    assert actions == ["rewind", "lower", "stop"] and left_out[0] > 0 == left_out[1]
    assert run.last.num_lowers == 1 and "earlier rewinds did not help" in run.last.reason


def test_a_stretch_of_a_loss_near_the_threshold_goes_on_until_the_loss_has_recovered():
    run, loss = Run(saved=[0]), dict.fromkeys(range(50, 90), 1.4) | dict.fromkeys(range(50), 1.0)
    loss |= dict.fromkeys(range(90, 120), 1.1) | {20: np.nan}
    assert run.read(62, bad=[50, 51, 52], loss=loss) == "continue"
    assert run.read(58, loss=loss) == "rewind" and run.last.batch_ids == list(range(50, 90))


def test_after_lower_a_stretch_of_32_rows_that_goes_on_stops_the_run():
    run, actions = Run(saved=[0]), []
    for _ in range(2):
        actions.append(run.read(62, bad=[50, 51, 52]))
        run.rewind()
    actions.append(run.read(82, bad=range(50, 82)))
    assert actions == ["rewind", "lower", "stop"]


MEASURED = int(GOOD | Outcome.HAS_UPDATE)


@pytest.mark.parametrize(
    "norms", [dict.fromkeys((50, 51, 52), [1.0, 1.0, np.nan]), {50: [1.0, np.inf, 1.0]}]
)
def test_nonfinite_parameters_after_finite_gradients_are_restored_and_no_batch_is_left_out(norms):
    run, actions = Run(saved=[0]), []
    for _ in range(4):
        columns = {step: np.array(x)[:, None] for step, x in norms.items()}
        actions.append(run.read(62, norms=columns, outcome=dict.fromkeys(range(51), MEASURED)))
        assert run.last.batch_ids == [] and "hardware" in run.last.reason
        run.rewind()
    assert actions == ["rewind", "rewind", "rewind", "stop"] and run.last.num_lowers == 0


def test_an_update_of_a_window_with_a_nonfinite_gradient_leaves_its_batches_out():
    run, measured = Run(saved=[0]), Outcome.HAS_UPDATE
    outcome = {step: int((GOOD if step % 4 == 3 else HELD) | measured) for step in range(62)}
    norms = {49: np.array([[np.nan], [0.0], [1.0]]), 51: np.array([[1.0], [np.nan], [1.0]])}
    assert run.read(62, norms=norms, outcome=outcome) == "rewind"
    assert run.last.batch_ids == [48, 49, 50, 51]


@pytest.mark.parametrize(
    "first, loss, rise, action",
    [
        (50, 1.1, True, "stop"),
        (50, 0.4, True, "save"),
        (0, 1.1, True, "save"),
        (50, 1.1, False, "save"),
    ],
)
def test_a_clip_that_starves_the_optimizer_stops_a_run_whose_loss_no_longer_falls(
    first, loss, rise, action
):
    run = Run(saved=[0], names=Names(clips=("clip",)), rewind_on_rise=rise)
    factors = dict.fromkeys(range(260), 1.0) | dict.fromkeys(range(first, 260), 1e-6)
    losses = dict.fromkeys(range(50), 1.0) | dict.fromkeys(range(50, 260), loss)
    assert run.read(255, bad=[249], kinds=("clip",), factors=factors, loss=losses) != "rewind"
    assert run.read(40) == action
    assert ("clip" in run.last.reason) == (action == "stop")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_stretch_that_was_open_at_the_rewind_may_continue_once(restarts):
    run = Run(saved=[0])
    assert run.read(82, bad=range(50, 82)) == "rewind" and len(run.last.batch_ids) == 32
    if restarts:
        decision = json.loads(json.dumps(run.last._asdict()))
        run = Run(saved=[0], events=[decision, {"rewind_to": 0}])
        run.offset = 32
    else:
        run.rewind()
    assert run.read(87, bad=range(50, 78)) == "rewind" and len(run.last.batch_ids) == 32 + 28
    run.rewind()
    assert run.read(87, bad=range(50, 78)) == "lower" and run.last.batch_ids == []


def test_bad_batches_in_other_places_lower_after_three_rewinds_and_stay_left_out():
    run, actions = Run(saved=[0]), []
    for first in (50, 150, 250, 350):
        actions.append(run.read(first + 20, bad=range(first, first + 3)))
        run.rewind()
    assert actions == ["rewind", "rewind", "rewind", "lower"]
    assert len(run.last.batch_ids) == 12 and run.last.num_lowers == 1


def test_rewinds_are_forgotten_after_1000_steps():
    run = Run(saved=[0])
    assert run.read(70, bad=[50, 51, 52]) == "rewind"
    run.rewind()
    run.read(1000)
    assert run.read(100, saved=[0, 1000]) == "save"
    assert run.read(70, bad=[1110, 1111, 1112]) == "rewind" and run.last.good_step == 1000
    assert run.last.num_rewinds == 1


def test_after_a_rewind_its_checkpoint_is_still_good_and_later_ones_count_once_they_are_deleted():
    run = Run(saved=[0])
    run.read(80, saved=[0, 40])
    run.read(20, bad=[85, 86, 87], saved=[0, 40, 80])
    assert (run.last.action, run.last.good_step) == ("rewind", 40)
    run.rewind()
    assert run.read(20, bad=[41, 42, 43]) == "lower" and run.last.good_step == 40
    run.rewind()
    run.read(100)
    assert run.last.good_step == 40
    run.read(0, saved=[0])
    run.read(0, saved=[0, 80])
    assert run.last.good_step == 80


def test_without_a_good_checkpoint_a_finite_stretch_is_only_reported():
    run = Run(saved=None)
    assert run.read(60) == "save"
    assert run.read(30, bad=range(60, 63)) == "continue" and "never passed" in run.last.reason
    assert run.read(40) == "save" and not run.last.reason  # said once
    run = Run()
    assert run.read(90, bad=range(50, 53)) == "save" and "no checkpoint is good" in run.last.reason
    assert run.read(40, saved=[88]) == "save"  # that no later checkpoint is rewound to
    run.read(0, saved=[])
    assert run.read(9, norms={135: np.nan}) == "stop" and "no checkpoint" in run.last.reason


def test_windows_that_never_close_stop():
    run = Run()
    assert run.read(1010, outcome=dict.fromkeys(range(10, 1010), int(HELD))) == "save"
    assert run.read(1, outcome={1010: int(GOOD | Outcome.EMPTY_WINDOW)}) == "stop"
    assert "no window closed" in run.last.reason


def test_replicas_that_differ_rewind_and_those_that_differ_again_are_the_hardware():
    run, differs = Run(saved=[0]), int(GOOD | Outcome.REPLICA_DIFFERS)
    for action in ("rewind", "stop"):
        assert run.read(60, bad=[50], kinds=("replica",), outcome={50: differs}) == action
        assert run.last.batch_ids == []
        run.rewind(leave_out=False)
    assert "hardware" in run.last.reason


def test_a_policy_from_a_log_knows_a_pending_action_and_the_batches_to_give_back():
    run, events = Run(saved=[0]), []
    for _ in range(2):
        run.read(70, bad=[50, 51, 52])
        line = json.dumps(run.last._asdict())
        events += [json.loads(line), {"rewind_to": 0}]
        run.rewind()
    again = Run(saved=[0], events=events[:1])
    assert (again.last.action, again.last.batch_ids) == ("rewind", [50, 51, 52])
    again = Run(saved=[0], events=events[:3])
    assert (again.last.action, again.last.num_lowers) == ("lower", 1)
    again, actions = Run(saved=[0], events=events[:2]), []
    for _ in range(2):
        actions.append((again.read(70, bad=[50, 51, 52]), again.last.batch_ids))
        again.rewind()
    assert actions[0] == ("lower", []) and actions[1][0] == "stop"


def test_the_checkpoint_with_which_the_rows_start_is_good():
    run = Run(start=5000)
    assert run.read(20, saved=[4000, 5000]) == "continue" and run.last.good_step == 5000
    run.rewind(step=5010)
    assert run.read(20, bad=[5020], saved=[4000, 5000, 5010]) == "continue"
    assert run.last.good_step == 5000
