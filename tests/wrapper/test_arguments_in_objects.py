"""Models whose arguments hold their tensors in objects, or hold none, and scripted submodules."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import check_equal

import rotor

LIMIT = "300 KB"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0


class Record:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


Features = type("Features", (dict,), {})

KINDS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Batch, lambda batch: batch.x * batch.scale),
    "dict subclass": (lambda x: Features(x=x), lambda batch: batch["x"]),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda batch: batch["x"]),
    "object": (Record, lambda batch: batch.x),
    "list of objects": (lambda x: [Record(x), Record(x)], lambda batch: batch[0].x + batch[1].x),
    "NumPy array": (lambda x: x.numpy(), torch.from_numpy),
    "nothing": (None, lambda: torch.ones(256, 32)),
    "text": (lambda x: "text", lambda text: torch.ones(256, 32)),
}


class Net(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
        self.read = read

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.body(self.read(*batch))


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_hold_their_tensors_in_objects_are_planned(kind: str, engine: str) -> None:
    make, read = KINDS[kind]

    def loss_of(model: Any, _: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(256, 32)
        y = model(*([make(x)] if make else []))
        return y.square().mean(), y

    limits = {"mem_limit": LIMIT, "engine": engine, "planning": "before"}
    model = check_equal(lambda: Net(read), loss_of, **limits)
    assert model.plan.measured_bytes <= model.mem_limit
    assert engine == "dynamic" or (model.plan.engine == "graph" and len(model.plans) == 1)


def test_another_number_in_an_object_is_no_number_of_an_earlier_step() -> None:
    net = Net(KINDS["dataclass"][1])
    model = rotor.Checkpointable(net, mem_limit=LIMIT, planning="before")
    x = torch.randn(256, 32)
    for scale in (1.0, 3.0, 0.5):
        y = model(Batch(x, scale))
        y.sum().backward()
        net.zero_grad()
        assert torch.equal(y, net(Batch(x, scale)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def scripted(how: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "script":
            return torch.jit.script(Block())
        return torch.jit.trace(Block(), torch.randn(64, 32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*(single graph|captured).*")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_model_with_a_scripted_part_trains(how: str, engine: str, inside: bool) -> None:
    if inside and engine == "chain":
        pytest.skip("a chain is a Sequential")
    net: Any = nn.Sequential(Block(), scripted(how), Block())
    if inside:
        net = Net.__new__(Net)
        nn.Module.__init__(net)
        net.body, net.read = nn.Sequential(Block(), scripted(how), Block()), lambda x: x
    x = torch.randn(64, 32)
    for _ in range(3):  # a script is optimised in its first runs
        net(x).square().mean().backward()
        expected = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine)
    for _ in range(2):
        model(x).square().mean().backward()
        assert all(map(torch.equal, expected, [p.grad for p in net.parameters()]))
        net.zero_grad()
    assert model.plan.engine != "plain"


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_script_itself_is_refused_in_words(how: str, engine: str) -> None:
    with pytest.raises(TypeError, match=r"script of torch\.jit"):
        rotor.Checkpointable(scripted(how), mem_limit="1 MB", engine=engine)
