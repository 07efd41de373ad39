"""What a GPU or a TPU would run, run by a CPU."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import jax


@contextlib.contextmanager
def on_an_accelerator():
    """Traces what neither a CPU nor a GPU of NVIDIA has of its own."""

    def choose(*args, default, **others):
        return default(*args)

    with _traced_anew(), mock.patch.object(jax.lax, "platform_dependent", choose):
        yield


@contextlib.contextmanager
def on_one_gpu():
    """Traces what the only GPU of a machine would run."""

    def choose(*args, default, **others):
        return others.get("cuda", default)(*args)

    alone = [SimpleNamespace(platform="gpu")]
    with (
        _traced_anew(),
        mock.patch.object(jax.lax, "platform_dependent", choose),
        mock.patch.object(jax, "devices", lambda: alone),
    ):
        yield


@contextlib.contextmanager
def _traced_anew():
    """What was traced before is not found inside, nor what was traced inside afterwards."""
    jax.clear_caches()
    yield
    jax.clear_caches()
