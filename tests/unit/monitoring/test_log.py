"""The log of a run in numbers and in pictures."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

ONE = jnp.ones(1)
summary_of = gcx.diagnostics.summarize_log


def log_of(losses, **columns):
    rows = [{"loss": float(loss)} for loss in losses]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[key.replace("__", "/")] = float(value)
    return rows


def score64(values, window):
    """The definition, one value at a time."""
    spikes = 0
    for i, value in enumerate(values):
        past = [x for x in values[max(0, i - window) : i] if np.isfinite(x)]
        if not np.isfinite(value):
            spikes += 1
        elif len(past) >= min(window, 100):
            spikes += abs(value - np.mean(past)) > 6 * np.std(past)
    return spikes / len(values)


@pytest.mark.parametrize("window", [50, 1000])
def test_the_spike_score_is_the_share_of_values_far_from_the_recent_mean(window):
    losses = np.random.default_rng(0).normal(3.0, 0.1, 400)
    losses[[150, 151, 300]] += [5.0, -5.0, 2.0]
    losses[200] = np.nan
    summary = summary_of(log_of(losses), window=window)
    assert summary["spike_score/loss"] == pytest.approx(score64(list(losses), window))
    assert summary["spike_score/loss"] >= 3 / 400


def test_a_run_in_numbers():
    log = log_of(
        [3.0] * 4,
        clip_fraction=[0, 1, 0.5, 0],
        clip_fraction__inner_state__0=[0, 0, 0, 1],
        skipped_nonfinite=[0, 0, 1, 2],
        has_updated=[1, 1, 0, 0],
        incident_count=[0, 0, 1, 2],
        largest_share=[0.5] * 4,
    )
    assert summary_of(log) == {
        "steps": 4,
        "clipped": 0.5,
        "clipped/inner_state/0": pytest.approx(1 / 3),  # the third row repeats the second
        "incident_count": 2,
        "skipped_nonfinite": 2,
        "taken": 0.5,
        "spike_score/loss": 0,
    }


def test_a_file_of_json_lines_is_a_log(tmp_path):
    log = log_of([3.0, np.nan, 4.0])
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in log) + "\n")
    assert summary_of(path) == summary_of(str(path)) == summary_of(log)


def test_damaged_lines_are_skipped_with_a_warning(tmp_path):
    path, log = tmp_path / "run.jsonl", log_of([3.0, 4.0, 5.0])
    lines = [json.dumps(row) for row in log]
    path.write_text("\n".join([lines[0], lines[1][:9] + lines[1], "3", *lines, lines[2][:7]]))
    with pytest.warns(UserWarning, match=r"run.jsonl: skipped 3 damaged lines: 2, 3, 7") as warned:
        summary = gcx.diagnostics.summarize_log(path)
    assert summary == gcx.diagnostics.summarize_log([log[0], *log])
    assert warned[0].filename == __file__


def test_rows_repeated_after_a_resume_count_once():
    rows = [{"step": i, "loss": float(i), "has_updated": 1} for i in range(10)]
    later = [row | {"loss": -1.0} for row in rows[6:]]
    for key in ("step", "watch_step"):
        resumed = [{key: row["step"], "loss": row["loss"]} for row in rows[:9] + later]
        once = [{key: row["step"], "loss": row["loss"]} for row in rows[:6] + later]
        assert summary_of(resumed) == summary_of(once)
        assert summary_of(resumed)["steps"] == 10
    assert summary_of(rows + rows[-1:])["steps"] == 10  # a resume at the last step


def test_held_rows_count_once():
    log = log_of(
        [3.0] * 6,
        mini_step=[1, 2, 0, 1, 2, 0],
        has_updated=[0, 0, 1, 0, 0, 1],
        skipped_nonfinite=[0] * 6,
        grad_norm=[0, 0, 5, 5, 5, 2],
        clip_fraction=[0, 0, 1, 1, 1, 0],
        guard_failed=[0, 0, 0, 1, 1, 1],
    )
    found = summary_of([row | {"step": i // 3} for i, row in enumerate(log)])
    assert found["steps"] == 2 and found["taken"] == 1 and found["guard_failed"] == 1
    assert found["clipped"] == 0.5  # 5 and 2
    in_front = summary_of([row | {"grad_norm": float(i)} for i, row in enumerate(log, 1)])
    assert in_front["clipped"] == 0.6  # the first held row may repeat a norm of before the log


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize(
    ("wrap", "sizes"),
    [
        (lambda clip: gcx.accumulate_gradients(clip, 2), [5, 5, 5, 5, 0.1, 0.1]),
        (gcx.skip_nonfinite, [5, np.nan, np.nan, np.nan, 0.1, 5]),
        (
            lambda clip: gcx.skip_nonfinite(gcx.accumulate_gradients(clip, 2)),
            [5, np.nan, 5, 0.1, np.nan, np.nan, 0.1, 5, 5],
        ),
        (lambda clip: gcx.accumulate_gradients(gcx.skip_nonfinite(clip), 1), [5, 5, 0.1]),
    ],
)
def test_of_the_steps_that_ran_two_of_three_were_clipped(wrap, sizes, is_watched):
    tx = wrap(optax.chain(gcx.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state, log = tx.init(ONE), []
    for size in sizes:
        _, state = tx.update(size * ONE, state, ONE)
        extra = {"has_updated": float(gcx.has_updated(state))} if is_watched else {}
        log.append({key: float(x) for key, x in gcx.metrics(state).items()} | extra)
    assert summary_of(log)["clipped"] == pytest.approx(2 / 3)


def test_values_that_are_no_numbers_are_missing_and_names_of_numbers_are_read(tmp_path):
    rows = [{"step": i, "loss": 1.0, "text": "a\u2028b"} for i in range(3)]
    rows += [{"step": None, "loss": "nan"}, {"step": 5, "loss": [1.0, 2.0], "text": "inf "}]
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    rows[-1]["loss"] = np.ones(2)
    expected = {"steps": 5.0, "spike_score/loss": 0.25}
    assert summary_of(path) == summary_of(rows) == expected


def test_a_log_that_begins_with_a_held_micro_step_has_no_step_there():
    rows = [{"gradient_step": i // 2 + 7, "mini_step": i % 2, "clip_fraction": 1} for i in (1, 2)]
    assert summary_of(rows) == {"steps": 1.0, "clipped": 1.0}


def test_rows_of_the_same_step_are_merged():
    log = [{"step": i, "clip_fraction": float(i % 10 == 0)} for i in range(100)]
    for i in range(0, 100, 10):
        log.append({"step": i, "eval_loss": 0.5})
    log.sort(key=lambda row: row["step"])
    assert summary_of(log) == {"steps": 100, "clipped": 0.1}


def test_evaluation_rows_of_an_accumulating_run_are_no_steps():
    rows = [{"step": i, "mini_step": (i + 1) % 2, "gradient_step": (i + 1) // 2} for i in range(8)]
    log = [{"lr": 0.1}] + [x for i, row in enumerate(rows) for x in (row, {"step": i, "eval": 1.0})]
    assert summary_of(log[1:])["steps"] == summary_of(rows)["steps"] == 4


def test_a_skipped_window_is_a_step_that_was_not_taken():
    columns = {"mini_step": [1, 0, 1, 0], "has_updated": [0, 1, 0, 0]}
    found = summary_of(log_of([1.0] * 4, skipped_nonfinite=[0, 0, 0, 1], **columns))
    assert found["steps"] == 2 and found["taken"] == 0.5


def test_norms_that_were_not_measured_are_no_spikes():
    log = log_of([1.0] * 4, gradient_norm=[-1, 2, -1, 2])
    assert summary_of(log)["spike_score/gradient_norm"] == 0


def watched(steps=20, **norms):
    """A log in which these leaves have constant norms."""
    row = {f"gradient_norm/{name}": norm for name, norm in norms.items()}
    row |= {f"update_ratio/{name}": 1e-3 for name in norms}
    return [{"loss": 3.0, **row} for _ in range(steps)]


def heat_maps(figure):
    titles = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.collections}
    titles.pop("", None)  # color bars
    return titles


def table(axes, rows):
    return np.asarray(axes.collections[0].get_array()).reshape(rows, -1)


def test_the_picture_has_a_row_for_each_unit_and_the_step_as_its_axis():
    log = [{"step": 100 + 10 * i, **row} for i, row in enumerate(watched(a=3.0, b=4.0))]
    log[7]["gradient_norm/a"] = np.nan
    log[8]["gradient_norm/b"] = 0.0
    axes = heat_maps(gcx.diagnostics.plot_log(log))
    assert list(axes) == ["gradient norm", "norm of the update over norm of the parameters"]
    for axis in axes.values():
        assert [x.get_text() for x in axis.get_yticklabels()] == ["a", "b"]
        edges = axis.collections[0].get_coordinates()[0, :, 0]
        np.testing.assert_allclose(edges, 100 + 10 * np.arange(21))
    norms, bad = (
        np.ma.array(x.get_array()).reshape(2, -1) for x in axes["gradient norm"].collections
    )
    assert norms[0, 0] == 3 and norms[1, 0] == 4 and norms[1, 8] < 3
    assert np.argwhere(~np.ma.getmaskarray(bad)).tolist() == [[0, 7]]


def test_losses_of_some_steps_are_one_line_and_cells_without_a_norm_are_empty():
    log = [{"step": i, "gradient_norm/a": 1.0} for i in range(20)]
    for row in log[::2]:
        row |= {"loss": 1.0, "gradient_norm/b": 2.0}
    figure = gcx.diagnostics.plot_log(log)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [*range(0, 20, 2)]
    cells = np.ma.array(heat_maps(figure)["gradient norm"].collections[0].get_array())
    assert np.ma.getmaskarray(cells).reshape(2, -1).sum(axis=1).tolist() == [0, 10]


def test_columns_are_measured_steps_and_those_of_a_long_log_their_largest_values():
    log = watched(5000, a=3.0)
    log[1235]["gradient_norm/a"] = 7.0
    for i, row in enumerate(log):
        if i % 4 != 3:
            row.update({"gradient_norm/a": -1.0, "update_ratio/a": -1.0})
    short = table(heat_maps(gcx.diagnostics.plot_log(log[:12]))["gradient norm"], 1)
    assert short.tolist() == [[3.0, 3.0, 3.0]]
    long = table(heat_maps(gcx.diagnostics.plot_log(log))["gradient norm"], 1)
    assert long.size < 1000 and long.max() == 7 and long.min() == 3


def captions(figure):
    return figure.get_supxlabel().split("\n")


def test_incidents_are_marked_and_captioned():
    log = watched(a=3.0)
    incident = gcx.diagnostics.Incident(7, ("nan", "skipped"), np.nan, leaf="a")
    damaged = [{"sentence": "no step", "kinds": 3}, {"step": "x", "sentence": None}]
    rows = [*log[:8], *damaged, incident.to_dict(), *log[8:]]
    given = gcx.diagnostics.plot_log(log, incidents=[incident])
    for figure in (given, gcx.diagnostics.plot_log(rows)):
        assert captions(figure) == [f"1  {incident}"]
        for axes in (figure.axes[0], *heat_maps(figure).values()):
            assert 7 in [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
    assert summary_of(rows) == summary_of(log)
    for i, row in enumerate(log):
        row |= {"incident_count": int(i >= 7), "incident_kind": 33 * (i >= 7)}
    assert captions(gcx.diagnostics.plot_log(log)) == ["1  step 7: nan, skipped"]


def test_taps_have_panels_of_rms_and_kurtosis(tmp_path):
    stats = gcx.taps.make_probes(["hidden", "mlp"], num_layers=2)
    found = {key: 2.0 for key in gcx.taps.metrics(stats)}
    figure = gcx.diagnostics.plot_log([{"step": i, **found} for i in range(3)], dark=True)
    axes = heat_maps(figure)
    assert list(axes) == ["RMS of activations", "kurtosis of activations"]
    names = [x.get_text() for x in axes["RMS of activations"].get_yticklabels()]
    assert names == gcx.taps.names(stats)
    figure.savefig(tmp_path / "run.png")


@pytest.mark.slow
def test_the_picture_is_900_pixels_wide_and_transparent(tmp_path):
    from matplotlib.image import imread

    for dark in (False, True):
        figure = gcx.diagnostics.plot_log(watched(a=1.0, b=2.0), dark=dark)
        figure.savefig(tmp_path / "run.png")
        picture = imread(tmp_path / "run.png")
        assert picture.shape[1] == 900 and picture[0, 0, 3] == 0
