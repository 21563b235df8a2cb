"""Models that the dynamic engine holds with a second tier only, and a tier that counts areas."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rotor

ROWS, WIDTH = 512, 128
VALUE_BYTES = ROWS * WIDTH * 4
_library = torch.library.Library("rotor_tier_tests", "DEF")
_library.define("noise(Tensor x) -> Tensor")
generator = torch.Generator()


def _noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=generator, device="cpu").to(x.device)


_library.impl("noise", _noise, "CompositeExplicitAutograd")


class Noise(torch.autograd.Function):
    """Multiplication by numbers that only the operator knows: its result cannot be recomputed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.rotor_tier_tests.noise(x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (found,) = ctx.saved_tensors
        return gradient * found


class Noisy(nn.Module):
    """Layers whose results stay in memory without a tier; their number depends on values."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: len(self.layers) - int(x[0, 0] > 100)]:
            x = Noise.apply(torch.tanh(layer(x)))
        return x


class Recurrent(nn.Module):
    """A recurrent cell with dropout, step by step, and in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 64)
        self.out = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], 64)
        c = h.clone()
        total = h.clone()
        for row in x:
            h, c = self.cell(row, (h, c))
            h = nn.functional.dropout(h, 0.2)
            total += h.tanh()
        return self.out(total)


class Counting(rotor.DiskTier):
    """Disk whose areas are counted; a transfer of a kind may fail, or be interrupted."""

    least_bytes = 1

    def __init__(self, directory: Any) -> None:
        super().__init__(directory)
        self.areas = 0
        self.most_bytes = 0
        self.held_bytes = 0
        self.moves = 0
        self.failing: Callable[[int], BaseException | None] = lambda move: None

    def allocate(self, nbytes: int) -> Any:
        area = super().allocate(nbytes)
        self.areas += 1
        self.held_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return area

    def release(self, area: Any) -> None:
        self.areas -= 1
        self.held_bytes -= area.end - area.begin
        super().release(area)

    def wait(self, ticket: Any) -> None:
        super().wait(ticket)
        self.moves += 1
        error = self.failing(self.moves)
        if error is not None:
            raise error


def failing_from(move: int, error: type[BaseException] = OSError) -> Any:
    """Return what makes the transfers from a number on fail."""
    return lambda moved: error(errno.EIO, "the disk is broken") if moved >= move else None


def trained(
    model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor, steps: int = 3
) -> list[torch.Tensor]:
    """Return losses, gradients and random states of some steps."""
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        generator.manual_seed(k)
        model.zero_grad(set_to_none=True)
        loss = call(x).square().mean()
        loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        found += [b.clone() for b in model.buffers()] + [torch.get_rng_state()]
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether all tensors are equal bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True)
    )


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return two models with the same parameters."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def dynamic(model: nn.Module, limit: int | str, **settings: Any) -> rotor.Checkpointable:
    """Return a model that the dynamic engine runs."""
    settings = {"engine": "dynamic", "verify": "off", "verbosity": 0, **settings}
    return rotor.Checkpointable(model, mem_limit=limit, **settings)
