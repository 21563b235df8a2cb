"""The graph engine's promise: peaks under limits, predicted and measured, time, equal numbers.

For a GPT, ResNet-18, ResNet-50, a U-Net and DenseNet-121: limits from 90 % to 40 % of the plain
peak, the loss captured. The first planned step is metered, its numbers compared with the plain
model's; then plain, planned and stock steps are timed in turn. Stock are ``torch.utils.checkpoint``
for each block and ``activation_memory_budget`` of ``torch.compile`` on the FX backend: for each, a
program of ours is planned at its measured peak. One row for each; a stock contender that fails says
how. Predictions are ratios to our own program without recomputation, which has the first row. On
CUDA models and batches are larger, and times are of CUDA events.
"""

from __future__ import annotations

import argparse
import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from common import (
    Batch,
    Contender,
    classification_batch,
    cross_entropy,
    equal_gradients,
    equal_states,
    find_blocks,
    interleaved_times,
    keep_freed_memory,
    open_device,
    step_peak_bytes,
    token_batch,
    train_step,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rotor
from rotor import memory
from rotor.report.text import table

FRACTIONS = [0.9, 0.7, 0.5, 0.4]


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attention = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Language(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, width: int, blocks: int, words: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Double(nn.Sequential):
    """Two convolutions."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        for k, (m, n) in enumerate(((a, b), (b, b))):
            self.add_module(f"conv{k}", nn.Conv2d(m, n, 3, padding=1, bias=False))
            self.add_module(f"norm{k}", nn.BatchNorm2d(n))
            self.add_module(f"relu{k}", nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down, up, and skip connections between."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList([Double(a, b) for a, b in zip([3, *sizes], sizes, strict=False)])
        self.up = nn.ModuleList([Double(a + b, a) for a, b in pairwise(sizes)])
        self.wider = nn.ModuleList(
            [nn.ConvTranspose2d(b, b, 2, stride=2) for _, b in pairwise(sizes)]
        )
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of each image."""
        kept = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            kept.append(x)
        for block, wider, skip in zip(self.up[::-1], self.wider[::-1], kept[-2::-1], strict=True):
            x = block(torch.cat([wider(x), skip], 1))
        return self.head(x).mean((2, 3))


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Batch

    def start(self) -> nn.Module:
        """A model in training mode, where its batch is."""
        return self.make().train().to(self.batch[0].device)


def cases(device: torch.device, shrink: int = 1) -> list[Case]:
    """Five models whose steps take about a second on one core, or fill a GPU.

    Batches are divided by `shrink`.
    """

    def images(count: int) -> Batch:
        return classification_batch(max(count // shrink, 1), 128, device, 10)

    if device.type != "cpu":
        gpt, tokens = (768, 12, 8192, 12), token_batch(max(8 // shrink, 1), 512, 8192, device)
        counts, width = {"18": 256, "50": 128, "unet": 32, "densenet": 128}, 64
    else:
        gpt, tokens = (256, 6, 1000, 4), token_batch(max(8 // shrink, 1), 128, 1000, device)
        counts, width = {"18": 16, "50": 8, "unet": 8, "densenet": 8}, 24
    return [
        Case(f"GPT, {gpt[1]} blocks", lambda: Language(*gpt), tokens),
        Case(
            "ResNet-18",
            lambda: rotor.resnet.resnet18(num_classes=10),
            images(counts["18"]),
        ),
        Case(
            "ResNet-50",
            lambda: rotor.resnet.resnet50(num_classes=10),
            images(counts["50"]),
        ),
        Case("U-Net", lambda: UNet(width), images(counts["unet"])),
        Case(
            "DenseNet-121",
            lambda: rotor.densenet.densenet121(num_classes=10),
            images(counts["densenet"]),
        ),
    ]


class ByBlocks(nn.Module):
    """A model with ``torch.utils.checkpoint`` around each block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for _, block in find_blocks(model):
            block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]

    def forward(self, *args: torch.Tensor) -> Any:
        """The model's output."""
        return self.model(*args)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@dataclass
class Row:
    """One contender at one peak."""

    name: str
    limit: int = 0
    predicted: int = 0
    measured: int = 0
    slower_predicted: float = 0.0
    slower: float = 0.0
    slower_than_ours: float = 0.0
    equal: str = ""


def planned(start: nn.Module, batch: Batch, limit: int, effort: str) -> rotor.Checkpointable:
    """A copy of the model with a program for a limit."""
    chk = rotor.Checkpointable(
        copy.deepcopy(start), mem_limit=limit, engine="graph", loss_fn=cross_entropy, effort=effort
    )
    chk.measure(batch[0], targets=(batch[1],))
    chk.compute_sequence()
    return chk


def judge(start: nn.Module, batch: Batch, limit: int, name: str, effort: str) -> tuple[Row, Any]:
    """The first planned step, metered, beside the plain model's."""
    chk = planned(start, batch, limit, effort)
    plain = copy.deepcopy(start)
    torch.manual_seed(1)
    expected = train_step(plain, batch)
    torch.manual_seed(1)
    x, target = batch
    with memory.meter(x.device) as meter:
        loss = chk(x, targets=(target,))
        loss.backward()
    same = torch.equal(expected, loss) and equal_gradients(plain, chk) and equal_states(plain, chk)
    row = Row(name, limit, chk.get_expected_memory(), meter.peak_bytes, chk.program.slowdown)
    row.equal = "yes" if same else "NO"
    return row, chk


def fx_backend() -> Any:
    """Graphs of the stock partitioner, run by FX as ours are: boxed, without Inductor."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        module.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
        module.recompile()
        function = module.forward

        def boxed(args: list[Any]) -> Any:
            return function(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )


def stock(start: nn.Module, batch: Batch, most: int = 3) -> list[tuple[Row, Any]]:
    """Checkpointing by blocks, and the memory budget of the stock partitioner; the first ones."""
    found: list[tuple[Row, Any]] = []
    plain = copy.deepcopy(start)
    torch.manual_seed(1)
    train_step(plain, batch)
    made: list[tuple[str, float, nn.Module]] = [("by blocks", 1.0, ByBlocks(copy.deepcopy(start)))]
    for budget in (0.7, 0.4):
        compiled = torch.compile(copy.deepcopy(start), backend=fx_backend(), dynamic=False)
        made.append((f"memory budget {budget}", budget, compiled))  # type: ignore[arg-type]
    for name, budget, model in made[:most]:
        row = Row(name)
        inner = getattr(model, "model", getattr(model, "_orig_mod", model))
        try:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                torch.manual_seed(1)
                train_step(model, batch)
                same = [equal_gradients(plain, inner), equal_states(plain, inner)]
                row.equal = "yes" if all(same) else "NO: " + ("buffers" if same[0] else "gradients")
                row.measured = step_peak_bytes(model, batch)
        except Exception as error:
            row.name = f"{name}: fails, {type(error).__name__}"
            found.append((row, None))
            continue
        found.append((row, model))
    return found


def run(case: Case, fractions: list[float], rounds: int, effort: str, most: int = 3) -> bool:
    """Judge one model; prints a table."""
    gc.collect()  # Blocks of a former model, whose forwards are replaced, are in cycles.
    torch.manual_seed(0)
    start = case.start()
    peak = step_peak_bytes(copy.deepcopy(start), case.batch)
    # Twice the plain peak holds every activation.
    entries: list[tuple[Row, Any]] = [judge(start, case.batch, 2 * peak, "ours, all kept", effort)]
    for fraction in fractions:
        try:
            entries.append(
                judge(start, case.batch, int(fraction * peak), f"ours, {fraction:.0%}", effort)
            )
        except rotor.InfeasibleError as error:
            least = f"ours, {fraction:.0%}: needs {error.minimum_bytes / peak:.0%}"
            entries.append((Row(least), None))
    for row, model in stock(start, case.batch, most):
        entries.append((row, model))
        if model is not None:
            try:
                name = f"ours, as {row.name}"
                entries.append(judge(start, case.batch, row.measured, name, effort))
            except rotor.InfeasibleError as error:
                least = f"ours, as {row.name}: needs {error.minimum_bytes / row.measured:.2f} of it"
                entries.append((Row(least), None))
    timed = [(row, model) for row, model in entries if model is not None]
    contenders = [Contender("plain", copy.deepcopy(start))]
    contenders += [
        Contender(row.name, model, isinstance(model, rotor.Checkpointable)) for row, model in timed
    ]
    first, *others = interleaved_times(contenders, case.batch, rounds)
    for (row, _), seconds in zip(timed, others, strict=True):
        row.slower = seconds / first
        row.slower_than_ours = seconds / others[0]
    print(f"\n{case.name}: plain peak {peak / 1e6:.2f} MB, plain step {first * 1e3:.0f} ms")
    head = ["contender", "limit MB", "predicted MB", "measured MB", "of plain", "time, predicted"]
    lines = [[*head, "time / all kept", "time / plain", "bit-equal"]]
    kept = True
    for row, model in entries:
        ours = isinstance(model, rotor.Checkpointable)
        lines.append(
            [
                row.name,
                f"{row.limit / 1e6:.2f}" if ours else "",
                f"{row.predicted / 1e6:.2f}" if ours else "",
                f"{row.measured / 1e6:.2f}" if model is not None else "",
                f"{row.measured / peak:.3f}" if model is not None else "",
                f"{row.slower_predicted:.3f}" if ours else "",
                f"{row.slower_than_ours:.3f}" if ours else "",
                f"{row.slower:.3f}" if model is not None else "",
                row.equal,
            ]
        )
        if ours:
            close = abs(row.predicted - row.measured) <= 0.01 * row.measured
            kept &= row.measured <= row.limit and close
    print(table(lines), flush=True)
    return kept


def main() -> None:
    """All models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batches by this")
    parser.add_argument("--stock", type=int, default=3, help="how many stock contenders")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = open_device(arguments.device)
    keep_freed_memory()
    words = [word.lower() for word in arguments.models]
    results = [
        run(case, arguments.fractions, arguments.rounds, arguments.effort, arguments.stock)
        for case in cases(device, arguments.shrink)
        if not words or any(word in case.name.lower() for word in words)
    ]
    if not all(results):
        raise SystemExit("a limit was not kept, or a prediction was off: see above")


if __name__ == "__main__":
    main()
