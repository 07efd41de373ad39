"""Rows on the host, and rows in logs."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from gradclip_jax.monitoring._log import read_rows, to_lines
from gradclip_jax.monitoring._rows import Names, Outcome, Rows

NAMES = Names(("wi", "h/0/wo"), ("clip_factor", "clip_factor/body"), ("embed", "h/mlp"))
ALL = sum(x for x in Outcome if str(x.name).startswith("HAS_")) + Outcome.APPLIED + Outcome.CLIPPED


def random_rows(size: int, seed: int = 0) -> Rows:
    """Rows in which everything was measured, with values that a float32 holds."""
    random = np.random.default_rng(seed)
    shapes = Rows.zeros(size, NAMES)
    rows = Rows(*(np.float64(np.float32(random.uniform(0.1, 0.9, x.shape))) for x in shapes))
    return rows._replace(
        step=np.arange(size) + 5,
        batch_id=np.arange(size) * 3,
        outcome=np.full(size, int(ALL)),
        device=np.zeros(size, int),
    )


def test_lines_of_a_log_hold_all_columns_exactly(tmp_path: pathlib.Path) -> None:
    rows = random_rows(6)
    rows.loss[2], rows.norms[3, 0, 0] = np.nan, np.inf
    rows.outcome[4] = int(Outcome.HAS_LOSS | Outcome.SKIPPED | Outcome.SKIPPED_LARGE_LOSS)
    lines = to_lines(rows, NAMES, np.ones(6, bool))
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found, names = read_rows(path)
    assert names == NAMES
    is_full = np.arange(6) != 4
    for name, expected, column in zip(Rows._fields, rows, found, strict=True):
        np.testing.assert_array_equal(
            np.float32(column[is_full]), np.float32(expected[is_full]), name
        )
    assert found.outcome[4] == rows.outcome[4]
    assert found.loss[4] == pytest.approx(rows.loss[4])
    assert not found.norms[4].any()


def test_a_log_may_have_units_only_in_some_rows() -> None:
    found, _ = read_rows(to_lines(random_rows(4), NAMES, np.arange(4) % 2 == 0))
    assert found.has(Outcome.HAS_UNITS).tolist() == [True, False, True, False]
    assert found.has(Outcome.HAS_GRADIENT).all()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"step": 3, "loss": 2, "grad_norm": NaN}\n{"step": 4, "eval_loss": 1}\n{"st',
         [(3, 2, math.nan)]),
        ("a.csv", "step,loss,grad_norm\n1,2.5,0.5\n2,inf,\n", [(1, 2.5, 0.5), (2, math.inf, 0)]),
        ("trainer_state.json", '{"log_history": [{"step": 20, "loss": 1.5, "grad_norm": 2.0}]}',
         [(20, 1.5, 2)]),
        ("a.log", "hello\n iteration   12/ 200 | lm loss: 1.5E+00 | grad norm: inf |\n",
         [(12, 1.5, math.inf)]),
        ("b.log", "{'loss': 1.25, 'grad_norm': 0.5}\n{'loss': -.5}\n", [(0, 1.25, 0.5), (1, -0.5, 0)]),
        ("c.jsonl", '{"g/step": 1, "g/loss": 1, "g/gradient_norm": 2, "lr": 1}', [(1, 1, 2)]),
        ("d.jsonl", '{"step": 1, "train/loss": 1, "eval/loss": 2}', [(1, 1, 0)]),
    ],
)  # fmt: skip
def test_logs_of_other_trainers(
    name: str, text: str, expected: list[Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / name).write_text(text)
    if "{" in text and text.endswith("st"):
        with pytest.warns(UserWarning, match="damaged lines: 3"):
            rows, _ = read_rows(tmp_path / name)
    else:
        rows, _ = read_rows(tmp_path / name)
    found = np.stack([rows.step, rows.loss, rows.norms[:, 0, 0]], 1)
    np.testing.assert_array_equal(found, expected)


def test_repeated_and_rewound_steps_are_replaced() -> None:
    steps = [0, 1, 2, 3, 2, 3, 4]
    log: list[dict[str, Any]] = [{"step": x, "loss": float(i)} for i, x in enumerate(steps)]
    rows, _ = read_rows(log)
    assert (rows.step.tolist(), rows.loss.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 4, 5, 6])
    rows, _ = read_rows([*log, {"rewind_to": 3}])
    assert rows.step.tolist() == [0, 1, 2]


def test_counters_of_metrics_tell_what_was_skipped_and_held() -> None:
    log = [
        {"loss": 1.0, "skipped_nonfinite": 0, "mini_step": 1},
        {"loss": 1.0, "skipped_nonfinite": 1, "mini_step": 1},
        {"loss": 1.0, "skipped_nonfinite": 1, "mini_step": 0, "clip_factor": 0.5},
    ]
    rows, _ = read_rows(log)
    flags = [Outcome(x) & ~Outcome.HAS_LOSS for x in rows.outcome.tolist()]
    skipped = Outcome.SKIPPED | Outcome.SKIPPED_NONFINITE
    assert flags == [Outcome.HELD, skipped, Outcome.APPLIED | Outcome.CLIPPED]


@pytest.mark.parametrize(
    ("log", "match"),
    [
        ([], "must be a log with a loss or a gradient norm"),
        ([{"accuracy": 1.0}], "Log `loss` or `gradient_norm`"),
        ([{"g/loss": 1.0, "d/loss": 2.0}], "prefix='d/'"),
        (3, "must be a log"),
    ],
)
def test_logs_that_cannot_be_read(log: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_rows(log)


def test_the_checksum_differs_for_other_names() -> None:
    names = [Names(("a", "b")), Names(("b", "a")), Names(("a\nb",)), Names(("a",), (), ("b",))]
    assert len({x.checksum for x in names}) == len(names)
    assert Names(("a",), ("clip_factor",)).checksum == Names(("a",)).checksum
