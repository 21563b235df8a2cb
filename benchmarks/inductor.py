"""Plans compiled by Inductor beside plain ``torch.compile`` and its own memory budget.

For each model: plain PyTorch, our plans of Inductor's kernels without a limit and at fractions of
the peak of plain ``torch.compile``, those of PyTorch's operators at the same fractions, and
``activation_memory_budget`` at the largest of its settings whose measured peak is no higher than
our Inductor plan's (where none is, the one with the lowest peak). All are timed in turn, in CPU
seconds; times are over those of ``torch.compile``. What is spent before the third step is given in
CPU seconds too, with the kernels that were compiled in it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import re
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

STEPS = 2
"""Steps before a plan is metered."""


def _loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), target)


def cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


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
    """Our plan after its first steps, and the CPU seconds that they took."""
    begin = cpu_seconds()
    chk = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        backend=backend,
        loss_fn=cross_entropy,
        planning="before",
    )
    for _ in range(STEPS):
        chk.zero_grad()
        chk(batch[0], targets=(batch[1],)).backward()
    return chk, cpu_seconds() - begin


class Compiling(logging.Handler):
    """Counter of the kernels that plans had compiled."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kernels = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Add the kernels of a message."""
        found = re.match(r"(\d+) kernels compiled by Inductor", record.getMessage())
        self.kernels += int(found[1]) if found else 0


def run(name: str, model: nn.Module, batch: Batch, arguments: argparse.Namespace) -> None:
    """The rows of one model."""
    compiling = Compiling()
    logging.getLogger("rotor").addHandler(compiling)
    begin = cpu_seconds()
    compiled = Compiled(model)
    peak = step_peak_bytes(compiled, batch, captured=True)
    spent = cpu_seconds() - begin
    settings = budgeted(model, batch, arguments.budgets)
    contenders = [Contender("torch.compile", compiled, True)]
    rows = [("", peak, "", f"{spent:.0f}", "")]
    plain = copy.deepcopy(model)
    contenders.append(Contender("plain", plain))
    rows.append(("", step_peak_bytes(plain, batch), "", "", ""))
    for fraction in [None, *arguments.fractions]:
        limit = int(peak * (fraction or 4))
        wanted = 0
        for backend in ("inductor", "fx"):
            kernels = compiling.kernels
            try:
                chk, spent = planned(model, batch, limit, backend)
            except rotor.InfeasibleError as error:
                print(f"{name}: {backend} at {fraction}: needs {error.minimum_bytes} bytes")
                continue
            needed = step_peak_bytes(chk, batch, captured=True)
            wanted = needed if backend == "inductor" else wanted
            contenders.append(Contender(f"rotor, {backend}", chk, True))
            setting = "no limit" if fraction is None else f"limit {fraction:.2f}"
            predicted = f"{chk.plan.predicted_bytes / 1e6:.2f}"
            made = str(compiling.kernels - kernels) if backend == "inductor" else ""
            rows.append((setting, needed, predicted, f"{spent:.0f}", made))
        fitting = [entry for entry in settings if entry[2] <= wanted]
        if fraction is not None and settings and wanted:
            budget, contender, needed = fitting[0] if fitting else min(settings, key=lambda e: e[2])
            contenders.append(Contender("activation_memory_budget", contender, True))
            rows.append((f"budget {budget}", needed, "", "", ""))
    times = interleaved_times(contenders, batch, arguments.rounds)
    for contender, row, taken in zip(contenders, rows, times, strict=True):
        setting, needed, predicted, spent_s, made = row
        print(
            f"| {name} | {contender.name} | {setting} | {needed / 1e6:.2f} | {needed / peak:.3f} "
            f"| {predicted} | {taken / times[0]:.3f} | {spent_s} | {made} |",
            flush=True,
        )


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt", "resnet"])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.7, 0.5, 0.32])
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.6, 0.3])
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
    logging.getLogger("rotor").setLevel(logging.INFO)
    logging.getLogger("rotor").propagate = False
    print(
        "| model | run by | setting | peak MB | of compiled | predicted MB | time of compiled "
        "| CPU s before | kernels |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
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
