"""What the executor costs beyond the work itself, on stages so small that only it counts.

Prints microseconds of CPU time a stage, medians of rounds run in turn: a plain step, one forward
without a graph, a planned step that recomputes nothing, and one that recomputes every stage once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from rotor.algorithms.sequence import Sequence
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.run import run_chain
from rotor.engines.chain.stages import find_stages
from rotor.report.text import table
from rotor.timing import Clock


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n = arguments.stages
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)])
    stages = find_stages(model)
    x, gradient = torch.randn(8, 8), torch.ones(8, 8)
    backwards = [("B", i) for i in range(n - 1, -1, -1)]
    kept = Schedule(Sequence([("Fe", i) for i in range(n)] + [("L", n)] + backwards), n)
    each = [op for i in range(n - 1, -1, -1) for op in (("Fe", i), ("B", i))]
    once = Schedule(Sequence([("Fck", i) for i in range(n)] + [("L", n)] + each), n)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    contenders: list[Callable[[], object]] = [
        lambda: model(x).backward(gradient),
        forward,
        lambda: run_chain(stages, kept, x).backward(gradient),
        lambda: run_chain(stages, once, x).backward(gradient),
    ]
    clock = Clock("cpu")
    samples: list[list[float]] = [[] for _ in contenders]
    for round_ in range(arguments.rounds + 20):
        for call, times in zip(contenders, samples, strict=True):
            clock.start()
            call()
            if round_ >= 20:
                times.append(clock.stop() / n / 1e3)
    plain, one, none, all_ = (statistics.median(times) for times in samples)
    print(
        table(
            [
                ["us a stage", "median"],
                ["plain step", f"{plain:.1f}"],
                ["one forward without a graph", f"{one:.1f}"],
                ["kept: beyond plain", f"{none - plain:.1f}"],
                ["recomputed: beyond plain and the forward", f"{all_ - plain - one:.1f}"],
                ["the same, over a plain step", f"{(all_ - plain - one) / plain:.2f}"],
            ]
        )
    )


if __name__ == "__main__":
    main()
