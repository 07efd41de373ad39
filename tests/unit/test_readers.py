"""Which reader accepts which state: the same result as for a state on one device, or why not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from compat import needs_eight_devices

# Each cell is the outcome, see `test_a_reader_of_a_state`:
#   same     the result for a state on one device
#   runs     this result for each run
#   sum      the sum over runs
#   fails    RuntimeError, because the guard has failed in a run
#   nothing  the result for a state without anything to read
#   moments  the optimizer continues with its moments
#   other words: an error that contains the word
COLUMNS = "sharded replicated explicit numpy frozen nnx vmapped donated abstract untyped empty adam"
TABLE = """
metrics         same same same same same same runs  donated abstract dict nothing nothing
has_updated     same same same same same same runs  donated abstract dict nothing nothing
raise_if_failed same same same same same same fails donated abstract dict nothing nothing
nonfinite       same same same same same same sum   donated abstract same nothing nothing
last_row        same same same same same same runs  donated abstract dict watch  watch
monitor         same same same same same same vmap  donated abstract dict watch  watch
incidents       same same same same same same vmap  donated abstract dict watch  watch
flush           same same same same same same vmap  donated abstract dict accumulation accumulation
reset           same same same same same same runs  donated abstract dict accumulation accumulation
stats           same same same same same same vmap  donated abstract dict accumulation accumulation
scale_loss      same same same same same same runs  donated abstract dict scale  scale
apply_gradients same same same same same same vmap  donated abstract dict init   init
convert_state   same same same same same same vmap  donated abstract dict opt_state moments
verify_step     same same same same same same same  donated -        same same   same
"""
ROWS = list(map(str.split, TABLE.strip().splitlines()))
CELLS = [  # in `make test`, a ninth of the cells; all others are slow
    pytest.param(reader, kind, outcome, marks=() if (i + 2 * j) % 9 == 0 else pytest.mark.slow)
    for i, (reader, *row) in enumerate(ROWS)
    for j, (kind, outcome) in enumerate(zip(COLUMNS.split(), row, strict=True))
    if outcome != "-"  # a step may have such arguments
]

PARAMS = {"w": jnp.ones((8, 2)), "b": jnp.ones(8)}
ADAM = optax.adam(0.1)
CLIPPED = optax.chain(gcx.clip_by_global_norm(1.0), ADAM)
TX = gcx.watch(gcx.dynamic_loss_scale(gcx.accumulate_gradients(CLIPPED, 2), init_scale=1.0))


def grads_of(params, scale):
    return jax.tree.map(lambda x: scale * x, params)


@jax.jit
def step(params, state, scale):
    return gcx.apply_gradients(TX, grads_of(params, scale), state, params)


def run(params, step=step, shape=()):
    """A step, half a window, and a gradient with which the guard fails."""
    state = TX.init(params) if not shape else jax.vmap(TX.init)(params)
    for scale in (1.0, 2.0, 3.0, np.nan):
        params, state = step(params, state, jnp.full(shape, scale))
    return params, state


def on_mesh(spec, kind=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    return run(jax.device_put(PARAMS, NamedSharding(mesh, spec)))


def vmapped():
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    return run(params, jax.jit(jax.vmap(step)), (2,))


def donated():
    params, state = run(PARAMS)
    jax.jit(lambda x: jax.tree.map(jnp.copy, x), donate_argnums=0)(state)
    return params, state


def with_variables():
    """Parameters of Flax NNX, and the state of an `nnx.Optimizer`, whose arrays are variables."""
    nnx = pytest.importorskip("flax.nnx")

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    params, state = run(nnx.State({key: nnx.Param(x) for key, x in PARAMS.items()}))
    as_variable = lambda x: nnx.Variable(x[...] if is_variable(x) else x)  # noqa: E731
    return params, jax.tree.map(as_variable, state, is_leaf=is_variable)


def frozen():
    return run(pytest.importorskip("flax.core").FrozenDict(PARAMS))


def untyped():
    serialization = pytest.importorskip("flax.serialization")
    params, state = run(PARAMS)
    return params, serialization.msgpack_restore(serialization.to_bytes(state))


STATES = {
    "one device": lambda: run(PARAMS),
    "sharded": lambda: on_mesh(P("x")),
    "replicated": lambda: on_mesh(P()),
    "explicit": lambda: on_mesh(P("x"), AxisType.Explicit),
    "numpy": lambda: jax.tree.map(np.asarray, run(PARAMS)),
    "frozen": frozen,
    "nnx": with_variables,
    "vmapped": vmapped,
    "donated": donated,
    "abstract": lambda: (PARAMS, jax.eval_shape(TX.init, PARAMS)),
    "untyped": untyped,
    "empty": lambda: (PARAMS, ()),
    "adam": lambda: (PARAMS, ADAM.update(PARAMS, ADAM.init(PARAMS))[1]),
}
state_of = functools.cache(lambda kind: STATES[kind]())


def failure(params, state):
    try:
        gcx.raise_if_failed(state)
    except RuntimeError as error:
        return str(error)
    return None


READERS = {
    "metrics": lambda params, state: gcx.metrics(state),
    "has_updated": lambda params, state: gcx.has_updated(state),
    "raise_if_failed": failure,
    "nonfinite": lambda params, state: gcx.diagnostics.nonfinite_leaves(state),
    "last_row": lambda params, state: gcx.last_row(state),
    "monitor": lambda params, state: gcx.Monitor(params).read(state).rows,
    "incidents": lambda params, state: list(map(str, gcx.incidents(state, params))),
    "flush": lambda params, state: gcx.flush(TX, state, params),
    "reset": lambda params, state: gcx.reset_accumulation(state),
    "stats": lambda params, state: gcx.diagnostics.accumulation_stats(state),
    "scale_loss": lambda params, state: gcx.scale_loss(state, jnp.float32(3.0)),
    "apply_gradients": lambda params, state: step(params, state, 1.0),
    "convert_state": lambda params, state: step(params, gcx.convert_state(TX, state, params), 1.0),
    "verify_step": lambda params, state: gcx.diagnostics.verify_step(
        lambda x: jax.tree.map(jnp.copy, x), state
    ),
}
NOTHING = {"metrics": {}, "has_updated": True, "raise_if_failed": None, "nonfinite": {}}
# What is missing, or the line to write.
WORDS = {"vmap": "vmap|of several runs", "abstract": "abstract|traced", "dict": "tx.init|got dict"}


def check_equal(found, expected):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if isinstance(y, str):
            assert x == y
        else:
            np.testing.assert_allclose(x, np.broadcast_to(y, np.shape(x)), rtol=1e-6)


@needs_eight_devices
@pytest.mark.parametrize(("reader", "kind", "outcome"), CELLS)
def test_a_reader_of_a_state(reader, kind, outcome):
    state = state_of(kind)
    read = functools.partial(READERS[reader], *state)
    if outcome not in ("same", "runs", "sum", "fails", "nothing", "moments"):
        error = pytest.raises((TypeError, ValueError), match=r"^[\w.]+: `\w+` must ")
        with jax.disable_jit(), error as caught:  # `jit` itself raises for a donated state
            read()
        caught.match(WORDS.get(outcome, outcome))
        return
    found, expected = read(), READERS[reader](*state_of("one device"))
    if outcome == "nothing":
        expected = NOTHING[reader]
    elif outcome == "fails":
        assert found is not None
        return
    elif outcome == "sum":
        expected = jax.tree.map(lambda x: 2 * x, expected)
    elif outcome == "moments":
        state = gcx.convert_state(TX, state[1], PARAMS).inner_state.inner_state[1]
        found, expected = state, state_of(kind)[1]
    elif outcome == "runs":
        expected = jax.tree.map(lambda x: np.stack([x, x]), expected)
    check_equal(found, expected)
