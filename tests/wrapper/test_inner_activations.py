"""Gradients of activations that a forward hands out or keeps, asked for after it.

Others of its results are computed from them, so that a plan's node alone does not know the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

import rotor
from rotor import memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:a backward that no plan gives"),
    # Where activations are kept, their graph is.
    pytest.mark.filterwarnings("ignore:a forward began while"),
]

WIDTH, ROWS, BLOCKS, KEPT = 32, 128, 8, (2, 5)
ENGINES = ["graph", "dynamic"]
PLACES = ["attributes", "a dictionary", "a hook", "results and attributes", "a list", "a class"]
"""Places beside the results alone."""


SEEN: list[torch.Tensor] = []


def note(activation: torch.Tensor) -> None:
    SEEN.append(activation)


class Net(nn.Module):
    """Blocks, of which two activations are returned, or kept where `place` says."""

    held: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.place, self.kept, self.last = place, {}, nn.Identity()
        if place == "a hook":
            self.seen: list[torch.Tensor] = []
            self.last.register_forward_hook(lambda *found: self.seen.append(found[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = []
        for k, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if k in KEPT:
                found.append(self.last(x))
        if "attributes" in self.place:
            self.first, self.second = found
        elif self.place == "a dictionary":
            self.kept.update(enumerate(found))
        elif self.place == "a class":
            type(self).held.update(enumerate(found))
        elif self.place == "a list":
            note(found[0]), note(found[1])
        return (found[1], x, found[0]) if "results" in self.place else x

    def activations(self, output: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the result of a forward, and its two activations."""
        if self.place == "results":
            return [output[1], output[2], output[0]]
        if "attributes" in self.place:
            y = output if isinstance(output, torch.Tensor) else output[1]
            return [y, self.first, self.second]
        if self.place == "a dictionary":
            return [output, *self.kept.values()]
        if self.place == "a class":
            return [output, *self.held.values()]
        if self.place == "a list":
            return [output, *SEEN[-2:]]
        found, self.seen[:] = self.seen[:], []
        return [output, *found]


Found = list[torch.Tensor | None]


def retained(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    first.retain_grad(), second.retain_grad()
    (y.pow(2).sum() + second.sum()).backward()
    return [first.grad, second.grad]


def hooked(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    found: Found = []
    first.register_hook(found.append)
    second.register_hook(lambda gradient: 2 * gradient)
    y.pow(2).sum().backward()
    return found


def one(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    return [*torch.autograd.grad(y.pow(2).sum(), first)]


def then_all(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    loss = y.pow(2).sum() + first.sum()
    found = torch.autograd.grad(loss, [first, second], retain_graph=True)
    loss.backward()
    return [*found]


def of_an_edge(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    edge = torch.autograd.graph.get_gradient_edge(first)
    return [*torch.autograd.grad(y.pow(2).sum() + second.sum(), edge)]


def into_gradients(y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Found:
    y.pow(2).sum().backward(inputs=[second])
    return [second.grad]


ASKS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Found]] = [
    retained,
    hooked,
    one,
    then_all,
    of_an_edge,
    into_gradients,
]


def trained(model: nn.Module, net: Net, ask: Callable[..., Found]) -> Found:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found: Found = []
    for _ in range(3):
        found += ask(*net.activations(model(x)))
        found += [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
    return found


def same(found: Found, expected: Found) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("place", "ask"),
    [
        *(("results", ask) for ask in ASKS),
        *((place, ask) for place in PLACES for ask in ASKS[::3]),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_activations_are_those_of_the_plain_model(
    engine: str, place: str, ask: Callable[..., Found]
) -> None:
    torch.manual_seed(0)
    net = Net(place)
    plain = Net(place)
    plain.load_state_dict(net.state_dict())
    expected = trained(plain, plain, ask)
    limited = rotor.Checkpointable(net, mem_limit="1MB", engine=engine, verbosity=0)
    assert same(trained(limited, net, ask), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_activations_of_which_nothing_is_asked_cost_no_memory(engine: str) -> None:
    torch.manual_seed(0)
    net = Net("results")
    x = torch.randn(8 * ROWS, WIDTH)

    def step(model: nn.Module) -> None:
        second, y, first = model(x)
        (y.pow(2).sum() + second.sum() + first.sum()).backward()
        net.zero_grad()

    step(copy.deepcopy(net))
    with memory.meter(torch.device("cpu")) as meter:
        step(copy.deepcopy(net))
    limit = int(0.85 * meter.peak_bytes)
    options = {"engine": engine, "verbosity": 0, "planning": "before"}
    limited = rotor.Checkpointable(net, mem_limit=limit, **options)
    for _ in range(8):
        step(limited)
    with memory.meter(torch.device("cpu")) as meter:
        step(limited)
    assert meter.peak_bytes <= limit


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backward_that_failed_leaves_nothing_to_the_next(engine: str) -> None:
    torch.manual_seed(0)
    net = Net("results")
    plain = copy.deepcopy(net)

    def fail(_: torch.Tensor) -> None:
        raise ValueError

    found = []
    for model in (plain, rotor.Checkpointable(net, mem_limit="1MB", engine=engine, verbosity=0)):
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        _, y, first = model(2 * x)
        handle = first.register_hook(fail)
        with pytest.raises(ValueError):
            y.pow(2).sum().backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        factor = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        factor.pow(2).sum().backward()
        found.append([factor.detach(), x.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
