"""Keras on its JAX backend: `model.fit` with an optimizer of Optax."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
import pytest
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

rng = np.random.default_rng(0)
X = rng.normal(size=(STEPS * 16, 4)).astype("float32")
Y = X @ np.arange(4, dtype="float32")[:, None]


class FromOptax(keras.optimizers.Optimizer):
    """A Keras optimizer that stores the state of a gradient transformation in Keras variables."""

    def __init__(self, tx, **kwargs):
        super().__init__(learning_rate=0.0, **kwargs)  # `tx` contains the learning rate
        self.tx = tx

    def build(self, variables):
        super().build(variables)
        leaves, self.structure = jax.tree.flatten(self.tx.init([x.value for x in variables]))
        # State with the shape of a parameter gets the layout of that parameter.
        self.held = [
            self.add_variable(x.shape, lambda shape, dtype, x=x: x, x.dtype.name) for x in leaves
        ]

    def apply(self, grads, trainable_variables=None):
        if trainable_variables is not None and not self.built:
            self.build(trainable_variables)
        params = [x.value for x in self._trainable_variables]
        updates, state = self.tx.update(list(grads), self.state, params)
        for variable, update in zip(self._trainable_variables, updates, strict=True):
            variable.assign_add(update)
        for variable, leaf in zip(self.held, jax.tree.leaves(state), strict=True):
            variable.assign(leaf)
        self._iterations.assign_add(1)

    @property
    def state(self):
        return jax.tree.unflatten(self.structure, [x.value for x in self.held])


def compiled(tx):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(FromOptax(tx), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, first=0, last=STEPS):
    part = slice(first * 16, last * 16)
    model.fit(X[part], Y[part], batch_size=16, shuffle=False, verbose=0)
    return [x.numpy() for x in model.trainable_variables]


@pytest.fixture(autouse=True)
def all_devices():
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    model = compiled(of_ours(name))
    check_same(fit(model), fit(compiled(of_optax(name))))
    assert len(model.trainable_variables[0].value.sharding.device_set) == jax.device_count()
    assert gcx.metrics(model.optimizer.state)["clip_factor"] < 1


def test_goes_on_in_mid_window(tmp_path):
    path = tmp_path / "model.weights.h5"
    half = compiled(of_ours("both"))
    fit(half, 0, STOP)
    half.save_weights(path)
    model = compiled(of_ours("both"))
    model.load_weights(path)
    assert gcx.metrics(model.optimizer.state)["mini_step"] == STOP % EVERY
    check_same(fit(model, STOP), fit(compiled(of_ours("both"))), rtol=0, atol=0)


def test_accumulates_as_keras_does():
    tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(0.1), optax.sgd(1e-2)), EVERY)
    ours, theirs = compiled(tx), compiled(tx)
    sgd = keras.optimizers.SGD(1e-2, global_clipnorm=0.1, gradient_accumulation_steps=EVERY)
    theirs.compile(sgd, loss="mse")
    check_same(fit(ours), fit(theirs))


def test_a_run_of_optax_goes_on_with_ours():
    half = compiled(of_optax("accumulated"))
    fit(half, 0, STOP)
    model = compiled(of_ours("both"))
    params = [x.value for x in half.trainable_variables]
    state = gcx.convert_state(model.optimizer.tx, half.optimizer.state, params, reduction="mean")
    for variable, value in zip(model.trainable_variables, params, strict=True):
        variable.assign(value)
    for variable, leaf in zip(model.optimizer.held, jax.tree.leaves(state), strict=True):
        variable.assign(leaf)
    check_same(fit(model, STOP), fit(compiled(of_optax("accumulated"))))
