"""Logs: rows as lines and back, and the logs of other trainers."""

import json
import math
import pathlib
import tempfile
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from files import python
from gradclip_jax._errors import ArgumentError
from gradclip_jax.diagnostics import Incident, read_log
from gradclip_jax.monitoring._layout import Names, Outcome
from gradclip_jax.monitoring.host._lines import to_incidents, to_lines, to_rows
from gradclip_jax.monitoring.host._log import read_columns, to_json
from gradclip_jax.monitoring.host._rows import Rows

NAMES = Names(("wi", "h/0/wo"), ("clip_factor", "clip_factor/body"))
ALL = Outcome.APPLIED | Outcome.CLIPPED | Outcome.HAS_LOSS | Outcome.HAS_BATCH_ID
ALL |= Outcome.HAS_GRADIENT | Outcome.HAS_UPDATE | Outcome.HAS_PARAMETER | Outcome.HAS_UNITS


def read(log, **options):
    return to_rows(read_columns(log, **options))[:2]


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
TEXT += [
    ("step 1 loss .5e-3 norm 1.", 1, 0.5e-3, 1),
    ("step 1,234 | loss: 2,000.5", 1234, 2000.5, 0),
    ("step 3 validation loss 9.0, loss 2.5; [val] loss: 7", 3, 2.5, 0),
    ("Iteration 7: Train Loss = 2.5 param norm: 9 Grad Norm: 1", 7, 2.5, 1),
    ("step 8 loss n/a norm 2", 8, 0, 2),
]
DEEP, HUGE = "[" * 100_000, "1" + "0" * 400
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
    ("d.json", '[{"step": 1, "loss": 2}, {"step": 2, "loss": 3}]', [(1, 2, 0), (2, 3, 0)]),
    ("d.json", '[\n {"step": 1,\n  "loss": 2}\n]', [(1, 2, 0)]),
    ("f.jsonl", f'{{"a": {DEEP}\n{{"step": 1, "loss": 2, "norm": -{HUGE}}}', [(1, 2, -math.inf)]),
    (
        "g.jsonl",
        '{"step": 1, "loss": 2, "a": "\u2028"}\n{"step": 2, "loss": 3}',
        [(1, 2, 0), (2, 3, 0)],
    ),
    ("g.csv", "step,loss,a\n1,2,x\u2028y\n2,3,\n", [(1, 2, 0), (2, 3, 0)]),
    ("h.csv", "step,loss\n1,2\n2,3\nstep,norm,loss\n2,5,4\n", [(1, 2, 0), (2, 4, 5)]),  # resumed
    ("i.csv", 'step,loss,norm\n"1,000",n/a,2\n', [(1000, 0, 2)]),
    ("j.csv", "Step,Loss,Grad Norm\n1,2,3\n", [(1, 2, 3)]),
    ("k.tsv", "Step\tLoss\n1\t2\n", [(1, 2, 0)]),
    # Lightning, TensorBoard (one file for each number), Keras, and W&B
    ("l.jsonl", '{"trainer/global_step": 7, "train/loss": 2, "optim/grad_norm": 3}', [(7, 2, 3)]),
    ("run-tag-train_loss.csv", "Wall time,Step,Value\n1.5,7,2\n", [(7, 2, 0)]),
    ("run-tag-grad_norm.csv", "Wall time,Step,Value\n1.5,7,2\n", [(7, 0, 2)]),
    ("history.json", '{"loss": [2, 3], "val_loss": [9, 9]}', [(0, 2, 0), (1, 3, 0)]),
    ("keras.csv", "epoch,accuracy,loss,val_loss\n0,.5,2,9\n1,.6,3,9\n", [(0, 2, 0), (1, 3, 0)]),
    (
        "wandb.csv",
        '"Step","fun - train/loss","fun - train/loss__MIN","fun - _step","fun - train/grad_norm"\n"1","2","0","1","3"\n',
        [(1, 2, 3)],
    ),
    *(("train.log", OTHER_LINES.format(line), [values]) for line, *values in TEXT),
]


@pytest.mark.parametrize(("name", "text", "expected"), FILES)
def test_logs_of_other_trainers(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    rows, names = read(tmp_path / name)
    found = np.stack([rows.step, rows.loss, rows.norms[:, 0, 0]], 1)
    np.testing.assert_array_equal(found, expected)
    assert names == Names()


def test_runs_in_a_text_whose_prefixes_differ_only_in_a_digit_are_different(tmp_path):
    (tmp_path / "runs.log").write_text("g1/loss: 2 g2/loss: 3\ng1/loss: 4 g2/loss: 5\n")
    for prefix, losses in {"g1/": [2, 4], "g2/": [3, 5]}.items():
        columns = read_columns(tmp_path / "runs.log", prefix=prefix)
        assert to_rows(columns)[0].loss.tolist() == losses


def of_steps(steps):
    return [{"step": step, "loss": float(i)} for i, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("log", "steps", "losses", "remark"),
    [
        (
            of_steps([0, 1, 2, 3, 2, 3, 4]),
            [0, 1, 2, 3, 4],
            [0, 1, 4, 5, 6],
            "2 of 7 rows were replaced by later rows; the steps go back 1 time",
        ),
        (
            [*of_steps([0, 1, 2, 3]), {"step": 2, "rewind_to": 2}],
            [0, 1],
            [0, 1],
            "2 of 4 rows were replaced by later rows; the steps go back 1 time",
        ),
        # late lines, and lines with other numbers of the same step
        (of_steps([0, 2, 1, 3]), [0, 1, 2, 3], [0, 2, 1, 3], ""),
        (
            [*of_steps([0, 1]), {"step": 0, "norm": 5.0}, {"step": 1, "norm": 6.0}],
            [0, 1],
            [0, 1],
            "",
        ),
        # resumed with other steps: more than 8 rows back
        (
            of_steps([*range(0, 200, 10), 55, 65]),
            [*range(0, 60, 10), 55, 65],
            [*range(6), 20, 21],
            "14 of 22 rows were replaced by later rows; the steps go back 1 time",
        ),
        *(
            (
                [*of_steps([0, 1]), {"step": x, "loss": 9.0}],
                [0, 1],
                [0, 1],
                "rows without a number as their step, which are left out: 1",
            )
            for x in ("a", math.nan, "inf", 2**63, 10**400, True, [1])
        ),
        (
            [{"loss": 1.0}, {"step": None, "loss": 2.0}, {"step": "", "loss": 3.0}],
            [0, 1, 2],
            [1, 2, 3],
            "",
        ),
        # keys of others that a monitor uses for other things
        ([{"loss": 1.0, "action": "left", "sentence": "hello", "outcome": "win"}], [0], [1], ""),
    ],
)
def test_steps_that_are_repeated_or_unknown(log, steps, losses, remark):
    monitor = read_log(log)
    assert (monitor.rows.step.tolist(), monitor.rows.loss.tolist()) == (steps, losses)
    assert monitor.rows.has(Outcome.APPLIED).all()
    said = [
        x.removeprefix("log: ") for x in monitor.summary().splitlines() if x.startswith("log: ")
    ]
    assert said == ([remark] if remark else [])


def test_steps_that_alternate_are_read_in_linear_time():
    start = time.process_time()
    read(of_steps([i + 1 - 2 * (i % 2) for i in range(80_000)]))
    read(of_steps([i % 2 for i in range(80_000)]))
    assert time.process_time() - start < 10  # 34 s and more if it is quadratic


NUMBERS = st.floats(allow_subnormal=False) | st.integers(-(2**40), 2**40).map(float)
TABLES = st.dictionaries(st.integers(0, 10**9), st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9)


def in_all_formats(rows):
    """Return the name and the text of files with these steps, losses and norms."""
    lines = [{"step": i, "loss": x, "grad_norm": y} for i, x, y in rows]
    history = [{**line, "epoch": 0.5} for line in lines] + [{"train_runtime": 1.0, "loss": 0.5}]
    columns = {key: [line[key] for line in lines] for key in lines[0]}
    tables = ["step,loss,grad_norm", *(f"{i},{x},{y}" for i, x, y in rows)]
    return {
        "a.jsonl": "\n".join(map(json.dumps, lines)),
        "array.json": json.dumps(lines, indent=1),
        "history.json": json.dumps(columns),
        "trainer_state.json": json.dumps({"log_history": history}),
        "a.csv": "\n".join(tables),
        "a.tsv": "\r\n".join(tables).replace(",", "\t"),
        "wandb.csv": '"Step","a - train/loss","a - train/grad_norm"\n' + "\n".join(tables[1:]),
        "a.log": "\n".join(
            f"[INFO] step={i} | lm loss: {x!r} | grad norm: {y!r} |" for i, x, y in rows
        ),
        "dicts.log": "\n".join(str(line) for line in lines),
    }


@hypothesis.given(TABLES)
@hypothesis.settings(deadline=None, max_examples=50)
@pytest.mark.slow
def test_numbers_are_the_same_in_all_formats(table):
    expected = [(step, *numbers) for step, numbers in sorted(table.items())]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in in_all_formats(expected).items():
            path = pathlib.Path(folder, name)
            path.write_text(text)
            rows, _ = read(path)
            found = np.stack([rows.step, rows.loss, rows.norms[:, 0, 0]], 1)
            np.testing.assert_array_equal(found, np.float64(expected), name)


KEYS = "step loss grad_norm gradient_norm/w action sentence rewind_to outcome"
WORDS = st.sampled_from([*KEYS.split(), "\x1b", "\ud800"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | WORDS,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=3),
    max_leaves=5,
)
LINES = st.dictionaries(WORDS | st.text(max_size=9), VALUES, max_size=6).map(json.dumps)


@pytest.mark.slow
@hypothesis.given(
    st.lists(LINES | st.text() | WORDS, max_size=6), st.sampled_from(["a.log", "a.csv", "a.json"])
)
@hypothesis.settings(deadline=None, max_examples=300)
def test_any_lines_are_read_or_give_an_error_of_this_library(lines, name):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, name)
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        try:
            monitor = read_log(path)
        except ArgumentError as error:
            assert "read_log: `log` must be " in str(error)
        else:
            assert all(x.isprintable() for x in monitor.names.units)
            assert np.all(np.diff(monitor.rows.step) > 0)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ([], "an empty log"),
        ([{"epoch": 1, "accuracy": 0.5}], "the columns 'epoch', 'accuracy'"),
        ([{"eval/loss": 1.0}], "the columns 'eval/loss'"),
        ([{"step": "a", "loss": 1.0}], "without a number as their step"),
        ([1.0], "sequence of dictionaries, got list"),
        (3, "sequence of dictionaries, got int"),
    ],
)
def test_a_log_that_is_not_read_names_its_columns(log, words):
    with pytest.raises(ArgumentError, match=f"^read_log: `log` must be .*{words}"):
        read_log(log)


def test_clips_that_are_not_in_a_line_have_not_clipped():
    rows, names = read([{"loss": 1.0, "clip_factor": 0.5}, {"loss": 1.0}])
    assert names.clips == ("clip_factor",) and rows.factors.tolist() == [[0.5], [1.0]]


def test_the_prefix_is_removed_before_lines_of_incidents_are_left_out():
    # An incident follows the rows of its read, so that its step is earlier than the last one.
    incident = to_json(Incident(4, ("loss",), "step 4: applied, loss 9")._asdict())
    log = [*({"step": i, "loss": 1.0} for i in range(9)), incident]
    rows, _ = read([{f"g/{key}": x for key, x in line.items()} for line in log])
    assert rows.step.tolist() == list(range(9)) and rows.loss[4] == 1


def test_an_incident_in_a_log_is_the_same():
    found = Incident(7, ("loss",), "step 7: applied, loss 9", loss_threshold=np.inf)
    line = json.loads(json.dumps(to_json(found._asdict())))
    assert to_incidents(read_columns([{"step": 7, "sentence": "of another trainer"}, line])) == [
        found
    ]


READ = """
import resource, sys
from gradclip_jax.monitoring.host import _lines, _log
def usage():
    x = resource.getrusage(resource.RUSAGE_SELF)
    return x.ru_utime + x.ru_stime, x.ru_maxrss / 1024
before = usage()
rows, _, _ = _lines.to_rows(_log.read_columns(sys.argv[1]))
print(len(rows.step), *(y - x for x, y in zip(before, usage())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_a_million_rows_are_read_in_less_than_a_gigabyte(name, tmp_path):
    lines = (
        {"step": i, "loss": round(2 + i / 7, 4), "grad_norm": round(1 + i / 3, 4), "lr": 3e-4}
        for i in range(10**6)
    )
    with open(tmp_path / name, "w") as file:
        if name.endswith("csv"):
            file.write("step,loss,grad_norm,lr\n")
            file.writelines(",".join(map(str, x.values())) + "\n" for x in lines)
        else:
            file.writelines(json.dumps(x) + "\n" for x in lines)
    count, seconds, mebibytes = map(float, python("-c", READ, tmp_path / name).split())
    assert count == 10**6 and mebibytes < 900
    assert seconds < 60  # 6 to 10 on a free core; reading costs no square of the rows
