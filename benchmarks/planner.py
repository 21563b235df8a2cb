"""The planner of graphs: quality on the shared graphs, speed on generated ones.

    python benchmarks/planner.py [--seconds 5] [--graphs ../shared/data/graphs]

Slow-downs are against every operation once, budgets in per cent of the peak without recomputation,
and the third column is the distance to the best figure of an earlier study.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from rotor.errors import InfeasibleError
from rotor.graph import Graph, Operation, curve, lower_bound, plan, simulate

GRAPHS = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "graphs"
BEST_KNOWN = {
    "gpt6": {70: 1.0174, 50: 1.1014, 40: 1.1477, 30: 1.1913, 20: 1.502},
    "gpt24": {70: 1.0402, 50: 1.1381, 40: 1.1894},
    "r50": {70: 1.0334, 50: 1.0869, 40: 1.1183, 30: 1.1617, 20: 1.278},
    "unet": {70: 1.0288, 50: 1.0574, 40: 1.0861, 30: 1.190},
    "dn121": {70: 1.0706, 50: 1.1294, 40: 1.1583, 30: 1.198, 20: 1.239},
}
MOST_EFFORT = 1_000_000


def peak_of(graph: Graph) -> int:
    return simulate(graph, range(len(graph))).peak_bytes


def recurrent_graph(count: int, seed: int = 0) -> Graph:
    """About `count` operations of an LSTM: 20 for each step, forward and backward."""
    draw = random.Random(seed)
    sizes: list[int] = []
    pinned: list[bool] = []
    operations: list[Operation] = []
    phase = "forward"

    def add(name: str, cost: int, size: int, *inputs: int, stays: bool = False) -> int:
        sizes.append(size)
        pinned.append(stays)
        operations.append(Operation(name, cost, inputs, (len(sizes) - 1,), 0, phase))
        return len(sizes) - 1

    hidden, cell = add("h", 1000, 1 << 16), add("c", 1000, 1 << 16)
    saved = []
    for _ in range(count // 20):
        product = add("mm", 20_000 + draw.randrange(5000), 1 << 18, hidden)
        gates = [add("gate", 2000, 1 << 16, product) for _ in range(4)]
        new_cell = add("cell", 3000, 1 << 16, cell, *gates[:3])
        squashed = add("tanh", 2000, 1 << 16, new_cell)
        saved.append((hidden, cell, product, gates, squashed))
        hidden, cell = add("mul", 2000, 1 << 16, squashed, gates[3]), new_cell
    phase = "loss"
    loss = add("loss", 1000, 4, hidden)
    phase = "backward"
    d_hidden, d_cell = add("dh", 1000, 1 << 16, loss), add("dc", 1000, 1 << 16, loss)
    total = -1
    for hidden, cell, product, gates, squashed in reversed(saved):
        d_out = add("do", 2000, 1 << 16, d_hidden, squashed, gates[3])
        d_squashed = add("dtanh", 2000, 1 << 16, d_hidden, gates[3])
        d_new = add("dcell", 2000, 1 << 16, d_squashed, squashed, d_cell)
        d_gates = [add("dgate", 2000, 1 << 16, d_new, gate, cell) for gate in gates[:3]]
        d_product = add("cat", 3000, 1 << 18, d_out, *d_gates, product)
        d_cell = add("dc", 2000, 1 << 16, d_new, gates[0])
        d_hidden = add("dh", 20_000, 1 << 16, d_product)
        weight = add("dw", 20_000, 1 << 20, d_product, hidden)
        total = weight if total < 0 else add("add", 5000, 1 << 20, total, weight)
    add("gradient", 1000, 1 << 20, total, stays=True)
    return Graph(sizes, pinned, operations)


def quality_table(folder: Path, seconds: float) -> None:
    """Slow-downs at five budgets, with some seconds each."""
    print(f"slow-down with {seconds:g} s each, and against the best known")
    for name, known in BEST_KNOWN.items():
        path = folder / f"{name}.g"
        if not path.is_file():
            print(f"{name}: {path} is not here")
            continue
        graph = Graph.load(path)
        peak = peak_of(graph)
        print(
            f"{name} ({len(graph)} operations), no program below "
            f"{lower_bound(graph) / peak:.1%} of the peak"
        )
        for share in (70, 50, 40, 30, 20):
            try:
                found = plan(graph, peak * share // 100, effort=MOST_EFFORT, time_limit=seconds)
            except InfeasibleError as error:
                print(f"  {share:3} %  infeasible, least found {error.minimum_bytes / peak:.1%}")
                continue
            best = known.get(share)
            against = "" if best is None else f"{found.slowdown / best - 1:+8.2%}"
            print(f"  {share:3} %  {found.slowdown:8.4f} {against}", flush=True)


def speed_table(sizes: list[int]) -> None:
    """Seconds of `effort="fast"` for one budget."""
    print("\none budget, effort='fast'")
    print(f"{'operations':>10} {'budget':>7} {'seconds':>8} {'slow-down':>10}")
    for size in sizes:
        graph = recurrent_graph(size)
        peak = peak_of(graph)
        for share in (70, 30, 10):
            begin = time.perf_counter()
            try:
                answer = f"{plan(graph, peak * share // 100, effort='fast').slowdown:10.4f}"
            except InfeasibleError:
                answer = "infeasible"
            took = time.perf_counter() - begin
            print(f"{len(graph):10} {share:5} % {took:8.2f} {answer}", flush=True)


def curve_table(folder: Path, sizes: list[int]) -> None:
    """Seconds of a curve of 40 budgets."""
    print("\ncurves of 40 budgets, both ways")
    print(f"{'graph':>16} {'operations':>10} {'seconds':>8} {'points':>7} {'least/peak':>11}")
    graphs = {f"recurrent {size}": recurrent_graph(size) for size in sizes}
    for name in BEST_KNOWN:
        if (folder / f"{name}.g").is_file():
            graphs[name] = Graph.load(folder / f"{name}.g")
    for name, graph in graphs.items():
        begin = time.perf_counter()
        found = curve(graph)
        took = time.perf_counter() - begin
        least = found.minimum_bytes / peak_of(graph)
        print(f"{name:>16} {len(graph):10} {took:8.1f} {len(found):7} {least:11.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--graphs", type=Path, default=GRAPHS)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 20_000])
    parser.add_argument("--curve-sizes", type=int, nargs="*", default=[1400, 5000])
    arguments = parser.parse_args()
    quality_table(arguments.graphs, arguments.seconds)
    speed_table(arguments.sizes)
    curve_table(arguments.graphs, arguments.curve_sizes)


if __name__ == "__main__":
    main()
