"""Statistics of activations and cotangents, returned as the gradient with respect to a probe."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import check_array, check_length
from .._devices import fusion_barrier
from .._errors import public, type_error, value_error
from .._format import describe, distinct, leaf_name, leaf_path, shortened
from .._types import Array, Count, HostArray, Path, Tree
from ..norms._leaves import checked_leaves
from ..norms._mesh import vary, varying_axes
from ..norms._reduce import squares

SHAPE = (2, 4)
"""Sums of a tap: the element count, the sums of x and x^2, and the non-finite count, for the
activation and its cotangent."""

STATISTICS = ("mean", "rms", "nonfinite")
"""Names of the values that `statistics` computes from the sums."""

_SCALES = 2.0**-20, 1.0  # of activations and cotangents before they are squared


@public
def make_probes(names: Sequence[str] | Mapping[str, Tree], num_layers: Count | None = None) -> Tree:
    """Create the probes of a model from the names of its taps.

    List the names in the order of the forward pass, because `metrics` and incidents use this order.
    The result is an `OrderedDict`, because JAX sorts the keys of a dict.

    Args:
        names: Names of the taps, or a mapping from each name to None, which creates one tap, or to
            the probes of a submodule.
        num_layers: Number of layers that `lax.scan` runs over, which becomes the leading axis of
            each probe. None if the taps are not inside a scan. Taps with the same number of layers
            in one mapping belong to the same scan, so use a separate submodule for each scan.

    Returns:
        Zeros, float32[2, 4] or float32[num_layers, 2, 4] for each name. The values are ignored.

    Raises:
        TypeError: If `names` is a string, or if `num_layers` is not a static integer.
        ValueError: If `num_layers` is less than 1.

    Examples:
        >>> import gradclip_jax as gcx
        >>> layers = gcx.taps.make_probes(["attention", "mlp"], num_layers=2)
        >>> probes = gcx.taps.make_probes({"embed": None, "layers": layers, "head": None})
        >>> probes["layers"]["mlp"].shape
        (2, 2, 4)
    """
    is_sequence = isinstance(names, Mapping) or type(names) in (list, tuple)
    if not (is_sequence and all(isinstance(x, str) for x in names)):
        hint = 'Pass for example `["mlp"]` for one tap.'
        raise type_error("names", "a list of names or a mapping", shortened(names), hint)
    if num_layers is not None:
        num_layers = check_length("num_layers", num_layers, "Pass None without `lax.scan`.")
    probe = jnp.zeros(SHAPE if num_layers is None else (num_layers, *SHAPE), jnp.float32)
    parts = names if isinstance(names, Mapping) else dict.fromkeys(names)
    return OrderedDict((name, probe if part is None else part) for name, part in parts.items())


@public
@jax.named_scope("tap")
def tap(x: Array, probe: Array | None) -> Array:
    """Return x unchanged, and compute statistics of x and its cotangent in the backward pass.

    The statistics are returned as the gradient with respect to `probe`. The cotangent of x is
    unchanged.

    | case | effect |
    | --- | --- |
    | no gradient with respect to the probe | no statistics are computed |
    | the probe is None | x is returned, and the program is the same as without the tap |
    | the same probe in several taps | the sum of their statistics |
    | inside `lax.scan`, one probe for each layer | one row for each layer |
    | inside `vmap` over examples | `vmap(grad)` returns statistics per example, `grad` their sum |
    | inside `shard_map` | the sum over all devices along the axes over which x varies |
    | non-finite elements | counted, and excluded from the sums |
    | x does not affect the loss | all sums are zero, and `metrics` returns NaN |

    Sums are computed in float32. For up to 10^10 elements, the RMS is accurate between 1e-11 and
    1e20 for activations and between 1e-17 and 1e14 for cotangents. A larger RMS is returned as
    infinity. A float64 element above 3e38 counts as infinite.

    Args:
        x: Real floating-point array. For a pytree, use one probe for each leaf.
        probe: Probe from `make_probes`, float32[2, 4], or None to disable the tap.

    Returns:
        x. The function has no forward-mode derivative.

    Raises:
        TypeError: If `x` is not a real floating-point array.
        ValueError: In the backward pass, if `probe` is not float32[2, 4]. Do not cast probes, and
            pass the probes of stacked layers to `lax.scan` as `xs`.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, probes, x):
        ...     return jnp.sum(gcx.taps.tap(w * x, probes["product"]) ** 2)
        >>> probes = gcx.taps.make_probes(["product"])
        >>> x = jnp.array([3.0, 4.0, 0.0])
        >>> grad, stats = jax.jit(jax.grad(loss, argnums=(0, 1)))(1.0, probes, x)
        >>> [round(float(v), 4) for v in gcx.taps.metrics(stats).values()][:3]
        [2.3333, 2.8868, 0.0]
    """
    check_array("x", x)
    checked_leaves("x", x, real=True)  # also checks the placement
    if probe is None:
        return x
    check_array("probe", probe)
    # In the backward pass, the transpose of `vary` sums the statistics over all devices.
    return _tap(x, vary(jnp.asarray(probe), varying_axes(x)))


@jax.custom_vjp
def _tap(x: Array, probe: Array) -> Array:
    return x


def _forward(x: Array, probe: Array) -> tuple[Array, Array]:
    # Save only the sums for the backward pass, because saving x would require more memory.
    return x, vary(_sums(x, _SCALES[0]), varying_axes(probe))


def _backward(sums: Array, cotangent: Array) -> tuple[Array, Array]:
    return cotangent, jnp.stack([sums, vary(_sums(cotangent, _SCALES[1]), varying_axes(sums))])


_tap.defvjp(_forward, _backward)


def _sums(x: Array, scale: float) -> Array:
    """Return the number of elements, the sums of x and x^2, and the non-finite count."""
    wide = x.astype(jnp.float32)
    is_finite = jnp.isfinite(wide)
    wide = jnp.where(is_finite, wide, 0)
    # The barrier keeps XLA from rewriting the square to `x^2 * scale^2`, which may overflow.
    scaled = wide * fusion_barrier(jnp.float32(scale))
    terms = wide, squares(scaled, jnp.float32), (~is_finite).astype(jnp.float32)
    # Use one variadic reduction, because XLA:CPU materializes the operands of separate reductions
    # (JAX 0.10.2: 1.32 x the bytes of a step instead of 1.04 x).
    # Reduce one axis at a time, because XLA:CPU adds elements sequentially.
    # In one sequential sum, the rounding errors of 10^7 additions reach 3 %.
    for axis in reversed(range(x.ndim)):
        terms = lax.reduce(terms, (np.float32(0),) * 3, optax.tree.add, (axis,))
    return jnp.stack([jnp.float32(x.size), *terms])


@public
def metrics(stats: Tree) -> dict[str, float]:
    """Return the statistics of all taps as scalars for logging, next to `gradclip_jax.metrics`.

    | key | meaning |
    | --- | --- |
    | `taps/<name>/mean`, `taps/<name>/rms` | of the finite elements of the activation |
    | `taps/<name>/nonfinite` | share of non-finite elements |
    | `taps/<name>/cotangent_mean` and so on | the same statistics of the cotangent |

    The names are in the order of the forward pass. Layer 3 of a scan has names such as
    `layers/mlp[3]`. The call blocks until the statistics are computed. Cotangents are proportional
    to the loss scale, and to 1/n if the loss is a mean over n tokens.

    Args:
        stats: Gradient with respect to the probes for one step, or its sum or mean over several
            steps.

    Returns:
        Python floats. NaN for a tap that was not called, and for the mean and RMS of a tap
        without finite elements.

    Raises:
        TypeError: If called inside jit.
        ValueError: If a leaf is not an array of shape [..., 2, 4].

    Examples:
        >>> import gradclip_jax as gcx
        >>> probes = gcx.taps.make_probes({"layers": gcx.taps.make_probes(["mlp"], num_layers=2)})
        >>> list(gcx.taps.metrics(probes))[::6]
        ['taps/layers/mlp[0]/mean', 'taps/layers/mlp[1]/mean']
    """
    names, sums = read_sums("stats", stats)
    keys = [f"{side}{key}" for side in ("", "cotangent_") for key in STATISTICS]
    values = statistics(np.asarray(sums, np.float64)).ravel().tolist()
    return dict(zip((f"taps/{name}/{key}" for name in names for key in keys), values, strict=True))


def tap_names(argument: str, stats: Tree) -> list[str]:
    """Return the names of all taps in the order of the forward pass."""
    names = list[str]()
    for shape, stack in _scans(argument, stats):
        # List all taps of one layer of a scan before those of the next layer.
        names += [leaf_name(path, i) for i in np.ndindex(shape[:-2]) for path, _ in stack]
    return distinct(names)


def read_sums(argument: str, stats: Tree) -> tuple[list[str], Array]:
    """Return the names of all taps in the order of the forward pass, and float32[taps, 2, 4]."""
    tables = [jnp.zeros((0, *SHAPE), jnp.float32)]
    for _, stack in _scans(argument, stats):
        tables.append(jnp.stack([sums for _, sums in stack], -3).reshape(-1, *SHAPE))
    return tap_names(argument, stats), jnp.concatenate(tables)


def _scans(
    argument: str, stats: Tree
) -> Iterator[tuple[tuple[int, ...], list[tuple[Path, Array]]]]:
    """For each scan, and for each tap without a scan, yield the shape of the sums and the taps."""
    leaves = jax.tree.leaves_with_path(stats)
    for path, x in leaves:
        if np.shape(x)[-2:] != SHAPE:
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            hint = "Pass the gradient with respect to the probes."
            raise value_error(argument, "a tree of float32[..., 2, 4]", got, hint)
    for (_, shape), stack in itertools.groupby(leaves, lambda x: (x[0][:-1], x[1].shape)):
        yield shape, list(stack)


def statistics(sums: HostArray) -> HostArray:
    """Compute the statistics of taps, [..., 3], from their sums; NaN for a tap without elements."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size, total, square, bad = np.moveaxis(sums, -1, 0)
        count = size - bad  # of finite elements
        return np.stack([total / count, np.sqrt(square / count) / _SCALES, bad / size], -1)
