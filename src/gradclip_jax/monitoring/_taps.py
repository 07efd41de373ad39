"""Statistics of activations and cotangents, returned as the gradient with respect to a probe."""

from __future__ import annotations

import itertools
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
    is_traced,
    leaf_path,
    refuse_traced,
    shortened,
)
from .._errors import public, type_error, value_error
from .._mesh import vary, varying_axes
from .._types import Array, Count, Tree

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
    is_valid = isinstance(names, (Sequence, Mapping)) and not isinstance(names, str)
    if not is_valid or not all(isinstance(name, str) for name in names):
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
        TypeError: If `x` is not a real floating-point array, or the dtype of `probe` is not
            float32.
        ValueError: If the shape of `probe` is not [2, 5].


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
    if np.shape(probe) != SHAPE:
        hint = "Pass the probes of stacked layers to `lax.scan` as `xs`."
        raise value_error("probe", f"float32{list(SHAPE)}", describe(probe), hint)
    if dtype_of(probe) != jnp.float32:
        hint = "Do not cast probes together with the parameters."
        raise type_error("probe", f"float32{list(SHAPE)}", describe(probe), hint)
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


def read_sums(argument: str, stats: Tree) -> tuple[list[str], Any]:
    """Return the names of all taps and an array of their sums, float[taps, 2, 5]."""
    entries = jax.tree_util.tree_leaves_with_path(stats)
    for path, leaf in entries:
        if np.shape(leaf)[-2:] != SHAPE:
            got = f"{describe(leaf)} at {leaf_path(argument, path)}"
            hint = "Pass the gradient with respect to the probes."
            raise value_error(argument, "a tree of float32[..., 2, 5]", got, hint)
    leaves = [leaf for _, leaf in entries]
    is_known = not any(map(is_traced, leaves))
    # Outside jit, all statistics are transferred to the host at once and computed in float64.
    arrays = [np.asarray(x, np.float64) for x in jax.device_get(leaves)] if is_known else leaves
    xp: Any = np if is_known else jnp
    paths = [[jax.tree_util.keystr((key,), simple=True) for key in path] for path, _ in entries]
    found, tables = list[str](), [xp.zeros((0, *SHAPE))]

    def stack_of(entry: tuple[list[str], Any]) -> tuple[tuple[int, ...], list[str]]:
        return np.shape(entry[1])[:-2], entry[0][:-1]

    for (layers, _), group in itertools.groupby(zip(paths, arrays, strict=True), stack_of):
        members = list(group)
        tables.append(xp.stack([x for _, x in members], -3).reshape(-1, *SHAPE))
        for index, (path, _) in itertools.product(np.ndindex(*layers), members):
            at = max(len(path) - 1, 1)  # the layer index follows the name of the stack
            stack = "/".join(path[:at]) + "".join(f"_{i}" for i in index)
            found.append("/".join([stack, *path[at:]]))
    return found, xp.concatenate(tables)


@public
def metrics(stats: Tree) -> dict[str, Any]:
    """Return the statistics of all taps as scalars for logging, next to `gradclip_jax.metrics`.

    | key | meaning |
    | --- | --- |
    | `taps/<name>/mean`, `taps/<name>/rms` | of the finite elements of the activation |
    | `taps/<name>/kurtosis` | `mean(x^4) / mean(x^2)^2`: 3 for a normal distribution of mean 0, |
    | | n if only one of n elements is nonzero; 0 if all elements are zero |
    | `taps/<name>/nonfinite` | share of non-finite elements |
    | `taps/<name>/cotangent_mean` and so on | the same statistics of the cotangent |

    Cotangents are proportional to the loss scale, and to 1/n if the loss is a mean over n tokens.

    Args:
        stats: Gradient with respect to the probes, for one step or summed or averaged over several
            steps.

    Returns:
        Scalar arrays inside jit. Python floats outside jit, where the call blocks until they are
        computed. NaN for a tap that was not called, and for the mean, RMS and kurtosis of a tap
        without finite elements.

    Raises:
        ValueError: If a leaf is not an array of shape [..., 2, 5].


    Examples:
        >>> import gradclip_jax as gcx
        >>> sorted(gcx.taps.metrics(gcx.taps.make_probes(["mlp"])))[:3]
        ['taps/mlp/cotangent_kurtosis', 'taps/mlp/cotangent_mean', 'taps/mlp/cotangent_nonfinite']
    """
    found, sums = read_sums("stats", stats)
    values = statistics(sums)
    is_known = isinstance(values, np.ndarray)
    out: dict[str, Any] = {}
    for i, name in enumerate(found):
        for j, kind in enumerate(("", "cotangent_")):
            for key, x in zip(STATISTICS, values[i, j], strict=True):
                out[f"taps/{name}/{kind}{key}"] = float(x) if is_known else x
    return out


def statistics(sums: Any) -> Any:
    """Compute the statistics of taps from their sums, [..., 4]; NaN for a tap without elements."""
    xp: Any = np if isinstance(sums, np.ndarray) else jnp
    with np.errstate(divide="ignore", invalid="ignore"):
        size, total, squares, fourths, bad = (sums[..., i] for i in range(SHAPE[1]))
        count = size - bad  # of finite elements
        alike = squares / _BELOW  # scaled as in x^4
        kurtosis = fourths / alike * (count / alike)
        columns = [
            total / count,
            xp.sqrt(squares / count) / np.sqrt(_SCALES * _BELOW, dtype=np.float32),
            xp.where(squares > 0, kurtosis, 0 / count),
            bad / size,
        ]
    return xp.where((size > 0)[..., None], xp.stack(columns, -1), np.nan)


@public
def first_nonfinite_index(stats: Tree) -> Array:
    """Return the indices in `names(stats)` of the taps where non-finite values first appear.

    Unlike `first_nonfinite`, this function works inside jit.

    Args:
        stats: Gradient with respect to the probes.

    Returns:
        int32[2]: the first tap of the forward pass with a non-finite activation, and the first tap
        of the backward pass with a non-finite cotangent, which is the last such tap in `names`. -1
        if there is no such tap.

    Raises:
        ValueError: If a leaf is not an array of shape [..., 2, 5].


    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.taps.first_nonfinite_index(gcx.taps.make_probes(["mlp"])).tolist()
        [-1, -1]
    """
    return first_nonfinite_of(read_sums("stats", stats)[1])


def first_nonfinite_of(sums: Any) -> Array:
    """Compute `first_nonfinite_index` from the sums of all taps."""
    is_bad = jnp.asarray(sums[..., -1] != 0)
    index = jnp.arange(len(is_bad), dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(is_bad, index, -1), axis=0, initial=-1)
    first = jnp.min(jnp.where(is_bad, index, len(is_bad)), axis=0, initial=len(is_bad))
    return jnp.stack([jnp.where(last[0] < 0, -1, first[0]), last[1]])


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
        TypeError: If called inside jit; use `first_nonfinite_index` there.
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
    found = names(stats)
    refuse_traced("stats", jax.tree.leaves(stats)[0] if found else None)
    indices = first_nonfinite_index(stats).tolist()
    return FirstNonfinite(*(found[i] if i >= 0 else None for i in indices))
