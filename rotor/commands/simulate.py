"""``rotor simulate`` replays logs of eager programs; ``rotor heuristics`` lists what it knows."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rotor.commands import add_options, add_output, columns, examples, give, say, write_command_json
from rotor.report.text import table
from rotor.simrd import heuristics, runtimes
from rotor.simrd.logs import Log, parse
from rotor.simrd.results import EVENT_KINDS, Result
from rotor.simrd.simulate import simulate
from rotor.units import format_bytes, format_seconds

_MOST_STATS = 10
_SETTINGS = (
    "runtime",
    "overhead_limit",
    "seed",
    "no_dealloc",
    "rebuild_classes_every",
    "sample",
    "ignore_small",
    "count_accesses",
    "stats",
)
"""Options that `rotor.simrd.simulate` takes as they are."""


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
    options = {
        "log LOG": "a log, plain or gzipped, or the name of one that `rotor experiment list` "
        "lists; it comes before the options",
        "--heuristic NAME ...": "see `rotor heuristics` (default: DTREqClass)",
    }
    add_options(sub, options, heuristic=["DTREqClass"])
    budget = {
        "--ratio R ...": "budget as a fraction of the log's memory without one, such as 0.5 "
        "(default: none)",
        "--budget BYTES ...": 'budget, such as 700MiB or "8 GB"',
    }
    add_options(sub.add_mutually_exclusive_group(), budget)
    options = {
        "--runtime NAME": "see `rotor heuristics` (default: V2EagerOptimized)",
        "--overhead-limit X": "stop beyond X times the time of the log (default: 2; inf for never)",
        "--seed N": "seed of random heuristics and of sampling (default: 0)",
        "--no-dealloc": "remove releases from the log",
        "--rebuild-classes-every N": "split classes of evicted storages at every N-th return to "
        "memory (default: never, as published; 1 makes them exact)",
        "--sample": "try about 2 sqrt(n) candidates only",
        "--ignore-small": "never evict below 1 %% of the mean size",
        "--count-accesses": "count accesses to metadata; slower",
        "--stats": "show the most evicted and most run; one run only",
        "--trace FILE.csv": "write every event to a file; one run only",
    }
    defaults = {"runtime": "V2EagerOptimized", "overhead_limit": 2.0}
    add_options(sub, options, seed=0, rebuild_classes_every=0, **defaults)
    add_output(sub)
    sub.set_defaults(command=_simulate)


def add_list(commands: Any) -> None:
    """Add ``heuristics`` to the commands of a parser."""
    sub = commands.add_parser(
        "heuristics", help="list the heuristics and runtimes of the simulator"
    )
    add_output(sub)
    sub.set_defaults(command=_list)


def _simulate(arguments: argparse.Namespace) -> int:
    name = "ratio" if arguments.ratio is not None else "budget_bytes"
    budgets = [{name: value} for value in arguments.ratio or arguments.budget or [None]]
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
            trace=arguments.trace is not None,
            progress=not arguments.quiet,
            **budget,
            **{option: getattr(arguments, option) for option in _SETTINGS},
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
    head = "heuristic ratio budget status slow-down peak evicted recomputed"
    rows = [[*head.split(), *(["accesses"] if counts_accesses else [])]]
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
            locked = result.failure.locked
            if (largest.bytes, largest.count) == (locked.bytes, locked.count):
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
    found = [index for index, value in enumerate(values) if value > 0]
    return sorted(found, key=lambda index: -values[index])[:_MOST_STATS]


def _list(arguments: argparse.Namespace) -> int:
    """Show the heuristics and runtimes, and the metadata that they need and keep."""
    data: dict[str, list[dict[str, Any]]] = {
        "heuristics": [
            {"name": name, "needs": sorted(one.needs), "description": one.description}
            for name, one in ((name, heuristics.get(name)) for name in heuristics.names())
        ],
        "runtimes": [
            {"name": name, "keeps": sorted(one.serves), "description": one.description}
            for name, one in ((name, runtimes.get(name)) for name in runtimes.names())
        ],
    }
    shown = []
    for kind, verb, head in (
        ("heuristics", "needs", ["heuristic", "needs", "cost: the least is evicted"]),
        ("runtimes", "keeps", ["runtime", "keeps", "what it does"]),
    ):
        rows = [
            [one["name"], ", ".join(one[verb]) or "-", one["description"]] for one in data[kind]
        ]
        shown.append(columns([head, *rows]))
    give(arguments, data, "\n\n".join(shown))
    return 0
