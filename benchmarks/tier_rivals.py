"""Compares PyTorch's own means to offload with rotor's, each at the peak that was measured of it.

A GPT-like model and a ResNet train on the simulated accelerator of the tests. Its clock is a model:
an operation takes the time in which the device's memory gives and takes its bytes, a transfer that
of the link in its direction, and both go on side by side. So times and peaks are the same on every
machine. The speed of a link is the number of times that it moves the bytes of the plain step's
peak, one way, in the time of a plain step.

The rivals: `torch.autograd.graph.save_on_cpu` with pinned memory; `torch.utils.checkpoint` on every
block; the same with the blocks' inputs under `save_on_cpu`; activation offloading of functorch, for
all that its partitioner may move, without and with a stream of its own. A row has a rival's
measured peak, its time over plain, and those of rotor with that peak as its limit (effort="fast"),
without the tier and with it. A "!" marks metered first steps that took more than the limit, by at
most a fiftieth: the next ones set that aside. The exit code is 1 if rotor passed a limit later, or
by more.

    python benchmarks/tier_rivals.py [--speeds .3 1 3] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import accelerator  # noqa: E402

sim: Any = accelerator.load()

from tier import Block, Unit  # noqa: E402

import rotor  # noqa: E402

SPEEDS = (0.3, 1.0, 3.0)
MEMORY_GB_PER_S = 20.0
LATENCY_NS = 10_000
WARM_STEPS = 6
FIRST_STEPS = 2

Step = Callable[[torch.Tensor], torch.Tensor]


class EagerBlock(Block):
    """A block of a transformer, whose captured operations are the ones that eager PyTorch runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows, length, width = x.shape
        parts = self.mixing(self.first(x)).split(width, -1)
        heads = [p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Blocks(nn.Module):
    """A first layer, blocks, and a last layer; the blocks may be run by something else."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x)


def gpt(width: int = 192, depth: int = 6) -> Blocks:
    """Blocks of a transformer between linear layers."""
    ends = nn.Linear(width, width), nn.Linear(width, width)
    return Blocks(ends[0], [EagerBlock(width, 6) for _ in range(depth)], ends[1])


def resnet(width: int = 32, depth: int = 6) -> Blocks:
    """Residual blocks of one resolution between convolutions."""
    ends = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 8, 1)
    return Blocks(ends[0], [Unit(width) for _ in range(depth)], ends[1])


@dataclass
class Subject:
    """A model and its batch."""

    name: str
    make: Callable[[], Blocks]
    batch: tuple[int, ...]


def subjects(quick: bool) -> list[Subject]:
    """Models of both kinds; one that is small if quick."""
    if quick:
        return [Subject("GPT, 3 blocks", partial(gpt, 96, 3), (4, 128, 96))]
    return [
        Subject("GPT, 6 blocks", gpt, (8, 256, 192)),
        Subject("ResNet, 6 blocks", resnet, (8, 3, 48, 48)),
    ]


def mean_square(output: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return output.square().mean() + zero.sum()


@dataclass
class Figures:
    """Peaks above the level before a step, of the first steps and of others, and its time."""

    first_bytes: int
    peak_bytes: int
    seconds: float

    def holds(self, limit: int) -> bool:
        """Whether a limit was kept, in the first steps but for a fiftieth."""
        return self.peak_bytes <= limit and self.first_bytes <= limit * 1.02


def measured(
    model: nn.Module, loss_of: Step, x: torch.Tensor, around: Any = nullcontext
) -> Figures:
    """The figures of a step after some others, the largest peaks of all."""
    peaks, ns = [], 0
    for _ in range(WARM_STEPS):
        model.zero_grad(set_to_none=True)
        sim.synchronize()
        sim.reset_peak_memory_stats()
        level, began = sim.memory_allocated(), sim.clock_ns()
        with around():
            loss = loss_of(x)
        loss.backward()
        sim.synchronize()
        ns = sim.clock_ns() - began
        peaks.append(sim.max_memory_allocated() - level)
        del loss
    model.zero_grad(set_to_none=True)
    return Figures(max(peaks[:FIRST_STEPS]), max(peaks[FIRST_STEPS:]), ns / 1e9)


def pinned() -> Any:
    """What saves all that autograd keeps in pinned memory of the host."""
    return save_on_cpu(pin_memory=True, device_type="sim")


def by_blocks(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a block again in the backward."""
    return checkpoint(block, x, use_reentrant=False)


def by_blocks_from_host(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a block again in the backward, from an input that waits on the host."""
    # Only the reentrant kind saves the input where hooks see it.
    with pinned():
        return checkpoint(block, x, use_reentrant=True)


def by_functorch(model: nn.Module, separate: bool) -> Any:
    """The model as functorch compiles it, with all that may move marked for it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def marked(joint: Any, *given: Any, **named: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta["should_offload"] = node.op == "call_function"
        with config.patch(
            enable_activation_offloading=True,
            activation_offload_separate_stream=separate,
            activation_offload_sink_wait=separate,
            activation_reload_prefetch=separate,
        ):
            return min_cut_rematerialization_partition(joint, *given, **named)

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=marked)
    return torch.compile(model, backend=backend, fullgraph=True)


@dataclass
class Rival:
    """A way to need less memory: how it runs a model, and in which context."""

    name: str
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    around: Any = nullcontext
    compiled: Callable[[nn.Module], Any] | None = None

    def measure(self, model: Blocks, x: torch.Tensor) -> Figures | str:
        """Its figures, or what it ends in."""
        model = copy.deepcopy(model)
        zero = torch.zeros(1, device="sim")
        if self.run is not None:
            model.run = self.run
        try:
            call = model if self.compiled is None else self.compiled(model)
            return measured(model, lambda given: mean_square(call(given), zero), x, self.around)
        except Exception as error:
            # Each is a finding of its own: the table says which rival does not run here.
            text = " ".join(str(error.__cause__ or error).split())
            return f"{type(error.__cause__ or error).__name__}: {text}"[:150]
        finally:
            torch._dynamo.reset()


RIVALS = (
    Rival("save_on_cpu", around=pinned),
    Rival("checkpoint, blocks", run=by_blocks),
    Rival("the same, inputs on host", run=by_blocks_from_host),
    Rival("functorch", compiled=partial(by_functorch, separate=False)),
    Rival("functorch, own stream", compiled=partial(by_functorch, separate=True)),
)


def ours(model: Blocks, x: torch.Tensor, limit: int, **settings: Any) -> Figures | None:
    """Rotor's figures under a limit; None where no plan fits."""
    zero = (torch.zeros(1, device="sim"),)
    chk = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        loss_fn=mean_square,
        planning="before",
        effort="fast",
        verbosity=-1,
        **settings,
    )
    try:
        chk.measure(x, targets=zero)
        chk.compute_sequence()
    except rotor.InfeasibleError:
        return None
    return measured(chk.module, lambda given: chk(given, targets=zero), x)


def set_speed(speed: float, peak_bytes: int, seconds: float) -> None:
    """Give the link a speed."""
    sim.set_link(speed * peak_bytes / seconds / 1e9, LATENCY_NS)


def cells(found: Figures | None, plain: Figures, limit: int | None = None) -> list[str]:
    """A peak and a time over plain."""
    if found is None:
        return ["no plan", ""]
    mark = "!" if limit is not None and found.first_bytes > limit else ""
    return [f"{mark}{found.peak_bytes / 1e6:.2f}", f"{found.seconds / plain.seconds:.3f}"]


def line_of(given: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
    """A row in columns of these widths, of which the left ones begin at the same place."""
    return "  ".join(
        f"{cell:<{width}}" if k in left else f"{cell:>{width}}"
        for k, (cell, width) in enumerate(zip(given, widths, strict=False))
    ).rstrip()


def line(given: Sequence[str]) -> str:
    """A row in columns."""
    return line_of(given, (16, 5, 24, 8, 6, 10, 8, 8, 8), left=(0, 2))


def start_clock() -> None:
    """Have the device count modelled times alone."""
    sim.set_poison(0)
    sim.set_capacity(4 << 30)
    sim.set_clock("model")
    sim.set_compute(gb_per_s=MEMORY_GB_PER_S)


def rows_of(subject: Subject, speeds: Sequence[float]) -> tuple[list[str], list[str], bool]:
    """The rows of a subject, what rivals end in, and whether every limit was kept."""
    torch.manual_seed(0)
    model = subject.make().to("sim")
    x = torch.randn(subject.batch, device="sim")
    zero = torch.zeros(1, device="sim")
    plain = measured(model, lambda given: mean_square(model(given), zero), x)
    free = ours(model, x, 1 << 40)
    assert free is not None
    print(
        f"{subject.name}: {plain.peak_bytes / 1e6:.2f} MB, {1e3 * plain.seconds:.2f} ms a plain "
        f"step; captured, without a limit, {' MB, '.join(cells(free, plain))}",
        flush=True,
    )
    rows, notes, kept = [], [], True
    recomputing: dict[int, Figures | None] = {}
    for rival in RIVALS:
        for speed in speeds:
            set_speed(speed, plain.peak_bytes, plain.seconds)
            found = rival.measure(model, x)
            head = [subject.name, f"{speed:.1f}", rival.name]
            if isinstance(found, str):
                notes.append(f"{subject.name}, {rival.name}: {found}")
                break
            limit = max(found.first_bytes, found.peak_bytes)
            if limit not in recomputing:
                recomputing[limit] = ours(model, x, limit)
            alone = recomputing[limit]
            both = ours(model, x, limit, offload="host")
            kept &= all(one is None or one.holds(limit) for one in (alone, both))
            own = [*cells(alone, plain, limit), *cells(both, plain, limit)]
            rows.append(line([*head, *cells(found, plain), *own]))
    return rows, notes, kept


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where rotor passed a limit."""
    warnings.simplefilter("ignore")
    start_clock()
    found = [rows_of(subject, arguments.speeds) for subject in subjects(arguments.quick)]
    print()
    print(line(["model", "speed", "rival", "peak, MB", "time", "recompute", "", "both"]))
    for rows, _, _ in found:
        print("\n".join(rows))
    notes = [note for _, several, _ in found for note in several]
    if notes:
        print("\nwhat did not run:")
        print("\n".join(notes))
    return 0 if all(kept for _, _, kept in found) else 1


def parsed(given: list[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--speeds", type=float, nargs="+", default=list(SPEEDS))
    parser.add_argument("--quick", action="store_true", help="a small model")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main(parsed(sys.argv[1:])))
