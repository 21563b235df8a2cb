"""How fast logs are read and replayed, and how much memory that takes.

Run as ``python benchmarks/simulator.py [DIRECTORY]``, with the published logs in the directory.
Needs no PyTorch. Times are CPU seconds of the best of a few runs. The published figures are those
of the published simulator in Python, recorded on another machine; the plain-Python oracle of the
tests runs here, in turn with ours.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planning import cpu_seconds, own_peak_bytes

from rotor.simrd import Log, Result, networks, parse, simulate

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_DIRECTORY = ROOT.parent / "shared" / "data" / "simrd_logs"
PUBLISHED = {"DTREqClass": "22,000", "DTR": "2,500 to 5,600"}
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
POOL = 64
RATIO = 0.5


def parse_table(paths: list[Path], commands: int) -> None:
    """Lines a second, of published logs and of a long one."""
    print("\nReading a log")
    print(f"{'log':24} {'lines':>9} {'MB':>6} {'s':>9} {'million lines/s':>16} {'MB/s':>6}")
    with tempfile.TemporaryDirectory() as directory:
        long = Path(directory) / "generated.log"
        networks.random_program(commands, pool=POOL, path=long)
        for path in [*paths, long]:
            log = parse(path)
            seconds = cpu_seconds(lambda path=path: parse(path), 7)
            size = path.stat().st_size / 1e6
            print(
                f"{path.name.split('-')[0][:24]:24} {log.line_count:9,} {size:6.1f} {seconds:9.4f}"
                f" {log.line_count / seconds / 1e6:16.2f} {size / seconds:6.0f}",
                flush=True,
            )


def load_oracle() -> Any:
    """The plain-Python simulator of the tests, or None outside a checkout."""
    if not (ROOT / "tests" / "oracles" / "simrd.py").is_file():
        return None
    sys.path.insert(0, str(ROOT / "tests"))
    from oracles import simrd

    return simrd


def oracle_seconds(oracle: Any, path: Path, heuristic: str, budget: int) -> tuple[float, Any]:
    """CPU seconds of one replay by the oracle, and its figures."""
    program = oracle.read_log(path)
    begin = time.process_time()
    result = oracle.simulate(program, heuristic, budget)
    return time.process_time() - begin, result


def replay_table(path: Path, with_oracle: bool) -> None:
    """Commands a second at half of the baseline's memory."""
    log = parse(path)
    oracle = load_oracle() if with_oracle else None
    print(f"\nReplaying {path.name.split('-')[0]} at {RATIO} ({log.command_count:,} commands)")
    print(
        f"{'heuristic':12} {'s':>8} {'commands/s':>12} {'published':>16} {'oracle s':>9}"
        f" {'oracle commands/s':>18} {'ours/oracle':>12}"
    )
    for heuristic, published in PUBLISHED.items():
        found = simulate(log, heuristic, ratio=RATIO)
        seconds = cpu_seconds(lambda h=heuristic: simulate(log, h, ratio=RATIO), 7)
        line = f"{heuristic:12} {seconds:8.4f} {log.command_count / seconds:12,.0f} {published:>16}"
        if oracle is not None:
            assert found.budget is not None
            theirs, outcome = oracle_seconds(oracle, path, heuristic, found.budget)
            again = cpu_seconds(lambda h=heuristic: simulate(log, h, ratio=RATIO), 7)
            if (outcome.clock, outcome.n_evict) != (found.clock, found.n_evict):
                raise SystemExit(f"the oracle gives {outcome}, we give {found}")
            best = min(seconds, again)
            line += f" {theirs:9.2f} {log.command_count / theirs:18,.0f} {theirs / best:11,.0f}x"
        print(line, flush=True)


def run_generated(commands: int, heuristic: str) -> tuple[Log, Result, float, float]:
    """A generated program: the log, the result, seconds to read and to replay it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "generated.log"
        networks.random_program(commands, pool=POOL, path=path)
        begin = time.process_time()
        log = parse(path)
        reading = time.process_time() - begin

    def run() -> Result:
        return simulate(log, heuristic, ratio=RATIO, overhead_limit=math.inf)

    result = run()
    return log, result, reading, cpu_seconds(run, 3)


def child(commands: int, heuristic: str) -> None:
    """Read and replay, and print bytes: the log's, the replay's, the process' peak."""
    if commands:
        log, result, _, _ = run_generated(commands, heuristic)
        print(log.footprint_bytes, result.memory_bytes, own_peak_bytes())
    else:
        print(0, 0, own_peak_bytes())


def in_child(commands: int, heuristic: str) -> list[int]:
    """What `child` prints, in a process that does nothing else."""
    arguments = [sys.executable, __file__, "--child", str(commands), heuristic]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def scaling_table(sizes: list[int]) -> None:
    """Time and memory for each command of longer and longer programs, in one pool."""
    print(f"\nGenerated programs, about {POOL} storages live, at {RATIO} of their memory")
    print(
        f"{'heuristic':12} {'commands':>10} {'evicted':>9} {'read us/cmd':>12}"
        f" {'replay us/cmd':>14} {'log B/cmd':>10} {'replay B/cmd':>13} {'resident B/cmd':>15}"
    )
    idle = in_child(0, "LRU")[2]
    for heuristic in ("DTREqClass", "DTR"):
        for size in sizes:
            log, result, reading, replaying = run_generated(size, heuristic)
            count = log.command_count
            kept, used, peak = in_child(size, heuristic)
            print(
                f"{heuristic:12} {count:10,} {result.n_evict:9,} {1e6 * reading / count:12.3f}"
                f" {1e6 * replaying / count:14.3f} {kept / count:10.0f} {used / count:13.0f}"
                f" {(peak - idle) / count:15.0f}",
                flush=True,
            )


def timed(name: str, run: Callable[[], None]) -> None:
    """Run a part, and say how long it took."""
    begin = time.monotonic()
    run()
    print(f"({name}: {time.monotonic() - begin:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--no-oracle", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("COMMANDS", "HEURISTIC"))
    arguments = parser.parse_args()
    if arguments.child:
        child(int(arguments.child[0]), arguments.child[1])
        return
    directory: Path = arguments.directory
    paths = sorted(directory.glob("*.log")) if directory.is_dir() else []
    if not paths:
        print(f"no logs in {directory}: generated ones only")
    timed("reading", lambda: parse_table(paths, 300_000))
    for path in paths:
        if path.name.startswith("treelstm"):
            timed("replaying", lambda path=path: replay_table(path, not arguments.no_oracle))
    timed("scaling", lambda: scaling_table(arguments.sizes))


if __name__ == "__main__":
    main()
