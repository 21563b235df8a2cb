"""What emitted code costs beyond the work itself, on tensors so small that only it counts.

A chain of linear layers and tanh on 2 x 4 numbers, at several depths: steps of plain PyTorch, of a
graph that recomputes nothing, and of ``torch.compile`` with the same capture and no planning
(``aot_eager``), run in turn. Prints medians of wall time (on CUDA until the step has ended), and
the least-squares split of what the graph takes beyond plain into microseconds an operation and
microseconds a step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings

import numpy as np
import torch
from common import open_device
from torch import nn

import rotor
from rotor.report.text import table


class Net(nn.Module):
    """Linear layers with tanh."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 10, 50, 200])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    device = open_device(arguments.device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
    x = torch.randn(2, 4, device=device)
    rows = [["operations", "plain us", "graph us", "aot_eager us", "beyond plain us"]]
    counts, beyond = [], []
    for depth in arguments.depths:
        plain = Net(depth).to(device)
        graph = rotor.Checkpointable(copy.deepcopy(plain), x, "1GiB", engine="graph", effort="fast")
        compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager", dynamic=False)
        contenders = [plain, graph, compiled]
        samples: list[list[float]] = [[] for _ in contenders]
        for round_ in range(arguments.rounds + 10):
            for model, times in zip(contenders, samples, strict=True):
                start = now()
                model(x).sum().backward()
                if round_ >= 10:
                    times.append((now() - start) * 1e6)
        medians = [statistics.median(times) for times in samples]
        counts.append(len(graph.graph.operations))
        beyond.append(medians[1] - medians[0])
        rows.append(
            [str(counts[-1]), *(f"{m:.0f}" for m in medians), f"{beyond[-1]:.0f}"],
        )
    print(table(rows))
    if len(counts) > 1:
        slope, base = np.polyfit(counts, beyond, 1)
        print(f"beyond plain: {slope:.2f} us an operation and {base:.0f} us a step")


if __name__ == "__main__":
    main()
