"""Habits of models that one engine does not take and another does; sparse and resized buffers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import same
from zoo.models import Row

import rotor

WIDTH, ROWS = 32, 64


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Hooked(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Retained(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.retain_grad()
        return y


class Reentrant(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Sized(Stage):
    """A stage that hands a ``torch.Size`` on."""

    def forward(self, x: Any) -> Any:
        x, shape = x if isinstance(x, tuple) else (x, x.shape)
        y = super().forward(x)
        return y / shape.numel(), y.shape


class Listed(Stage):
    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(batch[0] + batch[1])


class Counted(Stage):
    """Experts: as many rows for each as data say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(x.detach().argmax(-1) % 3, minlength=3).tolist()
        return torch.cat([super(Counted, self).forward(part) for part in x.split(counts)])


class Sparse(Stage):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.register_buffer("graph", torch.eye(ROWS).to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.graph, super().forward(x))


STAGES: dict[str, Any] = {
    "register_hook": Hooked,
    "retain_grad": Retained,
    "reentrant checkpoint": Reentrant,
    "torch.Size": Sized,
    "list in the batch": Listed,
    "split by counts": Counted,
    "sparse buffer": lambda: Sparse(torch.sparse_coo),
    "sparse rows": lambda: Sparse(torch.sparse_csr),
}


def outcome(kind: str, engine: str | None, nested: bool, limit: str = "1 MB") -> list[Any]:
    torch.manual_seed(0)
    last = Sized() if kind == "torch.Size" else Stage()
    stages = [STAGES[kind](), last, last if kind == "torch.Size" else Stage()]
    net: nn.Module = nn.Sequential(*(stages[::-1] if kind == "reentrant checkpoint" else stages))
    net = Row(net) if nested else net
    model: Any = net
    if engine is not None:
        model = rotor.Checkpointable(net, mem_limit=limit, engine=engine)
    found: list[Any] = []
    for _ in range(2):
        x: Any = torch.randn(ROWS, WIDTH)
        y = model([x, x + 1] if kind == "list in the batch" else x)
        y, shape = y if isinstance(y, tuple) else (y, y.shape)
        y.square().mean().backward()
        found += [y.detach(), type(shape), *(p.grad.clone() for p in net.parameters())]
        net.zero_grad()
    if engine is not None:
        assert model.plan.engine != "plain"
        assert model.plan.measured_bytes <= model.mem_limit
    return found


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", STAGES)
def test_auto_runs_what_plain_pytorch_runs(kind: str, nested: bool) -> None:
    if kind == "reentrant checkpoint" and nested:
        pytest.skip("the same as in a Sequential")
    assert same(outcome(kind, "auto", nested), outcome(kind, None, nested))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("engine", ["chain", "dynamic"])
@pytest.mark.parametrize("kind", ["torch.Size", "sparse buffer", "sparse rows"])
def test_values_that_are_no_plain_tensors_go_through_an_engine(kind: str, engine: str) -> None:
    assert same(outcome(kind, engine, nested=False), outcome(kind, None, nested=False))


class Observed(Stage):
    """A stage that resizes its buffer in its first forward, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.least.numel():
            self.least.resize_(WIDTH).copy_(x.detach().amin(0))
        return super().forward(x) + self.least


def test_a_step_that_does_not_fit_has_buffers_of_their_former_size() -> None:
    net = nn.Sequential(Observed(), Stage(), Stage())
    model = rotor.Checkpointable(net, mem_limit="40 KB", engine="dynamic")
    with pytest.raises(rotor.InfeasibleError):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    assert net[0].least.shape == (0,)
    x = torch.randn(ROWS, WIDTH)
    limited = rotor.Checkpointable(net, mem_limit="1 MB", engine="dynamic")
    y = limited(x)
    assert torch.equal(net[0].least, x.amin(0))
    assert torch.equal(y, net(x))
