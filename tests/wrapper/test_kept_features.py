"""Activations that hooks, attributes and queues keep: counted once in the limit of a chain."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rotor
from rotor import memory
from rotor.units import exact_bytes

WIDTH, STAGES = 16, 6


class Queued(nn.Module):
    """Stage with a queue of its latest outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.latest = nn.Linear(WIDTH, WIDTH), queue.Queue(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        if self.latest.full():
            self.latest.get()
        self.latest.put(x.detach())
        return x


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(STAGES)
    ]


def in_a_dictionary(*, copies: bool = False) -> nn.Module:
    model, kept = nn.Sequential(*stages()), {}

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kept[module] = output.detach().clone() if copies else output.detach()

    for stage in model:
        stage.register_forward_hook(hook)
    return model


def in_a_dictionary_of_copies() -> nn.Module:
    return in_a_dictionary(copies=True)


def in_a_list() -> nn.Module:
    model, kept = nn.Sequential(*stages()), []

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if module is model[0]:
            kept.clear()
        kept.append(output.detach())

    for stage in model:
        stage.register_forward_hook(hook)
    return model


def in_the_model() -> nn.Module:
    model = nn.Sequential(*stages())
    model.kept = {}
    for number, stage in enumerate(model):

        def hook(
            module: nn.Module, inputs: Any, output: torch.Tensor, number: int = number
        ) -> None:
            model.kept[number] = output.detach()

        stage.register_forward_hook(hook)
    return model


def in_stages() -> nn.Module:
    def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
        module.given, module.made = inputs[0].detach(), output.detach()

    model = nn.Sequential(*stages())
    for stage in model:
        stage.register_forward_hook(hook)
    return model


def in_queues() -> nn.Module:
    first, *others = stages()
    return nn.Sequential(first, Queued(), *others, Queued())


KINDS = [in_a_dictionary, in_a_dictionary_of_copies, in_a_list, in_the_model, in_stages, in_queues]


def step(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def peak_of(make: Callable[[], nn.Module]) -> int:
    model = make()
    with memory.meter("cpu") as meter:
        step(model)
    return meter.peak_bytes


def least_of(make: Callable[[], nn.Module], engine: str) -> int:
    with pytest.raises(rotor.InfeasibleError) as caught:
        step(rotor.Checkpointable(make(), mem_limit=1000, engine=engine))
    return caught.value.minimum_bytes


def trains(model: Any, make: Callable[[], nn.Module], steps: int = 4) -> list[str]:
    """Compare some steps with plain ones; return the warnings."""
    plain = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            assert all(map(torch.equal, step(model), step(plain)))
    assert 0 < model.plan.measured_bytes <= model.mem_limit
    return [str(w.message) for w in caught if w.category is rotor.MemoryLimitWarning]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_is_kept_counts_once(make: Callable[[], nn.Module]) -> None:
    least = least_of(make, "chain")
    assert least <= 0.6 * peak_of(make)
    model = rotor.Checkpointable(make(), mem_limit=least, engine="chain")
    assert trains(model, make) == []
    assert model.plan.schedule.recomputed


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_below_the_needs_of_a_chain_steps_are_the_dynamic_engines(
    make: Callable[[], nn.Module],
) -> None:
    least = least_of(make, "chain")
    model = rotor.Checkpointable(make(), mem_limit=int(0.9 * least))
    (text,) = trains(model, make)
    assert model.plan.engine == "dynamic"
    assert model.plan.why["chain"].startswith("no schedule fits in a limit of")
    assert exact_bytes(least) in text
    # Another limit is another question.
    model.mem_limit = 2 * least
    assert trains(model, make) == []
    assert model.plan.engine == "chain"


def test_below_the_needs_of_both_the_error_has_the_smaller_one() -> None:
    least = least_of(in_a_dictionary, "auto")
    assert least <= least_of(in_a_dictionary, "chain")
    model = rotor.Checkpointable(in_a_dictionary(), mem_limit=least)
    assert trains(model, in_a_dictionary) == []
