"""Counts that must not grow unseen: each is the same on every machine, and compared with a file.

    python benchmarks/regressions.py            # what has changed; fails where something got worse
    python benchmarks/regressions.py --update   # write the file anew

No clock is read. Solvers: slow-down, operations and points of the exact frontier, on chains of
fixed costs. Planner: slow-down and runs at its fast effort. Simulator: evictions, operations run
again, evaluations of the heuristic, accesses. Capture: operations, storages and bytes of a fixed
model on an imagined machine. "same" must stay as it is; "less" may fall, and may grow by so much.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rotor import Chain, InfeasibleError, algorithms, simrd
from rotor.graph import Graph, Operation, Storage, plan, simulate
from rotor.simrd import networks

FILE = Path(__file__).with_name("regressions.json")
FORMAT, VERSION = "rotor.regressions", 1
ROOM = {"less": 0.02, "same": 0.0}
SOLVERS = ("persistent", "floating", "chen_sqrt", "griewank_heterogeneous")
HEURISTICS = ("DTR", "DTREqClass", "DTRLocal", "LRU", "LargestStorage", "MSPS")


class Count(NamedTuple):
    """One figure and whether less of it is better."""

    value: float
    kind: str


def chain(seed: int, n: int) -> Chain:
    """A chain with sizes and times as uneven as those of networks."""
    draw = random.Random(seed)
    x = [draw.randint(1_000, 30_000) for _ in range(n + 1)]
    return Chain(
        forward_time=[draw.randint(1, 20) / 1000 for _ in range(n)],
        backward_time=[draw.randint(2, 40) / 1000 for _ in range(n)],
        x_bytes=x,
        xbar_bytes=[x[i + 1] + draw.randint(0, 90_000) for i in range(n)],
        forward_tmp_bytes=[draw.randint(0, 10_000) for _ in range(n)],
        backward_tmp_bytes=[draw.randint(0, 10_000) for _ in range(n)],
    )


def training_graph(seed: int, layers: int) -> Graph:
    """A forward with skips, a loss, and the backward that reads what it made."""
    draw = random.Random(seed)
    storages: list[Storage] = []
    operations: list[Operation] = []

    def add(phase: str, inputs: list[int], pinned: bool = False) -> int:
        storages.append(Storage(1000 * draw.randint(1, 2 if pinned else 50), pinned))
        made = len(storages) - 1
        cost, workspace = 1000 * draw.randint(1, 20), draw.choice([0, 0, 7000])
        read = tuple(dict.fromkeys(inputs))
        name = f"{phase}{made}"
        operations.append(Operation(name, cost, read, (made,), workspace, phase))
        return made

    kept = [add("forward", [])]
    for k in range(1, layers):
        skip = [draw.choice(kept)] if k > 2 and draw.random() < 0.3 else []
        kept.append(add("forward", [kept[-1], *skip]))
    gradient = add("loss", [kept[-1]])
    for k in reversed(range(1, layers)):
        add("backward", [gradient, kept[k - 1]], pinned=True)
        gradient = add("backward", [gradient, kept[k]])
    return Graph(storages, None, operations)


def solvers() -> Iterator[tuple[str, Count]]:
    """Schedules of chains, at budgets between the least and no recomputation."""
    for n in (8, 20):
        given = chain(n, n)
        everything = algorithms.NoCheckpoint().curve(given).minimum_bytes
        curve = algorithms.Persistent().curve(given)
        yield f"chain {n}, persistent, points", Count(len(curve.bytes), "same")
        yield f"chain {n}, persistent, least bytes", Count(curve.minimum_bytes, "same")
        for share in (0.35, 0.6):
            for name in SOLVERS:
                try:
                    found = algorithms.get(name)().solve(given, int(share * everything))
                except InfeasibleError as error:
                    yield f"chain {n}, {name}, {share}, least", Count(error.minimum_bytes, "less")
                    continue
                slower = round(found.makespan / given.ideal_time, 9)
                yield f"chain {n}, {name}, {share}, slow-down", Count(slower, "less")
                yield f"chain {n}, {name}, {share}, operations", Count(len(found), "same")


def planner() -> Iterator[tuple[str, Count]]:
    """Programs of graphs at the planner's fast effort."""
    for layers in (40, 300):
        graph = training_graph(layers, layers)
        most = simulate(graph, range(len(graph))).peak_bytes
        yield f"graph {layers}, peak without recomputation", Count(most, "same")
        for share in (0.5, 0.8):
            found = plan(graph, int(most * share), effort="fast", seed=1)
            assert found.peak_bytes <= most * share
            yield f"graph {layers}, {share}, slow-down", Count(round(found.slowdown, 9), "less")
            yield f"graph {layers}, {share}, runs", Count(len(found), "less")


def simulator() -> Iterator[tuple[str, Count]]:
    """Decisions and effort of the simulator."""
    for name, log, ratio in (
        ("linear", networks.linear(200), 0.2),
        ("random", networks.random_program(400, seed=7), 0.6),
    ):
        for heuristic in HEURISTICS:
            found = simrd.simulate(log, heuristic, ratio=ratio, count_accesses=True)
            title = f"{name}, {heuristic}"
            yield f"{title}, evictions", Count(found.n_evict, "same")
            yield f"{title}, run again", Count(found.n_remat, "same")
            yield f"{title}, evaluations", Count(found.n_eval, "less")
            yield f"{title}, accesses", Count(found.n_access or 0, "less")


def captured() -> Iterator[tuple[str, Count]]:
    """A captured model on an imagined machine; needs PyTorch, whose version counts too."""
    import torch

    import rotor
    from rotor import graph

    machine = graph.Machine("imagined", 1e12, 1e11, 1e-6)
    model = rotor.models.gpt.gpt(vocab_size=50, context_length=16, layers=2, heads=2, width=32)
    step = graph.build(model, torch.zeros(2, 16, dtype=torch.int64), profile=machine)
    version = ".".join(torch.__version__.split(".")[:2])
    once = simulate(step, range(len(step)))
    found = plan(step, once.peak_bytes * 8 // 10, effort="fast", seed=1)
    title = f"gpt, PyTorch {version}"
    yield f"{title}, operations", Count(len(step), "less")
    yield f"{title}, bytes of storages", Count(sum(s.bytes for s in step.storages), "less")
    yield f"{title}, peak", Count(once.peak_bytes, "less")
    yield f"{title}, slow-down", Count(round(found.slowdown, 9), "less")


def counts() -> dict[str, Count]:
    """All of them, by name."""
    parts = (solvers, planner, simulator, captured)
    return {name: count for part in parts for name, count in part()}


def read(path: Path = FILE) -> dict[str, Count]:
    """Those of the file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} holds {data.get('format')!r}, version {data.get('version')!r}")
    return {name: Count(value, kind) for name, (value, kind) in data["counts"].items()}


def write(found: dict[str, Count], path: Path = FILE) -> None:
    """Write the file; figures of other versions of PyTorch stay."""
    others = read(path) if path.exists() else {}
    kept = {name: count for name, count in others.items() if ", PyTorch " in name}
    lines = [f"  {json.dumps(n)}: {json.dumps(list(c))}" for n, c in (kept | found).items()]
    head = f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "counts": {{\n'
    path.write_text(head + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")


def compare(known: dict[str, Count], found: dict[str, Count]) -> tuple[list[str], list[str]]:
    """What got worse, and what else is different, as text."""
    worse, other = [], []
    for name in sorted(set(known) | set(found)):
        before, now = known.get(name), found.get(name)
        if before is None or now is None:
            if ", PyTorch " in name:
                other.append(f"{name}: only {'here' if before is None else 'in the file'}")
            else:
                worse.append(f"{name}: {'not in the file' if before is None else 'is gone'}")
            continue
        if before.value == now.value:
            continue
        change = now.value / before.value - 1 if before.value else float("inf")
        text = f"{name}: {before.value} before, {now.value} now ({change:+.1%})"
        is_worse = now.kind == "same" or change > ROOM[now.kind]
        (worse if is_worse else other).append(text)
    return worse, other


def main() -> None:
    """Compare, or write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name} anew")
    arguments = parser.parse_args()
    found = counts()
    if arguments.update:
        worse, other = compare(read(), found) if FILE.exists() else ([], [])
        write(found)
    else:
        worse, other = compare(read(), found)
    print(f"{len(found)} counts, {len(worse)} worse, {len(other)} otherwise different")
    for title, lines in (("worse", worse), ("different", other)):
        for line in lines:
            print(f"{title}: {line}")
    if worse and not arguments.update:
        sys.exit(1)


if __name__ == "__main__":
    main()
