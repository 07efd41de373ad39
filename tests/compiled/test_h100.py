"""Compiled for an H100: bytes, kernels and branches beside Optax's."""

import pytest

pytest.importorskip("jax_cuda12_plugin", reason="`make test-compiled-cuda` installs it")

from claims import LARGE, LARGE_BFLOAT16, NORMS, RULES, SLACK, SMALL, size_of

pytestmark = pytest.mark.compiled_cuda


@pytest.mark.parametrize("title", [*NORMS, *RULES])
def test_no_norm_or_clip_holds_a_branch_or_a_loop(pair, title):
    ours, _ = pair("cuda", title, LARGE)
    assert (ours.program.branches, ours.program.loops) == (0, 0)


@pytest.mark.parametrize("tree", [LARGE, LARGE_BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("title", [*NORMS, "adaptive_grad_clip", "clip + AdamW"])
def test_moves_no_more_bytes_than_optax_and_holds_no_scratch(pair, title, tree):
    ours, theirs = pair("cuda", title, tree)
    size = size_of(tree)
    assert ours.program.always.moved <= theirs.program.always.moved + SLACK * size
    assert ours.scratch <= theirs.scratch + SLACK * size


@pytest.mark.parametrize("title", [*NORMS, "clip + AdamW"])
def test_large_leaves_need_no_more_kernels_than_optax(pair, title):
    ours, theirs = pair("cuda", title, LARGE)
    assert ours.program.always.launches <= theirs.program.always.launches


@pytest.mark.parametrize("title", ["norm", "clip"])
def test_small_leaves_are_summed_and_scaled_many_at_a_time(pair, title):
    ours, theirs = pair("cuda", title, SMALL)
    assert ours.program.always.launches <= 0.15 * theirs.program.always.launches


@pytest.mark.parametrize("title", ["clip by leaf norm", "adaptive_grad_clip"])
def test_norms_of_small_leaves_are_summed_and_scaled_many_at_a_time(pair, title):
    ours, theirs = pair("cuda", title, SMALL)
    assert ours.program.always.launches <= 0.3 * theirs.program.always.launches


def test_hold_step_moves_three_params_and_holds_no_scratch(pair):
    ours, _ = pair("cuda", "hold (and emission inside), apply_gradients", LARGE)
    size = size_of(LARGE)
    assert ours.program.always.moved <= (3 + SLACK) * size
    assert ours.program.inside.moved <= (8 + SLACK) * size
    assert ours.scratch <= SLACK * size


def test_a_guard_looks_at_update_and_state_without_stopping_the_host(pair):
    ours, _ = pair("cuda", "skip_nonfinite(AdamW), apply_gradients", LARGE)
    size = size_of(LARGE)
    assert (ours.program.branches, ours.program.loops) == (0, 0)
    assert ours.program.always.moved <= (11 + SLACK) * size
    assert ours.scratch <= SLACK * size
