"""Plans with a second tier: slow-downs beside recomputation alone and the bound, and speed.

    python benchmarks/tier_plans.py [--effort default] [--bandwidths 1] [--graphs FOLDER]

A bandwidth of k moves what is live between forward and backward once in 1/k of a plain step, in one
direction at a time. "part" is the part of the distance from recomputation alone to the bound that
the plan closes; "known" is the figure of an earlier study.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from planner import GRAPHS, peak_of, recurrent_graph

from rotor.errors import InfeasibleError
from rotor.graph import Graph, Link, offload_bound, plan, simulate

SHARES = (60, 40, 25)
NAMES = ("gpt6", "r50", "unet", "gpt24")
KNOWN = {
    (1.0, "gpt6"): (1.007, 1.043, 1.093),
    (1.0, "r50"): (1.006, 1.033, 1.084),
    (1.0, "unet"): (1.005, 1.034, 1.103),
    (1.0, "gpt24"): (1.011, 1.073, math.nan),
    (0.3, "gpt6"): (1.022, 1.115, 1.178),
    (0.3, "r50"): (1.037, 1.084, 1.152),
    (0.3, "unet"): (1.041, 1.076, 1.232),
    (0.3, "gpt24"): (1.053, 1.150, math.nan),
    (3.0, "gpt6"): (1.000, 1.000, 1.000),
    (3.0, "r50"): (1.000, 1.000, 1.004),
    (3.0, "unet"): (1.000, 1.000, 1.046),
    (3.0, "gpt24"): (1.000, 1.000, math.nan),
}


def link_of(graph: Graph, bandwidth: float) -> Link:
    """The link that moves the activations once in 1 / bandwidth of a plain step."""
    base = simulate(graph, range(len(graph)))
    boundary = next(k for k, op in enumerate(graph.operations) if op.phase == "backward")
    rate = float(base.timeline().before_bytes[boundary]) * bandwidth / base.makespan
    return Link(rate, rate)


def quality_table(folder: Path, bandwidth: float, effort: str | int) -> None:
    print(f"bandwidth {bandwidth:g}, effort {effort}: time / plain step")
    heads = ("graph", "budget", "recompute", "joint", "known", "bound", "part")
    print(" ".join(f"{head:>9}" for head in (*heads, "link busy", "seconds")))
    for name in NAMES:
        path = folder / f"{name}.g"
        if not path.is_file():
            print(f"{name}: {path} is not here")
            continue
        graph = Graph.load(path)
        link = link_of(graph, bandwidth)
        for share, known in zip(SHARES, KNOWN.get((bandwidth, name), (math.nan,) * 3), strict=True):
            budget = peak_of(graph) * share // 100
            try:
                alone = plan(graph, budget, effort=effort).slowdown
                begin = time.perf_counter()
                found = plan(graph, budget, effort=effort, link=link)
            except InfeasibleError:
                print(f"{name:>9} {share:7} % infeasible")
                continue
            took = time.perf_counter() - begin
            bound = offload_bound(graph, budget, link) / graph.total_time
            part = (alone - found.slowdown) / (alone - bound) if alone > bound else 1.0
            print(
                f"{name:>9} {share:7} % {alone:9.4f} {found.slowdown:9.4f} {known:9.3f} "
                f"{bound:9.4f} {part:9.2f} {found.link_time / found.makespan:9.2f} {took:9.1f}",
                flush=True,
            )


def speed_table(sizes: list[int]) -> None:
    print("\none budget, effort='fast', bandwidth 1")
    print(f"{'operations':>10} {'budget':>7} {'seconds':>8} {'alone':>8} {'joint':>8}")
    for size in sizes:
        graph = recurrent_graph(size)
        link = link_of(graph, 1.0)
        for share in (60, 30):
            budget = peak_of(graph) * share // 100
            try:
                alone = plan(graph, budget, effort="fast").slowdown
                begin = time.perf_counter()
                found = plan(graph, budget, effort="fast", link=link)
            except InfeasibleError:
                print(f"{len(graph):10} {share:5} % infeasible")
                continue
            took = time.perf_counter() - begin
            print(
                f"{len(graph):10} {share:5} % {took:8.2f} {alone:8.4f} {found.slowdown:8.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, default=GRAPHS)
    parser.add_argument("--effort", default="default")
    parser.add_argument("--bandwidths", type=float, nargs="*", default=[1.0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 5000, 20_000])
    arguments = parser.parse_args()
    effort = int(arguments.effort) if arguments.effort.isdigit() else arguments.effort
    for bandwidth in arguments.bandwidths:
        quality_table(arguments.graphs, bandwidth, effort)
    speed_table(arguments.sizes)


if __name__ == "__main__":
    main()
