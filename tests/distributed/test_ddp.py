"""DistributedDataParallel on two gloo processes: the same gradients as around the plain model.

Run as a script, this file is one of the two processes: it does every scenario and writes what
differed to a file.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import ddp_graphs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import PROCESSES, run_processes, work

import rotor

WIDTH = 32


class HalfUsed(nn.Module):
    """A stage with a parameter that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def make_model(*, unused: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(8, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        HalfUsed() if unused else nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(WIDTH),
        nn.Sigmoid(),
        nn.Linear(WIDTH, 4),
    )


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(64, 8, generator=generator)


def limited(model: nn.Sequential, x: torch.Tensor) -> rotor.Checkpointable:
    """The model under the least limit, where it has to recompute."""
    wrapped = rotor.Checkpointable(model)
    wrapped.measure(x)
    try:
        wrapped.compute_sequence(mem_limit=1)
    except rotor.InfeasibleError as error:
        sequence = wrapped.compute_sequence(mem_limit=error.minimum_bytes)
    if max(sequence.count_forwards().values()) < 2:
        raise AssertionError("the limit makes nothing recompute")
    return wrapped


def differences(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of the gradients and buffers that are not bit-equal."""
    found = []
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            found.append(f"{name}.grad is there on one side")
        elif p.grad is not None and q.grad is not None and not torch.equal(p.grad, q.grad):
            found.append(f"{name}.grad")
    for (name, s), (_, t) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        if not torch.equal(s, t):
            found.append(name)
    return found


def train(rank: int, model: DistributedDataParallel, steps: int, silent: int) -> list[float]:
    """Steps of gradient descent; each adds up `silent` backwards without communication first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(silent + 1):
            context = model.no_sync() if part < silent else nullcontext()
            with context:
                loss = model(batch(rank, 10 * step + part)).square().sum()
                loss.backward()
            losses.append(loss.item())
        if step < steps - 1:
            optimizer.step()
    return losses


def compare(rank: int, silent: int = 0, unused: bool = False) -> list[str]:
    plain = make_model(unused=unused)
    planned = limited(copy.deepcopy(plain), batch(rank, 0))
    options = {"find_unused_parameters": unused}
    losses = [
        train(rank, DistributedDataParallel(model, **options), steps=3, silent=silent)
        for model in (plain, planned)
    ]
    found = differences(plain, planned)
    if losses[0] != losses[1]:
        found.append(f"losses {losses}")
    if unused and plain[3].unused.weight.grad is not None:
        found.append("the unused parameter has a gradient")
    return found


def ranks_agree(rank: int) -> list[str]:
    """The gradients are averages over both processes, not each one's own."""
    model = limited(make_model(), batch(rank, 0))
    train(rank, DistributedDataParallel(model), steps=1, silent=0)
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(PROCESSES)]
    dist.all_gather(others, mine)
    return [] if all(torch.equal(mine, other) for other in others) else ["gradients of the ranks"]


def sharded_graph_is_refused(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model[3], mesh=init_device_mesh("cpu", (PROCESSES,)))
    try:
        rotor.Checkpointable(model, engine="graph")
    except RuntimeError as error:
        message = str(error)
        return [] if "module 3" in message and "fully_shard" in message else [message]
    return ["a sharded module was accepted"]


SCENARIOS: dict[str, Callable[[int], list[str]]] = {
    "three steps": lambda rank: compare(rank),
    "no_sync": lambda rank: compare(rank, silent=1),
    "find_unused_parameters": lambda rank: compare(rank, unused=True),
    "ranks agree": ranks_agree,
    "a sharded graph is refused": sharded_graph_is_refused,
    **ddp_graphs.scenarios(),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(__file__, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ddp(found, scenario, rank):
    assert found[rank][scenario] == []


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), SCENARIOS)
