"""Compiled for TPU chips: bytes and branches on one, scratch and collectives on sixteen."""

import pytest

pytest.importorskip("libtpu", reason="`make test-compiled-tpu` installs it")

import _sharded
from claims import LARGE, LARGE_BFLOAT16, NORMS, RULES, SLACK, size_of

pytestmark = pytest.mark.compiled_tpu
SECTION = "v5e:4x4, FSDP x tensor parallel"
TWO_LEAVES = {name: LARGE[name] for name in list(LARGE)[:2]}


@pytest.fixture(scope="module")
def sharded():
    """Each program of the GPT on sixteen chips, with N, by its title. A small one fits on chip."""
    found = {}

    def compiled(title):
        if title not in found:
            cases = _sharded.cases(False, lambda text: text.endswith(f"{SECTION}: {title}"))
            found[title] = {name.rpartition(": ")[2]: result for (_, name), result in cases}
        return found[title]

    return compiled


@pytest.mark.parametrize("title", [*NORMS, *RULES])
def test_no_norm_or_clip_holds_a_branch_or_a_loop(pair, title):
    ours, _ = pair("tpu", title, TWO_LEAVES)
    assert (ours.program.branches, ours.program.loops) == (0, 0)


@pytest.mark.parametrize("title", ["norm", "clip", "clip by leaf norm", "clip + AdamW"])
def test_moves_no_more_bytes_than_optax(pair, title):
    ours, theirs = pair("tpu", title, TWO_LEAVES)
    slack = SLACK * size_of(TWO_LEAVES)
    assert ours.program.always.moved <= theirs.program.always.moved + slack


def test_a_bfloat16_clip_moves_no_more_bytes_than_optax(pair):
    ours, theirs = pair("tpu", "clip", LARGE_BFLOAT16)
    slack = SLACK * size_of(LARGE_BFLOAT16)
    assert ours.program.always.moved <= theirs.program.always.moved + slack


@pytest.mark.parametrize("title", ["clip + AdamW", "skip_nonfinite(clip + AdamW), apply_gradients"])
def test_nothing_gathers_what_optax_does_not(sharded, title):
    found = sharded(title)
    ours, theirs = (found[who][0].program for who in ("gcx", "optax"))
    for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        gathered = ours.always.collectives.get(kind, []) + ours.inside.collectives.get(kind, [])
        assert len(gathered) <= len(theirs.always.collectives.get(kind, []))
    assert max(ours.always.collectives["all-reduce"], default=0) < 2**16


@pytest.mark.parametrize(("title", "more"), [("clip + AdamW", 0.1)])
def test_scratch_of_a_chip_is_that_of_optax(sharded, title, more):
    found = sharded(title)
    (ours, size), (theirs, _) = found["gcx"], found["optax"]
    assert ours.scratch <= theirs.scratch + more * size


def test_a_guard_of_norm_and_loss_reads_the_gradient_once_and_stops_no_host(cost):
    without, guarded, size = cost("tpu", "`skip_spikes` on norm and loss")
    assert (guarded.program.branches, guarded.program.loops) == (0, 0)
    assert guarded.program.always.moved <= without.program.always.moved + (1 + SLACK) * size


@pytest.mark.parametrize("unit", ["token", "example"])
def test_a_cotangent_is_clipped_in_the_products_beside_it(cost, unit):
    without, clipped, size = cost("tpu", f"`clip_cotangent`, each {unit}")
    assert (clipped.program.branches, clipped.program.loops) == (0, 0)
    assert clipped.program.always.moved <= without.program.always.moved + (0 + SLACK) * size
    assert clipped.scratch <= without.scratch + SLACK * size


def test_qk_clip_is_part_of_the_last_write_of_the_optimizer(cost):
    without, clipped, size = cost("tpu", "`qk_clip` in a step of AdamW")
    assert clipped.program.always.moved <= without.program.always.moved + SLACK * size
