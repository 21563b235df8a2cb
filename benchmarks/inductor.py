"""Plans compiled by Inductor beside plain ``torch.compile`` and its own memory budget.

For each model and fraction of the peak of plain ``torch.compile``: our plan run by Inductor, our
plan run by FX, and ``activation_memory_budget`` at the largest of its settings whose measured peak
is no higher than our Inductor plan's (where none is, the one with the lowest peak). All are timed
in turn; times are over plain's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from typing import Any

import torch
from common import (
    Batch,
    Contender,
    classification_batch,
    cross_entropy,
    interleaved_times,
    keep_freed_memory,
    step_peak_bytes,
    token_batch,
)
from torch import nn
from torch._functorch import config as functorch_config

import rotor
from rotor.engines.graph.capture import fresh

MOST_STEPS = 5


def _loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), target)


class Compiled(nn.Module):
    """A copy of a model with its loss under ``torch.compile``, called as a planned model is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        # On a code object of its own: what was compiled under other settings is not found.
        self.call = torch.compile(fresh(_loss), dynamic=False, fullgraph=True)

    def forward(self, x: torch.Tensor, targets: tuple[torch.Tensor]) -> torch.Tensor:
        """The loss."""
        return self.call(self.model, x, targets[0])


def budgeted(
    model: nn.Module, batch: Batch, budgets: list[float]
) -> list[tuple[float, nn.Module, int]]:
    """(setting, compiled model, measured peak) of ``activation_memory_budget``."""
    found = []
    for budget in budgets:
        with functorch_config.patch(activation_memory_budget=budget):
            contender = Compiled(model)
            peak = step_peak_bytes(contender, batch, captured=True)
        found.append((budget, contender, peak))
    return found


def planned(model: nn.Module, batch: Batch, limit: int, backend: str) -> Any:
    """Our plan after its first steps, and the seconds that they took."""
    begin = time.perf_counter()
    chk = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        backend=backend,
        loss_fn=cross_entropy,
    )
    for _ in range(MOST_STEPS):
        chk(batch[0], targets=(batch[1],)).backward()
    return chk, time.perf_counter() - begin


def run(name: str, model: nn.Module, batch: Batch, arguments: argparse.Namespace) -> None:
    """The rows of one model."""
    plain = Compiled(model)
    plain_peak = step_peak_bytes(plain, batch, captured=True)
    settings = budgeted(model, batch, arguments.budgets)
    contenders, rows = [Contender("torch.compile", plain, True)], [("", plain_peak, 0.0)]
    for fraction in arguments.fractions:
        limit = int(plain_peak * fraction)
        wanted = limit
        for backend in ("inductor", "fx"):
            try:
                chk, seconds = planned(model, batch, limit, backend)
            except rotor.InfeasibleError as error:
                print(f"{name}: {backend} at {fraction}: needs {error.minimum_bytes} bytes")
                continue
            contenders.append(Contender(f"rotor, {backend}", chk, True))
            peak = step_peak_bytes(chk, batch, captured=True)
            wanted = peak if backend == "inductor" else wanted
            rows.append((f"limit {fraction:.2f}", peak, seconds))
        fitting = [entry for entry in settings if entry[2] <= wanted]
        budget, contender, peak = fitting[0] if fitting else min(settings, key=lambda e: e[2])
        contenders.append(Contender("activation_memory_budget", contender, True))
        rows.append((f"budget {budget}", peak, 0.0))
    times = interleaved_times(contenders, batch, arguments.rounds)
    for contender, (setting, peak, seconds), taken in zip(contenders, rows, times, strict=True):
        print(
            f"| {name} | {contender.name} | {setting} | {peak / 1e6:.2f} | {peak / plain_peak:.3f} "
            f"| {taken / times[0]:.3f} | {f'{seconds:.0f}' if seconds else ''} |",
            flush=True,
        )


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt", "resnet"])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.8, 0.6, 0.4, 0.2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4, help="blocks of the GPT")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64
    print("| model | run by | setting | peak MB | of plain | time of plain | compiled in s |")
    print("|---|---|---|---:|---:|---:|---:|")
    for name in arguments.models:
        torch.manual_seed(0)
        if name == "gpt":
            shape = {"layers": arguments.layers, "heads": 4, "width": 128, "context_length": 128}
            model: nn.Module = rotor.gpt.gpt("mini", vocab_size=512, dropout=0.0, **shape)
            batch = token_batch(8, 128, 512, device)
        else:
            block = rotor.resnet.BasicBlock
            model = rotor.resnet.ResNet(block, (1, 1, 1, 1), num_classes=10)
            batch = classification_batch(8, 96, device, classes=10)
        run(name, model.to(device), batch, arguments)


if __name__ == "__main__":
    main()
