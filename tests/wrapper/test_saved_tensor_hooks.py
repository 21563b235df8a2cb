"""Saved-tensor hooks around the call of a limited model: every engine gives plain gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from training import check_equal, trained


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)
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


def _loss_of(around: Callable[[], AbstractContextManager[object]]) -> Callable[..., torch.Tensor]:
    def loss_of(model: Any, _: int) -> torch.Tensor:
        with around():
            last, _ = model(torch.randn(64, 32))
        return last.square().mean()

    return loss_of


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_gradients_are_plain_within_hooks(
    around: Callable[[], AbstractContextManager[object]], engine: str
) -> None:
    check_equal(Net, _loss_of(around), mem_limit="20 MB", engine=engine)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_parts_run_within_hooks() -> None:
    loss_of = _loss_of(AROUND["clone"])
    check_equal(lambda: Net(breaks=True), loss_of, mem_limit="20 MB", engine="auto")


@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_sequential_runs_within_hooks(engine: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])

    def loss_of(model: Any, _: int) -> torch.Tensor:
        with AROUND["tuple"]():
            return model(torch.randn(64, 32)).square().mean()

    check_equal(make, loss_of, 1, mem_limit="1 MB", engine=engine)


class Packed:
    """A saved tensor, as hooks pack it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


PACKED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "itself": (lambda t: t, lambda t: t),
    "list": (lambda t: [(t,)], lambda kept: kept[0][0]),
    "object": (Packed, lambda kept: kept.tensor),
    "function": (lambda t: lambda: t, lambda kept: kept()),
}


@pytest.mark.parametrize("hooks", PACKED.values(), ids=PACKED)
def test_what_hooks_alone_hold_is_evicted(hooks: tuple[Any, Any]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(64, 64), nn.GELU())])

    def loss_of(model: Any, _: int) -> torch.Tensor:
        with saved_tensors_hooks(*hooks):
            return model(torch.randn(256, 64)).square().mean()

    # Without a limit it takes twice as much.
    model = check_equal(make, loss_of, mem_limit="920 kB", engine="dynamic")
    assert model.plan.last.stats.evictions > 0


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("is_weak", [False, True])
def test_what_hooks_put_elsewhere_too_is_there_after_the_forward(is_weak: bool) -> None:
    def loss_of(model: Any, _: int) -> Any:
        kept: Any = weakref.WeakSet() if is_weak else set()

        def pack(tensor: torch.Tensor) -> Packed:
            packed = Packed(tensor)
            kept.add(packed)
            return packed

        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            last, _ = model(torch.randn(64, 32))
        tensors = [packed.tensor for packed in kept]
        known = [t for t in tensors if not t.requires_grad or not t.is_leaf]
        read = sorted(float(t.detach().numpy().sum()) for t in known)
        return last.square().mean(), torch.tensor(read)

    check_equal(Net, loss_of, mem_limit="300 kB", engine="dynamic")


def test_hooks_see_weights_and_nothing_of_the_engines() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    around = lambda: saved_tensors_hooks(pack, lambda tensor: tensor)  # noqa: E731
    trained(Net, _loss_of(around), 2, mem_limit="20 MB", engine="graph")
    assert seen
    assert (0,) not in seen
