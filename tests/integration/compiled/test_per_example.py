"""Per-example clipping of a small GPT, compiled for an H100: the memory of an ordinary gradient."""

import pytest

pytest.importorskip("jax_cuda12_plugin", reason="`make test-compiled-cuda` installs it")

from benchmarks.per_example import compiled as per_example_compiled

# The tied embedding outweighs activations: every example's gradient written down would take 400 MB
# more than the 480 MB of the ordinary one. On a TPU a model that compiles in a minute fits on chip.
SMALL = per_example_compiled.gpt2(tokens=128, layers=1, width=384, vocabulary=16384)


def test_clipped_gradients_take_little_more_scratch_than_an_ordinary_one():
    ordinary, ours = (
        per_example_compiled.compiled(program, SMALL, 16)
        for program in ("ordinary gradient", "`gcx.per_example`")
    )
    assert ours.scratch <= 1.1 * ordinary.scratch  # 1.00 for two layers of GPT-2, 32 x 256
    assert ours.flops <= 1.2 * ordinary.flops  # Gram matrices: 1.13 there, 1.00 at 8 x 1,024
