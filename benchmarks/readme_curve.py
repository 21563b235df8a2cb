"""Draw the README's picture, and measure its table: a GPT-2 within less memory, by four methods.

The model is Hugging Face's GPT-2 of 24 narrow layers. The curve is rotor's, as planned; the points
are steps as they ran: plain, with Hugging Face's ``gradient_checkpointing_enable()``, with
``torch.utils.checkpoint`` around groups of blocks, and with rotor within the same bytes and within
somewhat more. Memory is exact; times are medians of CPU time of steps run in turn. Writes
``docs/curve.svg``.

    OMP_NUM_THREADS=1 python benchmarks/readme_curve.py [--layers 24] [--out docs]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import keep_freed_memory
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotor
from rotor.report.curves import Point, write_curve
from rotor.report.text import table
from rotor.timing import Clock
from rotor.units import format_bytes, format_seconds

DOCS = Path(__file__).resolve().parents[1] / "docs"
CPU = torch.device("cpu")
GROUPS = (2, 4, 6)
MORE = (1.6, 2.5)
Step = Callable[[], torch.Tensor]


class Grouped(nn.Module):
    """A GPT-2 whose blocks run under ``torch.utils.checkpoint``, some of them at a time."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the next token."""
        inner = self.model.transformer
        hidden = inner.wte(ids) + inner.wpe(torch.arange(ids.shape[1]))
        for start in range(0, len(inner.h), self.size):
            blocks = inner.h[start : start + self.size]
            hidden = checkpoint(
                _run, blocks, inner.drop(hidden) if not start else hidden, use_reentrant=False
            )
        logits = self.model.lm_head(inner.ln_f(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _run(blocks: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        found = block(hidden)
        hidden = found if isinstance(found, torch.Tensor) else found[0]
    return hidden


@dataclass
class Method:
    """A way to train, with its measured peak and time."""

    name: str
    step: Step
    model: nn.Module
    bytes: int = 0
    seconds: float = 0.0


def gpt2(layers: int, width: int, length: int) -> nn.Module:
    """Hugging Face's GPT-2 with random weights, without dropout."""
    # Transformers imports torchvision, which may be built for another PyTorch.
    sys.path.append(str(DOCS.parent / "tests"))
    from torchvision_standins import import_torchvision

    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    settings = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=1000,
        n_positions=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(settings).train()


def run_step(method: Method) -> torch.Tensor:
    """Forward, loss and backward with fresh gradients; returns the loss."""
    method.model.zero_grad(set_to_none=True)
    loss = method.step()
    loss.backward()
    return loss.detach()


def measure(methods: list[Method], rounds: int) -> None:
    """Set the peaks and the median times of all methods; steps are run in turn."""
    clock = Clock(CPU)
    for method in methods:
        for _ in range(3):
            run_step(method)
        method.model.zero_grad(set_to_none=True)
        with rotor.memory.meter(CPU) as meter:
            method.step().backward()
        method.bytes = int(meter.peak_bytes)
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            clock.start()
            run_step(method)
            times[method.name].append(clock.stop() / 1e9)
    for method in methods:
        method.seconds = statistics.median(times[method.name])


def main() -> None:
    """Measure, draw, and print the figures that the README quotes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the picture")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()
    start = gpt2(arguments.layers, arguments.width, arguments.length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (arguments.batch, arguments.length), generator=generator)

    def whole(name: str, model: nn.Module) -> Method:
        return Method(name, lambda: model(input_ids=ids, labels=ids).loss, model)

    plain = whole("plain PyTorch", copy.deepcopy(start))
    eager = whole("gradient checkpointing", copy.deepcopy(start))
    eager.model.gradient_checkpointing_enable()
    groups = []
    for size in GROUPS:
        model = Grouped(copy.deepcopy(start), size)
        step: Step = lambda model=model: model(ids)  # noqa: E731
        groups.append(Method(f"checkpoint, {size} blocks", step, model))
    losses = [float(run_step(method)) for method in (plain, eager, *groups)]
    if max(losses) - min(losses) > 1e-4:
        raise SystemExit(f"the methods do not compute the same loss: {losses}")
    measure([plain, eager], 1)
    limits = {f"rotor, {more:g} x these bytes": int(eager.bytes * more) for more in (1, *MORE)}
    rotors = []
    for name, limit in limits.items():
        model = rotor.Checkpointable(
            copy.deepcopy(start), mem_limit=limit, planning="before", verbosity=-1
        )
        rotors.append(whole(name, model))
    methods = [plain, eager, *groups, *rotors]
    measure(methods, arguments.rounds)
    rows = [["", "memory of a step", "time of a step", "time over plain"]]
    for method in methods:
        slower = f"{method.seconds / plain.seconds:.2f}"
        rows.append(
            [method.name, format_bytes(method.bytes), format_seconds(method.seconds), slower]
        )
    print(table(rows))
    for limit, method in zip(limits.values(), rotors, strict=True):
        if method.bytes > limit:
            raise SystemExit(f"{method.name} needed {method.bytes} bytes")
    planned = rotor.Checkpointable(copy.deepcopy(start), verbosity=-1)
    planned.measure(input_ids=ids, labels=ids)
    curve = planned.curve()
    print()
    for percent in (80, 60, 40, 20):
        slower = curve.at(plain.bytes * percent // 100) / curve.seconds[-1]
        print(f"{percent} % of the memory: {slower:.2f} times the step")
    least = curve.minimum_bytes
    print(f"least: {least / plain.bytes:.0%} of {format_bytes(plain.bytes)}")
    # Planned times and measured ones have clocks of their own: each is against its plain step.
    clock = float(curve.seconds[-1]) / plain.seconds
    unit = Point("plain PyTorch", plain.bytes, float(curve.seconds[-1]))
    points = [
        Point("Hugging Face's gradient checkpointing", eager.bytes, eager.seconds * clock),
        *(
            Point(
                f"torch.utils.checkpoint, {size} blocks at a time", one.bytes, one.seconds * clock
            )
            for size, one in zip(GROUPS, groups, strict=True)
        ),
    ]
    write_curve(curve, arguments.out / "curve.svg", plain=unit, points=points)


if __name__ == "__main__":
    main()
