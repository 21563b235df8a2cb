"""Saved-tensor hooks around the call of a limited model: every engine gives plain gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import rotor


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = x
        for k, block in enumerate(self.blocks):
            if self.breaks:
                torch._dynamo.graph_break()
            x = x + block(x)
            middle = x if k == 1 else middle
        return x, middle


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy().copy()


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "save_on_cpu": lambda: save_on_cpu(pin_memory=True),
    "clone": lambda: saved_tensors_hooks(torch.clone, lambda tensor: tensor),
    "numpy": lambda: saved_tensors_hooks(_as_array, torch.from_numpy),
    "tuple": lambda: saved_tensors_hooks(lambda t: ("packed", t.clone()), lambda pair: pair[1]),
}


def _gradients(
    around: Callable[[], AbstractContextManager[object]], model: nn.Module, **limits: Any
) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    run = rotor.Checkpointable(model, verbosity=0, **limits) if limits else model
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with around():
            last, _ = run(torch.randn(64, 32))
        last.square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_gradients_are_plain_within_hooks(
    around: Callable[[], AbstractContextManager[object]], engine: str
) -> None:
    plain = _gradients(around, Net())
    limited = _gradients(around, Net(), mem_limit="20 MB", engine=engine)
    assert all(map(torch.equal, plain, limited))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_parts_run_within_hooks() -> None:
    around = AROUND["clone"]
    plain = _gradients(around, Net(breaks=True))
    limited = _gradients(around, Net(breaks=True), mem_limit="20 MB", engine="auto")
    assert all(map(torch.equal, plain, limited))


@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_sequential_runs_within_hooks(engine: str) -> None:
    def gradients(**limits: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
        run = rotor.Checkpointable(model, verbosity=0, **limits) if limits else model
        with AROUND["tuple"]():
            loss = run(torch.randn(64, 32)).square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(), gradients(mem_limit="1 MB", engine=engine)))


def test_hooks_see_weights_and_nothing_of_the_engines() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    around = lambda: saved_tensors_hooks(pack, lambda tensor: tensor)  # noqa: E731
    _gradients(around, Net(), mem_limit="20 MB", engine="graph")
    assert seen
    assert (0,) not in seen
