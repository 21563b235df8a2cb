"""Kinds of steps: what captured code reads of the arguments tells them apart, nothing else."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from training import check_equal, gradients_of, same
from zoo.models import Row

import rotor
from rotor.common import calls
from rotor.common.calls import PlainValues, Reads, leaf_expressions
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.graph.capture import Capture
from rotor.engines.graph.engine import GraphEngine
from rotor.wrapper import order


class Settings:
    """Object among the arguments."""

    def __init__(self, scale: float, name: str) -> None:
        self.scale, self.name = scale, name


class Net(nn.Module):
    """Model of a batch, of which a function says what else is read."""

    def __init__(self, read: Callable[[Any], Any], *, breaks: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)])
        self.read, self.breaks = read, breaks

    def forward(self, batch: Any) -> torch.Tensor:
        y = self.body(batch["x"]) * self.read(batch)
        if self.breaks and y.sum() > 1e9:
            return y * 2
        return y


def check_values(
    values: list[Any], engine: str, read: Callable[[Any], Any], *, breaks: bool = False
) -> int:
    """Check that batches with values train as in plain PyTorch; return the number of plans."""

    def loss_of(model: Any, number: int) -> torch.Tensor:
        return model({"x": torch.randn(32, 16), "value": values[number]}).square().mean()

    def make() -> nn.Module:
        return Net(read, breaks=breaks)

    return len(check_equal(make, loss_of, len(values), mem_limit="1 MB", engine=engine).plans)


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
    assert check_values(UNREAD[kind], engine, nothing) == 1


@pytest.mark.parametrize("kind", UNREAD)
def test_parts_ask_for_no_new_kind_either(kind: str) -> None:
    with pytest.warns(rotor.MemoryLimitWarning, match="no single graph"):
        assert check_values(UNREAD[kind], "auto", nothing, breaks=True) == 1


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
    check_values(values, engine, read)


def test_an_object_that_changes_is_followed() -> None:
    x, settings = torch.randn(32, 16), Settings(1.0, "a")

    def loss_of(model: Any, number: int) -> torch.Tensor:
        settings.scale = (1.0, 1.0, 2.0, 2.0)[number]
        return model({"x": x, "value": settings}).square().mean()

    read = lambda batch: batch["value"].scale  # noqa: E731
    check_equal(lambda: Net(read), loss_of, 4, mem_limit="1 MB", engine="graph", verbosity=0)


def text(length: int) -> str:
    return "x" * length


def text_length(batch: Any) -> float:
    return float(len(batch["value"]))


def test_the_third_value_of_what_is_read_is_warned_of_once() -> None:
    values = [text(k) for k in range(1, 6)]
    with pytest.warns(rotor.MemoryLimitWarning, match=r"batch\[1\] had three values") as caught:
        check_values(values, "graph", text_length)
    assert len(caught) == 1


class Notes:
    """Object among the arguments that holds a list."""

    def __init__(self) -> None:
        self.lines: list[str] = []


GROWING: dict[str, list[Any]] = {
    "lists": [[f"step {n}" for n in range(k)] for k in range(5)],
    "dictionaries": [{f"step {n}": n for n in range(k)} for k in range(5)],
}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("kind", GROWING)
def test_the_third_structure_of_an_argument_is_warned_of_once(kind: str, breaks: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert check_values(GROWING[kind], "auto", nothing, breaks=breaks) == 5
    told = [w for w in caught if "batch had three structures so far" in str(w.message)]
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore:batch had three structures so far")
def test_structures_without_end_are_captured_no_more() -> None:
    lists = [["step"] * k for k in range(18)]
    with pytest.warns(rotor.MemoryLimitWarning, match="further kinds are not"):
        check_values(lists, "auto", nothing)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kinds that were captured, where two plans are kept and 3 new kinds of 4 are too many."""
    for name, value in {"ENDLESS": 3, "AMONG": 4, "FEWEST": 2}.items():
        monkeypatch.setattr(order, name, value)
    found: list[Any] = []
    measure = GraphEngine.measure

    def measured(self: GraphEngine, key: Any, call: Any) -> Any:
        found.append(key)
        return measure(self, key, call)

    monkeypatch.setattr(GraphEngine, "measure", measured)
    return found


@pytest.mark.parametrize("is_ragged", [False, True])
def test_no_kind_is_captured_while_kinds_are_new_without_end(
    captured: list[Any], is_ragged: bool
) -> None:
    def loss_of(model: Any, number: int) -> torch.Tensor:
        x = torch.randn(32 + number % 3 * is_ragged, 16)
        return model({"x": x, "value": text(number + 1)}).square().mean()

    def make() -> nn.Module:
        return Net(text_length)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        chk = check_equal(make, loss_of, 14, mem_limit="1 MB", engine="auto")
    assert len(captured) == 3
    assert sum("The dynamic engine runs them" in str(w.message) for w in told) == 1
    # Two of those, and one for each length of the steps that are run as they are.
    assert len(chk.plans) == 2 + (3 if is_ragged else 1)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_kind_that_comes_again_after_many_new_ones_is_captured(captured: list[Any]) -> None:
    values = [text(k) for k in (1, 2, 3, 4, 5, 6, 6, 6)]
    assert check_values(values, "auto", text_length) == 3
    assert len(captured) == 4


def test_kinds_are_captured_where_the_dynamic_engine_cannot_keep_the_limit(
    captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: object) -> None:
        tried.append(1)
        raise rotor.InfeasibleError("too much", 1 << 40)

    monkeypatch.setattr(calls, "MOST_VALUES", 4)
    monkeypatch.setattr(DynamicEngine, "measure", refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_values([text(k) for k in range(1, 10)], "auto", text_length)
    assert sum("is captured and planned, and takes its time" in str(w.message) for w in told) == 1
    assert len(captured) == 9
    assert len(tried) == 1


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_captures_of_dropped_kinds_are_freed(captured: list[Any]) -> None:
    def alive() -> int:
        return sum(type(one) is Capture for one in gc.get_objects())

    before = alive()
    check_values([text(k) for k in range(1, 10)], "graph", text_length)
    assert len(captured) == 9
    assert alive() - before <= 4


@pytest.mark.filterwarnings("ignore:no single graph of the model")
@pytest.mark.parametrize("breaks", [False, True])
def test_a_list_that_grows_in_an_object_makes_no_new_kind(breaks: bool) -> None:
    def note(batch: Any) -> float:
        batch["value"].lines.append("seen")
        return 1.0

    notes = Notes()
    assert check_values([notes] * 5, "auto", note, breaks=breaks) == 1
    assert notes.lines == ["seen"] * 10


def test_kinds_that_were_unused_for_longest_are_dropped() -> None:
    values = [text(k) for k in [*range(10), 0, 9, 1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        assert check_values(values, "graph", text_length) == 8


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


def test_constants_of_many_values_are_captured_no_more() -> None:
    reads = Reads()
    for epoch in range(40):
        values = PlainValues({0: (int, epoch), 1: (str, "task")}, reads)
        assert reads.is_endless == (epoch >= 16)
        reads.note(frozenset([0]), values)


def test_constants_of_few_values_are_captured_for_any_shape() -> None:
    reads = Reads()
    for step in range(40):
        reads.note(frozenset([1]), PlainValues({0: (int, step), 1: (int, step % 15)}, reads))
    assert not reads.is_endless


class Counting(TorchFunctionMode):
    """Mode of the caller's whose every call differs for captured code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Row, nn.Sequential])
def test_code_that_asks_for_another_graph_each_time_is_no_fault_of_an_engine(make: Any) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    plain = make(*blocks)
    x = torch.randn(256, 32)
    with rotor.memory.meter("cpu") as meter:
        plain(x).square().mean().backward()
    limited = make(*copy.deepcopy(blocks))
    limited.zero_grad()
    chk = rotor.Checkpointable(limited, mem_limit=int(0.7 * meter.peak_bytes), verbosity=-1)
    with warnings.catch_warnings(record=True) as told, Counting():
        warnings.simplefilter("always")
        chk(x).square().mean().backward()
    assert same(gradients_of(plain), gradients_of(limited))
    assert not any("please report" in str(w.message) for w in told)
