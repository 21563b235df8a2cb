"""What a settled step reads: states once, and the functions of classes only after a change."""

import gc
import os
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from zoo.models import Row

import rotor
from rotor import _core
from rotor.common import model_state
from rotor.common import modes as generators
from rotor.meter import watch
from rotor.wrapper import metering


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def _settled(engine: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = (nn.Sequential if engine == "chain" else Row)(*[_Block() for _ in range(3)])
    limited = rotor.Checkpointable(model, mem_limit="8MiB", engine=engine, verbosity=-1)
    for _ in range(6):
        _step(limited)
    return model, limited


def _step(limited: nn.Module) -> None:
    limited.zero_grad()
    limited(torch.ones(4, 8)).square().mean().backward()


def _counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: Counter) -> None:
    function = getattr(owner, name)

    def counting(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)


def test_a_class_has_another_version_after_a_change_of_it_or_of_its_bases():
    class Base:
        def run(self) -> int:
            return 1

    class Derived(Base):
        pass

    assert Derived().run() == 1
    before = _core.versions((Base, Derived))
    assert before == _core.versions((Base, Derived))
    Base.run = lambda self: 2
    assert _core.versions((Derived,)) is None
    assert Derived().run() == 2
    after = _core.versions((Base, Derived))
    assert after is not None
    assert not set(before) & set(after)
    Derived.note = None
    assert _core.versions((Base, Derived)) != after


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="dictionaries have no versions any more")
def test_a_dictionary_has_another_version_after_a_change_of_it():
    entries = {"one": 1, "other": 2}
    before = _core.versions((entries,))
    assert entries["one"] == 1
    assert before == _core.versions((entries,)) is not None
    entries["one"] = 3
    changed = _core.versions((entries,))
    assert changed != before
    del entries["other"]
    assert _core.versions((entries,)) != changed


@pytest.mark.parametrize("wrong", [[int], int, (int, 1), (None,)])
def test_only_a_tuple_of_classes_or_dictionaries_has_versions(wrong):
    with pytest.raises(TypeError, match="must be a tuple of classes or dictionaries"):
        _core.versions(wrong)


@pytest.mark.parametrize(("engine", "times"), [("chain", 0), ("graph", 1)])
def test_a_settled_step_reads_the_random_state_once_at_most(engine, times, monkeypatch):
    _, limited = _settled(engine)
    calls = Counter()
    for name in ("kept", "read"):
        _counted(monkeypatch, generators.RngTracker, name, calls)
    for _ in range(3):
        _step(limited)
    assert calls == Counter(kept=3 * times)


@pytest.mark.parametrize(("engine", "most"), [("chain", 165), ("graph", 250)])
def test_a_settled_step_calls_few_functions(engine, most):
    _, limited = _settled(engine)
    home, calls = os.path.dirname(rotor.__file__), Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            calls[frame.f_code.co_qualname] += 1

    gc.collect()  # Garbage of earlier tests may call functions when it is freed.
    sys.setprofile(note)
    try:
        _step(limited)
    finally:
        sys.setprofile(None)
    assert calls.total() <= most, calls.most_common(20)
    # The bytes in use, on the heap of the C library, are slow to count.
    assert not calls["level"]


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_functions_of_classes_are_compared_after_a_change_only(engine, monkeypatch):
    model, limited = _settled(engine)
    calls = Counter()
    _counted(monkeypatch, model_state.ModelState, "_called_functions", calls)
    plan = limited.plan
    _step(limited)
    assert not calls
    monkeypatch.setattr(_Block, "note", 1, raising=False)
    _step(limited)
    _step(limited)
    assert 1 <= calls["_called_functions"] <= 2
    calls.clear()
    _step(limited)
    assert not calls
    assert limited.plan is plan
    monkeypatch.setattr(_Block, "forward", lambda self, x: x + torch.sin(self.layer(x)))
    _step(limited)
    got = [parameter.grad.clone() for parameter in model.parameters()]
    _step(model)
    assert all(map(torch.equal, got, [parameter.grad for parameter in model.parameters()]))


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_existing_gradients_alone_are_looked_at_by_what_watches_a_step(engine, monkeypatch):
    model, limited = _settled(engine)
    seen = []

    def is_due(plan, parameters=()):
        seen.append(len(list(parameters)))
        return watch.is_due(plan, parameters)

    monkeypatch.setattr(metering, "is_due", is_due)
    _step(limited)
    for _ in range(4):
        limited(torch.ones(4, 8)).square().mean().backward()
    count = len(list(model.parameters()))
    assert seen[0] == 0
    assert set(seen[1:]) == {count}
