"""What is said of a run on the host: its log in numbers and pictures, and its worst examples."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx


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
    summary = gcx.diagnostics.summarize_log(log_of(losses), window=window)
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
    assert gcx.diagnostics.summarize_log(log) == {
        "steps": 4,
        "clipped": 0.5,
        "clipped/inner_state/0": 0.25,
        "incident_count": 2,
        "skipped_nonfinite": 2,
        "taken": 0.5,
        "spike_score/loss": 0,
    }


def test_a_file_of_json_lines_is_a_log(tmp_path):
    log = log_of([3.0, np.nan, 4.0])
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in log) + "\n")
    assert (
        gcx.diagnostics.summarize_log(path)
        == gcx.diagnostics.summarize_log(str(path))
        == gcx.diagnostics.summarize_log(log)
    )


def test_the_picture_shows_units_steps_and_incidents():
    steps, units = 20, {"a": 3.0, "b": 4.0}
    columns = {f"gradient_norm__{name}": [norm] * steps for name, norm in units.items()}
    columns |= {f"update_ratio__{name}": [1e-3] * steps for name in units}
    columns["gradient_norm__a"][7] = np.nan
    figure = gcx.diagnostics.plot_log(
        log_of([3.0] * steps, incident_count=[0] * 7 + [1] * 13, **columns)
    )
    heat, share, ratios = figure.axes[:3]
    shown = np.asarray(heat.images[0].get_array().filled(np.nan))
    np.testing.assert_allclose(shown[:, 0], np.log10([3, 4]))
    assert np.isnan(shown[0, 7]) and [x.get_text() for x in heat.get_yticklabels()] == ["a", "b"]
    assert [line.get_xdata()[0] for line in share.lines] == [7]
    assert len(ratios.lines) == 3


def test_without_ratios_there_is_no_empty_picture(tmp_path):
    figure = gcx.diagnostics.plot_log(log_of([1.0] * 3, gradient_norm__a=[1, 2, 3]))
    figure.savefig(tmp_path / "run.png")
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == [
        "gradient norm, log10",
        "share of the squared gradient norm",
    ]


def test_the_worst_examples_by_norm_and_by_loss():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 3)).astype("f"), rng.standard_normal(16).astype("f")
    w, batch = rng.standard_normal(3).astype("f"), {"x": x, "y": y}
    worst = gcx.diagnostics.worst_examples(lambda w, e: (e["x"] @ w - e["y"]) ** 2, w, batch, k=4)
    residuals = x.astype(np.float64) @ w - y
    norms = 2 * np.abs(residuals) * np.linalg.norm(x, axis=1)
    assert list(worst["grad_norm"]) == list(np.argsort(-norms)[:4])
    assert list(worst["loss"]) == list(np.argsort(-(residuals**2))[:4])
    found = list(worst["grad_norm"].values())
    np.testing.assert_allclose(found, np.sort(norms)[::-1][:4], rtol=1e-5)


def test_an_example_that_is_not_finite_is_the_worst():
    batch = jnp.array([1.0, 2.0, jnp.nan, 3.0])
    worst = gcx.diagnostics.worst_examples(lambda w, x: (w * x) ** 2, 1.0, batch, k=2)
    assert list(worst["grad_norm"]) == [2, 3]
    assert list(worst["loss"]) == [2, 3]


def test_the_worst_tokens_are_those_of_their_own_gradients():
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((6, 4, 3)).astype("f")
    xs[4, 2] *= 20

    def fun(w, x):
        return (x @ w) ** 2

    w = np.float32([1, -2, 0.5])
    worst = gcx.diagnostics.worst_examples(fun, w, xs, k=2)
    assert next(iter(worst["deviation"])) == 4
    first, second = worst["deviation"]
    losses = {(i, t): np.float64(xs[i, t] @ w) ** 2 for i in (first, second) for t in range(4)}
    norms = {
        (i, t): 2 * abs(np.float64(xs[i, t] @ w)) * np.linalg.norm(xs[i, t]) for i, t in losses
    }
    for key, values in (("token_loss", losses), ("token_grad_norm", norms)):
        expected = sorted(values, key=values.__getitem__)[:-3:-1]
        assert list(worst[key]) == expected
        for place, value in worst[key].items():
            assert value == pytest.approx(values[place], rel=1e-5)
    means = [np.mean((np.float64(x) @ w) ** 2) for x in xs]
    assert worst["loss"][4] == pytest.approx(means[4], rel=1e-5)


def test_a_row_out_of_range_deviates_where_its_gradient_is_ordinary():
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((16, 5)).astype("f")
    xs[9] *= 30

    def fun(w, x):
        return jnp.tanh(x / jnp.linalg.norm(x)) @ w

    worst = gcx.diagnostics.worst_examples(fun, np.ones(5, "f"), xs)
    assert next(iter(worst["deviation"])) == next(iter(worst["input"])) == 9
    ids = np.arange(16)  # numbers of tokens are no numbers to compare
    fun = lambda w, i: w[i] * 2.0  # noqa: E731
    assert "input" not in gcx.diagnostics.worst_examples(fun, np.ones(16, "f"), ids)


def test_a_wrong_label_ranks_in_deviation_at_least_as_high_as_by_loss():
    hits = {"deviation": 0, "loss": 0}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        w = rng.standard_normal((6, 4)).astype("f")
        x = rng.standard_normal((64, 6)).astype("f")
        y = (x @ w + 0.5 * rng.standard_normal((64, 4))).argmax(1)
        y[17] = (y[17] + 1) % 4

        def fun(w, example):
            return -jax.nn.log_softmax(example["x"] @ w)[example["y"]]

        worst = gcx.diagnostics.worst_examples(fun, w, {"x": x, "y": y})
        for key in hits:
            hits[key] += 17 in worst[key]
    assert hits["deviation"] >= hits["loss"] > 0


def test_the_leaf_where_nan_begins_is_between_two_rows():
    tree = {"h_0": jnp.ones(2), "h_1": jnp.array([1.0, jnp.nan]), "h_2": jnp.full(2, jnp.nan)}
    counts = gcx.diagnostics.nonfinite_leaves(tree, include_finite=True)
    assert list(counts.items()) == [("['h_0']", 0), ("['h_1']", 1), ("['h_2']", 2)]
    assert list(gcx.diagnostics.nonfinite_leaves(tree).values()) == [2, 1]
