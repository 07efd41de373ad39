"""Whole training steps compiled for an H100 or a TPU: bytes, launches and scratch beside Optax's.

An environment compiles for one of them; `make test-compiled-cuda` and `make test-compiled-tpu`
make it, elsewhere these tests skip. All models: `make bench-compiled`.
"""

import functools

import _devices
import jax
import pytest
from _models import MODELS, gpt
from _rows import OPTAX, ROWS
from features_compiled import COSTS, tree_of

import compiled

PLATFORM = _devices.available()
if PLATFORM is None:
    pytest.skip("`make test-compiled-tpu` installs a compiler", allow_module_level=True)

pytestmark = getattr(pytest.mark, f"compiled_{PLATFORM}")

# A TPU compiles a GPT for 15 s, and PPO's networks for 2.
SMALL = {"cuda": ["PPO", "scan GPT, small"], "tpu": ["PPO"]}[PLATFORM]
CLIPS = ["clip_by_global_norm", "clip_by_leaf_norm", "adaptive_grad_clip"]
SHARDED = gpt(2, 512, 5120, 32, 256, scan=True)
# In units of N: on a TPU the products beside an activation take its clip along.
MOVED_BY_A_COTANGENT = {"cuda": 3, "tpu": 0}[PLATFORM]
SLACK = 0.03


# Goals that are not reached. May only become shorter; benchmarks/README.md has the figures. Scratch of
# these small networks on a TPU is 0 or some 90 N, for near-identical programs of Optax as well.
SCRATCH = {"scratch, N"} if PLATFORM == "tpu" else set()
NOT_REACHED = {
    "cuda": {
        ("PPO", "adaptive_grad_clip"): {"launches"},
        ("PPO", "autoclip"): {"launches"},
        ("PPO", "adagc"): {"launches"},
        ("PPO", 'skip_nonfinite(check="step")'): {"bytes, N", "launches", "scratch, N"},
        ("PPO", "skip_large_norm"): {"launches"},
        ("PPO", "skip_spikes"): {"launches"},
        ("PPO", "skip_nonfinite(accumulate_gradients(clip))"): {"launches"},
        ("PPO", "microbatched_value_and_grad"): {"launches"},
        ("scan GPT, small", "clip_by_global_norm"): {"launches"},
        ("scan GPT, small", "adaptive_grad_clip"): {"launches"},
    },
    "tpu": {
        ("PPO", "clip_by_global_norm"): {"launches"},
        ("PPO", "adaptive_grad_clip"): {"launches"},
        ("PPO", "autoclip"): {"bytes, N", "launches"},
        ("PPO", "adagc"): {"bytes, N", "launches"},
        ("PPO", "skip_nonfinite"): {"launches"},
        ("PPO", 'skip_nonfinite(check="step")'): {"bytes, N", "launches"},
        ("PPO", "skip_large_norm"): {"launches"},
        ("PPO", "skip_spikes"): {"launches"},
        ("PPO", "microbatched_value_and_grad"): {"launches"},
    },
}[PLATFORM]


@functools.cache
def optax_step(model, name):
    return compiled.measure(OPTAX[name](MODELS[model]()), MODELS[model](), PLATFORM)


def missed(ours, theirs, goals):
    """What is more than the goal allows."""
    pairs = {goal: (ours[goal], theirs[goal]) for goal in goals}
    return {
        goal: pair for goal, pair in pairs.items() if compiled.cell(goal, *pair).startswith("**")
    }


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("model", SMALL)
def test_step_reaches_the_goals(model, name):
    row = ROWS[name]
    ours = compiled.measure(row.ours(MODELS[model]()), MODELS[model](), PLATFORM)
    theirs = optax_step(model, row.theirs)
    for phase in ("held", "emitted") if row.accumulates else ("",):
        found = (record | record["phases"][phase] for record in (ours, theirs))
        allowed = NOT_REACHED.get((model, name), set()) | SCRATCH
        assert missed(*found, ["bytes, N", "launches", "scratch, N"]).keys() <= allowed


@pytest.mark.parametrize("name", CLIPS)
def test_sharded_step_gathers_nothing_that_optax_does_not(name):
    ours, theirs = (
        compiled.measure(make(SHARDED), SHARDED, PLATFORM, many=True)
        for make in (ROWS[name].ours, OPTAX[ROWS[name].theirs])
    )
    assert ours["collectives"].count("all-gather") <= theirs["collectives"].count("all-gather")
    assert ours["scratch, N"] <= theirs["scratch, N"] + 0.2  # the goal, 0.05, but for rows


def cost(name):
    """The program without a feature, the one with it, and N."""
    tree = tree_of(2, 2048)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(COSTS[name].unit(tree)))
    return *(
        make().compile_for(PLATFORM, tree) for make in (COSTS[name].without, COSTS[name].with_it)
    ), size


def test_a_guard_of_norm_and_loss_reads_the_gradient_once_and_stops_no_host():
    without, guarded, size = cost("`skip_spikes` on norm and loss")
    assert guarded.program.always.stops == 0
    assert guarded.program.always.moved <= without.program.always.moved + (1 + SLACK) * size


@pytest.mark.parametrize("unit", ["token", "example"])
def test_a_cotangent_is_clipped_in_one_read_or_beside_the_products(unit):
    without, clipped, size = cost(f"`clip_cotangent`, each {unit}")
    assert clipped.program.always.stops == 0
    more = (MOVED_BY_A_COTANGENT + SLACK) * size
    assert clipped.program.always.moved <= without.program.always.moved + more
    assert clipped.scratch <= without.scratch + SLACK * size


def test_qk_clip_is_part_of_the_last_write_of_the_optimizer():
    without, clipped, size = cost("`qk_clip` in a step of AdamW")
    assert clipped.program.always.moved <= without.program.always.moved + SLACK * size
