"""Guards of runs that leave no trace."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

import rotor
from rotor.common import undisturbed
from rotor.common.collector import CollectorPause
from rotor.engines.graph import capture
from rotor.engines.graph.calls import run_once
from rotor.engines.graph.tracing.lowering import lower

CPU = torch.device("cpu")


class Stateful(nn.Module):
    """Every kind of state that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("alias", self.seen)
        self.register_buffer("empty", None)
        self.calls, self.last, self.history = 0, torch.zeros(2), [1]
        self.ready, self.table = False, None
        self.generator = torch.Generator().manual_seed(3)
        self.numpy, self.python = np.random.default_rng(3), random.Random(3)

    def forward(self, x):
        self.seen.add_(1)
        self.calls += 1
        self.last.add_(1)
        self.history.append(2)
        self.ready, self.made = True, 5
        if self.table is None:
            self.table = torch.ones(3)
        drawn = torch.rand(2) + torch.rand(2, generator=self.generator)
        return self.linear(x) + drawn + self.numpy.random() + self.python.random() + random.random()


def state_of(model: Stateful) -> list:
    """Everything that a forward changes, as plain data."""
    return [
        model.seen.tolist(),
        model.calls,
        model.last.tolist(),
        list(model.history),
        (model.ready, model.table, hasattr(model, "made")),
        model.generator.get_state().tolist(),
        model.numpy.bit_generator.state,
        model.python.getstate(),
        random.getstate(),
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_leaves_a_model_as_it_was(fails):
    model = Stateful()
    before, seen, last = state_of(model), model.seen, model.last
    try:
        with undisturbed.trial(model, (), CPU):
            model(torch.ones(2))
            assert state_of(model) != before
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert state_of(model) == before
    assert model.seen is model.alias is seen
    assert model.last is last


def test_what_a_first_forward_sets_up_stays_and_nothing_else():
    model = Stateful()
    seen = model.seen
    assert run_once(model, (torch.ones(2),), {})
    assert (model.ready, model.table.tolist(), model.made) == (True, [1, 1, 1], 5)
    assert (model.calls, model.last.tolist(), model.history) == (0, [0, 0], [1])
    assert model.seen is model.alias is seen
    assert (seen.tolist(), seen._version) == ([0, 0], 0)


class Made:
    """Object that collects."""

    def __init__(self) -> None:
        self.values = []


COLLECTORS = {
    "default dict": (lambda: defaultdict(list), lambda kept: kept[0].append(1)),
    "setdefault": (dict, lambda kept: kept.setdefault("a", []).append(1)),
    "nested": (dict, lambda kept: kept.setdefault("a", {}).setdefault("b", ([], 3))[0].append(1)),
    "object": (dict, lambda kept: kept.setdefault("a", Made()).values.append(1)),
    "in an object": (dict, lambda kept: kept.setdefault("a", [Made()])[0].values.append(1)),
    "counter": (Counter, lambda kept: kept.update("a")),
    "deque": (dict, lambda kept: kept.setdefault("a", deque(maxlen=3)).append(1)),
}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_what_a_first_forward_makes_and_each_one_fills_does_not_stay(kind):
    make, collect = COLLECTORS[kind]
    model, kept = nn.Linear(2, 2), make()
    model.register_forward_hook(lambda *_: collect(kept))
    assert run_once(model, (torch.ones(2),), {})
    assert not kept


class Counts(type):
    """Metaclass with a number."""

    seen = 0


class Seen(metaclass=Counts):
    """Class with a number, and with one of its metaclass."""

    calls = 0


def test_numbers_of_classes_that_a_forward_names_do_not_stay():
    def count(*_):
        Seen.calls += 1
        Counts.seen += 1

    model = nn.Linear(2, 2)
    model.register_forward_hook(count)
    assert run_once(model, (torch.ones(2),), {})
    assert (Seen.calls, Seen.seen) == (0, 0)


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_hooks_collect_once_for_each_step(engine):
    kept = defaultdict(list)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)])
    for k, block in enumerate(model):
        block.register_forward_hook(lambda *given, k=k: kept[k].append(given[2].shape))
    wrapped = rotor.Checkpointable(model, mem_limit="300 KB", engine=engine)
    for _ in range(2):
        wrapped(torch.randn(128, 64)).square().mean().backward()
    assert [len(found) for found in kept.values()] == [2] * 5


def test_replaced_buffers_come_back_with_their_values():
    model = Stateful()
    seen = model.seen
    with undisturbed.trial(model, (), CPU):
        model.seen.add_(1)
        model.seen = torch.ones(7)
    assert model.seen is model.alias is seen
    assert seen.tolist() == [0, 0]


def test_flags_and_gradients_come_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    model(torch.ones(1, 2)).sum().backward()
    gradient = model[0].weight.grad
    with undisturbed.training_flags_kept(model), undisturbed.gradients_aside(model.parameters()):
        model.eval()
        assert [p.grad for p in model.parameters()] == [None, None]
        model(torch.ones(1, 2)).sum().backward()
    assert [part.training for part in model.modules()] == [True, True, False]
    assert model[0].weight.grad is gradient


def test_casts_of_autocast_are_dropped_where_they_are_kept():
    linear = nn.Linear(2, 2)

    def casts() -> int:
        with torch.profiler.profile() as profile:
            linear(torch.ones(1, 2))
        return sum(event.name == "aten::to" for event in profile.events())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, cached = casts(), casts()
        with undisturbed.trial(linear, (), CPU):
            assert casts() == cached
        assert casts() == first
    assert cached < first


def test_a_forward_that_fails_leaves_buffers_as_they_were():
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen.add_(1)
            raise ValueError("no")

    model = Failing()
    assert not run_once(model, (torch.ones(2),), {})
    assert model.seen.tolist() == [0, 0]


def test_cycles_are_collected_after_a_capture_only(monkeypatch):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    seen = []

    def lowered(*args, **kwargs):
        seen.append(gc.isenabled())
        return lower(*args, **kwargs)

    def call(module, x):
        return module.forward(x)

    monkeypatch.setattr(capture, "lower", lowered)
    capture.Capture(capture.fresh(call)).reach(model, x)
    torch._dynamo.reset()
    assert seen == [False]
    assert gc.isenabled()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_pause_collects_what_was_made_in_it(is_frozen, monkeypatch):
    gc.unfreeze()  # conftest.py freezes what was imported.
    monkeypatch.setattr(CollectorPause, "finds_frozen", False)
    gc.collect()
    frozen = weakref.ref(Cycle())
    if is_frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        old = weakref.ref(Cycle())
        with CollectorPause(collects=True):
            new = weakref.ref(Cycle())
            with CollectorPause(collects=True):
                newer = weakref.ref(Cycle())
            assert newer() is not None
        assert new() is None
        assert newer() is None
        assert is_frozen or old() is not None
        gc.collect()
        assert old() is None
        # What the caller had frozen stays so, and nothing is frozen besides.
        assert (frozen() is not None) == is_frozen
        assert gc.get_freeze_count() <= before
    finally:
        gc.freeze()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_put_back(is_enabled):
    def failing():
        with CollectorPause():
            assert not gc.isenabled()
            raise ZeroDivisionError

    try:
        if not is_enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError):
            failing()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
