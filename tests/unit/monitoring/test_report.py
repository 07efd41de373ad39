"""Incidents that are read on the host."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F7FFFFF, 0x7F800000])  # NaN, huge, infinite
def test_a_damaged_incident_does_not_hide_the_others(bits):
    tx, params = gcx.watch(optax.sgd(0.1)), {"w": jnp.ones(2)}
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(2):
        _, state = update({"w": jnp.array([1.0, jnp.nan])}, state, params)
    whole = gcx.incidents(state)
    field = gcx.diagnostics.Incident._fields.index("leaf")
    rows = state.incidents.rows.at[-2, field].set(bits)
    damaged = state._replace(incidents=state.incidents._replace(rows=rows))
    assert gcx.incidents(damaged) == whole[1:] or str(gcx.incidents(damaged)[0]) == str(whole[1])
