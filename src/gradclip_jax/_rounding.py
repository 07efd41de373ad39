"""Stochastic rounding of parameters to bfloat16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._checks import check_count, check_params, is_float0
from ._devices import HAS_TYPES
from ._errors import public, type_error
from ._format import describe, leaf_path
from ._states import check_state
from ._types import Array, Path, Scalar, Tree
from .norms._leaves import checked_leaves
from .norms._mesh import is_explicit, varying_axes


class RoundingState(NamedTuple):
    """The state of `round_stochastically`.

    Attributes:
        step: Number of updates modulo 2^31, int32[], from which the random bits are derived.
    """

    step: Scalar


@public
def round_stochastically(seed: int = 0) -> optax.GradientTransformation:
    """Round bfloat16 parameters stochastically, instead of storing a float32 copy of them.

    `update = r(p + u) - p`, where `r` rounds to one of the two adjacent bfloat16 values with
    probabilities such that the expected value is `p + u`. Adding the update to the parameter gives
    the rounded value exactly. Rounding to nearest may discard every update smaller than 1/512
    of the parameter.

    Place it last, as in `optax.chain(optax.adamw(1e-3), round_stochastically())`, inside
    accumulations and guards, and apply the updates with `apply_gradients` or `optax.apply_updates`.
    To keep the moments of the optimizer in float32, call its `init` with float32 parameters.

    | leaf | update |
    | --- | --- |
    | bfloat16 | float32; the random bits depend on `seed`, the step and the leaf |
    | bfloat16, where `p + u` is representable | `u`; a zero update changes nothing |
    | NaN or infinite `p + u` | NaN or infinite |
    | float32, float64, complex, float0 | unchanged |
    | float16, float8 | an error |
    | replicated over devices | equal on all devices |
    | sharded in `shard_map` | different bits on each device |
    | sharded in `pmap` and unchecked `shard_map` | the same bits on each device |

    Args:
        seed: Seed of the random bits; an integer >= 0.

    Returns:
        A transformation whose state is the number of steps. Its updates are float32 for bfloat16
        parameters and unchanged otherwise.

    Raises:
        ValueError: If `seed` is negative, or if `update` is called without parameters.
        TypeError: If a parameter is float16 or float8.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(optax.sgd(1.0), gcx.round_stochastically())
        >>> params = jnp.ones(4096, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> step = jax.jit(gcx.apply_gradients, static_argnums=0)
        >>> params, state = step(tx, jnp.full(4096, 0.001), state, params)
        >>> params.dtype.name, f"{params.astype(jnp.float32).mean():.3f}"
        ('bfloat16', '0.999')

    References:
        Gupta et al. 2015, arXiv 1502.02551; Zamirai et al. 2020, arXiv 2010.06192.
    """
    check_count("seed", seed, "Pass a nonnegative integer, such as the index of the run.", low=0)

    def init(params: Tree) -> RoundingState:
        return RoundingState(jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Tree, params: Tree | None = None
    ) -> tuple[Tree, RoundingState]:
        checked_leaves("updates", updates)
        check_state(state, RoundingState, "step")
        check_params(updates, params)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        structure = jax.tree.structure(updates)
        keys = structure.unflatten(jax.random.split(key, structure.num_leaves))
        out = jax.tree.map_with_path(_to_neighbor, updates, params, keys)
        step = (state.step + 1) & np.iinfo(np.int32).max  # 0 after 2^31 steps
        return out, RoundingState(step)

    return optax.GradientTransformation(init, update)


def _to_neighbor(path: Path, update: Array, param: Array, key: Array) -> Array:
    """Return an update that moves a bfloat16 parameter to its stochastically rounded value."""
    kind = jnp.result_type(param)
    if is_float0(update) or jnp.finfo(kind).bits >= 32:
        return update
    if kind != jnp.bfloat16:
        rule, hint = "bfloat16 or at least 32 bits wide", "Convert it, or use `optax.masked`."
        got = f"{describe(param)} at {leaf_path('params', path)}"
        raise type_error("params", rule, got, hint)
    old, update = (jnp.asarray(x).astype(jnp.float32) for x in (param, update))
    exact = old + update
    for axis in sorted(varying_axes(exact)):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    sharding = jax.typeof(exact).sharding
    explicit = {"out_sharding": sharding} if HAS_TYPES and is_explicit(sharding) else {}
    noise = jax.random.bits(key, exact.shape, jnp.uint16, **explicit)
    new = _up_or_down(exact, noise).astype(jnp.float32)
    return jnp.where(jnp.isinf(old), update, new - old)  # inf - inf is NaN


@jax.custom_jvp
def _up_or_down(x: Array, noise: Array) -> Array:
    """Round float32 numbers to bfloat16 after 16 random bits are added to their bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)
    new = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # Adding noise to the bits of a NaN may overflow and give the bits of zero.
    return jnp.where(jnp.isfinite(x), new, x.astype(jnp.bfloat16))


@_up_or_down.defjvp
def _jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _up_or_down(*primals), tangents[0].astype(jnp.bfloat16)
