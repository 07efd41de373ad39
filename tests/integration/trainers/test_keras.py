"""Keras on its JAX backend: `model.fit` with an optimizer of Optax."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
import pytest
from pairs import BATCHES, EVERY, STEPS, STOP, Run, TrainerTests, check_same

import gradclip_jax as gcx

X = BATCHES.reshape(-1, 4)
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


@pytest.fixture(autouse=True)
def all_devices():
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    yield
    keras.distribution.set_distribution(None)


def compiled(tx):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(FromOptax(tx), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, first=0, last=STEPS):
    part = slice(first * 16, last * 16)
    model.fit(X[part], Y[part], batch_size=16, shuffle=False, verbose=0)
    return [x.value for x in model.trainable_variables]


class TestKeras(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None):
        model = start or compiled(tx)
        params = fit(model, first, last)
        assert len(params[0].sharding.device_set) == jax.device_count()
        return Run(params, model.optimizer.state, model)

    def restored(self, tx, folder):
        self.train(tx, 0, STOP).rest.save_weights(folder / "model.weights.h5")
        model = compiled(tx)
        model.load_weights(folder / "model.weights.h5")
        return Run(None, model.optimizer.state, model)

    def converted(self, tx, half, folder):
        model, params = compiled(tx), [x.value for x in half.trainable_variables]
        state = gcx.convert_state(tx, half.optimizer.state, params, reduction="mean")
        variables = [*model.trainable_variables, *model.optimizer.held]
        for variable, leaf in zip(variables, [*params, *jax.tree.leaves(state)], strict=True):
            variable.assign(leaf)
        return model


def test_accumulates_as_keras_does():
    tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(0.1), optax.sgd(1e-2)), EVERY)
    ours, theirs = compiled(tx), compiled(tx)
    sgd = keras.optimizers.SGD(1e-2, global_clipnorm=0.1, gradient_accumulation_steps=EVERY)
    theirs.compile(sgd, loss="mse")
    check_same(fit(ours), fit(theirs))
