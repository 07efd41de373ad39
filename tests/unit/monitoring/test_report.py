"""What is said of a run on the host: its log in numbers and pictures, and its worst examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx


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


@pytest.mark.parametrize("bad", [np.nan, 0.0])
def test_an_example_of_which_the_loss_is_nan_or_minus_infinity_is_the_worst(bad):
    batch = jnp.array([1.0, 2.0, bad, 3.0])
    worst = gcx.diagnostics.worst_examples(lambda w, x: w * jnp.log(x), 1.0, batch, k=2)
    assert list(worst["grad_norm"]) == list(worst["loss"]) == [2, 3]


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


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F7FFFFF, 0x7F800000])  # NaN, huge, infinite
def test_a_damaged_incident_does_not_hide_the_others(bits):
    tx, params = gcx.watch(optax.sgd(0.1)), {"w": jnp.ones(2)}
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(2):
        _, state = update({"w": jnp.array([1.0, jnp.nan])}, state, params)
    whole = gcx.incidents(state)
    field = gcx.diagnostics.Incident._fields.index("leaf")
    rows = state.incidents.rows.at[-2, field].set(bits)
    damaged = state._replace(incidents=state.incidents._replace(rows=rows))
    assert gcx.incidents(damaged) == whole[1:] or str(gcx.incidents(damaged)[0]) == str(whole[1])


def test_what_a_loss_closes_over_may_change_between_two_calls():
    target = {"y": 0.0}
    batch, worst = jnp.array([1.0, 2.0, 3.0]), []
    for target["y"] in (0.0, 3.0):
        found = gcx.diagnostics.worst_examples(lambda w, x: (w * x - target["y"]) ** 2, 1.0, batch)
        worst.append(next(iter(found["loss"])))
    assert worst == [2, 0]
