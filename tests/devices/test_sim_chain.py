"""The chain engine on an accelerator: bits, random states and peaks by the device's counters."""

import pytest
import torch
from limited_on_sim import Trained, assert_equal, batches, compared, distance
from torch import nn

import rotor

WIDTH, ROWS, STAGES = 128, 512, 6  # 256 KiB each activation.


def chain(dropout=0.0):
    """Return a chain whose activations are large beside its parameters."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Tanh())
            for _ in range(STAGES)
        )
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("inside", [True, False])
def test_bit_equal_within_the_limit(sim, dropout, inside):
    limit, plain, ours = compared(
        sim, lambda: chain(dropout), batches(), 0.6, engine="chain", inside=inside
    )
    assert min(plain.peaks) > limit
    assert max(ours.peaks[0 if inside else 1 :]) <= limit


def test_accumulation(sim):
    """Add gradients over two steps, as plain training does."""
    limit, _, ours = compared(
        sim, lambda: chain(0.1), batches(4), 0.6, engine="chain", inside=True, accumulate=2
    )
    assert max(ours.peaks) <= limit


def test_autocast(sim):
    compared(sim, chain, batches(), 0.7, engine="chain", inside=True, autocast=torch.bfloat16)


def test_changing_shapes(sim):
    both = [*batches(2), *batches(2, ROWS // 2), *batches(1)]
    limit, _, ours = compared(sim, lambda: chain(0.2), both, 0.6, engine="chain", inside=True)
    assert max(ours.peaks) <= limit


def test_trains_where_plain_runs_out_of_memory(sim):
    """Train with a capacity below the plain step's peak, bit-equal to training without one."""
    torch.manual_seed(1)
    model = chain(0.2).to("sim")
    data = batches()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Trained(sim, model, data)
    limit = max(plain.peaks) * 6 // 10
    wrapped = rotor.Checkpointable(model, mem_limit=limit, engine="chain", loss_fn=distance)
    # Room for what is resident, the limit, and the slack of segments.
    sim.empty_cache()
    resident = sim.memory_allocated()
    sim.set_capacity(resident + limit + (4 << 20))
    plain_peak = resident + max(plain.peaks)
    if plain_peak <= resident + limit + (4 << 20):
        sim.set_capacity(plain_peak - 1)
    with pytest.raises(torch.OutOfMemoryError):
        Trained(sim, model, data)
    model.zero_grad()
    sim.empty_cache()
    model.load_state_dict(state)
    ours = Trained(sim, wrapped, data, inside=True)
    assert_equal(ours, plain)


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_measuring_draws_no_numbers(sim, engine):
    """Leave the states of the CPU's and the device's generators as they were."""
    model = chain(0.3).to("sim")
    wrapped = rotor.Checkpointable(model, mem_limit="2.5 MB", engine=engine, loss_fn=distance)
    data = batches(1)[0]
    states = torch.get_rng_state(), sim.get_rng_state()
    wrapped.measure(data, targets=(torch.tensor(0.5, device="sim"),))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(sim.get_rng_state(), states[1])


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_the_named_least_limit_is_accepted(sim, engine):
    """Checksums of verified steps have room under the named limit, not under the given one."""
    wrapped = rotor.Checkpointable(chain().to("sim"), engine=engine, loss_fn=distance)
    data = batches(1, 80 * ROWS)[0]
    wrapped.measure(data, targets=(torch.tensor(0.5, device="sim"),))
    with pytest.raises(rotor.InfeasibleError) as refusal:
        wrapped.compute_sequence(1)
    wrapped.compute_sequence(refusal.value.minimum_bytes)
    assert wrapped.plan.predicted_bytes <= refusal.value.minimum_bytes
