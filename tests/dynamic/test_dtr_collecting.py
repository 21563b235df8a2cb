"""Garbage that is collected in the middle of the runtime's work: storages die at any allocation."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from rotor import dtr
from rotor.errors import BudgetError

pytestmark = pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")

_KIB = 1024


class Cycle:
    """Garbage that only the collector finds, as closures, tracebacks and hooks leave it."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


@contextmanager
def collecting(threshold: int) -> Iterator[None]:
    """Collect all garbage after every so many allocations."""
    before = gc.get_threshold()
    gc.set_threshold(threshold, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.enable()


@contextmanager
def collecting_once(after: int) -> Iterator[Callable[[], None]]:
    """Collect no garbage until so many allocations after a call of what this gives."""
    gc.collect()
    before = gc.get_threshold()
    gc.disable()

    def begin() -> None:
        gc.set_threshold(gc.get_count()[0] + after)
        gc.enable()

    try:
        yield begin
    finally:
        gc.set_threshold(*before)
        gc.enable()


def write(begin: Callable[[], None]) -> torch.Tensor:
    w = nn.Parameter(torch.linspace(0, 1, 4 * _KIB))
    for k in range(12):
        Cycle(w.sin() * k)
    begin()
    with torch.no_grad():
        w.add_(1)
    return w.detach()


def leave(begin: Callable[[], None]) -> torch.Tensor:
    x = torch.linspace(0, 1, 4 * _KIB)
    for k in range(12):
        Cycle((x * k).sin())
    begin()
    return x + 1


def read(begin: Callable[[], None]) -> torch.Tensor:
    x = torch.linspace(0, 1, 4 * _KIB)
    kept = []
    for k in range(12):
        garbage = Cycle(torch.frexp(x * k))
        kept.append((garbage.held[0] * 2).sin())
    del garbage
    begin()
    return torch.stack([value.sum() for value in kept])


class Output:
    def __init__(self, y: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.y, self.states, self.owner = y, states, self


def recur() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    w = nn.Parameter(torch.randn(32, 32, generator=generator) / 6)
    x = torch.randn(32, 32, generator=generator)
    for _ in range(2):
        h, states = torch.zeros(32, 32), []
        for _ in range(10):
            h = torch.tanh(x + h @ w)
            states.append(h)
        out = Output(h, states)
        out.y.square().mean().backward()
        with torch.no_grad():
            w -= w.grad
        w.grad = None
    return w.detach()


def wander(seed: int) -> torch.Tensor:
    """A random program: operators of one and of several results, writes, views, random numbers."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    values = [torch.linspace(0, 1, 2 * _KIB, requires_grad=True) for _ in range(2)]
    garbage: list[Any] = []
    for _ in range(40):
        x = values[draw.randrange(len(values))]
        kind = draw.randrange(7)
        if kind == 0:
            y = x.sin() + values[-1]
        elif kind == 1:
            y, other = torch.sort(x.reshape(32, -1))[0].unbind(0)[0].repeat(32), x * 2
            Cycle(other)
        elif kind == 2:
            y = (x * 1).mul_(0.5).add_(values[0])
        elif kind == 3:
            y = torch.nn.functional.dropout(x, 0.5)
        elif kind == 4:
            mantissa, _ = torch.frexp(x.detach())
            y = x * mantissa
        elif kind == 5:
            y = x.view(2, -1).t().reshape(-1).cos()
        else:
            y = x.exp().clamp(max=2)
        values.append(y)
        if draw.random() < 0.5:
            garbage.append(Cycle(values.pop(draw.randrange(2, len(values)))))
        if draw.random() < 0.4 and garbage:
            garbage.pop(draw.randrange(len(garbage)))
    loss = torch.stack([value.sum() for value in values]).sum()
    (gradient,) = torch.autograd.grad(loss, [values[0]])
    return torch.cat([gradient, loss.detach()[None]])


@pytest.mark.parametrize("program", [write, leave, read])
def test_storages_may_die_at_each_allocation(program: Callable[[Callable[[], None]], torch.Tensor]):
    expected = program(lambda: None)
    evictions = 0
    for after in range(1, 90, 2):
        with collecting_once(after) as begin, dtr.budget(110 * _KIB, strict=False) as session:
            found = program(begin)
        assert torch.equal(found, expected)
        evictions += session.stats.evictions
    assert evictions > 100


PROGRAMS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "recur": (recur, 60 * _KIB),
    "wander": (lambda: torch.stack([wander(seed) for seed in range(2)]), 90 * _KIB),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("threshold", [1, 2, 5, 11, 19, 43])
def test_storages_may_die_at_any_allocation(name: str, threshold: int):
    program, limit = PROGRAMS[name]
    expected = program()
    for observer in (None, Silent()) if threshold == 1 else (None,):
        with dtr.budget(limit, strict=False, record_log=observer) as session, collecting(threshold):
            found = program()
        assert torch.equal(found, expected)
        assert session.stats.evictions > 0


class Silent:
    """Hears of everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("constant", "operation", "released", "pinned", "evicted"):
            return lambda *_: None
        raise AttributeError(name)


def test_operators_on_resized_storages_survive_collections():
    """Storages that are resized instead of swapped."""
    expected = recur()
    with dtr.budget(60 * _KIB, strict=False, storage_swap=False) as session, collecting(1):
        found = recur()
    assert torch.equal(found, expected)
    assert session.stats.rematerializations > 0


def test_the_error_of_a_budget_is_raised_whatever_is_collected_meanwhile():
    x = torch.linspace(0, 1, 4 * _KIB)
    for threshold in (1, 5, 50):
        with dtr.budget(256 * _KIB):
            kept = [torch.zeros(10) for _ in range(300)]
            for _ in range(5):
                Cycle(torch.ones(20))
            with collecting(threshold), pytest.raises(BudgetError, match="too small"):
                x.repeat(100)
            del kept


def test_what_only_garbage_held_is_forgotten_once_it_was_collected():
    x = torch.linspace(0, 1, 4 * _KIB)
    with dtr.budget("1MiB") as session:
        for k in range(5):
            Cycle(x * k)
        before = session.counters()["current_bytes"]
        gc.collect()
        after = session.counters()["current_bytes"]
    assert before - after >= 4 * x.nbytes
    assert after < x.nbytes


def test_a_finalizer_does_not_disturb_the_operation_that_runs():
    """A session that a finalizer uses in the middle of an operation."""
    x = torch.linspace(0, 1, 4 * _KIB)
    heard: list[str] = []

    class Nosy:
        def __init__(self, held: torch.Tensor) -> None:
            self.held, self.me = held, self

        def __del__(self) -> None:
            session = dtr.current()
            if session is None:
                return
            session.counters()
            try:
                session.materialize(self.held)
            except RuntimeError as error:
                heard.append(str(error))

    expected = [(x * k).sin() for k in range(12)]
    for threshold in (1, 4, 9, 17, 31):
        with dtr.budget(100 * _KIB, strict=False), collecting(threshold):
            kept = []
            for k in range(12):
                Nosy((x + k).cos())
                kept.append((x * k).sin())
            again = [float(value.sum()) for value in kept]
        assert again == [float(value.sum()) for value in expected]
    assert all("while one of its operations runs" in text for text in heard)
