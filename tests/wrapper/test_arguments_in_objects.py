"""Models whose arguments hold their tensors in objects, or hold none, and scripted submodules."""

from __future__ import annotations

import collections
import copy
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_script_itself_trains(how: str, engine: str) -> None:
    script, x = scripted(how), torch.randn(64, 32)
    for _ in range(3):
        script(x).square().mean().backward()
        expected = [p.grad.clone() for p in script.parameters()]
        script.zero_grad()
    model = rotor.Checkpointable(script, mem_limit="1 MB", engine=engine)
    names = [name for name, _ in script.named_parameters()]
    assert model.module is script
    assert [name for name, _ in model.named_parameters()] == names
    assert [*nn.Sequential(model).state_dict()] == [f"0.{name}" for name in names]
    for _ in range(2):
        model(x).square().mean().backward()
        assert all(map(torch.equal, expected, [p.grad for p in script.parameters()]))
        model.zero_grad()
    assert model.plan.engine != "plain"
    model.eval()
    assert not script.training
    assert torch.equal(model(x), script(x))


def test_a_script_itself_is_no_chain() -> None:
    with pytest.raises(TypeError, match=r"chain engine needs an nn\.Sequential"):
        rotor.Checkpointable(scripted("script"), mem_limit="1 MB", engine="chain")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("limit", [40_000, 85_000])
def test_what_does_not_fit_within_a_script_is_said(limit: int) -> None:
    body = torch.jit.script(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64)))
    model = rotor.Checkpointable(body, mem_limit=limit, engine="dynamic")
    x = torch.randn(128, 32)

    def train() -> None:
        for _ in range(3):
            model(x).square().mean().backward()

    with pytest.raises(rotor.InfeasibleError, match=r"does not fit: the budget of .* is too small"):
        train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "chain", "dynamic"])
def test_a_model_with_a_frozen_script_trains(engine: str) -> None:
    frozen = torch.jit.freeze(scripted("script").eval())
    net = nn.Sequential(nn.Linear(32, 32), frozen, nn.Linear(32, 3))
    x = torch.randn(64, 32)
    for _ in range(3):
        net(x).square().mean().backward()
        expected = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
    rotor.Checkpointable(net, mem_limit="1 MB", engine=engine)(x).square().mean().backward()
    assert all(map(torch.equal, expected, [p.grad for p in net.parameters()]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_refused_model_with_a_frozen_script_is_left_as_it_was() -> None:
    frozen = torch.jit.freeze(scripted("script").eval())
    net = nn.Sequential(frozen, nn.DataParallel(nn.Linear(32, 3)))
    with pytest.raises(TypeError, match="module 1 is a DataParallel"):
        rotor.Checkpointable(net, mem_limit="1 MB")
    assert not hasattr(frozen, "training")


class Copied(nn.Linear):
    """A class that makes its copies itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = Copied(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made


@pytest.mark.parametrize("net", [Copied(4, 4), torch.fx.symbolic_trace(nn.Linear(4, 4))])
def test_copies_of_models_that_copy_themselves_are_limited(net: nn.Module) -> None:
    model = rotor.Checkpointable(net, mem_limit="1 MB")
    copied = copy.deepcopy(model)
    assert copied.mem_limit == model.mem_limit
    assert copied.module is not net
    assert all(map(torch.equal, copied.parameters(), net.parameters()))
