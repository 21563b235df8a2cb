"""Parameters whose content is swapped: no engine refers weakly to them after a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors
from zoo.models import Row

import rotor


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.breaks = nn.Linear(16, 16), nn.BatchNorm1d(16), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks and x.sum() > 1e9:
            return x
        return torch.tanh(self.norm(self.layer(x)))


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def swapped(model: nn.Module) -> None:
    for parameter in model.parameters():
        swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


CHANGES: dict[str, Callable[[Any], object]] = {
    "swapped": swapped,
    "loaded": loaded,
    "double": lambda model: model.double(),
    "converted": lambda model: model.to(torch.bfloat16),
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "chain":
        return nn.Sequential(*[Block() for _ in range(2)])
    last = [Block(breaks=True)] if kind == "parts" else []
    return Row(*[Block() for _ in range(2)], *last)


def trained(model: nn.Module, called: Any, change: Callable[[Any], object]) -> list[torch.Tensor]:
    seen = []
    for step in range(5):
        model.zero_grad(set_to_none=True)
        if step in (2, 4):
            change(called)
        x = torch.ones(8, 16, dtype=next(model.parameters()).dtype).cumsum(0)
        called(x).square().mean().backward()
        seen += [parameter.grad for parameter in model.parameters()]
    return seen


KINDS = [("whole", "graph"), ("whole", "auto"), ("whole", "dynamic"), ("chain", "chain")]


@pytest.mark.usefixtures("swapping")
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("kind", "engine"), [*KINDS, ("parts", "auto")])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_swap_is_that_of_the_new_parameters(kind, engine, change):
    plain, model = model_of(kind), model_of(kind)
    limited = rotor.Checkpointable(model, mem_limit="4 MB", engine=engine, verbosity=-1)
    expected = trained(plain, plain, CHANGES[change])
    assert all(map(torch.equal, expected, trained(model, limited, CHANGES[change])))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("kind", "engine"), [*KINDS, ("parts", "auto")])
def test_no_weak_references_stay(kind, engine):
    model = model_of(kind)
    limited = rotor.Checkpointable(model, mem_limit="4 MB", engine=engine, verbosity=-1)
    for count in (8, 8, 6, 5):
        limited(torch.ones(count, 16).cumsum(0)).square().mean().backward()
    limited.wait_for_planning()
    assert not any(map(weakref.getweakrefs, [*model.parameters(), *model.buffers()]))
