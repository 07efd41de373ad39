"""Private training: per-example clipping, with the noise and accounting of jax_privacy.

pip install "gradclip_jax[privacy]" && python examples/private_training.py
"""

from pydoc_data.topics import topics

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition

import gradclip_jax as gcx


def main():
    text = "\n\n".join(topics[name] for name in sorted(topics))  # the manual of CPython
    letters = sorted(set(text))
    codes = np.array([letters.index(letter) for letter in text], np.int32)
    texts = codes[: len(codes) // 33 * 33].reshape(-1, 33)  # no overlap between examples

    def loss(params, ids):  # one text, a recurrent network
        def step(h, x):
            h = jnp.tanh(jnp.concatenate([h, x]) @ params["mix"])
            return h, h

        xs = params["embed"][ids[:-1]]
        _, hidden = jax.lax.scan(step, 0 * xs[0], xs)
        logits = hidden @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:]).mean()

    width = 64
    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": 0.5 * jax.random.normal(keys[0], (len(letters), width)),
        "mix": jax.random.normal(keys[1], (2 * width, width)) / np.sqrt(2 * width),
    }
    expected, steps, noise_multiplier, max_norm, delta = 64, 200, 0.7, 1.0, 1e-5
    rate, padded = expected / len(texts), 2 * expected  # eight standard deviations of room

    private = optax.chain(
        noise_addition.gaussian_privatizer(
            stddev=noise_multiplier * max_norm, prng_key=jax.random.key(1)
        ),
        optax.scale(1 / expected),
        optax.adam(1e-2),
    )
    clipped = gcx.per_example.value_and_grad(
        lambda params, example: (loss(params, example["ids"]), example["weight"]),
        max_norm,
        has_weight=True,
        reduction="sum",
        nonfinite="zero",
    )

    @jax.jit
    def private_step(params, state, batch, weights):
        _, grads = clipped(params, {"ids": batch, "weight": weights})
        updates, state = private.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sampling = batch_selection.CyclicPoissonSampling(sampling_prob=rate, iterations=steps)
    state = private.init(params)
    for drawn in sampling.batch_iterator(len(texts), rng=0):
        assert len(drawn) <= padded  # a truncation would need an accountant that supports it
        weights = np.arange(padded) < len(drawn)
        params, state = private_step(params, state, texts[np.resize(drawn, padded)], weights)

    step_event = dp_accounting.PoissonSampledDpEvent(
        rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    epsilon = dp_accounting.pld.PLDAccountant().compose(step_event, steps).get_epsilon(delta)
    print(f"epsilon {epsilon:.2f} at delta {delta}")


if __name__ == "__main__":
    main()
