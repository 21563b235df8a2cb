"""The path of operators in C beside the one in plain Python: the same decisions, the same bits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dynamic_cases import CASES, Plain, results, same, step
from oracles.dtr_operators import in_python

from rotor import dtr
from rotor.dtr import recall, signatures

pytestmark = pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")


class Events:
    """Everything that an observer hears, but for times."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def operation(self, name: str, cost_ns: int, *details: Any) -> None:
        self.heard.append((name, *details))

    def constant(self, node: int, nbytes: int) -> None:
        self.heard.append(("constant", node, nbytes))

    def released(self, node: int) -> None:
        self.heard.append(("released", node))

    def pinned(self, node: int) -> None:
        self.heard.append(("pinned", node))

    def evicted(self, node: int) -> None:
        self.heard.append(("evicted", node))


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator takes 1,000 ns: decisions do not depend on the machine."""
    monkeypatch.setattr(recall, "CLOCK", itertools.count(0, 1000).__next__)


def ran(run: Callable[[], Any], limit: int | None, is_python: bool, **settings: Any) -> Any:
    """What a program gives under a budget, what is heard of it, and the session's figures."""
    events = Events()
    with (
        in_python(is_python),
        dtr.budget(limit, record_log=events, strict=False, **settings) as session,
    ):
        found = run()
        stats = session.stats
        heard = list(events.heard)
    figures = (stats.peak_bytes, stats.operations, stats.evictions, stats.rematerializations)
    return found, heard, (*figures, stats.overflows, stats.base_ns, stats.remat_ns)


@pytest.mark.parametrize("settings", [{}, {"storage_swap": False}, {"heuristic": "DTREqClass"}])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_as_in_python(name: str, settings: dict[str, Any], ticks: None):
    plain = Plain(CASES[name])
    limit = int(plain.peak_bytes * 0.6)

    def run() -> list[torch.Tensor]:
        model = copy.deepcopy(plain.model)
        return results(model, step(model, plain.loss))

    ran(run, None, True, **settings)
    expected, heard, figures = ran(run, limit, True, **settings)
    found, also_heard, also = ran(run, limit, False, **settings)
    assert same(found, expected)
    assert figures == also
    assert heard == also_heard
    assert figures[2] > 0


def odd_operators() -> list[torch.Tensor]:
    """Operators of every treatment, values held and read again in the end."""
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 4_000).view(40, 100)
    norm = torch.nn.BatchNorm1d(100)
    held = []
    for k in range(8):
        y = norm(x * k)
        held += [y, torch.nn.functional.dropout(y, 0.5), y[y > 0.1 * k], (y > 0).nonzero()]
        z = torch.empty(4_000)
        z[:2_000] = y.flatten()[:2_000]
        z[2_000:].copy_(x.flatten()[2_000:])
        held += [z, torch.cat([x, y]).mul_(2), torch.fft.rfft(y).conj().imag, y.sort()[0]]
        held.append(torch.unique(y.round(decimals=1)))
        with torch.no_grad():
            x = x.clone()
            x.add_(1 / (k + 1))
        late = torch.zeros(0)
        late.resize_(1_000 + k).fill_(k)
        held.append(late)
        held.append(torch.add(x, 1, out=torch.empty(0)))
    return [*(v.detach().clone() for v in held), *(v.detach().clone() for v in reversed(held))]


@pytest.mark.parametrize("swap", [None, False])
@pytest.mark.parametrize("is_known", [False, True])
def test_odd_operators_are_as_in_python(swap: bool | None, is_known: bool, ticks: None):
    """Operators that run for the first time too: what they take is measured then."""
    expected = odd_operators()
    limit = 700_000
    made = []
    for is_python in (True, False):
        signatures.known_needs(torch.device("cpu")).clear()
        if is_known:
            ran(odd_operators, None, is_python)
        made.append(ran(odd_operators, limit, is_python, storage_swap=swap))
    (first, heard, figures), (second, also_heard, also) = made
    assert same(first, expected)
    assert same(second, expected)
    assert figures == also
    assert heard == also_heard
    assert figures[2] > 0
    assert figures[3] > 0
