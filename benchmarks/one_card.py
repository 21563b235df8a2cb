"""Steps on one card: limits, costs and bits of every engine, beside what PyTorch has for it.

    python benchmarks/one_card.py [WORD ...] [--device cpu|cuda|sim] [--small] [--rounds 7]

A GPT with dropout, a Llama, ResNet-50 in channels_last and a U-Net of diffusion train under
autocast to bfloat16, with a loss outside of the model, as scripts do. Each contender takes the same
steps from the same weights and seeds as the plain model; a limit is a share of the plain step's
peak. "first" is the first step's wall time, "peak" that of the last of these steps in allocated
bytes, "reserved" what the allocator took for it from an empty cache, "time" the median of later
steps, each timed beside a plain one. Bits are of loss, gradients and buffers. Below the tables
stands what is to be cured: limits that were passed, other bits of ours, and failures.
``--device sim`` rehearses it on the simulated accelerator of the tests.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from card_models import Case, cases
from common import open_device
from graph_truth import ByBlocks, fx_backend
from torch import nn

import rotor
from rotor import memory
from rotor._pytorch import devices
from rotor.report.text import table
from rotor.timing import Clock

STEPS = 4
SHARES = (0.5, 0.3)


@dataclass
class Row:
    """A contender's figures; bytes, seconds, and a ratio of times."""

    name: str
    limit: int = 0
    is_reserved: bool = False
    first: float = 0.0
    peak: int = 0
    reserved: int = 0
    slower: float = 0.0
    differs: str = ""
    failure: str = ""

    @property
    def to_cure(self) -> str:
        """What is wrong with it; empty for nothing."""
        if self.failure:
            return self.failure
        counted = self.reserved if self.is_reserved else self.peak
        if self.limit and counted > self.limit:
            return f"the limit is passed by {counted / self.limit - 1:.2%}"
        return f"other bits: {self.differs}" if self.limit and self.differs else ""


class Steps:
    """Steps of a model, each with a seed of its own."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model = case, model
        self.device = case.inputs[0].device
        self.is_mixed = torch.amp.is_autocast_available(self.device.type)

    def __call__(self, seed: int = 0) -> torch.Tensor:
        """Train a step with fresh gradients, and return its loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.manual_seed(seed)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed):
            loss = self.case.loss(self.model(*self.case.inputs))
        loss.backward()
        return loss.detach()

    def metered(self, row: Row) -> None:
        """Train `STEPS` steps, and note the first one's time and the last one's bytes."""
        has_counters = self.device.type != "cpu"
        begin = time.perf_counter()
        self(0)
        if has_counters:
            devices.synchronize(self.device)
        row.first = time.perf_counter() - begin
        for seed in range(1, STEPS - 1):
            self(seed)
        for parameter in self.model.parameters():
            parameter.grad = None
        if has_counters:
            devices.release_cached(self.device)
        before = devices.reserved_bytes(self.device) if has_counters else 0
        with memory.meter(self.device) as meter:
            self.loss = self(STEPS - 1)
        row.peak = int(meter.peak_bytes)
        row.reserved = devices.reserved_bytes(self.device) - before if has_counters else 0

    def state(self) -> dict[str, torch.Tensor]:
        """What the steps have left."""
        inner = getattr(self.model, "_orig_mod", getattr(self.model, "model", self.model))
        gradients = {f"gradient of {n}": p.grad for n, p in inner.named_parameters()}
        return {"loss": self.loss, **gradients, **dict(inner.named_buffers())}


def difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """Name the first tensor with other bits, and the greatest relative difference of all."""
    names = [n for n, one in expected.items() if not torch.equal(one, found[n])]
    if not names:
        return ""
    worst = 0.0
    for name in names:
        a, b = expected[name].double(), found[name].double()
        worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
    return f"{names[0]} and {len(names) - 1} others, {worst:.1e}"


def contenders(
    plain: Row, device: torch.device
) -> Iterator[tuple[Row, Callable[[nn.Module], nn.Module]]]:
    """What takes the steps: rows to be filled, and what makes a model of the plain one."""

    def ours(row: Row, **options: Any) -> tuple[Row, Callable[[nn.Module], nn.Module]]:
        return row, lambda model: rotor.Checkpointable(
            model, mem_limit=row.limit, verbosity=-1, **options
        )

    yield ours(Row("rotor, no recomputation", 2 * plain.peak))
    for share in SHARES:
        limit = int(share * plain.peak)
        yield ours(Row(f"rotor {share:.0%}", limit))
        if device.type != "cpu":
            yield ours(Row(f"rotor {share:.0%}, host tier", limit), engine="graph", offload="host")
    name = f"rotor {SHARES[0]:.0%}"
    yield ours(Row(f"{name}, dynamic", int(SHARES[0] * plain.peak)), engine="dynamic")
    if device.type != "cpu":
        reserved = Row(f"{name}, reserved", int(SHARES[0] * plain.reserved), is_reserved=True)
        yield ours(reserved, engine="graph", counts="reserved")
    yield Row("checkpoint, by blocks"), ByBlocks
    backend = "inductor" if device.type == "cuda" else fx_backend()

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend=backend, dynamic=False)

    for end in ("", *(f", budget {share}" for share in SHARES)):
        yield Row(f"torch.compile{end}"), compiled


@contextmanager
def memory_budget(name: str) -> Iterator[None]:
    """Set the budget of `torch.compile` that a contender's name ends with, if it does."""
    share = float(name.rpartition("budget ")[2]) if "budget " in name else 1.0
    with torch._functorch.config.patch(activation_memory_budget=share):
        yield


def judge(
    case: Case, row: Row, make: Callable[[nn.Module], nn.Module], plain: Steps, rounds: int
) -> None:
    """Fill the row of a contender."""
    try:
        with memory_budget(row.name):
            steps = Steps(case, make(case.start()))
            steps.metered(row)
            row.differs = difference(EXPECTED[case.name], steps.state())
            clock = Clock(steps.device)
            ratios = []
            for seed in range(rounds):
                times = []
                for one in (steps, plain):
                    clock.start()
                    one(seed)
                    times.append(clock.stop())
                ratios.append(times[0] / times[1])
            row.slower = statistics.median(ratios)
    except rotor.InfeasibleError as error:
        row.failure = f"no plan; the least limit is {(error.minimum_bytes or 0) / 1e6:.2f} MB"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        row.failure = f"{type(error).__name__}: {lines[0][:160]}"


EXPECTED: dict[str, dict[str, torch.Tensor]] = {}
"""Loss, gradients and buffers of the plain model's steps, by case."""


def run(case: Case, rounds: int) -> list[str]:
    """Print the table of a case, and return what is to be cured."""
    device = case.inputs[0].device
    first = Row("plain")
    plain = Steps(case, case.start())
    plain.metered(first)
    EXPECTED[case.name] = {name: one.clone() for name, one in plain.state().items()}
    first.slower = 1.0
    rows = [first]
    for row, make in contenders(first, device):
        judge(case, row, make, plain, rounds)
        rows.append(row)
        print(f"{case.name}, {row.name}: {row.to_cure or 'done'}", file=sys.stderr, flush=True)
        gc.collect()
        torch._dynamo.reset()
    print(f"\n{case.name}")
    lines = [["contender", "limit MB", "peak MB", "of plain", "reserved MB", "first s", "time"]]
    lines[0].append("bit-equal")
    for row in rows:
        sizes = [f"{size / 1e6:.2f}" if size else "" for size in (row.limit, row.peak)]
        share = f"{row.peak / first.peak:.3f}" if row.peak else ""
        reserved = f"{row.reserved / 1e6:.2f}" if row.reserved else ""
        times = [f"{row.first:.2f}", f"{row.slower:.3f}"] if row.slower else ["", ""]
        bits = "" if row.failure else "NO" if row.differs else "yes"
        lines.append([row.name, *sizes, share, reserved, *times, bits])
    print(table(lines), flush=True)
    return [f"{case.name}, {row.name}: {row.to_cure}" for row in rows if row.to_cure]


def open_card(name: str) -> torch.device:
    """The device of a name; the simulated accelerator for "sim"."""
    if not name.startswith("sim"):
        return open_device(name)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import accelerator

    sim = accelerator.load()
    sim.set_capacity(4 << 30)
    sim.set_clock("model")
    sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    return devices.known(name)


def main() -> None:
    """Print a table for each case, and the list of what is to be cured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", help="parts of names; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="sizes of a rehearsal")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    device = open_card(given.device)
    to_cure = []
    for case in cases(device, small=given.small):
        if not given.words or any(word.lower() in case.name.lower() for word in given.words):
            to_cure += run(case, given.rounds)
    print("\nTo be cured:" if to_cure else "\nNothing is to be cured.")
    print("\n".join(f"- {line}" for line in to_cure))


if __name__ == "__main__":
    main()
