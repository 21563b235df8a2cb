"""A captured model takes the branches that the plain model takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Asking, Row

import rotor


def from_module(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling()


ASKED: dict[str, Callable[[torch.Tensor], bool]] = {
    "torch.compiler": from_module,
    "dynamo": lambda x: torch.compiler.is_dynamo_compiling(),
    "both": lambda x: torch.jit.is_tracing() or torch.compiler.is_compiling(),
    "torch._dynamo": lambda x: torch._dynamo.is_compiling(),
}


class Choosing(nn.Module):
    """Model whose layers differ where it is compiled; breaks its graph too, if asked for."""

    def __init__(self, asked: Callable[[torch.Tensor], bool], *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.asked, self.breaks = asked, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) if self.asked(x) else torch.tanh(layer(x))
        if self.breaks and x.sum() > 1e9:
            return x * 2
        return x


def results(make: Callable[[], nn.Module], engine: str | None, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    net = make()
    limit: dict[str, Any] = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    x, seen = torch.randn(32, 16), []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        seen += [
            loss.item(),
            *[p.grad.sum().item() for p in net.parameters() if p.grad is not None],
        ]
    return seen


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_code_that_asks_is_not_told_that_it_is_compiled(asked: str, engine: str) -> None:
    def make() -> nn.Module:
        return Choosing(ASKED[asked])

    assert results(make, engine) == results(make, None)


def test_parts_take_the_plain_branch() -> None:
    def make() -> nn.Module:
        return Choosing(from_module, breaks=True)

    with pytest.warns(rotor.MemoryLimitWarning, match="no single graph"):
        limited = results(make, "auto")
    assert limited == results(make, None)


class Masked(nn.Module):
    """Model that looks at its mask, but not where it is compiled."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x)
        if not torch.compiler.is_compiling() and bool((mask == 1).all()):
            return self.body(x)
        return self.body(x) * mask * self.factor


def test_the_branch_for_compiled_code_is_taken_where_it_gives_the_same_bits() -> None:
    assert results(lambda: Masked(1.0), "graph") == results(lambda: Masked(1.0), None)


def test_the_branch_for_compiled_code_is_not_taken_where_it_gives_others() -> None:
    with pytest.raises(rotor.CaptureError, match="all"):
        results(lambda: Masked(2.0), "graph")
    with pytest.warns(rotor.MemoryLimitWarning):
        limited = results(lambda: Masked(2.0), "auto")
    assert limited == results(lambda: Masked(2.0), None)


class Kept(nn.Module):
    """Model that asks in two functions, of which one cannot be captured as it runs plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    def _look(self, x: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and bool((x == 1).all()):
            raise ValueError("ones")

    def _factor(self) -> float:
        return 3.0 if torch.compiler.is_compiling() else 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._look(x)
        return self.body(x) * self._factor()


def test_only_code_that_cannot_be_captured_is_told_that_it_is_compiled() -> None:
    assert results(Kept, "graph") == results(Kept, None)


def test_a_capture_that_was_tried_again_keeps_no_output() -> None:
    model = rotor.Checkpointable(Kept(), mem_limit="1 MB", engine="graph", planning="before")
    output = model(torch.randn(4, 16))
    alive = weakref.ref(output)
    del output
    assert alive() is None


class Packed(nn.Module):
    """Model that branches on positions, and on numbers that are drawn."""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.rand(4) if self.draws else torch.arange(x.shape[0])
        steps = torch.diff(positions, prepend=positions[:1] - 1)
        if not (steps != 1).any():
            return self.body(x)
        return self.body(-x)


def test_branches_on_values_that_depend_on_no_input_are_captured() -> None:
    assert results(Packed, "graph") == results(Packed, None)


def test_branches_on_values_that_are_drawn_are_not_captured() -> None:
    with pytest.raises(rotor.CaptureError, match="data-dependent"):
        results(lambda: Packed(draws=True), "graph")


class Scaled(nn.Module):
    """Layer that reads the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient = self.inner.weight.grad
        y = x + torch.tanh(self.inner(x))
        return y if gradient is None else y * (1 + gradient.abs().sum().clamp(max=1))


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_a_forward_reads_the_gradients_that_exist(engine: str) -> None:
    def make() -> nn.Module:
        return Row(*(Scaled() for _ in range(5)))

    assert results(make, engine, steps=4) == results(make, None, steps=4)


def test_parts_read_the_gradients_that_exist() -> None:
    def make() -> nn.Module:
        return Asking(*(Scaled() for _ in range(5)))

    with pytest.warns(rotor.MemoryLimitWarning, match="no single graph"):
        limited = results(make, "auto", steps=4)
    assert limited == results(make, None, steps=4)


def test_the_answers_of_pytorch_are_back_after_a_capture() -> None:
    results(lambda: Choosing(from_module), "graph")
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    assert compiled(torch.zeros(())).item() == 1.0
