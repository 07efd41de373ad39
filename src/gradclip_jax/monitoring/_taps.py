"""Statistics of activations and cotangents, returned as the gradient with respect to a probe."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    check_length,
    describe,
    dtype_of,
    leaf_path,
    shortened,
)
from .._errors import public, type_error, value_error
from .._mesh import vary, varying_axes
from .._types import Array, Count, HostArray, Tree

SHAPE = (2, 5)
"""Sums of a tap: the element count, the sums of x, x^2 and x^4, and the non-finite count, for the
activation and its cotangent."""

STATISTICS = ("mean", "rms", "kurtosis", "nonfinite")
"""What `statistics` computes from the sums."""

_SCALES = np.array([2.0**-20, 2.0**20], np.float32)  # scales of the squares in x^4
_BELOW = 2.0**-20  # additional scale of summed squares, which prevents overflow for large x
_LARGEST = 2.0**45  # limit for scaled squares, so that 10^11 fourth powers can be summed


@public
def make_probes(names: Sequence[str] | Mapping[str, Tree], num_layers: Count | None = None) -> Tree:
    """Create the probes of a model from the names of its taps.

    List the names in the order of the forward pass, because `first_nonfinite` relies on this order.
    The result is an `OrderedDict`, because JAX sorts the keys of a dict.

    Args:
        names: Names of the taps, or a mapping from each name to None for a single tap or to the
            probes of a submodule.
        num_layers: Number of layers that `lax.scan` runs over, which becomes the leading axis of
            each probe. None if the taps are not inside a scan. Taps with the same number of layers
            in one mapping belong to the same scan, so use a separate submodule for each scan.

    Returns:
        Zeros, float32[2, 5] or float32[num_layers, 2, 5] for each name. The values are ignored.

    Raises:
        TypeError: If `names` is neither a sequence of strings nor a mapping from strings.
        ValueError: If `num_layers` is < 1.


    Examples:
        >>> import gradclip_jax as gcx
        >>> layers = gcx.taps.make_probes(["attention", "mlp"], num_layers=2)
        >>> probes = gcx.taps.make_probes({"embed": None, "layers": layers, "head": None})
        >>> probes["layers"]["mlp"].shape
        (2, 2, 5)
        >>> gcx.taps.names(probes)  # doctest: +NORMALIZE_WHITESPACE
        ['embed', 'layers_0/attention', 'layers_0/mlp',
         'layers_1/attention', 'layers_1/mlp', 'head']
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        rule = "a list of strings, or a mapping with string keys"
        raise type_error("names", rule, shortened(names), 'Pass for example ["embed", "mlp"].')
    shape = SHAPE
    if num_layers is not None:
        hint = "Pass the number of layers that `lax.scan` runs over."
        check_length("num_layers", num_layers, hint)
        shape = (int(num_layers), *SHAPE)
    parts = names if isinstance(names, Mapping) else dict.fromkeys(names)
    probe = jnp.zeros(shape, jnp.float32)
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

    Sums are computed in float32. For up to 10^10 elements, the RMS is accurate between 1e-12 and
    1e20 for activations and between 1e-18 and 1e14 for cotangents. A larger RMS is returned as
    infinity. The kurtosis of activations is accurate if the RMS is above 1e-5 and all elements are
    below 5e9. The kurtosis of cotangents requires an RMS above 1e-11 and elements below 5e3. Larger
    elements are clamped in the sum of x^4. A float64 element above 3e38 counts as infinite.

    Args:
        x: Real floating-point array. For a pytree, use one probe for each leaf.
        probe: Probe from `make_probes`, float32[2, 5], or None to disable the tap.

    Returns:
        x. The function has no forward-mode derivative.

    Raises:
        TypeError: If `x` is not a real floating-point array.
        ValueError: If `probe` is not float32[2, 5].


    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, probes, x):
        ...     return jnp.sum(gcx.taps.tap(w * x, probes["product"]) ** 2)
        >>> probes = gcx.taps.make_probes(["product"])
        >>> x = jnp.array([3.0, 4.0, 0.0])
        >>> grad, stats = jax.grad(loss, argnums=(0, 1))(1.0, probes, x)
        >>> [round(float(v), 4) for v in gcx.taps.metrics(stats).values()][:3]
        [2.3333, 2.8868, 1.6176]
    """
    if not jnp.issubdtype(dtype_of(x), jnp.floating):
        hint = "Pass an activation; tap the real and imaginary parts of a complex array separately."
        raise type_error("x", "a real floating array", describe(x), hint)
    if probe is None:
        return x
    if np.shape(probe) != SHAPE or dtype_of(probe) != jnp.float32:
        hint = "Do not cast probes, and pass those of stacked layers to `lax.scan` as `xs`."
        raise value_error("probe", f"float32{list(SHAPE)}", describe(probe), hint)
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
    """Return the number of elements, the sums of x, x^2 and x^4, and the non-finite count."""
    wide = x.astype(jnp.float32)
    is_finite = jnp.isfinite(wide)
    wide = jnp.where(is_finite, wide, 0)
    scaled = wide * scale
    fourth = jnp.square(jnp.minimum(wide * scaled, _LARGEST))
    terms = wide, wide * (scaled * _BELOW), fourth, (~is_finite).astype(jnp.float32)
    # Use one variadic reduction, because XLA:CPU materializes the operands of four reductions
    # (JAX 0.10.2: 1.32 x the bytes of a step instead of 1.04 x).
    # Reduce one axis at a time, because XLA:CPU adds elements sequentially.
    # In one sequential sum, the rounding errors of 10^7 additions reach 3 %.
    for axis in reversed(range(x.ndim)):
        terms = lax.reduce(terms, (np.float32(0),) * 4, _add_all, (axis,))
    return jnp.stack([jnp.float32(x.size), *terms])


def _add_all(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(jnp.add, a, b))


@public
def names(stats: Tree) -> list[str]:
    """Return the names of the taps in the order of the forward pass.

    For stacked layers, the layer index is appended to the name of the stack, as in `layers_3/mlp`.

    Args:
        stats: Statistics or probes.

    Returns:
        List with one name for each tap and layer.

    Raises:
        ValueError: If a leaf is not an array of shape [..., 2, 5].


    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.taps.names(gcx.taps.make_probes(["mlp"], num_layers=2))
        ['mlp_0', 'mlp_1']
    """
    return read_sums("stats", stats)[0]


def read_sums(argument: str, stats: Tree) -> tuple[list[str], Array]:
    """Return the names of all taps and an array of their sums, float32[taps, 2, 5]."""
    entries: list[tuple[tuple[Any, ...], str, Array]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(stats):
        if np.shape(leaf)[-2:] != SHAPE:
            got = f"{describe(leaf)} at {leaf_path(argument, path)}"
            hint = "Pass the gradient with respect to the probes."
            raise value_error(argument, "a tree of float32[..., 2, 5]", got, hint)
        *stack, name = [jax.tree_util.keystr((key,), simple=True) for key in path] or [""]
        entries.append(((*stack, np.shape(leaf)[:-2]), name, leaf))
    found, tables = list[str](), [jnp.zeros((0, *SHAPE), jnp.float32)]
    for (*stack, layers), group in itertools.groupby(entries, operator.itemgetter(0)):
        _, taps, leaves = zip(*group, strict=True)
        tables.append(jnp.stack(leaves, -3).reshape(-1, *SHAPE))
        for index, name in itertools.product(np.ndindex(*layers), taps):
            # The layer index follows the name of the stack.
            parts = [*stack, name] if stack else [name]
            parts[max(len(stack), 1) - 1] += "".join(f"_{i}" for i in index)
            found.append("/".join(parts))
    return found, jnp.concatenate(tables)


@public
def metrics(stats: Tree) -> dict[str, float]:
    """Return the statistics of all taps as scalars for logging, next to `gradclip_jax.metrics`.

    | key | meaning |
    | --- | --- |
    | `taps/<name>/mean`, `taps/<name>/rms` | of the finite elements of the activation |
    | `taps/<name>/kurtosis` | `mean(x^4) / mean(x^2)^2`: 3 for a normal distribution of mean 0, |
    | | n if only one of n elements is nonzero; 0 if all elements are zero |
    | `taps/<name>/nonfinite` | share of non-finite elements |
    | `taps/<name>/cotangent_mean` and so on | the same statistics of the cotangent |

    The call blocks until the statistics are computed. Cotangents are proportional to the loss
    scale, and to 1/n if the loss is a mean over n tokens.

    Args:
        stats: Gradient with respect to the probes, for one step or summed or averaged over several
            steps.

    Returns:
        Python floats. NaN for a tap that was not called, and for the mean, RMS and kurtosis of a
        tap without finite elements.

    Raises:
        TypeError: If called inside jit.
        ValueError: If a leaf is not an array of shape [..., 2, 5].


    Examples:
        >>> import gradclip_jax as gcx
        >>> sorted(gcx.taps.metrics(gcx.taps.make_probes(["mlp"])))[:3]
        ['taps/mlp/cotangent_kurtosis', 'taps/mlp/cotangent_mean', 'taps/mlp/cotangent_nonfinite']
    """
    found, sums = _read_on_host(stats)
    values = statistics(sums).reshape(len(found), 2 * len(STATISTICS))
    keys = [f"{kind}{key}" for kind in ("", "cotangent_") for key in STATISTICS]
    rows = zip(found, values.tolist(), strict=True)
    return {f"taps/{name}/{key}": x for name, row in rows for key, x in zip(keys, row, strict=True)}


def _read_on_host(stats: Tree) -> tuple[list[str], HostArray]:
    found, sums = read_sums("stats", stats)
    return found, np.asarray(sums, np.float64)


def statistics(sums: HostArray) -> HostArray:
    """Compute the statistics of taps from their sums, [..., 4]; NaN for a tap without elements."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size, total, squares, fourths, bad = np.moveaxis(sums, -1, 0)
        count = size - bad  # of finite elements
        alike = squares / _BELOW  # scaled as in x^4
        kurtosis = np.where(squares > 0, fourths / alike * (count / alike), 0 / count)
        rms = np.sqrt(squares / count / (_SCALES * _BELOW))
        return np.stack([total / count, rms, kurtosis, bad / size], -1)


class FirstNonfinite(NamedTuple):
    """Names of the taps where non-finite values first appear, printed as a sentence.

    Attributes:
        activation: Name of the first tap of the forward pass with a non-finite activation, or None.
        cotangent: Name of the first tap of the backward pass with a non-finite cotangent, or None.
            A non-finite activation usually makes the loss and then all cotangents non-finite.


    Examples:
        >>> import gradclip_jax as gcx
        >>> print(gcx.taps.FirstNonfinite("layers_3/mlp", None))
        first non-finite activation: layers_3/mlp
    """

    activation: str | None
    cotangent: str | None

    def __str__(self) -> str:
        """Describe the first non-finite taps, or state that all elements are finite."""
        named = [f"first non-finite {kind}: {x}" for kind, x in self._asdict().items() if x]
        return "; ".join(named) or "all activations and cotangents are finite"


@public
def first_nonfinite(stats: Tree) -> FirstNonfinite:
    """Return the names of the taps where non-finite values first appear.

    The call blocks until the statistics are computed.

    Args:
        stats: Gradient with respect to the probes for one step.

    Returns:
        The names; None if all activations or all cotangents are finite.

    Raises:
        TypeError: If called inside jit.
        ValueError: If a leaf is not an array of shape [..., 2, 5].


    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, probes):
        ...     h = gcx.taps.tap(jnp.log(w), probes["log"])
        ...     return jnp.sum(gcx.taps.tap(h * h, probes["square"]))
        >>> probes = gcx.taps.make_probes(["log", "square"])
        >>> print(gcx.taps.first_nonfinite(jax.grad(loss, argnums=1)(-1.0, probes)))
        first non-finite activation: log; first non-finite cotangent: log
    """
    found, sums = _read_on_host(stats)
    is_bad = sums[..., -1] > 0
    first, last = np.flatnonzero(is_bad[:, 0]), np.flatnonzero(is_bad[:, 1])
    # The last tap in the order of the forward pass is the first of the backward pass.
    return FirstNonfinite(
        found[first[0]] if len(first) else None, found[last[-1]] if len(last) else None
    )
