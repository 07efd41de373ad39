"""NetKet: the ground state of a chain of spins, by VMC with and without natural gradients."""

import flax
import jax
import netket as nk
from pairs import STEPS, STOP, Run, TrainerTests, check_same, of_optax, of_ours

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


class TestNetKet(TrainerTests):
    beside_optax = beside_itself = {"rtol": 1e-7, "atol": 1e-8}

    def train(self, tx, first=0, last=STEPS, start=None, **options):
        run = start or driver(tx, **options)
        run.run(last - first, out=nk.logging.RuntimeLog(), show_progress=False)
        return Run(run.state.parameters, run._optimizer_state, run)

    def restored(self, tx, folder):
        half = flax.serialization.to_bytes(self.train(tx, 0, STOP).rest)
        rest = flax.serialization.from_bytes(driver(tx), half)
        return Run(rest.state.parameters, rest._optimizer_state, rest)

    def converted(self, tx, run, folder):
        state = gcx.convert_state(tx, run._optimizer_state, run.state.parameters, reduction="mean")
        run.optimizer = tx  # initializes a new state
        run._optimizer_state = state
        return run

    def test_trains_with_natural_gradients(self):
        options = {"preconditioner": nk.optimizer.SR(diag_shift=0.1)}
        pair = of_ours("both"), of_optax("accumulated")
        check_same(*[self.train(tx, **options).params for tx in pair])
