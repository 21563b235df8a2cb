"""Parameters, gradients and optimizer states in the host's memory, on the simulated accelerator."""

from __future__ import annotations

import contextlib
import copy
import types

import pytest
import torch
from torch import nn
from torchvision_standins import import_torchvision

import rotor

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 8))


def train(sim, net, call, optimizer, sizes=(32,) * STEPS) -> tuple[list[torch.Tensor], list[int]]:
    """Return losses and parameters, and the device's bytes at most above each step's begin."""
    losses, peaks = [], []
    torch.manual_seed(1)
    batches = [torch.randn(size, 64, device="sim") for size in sizes]
    for x in batches:
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        del loss
        peaks.append(sim.max_memory_allocated() - level)
    return [*losses, *(p.detach().cpu() for p in net.parameters())], peaks


@pytest.mark.parametrize("update", ["device", "host", None])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_training_is_that_of_the_plain_model(sim, make, update):
    rate = {"lr": 1e-2}
    plain = model().to("sim")
    expected, plain_peaks = train(sim, plain, plain, make(plain.parameters(), **rate))
    del plain
    net = model().to("sim")
    optimizer = make(net.parameters(), **rate)
    limit = 440 << 10
    chk = rotor.Checkpointable(
        net, mem_limit=limit, offload="host", offload_state=optimizer, update=update
    )
    found, peaks = train(sim, net, chk, optimizer)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    resident = sum(p.nbytes for p in net.parameters() if p.nbytes < 4096)
    states = 2 * resident if make is torch.optim.AdamW else 0
    # The first step measures the speed of the link too, in memory of its own.
    assert max(peaks[1:]) + resident + states <= limit
    assert max(plain_peaks) + 3 * sum(p.nbytes for p in net.parameters()) > 3 * limit


@pytest.mark.parametrize("settings", [{}, {"host_limit": "2200KiB"}], ids=str)
def test_batches_of_all_sizes_share_one_capture(sim, settings):
    sizes = (32, 24, 28, 32, 17, 24)
    found = []
    for is_wrapped in (False, True):
        net = model().to("sim")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        limit, tier = 440 << 10, {"offload": "host", "offload_state": optimizer, **settings}
        call = rotor.Checkpointable(net, mem_limit=limit, **tier) if is_wrapped else net
        values, peaks = train(sim, net, call, optimizer, sizes)
        found.append(values)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    resident = sum(p.nbytes for p in net.parameters() if p.nbytes < 4096)
    assert max(peaks[1:]) + 3 * resident <= limit
    assert "4 share 1 captured graph, 0 captured alone" in call.report()


@pytest.mark.parametrize("update", ["device", "host"])
def test_training_goes_on_from_loaded_states(sim, update):
    """Loaded states come by the device, and an update on the host changes them at home."""
    found = []
    for is_wrapped in (False, True):
        net = model().to("sim")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        settings = {"mem_limit": 440 << 10, "offload": "host", "offload_state": optimizer}
        call = rotor.Checkpointable(net, update=update, **settings) if is_wrapped else net
        first, _ = train(sim, net, call, optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append([*first, *train(sim, net, call, optimizer)[0]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_least_limit_counts_what_the_allocator_rounds_up(sim):
    """Many small parameters and states stay on the device, each in a block of 512 bytes."""
    x = torch.randn(32, 64, device="sim")
    net = model().to("sim")
    optimizer = torch.optim.AdamW(net.parameters())
    chk = rotor.Checkpointable(
        net, mem_limit=1 << 16, offload="host", offload_state=optimizer, planning="before"
    )
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk(x)
    chk.mem_limit = caught.value.minimum_bytes
    # Keys of checksums are on the device by now, as the context is.
    own = sum(512 * -(-p.nbytes // 512) for p in net.parameters() if p.nbytes < 4096)
    before = sim.memory_allocated() - own
    for step in range(STEPS):
        sim.reset_peak_memory_stats()
        chk(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first step measures the speed of the link too, in memory of its own.
        assert step == 0 or sim.max_memory_allocated() - before <= chk.mem_limit


def test_a_total_limit_holds_for_what_the_device_counts(sim):
    net = nn.Sequential(*(Block(512) for _ in range(8))).to("sim")
    everything = 3 * sum(p.nbytes for p in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters())
    total = 80 << 20
    chk = rotor.Checkpointable(
        net, total_limit=total, effort="fast", offload="host", offload_state=optimizer
    )
    sim.empty_cache()
    sim.reset_peak_memory_stats()
    for _ in range(STEPS):
        chk(torch.randn(256, 512, device="sim")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.accelerator.memory_stats("sim")["reserved_bytes.all.peak"] <= total
    assert everything > 2 * total
    assert chk.limits["parameters"] < total / 100


def test_a_model_on_the_meta_device_begins_on_the_accelerator(sim):
    plain = model().to("sim")
    weights = {name: value.cpu() for name, value in plain.state_dict().items()}
    expected, _ = train(sim, plain, plain, torch.optim.AdamW(plain.parameters()))
    net = model().to("meta")
    optimizer = torch.optim.AdamW(net.parameters())
    chk = rotor.Checkpointable(
        net, mem_limit=440 << 10, offload="host", offload_state=optimizer, weights=weights
    )
    found, _ = train(sim, net, chk, optimizer)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_disk_is_refused_before_anything_moves(sim):
    net = model().to("sim")
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="does not reach the memory of sim"):
        rotor.Checkpointable(net, mem_limit="1MiB", offload="disk", offload_state=optimizer)
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


def test_lightning_gets_a_module_back_that_it_can_move(sim):
    """It moves the module to the CPU at the end."""
    with contextlib.suppress(ModuleNotFoundError):
        import_torchvision()
    lightning = pytest.importorskip("rotor.integrations.lightning")
    module, again = nn.ModuleDict({"net": model()}).to("sim"), []
    limit = lightning.RotorCallback("1MiB", offload="host", offload_state=True)
    for _ in range(2):
        module.to("sim")
        again.append(torch.optim.AdamW(module.parameters(), lr=1e-2))
        trainer = types.SimpleNamespace(strategy=None, optimizers=again[-1:], global_step=1)
        limit.on_fit_start(trainer, module)
        train(sim, module, module["net"], again[-1])
        assert type(module["net"][0].up.weight) is not nn.Parameter
        values = module.state_dict()["net.0.up.weight"]
        limit.on_fit_end(trainer, module)
        module.cpu()
        assert torch.equal(values, module["net"][0].up.weight)
        module["net"](torch.randn(2, 64)).sum().backward()
        module.zero_grad()


class Asking(nn.Module):
    """Model that no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e9:
                x = x / 2
        return x


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("engine", "limit"), [("dynamic", 520 << 10), ("auto", 600 << 10)])
def test_models_without_a_graph(sim, engine, limit):
    plain = Asking().to("sim")
    expected, _ = train(sim, plain, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    del plain
    net = Asking().to("sim")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    settings = {"mem_limit": limit, "offload": "host", "offload_state": optimizer}
    chk = rotor.Checkpointable(net, **settings, engine=engine)
    found, peaks = train(sim, net, chk, optimizer)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    resident = 3 * sum(p.nbytes for p in net.parameters() if p.nbytes < 4096)
    assert peaks[-1] + resident <= limit
