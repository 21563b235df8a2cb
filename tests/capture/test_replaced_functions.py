"""Captured graphs follow the environment, and what is replaced in PyTorch between steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rotor

SCALE = {"factor": 2.0}


class Batch(torch.Tensor):
    """Tensor of a class of its own."""


def scaled(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.mul(torch.cos(tensor), SCALE["factor"])


class Net(nn.Module):
    def __init__(self, last: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self, x)


def or_absent(values: dict[str, float]) -> float:
    try:
        return values["other"]
    except KeyError:
        return 1.0


def attended(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.attention(x[None], x[None], x[None], need_weights=False)[0]


READS = {
    "getenv": lambda net, x: x * float(os.getenv("ROTOR_TEST", "1")),
    "get": lambda net, x: x * float(os.environ.get("ROTOR_TEST", "1")),
    "contained": lambda net, x: x * (2.0 if "ROTOR_TEST" in os.environ else 1.0),
    "item": lambda net, x: x * or_absent(SCALE),
}


def trained(
    last: Any, engine: str | None, change: Callable[[], object], x: torch.Tensor
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net(last)
    limit = {"mem_limit": "1 MB", "engine": engine, "verbosity": -1}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    seen = []
    for step in range(4):
        if step == 2:
            change()
        net.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *[p.grad for p in net.parameters() if p.grad is not None]]
    return seen


def check(last: Any, engine: str, patch: Callable[[Any], object], x: torch.Tensor) -> None:
    found = []
    for one in (None, engine):
        with pytest.MonkeyPatch.context() as context:
            found.append(trained(last, one, lambda context=context: patch(context), x))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("engine", ["graph", "auto"])
@pytest.mark.parametrize("read", READS)
def test_a_graph_follows_the_environment_and_keys_that_were_absent(read, engine):
    def patch(context):
        context.setenv("ROTOR_TEST", "3")
        context.setitem(SCALE, "other", 3.0)

    check(READS[read], engine, patch, torch.ones(4, 16))


METHODS = {
    "method": (torch.Tensor, "relu", lambda net, x: x.relu()),
    "method that is named": (torch.Tensor, "relu", lambda net, x: torch.Tensor.relu(x)),
    "method of parameters": (nn.Parameter, "relu", lambda net, x: x * net.layers[0].bias.relu()),
    "method of a subclass": (Batch, "relu", lambda net, x: x.relu()),
    "function": (F, "relu", lambda net, x: F.relu(x)),
    "function of PyTorch": (torch, "sin", lambda net, x: torch.sin(x)),
}
UNFOLLOWED = {
    "operator": (torch.Tensor, "__mul__", lambda net, x: x * x),
    "item": (torch.Tensor, "__getitem__", lambda net, x: x[1:]),
    "property": (torch.Tensor, "T", lambda net, x: x.T),
    "length": (torch.Tensor, "__len__", lambda net, x: x * len(x)),
    "function within a function": (F, "scaled_dot_product_attention", attended),
    "method within a function": (torch.Tensor, "softmax", lambda net, x: F.softmax(x, -1)),
    "built-in function": (
        torch._C._nn,
        "cross_entropy_loss",
        lambda net, x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    ),
}


def replacement(name: str) -> Any:
    return {"T": property(scaled), "__len__": lambda tensor: 7}.get(name, scaled)


@pytest.mark.parametrize("engine", ["graph", "auto"])
@pytest.mark.parametrize("kind", METHODS)
def test_a_graph_follows_functions_of_pytorch_that_are_replaced(kind, engine):
    owner, name, last = METHODS[kind]
    x = torch.ones(4, 16)
    x = x.as_subclass(Batch) if owner is Batch else x
    check(last, engine, lambda context: context.setattr(owner, name, scaled, raising=False), x)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", UNFOLLOWED)
def test_what_no_graph_follows_in_pytorch_is_refused(kind):
    owner, name, last = UNFOLLOWED[kind]

    def patch(context: Any) -> None:
        context.setattr(owner, name, replacement(name), raising=False)

    check(last, "auto", patch, torch.ones(4, 16))
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        model = rotor.Checkpointable(Net(last), mem_limit="1 MB", engine="graph", verbosity=-1)
        with pytest.raises(rotor.CaptureError, match=rf"\.{name} was replaced by"):
            model(torch.ones(4, 16))


def test_a_method_of_others_is_followed_to_what_it_reads(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "scaled", scaled, raising=False)
    for engine in ("graph", "auto"):
        check(
            lambda net, x: x.scaled(),
            engine,
            lambda context: context.setitem(SCALE, "factor", 5.0),
            torch.ones(4, 16),
        )


def test_functions_that_are_added_or_put_back_change_no_plan(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(F, "relu", copy.copy(F.relu))
    model = rotor.Checkpointable(Net(READS["get"]), mem_limit="1 MB", engine="graph")
    x = torch.ones(4, 16)
    for step in range(4):
        model(x).square().mean().backward()
        model.zero_grad()
        if step == 0:
            captured = model.plan.step.captured
        monkeypatch.setattr(F, f"added_{step}", scaled, raising=False)
        with monkeypatch.context() as context:
            context.setattr(torch.Tensor, "relu", scaled)
    assert model.plan.step.captured is captured


def test_wrappers_that_pytorch_makes_of_its_own_functions_change_no_plan(monkeypatch):
    torch.manual_seed(0)
    model = rotor.Checkpointable(Net(READS["get"]), mem_limit="1 MB", engine="graph")
    for step in range(3):
        model(torch.ones(4, 16)).square().mean().backward()
        model.zero_grad()
        if step == 0:
            captured = model.plan.step.captured
        # As importing its compiler does with another one.
        monkeypatch.setattr(torch, "seed", torch.compiler.disable(torch.seed))
    assert model.plan.step.captured is captured
