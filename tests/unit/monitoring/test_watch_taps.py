"""Taps and batch identifiers in `watch`: incidents name the activation, rows have statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from gradclip_jax.monitoring._rows import Outcome

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
        return tx.update(grads, state, PARAMS, **extra)[1], stats

    return step


@pytest.mark.parametrize("layer", (0, 3))
def test_one_step_is_enough_to_place_a_nan_in_a_layer_of_a_scan(layer):
    tx = gcx.watch(gcx.skip_nonfinite(optax.adam(1e-3)), taps=PROBES)
    step = stepper(tx)
    state, stats = step(tx.init(PARAMS), -1, 0)
    state, _ = step(state, layer, 1234)
    monitor = gcx.Monitor(PARAMS, taps=PROBES)
    report = monitor.read(state)
    (incident,) = report.incidents
    assert (incident.step, incident.activation) == (1, f"layers_{layer}/mlp")
    assert f"; first non-finite activation: layers_{layer}/mlp; loss NaN" in str(incident)
    assert incident.batch_id == 1234 and str(incident).startswith("step 1, batch 1234: skipped")
    assert report.rows.taps[1, monitor.names.taps.index(f"layers_{layer}/mlp"), 0, 3] == 1
    expected = np.reshape(list(gcx.taps.metrics(stats).values()), (-1, 2, 4))
    np.testing.assert_allclose(report.rows.taps[0], expected, rtol=1e-4, atol=1e-6)


def test_a_step_without_statistics_of_taps_has_the_same_state():
    tx = gcx.watch(optax.adam(1e-3), taps=PROBES)
    before = tx.init(PARAMS)
    state, _ = stepper(tx)(before, -1, 0)
    grads = jax.grad(loss_fn)(PARAMS, PROBES, X, -1)
    _, without = jax.jit(tx.update)(grads, state, PARAMS)
    first, second, third = (jax.tree.map(jax.typeof, x) for x in (before, state, without))
    assert first == second == third
    monitor = gcx.Monitor(PARAMS, taps=PROBES)
    rows = monitor.read(without).rows
    assert rows.has(Outcome.HAS_TAPS).tolist() == [True, False] and not rows.taps[1].any()
    titles = [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(monitor).axes]
    assert "RMS of activations" in titles


@pytest.mark.slow
def test_a_nonfinite_cotangent_after_finite_activations_is_named():
    tx = gcx.watch(optax.sgd(1.0), taps=PROBES)
    stats = jax.tree.map(np.array, PROBES)
    stats["layers"]["hidden"][..., 0] = 4
    stats["layers"]["hidden"][2, 1, -1] = 3
    stats["layers"]["hidden"][1, 1, -1] = 3
    bad = jax.tree.map(lambda p: np.full_like(p, np.inf), PARAMS)
    _, state = tx.update(bad, tx.init(PARAMS), PARAMS, taps=stats)
    (incident,) = gcx.incidents(state, PARAMS, taps=PROBES)
    assert (incident.activation, incident.cotangent) == (None, "layers_2/hidden")
    assert str(incident).endswith("; first non-finite cotangent: layers_2/hidden")


def test_taps_of_another_model_raise():
    state = gcx.watch(optax.sgd(1.0), taps=PROBES).init(PARAMS)
    with pytest.raises(ValueError, match="taps"):
        gcx.Monitor(PARAMS).read(state)
