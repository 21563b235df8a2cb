"""Forwards that prepare a model: what the next one changes again does not stay."""

from __future__ import annotations

import functools
import queue
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Row

import rotor
from rotor.common.dependencies import Dependencies, Record
from rotor.engines.graph.calls import run_once


class Noting(nn.Module):
    """Notes figures, by name, in a container of any kind that the first forward makes."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda _, __, output: note(output.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Statistics:
    pass


def in_lists(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("norms", []).append(value.norm().item())


def in_nested(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("layer", {}).setdefault("norms", []).append(value.norm().item())


def in_objects(notes: Any, value: torch.Tensor) -> None:
    found = notes.setdefault("layer", Statistics())
    found.seen = getattr(found, "seen", 0) + 1


def in_tensors(notes: Any, value: torch.Tensor) -> None:
    if "mean" in notes:
        notes["mean"].mul_(0.9).add_(value.mean(), alpha=0.1)
    else:
        notes["mean"] = value.mean()


def in_lists_of_tensors(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("sums", [torch.zeros(4)])[0].add_(value.sum(0))


def in_tuples(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("pair", ([], "norms"))[0].append(value.norm().item())


@pytest.mark.parametrize(
    "note", [in_tuples, in_lists, in_nested, in_objects, in_tensors, in_lists_of_tensors]
)
def test_figures_in_new_containers_do_not_stay(note):
    notes: dict[str, Any] = defaultdict(list)
    model = Noting(lambda value: note(notes, value))
    assert run_once(model, (torch.ones(2, 4),), {})
    assert notes == {}


def test_a_cache_that_is_only_read_again_stays():
    notes: dict[str, Any] = {}
    model = Noting(lambda value: notes.setdefault(len(value), torch.arange(len(value))))
    assert run_once(model, (torch.ones(2, 4),), {})
    assert list(notes) == [2]


def test_state_in_a_tuple_is_compared_by_identity():
    # An evicted tensor has nothing to compare.
    layer = nn.Linear(2, 2)
    layer.state = before = (torch.ones(1),)
    record = Record(Dependencies([("layer", layer)]).recorded())
    layer.state = (torch.ones(1),)
    record.restore((), [])
    assert layer.state is before


class Projecting(nn.Module):
    """Block that adds a random projection, drawn once, after dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def projection(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x))) + x @ self.projection()


class InProperty(Projecting):
    @functools.cached_property
    def kept(self) -> torch.Tensor:
        return torch.randn(8, 8)

    def projection(self) -> torch.Tensor:
        return self.kept


@functools.lru_cache
def drawn(size: int) -> torch.Tensor:
    return torch.randn(size, size)


class InCache(Projecting):
    def projection(self) -> torch.Tensor:
        return drawn(8)


def test_a_model_that_draws_to_prepare_itself_is_as_it_was():
    model, before = InProperty(), torch.get_rng_state()
    assert not run_once(model, (torch.ones(2, 8),), {})
    assert "kept" not in vars(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:no single graph of the model")
@pytest.mark.parametrize("engine", ["auto", "dynamic", "chain"])
@pytest.mark.parametrize("kind", [InProperty, InCache])
def test_what_is_drawn_once_is_drawn_when_the_plain_model_draws_it(kind, engine):
    def results(engine: str | None) -> list[torch.Tensor]:
        drawn.cache_clear()
        torch.manual_seed(0)
        net = nn.Sequential(*(kind() for _ in range(4)))
        if engine != "chain":
            net = Row(net)
        model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine) if engine else net
        found = []
        for _ in range(3):
            net.zero_grad()
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            found += [loss.detach(), torch.get_rng_state(), *(p.grad for p in net.parameters())]
        return found

    assert all(map(torch.equal, results(None), results(engine)))


def test_a_graph_of_a_function_that_draws_once_is_refused():
    drawn.cache_clear()
    model = rotor.Checkpointable(Row(InCache()), mem_limit="1 MB", engine="graph")
    with pytest.raises(rotor.CaptureError, match="random numbers in a function with a cache"):
        model(torch.randn(16, 8))


class Gained(nn.Module):
    """Block that a method with a cache scales, as the weights were when it first ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    @functools.lru_cache  # noqa: B019
    def scale(self, size: int) -> torch.Tensor:
        return self.gain.detach() / size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale(len(x)) * self.gain


class Listing(Gained):
    """Block that notes the sizes for which it has made masks, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.count = [], 0

    @functools.lru_cache  # noqa: B019
    def scale(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        self.count += 1
        return torch.ones(8) / self.count


@pytest.mark.filterwarnings("ignore:no single graph of the model")
@pytest.mark.parametrize("engine", ["auto", "dynamic", "chain"])
@pytest.mark.parametrize("kind", [Gained, Listing])
def test_a_function_with_a_cache_runs_when_the_plain_model_runs_it(kind, engine):
    def results(engine: str | None) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*(kind() for _ in range(4)))
        net = net if engine == "chain" else Row(net)
        model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine) if engine else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        found = []
        for rows in (16, 16, 8, 16):
            optimizer.zero_grad()
            loss = model(torch.randn(rows, 8)).square().mean()
            loss.backward()
            optimizer.step()
            found += [loss.item(), *([m.sizes[:], m.count] for m in net.modules()
                                     if isinstance(m, Listing))]  # fmt: skip
        return found

    assert results(None) == results(engine)


@pytest.mark.parametrize(("kind", "words"), [(Gained, "tensors read by"), (Listing, "writes of")])
def test_a_graph_of_a_function_with_a_cache_that_matters_is_refused(kind, words):
    model = rotor.Checkpointable(Row(kind()), mem_limit="1 MB", engine="graph")
    with pytest.raises(rotor.CaptureError, match=f"{words} a function with a cache"):
        model(torch.randn(16, 8))


@functools.lru_cache
def ramp(size: int) -> torch.Tensor:
    table = [k / size for k in range(size)]
    return torch.tensor(table) + torch.arange(size).view(size)


class Ramped(Gained):
    def scale(self, size: int) -> torch.Tensor:
        return ramp(size)[:8]


def test_a_graph_of_a_pure_function_with_a_cache_is_planned():
    model = rotor.Checkpointable(Row(Ramped(), Ramped()), mem_limit="1 MB", engine="graph")
    for rows in (16, 24, 32):
        model(torch.randn(rows, 8)).sum().backward()


def test_queues_hold_what_the_steps_put_into_them():
    found: queue.Queue[torch.Tensor] = queue.Queue()
    model = Noting(found.put)
    assert run_once(model, (torch.ones(2, 4),), {})
    assert found.empty()
    assert found.unfinished_tasks == 0
