"""The wrong and the right line of each row of `docs/mistakes.md` do what the page says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_recipes
from flax import nnx
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from files import ROOT

pytestmark = pytest.mark.slow
PARAMS, X = {"w": jnp.ones(4)}, np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
NAN, HUGE = {"w": jnp.full(4, jnp.nan)}, {"w": jnp.full(4, 1e6)}
adam, sgd, clip = optax.adam(1e-3), optax.sgd(1.0), gcx.clip_by_global_norm(1.0)
accumulate, micro = gcx.accumulate_gradients, gcx.microbatched_value_and_grad
close, metrics, chain = np.allclose, gcx.metrics, optax.chain


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def run(tx, steps, **extra_args):
    """Return the updates and the state of each step."""
    state, found, update = tx.init(PARAMS), [], jax.jit(tx.update)
    for i, grads in enumerate(steps):
        own = {name: values[i] for name, values in extra_args.items()}
        updates, state = update(grads, state, PARAMS, **own)
        found.append((updates["w"], state))
    return found


def pmean():
    mesh, specs = jax.sharding.Mesh(jax.devices(), ("data",)), (P(), P("data"))

    def over(fun):
        return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P()))(PARAMS, X)

    wrong = over(lambda p, x: jax.lax.pmean(jax.grad(loss)(p, x), "data"))["w"]
    right = over(jax.grad(lambda p, x: jax.lax.pmean(loss(p, x), "data")))["w"]
    whole = jax.grad(loss)(PARAMS, X)["w"]
    assert close(wrong, jax.device_count() * whole, rtol=1e-5) and close(right, whole, rtol=1e-5)


def order():
    wrong, right = (run(chain(*parts), [HUGE])[0][1] for parts in ((adam, clip), (clip, adam)))
    assert metrics(wrong)["clip_factor"] == 1 and metrics(right)["clip_factor"] < 1e-6


def sizes():
    parts, whole = (X[:2], X[2:]), -jax.grad(loss)(PARAMS, X)["w"]
    grads, tx = [jax.grad(loss)(PARAMS, x) for x in parts], accumulate(sgd, 2)
    assert not close(run(tx, grads)[1][0], whole)
    assert close(run(tx, grads, weight=[len(x) for x in parts])[1][0], whole, rtol=1e-5)


def batch_argnums():
    def loss(w, x, y):
        return jnp.mean((x @ w["w"] - y) ** 2)

    args, whole = (PARAMS, X, jnp.arange(8.0)), jax.grad(loss)(PARAMS, X, jnp.arange(8.0))["w"]
    with pytest.warns(UserWarning, match="batch_argnums"):
        assert not close(micro(loss, 8)(*args)[1]["w"], whole)
    with pytest.raises(TypeError):
        micro(loss, 4)(*args)
    assert close(micro(loss, 8, batch_argnums=(1, 2))(*args)[1]["w"], whole, rtol=1e-5)


def rng_argnums():
    def dropped(params, x, key):
        return loss(params, x), jax.random.bernoulli(key, shape=x.shape)

    key, options = jax.random.key(0), {"has_aux": True, "aux_reduction": "concatenate"}
    wrong, right = (
        micro(dropped, 8, **options, **rng)(PARAMS, X, key)[0][1]
        for rng in ({}, {"rng_argnums": 2})
    )
    assert (wrong == wrong[0]).all() and not (right == right[0]).all()


def watch_inside():
    for make, rows in (
        (lambda: gcx.skip_nonfinite(gcx.watch(sgd)), 0),
        (lambda: gcx.watch(gcx.skip_nonfinite(sgd)), 1),
    ):
        report = gcx.Monitor(PARAMS).read(run(make(), [NAN])[0][1])
        assert len(report.rows.step) == len(report.incidents) == rows


def decay_outside():
    skip, decay = gcx.skip_nonfinite, optax.add_decayed_weights(0.1)
    assert run(chain(skip(adam), decay), [NAN])[0][0].any()
    assert not run(skip(chain(adam, decay)), [NAN])[0][0].any()


def saved():
    tx = gcx.watch(sgd, history=256)
    state = run(tx, [PARAMS] * 200, value=[1.0] * 100 + [50.0] * 100)[-1][1]
    wrong = gcx.Monitor(PARAMS).read(state)
    right = gcx.Monitor(PARAMS).read(state, saved=[0, 90])
    assert wrong.incidents and wrong.action != "rewind" and "saved" in wrong.reason
    assert right.action == "rewind"


def schedule():
    for steps, rate in ((1_000, 0.96), (1_000 // 8, 0.0)):
        inner = optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(1.0, steps))
        state = run(accumulate(inner, 8), [PARAMS] * 1_000)[-1][1]
        assert close(optax.tree.get(state, "hyperparams")["learning_rate"], rate, atol=3e-3)


def statistics():
    tx = gcx.skip_nonfinite(sgd)
    updates, state = run(tx, [NAN])[0]
    wrong, old = 0.9 * jnp.zeros(4) + 0.1 * NAN["w"], jnp.zeros(4)
    right = jnp.where(gcx.has_updated(state), wrong, old)
    assert jnp.isfinite(updates).all() and jnp.isnan(wrong).all() and not right.any()


def no_flush():
    tx = accumulate(sgd, 2)
    updates, state = run(tx, [PARAMS] * 3)[-1]
    assert not updates.any() and gcx.flush(tx, state, PARAMS)[0]["w"].any()


def factors():
    states = [s for _, s in run(accumulate(chain(clip, sgd), 2), [HUGE, HUGE, PARAMS, PARAMS] * 2)]
    wrong = np.mean([metrics(s)["clip_factor"] for s in states])
    right = np.mean([metrics(s)["clip_factor"] for s in states if gcx.has_updated(s)])
    assert close(right, 0.25, atol=1e-6) and not close(wrong, right)


def reseed():
    for rngs, changes in ((nnx.Rngs(0), False), (nnx.Rngs(0, dropout=1), True)):
        layer = nnx.Dropout(0.5, rngs=rngs)
        old = jax.tree.leaves(nnx.state(layer, nnx.RngKey))[0]
        nnx.reseed(layer, dropout=5)
        assert (jax.tree.leaves(nnx.state(layer, nnx.RngKey))[0] != old) == changes


CASES = {
    "inside `shard_map`": pmean,
    "`chain(adam, clip": order,
    "micro-batches of different": sizes,
    "`microbatched_value_and_grad` of a contrastive": test_recipes.test_encoders_in_parts_have_the_contrastive_gradient_of_the_batch_and_less_memory,
    "`has_weight=True` for": lambda: (
        test_recipes.test_shares_of_several_terms_add_up_to_the_gradient_of_the_batch("one call")
    ),
    "`microbatched_value_and_grad(f, 8)(w": batch_argnums,
    "dropout in": rng_argnums,
    "`skip_nonfinite(watch": watch_inside,
    "`chain(skip_nonfinite": decay_outside,
    "`monitor.read(state)`": saved,
    "`cosine_decay_schedule": schedule,
    "running means": statistics,
    "no `flush`": no_flush,
    "`clip_factor` of": factors,
    "`nnx.reseed": reseed,
}
PAGE = (ROOT / "docs/mistakes.md").read_text()
ROWS = [line[2:] for line in PAGE.splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:30])
def test_the_wrong_and_the_right_line_of_a_row_run(row):
    next(run for start, run in CASES.items() if row.startswith(start))()
