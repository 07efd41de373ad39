"""Compiled for an H100 or for TPU chips: bytes, kernels, branches and scratch beside Optax's.

An environment compiles for one of them; `make test-compiled-cuda` and `make test-compiled-tpu`
make it, elsewhere these tests skip.
"""

import functools
import math

import _devices
import _sharded
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _costs import COSTS
from _programs import PROGRAMS
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PLATFORM = _devices.available()
if PLATFORM is None:
    pytest.skip("`make test-compiled-tpu` installs a compiler", allow_module_level=True)

pytestmark = getattr(pytest.mark, f"compiled_{PLATFORM}")
on_h100 = pytest.mark.skipif(PLATFORM != "cuda", reason="a claim about an H100")

# Leaves of one shape and dtype. Two compile for a TPU in half the time of four.
LARGE = ({"cuda": 4, "tpu": 2}[PLATFORM], (2048, 2048), "float32")
LARGE_BFLOAT16 = (4, (2048, 2048), "bfloat16")
NORMS = ["norm", "clip", "leaf norms", "clip by leaf norm", "clip by block RMS"]
RULES = ["zclip", "adagc", "adaptive_grad_clip"]
ACCUMULATIONS = ["hold (and emission inside)", "skip_nonfinite(accumulation)"]
MEASURED = [*NORMS, "adaptive_grad_clip", "clip + AdamW"]
# On a TPU what has a norm for each leaf needs up to 1.6 times as many.
BY_KERNELS = {"cuda": [*NORMS, "clip + AdamW"], "tpu": ["norm", "clip", "clip + AdamW"]}[PLATFORM]
IN_BFLOAT16 = {"cuda": MEASURED, "tpu": ["clip"]}[PLATFORM]
# For the sums of blocks and of columns, which are written and read again, three for each of Optax's.
SLACK = 0.03
# The sums of a norm on a TPU: 2 MB.
SCRATCH = {"cuda": 0.03, "tpu": 0.1}[PLATFORM]
# In units of N: on a TPU the products beside an activation take its clip along.
MOVED_BY_A_COTANGENT = {"cuda": 3, "tpu": 0}[PLATFORM]


def tree_of(leaves):
    count, shape, dtype = leaves
    return {f"l{i}": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for i in range(count)}


def size_of(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def compiled(make, leaves):
    return make().compile_for(PLATFORM, tree_of(leaves))


def pair(title, leaves=LARGE):
    """Ours, Optax's, and N."""
    makers = PROGRAMS[title].ours, PROGRAMS[title].theirs
    return *(compiled(make, leaves) for make in makers), size_of(tree_of(leaves))


def cost(name):
    """The program without a feature, the one with it, and N."""
    makers = COSTS[name].without, COSTS[name].with_it
    size = size_of(COSTS[name].unit(tree_of(LARGE)))
    return *(compiled(make, LARGE) for make in makers), size


@functools.cache
def sharded(title):
    """The programs of a GPT on many chips, ours and Optax's, and N; a small one fits on a TPU chip."""
    topology = next(iter(_sharded.CHIPS[PLATFORM]))
    name = f"{topology}, FSDP x tensor parallel: {title}"
    (ours, size), (theirs, _) = (
        found for _, found in _sharded.cases(PLATFORM, False, lambda text: text.endswith(name))
    )
    return ours, theirs, size


def runs_straight(program):
    return (program.branches, program.loops) == (0, 0)


@pytest.mark.parametrize("title", [*NORMS, *RULES])
def test_no_norm_or_clip_holds_a_branch_or_a_loop(title):
    assert runs_straight(pair(title)[0].program)


@pytest.mark.parametrize(
    ("title", "leaves"),
    [*((title, LARGE) for title in MEASURED), *((title, LARGE_BFLOAT16) for title in IN_BFLOAT16)],
    ids=str,
)
def test_moves_no_more_bytes_than_optax_and_holds_no_scratch(title, leaves):
    ours, theirs, size = pair(title, leaves)
    assert ours.program.always.moved <= theirs.program.always.moved + SLACK * size
    assert ours.scratch <= theirs.scratch + SLACK * size


@on_h100
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_few_columns_are_not_written_down(dtype):
    ours, theirs, size = pair("adaptive_grad_clip", (2, (3072, 768), dtype))
    assert ours.program.always.moved <= theirs.program.always.moved + 0.1 * size


@pytest.mark.parametrize("title", BY_KERNELS)
def test_large_leaves_need_no_more_kernels_than_optax(title):
    ours, theirs, _ = pair(title, (8, (2048, 2048), "float32"))
    scalars = 2 if title == "leaf norms" else 0  # all norms are one vector first
    if PLATFORM == "tpu" and title != "norm":
        scalars += 1  # the copy of a constant that the state of a clip has and Optax's has not
    assert ours.program.always.launches <= theirs.program.always.launches + scalars


@on_h100
def test_shards_on_eight_gpus_are_summed_where_they_are():
    gpus = Mesh(np.array(_devices.devices("cuda", "1x8x1")), ("data",))
    case = PROGRAMS["norm"].ours()
    args = _devices.placed(case.args(tree_of(LARGE)), NamedSharding(gpus, PartitionSpec("data")))
    moved = _devices.compile_for("cuda", case.function, *args).program.always
    assert moved.moved <= (1 + SLACK) * size_of(tree_of(LARGE)) / 8
    assert list(moved.collectives) == ["all-reduce"]


@on_h100
def test_the_sums_of_many_leaves_are_joined_by_few_kernels():
    ours, theirs, _ = pair("norm", (40, (256, 256), "float32"))
    assert ours.program.always.launches <= theirs.program.always.launches + 4


@pytest.mark.parametrize(
    ("title", "leaves", "share"),
    {
        "cuda": [
            ("norm", 100, 0.12),
            ("clip", 100, 0.12),
            ("clip by leaf norm", 100, 0.3),
            ("adaptive_grad_clip", 100, 0.3),
            ("clip by leaf norm", 300, 0.1),
            ("leaf norms", 300, 0.1),
        ],
        "tpu": [("norm", 100, 0.15), ("clip", 100, 0.15)],
    }[PLATFORM],
)
def test_small_leaves_are_summed_scaled_and_returned_many_at_a_time(title, leaves, share):
    ours, theirs, _ = pair(title, (leaves, (64,), "float32"))
    assert ours.program.always.launches <= share * theirs.program.always.launches


@pytest.mark.parametrize(
    ("title", "emission"),
    [
        ("hold (and emission inside) of AdamW, apply_gradients", 8),
        # The norm comes before the step, so the sum is read twice, or written and read: 2 N more.
        ("hold (and emission inside), apply_gradients", 10),
    ],
    ids=["AdamW", "clip + AdamW"],
)
def test_hold_step_and_emission_move_no_more_than_they_must(title, emission):
    ours, _, size = pair(title)
    hold = 3  # in units of N; which of them is inside a loop is left open
    moved = ours.program.always.moved + ours.program.inside.moved
    assert moved <= (hold + emission + SLACK) * size
    assert ours.program.branches == 0
    assert ours.scratch <= SCRATCH * size


@pytest.mark.parametrize("title", ACCUMULATIONS)
def test_an_emission_writes_no_second_gradient(title):
    """What has more than one reader goes into the accumulator: 2 N where N is of bfloat16."""
    ours, theirs, size = pair(f"{title}, apply_gradients", LARGE_BFLOAT16)
    assert ours.scratch <= theirs.scratch + SCRATCH * size
    assert (ours.program.branches, ours.program.loops) == (0, 2)  # hold and emission


@pytest.mark.parametrize(
    ("guarded", "moved"),
    [
        ("skip_nonfinite(AdamW)", 11),  # looks at update and next state
        ("dynamic_loss_scale(AdamW)", 11),
        ("skip_nonfinite(AdamW, check=gradient)", 8),
        ("skip_nonfinite(clip + AdamW, check=gradient)", 8),  # one norm for both
    ],
)
def test_a_guard_reads_no_more_than_it_must_without_stopping_the_host(guarded, moved):
    ours, _, size = pair(f"{guarded}, apply_gradients")
    assert runs_straight(ours.program)
    assert ours.program.always.moved <= (moved + SLACK) * size
    assert ours.scratch <= SCRATCH * size


def test_a_guard_of_norm_and_loss_reads_the_gradient_once_and_stops_no_host():
    without, guarded, size = cost("`skip_spikes` on norm and loss")
    assert runs_straight(guarded.program)
    assert guarded.program.always.moved <= without.program.always.moved + (1 + SLACK) * size


@pytest.mark.parametrize("unit", ["token", "example"])
def test_a_cotangent_is_clipped_in_one_read_or_beside_the_products(unit):
    without, clipped, size = cost(f"`clip_cotangent`, each {unit}")
    assert runs_straight(clipped.program)
    more = (MOVED_BY_A_COTANGENT + SLACK) * size
    assert clipped.program.always.moved <= without.program.always.moved + more
    assert clipped.scratch <= without.scratch + SLACK * size


def test_qk_clip_is_part_of_the_last_write_of_the_optimizer():
    without, clipped, size = cost("`qk_clip` in a step of AdamW")
    assert clipped.program.always.moved <= without.program.always.moved + SLACK * size


@pytest.mark.parametrize("title", ["clip + AdamW", "skip_nonfinite(clip + AdamW), apply_gradients"])
def test_nothing_gathers_what_optax_does_not(title):
    ours, theirs, _ = sharded(title)
    ours, theirs = ours.program, theirs.program
    for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        gathered = ours.always.collectives.get(kind, []) + ours.inside.collectives.get(kind, [])
        assert len(gathered) <= len(theirs.always.collectives.get(kind, []))
    assert max(ours.always.collectives["all-reduce"], default=0) < 2**16


@pytest.mark.parametrize(
    "title", ["clip + AdamW", *(f"{title}, apply_gradients" for title in ACCUMULATIONS)]
)
def test_scratch_of_a_chip_is_that_of_optax(title):
    ours, theirs, size = sharded(title)
    assert ours.scratch <= theirs.scratch + 0.1 * size
