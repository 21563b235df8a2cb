"""What forwards note on tensors and on numbers, as attributes, changes once in each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import Habits

import rotor
from rotor.common.undisturbed import copied_arguments, trial

WIDTH, BATCH = 32, 256


class Rate(float):
    """Number with state."""


class Total(int):
    """Whole number with state."""


class Name(str):
    """Text with state in a slot."""

    __slots__ = ("uses",)


def used(owner: Any) -> int:
    owner.uses = getattr(owner, "uses", 0) + 1
    return owner.uses


class Net(nn.Module):
    """Model of which one function is the habit."""

    def __init__(self, habit: Callable[..., Any]) -> None:
        super().__init__()
        self.habit = habit
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.body = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.plain = torch.zeros(WIDTH)
        self.plain.history = [1.0]
        self.rate, self.total, self.name = Rate(0.5), Total(2), Name("n")

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        x = self.habit(self, x, *more)
        if float(x.detach().sum()) == 12345.0:
            x = x + 1
        return self.body(x).square().mean()

    def owners(self) -> list[Any]:
        weight = self.body[0][0].weight
        return [self.scale, weight, self.mean, self.plain, self.rate, self.total, self.name]


def noted(owners: Any) -> list[Any]:
    """What is noted on owners, as plain data."""
    found = []
    for owner in owners:
        last = getattr(owner, "last", None)
        history = list(getattr(owner, "history", ()))
        found.append((getattr(owner, "uses", 0), history, None if last is None else last.tolist()))
    return found


def batch() -> torch.Tensor:
    return torch.rand(BATCH, WIDTH)


habit = HABITS = Habits(lambda: (batch(),))


@habit()
def on_an_argument(net, x):
    return x * used(x)


@habit(lambda: (batch(), torch.ones(WIDTH, requires_grad=True), [torch.ones(WIDTH)]))
def on_arguments_of_other_kinds(net, x, leaf, others):
    return x * used(leaf) * used(others[0]) * leaf


@habit()
def on_tensors_of_the_model(net, x):
    net.plain.history.append(net.plain.history[-1] + 1)
    counts = sum(used(owner) for owner in net.owners()[:4])
    return x * (counts + net.plain.history[-1])


@habit()
def tensors_on_a_parameter(net, x):
    mean = x.detach().mean(0)
    last = getattr(net.scale, "last", None)
    net.scale.last = mean if last is None else last * 0.5 + mean
    return x + net.scale.last


@habit()
def on_numbers_and_texts(net, x):
    return x * net.rate * sum(used(owner) for owner in net.owners()[4:])


@habit(lambda: (batch(), Rate(0.5), {"a": Total(3)}))
def on_numbers_of_the_caller(net, x, rate, totals):
    return x * rate * (used(rate) + used(totals["a"]))


@habit()
def on_numbers_that_equal_the_last(net, x):
    uses = getattr(net.rate, "uses", 0) + 1
    net.rate = Rate(net.rate)
    net.rate.uses = uses
    return x * uses


@pytest.mark.parametrize("name", HABITS)
def test_a_trial_leaves_attributes_of_tensors_and_numbers(name):
    function, make = HABITS[name]
    net, args = Net(function), make()
    rate, before = net.rate, (noted(net.owners()), noted(args))
    with trial(net, args, torch.device("cpu")) as made:
        net(*made.arguments).backward()
    assert (noted(net.owners()), noted(args)) == before
    assert net.rate is rate


@pytest.mark.parametrize("copies_tensors", [False, True])
def test_copies_of_arguments_have_copies_of_their_attributes(copies_tensors):
    x, kept = torch.ones(2), torch.zeros(3)
    x.history, x.kept, x.myself = [1], kept, x
    (given, held) = copied_arguments((x, [kept]), copies_tensors=copies_tensors)
    assert given is not x
    assert given.history == [1]
    assert given.history is not x.history
    assert given.myself is given
    assert given.kept is held[0] is not kept


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.parametrize("name", HABITS)
def test_attributes_change_as_in_plain_steps(name, engine):
    function, make = HABITS[name]

    def outcome(**limit: Any) -> list[Any]:
        torch.manual_seed(0)
        torch.compiler.reset()
        net, found = Net(function), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = rotor.Checkpointable(net, verbosity=0, **limit) if limit else net
            for _ in range(3):
                args = make()
                loss = model(*args)
                loss.backward()
                found.append((loss.item(), noted(net.owners()), noted(args)))
        return found

    assert outcome(mem_limit="1 MB", engine=engine) == outcome()
