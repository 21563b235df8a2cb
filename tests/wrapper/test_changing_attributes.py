"""Numbers of a model that change in every step: inputs of captured code, not constants."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rotor
from rotor.engines.graph import capture

STEPS = 8


class Scaled(nn.Module):
    """Layer with a number that the training loop or a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.rate, self.count = 0.9, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self, use: Callable[..., torch.Tensor], change: Callable[[nn.Module], None]):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))
        self.rate, self.count, self.use, self.change = 0.9, 2, use, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.use(self, x)


def counted(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return x


def counted_inside(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.layers[1].count += 1
    return x * (1 + net.layers[1].count / 100)


def decayed(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.rate *= 0.97
    return x * net.rate + net.rate


def shared_out(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.rate = 0.9**net.count
    return x * net.rate


def warmed_up(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * (net.count / 5 if net.count < 5 else 1.0)


def nothing(net: nn.Module) -> None:
    del net


def add_one(net: nn.Module) -> None:
    net.count += 1


def decay(net: nn.Module) -> None:
    net.rate *= 0.97


def decay_inside(net: nn.Module) -> None:
    for layer in net.layers:
        layer.rate *= 0.97


CASES = {
    "counter": (counted, nothing),
    "counter inside": (counted_inside, nothing),
    "decay": (decayed, nothing),
    "both": (shared_out, nothing),
    "counter of the loop": (lambda net, x: x * net.count, add_one),
    "rate of the loop": (lambda net, x: net.rate * x + (1 - net.rate) * x.detach(), decay),
    "rates inside": (lambda net, x: x * net.layers[0].rate + net.layers[2].rate, decay_inside),
    "warm-up": (warmed_up, add_one),
}


CONSTANTS = {
    "size": (lambda net, x: x[:, : net.count], add_one),
    "dropout": (lambda net, x: F.dropout(x, 1 - net.rate), decay),
}


def train(model: nn.Module, net: Net) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(64, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.change(net)
        found += [loss.item(), net.count, net.rate, net.layers[1].count]
    return found


@pytest.fixture
def captures(monkeypatch):
    """Number of captured graphs, which grows."""
    made, lower = [], capture.lower

    def noted(*given, **settings):
        made.append(1)
        return lower(*given, **settings)

    monkeypatch.setattr(capture, "lower", noted)
    return made


def both(name: str, **options) -> rotor.Checkpointable:
    torch.manual_seed(0)
    plain = Net(*(CASES | CONSTANTS)[name])
    planned = copy.deepcopy(plain)
    model = rotor.Checkpointable(planned, mem_limit="1 MB", verbosity=-1, **options)
    assert train(model, planned) == train(plain, plain)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_changes_is_an_input_from_its_second_value_on(name, captures):
    model = both(name, engine="graph")
    assert model.plan.engine == "graph"
    # As it is first; as it is then, with the number as a constant and as an input; each branch.
    assert len(captures) <= (4 if name == "warm-up" else 3)


def test_auto_stays_with_the_graph_engine(captures):
    assert both("counter").plan.engine == "graph"


def test_values_are_compared_with_such_numbers():
    model = both("both", engine="graph", verify="always")
    assert model.plan.engine == "graph"


@pytest.mark.parametrize("name", CONSTANTS)
def test_other_numbers_are_constants(name, captures):
    both(name)
    # Each value is captured once, and that it can be no input is found once.
    assert len(captures) <= STEPS + 1


class Placed(nn.Module):
    """Block that counts its calls, and knows its place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.place, self.count, self.rate = place, 2, 0.9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.rate *= 0.97
        scale = self.rate + self.count / 100 + self.place / 10
        return x + self.narrow(torch.tanh(self.wide(x))) * scale


class Breaking(Net):
    """Model without one graph, whose blocks have captures."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: x, nothing)
        self.layers = nn.ModuleList(Placed(k) for k in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.filterwarnings("ignore:no single graph of the model")
def test_parts_take_such_numbers_as_inputs(captures):
    torch.manual_seed(0)
    plain = Breaking()
    planned = copy.deepcopy(plain)
    model = rotor.Checkpointable(planned, mem_limit="1 MB", verbosity=-1)
    assert train(model, planned) == train(plain, plain)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    assert model.plan.engine == "parts"
    # Four places, each as it is first, as it is then, and with numbers as inputs.
    assert len(captures) <= 12
