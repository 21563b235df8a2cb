"""A limit under which one step has run refuses no later step of its kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Alone, Row, Skip

import rotor
from rotor import memory


def chain() -> nn.Module:
    blocks = [(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*(module for block in blocks for module in block))


class Residual(Row):
    def __init__(self) -> None:
        super().__init__(*(Skip(*chain()[:3]) for _ in range(3)))


class Branching(Residual):
    """Model that no single graph holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + 1 if len(x.tolist()) < 0 else super().forward(x)


class Queue(Residual):
    """Model with a queue of earlier results, to which every forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(32, 512))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        scores = y @ self.queue.clone()
        place = int(self.place)
        self.queue[:, place : place + len(y)] = y.detach().T
        self.place[0] = (place + len(y)) % 512
        return scores


def large(y: torch.Tensor) -> torch.Tensor:
    return (y.repeat(8, 1).double() * 2).exp().log1p().square().mean()


def losses(model: Any, steps: int, *, set_to_none: bool) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        loss = large(model(torch.randn(64, 32)))
        loss.backward()
        model.zero_grad(set_to_none=set_to_none)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("part", [0.8, 0.5])
@pytest.mark.parametrize(
    ("build", "engine"),
    [(chain, "chain"), (chain, "auto"), (Residual, "graph"), (Branching, "auto"), (Queue, "auto")],
)
def test_no_later_step_is_refused_for_its_loss(
    build: Callable[[], nn.Module], engine: str, part: float, set_to_none: bool
) -> None:
    torch.manual_seed(0)
    plain = build()
    with memory.meter("cpu") as meter:
        losses(copy.deepcopy(plain), 1, set_to_none=True)
    limit = int(part * meter.peak_bytes)
    limited = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, engine=engine)
    expected = losses(plain, 5, set_to_none=set_to_none)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert losses(limited, 5, set_to_none=set_to_none) == expected
    told = [str(w.message) for w in caught if rotor.units.exact_bytes(limit) in str(w.message)]
    assert any("needed" in text for text in told)
    assert len(told) <= 4


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_other_steps_than_the_accepted_one_are_refused_in_their_first() -> None:
    torch.manual_seed(0)
    model = rotor.Checkpointable(Alone(), mem_limit="100KiB")
    losses(model, 3, set_to_none=True)
    assert model.plan.engine == "dynamic"
    with pytest.raises(rotor.InfeasibleError, match="does not fit"):
        model(torch.randn(640, 32))


@pytest.mark.parametrize(
    ("make", "engine"),
    [(chain, "chain"), (chain, "auto"), (Residual, "graph"), (Residual, "dynamic")],
)
def test_a_limit_above_the_memory_of_the_machine_is_warned_of(make, engine):
    model = rotor.Checkpointable(make(), mem_limit="900TiB", engine=engine, verbosity=0)
    with pytest.warns(rotor.MemoryLimitWarning, match=r"900 TiB .*, and cpu has less for it: "):
        model(torch.randn(4, 32)).sum().backward()
    model(torch.randn(4, 32)).sum().backward()


class Asking(Residual):
    """Model in parts: code between its blocks reads values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            x = x * 2 if x.sum().item() > 1e30 else x
        return x


def outcome(build: Callable[[], nn.Module], engine: str, limit: int) -> tuple[int, list[str]]:
    """The named minimum, or 0 after steps within the limit; and what was told of it."""
    torch.manual_seed(0)
    model = rotor.Checkpointable(build(), mem_limit=limit, engine=engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            try:
                model(torch.randn(64, 32)).square().mean().backward()
            except rotor.InfeasibleError as error:
                return error.minimum_bytes, []
            assert model.plan.measured_bytes is None or model.plan.measured_bytes <= limit
            model.zero_grad()
    return 0, [str(w.message) for w in caught if "was not kept" in str(w.message)]


@pytest.mark.parametrize(
    ("build", "engine"),
    [(chain, "chain"), (chain, "auto"), (Residual, "graph"), (Residual, "auto"), (Asking, "auto")],
)
def test_the_least_limit_of_an_error_is_accepted_and_kept(build, engine):
    least, _ = outcome(build, engine, 1)
    assert least > 1
    assert outcome(build, engine, least) == (0, [])
    # Below it parts run with a warning, and a chain whose output is dropped before the backward.
    if (build, engine) not in ((Asking, "auto"), (chain, "chain")):
        assert outcome(build, engine, least - 1) == (least, [])
