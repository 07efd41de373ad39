"""The states of docs/recovery.md: what each action needs, which wins, and what resets it."""

import numpy as np
import pytest

from gradclip_jax.diagnostics import Incident
from gradclip_jax.monitoring._policy import Policy
from gradclip_jax.monitoring._rows import Names, Outcome, Rows

GOOD = Outcome.HAS_LOSS | Outcome.HAS_GRADIENT | Outcome.HAS_BATCH_ID | Outcome.APPLIED
SKIPPED = GOOD & ~Outcome.APPLIED | Outcome.SKIPPED | Outcome.SKIPPED_NONFINITE
HELD = GOOD & ~Outcome.APPLIED | Outcome.HELD
QUIET = 32


class Run:
    """Rows that are good but where told otherwise; `batch_id` is the step plus an offset."""

    def __init__(self, start=0, saved=(), **options):
        self.policy, self.step, self.offset = Policy(**options), start, 0
        self.read(0, saved=saved)

    def read(self, count, *, bad=(), kinds=("loss",), saved=None, **columns):
        """Read `count` rows; `bad` are the steps with an incident of `kinds`."""
        rows = Rows.zeros(count, Names())
        rows.step[:] = self.step + np.arange(count)
        rows.batch_id[:] = rows.step + self.offset
        rows.loss[:] = 1 / (1 + rows.batch_id)
        rows.outcome[:] = int(GOOD)
        for name, by_step in columns.items():
            for step, value in by_step.items():
                getattr(rows, name)[step - self.step] = value
        incidents = [Incident(step, kinds, 1.0) for step in bad]
        self.step += count
        self.last = self.policy.update(rows, incidents, saved)
        return self.last.action

    def rewind(self, *, step=None, leave_out=True):
        before, self.step = self.step, self.last.good_step if step is None else step
        if leave_out:
            self.offset += before - self.step
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
    assert run.read(12) == "continue"
    assert run.read(1) == "save"
    run.read(20, bad=[60], saved=[0, 53])
    assert run.read(19) == "continue" and run.last.good_step == 0
    assert run.read(1) == "save" and run.last.good_step == 53
    assert run.read(40, bad=[100], kinds=("note",)) == "save"


def test_rows_before_a_suspicious_one_confirm_within_one_read():
    run = Run(saved=[0])
    run.read(40)
    assert run.read(60, bad=[90], saved=[0, 40]) == "continue" and run.last.good_step == 40


def test_a_checkpoint_that_was_not_saved_or_was_deleted_is_not_named():
    run = Run(saved=[])
    run.read(100)
    assert run.last.good_step is None
    run.read(0, saved=[40, 60])
    assert run.last.good_step == 60
    run.read(0, saved=[40])
    assert run.last.good_step == 40


@pytest.mark.parametrize("bad", [[50], [50, 51], [50, 60, 70, 80]])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_single_outliers_do_not_rewind(bad, size):
    run = Run(saved=[0])
    for start in range(0, 100, size):
        assert run.read(size, bad=[x for x in bad if start <= x < start + size]) in (
            "continue",
            "save",
        )


@pytest.mark.parametrize("size", [1, 5, 50])
def test_a_stretch_rewinds_to_the_good_step_without_its_batches(size):
    run, bad = Run(saved=[0]), [50, 51, 54, 60]
    for start in range(0, 100, size):
        run.read(size, bad=[x for x in bad if start <= x < start + size])
    assert run.last.action == "rewind" and run.last.good_step == 0
    assert run.last.batch_ids == tuple(range(50, 61))
    assert "steps 50 to 60" in run.last.reason


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
    assert run.read(100, bad=[50], loss=loss) == "rewind"
    assert run.last.batch_ids == tuple(range(50, 70))
    run = Run(saved=[0])
    assert run.read(60, bad=[50], loss={50: 30.0, 51: 10.0, 52: 10.0}) == "continue"


def test_an_early_stretch_needs_no_incidents():
    run = Run(saved=[0])
    assert run.read(30, loss=dict.fromkeys(range(2, 15), 30.0)) == "rewind"
    assert run.last.batch_ids == tuple(range(2, 15))
    run = Run(saved=[0])
    assert run.read(32, loss={2: 30.0}) == "continue" and run.read(3) == "save"


def test_the_action_is_repeated_until_the_run_is_rewound():
    run = Run(saved=[0])
    run.read(60, bad=[50, 51, 52])
    assert run.read(10) == "rewind" and run.read(100) == "rewind"
    decision = run.last
    run.rewind()
    assert run.read(10) == "continue"
    assert run.last.batch_ids == decision.batch_ids == (50, 51, 52)


def test_rewinds_that_do_not_help_lower_the_learning_rate_and_then_stop():
    run, actions = Run(saved=[0]), []
    for _ in range(6):
        actions.append(run.read(110, bad=[50, 51, 52]))
        if actions[-1] != "stop":
            run.rewind()
    assert actions == ["rewind", "rewind", "rewind", "lower", "stop", "stop"]
    assert "3 rewinds and a lower learning rate did not help" in run.last.reason


def test_rewinds_are_forgotten_after_1000_rows():
    run = Run(saved=[0], max_rewinds=1)
    assert run.read(70, bad=[50, 51, 52]) == "rewind"
    run.rewind()
    run.read(1000)
    assert run.read(100, saved=[0, 1000]) == "save"
    assert run.read(70, bad=[1110, 1111, 1112]) == "rewind" and run.last.good_step == 1000


def test_checkpoints_of_superseded_rows_do_not_count_until_they_are_deleted():
    run = Run(saved=[0])
    run.read(40)
    run.read(20, bad=[45, 46, 47], saved=[0, 40])
    assert run.last[::2] == ("rewind", 0)
    run.rewind()
    run.read(100)
    assert run.last.good_step == 0
    run.read(0, saved=[0])
    run.read(0, saved=[0, 40])
    assert run.last.good_step == 40


def test_without_a_good_checkpoint_a_finite_stretch_is_only_reported():
    run = Run()
    assert run.read(90, bad=range(50, 53)) == "save"
    assert run.read(9, norms={95: np.nan}) == "stop"
    assert "no checkpoint" in run.last.reason


def test_non_finite_parameters_rewind_at_once_and_only_the_batches_up_to_them_are_left_out():
    run, nan = Run(saved=[0]), np.full((3, 1), np.nan)
    later = {step: nan for step in range(50, 70)}
    assert run.read(70, bad=range(50, 70), kinds=("nan",), norms=later) == "rewind"
    assert run.last.batch_ids == (50,)


def test_a_non_finite_gradient_that_was_skipped_does_not_rewind():
    run, nan = Run(saved=[0]), np.array([[np.nan], [np.nan], [1.0]])
    skipped = {step: int(SKIPPED) for step in range(50, 81)}
    bad = dict(bad=range(50, 81), kinds=("nan", "skipped"))
    assert run.read(100, **bad, norms=dict.fromkeys(skipped, nan), outcome=skipped) == "continue"


def test_32_consecutive_skipped_steps_rewind():
    run = Run(saved=[0])
    outcome = {step: int(SKIPPED) for step in range(50, 90)}
    assert run.read(100, bad=outcome, kinds=("nan", "skipped"), outcome=outcome) == "rewind"
    assert run.last.batch_ids == tuple(range(50, 82))


def test_a_failed_guard_stops_and_an_earlier_stretch_wins():
    failed = {step: int(SKIPPED) for step in range(60, 64)}
    failed |= {step: int(SKIPPED | Outcome.GUARD_FAILED) for step in range(64, 70)}
    run = Run(saved=[0])
    assert run.read(70, outcome=failed) == "stop"
    assert "guard_failed after 5 consecutive" in run.last.reason
    run.policy.rewound(0)
    assert run.read(0) == "stop"
    run = Run(saved=[0])
    assert run.read(70, bad=[40, 41, 42], outcome=failed) == "rewind"


@pytest.mark.parametrize(("every", "limit"), [(1, 1000), (40, 1000), (200, 8 * 200)])
def test_windows_that_never_close_stop(every, limit):
    run = Run()
    run.read(400, outcome={step: int(HELD) for step in range(400) if (step + 1) % every})
    held = dict.fromkeys(range(400, 400 + limit), int(HELD))
    assert run.read(limit, outcome=held) == "save"
    empty = int(HELD | Outcome.EMPTY_WINDOW)
    assert run.read(1, outcome={400 + limit: empty}) == "stop"
    assert "no window closed" in run.last.reason


def test_replicas_that_differ_rewind_and_the_same_device_again_is_the_hardware():
    run, differs = Run(saved=[0]), int(GOOD | Outcome.REPLICA_DIFFERS)
    columns = {"outcome": {50: differs}, "device": {50: 3}}
    assert run.read(60, bad=[50], kinds=("replica",), **columns) == "rewind"
    assert "device 3" in run.last.reason and run.last.batch_ids == ()
    run.rewind(leave_out=False)
    assert run.read(60, bad=[50], kinds=("replica",), **columns) == "stop"
    assert "hardware" in run.last.reason


def test_a_restarted_job_repeats_rows_without_a_rewind():
    run = Run(saved=[0])
    run.read(60, bad=[55, 56])
    run.rewind(step=50, leave_out=False)
    assert run.read(30, bad=[57]) == "continue"


def test_a_policy_from_a_log_knows_a_pending_rewind_and_how_many_there_were():
    run, events = Run(saved=[0]), []
    for _ in range(2):
        run.read(70, bad=[50, 51, 52])
        events += [{"step": 70, **run.last._asdict()}, {"rewind_to": 0}]
        run.rewind()
    again = Run(saved=[0], events=events[:-1])
    assert again.last.action == "rewind"
    assert again.last.batch_ids == (50, 51, 52, 120, 121, 122)
    again = Run(saved=[0], events=events)
    actions = []
    for _ in range(3):
        actions.append(again.read(70, bad=[50, 51, 52]))
        again.rewind()
    assert actions == ["rewind", "lower", "stop"]


def test_a_policy_from_a_log_continues_with_the_rows_of_its_tail():
    run = Run(start=5000, events=[{"rewind_to": 100}])
    rows = Rows.zeros(60, Names())
    rows.step[:] = np.arange(5000, 5060)
    rows.outcome[:] = int(GOOD)
    bad = [Incident(step, ("loss",), 1.0) for step in (5030, 5031, 5032)]
    run.policy.resume(rows, bad)
    run.rewind(step=5040)
    assert run.read(20, saved=[4000, 5040]) == "continue" and run.last.good_step == 4000
    assert run.read(20) == "save" and run.last.good_step == 5040


def test_a_policy_from_a_log_that_has_no_rows_starts_with_the_next():
    run = Run(start=5000, events=[{"rewind_to": 100}])
    assert run.read(20, saved=[4000, 5000]) == "continue" and run.last.good_step == 5000
    run.rewind(step=5010)
    assert run.read(20, bad=[5020], saved=[4000, 5000, 5010]) == "continue"
    assert run.last.good_step == 5000
