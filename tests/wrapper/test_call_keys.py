"""Kinds of steps: what captured code reads of the arguments tells them apart, nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rotor
from rotor.common.calls import PlainValues, Reads, leaf_expressions


class Settings:
    """Object among the arguments."""

    def __init__(self, scale: float, name: str) -> None:
        self.scale, self.name = scale, name


class Net(nn.Module):
    """Model of a batch, of which a function says what else is read."""

    def __init__(self, read: Callable[[Any], Any], *, breaks: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.read, self.breaks = read, breaks

    def forward(self, batch: Any) -> torch.Tensor:
        y = self.body(batch["x"]) * self.read(batch)
        if self.breaks and y.sum() > 1e9:
            return y * 2
        return y


def losses(
    make: Callable[[], nn.Module], values: list[Any], engine: str | None
) -> tuple[list[float], int]:
    torch.manual_seed(0)
    net = make()
    limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
    model: Any = net if engine is None else rotor.Checkpointable(net, **limit)
    seen = []
    for value in values:
        net.zero_grad()
        loss = model({"x": torch.randn(32, 16), "value": value}).square().mean()
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        seen += [loss.item(), *[gradient.sum().item() for gradient in gradients]]
    return seen, 0 if engine is None else len(model.plans)


def nothing(batch: Any) -> float:
    return 1.0


UNREAD: dict[str, list[Any]] = {
    "texts": [f"image_{k}.png" for k in range(5)],
    "numbers": [0, 1, 2, 3, 4],
    "rates": [0.1, 0.2, 0.3, float("nan"), float("nan")],
    "objects": [Settings(float(k), "a") for k in range(5)],
    "arrays": [np.array([32, k]) for k in range(5)],
    "lists": [[f"{k}", k, b"k"] for k in range(5)],
}


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_makes_no_new_kind(kind: str, engine: str) -> None:
    def make() -> nn.Module:
        return Net(nothing)

    plain, _ = losses(make, UNREAD[kind], None)
    limited, plans = losses(make, UNREAD[kind], engine)
    assert limited == plain
    assert plans == 1


@pytest.mark.parametrize("kind", UNREAD)
def test_parts_ask_for_no_new_kind_either(kind: str) -> None:
    def make() -> nn.Module:
        return Net(nothing, breaks=True)

    plain, _ = losses(make, UNREAD[kind], None)
    with pytest.warns(rotor.MemoryLimitWarning, match="no single graph"):
        limited, plans = losses(make, UNREAD[kind], "auto")
    assert limited == plain
    assert plans == 1


READ: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "texts": (lambda b: 2.0 if b["value"] == "twice" else 1.0, ["once", "twice", "once", "twice"]),
    "lengths": (lambda b: len(b["value"]), ["a", "bb", "a", "bb"]),
    "zeros": (lambda b: torch.copysign(torch.ones(()), torch.full((), b["value"])), [0.0, -0.0]),
    "numbers and truth": (lambda b: 1 if b["value"] is True else 3, [1, True, 1, True]),
    "numbers of kinds": (lambda b: 1 if isinstance(b["value"], float) else 3, [1, 1.0, 1, 1.0]),
    "objects": (lambda b: b["value"].scale, [Settings(2.0, "a"), Settings(3.0, "b")] * 2),
    "same object": (lambda b: b["value"].scale, [Settings(2.0, "a")] * 3),
    "arrays": (
        lambda b: torch.from_numpy(b["value"]).float().sum(),
        [np.array([1.0, k]) for k in range(4)],
    ),
}


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_followed(kind: str, engine: str) -> None:
    read, values = READ[kind]
    plain, _ = losses(lambda: Net(read), values, None)
    assert losses(lambda: Net(read), values, engine)[0] == plain


def test_an_object_that_changes_is_followed() -> None:
    def seen(engine: str | None) -> list[float]:
        torch.manual_seed(0)
        net, settings = Net(lambda b: b["value"].scale), Settings(1.0, "a")
        limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
        model: Any = net if engine is None else rotor.Checkpointable(net, **limit)
        x, found = torch.randn(32, 16), []
        for scale in (1.0, 1.0, 2.0, 2.0):
            settings.scale = scale
            loss = model({"x": x, "value": settings}).square().mean()
            loss.backward()
            found.append(loss.item())
        return found

    assert seen("graph") == seen(None)


def text(length: int) -> str:
    return "x" * length


def text_length(batch: Any) -> float:
    return float(len(batch["value"]))


def test_the_third_value_of_what_is_read_is_warned_of_once() -> None:
    values = [text(k) for k in range(1, 6)]
    with pytest.warns(rotor.MemoryLimitWarning, match=r"batch\[1\] had three values") as caught:
        limited = losses(lambda: Net(text_length), values, "graph")
    assert len(caught) == 1
    assert limited[0] == losses(lambda: Net(text_length), values, None)[0]


def test_kinds_that_were_unused_for_longest_are_dropped() -> None:
    values = [text(k) for k in [*range(10), 0, 9, 1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        limited, plans = losses(lambda: Net(text_length), values, "graph")
    assert limited == losses(lambda: Net(text_length), values, None)[0]
    assert plans == 8


def test_values_are_equal_if_those_that_are_read_are() -> None:
    reads = Reads()
    one, other = PlainValues({0: "a", 1: "b"}, reads), PlainValues({0: "a", 1: "c"}, reads)
    assert one != other
    assert reads.note(frozenset({0}), one) == []
    assert one == other
    assert hash(one) == hash(other)
    reads.note(frozenset({1}), other)
    assert one != other
    assert one != PlainValues({0: "a"}, reads)


def test_leaves_have_the_names_that_captures_give_them() -> None:
    arguments = (({"x": 1, 2: [3]},), {"named": 4}, (5,))
    names = ["L['args'][0]['x']", "L['args'][0][2][0]", "L['kwargs']['named']", "L['targets'][0]"]
    assert leaf_expressions(arguments) == names
