"""NetKet: the ground state of a chain of spins, by VMC with and without natural gradients."""

import flax
import jax
import netket as nk
import pytest
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

jax.config.update("jax_enable_x64", True)  # as NetKet does
graph = nk.graph.Chain(6)
hilbert = nk.hilbert.Spin(0.5, graph.n_nodes)
energy = nk.operator.IsingJax(hilbert, graph, h=1.0)


def driver(tx, **options):
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
    model = nk.models.RBM(param_dtype=float)
    vstate = nk.vqs.MCState(sampler, model, n_samples=128, seed=0, sampler_seed=0)
    return nk.driver.VMC(energy, tx, variational_state=vstate, **options)


def train(tx, steps=STEPS, **options):
    vmc = driver(tx, **options)
    vmc.run(steps, out=nk.logging.RuntimeLog(), show_progress=False)
    return vmc


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    ours, theirs = train(of_ours(name)), train(of_optax(name))
    check_same(ours.state.parameters, theirs.state.parameters, rtol=1e-7, atol=1e-8)
    assert gcx.metrics(ours._optimizer_state)["clip_factor"] < 1


def test_trains_with_natural_gradients():
    options = {"preconditioner": nk.optimizer.SR(diag_shift=0.1)}
    ours, theirs = train(of_ours("both"), **options), train(of_optax("accumulated"), **options)
    check_same(ours.state.parameters, theirs.state.parameters, rtol=1e-5, atol=1e-6)


def test_goes_on_in_mid_window():
    tx = of_ours("both")
    whole, half = train(tx), train(tx, STOP)
    assert gcx.metrics(half._optimizer_state)["mini_step"] == STOP % EVERY
    rest = flax.serialization.from_bytes(driver(tx), flax.serialization.to_bytes(half))
    rest.run(STEPS - STOP, out=nk.logging.RuntimeLog(), show_progress=False)
    check_same(rest.state.parameters, whole.state.parameters, rtol=1e-7, atol=1e-8)


def test_a_run_of_optax_goes_on_with_ours():
    run, tx = train(of_optax("accumulated"), STOP), of_ours("both")
    state = gcx.convert_state(tx, run._optimizer_state, run.state.parameters, reduction="mean")
    run.optimizer = tx  # initializes a new state
    run._optimizer_state = state
    run.run(STEPS - STOP, out=nk.logging.RuntimeLog(), show_progress=False)
    theirs = train(of_optax("accumulated"))
    check_same(run.state.parameters, theirs.state.parameters, rtol=1e-7, atol=1e-8)
