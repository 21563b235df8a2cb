"""Proves the best programs of small graphs with HiGHS and records them for the tests.

    python benchmarks/prove_graphs.py tests/data/graph_optima.json

Takes some minutes. The tests read the file; nothing else needs SciPy's solver.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from random_graphs import training_graph

from rotor.errors import InfeasibleError
from rotor.graph import Graph, checkmate, lower_bound, simulate

WANTED = 32
SECONDS = 40.0


def case(seed: int) -> dict[str, object] | None:
    """A graph of 18 to 26 operations, a budget, and the proven optimum; None without a proof."""
    rich = seed % 2 == 1
    made = training_graph(seed, 7 + seed % 3 if rich else 10 + seed % 3, plain=not rich)
    graph = Graph._parse(made.to_g(), f"seed {seed}")
    peak = simulate(graph, range(len(graph))).peak_bytes
    share = (0.5, 0.6, 0.7, 0.8)[seed % 4]
    budget = max(lower_bound(graph), int(share * peak))
    begin = time.monotonic()
    try:
        proof = checkmate(graph, budget, time_limit=SECONDS)
    except (InfeasibleError, TimeoutError) as error:
        print(f"seed {seed}: {error}", flush=True)
        return None
    took = time.monotonic() - begin
    print(
        f"seed {seed}: {len(graph)} operations, slow-down {proof.program.slowdown:.4f}, gap "
        f"{proof.gap:.2%}, {took:.1f} s",
        flush=True,
    )
    if proof.gap > 0 or proof.program.slowdown == 1.0:
        return None
    return {
        "seed": seed,
        "budget_bytes": budget,
        "optimum_ns": proof.program.time_ns,
        "graph": graph.to_g(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--wanted", type=int, default=WANTED)
    arguments = parser.parse_args()
    cases: list[dict[str, object]] = []
    seed = 0
    while len(cases) < arguments.wanted:
        found = case(seed)
        cases += [] if found is None else [found]
        seed += 1
        arguments.path.write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
