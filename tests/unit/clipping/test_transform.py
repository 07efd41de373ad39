"""The clips as Optax transformations: thresholds of every kind, and drop-in for Optax's own."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import oracles
import trees


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def assert_same_bits(updates, grads):
    for got, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert bits(got) == bits(wanted)


def assert_close(updates, exact, rtol=1e-6):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-30), updates, exact
    )


def step(tx, grads, params=None, state=None):
    state = tx.init(grads if params is None else params) if state is None else state
    return jax.jit(tx.update)(grads, state, params)


# --- what a threshold may be ----------------------------------------------------------------

GRADS = {"a": jnp.float32([3.0, 4.0]), "b": jnp.bfloat16([12.0])}  # norm 13
FLOATS = ("float32", "float16", "bfloat16")
NORM_CLIPS = {
    "global": gcx.clip_by_global_norm,
    "group": lambda t, **kw: gcx.clip_by_group_norm({"all": t}, "all", **kw),
}


@pytest.mark.parametrize("clip", NORM_CLIPS.values(), ids=NORM_CLIPS)
@pytest.mark.parametrize(
    "threshold",
    [
        6.5,
        np.float64(6.5),
        np.array(6.5),
        *(jnp.asarray(6.5, d) for d in FLOATS),
        lambda count: 6.5,
    ],
    ids=["float", "numpy scalar", "numpy array", *FLOATS, "schedule"],
)
def test_threshold_may_be(clip, threshold):
    with compat.strict():
        updates, _ = step(clip(threshold), GRADS)
    assert_close(updates, {"a": np.float32([1.5, 2.0]), "b": np.float32([6.0])})
    assert updates["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", ["32 bit", "64 bit"])
def test_threshold_may_be_traced(dtype, width):
    with compat.strict():
        if width == "64 bit":
            with compat.x64():
                updates = traced_clip(dtype)
        else:
            updates = traced_clip(dtype)
    assert_close(updates, {"a": np.float32([1.5, 2.0]), "b": np.float32([6.0])})


def traced_clip(dtype):
    def update(threshold, grads):
        return gcx.clip_by_global_norm(threshold).update(grads, None)[0]

    return jax.jit(update)(jnp.asarray(6.5, dtype), GRADS)


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_global_norm,
        gcx.clip_by_leaf_norm,
        gcx.clip_by_block_rms,
        gcx.clip,
        NORM_CLIPS["group"],
        gcx.zero_large_norm,
    ],
    ids=["global", "leaf", "block rms", "value", "group", "zero"],
)
def test_traced_threshold_out_of_range_never_raises_and_never_flips_a_sign(make):
    def update(threshold, grads):
        return make(threshold).update(grads, None)[0]

    update = jax.jit(update)
    grads = {"a": jnp.float32([3.0, -4.0]), "b": jnp.float16([-12.0, 0.0])}
    for threshold in (0.0, -0.0, -1.0, -math.inf):
        for x in jax.tree.leaves(update(jnp.float32(threshold), grads)):
            np.testing.assert_array_equal(np.float32(x), np.zeros(2))
    nan = update(jnp.float32(math.nan), grads)
    assert not any((np.float32(nan[name]) * np.float32(x) < 0).any() for name, x in grads.items())
    assert_same_bits(update(jnp.float32(math.inf), grads), grads)


def test_schedule_keeps_its_step_count_in_the_state():
    clip = gcx.clip_by_global_norm(optax.linear_schedule(1.0, 2.0, 2))
    update = jax.jit(clip.update)
    state, norms = clip.init(GRADS), []
    for _ in range(4):
        updates, state = update(GRADS, state)
        norms.append(oracles.global_norm(trees.leaves(updates)))
    np.testing.assert_allclose(norms, [1.0, 1.5, 2.0, 2.0], rtol=1e-2)  # bfloat16
    assert [int(x) for x in jax.tree.leaves(state.rules)] == [4]
    assert float(state.clip_threshold) == 2.0


def test_rule_has_a_state_of_its_own():
    rule = gcx.thresholds.Rule(lambda n: jnp.full_like(n, jnp.inf), lambda n, s, p: (s, n))
    clip = gcx.clip_by_global_norm(rule)
    _, state = step(clip, GRADS)
    assert float(state.rules[0]) == 13.0
    updates, _ = step(clip, jax.tree.map(lambda x: 2 * x, GRADS), state=state)
    assert oracles.global_norm(trees.leaves(updates)) == pytest.approx(13.0)


def test_rule_relative_to_the_parameters_at_every_granularity():
    rule = gcx.thresholds.relative_to_params(0.5)
    params = {"a": jnp.float32([3.0, 4.0]), "b": jnp.float32([12.0])}
    grads = jax.tree.map(lambda x: 10 * x, params)
    for make in (gcx.clip_by_global_norm, gcx.clip_by_leaf_norm, NORM_CLIPS["group"]):
        updates, _ = step(make(rule), grads, params)
        assert_close(updates, {"a": np.float32([1.5, 2.0]), "b": np.float32([6.0])})
    updates, _ = step(gcx.clip_by_block_rms(rule), grads, params)
    assert_close(updates, {"a": np.float32([1.5, 2.0]), "b": np.float32([6.0])})


# --- without a state ------------------------------------------------------------------------

STATELESS = {
    "global": gcx.clip_by_global_norm(1.0),
    "leaf": gcx.clip_by_leaf_norm(1.0),
    "group": gcx.clip_by_group_norm({"all": 1.0}, "all"),
    "block rms": gcx.clip_by_block_rms(0.5),
    "value": gcx.clip(0.5),
    "unit": gcx.adaptive_grad_clip(0.1),
    "zero": gcx.zero_large_norm(1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("clip", STATELESS.values(), ids=STATELESS)
def test_update_without_a_state_is_the_same(clip):
    grads = trees.build("dense")
    with_state, _ = step(clip, grads, grads)
    without, _ = jax.jit(lambda g: clip.update(g, None, g))(grads)
    assert_same_bits(with_state, without)


@pytest.mark.parametrize("threshold", [lambda count: 1.0, optax.constant_schedule(1.0)])
def test_schedule_needs_a_state(threshold):
    expected = (
        r"clip_by_global_norm: `state` must be a `ClipState`, got None. Call `init\(params\)`"
    )
    with pytest.raises(ValueError, match=expected):
        gcx.clip_by_global_norm(threshold).update(GRADS, None)


# --- drop-in for Optax ----------------------------------------------------------------------

PAIRS = {
    "global": (lambda c: gcx.clip_by_global_norm(c), lambda c: optax.clip_by_global_norm(c)),
    "value": (lambda c: gcx.clip(c), lambda c: optax.clip(c)),
    "block rms": (lambda c: gcx.clip_by_block_rms(c), lambda c: optax.clip_by_block_rms(c)),
    "unit": (lambda c: gcx.adaptive_grad_clip(c), lambda c: optax.adaptive_grad_clip(c)),
}
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)


def ordinary(seed=0, scale=1.0):
    """Ordinary float32 gradients, with every rank that Optax's unit-wise norm knows."""
    shapes = {
        "scalar": (),
        "bias": (7,),
        "dense": (6, 7),
        "attention": (6, 2, 3),
        "conv": (3, 3, 2, 4),
    }
    return {
        name: trees.normal(shape, seed=seed + i, scale=scale)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pairs
def test_same_numbers_as_optax_on_ordinary_gradients(ours, theirs):
    params = ordinary(seed=50)

    @jax.jit
    def both(threshold, grads):
        clips = ours(threshold), theirs(threshold)
        return [clip.update(grads, clip.init(params), params)[0] for clip in clips]

    for threshold in (0.05, 1.0, 1e3):
        for seed in (0, 10):
            assert_close(*both(threshold, ordinary(seed)))


@pairs
def test_same_training_as_optax_in_a_chain(ours, theirs):
    def train(clip):
        tx = optax.named_chain(("clip", clip), ("opt", optax.adamw(1e-2)))

        def one(carry, seed):
            params, state = carry
            grads = jax.tree.map(lambda p: p * 3 + jnp.sin(seed), params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = ordinary(seed=50)
        return jax.lax.scan(one, (params, tx.init(params)), jnp.arange(5.0))[0][0]

    assert_close(train(ours(0.1)), train(theirs(0.1)), rtol=1e-5)


@pairs
def test_same_numbers_as_optax_masked_and_partitioned(ours, theirs):
    params, grads = ordinary(seed=50), ordinary()
    mask = {name: name != "dense" for name in params}
    labels = {name: "yes" if flag else "no" for name, flag in mask.items()}
    for wrap in (
        lambda clip: optax.masked(clip, mask),
        lambda clip: optax.partition({"yes": clip, "no": optax.identity()}, labels),
    ):
        us, them = wrap(ours(0.1)), wrap(theirs(0.1))
        updates, _ = step(us, grads, params)
        expected, _ = step(them, grads, params)
        assert_close(updates, expected)
        assert bits(updates["dense"]) == bits(grads["dense"])


INJECTED = {
    "global": (gcx.clip_by_global_norm, optax.clip_by_global_norm, "max_norm"),
    "leaf": (gcx.clip_by_leaf_norm, None, "max_norm"),
    "block rms": (gcx.clip_by_block_rms, optax.clip_by_block_rms, "threshold"),
    "unit": (gcx.adaptive_grad_clip, optax.adaptive_grad_clip, "clipping"),
    "value": (gcx.clip_by_value, None, "max_value"),
    "zero": (gcx.zero_large_norm, None, "max_norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs", "name"), INJECTED.values(), ids=INJECTED)
def test_threshold_may_be_injected_and_changed(ours, theirs, name):
    params, grads = ordinary(seed=50), ordinary()
    static = {"ord", "num_layer_axes"} & set(inspect.signature(ours).parameters)
    tx = optax.inject_hyperparams(ours, static_args=static)(**{name: 0.3})
    update = jax.jit(tx.update)
    state = tx.init(params)
    for threshold in (0.3, 0.1):
        state.hyperparams[name] = jnp.asarray(threshold, jnp.float32)
        updates, state = update(grads, state, params)
        other = ours if theirs is None else theirs
        plain = other(threshold)
        assert_close(updates, plain.update(grads, plain.init(params), params)[0])
    assert float(state.hyperparams[name]) == np.float32(0.1)


def test_injected_threshold_may_be_a_schedule():
    tx = optax.inject_hyperparams(gcx.clip_by_global_norm, static_args=("ord",))(
        max_norm=optax.linear_schedule(1.0, 3.0, 2)
    )
    params, grads = ordinary(seed=50), ordinary()
    state, norms = tx.init(params), []
    for _ in range(3):
        updates, state = jax.jit(tx.update)(grads, state, params)
        norms.append(oracles.global_norm(trees.leaves(updates)))
    np.testing.assert_allclose(norms, [1.0, 2.0, 3.0], rtol=1e-5)


def test_injected_order_must_be_static():
    inject = optax.inject_hyperparams(gcx.clip_by_global_norm, static_args=("ord",))
    updates, _ = step(inject(max_norm=1.0, ord=1.0), jnp.float32([3.0, 4.0]))
    np.testing.assert_allclose(np.abs(updates).sum(), 1.0, rtol=1e-6)
    with pytest.raises(TypeError, match="`ord` must be a static Python value"):
        tx = optax.inject_hyperparams(gcx.clip_by_global_norm)(max_norm=1.0, ord=1.0)
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_where_optax_fails_we_do_not():
    """The first two rows of the table in the README."""
    grads = {"half": jnp.float16([300.0, 400.0])}
    theirs, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert not np.any(np.asarray(theirs["half"]))
    ours, _ = gcx.clip_by_global_norm(1.0).update(grads, None)
    np.testing.assert_allclose(np.float32(ours["half"]), [0.6, 0.8], rtol=1e-3)
    ours, _ = gcx.clip_by_global_norm(1.0).update(jnp.float32([1e20, 1e20]), None)
    np.testing.assert_allclose(ours, [2**-0.5, 2**-0.5], rtol=1e-6)


# --- reactions ------------------------------------------------------------------------------


def test_zero_large_norm():
    drop = gcx.zero_large_norm(6.0)
    update = jax.jit(drop.update)
    state = drop.init(GRADS)
    small = jax.tree.map(lambda x: x / 4, GRADS)
    updates, state = update(small, state)
    assert_same_bits(updates, small)
    assert float(state.clip_fraction) == 0.0
    for scale in (1.0, 1e30, math.inf, math.nan):
        updates, state = update(
            jax.tree.map(lambda x, s=scale: x * jnp.asarray(s, x.dtype), GRADS), state
        )
        for x in jax.tree.leaves(updates):
            np.testing.assert_array_equal(np.float32(x), np.zeros(x.shape))
        assert float(state.clip_factor) == 0.0 and float(state.clip_fraction) == 1.0
    updates, _ = update(small, state)
    assert_same_bits(updates, small)


# --- errors when built ----------------------------------------------------------------------

BUILDERS = {
    "clip_by_global_norm": (gcx.clip_by_global_norm, "max_norm"),
    "zero_large_norm": (gcx.zero_large_norm, "max_norm"),
    "clip_by_leaf_norm": (gcx.clip_by_leaf_norm, "max_norm"),
    "clip_by_block_rms": (gcx.clip_by_block_rms, "threshold"),
    "adaptive_grad_clip": (gcx.adaptive_grad_clip, "clipping"),
    "clip": (gcx.clip_by_value, "max_value"),
}
builders = pytest.mark.parametrize(("make", "argument"), BUILDERS.values(), ids=BUILDERS)


@builders
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, -math.inf, np.float32(-1), 0])
def test_threshold_must_be_positive_when_built(make, argument, value):
    expected = f"{make.__name__}: `{argument}.?` must be a number > 0, got "
    with pytest.raises(ValueError, match=expected):
        make(value)


@builders
@pytest.mark.parametrize("value", ["1.0", True, np.ones(3), 1j])
def test_threshold_must_be_a_number_when_built(make, argument, value):
    with pytest.raises(
        TypeError, match=f"{make.__name__}: `{argument}.?` must be a number > 0, got "
    ):
        make(value)


def test_negative_threshold_of_a_group_is_named():
    expected = r"clip_by_group_norm: `max_norms\['body'\]` must be a number > 0, got -1.0"
    with pytest.raises(ValueError, match=expected):
        gcx.clip_by_group_norm({"head": 1.0, "body": -1.0}, "body")


@pytest.mark.parametrize("max_norms", [1.0, [1.0], None])
def test_groups_must_be_a_mapping(max_norms):
    expected = "clip_by_group_norm: `max_norms` must be a mapping from label to threshold, got"
    with pytest.raises(TypeError, match=expected):
        gcx.clip_by_group_norm(max_norms, "all")


def test_eps_of_the_unit_clip_must_be_positive():
    with pytest.raises(ValueError, match="adaptive_grad_clip: `eps` must be a number > 0, got 0.0"):
        gcx.adaptive_grad_clip(0.1, eps=0.0)


WITH_WORDS = {
    "clip_by_global_norm": lambda **kw: gcx.clip_by_global_norm(1.0, **kw),
    "clip_by_leaf_norm": lambda **kw: gcx.clip_by_leaf_norm(1.0, **kw),
    "clip_by_group_norm": lambda **kw: gcx.clip_by_group_norm({"a": 1.0}, "a", **kw),
    "clip_by_block_rms": lambda **kw: gcx.clip_by_block_rms(1.0, **kw),
    "adaptive_grad_clip": lambda **kw: gcx.adaptive_grad_clip(1.0, **kw),
}


@pytest.mark.parametrize("name", WITH_WORDS)
def test_nonfinite_is_one_of_two_words(name):
    expected = (
        f"{name}: `nonfinite` must be one of 'propagate', 'zero', got 'skip'. Pick one of them."
    )
    with pytest.raises(ValueError, match=expected):
        WITH_WORDS[name](nonfinite="skip")


@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_leaf_norm", "clip_by_group_norm"])
def test_order_is_checked_when_built(name):
    with pytest.raises(ValueError, match=f"{name}: `ord` must be a number > 0, got 0"):
        WITH_WORDS[name](ord=0)
    with pytest.raises(TypeError, match=f"{name}: `ord` must be a number > 0, got 'l2'"):
        WITH_WORDS[name](ord="l2")


@pytest.mark.parametrize("name", list(WITH_WORDS)[:4])
def test_axis_name_is_checked_when_built(name):
    expected = f"{name}: `axis_name` must be a string, a tuple of strings or None, got 3. Name the"
    with pytest.raises(TypeError, match=expected):
        WITH_WORDS[name](axis_name=3)


# --- errors when traced ---------------------------------------------------------------------


@pytest.mark.parametrize("clip", STATELESS.values(), ids=STATELESS)
def test_integer_leaf_is_named_when_traced(clip):
    grads = {"enc": {"n": jnp.zeros((2, 3), "int32")}}
    expected = r"of `updates` must be floating.*, got int32\[2, 3\] at updates\['enc'\]\['n'\]\. "
    with pytest.raises(TypeError, match=expected):
        jax.eval_shape(lambda g: clip.update(g, None, g), grads)


def test_parameters_must_be_given():
    for clip in (
        gcx.adaptive_grad_clip(0.1),
        gcx.clip_by_global_norm(gcx.thresholds.relative_to_params()),
    ):
        with pytest.raises(
            ValueError, match=r"`params` must be given for this threshold, got None\. Pass"
        ):
            clip.update(GRADS, None)


def test_parameters_must_match():
    clip = gcx.adaptive_grad_clip(0.1)
    grads = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    with pytest.raises(TypeError) as error:
        clip.update(grads, None, {"a": jnp.ones((2, 5)), "b": jnp.ones(4)})
    assert str(error.value) == (
        "adaptive_grad_clip: `updates` must be a tree like `params`, got float32[2, 3] at "
        "updates['a'], expected shape [2, 5]. Pass `updates` with the structure of `params`."
    )
    with pytest.raises(TypeError, match=r"got updates\['a'\] where params\['c'\] was expected\."):
        clip.update(grads, None, {"c": jnp.ones((2, 3)), "d": jnp.ones(4)})
    with pytest.raises(TypeError, match=r"got updates\['b'\] where nothing was expected\."):
        clip.update(grads, None, {"a": jnp.ones((2, 3))})
    with pytest.raises(TypeError, match=r"got nothing where params\['b'\] was expected\."):
        clip.update({"a": jnp.ones((2, 3))}, None, grads)
