"""What a GPU or a TPU would run, run by a CPU."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import jax


@contextlib.contextmanager
def on_an_accelerator(platform=None):
    """Traces what an accelerator would run, with what is for one platform alone if it is named."""

    def choose(*args, default, **others):
        return others.get(platform, default)(*args)

    # What was traced before is not to be found inside, nor what was traced inside afterwards.
    jax.clear_caches()
    try:
        with mock.patch.object(jax.lax, "platform_dependent", choose):
            yield
    finally:
        jax.clear_caches()


def on_a_tpu():
    """Traces what a TPU would run."""
    return on_an_accelerator("tpu")


@contextlib.contextmanager
def on_one_gpu():
    """Traces what the only GPU of a machine would run."""
    alone = [SimpleNamespace(platform="gpu")]
    with on_an_accelerator("cuda"), mock.patch.object(jax, "devices", lambda: alone):
        yield
