"""Writes the logs that come with the package: one step of small models, forward and backward.

    python benchmarks/simulator_logs.py [--out rotor/experiments/logs] [--runs 15]

Every operation's time is the median of the runs. Names and sizes are those of the program, so that
another machine gives the same logs but for the times.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rotor.models import workloads
from torch import nn

from rotor import dtr, simrd

FOLDER = Path(__file__).resolve().parents[1] / "rotor" / "experiments" / "logs"

Step = Callable[[], object]


def _workload(name: str, **params: Any) -> Callable[[], Step]:
    def make() -> Step:
        training = workloads.build(name, **params)
        training.optimizers = []
        batch = training.make_batch(0)
        return lambda: training.step(batch)

    return make


def _perceptron() -> Step:
    """Make the step of four layers, small enough for Checkmate's integer program."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    return lambda: model(x).square().mean().backward()


MODELS: dict[str, tuple[str, Callable[[], Step]]] = {
    "perceptron": ("Perceptron of 4 layers", _perceptron),
    "resnet32": ("ResNet-32", _workload("resnet32", batch_size=32, height=32, width=32)),
    "densenet100": ("DenseNet-100", _workload("densenet100", batch_size=8, height=32, width=32)),
    "unet": ("U-Net", _workload("unet", batch_size=2, height=96, width=96, channels=8)),
    "lstm": ("LSTM", _workload("lstm", batch_size=128, input_size=48, in_dim=64, mem_dim=64)),
    "treelstm": (
        "TreeLSTM",
        _workload("treelstm", batch_size=64, depth=5, in_dim=32, mem_dim=48),
    ),
    "transformer": (
        "Transformer",
        _workload("transformer", batch_size=8, input_seq_length=64, width=64, layers=4),
    ),
    "unroll_gan": ("Unrolled GAN", _workload("unroll_gan", batch_size=256, g_hid=48, d_hid=48)),
}
"""Of each log, its title and what makes the step."""


def record(make: Callable[[], Step]) -> list[dict[str, Any]]:
    """Return the lines of a log of one step, without the optimizers'."""
    step = make()
    torch.manual_seed(0)
    file = io.BytesIO()
    with dtr.budget(None, record_log=file):
        step()
    return [json.loads(line) for line in file.getvalue().splitlines()]


def with_medians(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the lines of the runs, each time the median; they may not differ in anything else."""
    lines = []
    for same in zip(*runs, strict=True):
        line = dict(same[0])
        if "TIME" in line:
            line["TIME"] = str(int(statistics.median(int(other["TIME"]) for other in same)))
        if any({**other, "TIME": 0} != {**line, "TIME": 0} for other in same):
            raise RuntimeError(f"runs differ: {same}")
        lines.append(line)
    return lines


def text(lines: list[dict[str, Any]]) -> bytes:
    """Return a log as the prototype writes it."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def main() -> None:
    """Write the logs and their list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    listed = []
    for name in arguments.models:
        title, make = MODELS[name]
        record(make)
        data = text(with_medians([record(make) for _ in range(arguments.runs)]))
        path = arguments.out / f"{name}.log.gz"
        path.write_bytes(gzip.compress(data, 9, mtime=0))
        entry = {"name": name, "title": title, "desc": "one step", "log": path.name}
        listed.append(entry | {"has_start": False})
        log = simrd.parse(path)
        base = log.baseline
        print(
            f"{name}: {log.operation_count} operations, {base.compute_ns / 1e6:.1f} ms, "
            f"{base.max_memory:,} bytes ({base.const_memory} constant), file {path.stat().st_size}"
        )
    text_of_list = json.dumps({"models": listed}, indent=1) + "\n"
    (arguments.out / "manifest.json").write_text(text_of_list, encoding="utf-8")


if __name__ == "__main__":
    main()
