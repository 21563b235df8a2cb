"""What the dynamic runtime costs an operator, and a training step where nothing is evicted.

The first table is of tiny tensors, so that nothing else takes time: microseconds per operator that
PyTorch dispatches. The second is a training step of an LSTM that is written out; one session runs
all steps, or every step has its own. All ways run in turn; the figures are medians of the rounds,
on the CPU of the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from common import keep_freed_memory, open_device, read_clock
from rotor.models import recurrent
from torch.utils._python_dispatch import TorchDispatchMode

from rotor import dtr

OPERATORS = 300
ROUNDS, REPEATS = 11, 3
STEPS, ENTRIES = 60, 100
BATCH, WIDTH = 64, 256
PLAIN, BARE = "eager", "mode that does nothing"
UNGUARDED, GUARDED = "session without the guard", "session"
ONE_STEP = "session of one step"

Context = Callable[[], AbstractContextManager[Any]]
Work = Callable[[], object]


class PassThrough(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """A mode that counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operator, and run it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def forward(x: torch.Tensor) -> None:
    """A chain of products without gradients."""
    with torch.no_grad():
        for _ in range(OPERATORS):
            x = x * x


def training(x: torch.Tensor) -> None:
    """A chain of products and its backward."""
    y = x
    for _ in range(OPERATORS):
        y = y * x
    y.sum().backward()
    x.grad = None


def lstm(device: torch.device) -> Callable[[], None]:
    """Return a training step of an LSTM that is written out."""
    torch.manual_seed(0)
    model = recurrent.LSTM(WIDTH, WIDTH).to(device)
    x = torch.randn(STEPS, BATCH, WIDTH, device=device)
    target = torch.randint(0, 10, (BATCH,), device=device)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), target).backward()
        model.zero_grad()

    return step


def dispatched(work: Work) -> int:
    """Return how many operators PyTorch dispatches."""
    with Counting() as counting:
        work()
    return counting.count


def seconds(ways: dict[str, tuple[Context, Work]], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a run each way, by rounds; in each the context is entered once."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (context, work) in ways.items():
            with context():
                work()
                start = read_clock(device)
                for _ in range(REPEATS):
                    work()
                found[name].append((read_clock(device) - start) / REPEATS)
    return found


def over(found: dict[str, list[float]], name: str, other: str) -> float:
    """Return the median of the ratios of two ways, round by round."""
    pairs = zip(found[name], found[other], strict=True)
    return statistics.median(value / base for value, base in pairs)


def beyond(found: dict[str, list[float]], name: str, other: str, count: int) -> float:
    """Return the median microseconds an operator that a way takes beyond another."""
    pairs = zip(found[name], found[other], strict=True)
    return statistics.median(value - base for value, base in pairs) / count * 1e6


def operators(device: torch.device) -> None:
    """Print the table of single operators."""
    x = torch.ones(100, requires_grad=True, device=device)
    print(f"microseconds per operator, {OPERATORS} products of 100 floats and what belongs to them")
    print(f"{'':32}{'forward':>10}{'training':>10}")
    columns = []
    for program in (forward, training):
        work = partial(program, x)
        count = dispatched(work)
        ways = {name: (context, work) for name, context in contexts(device).items()}
        found = seconds(ways, device)
        columns.append((found, count))
    for name in columns[0][0]:
        cells = [statistics.median(found[name]) / count * 1e6 for found, count in columns]
        print(f"{name:32}" + "".join(f"{cell:10.2f}" for cell in cells))
    for name in (UNGUARDED, GUARDED):
        cells = [beyond(found, name, BARE, count) for found, count in columns]
        print(f"{name + ', beyond the mode':32}" + "".join(f"{cell:10.2f}" for cell in cells))
    print()


def steps(device: torch.device) -> None:
    """Print the table of training steps."""
    step = lstm(device)
    count = dispatched(step)

    def session_of_one() -> None:
        with dtr.budget(None, device=device):
            step()

    ways = {name: (context, step) for name, context in contexts(device).items()}
    ways[ONE_STEP] = (nullcontext, session_of_one)
    found = seconds(ways, device)
    plain = statistics.median(found[PLAIN])
    print(
        f"training step of an LSTM of {STEPS} steps, width {WIDTH}, batch {BATCH}: {count} "
        f"operators, {plain * 1e3:.1f} ms plain"
    )
    print(f"{'':32}{'over plain':>12}{'us beyond the mode':>20}")
    for name in found:
        print(f"{name:32}{over(found, name, PLAIN):12.2f}{beyond(found, name, BARE, count):20.2f}")
    empty = seconds({ONE_STEP: (nullcontext, lambda: entered(device))}, device)[ONE_STEP]
    print(f"\nsession of one step over a long one: {over(found, ONE_STEP, GUARDED):.2f}")
    print(f"entering and leaving a session: {statistics.median(empty) / ENTRIES * 1e6:.0f} us")


def entered(device: torch.device) -> None:
    """Enter and leave sessions without a program."""
    for _ in range(ENTRIES):
        with dtr.budget(None, device=device):
            pass


def contexts(device: torch.device) -> dict[str, Context]:
    """Return the ways to run a program, by name."""
    return {
        PLAIN: nullcontext,
        BARE: PassThrough,
        UNGUARDED: lambda: dtr.budget(None, device=device, guard=False),
        GUARDED: lambda: dtr.budget(None, device=device),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = open_device(parser.parse_args().device)
    torch.set_num_threads(1)
    keep_freed_memory()
    operators(device)
    steps(device)


if __name__ == "__main__":
    main()
