"""``rotor simulate``: replays logs of eager programs under budgets."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotor.commands import add_output, examples, number, say, write_command_json
from rotor.report.text import table
from rotor.simrd import heuristics, runtimes
from rotor.simrd.logs import Log, parse
from rotor.simrd.results import EVENT_KINDS, Result
from rotor.simrd.simulate import simulate
from rotor.units import format_bytes, format_seconds

_MOST_STATS = 10


def add(commands: Any) -> None:
    """Add ``simulate`` to the commands of a parser."""
    sub = commands.add_parser(
        "simulate",
        help="replay a log of an eager program under a budget",
        usage="%(prog)s LOG [--heuristic NAME ...] [--ratio R ... | --budget BYTES ...] [options]",
        description="Replay a log under one or several budgets and heuristics. Exits with 1 if "
        "a run is out of memory or thrashes.",
        epilog=examples(
            "simulate unet --ratio 0.5",
            "simulate model.log --heuristic DTR LRU --ratio 0.3 0.5",
            'simulate model.log.gz --budget "8 GB" --stats',
        ),
    )
    sub.add_argument(
        "log",
        metavar="LOG",
        help="a log, plain or gzipped, or the name of one that `rotor experiment list` lists; it "
        "comes before the options",
    )
    sub.add_argument(
        "--heuristic",
        nargs="+",
        default=["DTREqClass"],
        metavar="NAME",
        help="see `rotor heuristics` (default: DTREqClass)",
    )
    budget = sub.add_mutually_exclusive_group()
    budget.add_argument(
        "--ratio",
        nargs="+",
        type=number,
        metavar="R",
        help="budget as a fraction of the log's memory without one, such as 0.5 (default: none)",
    )
    budget.add_argument(
        "--budget", nargs="+", metavar="BYTES", help='budget, such as 700MiB or "8 GB"'
    )
    sub.add_argument(
        "--runtime",
        default="V2EagerOptimized",
        metavar="NAME",
        help="see `rotor heuristics` (default: V2EagerOptimized)",
    )
    sub.add_argument(
        "--overhead-limit",
        type=float,
        default=2.0,
        metavar="X",
        help="stop beyond X times the time of the log (default: 2; inf for never)",
    )
    sub.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of random heuristics and of sampling (default: 0)",
    )
    sub.add_argument("--no-dealloc", action="store_true", help="remove releases from the log")
    sub.add_argument(
        "--rebuild-classes-every",
        type=int,
        default=0,
        metavar="N",
        help="split classes of evicted storages at every N-th return to memory (default: never, as "
        "published; 1 makes them exact)",
    )
    sub.add_argument("--sample", action="store_true", help="try about 2 sqrt(n) candidates only")
    sub.add_argument(
        "--ignore-small", action="store_true", help="never evict below 1 %% of the mean size"
    )
    sub.add_argument(
        "--count-accesses", action="store_true", help="count accesses to metadata; slower"
    )
    sub.add_argument(
        "--stats", action="store_true", help="show the most evicted and most run; one run only"
    )
    sub.add_argument(
        "--trace", metavar="FILE.csv", help="write every event to a file; one run only"
    )
    add_output(sub)
    sub.set_defaults(command=_simulate)


@dataclass(frozen=True)
class _Budget:
    ratio: float | None = None
    budget_bytes: str | None = None


def _budgets(arguments: argparse.Namespace) -> list[_Budget]:
    if arguments.ratio is not None:
        return [_Budget(ratio=ratio) for ratio in arguments.ratio]
    if arguments.budget is not None:
        return [_Budget(budget_bytes=size) for size in arguments.budget]
    return [_Budget()]


def _simulate(arguments: argparse.Namespace) -> int:
    budgets = _budgets(arguments)
    runs = [(heuristic, budget) for heuristic in arguments.heuristic for budget in budgets]
    if len(runs) > 1 and (arguments.stats or arguments.trace):
        raise ValueError(
            f"--stats and --trace are for one run, and {len(runs)} are asked for: give one "
            "heuristic and one budget"
        )
    runtime = runtimes.get(arguments.runtime)
    for heuristic in arguments.heuristic:
        heuristics.check(heuristic, runtime.serves, runtime.name)
    log = parse(arguments.log)
    results = [
        simulate(
            log,
            heuristic,
            ratio=budget.ratio,
            budget_bytes=budget.budget_bytes,
            runtime=arguments.runtime,
            overhead_limit=arguments.overhead_limit,
            seed=arguments.seed,
            no_dealloc=arguments.no_dealloc,
            rebuild_classes_every=arguments.rebuild_classes_every,
            sample=arguments.sample,
            ignore_small=arguments.ignore_small,
            count_accesses=arguments.count_accesses,
            stats=arguments.stats,
            trace=arguments.trace is not None,
            progress=not arguments.quiet,
        )
        for heuristic, budget in runs
    ]
    if arguments.trace is not None:
        _write_trace(results[0], log, Path(arguments.trace))
    if arguments.json is not None:
        data = {"results": [result.to_dict() for result in results]}
        write_command_json(arguments, data, arguments.json)
    if arguments.json != "-":
        _show(log, results, stats=arguments.stats)
    return 0 if all(result.status == "ok" for result in results) else 1


def _write_trace(result: Result, log: Log, path: Path) -> None:
    assert result.events is not None
    roots = log.storages["root"].tolist()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["clock", "event", "index", "name", "bytes", "memory"])
        columns = (
            result.events[name].tolist() for name in ("clock", "kind", "index", "bytes", "memory")
        )
        for clock, kind, index, size, memory in zip(*columns, strict=True):
            event = EVENT_KINDS[kind]
            tensor = index if event in ("compute", "pending", "pressure") else roots[index]
            name = log.tensor_name(tensor) if tensor >= 0 else ""
            writer.writerow([clock, event, index, name, size, memory])


def _show(log: Log, results: Sequence[Result], *, stats: bool) -> None:
    base = log.baseline
    say(
        f"{log.name or 'log'}: {log.command_count} commands, {base.n_ops} operations; without a "
        f"budget {format_seconds(base.compute_ns / 1e9)} and {format_bytes(base.max_memory)} "
        f"(constants {format_bytes(base.const_memory)})"
    )
    counts_accesses = any(result.n_access is not None for result in results)
    rows = [
        [
            "heuristic",
            "ratio",
            "budget",
            "status",
            "slow-down",
            "peak",
            "evicted",
            "recomputed",
            *(["accesses"] if counts_accesses else []),
        ]
    ]
    for result in results:
        fine = result.status == "ok"
        rows.append(
            [
                result.heuristic,
                "" if result.ratio is None else f"{result.ratio:g}",
                "none" if result.budget is None else format_bytes(result.budget),
                result.status.upper() if not fine else "ok",
                f"{result.slowdown:.4f}" if fine else "-",
                format_bytes(result.max_memory),
                str(result.n_evict),
                str(result.n_remat),
                *([str(result.n_access)] if counts_accesses else []),
            ]
        )
    say(str(table(rows)))
    if stats:
        _show_stats(log, results[0])
    for result in results:
        if result.failure is not None:
            ratio = "" if result.ratio is None else f" at {result.ratio:g}"
            say(f"\n{result.heuristic}{ratio}: {result.failure.describe()}")
            largest = result.largest_locked()
            if (largest.bytes, largest.count) == (
                result.failure.locked.bytes,
                result.failure.locked.count,
            ):
                say("no larger set was locked or pinned in this run")
            else:
                say(f"the largest set of this run: {largest.describe()}")


def _show_stats(log: Log, result: Result) -> None:
    assert result.storages is not None
    assert result.operations is not None
    roots = log.storages["root"].tolist()
    sizes = log.storages["bytes"].tolist()
    evicted = result.storages["evicted"]
    rows = [["most evicted", "bytes", "evicted", "came", "resident"]]
    for index in _largest(evicted.tolist()):
        entry = result.storages[index]
        rows.append(
            [
                log.tensor_name(roots[index]),
                format_bytes(sizes[index]),
                str(int(entry["evicted"])),
                str(int(entry["materialized"])),
                format_seconds(int(entry["resident_ns"]) / 1e9),
            ]
        )
    say(f"\n{table(rows)}")
    executions = result.operations["executions"].tolist()
    costs = log.operations["cost_ns"].tolist()
    rows = [["most recomputed", "cost", "executions", "time in all"]]
    extra = [(n - 1) * cost for n, cost in zip(executions, costs, strict=False)]
    for index in _largest(extra):
        rows.append(
            [
                log.operation_name(index),
                format_seconds(costs[index] / 1e9),
                str(executions[index]),
                format_seconds(executions[index] * costs[index] / 1e9),
            ]
        )
    say(f"\n{table(rows)}")


def _largest(values: Sequence[int]) -> list[int]:
    order = sorted(
        (index for index, value in enumerate(values) if value > 0),
        key=lambda index: (-values[index], index),
    )
    return order[:_MOST_STATS]
