"""Logs: rows as lines and back, and the logs of other trainers."""

import json
import math

import numpy as np
import pytest

from gradclip_jax.diagnostics import Incident
from gradclip_jax.monitoring._log import read_lines, to_json
from gradclip_jax.monitoring._rows import Names, Outcome, Rows, to_lines, to_rows

NAMES = Names(("wi", "h/0/wo"), ("clip_factor", "clip_factor/body"))
ALL = Outcome.APPLIED | Outcome.CLIPPED | Outcome.HAS_LOSS | Outcome.HAS_BATCH_ID
ALL |= Outcome.HAS_GRADIENT | Outcome.HAS_UPDATE | Outcome.HAS_PARAMETER | Outcome.HAS_UNITS


def read(log, **options):
    return to_rows(read_lines(log, **options))[:2]


def random_rows(size):
    """Rows in which everything was measured, with values that a float32 holds."""
    random = np.random.default_rng(0)
    shapes = Rows.zeros(size, NAMES)
    rows = Rows(*(np.float64(np.float32(random.uniform(0.1, 0.9, x.shape))) for x in shapes))
    step = np.arange(size)
    outcome, device = np.full(size, int(ALL)), np.zeros(size, int)
    limits = np.zeros((size, 2))  # these are in the incidents
    columns = {"step": step + 5, "batch_id": 3 * step, "outcome": outcome, "device": device}
    return rows._replace(limits=limits, **columns)


@pytest.mark.parametrize("prefix", ["", "g/"])
def test_lines_of_a_log_hold_all_columns_exactly(prefix, tmp_path):
    rows = random_rows(6)
    rows.loss[2], rows.norms[3, 0, 0] = np.nan, np.inf
    rows.outcome[4] = int(Outcome.HAS_LOSS | Outcome.SKIPPED | Outcome.SKIPPED_LARGE_LOSS)
    path = tmp_path / "run.jsonl"
    lines = to_lines(rows, NAMES, np.ones(6, bool))
    path.write_text(
        "\n".join(json.dumps({prefix + key: x for key, x in line.items()}) for line in lines)
    )
    found, names = read(path)
    assert names == NAMES
    is_full = np.arange(6) != 4
    for name, expected, column in zip(Rows._fields, rows, found, strict=True):
        np.testing.assert_array_equal(column[is_full], expected[is_full], name)
    assert found.outcome[4] == rows.outcome[4] and found.loss[4] == rows.loss[4]
    assert not found.norms[4].any()


TEXT = [
    ("{'loss': 2.5, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.1}", 0, 2.5, math.nan),
    (" iteration   100/  9000 | lm loss: 6.75E+00 | grad norm: inf |", 100, 6.75, math.inf),
    ("step:25/6200 train_loss:3.25 train_time:100ms step_avg:10ms", 25, 3.25, 0),
    ("[12:00:00] INFO step=17 train/loss=2.5 train/grad_norm=.75 lr=1e-4", 17, 2.5, 0.75),
    ("gnorm 1.5 | aux_loss 0.1 | loss inf | global_step 9", 9, math.inf, 1.5),
    ("step 250: train loss -4.5, val loss 4.75", 250, -4.5, 0),
]
OTHER_LINES = "Loading the weights\n{}\nstep 5 val_loss 1.0\nval loss: 2.0\nno loss of 3 files"
FILES = [
    (
        "a.jsonl",  # half a line at the end
        '{"step": 3, "loss": 2, "grad_norm": NaN}\n{"step": 4, "eval_loss": 1}\n{"step": 5, "loss',
        [(3, 2, math.nan)],
    ),
    (
        "a.csv",  # spaces, and lines of other lengths
        "step, train/loss, train/grad_norm\n1, 2.5, 1.5\n2, inf\n3, 2, 1, 0\n",
        [(1, 2.5, 1.5), (2, math.inf, 0), (3, 2, 1)],
    ),
    ("b.json", '{"log_history": [{"step": 2, "loss": 1, "grad_norm": 3.0}, {}]}', [(2, 1, 3)]),
    (
        "c.json",  # the last line has the mean of all losses
        '{"log_history": [{"step": 2, "loss": 1}, {"step": 2, "train_loss": 9, "train_runtime": 3}]}',
        [(2, 1, 0)],
    ),
    ("b.csv", "\ufeffstep,loss,norm\n7,2,1", [(7, 2, 1)]),
    ("c.jsonl", '{"train/step": 1, "train/loss": 1, "train/norm": 2, "eval/loss": 1}', [(1, 1, 2)]),
    ("e.jsonl", '{"step": 1, "loss": 1, "ae/norm": 5}\n{"step": 1, "norm": 2}', [(1, 1, 2)]),
    *(("train.log", OTHER_LINES.format(line), [values]) for line, *values in TEXT),
]


@pytest.mark.parametrize(("name", "text", "expected"), FILES)
def test_logs_of_other_trainers(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    rows, names = read(tmp_path / name)
    found = np.stack([rows.step, rows.loss, rows.norms[:, 0, 0]], 1)
    np.testing.assert_array_equal(found, expected)
    assert names == Names()


def test_repeated_and_rewound_steps_are_replaced():
    steps = [0, 1, 2, 3, 2, 3, 4]
    log = [{"step": x, "loss": float(i)} for i, x in enumerate(steps)]
    rows, _ = read(log)
    assert (rows.step.tolist(), rows.loss.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 4, 5, 6])
    rows, _ = read([*log, {"step": 3, "rewind_to": 3}])
    assert rows.step.tolist() == [0, 1, 2]


def test_clips_that_are_not_in_a_line_have_not_clipped():
    rows, names = read([{"loss": 1.0, "clip_factor": 0.5}, {"loss": 1.0}])
    assert names.clips == ("clip_factor",) and rows.factors.tolist() == [[0.5], [1.0]]


def test_the_prefix_is_removed_before_lines_of_incidents_are_left_out():
    # An incident follows the rows of its read, so that its step is earlier than the last one.
    incident = to_json(Incident(4, ("loss",), "step 4: applied, loss 9")._asdict())
    log = [*({"step": i, "loss": 1.0} for i in range(9)), incident]
    rows, _ = read([{f"g/{key}": x for key, x in line.items()} for line in log])
    assert rows.step.tolist() == list(range(9)) and rows.loss[4] == 1
