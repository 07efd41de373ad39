"""A monitor on the host: reads, restarts, rewinds, the log, the summary and the plot."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from gradclip_jax.diagnostics import read_log
from gradclip_jax.monitoring._layout import MEASURED
from gradclip_jax.monitoring.host._rows import Rows

PARAMS = {"a": np.ones(2, "f"), "b": np.ones(3, "f")}
TX = gcx.watch(optax.chain(gcx.clip_by_global_norm(1.0), optax.sgd(0.1)), history=16)
UPDATE = jax.jit(TX.update)


def grads_of(step, seed=0, bad=()):
    rng = np.random.default_rng((seed, step))
    grads = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype("f"), PARAMS)
    return grads | ({"b": grads["b"] * np.nan} if step in bad else {})


def train(state, first, last, update=UPDATE, **options):
    """Take the steps from `first` to `last - 1`."""
    for i in range(first, last):
        loss = np.float32(100 - i)
        _, state = update(grads_of(i, **options), state, PARAMS, value=loss, batch_id=i)
    return state


@jax.jit
def one_step(size):
    return TX.update(jax.tree.map(lambda x: x * size, PARAMS), TX.init(PARAMS), PARAMS)[1]


def scan_of_vmap(losses):
    """Return the stack of rows of a scan over steps, each of which trains several runs."""

    def step(states, _):
        states = jax.vmap(lambda state, x: TX.update(PARAMS, state, PARAMS, value=x)[1])(
            states, losses
        )
        return states, jax.vmap(gcx.last_row)(states)

    return jax.lax.scan(step, jax.vmap(lambda _: TX.init(PARAMS))(losses), length=3)[1]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("every", [5, 16])
def test_rows_and_incidents_do_not_depend_on_how_often_the_state_is_read(every):
    monitor, state, rows = gcx.Monitor(PARAMS), TX.init(PARAMS), []
    for first in range(0, 80, every):
        state = train(state, first, first + every, bad=(30, 31, 60))
        report = monitor.read(state)
        rows.append(report.rows)
        assert (report.step, report.lost_rows) == (first + every, 0)
        assert monitor.read(state).rows.step.size == 0  # nothing is read twice
    assert monitor.read(train(state, 80, 100)).lost_rows == 4  # the ring has 16 rows
    rows = Rows.concatenate(rows)
    assert rows.step.tolist() == rows.batch_id.tolist() == list(range(80))
    assert rows.loss.tolist() == list(range(100, 20, -1))
    found = [(x.step, x.leaf) for x in monitor.incidents if "nan" in x.kinds]
    assert found == [(30, "b"), (31, "b"), (60, "b")]


def test_a_stack_of_rows_from_scan_is_read_like_the_ring():
    def step(state, grads):
        state = TX.update(grads, state, PARAMS, value=2.0)[1]
        return state, gcx.last_row(state)

    grads = jax.tree.map(lambda x: np.arange(30, dtype="f")[:, None] * x, PARAMS)
    state, stack = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(TX.init(PARAMS), grads)
    monitor = gcx.Monitor(PARAMS)
    rows, ring = monitor.read(stack).rows, gcx.Monitor(PARAMS).read(state).rows
    assert rows.step.tolist() == list(range(30)) and monitor.names.clips == ("clip_factor",)
    np.testing.assert_allclose(rows.norms[:, 0, 0], np.arange(30) * 5**0.5, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, ring, rows.take(slice(14, None)))
    assert gcx.Monitor(PARAMS).read(gcx.last_row(state)).rows.step.tolist() == [29]


def test_rows_of_open_windows_are_empty_or_repeated():
    tx = gcx.accumulate_gradients(TX, 2)
    monitor, state, stack = gcx.Monitor(PARAMS), tx.init(PARAMS), []
    update = jax.jit(tx.update)
    assert monitor.read(state).rows.step.size == 0
    for i in range(5):
        state = update(grads_of(i), state, PARAMS)[1]
        stack.append(gcx.last_row(state))
    stack = jax.tree.map(lambda *x: np.stack(x), *stack)
    assert monitor.read(stack).rows.step.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("state", "options", "error", "match"),
    [
        (lambda: optax.sgd(1.0).init(PARAMS), {}, TypeError, "got tuple"),
        (lambda: TX.init({"x": PARAMS["a"], "b": PARAMS["b"]}), {}, ValueError, "other names"),
        (lambda: TX.init(PARAMS), {"granularity": "global"}, ValueError, "granularity"),
        (lambda: TX.init(PARAMS), {"trainable": {"a": True, "b": False}}, ValueError, "trainable"),
        (lambda: (TX.init(PARAMS), TX.init(PARAMS)), {}, TypeError, r"got \[0\], \[1\]"),
        (lambda: jax.vmap(lambda _: TX.init(PARAMS))(jnp.ones(2)), {}, ValueError, r"x\[i\]"),
        (lambda: gcx.last_row(jax.vmap(one_step)(jnp.arange(2.0))), {}, ValueError, r"x\[i\]"),
        (lambda: scan_of_vmap(jnp.arange(2.0)), {}, ValueError, r"x\[:, i\]"),
    ],
)
def test_states_that_cannot_be_read_raise(state, options, error, match):
    with pytest.raises(error, match=f"^Monitor.read: .*{match}"):
        gcx.Monitor(PARAMS, **options).read(state())


def test_a_monitor_is_told_which_of_two_states_it_reads():
    state = train(TX.init(PARAMS), 0, 4), train(TX.init(PARAMS), 0, 2)
    found = [gcx.Monitor(PARAMS, which=i).read(state).rows.step.tolist() for i in (0, 1)]
    assert found == [[0, 1, 2, 3], [0, 1]]
    assert len(gcx.incidents(state, PARAMS, which=0)) == 0
    assert len(gcx.incidents(state, PARAMS, which=1, trainable=None)) == 0
    for call in (gcx.Monitor(PARAMS, which=2).read, lambda x: gcx.incidents(x, PARAMS, which=2)):
        with pytest.raises(ValueError, match="`which`.*2 states"):
            call(state)
    with pytest.raises(TypeError, match="one state of `watch`"):
        gcx.last_row(state)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pickle", "flax", "equinox", "orbax", "nnx"])
def test_a_checkpoint_of_any_library_holds_the_rows(library, tmp_path):
    state, empty = train(TX.init(PARAMS), 0, 9, bad=(5,)), TX.init(PARAMS)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    if library == "pickle":
        restored = pickle.loads(pickle.dumps(state))
    elif library == "flax":
        serialization = pytest.importorskip("flax.serialization")
        restored = serialization.from_bytes(empty, serialization.to_bytes(state))
    elif library == "equinox":
        eqx = pytest.importorskip("equinox")
        eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
        restored = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", empty)
    elif library == "orbax":
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", empty)
    else:
        nnx = pytest.importorskip("flax.nnx")
        restored = jax.tree.map(nnx.Variable, state)  # as `nnx.Optimizer` keeps them
    found, expected = (gcx.Monitor(PARAMS).read(x) for x in (restored, state))
    assert str(found.incidents) == str(expected.incidents) and found.incidents
    jax.tree.map(np.testing.assert_array_equal, found.rows, expected.rows)


# Logs, restarts and rewinds


def test_the_log_has_every_step_and_the_norms_of_units_around_incidents(tmp_path):
    path = tmp_path / "run.jsonl"
    monitor, state, seen = gcx.Monitor(PARAMS, log=path), TX.init(PARAMS), []
    called = gcx.Monitor(PARAMS, log=seen.append)
    for first in range(0, 96, 16):
        state = train(state, first, first + 16, bad=(70,))
        monitor.read(state), called.read(state)
    steps = [line for line in lines_of(path) if {"sentence", "action"}.isdisjoint(line)]
    assert [line["step"] for line in steps] == list(range(96))
    with_units = [line["step"] for line in steps if "gradient_norm/b" in line]
    assert with_units == [0, 50, *range(64, 79)]  # the rows of the read with the incident
    assert steps[70]["gradient_norm"] == "nan" and steps[3]["outcome"] == "applied clipped"
    for log in (read_log(path), read_log([{f"g/{key}": x for key, x in y.items()} for y in seen])):
        assert log.names == monitor.names and log.rows.step.tolist() == list(range(96))
        assert [str(x) for x in log.incidents] == [str(x) for x in monitor.incidents]


@pytest.mark.parametrize("place", [0, 10, 17])  # the first row, a bad row, an incident
def test_a_function_that_fails_at_a_line_is_called_with_no_other_line_twice(place):
    expected, seen, calls = [], [], []

    def log(line):
        calls.append(line)
        if len(calls) == 1 + place:
            raise OSError("no connection")
        seen.append(line)

    whole, monitor = gcx.Monitor(PARAMS, log=expected.append), gcx.Monitor(PARAMS, log=log)
    state = train(TX.init(PARAMS), 0, 36, bad=(30,))
    report = whole.read(state)
    with pytest.raises(OSError, match="no connection"):
        monitor.read(state)
    assert str(monitor.report) == str(report) and monitor.incidents == whole.incidents
    state = train(state, 36, 40)
    assert str(monitor.read(state)) == str(whole.read(state))
    assert str(seen) == str(expected) and len(calls) == len(seen) + 1


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_rewind_the_log_marks_the_lines_that_were_replaced(tmp_path, restarts):
    path = tmp_path / "run.jsonl"
    monitor, checkpoint = gcx.Monitor(PARAMS, log=path), train(TX.init(PARAMS), 0, 12)
    monitor.read(checkpoint), monitor.read(train(checkpoint, 12, 24))
    if restarts:
        monitor = gcx.Monitor(PARAMS, log=path, resume=True)
    report = monitor.read(train(checkpoint, 12, 20, seed=1))
    assert (report.step, report.rows.step.tolist()) == (20, list(range(12, 20)))
    state = train(checkpoint, 12, 28, seed=1)
    assert monitor.read(state).rows.step.tolist() == list(range(20, 28))
    lines = lines_of(path)
    assert [x["rewind_to"] for x in lines if "rewind_to" in x] == [12]
    assert [x["step"] for x in lines if x.get("step") == 15] == [15, 15]  # both lines are kept
    rows, expected = read_log(path).rows, gcx.Monitor(PARAMS).read(state).rows
    assert rows.step.tolist() == list(range(28))
    np.testing.assert_allclose(rows.norms[12:, 0, 0], expected.norms[:, 0, 0], rtol=1e-6)
    assert monitor.summary().startswith("steps 0 to 27: 28 applied")


@pytest.mark.parametrize("first", [5, 7])  # before the next step or after it
def test_a_state_that_goes_back_without_a_rewind_is_one_incident(first):
    monitor, early = gcx.Monitor(PARAMS), train(TX.init(PARAMS), 0, 5)
    late = train(early, 5, 10)
    assert not [*monitor.read(late).incidents, *monitor.read(late).incidents]
    reports = [monitor.read(train(early, 5, last, seed=1)) for last in (first, 9)]
    assert [(x.step, x.kinds) for report in reports for x in report.incidents] == [(5, ("state",))]
    assert [*reports[0].rows.step, *reports[1].rows.step] == [5, 6, 7, 8]


def test_a_rewind_after_which_all_rows_repeat_exactly_counts():
    monitor, first, actions = gcx.Monitor(PARAMS), TX.init(PARAMS), []
    for _ in range(3):
        state = train(first, 0, 12, bad=range(5, 8))
        actions += [monitor.read(state, saved=[0]).action for _ in range(2)]
    assert actions == [*["rewind"] * 2, *["lower"] * 2, *["stop"] * 2]


def test_rows_with_equal_norms_and_another_loss_are_new():
    def state(loss):
        return UPDATE(grads_of(0), TX.init(PARAMS), PARAMS, value=loss, batch_id=0)[1]

    monitor = gcx.Monitor(PARAMS)
    assert monitor.read(state(2.0)).rows.loss.tolist() == [2.0]
    assert monitor.read(state(3.0)).rows.loss.tolist() == [3.0]


def test_no_row_is_lost_after_a_rewind_over_more_rows_than_the_monitor_keeps(tmp_path):
    path, early = tmp_path / "run.jsonl", train(TX.init(PARAMS), 0, 40)
    line = {"outcome": "applied", "loss": 1.0}
    path.write_text("".join(json.dumps({"step": i} | line) + "\n" for i in range(2000)))
    monitor = gcx.Monitor(PARAMS, log=path, resume=True)
    report = monitor.read(train(early, 40, 44))
    assert report.rows.step.tolist() == list(range(28, 44)) and report.lost_rows == 0
    assert read_log(path).rows.loss[-16:].tolist() == list(range(72, 56, -1))


def test_another_history_or_clip_continues_at_the_same_step():
    tx = gcx.watch(optax.sgd(0.1), history=8)
    state = gcx.convert_state(tx, train(TX.init(PARAMS), 0, 5), PARAMS)
    assert gcx.Monitor(PARAMS).read(train(state, 5, 7, jax.jit(tx.update))).rows.step.tolist() == [
        5,
        6,
    ]


def test_a_monitor_continues_the_run_of_its_log(tmp_path):
    path = tmp_path / "run.jsonl"
    state = train(TX.init(PARAMS), 0, 16, bad=(3,))
    gcx.Monitor(PARAMS, log=path).read(state)
    with path.open("a") as file:
        file.write('{"step": 16, "lo')  # the process was killed
    monitor = gcx.Monitor(PARAMS, log=path, resume=True)
    assert [x.step for x in monitor.incidents] == [3] and monitor.report.step == 16
    report = monitor.read(train(state, 16, 20))
    assert report.rows.step.tolist() == [16, 17, 18, 19] and report.lost_rows == 0
    assert monitor.summary().startswith("steps 0 to 19: 20 applied")
    assert read_log(path).rows.step.tolist() == list(range(20))


def test_a_file_that_could_not_be_written_is_written_at_the_next_read(tmp_path):
    path, state = tmp_path / "folder" / "a.jsonl", train(TX.init(PARAMS), 0, 16, bad=[9])
    path.parent.mkdir()
    monitor = gcx.Monitor(PARAMS, log=path)
    path.parent.rmdir()
    with pytest.raises(OSError):
        monitor.read(state)
    path.parent.mkdir()
    monitor.read(state)
    found = lines_of(path)
    assert [x["step"] for x in found if "outcome" in x] == list(range(16))
    assert len(monitor.incidents) == sum("kinds" in x for x in found) == 1


def test_a_function_of_the_rows_replaces_the_policy_and_its_decision_is_logged_once(tmp_path):
    def policy(report):
        is_large = report.rows.norms[:, 0, 0] > 100
        if not is_large.any():
            return report
        batch_ids = list(report.rows.batch_id[is_large])  # integers of NumPy
        return report._replace(action="rewind", reason="norm above 100", batch_ids=batch_ids)

    monitor = gcx.Monitor(PARAMS, log=tmp_path / "a.jsonl", policy=policy)
    state = train(TX.init(PARAMS), 0, 10)
    assert monitor.read(state).action == "continue"
    large = jax.tree.map(lambda x: 1000 * x, grads_of(10))
    _, state = UPDATE(large, state, PARAMS, value=np.float32(1), batch_id=10)
    report = monitor.read(state)
    assert (report.action, report.batch_ids, report.reason) == ("rewind", [10], "norm above 100")
    assert monitor.read(train(state, 11, 15)).action == "rewind"  # until the run is rewound
    assert sum("action" in line for line in lines_of(tmp_path / "a.jsonl")) == 1
    resumed = gcx.Monitor(PARAMS, log=tmp_path / "a.jsonl", resume=True)
    assert (resumed.report.action, resumed.report.batch_ids) == ("rewind", [10])

    keep_on = gcx.Monitor(PARAMS, policy=lambda x: x._replace(action="continue"))
    state = train(TX.init(PARAMS), 0, 16, bad=range(5, 16))
    assert keep_on.read(state).action == "continue"
    with pytest.raises(TypeError, match="^Monitor: `policy` must be a function"):
        gcx.Monitor(PARAMS, policy=3)
    for policy in (lambda x: None, lambda x: x._replace(action="restart")):
        with pytest.raises((TypeError, ValueError), match="read: `policy`"):
            gcx.Monitor(PARAMS, policy=policy).read(state)


def test_the_summary_says_in_ten_lines_what_a_run_was():
    assert gcx.Monitor(PARAMS).summary() == "no steps"
    tx = gcx.watch(gcx.skip_nonfinite(optax.chain(gcx.clip_by_global_norm(1.0), optax.sgd(0.1))))
    monitor = gcx.Monitor(PARAMS)
    rows = monitor.read(train(tx.init(PARAMS), 0, 20, jax.jit(tx.update), bad=(7, 8))).rows
    text, max_norm = monitor.summary(), gcx.diagnostics.suggest_max_norm(rows)
    assert max_norm == np.nanmedian(rows.norms[:, 0, 0])
    assert len(text.splitlines()) <= 10
    assert "steps 0 to 19: 18 applied, 17 clipped, 2 skipped, 2 skipped_nonfinite" in text
    assert "non-finite in 2 steps" in text
    assert "largest shares of the squared gradient norm: b " in text
    assert "2 (2 nan)" in text
    assert f"max_norm: {max_norm:.2g}" in text and "have skipped 2 of 20 steps" in text


@pytest.mark.parametrize(("max_norm", "word"), [(1e-2, "every"), (1e2, "no")])
def test_the_summary_says_that_a_threshold_clips_everything_or_nothing(max_norm, word):
    tx = gcx.watch(optax.chain(gcx.clip_by_global_norm(max_norm), optax.sgd(0.1)))
    monitor = gcx.Monitor(PARAMS)
    monitor.read(train(tx.init(PARAMS), 0, 5, jax.jit(tx.update)))
    assert f"max_norm: {word} step is clipped" in monitor.summary()


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")  # of matplotlib, about the layout
def test_a_plot_shows_at_most_forty_units_with_those_of_incidents_first(tmp_path):
    line = {"loss": 1.0, "gradient_norm": 3.0}
    line |= {f"{name}_norm/w{i}": 1.0 for name in ("gradient", "update") for i in range(50)}
    line |= {"update_norm": 3.0, "parameter_norm": 3.0, "parameter_norm/w0": 0.0}
    bad = {"gradient_norm/w43": np.nan, "nonfinite_elements": 1, "nonfinite_elements/w43": 1}
    monitor = read_log([line, line | bad | {"gradient_norm": np.nan}])
    figure = gcx.diagnostics.plot_log(monitor)
    assert titles(figure) == ["loss", *(f"{x} norm" for x in MEASURED)]
    heat_map = figure.axes[1]
    labels = [x.get_text() for x in heat_map.get_yticklabels()]
    assert labels[:2] == ["w43", "w0"] and heat_map.get_ylim() == (39.5, -0.5)
    assert "step 1: applied, gradient norm nan" in figure.get_supxlabel()
    monitor.rows = monitor.rows.take(slice(0, 1))  # as in a long run, without that of the incident
    figure = gcx.diagnostics.plot_log(monitor)
    assert figure.get_supxlabel() == "" and figure.axes[1].get_xlim() == (0, 1)
    figure.savefig(tmp_path / "run.png")
    figure = gcx.diagnostics.plot_log([{"loss": 1.0, "norm": 2.0}])  # of another trainer
    assert titles(figure) == ["loss", "gradient norm"]


@pytest.mark.slow
def test_a_streak_is_described_by_its_incident_with_most_kinds_and_zeros_keep_the_axis_logarithmic():
    losses = 1 + 0.1 * np.sin(np.arange(200))
    losses[150], losses[153], losses[190] = 1.9, 900, 0
    norms = np.where(np.arange(200) == 153, 100.0, 1.0)
    log = [{"loss": x, "norm": y} for x, y in zip(losses, norms, strict=True)]
    figure = gcx.diagnostics.plot_log(log)
    assert figure.get_supxlabel().startswith("step 153: applied, gradient norm 1e+02 (threshold 5)")
    assert figure.axes[0].get_yscale() == "log" and figure.axes[0].get_ylim()[0] > 0.1
