"""The programs of the dynamic runtime's tables, and how their steps are timed and metered."""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import read_clock
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import dynamic_cases as small
from dynamic_cases import Case, Loss, Plain, results, same, step
from rotor.models import gan, recurrent, unet

from rotor import dtr, memory
from rotor.errors import BudgetError

__all__ = [
    "PROGRAMS",
    "Contender",
    "Plain",
    "Program",
    "budget",
    "medians",
    "metered",
    "parse_names",
    "results",
    "same",
    "step",
    "timed",
]

Made = tuple[nn.Module, Loss]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """`torch.utils.checkpoint` on parts of a model; `wrap` changes a copy."""

    label: str
    wrap: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Program:
    """One program of the tables.

    Attributes
    ----------
    name, size
        What it is, and how large.
    make
        Gives a fresh model and what computes its loss.
    tiny
        The same, small enough to try the tables out.
    large, large_size
        The same, large enough for a GPU.
    contenders
        How one would checkpoint it by hand; none where it has no blocks.
    """

    name: str
    size: str
    make: Callable[[], Made]
    tiny: Callable[[], Made]
    large: Callable[[], Made]
    large_size: str
    contenders: tuple[Contender, ...] = field(default=())

    def plain(self, is_tiny: bool, device: torch.device = _CPU) -> Plain:
        """What a plain step leaves, and its peak."""
        make = self.make if device.type == "cpu" else self.large
        return Plain(Case(self.name, self.tiny if is_tiny else make), device)

    def size_on(self, is_tiny: bool, device: torch.device = _CPU) -> str:
        """How large it is there."""
        usual = self.size if device.type == "cpu" else self.large_size
        return "tiny" if is_tiny else usual


def _checkpointed(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.forward = partial(  # type: ignore[method-assign]
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=True
        )


def _blocks(find: Callable[[nn.Module], Sequence[nn.Module]]) -> tuple[Contender, ...]:
    return (
        Contender("every block", lambda model: _checkpointed(find(model))),
        Contender("every other block", lambda model: _checkpointed(find(model)[::2])),
    )


def _resnet_blocks(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, small.BasicBlock)]


def _gpt_blocks(model: Any) -> list[nn.Module]:
    return list(model.layers)


def _lstm(steps: int, batch: int, width: int) -> Made:
    x, target = torch.randn(steps, batch, width), torch.randint(0, 10, (batch,))
    return recurrent.LSTM(width, width), lambda m: F.cross_entropy(m(x), target)


def _in_chunks(model: Any, length: int) -> None:
    """Have the loop over time checkpointed, so many steps at once."""

    def chunk(parts: Sequence[torch.Tensor], hidden: Any, cell: Any) -> Any:
        for x in parts:
            hidden, cell = model.step(x, hidden, cell)
        return hidden, cell

    def forward(inputs: torch.Tensor) -> Any:
        hidden = cell = inputs.new_zeros(inputs.shape[1], model.mem_dim)
        for part in inputs.split(length):
            hidden, cell = checkpoint(
                chunk, part.unbind(0), hidden, cell, use_reentrant=False, preserve_rng_state=True
            )
        return model.classify(hidden)

    model.forward = forward


def _nn_lstm(steps: int, batch: int, width: int, dropout: float = 0.2) -> Made:
    x = torch.randn(steps, batch, width)
    model = nn.LSTM(width, width, num_layers=6, dropout=dropout)
    return model, lambda m: m(x)[0].square().mean()


def _unet(batch: int, size: int, width: int) -> Made:
    x, target = torch.randn(batch, 3, size, size), torch.rand(batch, 1, size, size)
    model = unet.UNet(width=width)
    return model, lambda m: F.binary_cross_entropy_with_logits(m(x), target)


def _unet_blocks(model: Any) -> list[nn.Module]:
    return [model.first, *model.down, *model.up]


def _gan(batch: int, width: int, unrolled_steps: int) -> Made:
    model = nn.ModuleList([gan.Generator(32, width), gan.Discriminator(width)])
    noise = torch.randn(batch, 32)
    with _CPU:
        real = gan.ring_of_gaussians(batch, torch.Generator().manual_seed(0))
    real = real.to(noise.device)

    def loss(m: Any) -> torch.Tensor:
        losses = gan.unrolled_losses(m[0], m[1], real, noise, unrolled_steps, 0.01)
        return losses.generator + losses.discriminator

    return model, loss


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "resnet",
            "6 residual blocks of 16 and 32 channels, batch 16, 64 x 64",
            lambda: small.resnet(batch=16, size=64),
            lambda: small.resnet(),
            lambda: small.resnet(batch=128, size=128),
            "6 residual blocks of 16 and 32 channels, batch 128, 128 x 128",
            _blocks(_resnet_blocks),
        ),
        Program(
            "gpt",
            "4 blocks of width 256 with dropout, 2 x 256 tokens",
            lambda: small.gpt(batch=2, length=256, width=256),
            lambda: small.gpt(),
            lambda: small.gpt(batch=8, length=1024, width=1024),
            "4 blocks of width 1024 with dropout, 8 x 1024 tokens",
            _blocks(_gpt_blocks),
        ),
        Program(
            "lstm-100",
            "100 steps written out, width 256, batch 64",
            lambda: _lstm(100, 64, 256),
            lambda: _lstm(20, 8, 16),
            lambda: _lstm(100, 1024, 1024),
            "100 steps written out, width 1024, batch 1024",
            (
                Contender("10 steps at once", lambda model: _in_chunks(model, 10)),
                Contender("2 steps at once", lambda model: _in_chunks(model, 2)),
            ),
        ),
        Program(
            "nn.LSTM",
            "6 layers of width 128 with dropout, 50 steps, batch 32",
            lambda: _nn_lstm(50, 32, 128),
            lambda: _nn_lstm(10, 4, 32),
            # cuDNN seeds dropout once in a process: not even plain steps would be equal.
            lambda: _nn_lstm(100, 256, 512, dropout=0.0),
            "6 layers of width 512 without dropout, 100 steps, batch 256",
        ),
        Program(
            "treelstm-64",
            "a random tree of 64 nodes, width 256, batch 64",
            lambda: small.treelstm(64, 64, 256),
            lambda: small.treelstm(20),
            lambda: small.treelstm(64, 1024, 1024),
            "a random tree of 64 nodes, width 1024, batch 1024",
        ),
        Program(
            "unet",
            "width 16, batch 2, 96 x 96",
            lambda: _unet(2, 96, 16),
            lambda: _unet(4, 64, 4),
            lambda: _unet(8, 256, 64),
            "width 64, batch 8, 256 x 256",
            _blocks(_unet_blocks),
        ),
        Program(
            "unrolled gan",
            "10 steps ahead, width 256, batch 256",
            lambda: _gan(256, 256, 10),
            lambda: _gan(16, 32, 3),
            lambda: _gan(4096, 1024, 10),
            "10 steps ahead, width 1024, batch 4096",
        ),
    )
}


def parse_names(names: Sequence[str], otherwise: Sequence[str]) -> list[Program]:
    """Programs by name.

    Raises
    ------
    SystemExit
        There is none of a name; it says which there are.
    """
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        raise SystemExit(f"no program is named {unknown[0]!r}: {', '.join(PROGRAMS)}")
    return [PROGRAMS[name] for name in names or otherwise]


def budget(plain: Plain, limit: int) -> AbstractContextManager[Any]:
    """The runtime in a budget on the program's device."""
    return dtr.budget(limit, device=plain.device)


def timed(
    plain: Plain,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    wrap: Callable[[nn.Module], None] | None = None,
) -> float:
    """Seconds that a step of a fresh copy of the model takes in a context (`common.read_clock`).

    Infinite where its budget does not do.
    """
    model = copy.deepcopy(plain.model)
    if wrap is not None:
        wrap(model)
    start = read_clock(plain.device)
    try:
        with context():
            step(model, plain.loss)
    except BudgetError:
        return math.inf
    return read_clock(plain.device) - start


def medians(actions: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """What each gives in the median, all run in turn."""
    found = [[action() for action in actions] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def metered(plain: Plain, wrap: Callable[[nn.Module], None]) -> tuple[int, str]:
    """Peak of a step of a wrapped copy, and whether it leaves what the plain one does."""
    for is_last in (False, True):
        model = copy.deepcopy(plain.model)
        wrap(model)
        if not is_last:
            step(model, plain.loss)
    with memory.meter(plain.device) as meter:
        value = step(model, plain.loss)
    left = results(model, value)
    buffers = len(list(model.buffers()))
    if same(plain.results, left):
        return meter.peak_bytes, "yes"
    first, after = len(left) - 1 - buffers, len(left) - 1
    rest_is_same = same(
        [*plain.results[:first], *plain.results[after:]], [*left[:first], *left[after:]]
    )
    return meter.peak_bytes, "buffers NO" if rest_is_same else "NO"
