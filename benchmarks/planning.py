"""How long planning takes, and how much memory: the solvers on chains of many lengths.

Run as ``python benchmarks/planning.py``. Needs no PyTorch. Times are CPU seconds of the best of a
few runs; MB is the peak resident size of a process that does nothing else, above that of one that
only imports. The budget is a quarter of the way from the least possible to no recomputation.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rotor import Chain, _core
from rotor.algorithms import NoCheckpoint, Persistent

MB = 2**20
SHARE = 0.25


def random_profile(n: int, seed: int = 1) -> Chain:
    """Every size and time drawn alone: the hardest kind for the exact solver."""
    rng = random.Random(seed)
    x = [int(rng.uniform(1, 30) * MB) for _ in range(n + 1)]
    times = [rng.uniform(1e-3, 2e-2) for _ in range(n)]
    return Chain(
        times,
        [2 * t for t in times],
        x,
        [x[i + 1] + int(rng.uniform(0, 90) * MB) for i in range(n)],
        [int(rng.uniform(0, 10) * MB) for _ in range(n)],
        [int(rng.uniform(0, 20) * MB) for _ in range(n)],
        pgrad_bytes=[int(rng.uniform(0, 4) * MB) for _ in range(n)],
    )


def resnet_profile(n: int, seed: int = 1) -> Chain:
    """Bottleneck blocks in four groups: activations halve and parameters quadruple at each."""
    rng = random.Random(seed)
    share = (3, 4, 23, 3) if n < 100 else (3, 24, 36, 3)
    ends = [sum(share[: k + 1]) * n // sum(share) for k in range(4)]
    group = [next((k for k, end in enumerate(ends) if i < end), 3) for i in range(n)]
    x = [24 * MB] + [(24 * MB) >> group[i] for i in range(n)]
    noise = [rng.uniform(0.97, 1.03) for _ in range(n)]
    return Chain(
        [5e-3 * noise[i] for i in range(n)],
        [1e-2 * noise[i] for i in range(n)],
        x,
        [int(x[i + 1] * 3.5) for i in range(n)],
        [x[i + 1] // 2 for i in range(n)],
        [x[i] for i in range(n)],
        forward_nograd_tmp_bytes=[x[i + 1] for i in range(n)],
        pgrad_bytes=[int(0.3 * MB) << (2 * group[i]) for i in range(n)],
    )


def gpt_profile(n: int, seed: int = 1) -> Chain:
    """Attention and feed-forward in turn, one width throughout; times measured with some noise."""
    rng = random.Random(seed)
    width = 25 * MB
    noise = [rng.uniform(0.97, 1.03) for _ in range(n)]
    return Chain(
        [(6e-3 if i % 2 == 0 else 8e-3) * noise[i] for i in range(n)],
        [(13e-3 if i % 2 == 0 else 16e-3) * noise[i] for i in range(n)],
        [width] * (n + 1),
        [width * (7 if i % 2 == 0 else 9) for i in range(n)],
        [width if i % 2 == 0 else 4 * width for i in range(n)],
        [2 * width] * n,
        pgrad_bytes=[(9 if i % 2 == 0 else 18) * MB for i in range(n)],
    )


PROFILES: dict[str, Callable[[int], Chain]] = {
    "random": random_profile,
    "resnet": resnet_profile,
    "gpt": gpt_profile,
}


def everything(chain: Chain) -> int:
    """Bytes that the schedule without recomputation takes."""
    return next(NoCheckpoint().candidates(chain)).peak_bytes


def limit(chain: Chain) -> int:
    """A budget a quarter of the way from the least possible to what everything takes."""
    least = _core.persistent_minimum(chain.core, 0, 1 << 40, None)[0]
    return int(least + SHARE * (everything(chain) - least))


def own_peak_bytes() -> int:
    """The most that was resident in this process; a child's getrusage may be its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of the fastest of a few runs; of one, where a run takes seconds."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
        if best > 2:
            break
    return best


def child(profile: str, n: int, slots: int) -> None:
    """Solve one chain, and print the peak resident size of this process in bytes."""
    chain = PROFILES[profile](n)
    if slots >= 0:
        algorithm = Persistent(slots) if slots > 0 else Persistent(exact_table_bytes=1 << 40)
        algorithm.solve(chain, limit(chain))
    print(own_peak_bytes())


def peak_bytes(profile: str, n: int, slots: int) -> int:
    """Peak resident size of a process that solves one chain; slots 0: exact, -1: imports only."""
    arguments = [sys.executable, __file__, "--child", profile, str(n), str(slots)]
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def exact_table(lengths: list[int]) -> None:
    """One exact solve, and a new budget after it."""
    print("\nExact solver: one solve answers every budget")
    print(
        f"{'profile':8} {'stages':>6} {'points':>7} {'solve s':>9} {'new budget ms':>14} {'MB':>6}"
    )
    for profile, make in PROFILES.items():
        for n in lengths:
            chain = make(n)
            budget = limit(chain)
            algorithm = Persistent(exact_table_bytes=1 << 40)

            def solve(algorithm: Persistent = algorithm, chain: Chain = chain) -> None:
                algorithm._solved = None
                algorithm.curve(chain)

            seconds = cpu_seconds(solve)
            points = len(algorithm.curve(chain))
            again = cpu_seconds(lambda a=algorithm, c=chain, b=budget: a.solve(c, b))
            memory = (peak_bytes(profile, n, 0) - peak_bytes(profile, n, -1)) / 1e6
            print(
                f"{profile:8} {n:6} {points:7} {seconds:9.4f} {1e3 * again:14.3f} {memory:6.0f}",
                flush=True,
            )


def slots_table(lengths: list[int], slots: int) -> None:
    """One dense solve on memory slots, its sequence included."""
    print(f"\n{slots} memory slots, the sequence included")
    print(
        f"{'profile':8} {'stages':>6} {'solve s':>9} {'MB':>6} {'process MB':>11}"
        f" {'over ideal':>11} {'peak/limit':>11}"
    )
    for profile, make in PROFILES.items():
        for n in lengths:
            chain = make(n)
            budget = limit(chain)
            algorithm = Persistent(slots)
            sequence = algorithm.solve(chain, budget)
            seconds = cpu_seconds(lambda a=algorithm, c=chain, b=budget: a.solve(c, b), 3)
            peak = peak_bytes(profile, n, slots)
            memory = (peak - peak_bytes(profile, n, -1)) / 1e6
            print(
                f"{profile:8} {n:6} {seconds:9.4f} {memory:6.0f} {peak / 1e6:11.0f}"
                f" {sequence.makespan / chain.ideal_time - 1:11.2%}"
                f" {sequence.peak_bytes / budget:11.4f}",
                flush=True,
            )


def default_table(lengths: list[int]) -> None:
    """What `Persistent()` does by itself."""
    print("\nPersistent() as it comes: exact where that is cheap")
    print(f"{'profile':8} {'stages':>6} {'solver':>7} {'solve s':>9} {'over ideal':>11}")
    for profile, make in PROFILES.items():
        for n in lengths:
            chain = make(n)
            algorithm = Persistent()
            begin = time.process_time()
            sequence = algorithm.solve(chain, limit(chain))
            seconds = time.process_time() - begin
            solved = algorithm._solved
            solver = "exact" if solved is not None and solved[1] is not None else "slots"
            over = sequence.makespan / chain.ideal_time - 1
            print(f"{profile:8} {n:6} {solver:>7} {seconds:9.4f} {over:11.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exact", type=int, nargs="*", default=[20, 50, 100])
    parser.add_argument("--dense", type=int, nargs="*", default=[50, 100, 200, 340])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--child", nargs=3, metavar=("PROFILE", "STAGES", "SLOTS"))
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child[0], int(arguments.child[1]), int(arguments.child[2]))
        return
    exact_table(arguments.exact)
    slots_table(arguments.dense, arguments.slots)
    default_table(arguments.dense)


if __name__ == "__main__":
    main()
