"""First calls of an accelerator's libraries take memory before a measured step, not in it."""

import pytest
import torch
from limited_on_sim import Trained, distance
from test_sim_graph import Branches, batches

import rotor

MIB = 1 << 20


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_the_thread_of_backwards_has_its_handle(sim, engine):
    """Keep the limit from the first step on, whose backward has a thread of its own."""
    torch.manual_seed(1)
    model = Branches(0.0)
    state = model.state_dict()
    plain = Trained(sim, model.to("sim"), batches())
    limit = max(plain.peaks) * 7 // 10
    del model
    ours = Branches(0.0)
    ours.load_state_dict(state)
    sim.forget_handles()
    sim.set_handles(handle_bytes=MIB)
    wrapped = rotor.Checkpointable(ours.to("sim"), mem_limit=limit, engine=engine, loss_fn=distance)
    data = batches()
    wrapped.measure(data[0], targets=(torch.tensor(0.5, device="sim"),))
    assert sim.handles() == 2
    found = Trained(sim, wrapped, data, inside=True)
    assert sim.handles() == 2
    assert max(found.peaks) <= limit
