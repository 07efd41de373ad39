"""Taps and batch identifiers in `watch`: incidents name the activation, `metrics` has the row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

PROBES = gcx.taps.make_probes(
    {"embed": None, "layers": gcx.taps.make_probes(["hidden", "mlp"], num_layers=5)}
)
rng = np.random.default_rng(0)
PARAMS = {
    "embed": rng.standard_normal((4, 6)).astype("f"),
    "layers": rng.standard_normal((2, 5, 6, 6)).astype("f") / 4,
}
X = rng.standard_normal((8, 4)).astype("f")


def loss_fn(params, probes, x, fault):
    def block(h, layer):
        wi, wo, probe, bad = layer
        hidden = gcx.taps.tap(jnp.tanh(h @ wi), probe["hidden"])
        return h + gcx.taps.tap(hidden @ wo + bad, probe["mlp"]), None

    h = gcx.taps.tap(x @ params["embed"], probes["embed"])
    bad = jnp.where(jnp.arange(5) == fault, jnp.nan, 0.0)
    layers = *params["layers"], probes["layers"], bad
    return jnp.mean(jax.lax.scan(jax.checkpoint(block), h, layers)[0] ** 2)


def stepper(tx):
    @jax.jit
    def step(state, fault, batch_id):
        value_and_grad = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, stats) = value_and_grad(PARAMS, PROBES, X, fault)
        extra = {"value": loss, "taps": stats, "batch_id": batch_id}
        _, state = tx.update(grads, state, PARAMS, **extra)
        return state, gcx.metrics(state), stats

    return step


@pytest.mark.parametrize("layer", (0, 3))
def test_one_step_is_enough_to_place_a_nan_in_a_layer_of_a_scan(layer):
    tx = gcx.watch(gcx.skip_nonfinite(optax.adam(1e-3)), taps=PROBES)
    step = stepper(tx)
    state, row, _ = step(tx.init(PARAMS), -1, 0)
    state, row, _ = step(state, layer, 1234)
    (incident,) = gcx.incidents(state)
    assert (incident.step, incident.activation) == (1, f"layers_{layer}/mlp")
    assert f"; first non-finite activation: layers_{layer}/mlp; loss NaN" in str(incident)
    assert row[f"taps/layers_{layer}/mlp/nonfinite"] == 1
    assert incident.batch_id == 1234 and str(incident).startswith("step 1, batch 1234: skipped")


@pytest.mark.slow
def test_the_metrics_of_watch_have_the_row_of_the_taps_and_the_state_keeps_its_types():
    tx = gcx.watch(optax.adam(1e-3), taps=PROBES)
    step, before = stepper(tx), tx.init(PARAMS)
    state, row, stats = step(before, -1, 0)
    for key, value in gcx.taps.metrics(stats).items():
        np.testing.assert_allclose(row[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    assert row.keys() == gcx.metrics(before).keys() == gcx.metrics(state).keys()
    assert gcx.incidents(state) == []
    # The second program, without taps: the state has the same types, and nothing was measured.
    grads = jax.grad(loss_fn)(PARAMS, PROBES, X, -1)
    _, without = jax.jit(tx.update)(grads, state, PARAMS)
    types = lambda state: jax.tree.map(jax.typeof, state)  # noqa: E731
    assert types(before) == types(state) == types(without)
    found = gcx.metrics(without)
    assert all(found[key] == -1 for key in found if key.startswith("taps/"))
    log = [jax.tree.map(float, x) for x in (row, found)]
    titles = [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(log).axes]
    assert "kurtosis of activations" in titles


@pytest.mark.slow
def test_a_nonfinite_cotangent_after_finite_activations_is_named():
    tx = gcx.watch(optax.sgd(1.0), taps=PROBES)
    stats = jax.tree.map(np.array, PROBES)
    stats["layers"]["hidden"][2, 1, -1] = 3
    stats["layers"]["hidden"][1, 1, -1] = 3
    bad = jax.tree.map(lambda p: np.full_like(p, np.inf), PARAMS)
    _, state = tx.update(bad, tx.init(PARAMS), PARAMS, taps=stats)
    (incident,) = gcx.incidents(state)
    assert (incident.activation, incident.cotangent) == (None, "layers_2/hidden")
    assert str(incident).endswith("; first non-finite cotangent: layers_2/hidden")
    assert incident.batch_id is None and str(incident).startswith("step 0: ")


@pytest.mark.slow
def test_a_guard_around_watch_that_skips_leaves_no_statistics_of_an_earlier_step():
    tx = gcx.skip_nonfinite(gcx.watch(optax.sgd(0.1), taps=PROBES))
    step = stepper(tx)
    state, row, _ = step(tx.init(PARAMS), -1, 0)
    assert row["taps/embed/rms"] > 0
    _, row, _ = step(state, 2, 0)
    assert row["taps/embed/rms"] == row["gradient_norm"] == -1


@pytest.mark.slow
def test_seeds_side_by_side_have_their_own_norms_taps_and_incidents():
    tx = gcx.watch(optax.sgd(0.1), taps=PROBES)
    state = jax.vmap(lambda _: tx.init(PARAMS))(jnp.arange(2))
    state, row, _ = jax.vmap(stepper(tx), (0, 0, None))(state, jnp.array([-1, 3]), 0)
    assert row["taps/layers_3/mlp/nonfinite"].tolist() == [0, 1]
    assert np.isfinite(row["gradient_norm"]).tolist() == [True, False]
    with pytest.raises(ValueError, match="incidents: `state` must be the state of one run"):
        gcx.incidents(state)
    first, second = (jax.tree.map(lambda x, i=i: x[i], state) for i in range(2))
    assert gcx.incidents(first) == []
    assert [x.activation for x in gcx.incidents(second)] == ["layers_3/mlp"]
