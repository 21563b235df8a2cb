"""``torch.compile`` and ``torch.utils.checkpoint`` around models with a limit, and inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotor

WIDTH = 32
LIMIT = 500_000


class Block(nn.Module):
    """A residual block, under a checkpoint of its own where `reentrant` is given."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def make(reentrant: bool | None = None, compiled: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[Any] = [Block(reentrant) for _ in range(3)]
    if compiled:
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    return nn.Sequential(nn.Linear(16, WIDTH), *blocks, nn.Linear(WIDTH, 10))


def batch() -> torch.Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


def train(call: Any, model: nn.Module) -> tuple[list[float], list[torch.Tensor | None]]:
    losses = []
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(step)
        loss = call(batch()).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    # What one test had dynamo leave alone, another one would not be told of.
    torch.compiler.reset()


@pytest.fixture(scope="module")
def expected():
    model = make()
    return train(model, model)


def check(found: Any, expected: Any, model: rotor.Checkpointable) -> None:
    assert found[0] == expected[0]
    for got, wanted in zip(found[1], expected[1], strict=True):
        assert torch.equal(got, wanted)
    assert model.plan.measured_bytes <= LIMIT


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_compiled_before(engine, expected):
    """The plan is made of what the compiled model computes."""
    model = rotor.Checkpointable(
        torch.compile(make(), backend="aot_eager"), mem_limit=LIMIT, engine=engine
    )
    check(train(model, model), expected, model)


# PyTorch 2.14 says so of every value between two compiled modules.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_compiled_stages(engine, expected):
    model = rotor.Checkpointable(make(compiled=True), mem_limit=LIMIT, engine=engine)
    check(train(model, model), expected, model)


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_compiled_after(engine, expected):
    """The plan runs as it is, and no limit is lost."""
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    check(train(torch.compile(model, backend="aot_eager"), model), expected, model)


def test_one_graph_of_a_model_with_a_limit_is_refused():
    model = rotor.Checkpointable(make(), mem_limit=LIMIT)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs its own plan"):
        compiled(batch())


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_checkpoints_inside(engine, expected):
    model = rotor.Checkpointable(make(reentrant=False), mem_limit=LIMIT, engine=engine)
    check(train(model, model), expected, model)


def test_reentrant_checkpoints_inside_of_a_graph(expected):
    model = rotor.Checkpointable(make(reentrant=True), mem_limit=LIMIT, engine="graph")
    check(train(model, model), expected, model)


@pytest.mark.parametrize("engine", ["chain", "dynamic"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_inside_are_refused_elsewhere(engine):
    model = rotor.Checkpointable(make(reentrant=True), mem_limit=LIMIT, engine=engine)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(model, model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_checkpoints_outside_are_refused(engine, reentrant):
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match=r"within torch\.utils\.checkpoint"):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
