"""The simulated accelerator's kernels: the bits of the CPU's, generators, streams, first calls."""

import copy
import threading

import pytest
import torch
from torch import nn
from zoo.models import First


def trained(device, make, batch, optimizer=torch.optim.SGD):
    """Return the losses and the parameters of three steps."""
    torch.manual_seed(1)
    model = make().to(device)
    update = optimizer(model.parameters(), lr=0.1)
    batch = batch.to(device)
    torch.manual_seed(2)
    losses = []
    for _ in range(3):
        update.zero_grad()
        found = model(batch).square().mean()
        found.backward()
        update.step()
        losses.append(found.item())
    return losses, [value.detach().cpu() for value in model.state_dict().values()]


def images():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, 2),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(8 * 49, 5),
    )


def language():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BATCHES = {images: (4, 3, 16, 16), language: (3, 7, 16)}


@pytest.mark.parametrize("make", BATCHES)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_bits_of_the_cpu(sim, make, optimizer):
    batch = torch.randn(BATCHES[make])
    expected = trained("cpu", make, batch, optimizer)
    found = trained("sim", make, batch, optimizer)
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells(sim, kind):
    batch = torch.randn(3, 5, 6)
    make = lambda: First(kind(6, 7, 2, batch_first=True))  # noqa: E731
    expected, found = (trained(device, make, batch) for device in ("cpu", "sim"))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_generators(sim):
    """Draw the CPU's numbers from a state that is the device's own."""
    host = torch.get_rng_state()
    torch.manual_seed(3)
    expected = torch.randn(10)
    torch.manual_seed(3)
    state = sim.get_rng_state()
    before = torch.get_rng_state()
    assert torch.equal(torch.randn(10, device="sim").cpu(), expected)
    assert torch.equal(torch.get_rng_state(), before)
    sim.set_rng_state(state)
    assert torch.equal(torch.randn(10, device="sim").cpu(), expected)
    sim.set_rng_state(state)
    once = nn.functional.dropout(torch.ones(100, device="sim"), 0.5)
    sim.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="sim"), 0.5), once)
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(host)


def test_module_keeps_its_parameters(sim):
    model = nn.Linear(3, 3)
    weight = model.weight
    assert model.to("sim").weight is weight
    assert copy.deepcopy(model).weight.device.type == "sim"
    with pytest.raises(RuntimeError, match="same device"):
        model(torch.zeros(3))


def test_a_missing_wait_is_a_race(sim):
    """Name the operation that reads what another stream may still write."""
    before = sim.races()
    side = torch.Stream("sim")
    value = torch.ones(100, device="sim")
    with side:
        value.mul(2)
    assert sim.races() == before + 1
    assert "reads on stream" in sim.last_race()
    sim.synchronize()
    with side:
        value.mul(2)  # The device was waited for.
    side.synchronize()
    value.add_(1)
    event = torch.accelerator.current_stream().record_event()
    side.wait_event(event)
    with side:
        value.mul(2)
    assert sim.races() == before + 1
    value.add_(1)  # The side stream may still read.
    assert sim.races() == before + 2
    assert "writes" in sim.last_race()
    sim.planned_races = 2


def test_copies_come_late(sim):
    """Show old bytes to a host that does not wait."""
    value = torch.full((1000,), 5.0, device="sim")
    host = torch.zeros(1000).pin_memory()
    host.copy_(value, non_blocking=True)
    assert host.eq(0).all()
    sim.synchronize()
    assert host.eq(5).all()


def test_clocks(sim):
    """Take the time of the model to the digit, and the host's own with virtual time."""
    sim.set_clock("model")
    sim.set_link(1.0, 1000)
    sim.set_compute(1.0, 10.0, 500)
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    value = torch.zeros(1000, device="sim")
    begin.record()
    value.add_(1)  # 2 us and 4000 B at 10 B/ns.
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.0024)
    start = sim.clock_ns()
    value.cpu()
    assert sim.clock_ns() - start == 500 + 1000 + 4000
    sim.set_link(8.0)
    sim.set_compute()


def test_first_calls_take_memory(sim):
    """Give each thread a workspace at its first product, and a search at its first convolution."""
    sim.set_handles(handle_bytes=1 << 20, search_bytes=4 << 20)
    matrix = torch.ones(8, 8, device="sim", requires_grad=True)
    level = sim.memory_allocated()
    result = matrix @ matrix
    assert sim.memory_allocated() == level + 512 + (1 << 20)
    result.sum().backward()  # In the thread of the device.
    assert sim.handles() == 2
    assert sim.memory_allocated() == level + 2 * 512 + (2 << 20)
    (matrix @ matrix).sum().backward()
    assert sim.handles() == 2
    convolution = nn.Conv2d(1, 1, 3, device="sim")
    picture = torch.zeros(1, 1, 8, 8, device="sim")
    for _ in range(2):
        sim.reset_peak_memory_stats()
        level = sim.memory_allocated()
        convolution(picture)
        searched = sim.max_memory_allocated() - level > (4 << 20) - 1
        assert searched is (sim.searches() == 1 and _ == 0)
    other = threading.Thread(target=lambda: convolution(picture))
    other.start()
    other.join()
    assert sim.searches() == 2
    sim.forget_handles()
    assert sim.memory_allocated() <= level + 512 * 4
