"""Per-example gradient norms and clipping of any loss, in one backward pass.

| function | result |
| --- | --- |
| `value_and_grad` | value and mean of clipped per-example gradients, with per-example statistics |
| `norms` | per-example gradient norms, optionally by group of leaves |

**Method.** For an example with T tokens, the gradient of a weight matrix is a sum of T outer
products of an input and an output gradient. Its norm and the clipped sum can be computed from these
two factors:

1. `_loss` binds the loss to the arguments of a call and traces the gradient of one example.
2. `_evaluate` evaluates this jaxpr. Where a primitive would multiply the two factors, a rule of
   `_rules` keeps them as a `Factored` array (`_factored`) instead.
3. `_gram` computes squared norms from the T x T Gram matrices of the factors (ghost norms), with an
   error bound.
4. `_clipped_sum` multiplies one factor by the clip factors, and contracts over tokens and examples
   at once (book-keeping, Bu et al. 2022, arXiv 2210.00038). If the norm of an example is not
   accurate enough, its gradient is materialized.
5. `_clip` contains the public functions.

**Dependence on JAX.** The jaxpr is read with the public module `jax.extend.core`, but JAX does not
guarantee the names and parameters of primitives. A primitive without a rule, such as a renamed one,
is evaluated as usual. The gradients that it returns are materialized, as in
`jax.vmap(jax.grad(loss))`, so the results stay correct but need more memory.
`tests/unit/per_example/test_random_losses.py` detects such a change: for common layers,
`test_gradients_of_weights_are_kept_as_factors` fails if a gradient is materialized, and
`test_every_step_is_exact` fails if a parameter has a new name or meaning.
"""

from ._clip import Stats, norms, value_and_grad

__all__ = ["Stats", "norms", "value_and_grad"]
