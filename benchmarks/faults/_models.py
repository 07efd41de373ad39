"""Nine small models with their losses and optimizers, into which `detect` injects faults.

The constants of the detector were chosen on the first seven.
"""

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx


def dense(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def normal(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def weights(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {name: dense(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def gpt(key):
    """Next-token prediction, layers in `scan`; AdamW behind a clip."""
    params = {
        "layers": weights(key, qkv=(3, 24, 72), wo=(3, 24, 24), wi=(3, 24, 48), out=(3, 48, 24)),
        **weights(jax.random.fold_in(key, 1), embed=(32, 24), head=(24, 32)),
    }

    def loss(params, key):
        start, step = jax.random.randint(key, (2, 16, 1), 0, 7)
        tokens = (start + (step + 1) * jnp.arange(12)) % 32
        tokens = jnp.where(jax.random.uniform(key, tokens.shape) < 0.1, tokens // 2, tokens)

        def block(h, layer):
            q, k, v = jnp.split(normal(h) @ layer["qkv"], 3, -1)
            scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), q @ k.swapaxes(-1, -2) / 5, -1e9)
            h = h + jax.nn.softmax(scores) @ v @ layer["wo"]
            return h + jax.nn.gelu(normal(h) @ layer["wi"]) @ layer["out"], None

        h, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
        logits = normal(h) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return params, loss, optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3))


def gru(key):
    """The sum of a sequence; RMSProp."""
    params = weights(key, x=(4, 72), h=(24, 72), out=(24, 1))

    def loss(params, key):
        x = jax.random.normal(key, (16, 10, 4))

        def cell(h, x):
            a, b = x @ params["x"], h @ params["h"]
            z, r = (jax.nn.sigmoid((a + b)[:, i : i + 24]) for i in (0, 24))
            return z * h + (1 - z) * jnp.tanh(a[:, 48:] + r * b[:, 48:]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((16, 24)), x.swapaxes(0, 1))
        return jnp.mean((h @ params["out"] - jnp.tanh(x.sum((1, 2)))[:, None]) ** 2)

    return params, loss, optax.rmsprop(1e-3)


def conv(key):
    """Autoencoder of one-dimensional signals; Adafactor."""
    shapes = {"enc1": (3, 2, 8), "enc2": (3, 8, 4), "dec1": (3, 4, 8), "dec2": (3, 8, 2)}
    params = weights(key, **shapes) | {"bias": jnp.zeros(8)}

    def apply(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def loss(params, key):
        phase, size = jax.random.normal(key, (2, 16, 1, 2))
        x = size * jnp.sin(jnp.arange(16)[:, None] / 2 + 3 * phase)
        h = jax.nn.relu(apply(params["enc1"], x) + params["bias"])
        h = jax.nn.relu(apply(params["dec1"], apply(params["enc2"], h)))
        return jnp.mean((apply(params["dec2"], h) - x) ** 2)

    return params, loss, optax.adafactor(1e-2)


def bandit(key):
    """Actor and critic with heavy-tailed rewards (Student's t, 2 degrees of freedom); Adam."""
    params = weights(key, body=(6, 24), actor=(24, 4), critic=(24, 1))

    def loss(params, key):
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (32, 6))
        h = jnp.tanh(x @ params["body"])
        logits, value = h @ params["actor"], (h @ params["critic"])[:, 0]
        action = jax.random.categorical(keys[1], jax.lax.stop_gradient(logits))
        noise = jax.random.t(keys[2], 2.0, (32,))
        reward = jnp.take_along_axis(x, action[:, None], 1)[:, 0] + noise
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        gain = jax.lax.stop_gradient(reward - value)
        return jnp.mean(-log_p * gain + 0.5 * (reward - value) ** 2)

    return params, loss, optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(3e-4))


def mixer(key):
    """MLP-Mixer that classifies patches; Muon."""
    shapes = {"token1": (8, 16), "token2": (16, 8), "wi": (12, 24), "wo": (24, 12), "head": (12, 4)}
    params = weights(key, patch=(6, 12), **shapes) | {"scale": jnp.ones(12)}

    def loss(params, key):
        label = jax.random.randint(key, (16,), 0, 4)
        x = jax.random.normal(key, (16, 8, 6)) + jax.nn.one_hot(label, 6)[:, None]
        h = x @ params["patch"]
        mixed = jax.nn.gelu(normal(h).swapaxes(1, 2) @ params["token1"]) @ params["token2"]
        h = h + mixed.swapaxes(1, 2)
        h = normal(h + jax.nn.gelu(normal(h) @ params["wi"]) @ params["wo"]).mean(1)
        logits = h * params["scale"] @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    return params, loss, optax.contrib.muon(2e-3)


def contrastive(key):
    """Two views of a point, InfoNCE; Lion."""
    params = weights(key, a1=(8, 24), a2=(24, 8), b1=(8, 24), b2=(24, 8))

    def loss(params, key):
        x, *noise = jax.random.normal(key, (3, 32, 8))
        a = jax.nn.relu((x + noise[0] / 2) @ params["a1"]) @ params["a2"]
        b = jax.nn.relu((x + noise[1] / 2) @ params["b1"]) @ params["b2"]
        a, b = (v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6) for v in (a, b))
        return optax.softmax_cross_entropy_with_integer_labels(5 * a @ b.T, jnp.arange(32)).mean()

    return params, loss, optax.lion(3e-4)


def denoiser(key):
    """Predicts noise at random levels; AdamW, an optimizer step every second micro-batch."""
    params = weights(key, wi=(9, 32), mid=(32, 32), wo=(32, 8)) | {"bias": jnp.zeros(32)}

    def loss(params, key):
        keys = jax.random.split(key, 3)
        x = jnp.sin(jax.random.normal(keys[0], (16, 1)) + jnp.arange(8))
        level, noise = jax.random.uniform(keys[1], (16, 1)), jax.random.normal(keys[2], x.shape)
        h = jnp.concatenate([(1 - level) * x + level * noise, level], -1) @ params["wi"]
        h = jax.nn.silu(jax.nn.silu(h + params["bias"]) @ params["mid"])
        return jnp.mean((h @ params["wo"] - noise) ** 2)

    return params, loss, gcx.accumulate_gradients(optax.adamw(1e-3), 2)


def moe(key):
    """Mixture of four experts, one for each example; AdamW with a cosine schedule."""
    experts = {f"{name}{i}": shape for i in (1, 2, 3) for name, shape in (("a", 24), ("b", 16))}
    shapes = {name: (40 - width, width) for name, width in experts.items()}
    params = weights(key, gate=(8, 4), embed=(8, 16), **shapes, out=(16, 3))

    def loss(params, key):
        x = jax.random.normal(jax.random.split(key, 2)[0], (32, 8))
        y = jnp.stack([jnp.sin(x[:, 0] * 2), x[:, 1] * x[:, 2], jnp.abs(x[:, 3])], 1)
        p, h = jax.nn.softmax(x @ params["gate"]), jnp.tanh(x @ params["embed"])
        outs = [jax.nn.relu(h @ params[f"a{i}"]) @ params[f"b{i}"] for i in (1, 2, 3)]
        chosen = jnp.argmax(p, -1)[:, None]
        out = jnp.take_along_axis(jnp.stack([*outs, h], 1), chosen[..., None], 1)[:, 0]
        h = h + out * jnp.take_along_axis(p, chosen, 1)
        return jnp.mean((h @ params["out"] - y) ** 2)

    return params, loss, optax.adamw(optax.cosine_decay_schedule(2e-3, 20_000))


def vae(key):
    """Variational autoencoder whose loss changes its sign; SGD with momentum behind a clip."""
    shapes = {"e1": (10, 24), "mu": (24, 4), "lv": (24, 4), "d1": (4, 24), "d2": (24, 10)}
    params = weights(key, **shapes) | {"sigma": jnp.zeros(())}

    def loss(params, key):
        keys = jax.random.split(key, 3)
        z = jax.random.normal(keys[0], (32, 3))
        x = jnp.tanh(z @ jnp.linspace(-1, 1, 30).reshape(3, 10) * 2)
        x += 0.1 * jax.random.normal(keys[1], (32, 10))
        h = jnp.tanh(x @ params["e1"])
        mu, log_var = h @ params["mu"], jnp.clip(h @ params["lv"], -5, 5)
        sample = mu + jnp.exp(log_var / 2) * jax.random.normal(keys[2], mu.shape)
        error = jnp.tanh(sample @ params["d1"]) @ params["d2"] - x
        sigma = params["sigma"]
        bound = jnp.sum(error**2 * jnp.exp(-sigma) + sigma, -1)
        return jnp.mean(bound + jnp.sum(mu**2 + jnp.exp(log_var) - 1 - log_var, -1)) / 2

    return params, loss, optax.chain(gcx.clip_by_global_norm(5.0), optax.sgd(3e-3, momentum=0.9))


TUNED_ON = gpt, gru, conv, bandit, mixer, contrastive, denoiser
MODELS = {model.__name__: model for model in (*TUNED_ON, moe, vae)}
