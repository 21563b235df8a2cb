"""What a first step costs beside the ones that follow: ``planning="background"`` and "before".

Run as ``python benchmarks/first_step.py [--planning before] [word ...]``. CPU time of a process on
one thread, in plain steps of the same run. The limit leaves 60 % of what plain training needs
beside the gradients. "first" is the first step without its capture; "others+" what steps 3 to 50
take together beyond a late one; "program" the time of the last program against one that was
searched for before the first step, by the same costs.

A second run of the script is another process with what this one has kept on disk, three times, each
after a process that trains the plain model; medians. "script" is its first step without the capture
beside the first step of the plain process; "whole" that step with its capture, beside the capture
and the plain first step; "later" its later steps, each beside a plain one of the same process;
"again" the first step, without the capture, of a second object there, in such plain steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import (
    Batch,
    classification_batch,
    cross_entropy,
    keep_freed_memory,
    token_batch,
    train_step,
)
from torch import nn
from torch._dynamo.utils import compilation_time_metrics
from torch.nn import functional as F

import rotor
from rotor import memory
from rotor.engines.graph import capture
from rotor.engines.graph.engine import GraphEngine
from rotor.graph import Program

SHARE = 0.6
RUNS = 3
ROUNDS = 5
CPU = torch.device("cpu")


class Attention(nn.Module):
    """Self-attention of a few heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        shape = x.shape
        split = (*shape[:2], self.heads, shape[2] // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.mixed(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(shape))


class Layer(nn.Module):
    """A layer of a vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        x = x + self.attention(self.before(x))
        return x + self.dense(self.after(x))


class VisionTransformer(nn.Module):
    """Patches of 16 x 16, and alike layers."""

    def __init__(self, layers: int = 12, width: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def _normed(convolution: nn.Conv2d, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), *more)


class Ghost(nn.Module):
    """Half of the channels by a product, the others from these by a cheap convolution."""

    def __init__(self, inner: int, outer: int, *ends: nn.Module) -> None:
        super().__init__()
        half = outer // 2
        self.main = _normed(nn.Conv2d(inner, half, 1, bias=False), *ends)
        self.cheap = _normed(nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), *ends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        x = self.main(x)
        return torch.cat([x, self.cheap(x)], 1)


class Squeeze(nn.Module):
    """Channels weighted by a function of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Bottleneck(nn.Module):
    """A block of the published GhostNet: Han et al., CVPR 2020."""

    def __init__(self, inner: int, middle: int, outer: int, stride: int, squeezes: bool) -> None:
        super().__init__()
        depthwise = nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False)
        self.path = nn.Sequential(
            Ghost(inner, middle, nn.ReLU()),
            _normed(depthwise) if stride > 1 else nn.Identity(),
            Squeeze(middle) if squeezes else nn.Identity(),
            Ghost(middle, outer),
        )
        self.side: nn.Module = nn.Identity()
        if inner != outer or stride > 1:
            self.side = nn.Sequential(
                _normed(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)),
                _normed(nn.Conv2d(inner, outer, 1, bias=False)),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return self.path(x) + self.side(x)


def ghostnet() -> nn.Module:
    """Sixteen blocks, hardly two of them alike: 770 operations."""
    sizes = (
        [(16, 16, 16, 1, 0), (16, 48, 24, 2, 0), (24, 72, 24, 1, 0), (24, 72, 40, 2, 1)]
        + [(40, 120, 40, 1, 1), (40, 240, 80, 2, 0), (80, 200, 80, 1, 0), (80, 184, 80, 1, 0)]
        + [(80, 184, 80, 1, 0), (80, 480, 112, 1, 1), (112, 672, 112, 1, 1), (112, 672, 160, 2, 1)]
        + [(160, 960, 160, 1, squeezes) for squeezes in (0, 1, 0, 1)]
    )
    return nn.Sequential(
        _normed(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.ReLU()),
        *[Bottleneck(*four, bool(squeezes)) for *four, squeezes in sizes],
        _normed(nn.Conv2d(160, 960, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(960, 1000),
    )


CASES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]
] = {
    "ResNet-50": (rotor.resnet.resnet50, lambda: classification_batch(4, 160, CPU)),
    "GPT, 12 layers": (
        lambda: rotor.gpt.gpt("mini", dropout=0.0),
        lambda: token_batch(2, 192, 1000, CPU),
    ),
    "GhostNet": (ghostnet, lambda: classification_batch(16, 192, CPU)),
    "ViT, 12 layers": (VisionTransformer, lambda: classification_batch(4, 224, CPU)),
}
"""Models and batches whose plain steps take a part of a second."""


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of the process in a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


class Captures:
    """CPU time of the captures within a block."""

    def __enter__(self) -> Captures:
        self.seconds = 0.0
        self._original = original = GraphEngine._captured

        def timed(engine: GraphEngine, *args: object) -> object:
            begin = time.process_time()
            try:
                return original(engine, *args)
            finally:
                self.seconds += time.process_time() - begin

        GraphEngine._captured = timed
        return self

    def __exit__(self, *_: object) -> None:
        GraphEngine._captured = self._original


@dataclass
class Found:
    """Figures of one model: seconds of CPU time, and ratios of second runs (`second_run`)."""

    plain: float
    capture: float
    steps: list[float]
    again: list[float]
    slower: float
    text: str

    def row(self, name: str) -> str:
        """A line of the table, in plain steps."""
        steps = [seconds / self.plain for seconds in self.steps]
        first = steps[0] - self.capture / self.plain
        late = statistics.median(steps[-5:])
        again = "{:7.2f} {:6.2f} {:6.2f} {:6.2f}".format(*self.again)
        return (
            f"{name:15} {self.plain:6.3f} s {self.capture / self.plain:8.1f} {first:6.2f} "
            f"{steps[1]:7.2f} {sum(steps[2:]) - late * len(steps[2:]):7.1f} {late:7.2f} "
            f"{self.slower:+8.2%} {again}   {self.text}"
        )


def step_limit(model: nn.Module, batch: Batch) -> int:
    """The limit of a case."""
    for parameter in model.parameters():
        parameter.grad = None
    with memory.meter(CPU) as meter:
        cross_entropy(model(batch[0]), batch[1]).backward()
    gradients = sum(p.nbytes for p in model.parameters())
    return int(gradients + SHARE * (meter.peak_bytes - gradients))


class Case:
    """A model with its batch."""

    def __init__(self, name: str) -> None:
        make, batch_of = CASES[name]
        torch.manual_seed(0)
        self.model, self.batch = make(), batch_of()

    def seconds(self, model: nn.Module) -> float:
        """CPU time of a step."""
        return cpu_seconds(lambda: train_step(model, self.batch))

    def begun(self, limit: int, planning: str) -> tuple[rotor.Checkpointable, float, float]:
        """A wrapped model after its first step, and the seconds of that step and its capture."""
        chk = rotor.Checkpointable(
            self.model, mem_limit=limit, engine="graph", planning=planning, verbosity=-1
        )
        with Captures() as captures:
            first = self.seconds(chk)
        return chk, first, captures.seconds


def figures(name: str, planning: str, steps: int) -> Found:
    """The figures of one model, from an empty cache directory."""
    case = Case(name)
    case.seconds(case.model)
    plain = statistics.median(case.seconds(case.model) for _ in range(ROUNDS))
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ROTOR_CACHE_DIR"] = directory
        limit = step_limit(case.model, case.batch)
        chk, first, capture = case.begun(limit, planning)
        times = [first, *(case.seconds(chk) for _ in range(steps - 1))]
        runs = [second_run(name, planning, limit) for _ in range(RUNS)]
        again = list(map(statistics.median, zip(*runs, strict=True)))
        best, *_ = case.begun(limit, "before")
        train_step(best, case.batch)
        priced = Program(best.graph, chk.program.ops)
        slower = priced.makespan / best.program.makespan - 1
        text = chk.plan.planning.text
    return Found(plain, capture, times, again, slower, text)


def second_run(name: str, planning: str, limit: int) -> list[float]:
    """Ratios of a second run, beside one of the plain model: script, whole, later and again."""

    def run(*arguments: str) -> list[float]:
        command = [sys.executable, __file__, "--planning", planning, "--run", *arguments, name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    (plain,) = run("0")
    first, capture, later, again = run(str(limit))
    return [first / plain, (capture + first) / (capture + plain), later, again]


def print_run(name: str, planning: str, limit: int) -> None:
    """Print figures of a process for `second_run`; without a limit those of the plain model."""
    case = Case(name)
    if not limit:
        print(json.dumps([case.seconds(case.model)]))
        return
    chk, first, capture = case.begun(limit, planning)
    assert chk.plan.planning.origin in ("kept on disk", "before the first step"), chk.plan.planning
    case.seconds(case.model)
    pairs = [(case.seconds(chk), case.seconds(case.model)) for _ in range(ROUNDS)]
    _, other, other_capture = case.begun(limit, planning)
    plain = statistics.median(plain for _, plain in pairs)
    later = statistics.median(later / plain for later, plain in pairs)
    print(json.dumps([first - capture, capture, later, (other - other_capture) / plain]))


PHASES = {
    "dynamo's trace": "bytecode_tracing",
    "AOT's metadata": "aot_collect_metadata",
    "AOT's joint trace": "aot_trace_joint_graph",
    "guards": "build_guards",
}
"""Phases of a capture, and PyTorch's names for them."""


def capture_seconds(layers: int, *, folds: bool = True) -> dict[str, float]:
    """Seconds of the capture of a transformer of alike layers, in all and by phase.

    The whole is CPU time; PyTorch counts time on the wall for its phases.

    Parameters
    ----------
    layers
        Number of the layers.
    folds
        False to trace each layer.
    """
    torch.manual_seed(0)
    batch = classification_batch(1, 64, CPU)
    chk = rotor.Checkpointable(
        VisionTransformer(layers), mem_limit="4GiB", engine="graph", verbosity=-1
    )
    compilation_time_metrics.clear()
    original, lowering = capture.lower, 0.0

    def timed(*args: object, **kwargs: object) -> object:
        nonlocal lowering
        begin = time.process_time()
        found = original(*args, **kwargs)
        lowering += time.process_time() - begin
        return found

    capture.lower = timed
    is_available = capture.regions.is_available
    if not folds:
        capture.regions.is_available = lambda: False
    try:
        with Captures() as captures:
            train_step(chk, batch)
    finally:
        capture.lower = original
        capture.regions.is_available = is_available
    found = {"whole": captures.seconds}
    for phase, name in PHASES.items():
        found[phase] = sum(compilation_time_metrics.get(name, [0.0]))
    return {**found, "our lowering": lowering}


def print_captures() -> None:
    """Print what captures of alike layers take, first in a process as a user's is."""
    for folds, how in ((True, "one of them traced"), (False, "each of them traced")):
        capture_seconds(4, folds=folds)
        rounds = [[capture_seconds(n, folds=folds) for n in (4, 24)] for _ in range(ROUNDS)]
        print(f"capture of 4 and of 24 alike layers, {how}, seconds, medians of {ROUNDS}")
        for phase in rounds[0][0]:
            few, many = (statistics.median(r[k][phase] for r in rounds) for k in (0, 1))
            ratio = statistics.median(r[1][phase] / r[0][phase] for r in rounds)
            print(f"{phase:18} {few:6.3f} {many:6.3f}   {ratio:.1f} x")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of models; by default all")
    parser.add_argument("--planning", default="background", choices=("background", "before"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--run", type=int, metavar="LIMIT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.run is not None:
        print_run(*given.words, given.planning, given.run)
        return
    names = [
        n for n in CASES if not given.words or any(w.lower() in n.lower() for w in given.words)
    ]
    if not given.words:
        print_captures()
    print(f"planning={given.planning}; in plain steps of CPU time, but for the first column")
    print(
        f"{'':15} {'plain':>8} {'capture':>8} {'first':>6} {'second':>7} {'others+':>7} "
        f"{'late':>7} {'program':>8} {'script':>7} {'whole':>6} {'later':>6} {'again':>6}"
    )
    for name in names:
        print(figures(name, given.planning, given.steps).row(name), flush=True)


if __name__ == "__main__":
    main()
