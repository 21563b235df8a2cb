"""Heuristics that decide while the program runs, against plans made beforehand.

The comparison of DTR's paper [1]_ and of Checkmate's [2]_, on the same graphs: every static planner
of `rotor.simrd.static`, the heuristics on the default runtime, and on programs small enough, where
SciPy is installed, Checkmate's optimum. A static plan knows what is read again, and takes no memory
for what is not.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4.3.
.. [2] P. Jain et al., "Checkmate", MLSys 2020.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotor.algorithms.curve import Curve
from rotor.errors import InfeasibleError
from rotor.experiments.cells import Cell, run_cells
from rotor.experiments.output import LogFile, Output, find_logs, open_log
from rotor.experiments.sweeps import RATIOS, baseline_of, check_ratios, panel, simulation, slowdown
from rotor.simrd import heuristics
from rotor.simrd.checkmate import MOST_OPERATIONS, checkmate
from rotor.simrd.program import Program
from rotor.simrd.static import PLANNERS, plan

__all__ = ["Config", "run"]


@dataclass(frozen=True)
class Config:
    """Settings of the experiment.

    Attributes
    ----------
    logs
        Files, or directories of logs.
    ratios
        Of the baseline's memory, each above 0.
    planners
        Names out of `rotor.simrd.static.PLANNERS`.
    heuristics
        Names as in `rotor.simrd.simulate`.
    overhead_limit
        A simulation is given up once it takes this many times the baseline's time.
    checkmate_seconds
        Time limit of each integer program; 0 for none of them.
    checkmate_operations
        The largest program that Checkmate is asked for.

    Raises
    ------
    ValueError
        A name is unknown or a number out of range.
    """

    logs: tuple[str, ...]
    ratios: tuple[float, ...] = RATIOS
    planners: tuple[str, ...] = tuple(PLANNERS)
    heuristics: tuple[str, ...] = ("DTR", "DTREqClass", "MSPS")
    overhead_limit: float = 2.0
    checkmate_seconds: float = 60.0
    checkmate_operations: int = MOST_OPERATIONS

    def __post_init__(self) -> None:
        check_ratios(self.ratios)
        for name in self.planners:
            if name not in PLANNERS:
                expected = ", ".join(PLANNERS)
                raise ValueError(f"no planner is named {name!r}, expected one of {expected}")
        for name in self.heuristics:
            heuristics.get(name)
        if self.checkmate_seconds < 0:
            raise ValueError(f"checkmate_seconds = {self.checkmate_seconds}, expected 0 or more")


def planner_cell(path: str, digest: str, planner: str) -> dict[str, Any]:
    """Return all points of one planner on a log."""
    points = plan(open_log(path, digest), [planner])
    return {"points": [dataclasses.asdict(point) for point in points]}


def size_cell(path: str, digest: str) -> dict[str, Any]:
    """Return the number of a log's operations, without constants."""
    program = Program.from_log(open_log(path, digest))
    count = sum(not program.is_constant(o) for o in range(len(program.cost_ns)))
    return {"operations": count}


def checkmate_cell(
    path: str, digest: str, ratio: float, seconds: float, most_operations: int
) -> dict[str, Any]:
    """Return Checkmate's answer in one budget; "infeasible" and "no answer" are answers."""
    log = open_log(path, digest)
    budget = int(log.baseline.max_memory * ratio)
    try:
        found = checkmate(log, budget, time_limit=seconds, most_operations=most_operations)
    except (InfeasibleError, RuntimeError) as error:
        status = "infeasible" if isinstance(error, InfeasibleError) else "no answer"
        return {"status": status, **dict.fromkeys(_FIELDS["checkmate_cell"][1:])}
    figures = (found.status, found.price.slowdown, found.price.peak_bytes, found.gap)
    return dict(zip(_FIELDS["checkmate_cell"], figures, strict=True))


_FIELDS = {
    "planner_cell": ("points",),
    "size_cell": ("operations",),
    "checkmate_cell": ("status", "slowdown", "peak_bytes", "gap"),
}


def _cell(function: Any, log: LogFile, **settings: Any) -> Cell:
    return Cell(
        function,
        {"path": str(log.path), "digest": log.digest, **settings},
        {"kind": function.__name__, "digest": log.digest, **settings},
        _FIELDS[function.__name__],
    )


def run(
    config: Config,
    directory: Path,
    *,
    jobs: int = 1,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
) -> Output:
    """Run the comparison and write its files; parameters as of `rotor.experiments.sweeps.run`."""
    output = Output(directory, "static", formats)
    store = output.store(fresh=fresh)
    logs = find_logs(config.logs)
    heads = [baseline_of(log) for log in logs] + [_cell(size_cell, log) for log in logs]
    known = run_cells(heads, store, jobs=jobs, description="static: logs")
    baselines, counts = known[: len(logs)], [entry["operations"] for entry in known[len(logs) :]]
    ratios = sorted(config.ratios)
    has_solver = config.checkmate_seconds > 0 and importlib.util.find_spec("scipy") is not None
    cells: list[Cell] = []
    for log, count in zip(logs, counts, strict=True):
        cells += [_cell(planner_cell, log, planner=planner) for planner in config.planners]
        cells += [
            simulation(
                log,
                heuristic=heuristic,
                runtime="V2EagerOptimized",
                ratio=ratio,
                seed=0,
                overhead_limit=config.overhead_limit,
                count_accesses=False,
            )
            for heuristic in config.heuristics
            for ratio in ratios
        ]
        if has_solver and count <= config.checkmate_operations:
            cells += [
                _cell(
                    checkmate_cell,
                    log,
                    ratio=ratio,
                    seconds=config.checkmate_seconds,
                    most_operations=config.checkmate_operations,
                )
                for ratio in ratios
            ]
    found = iter(run_cells(cells, store, jobs=jobs, description="static"))
    entries = []
    for log, base, count in zip(logs, baselines, counts, strict=True):
        entry: dict[str, Any] = {
            "log": log.path.name,
            "title": log.title,
            "digest": log.digest,
            "baseline": base,
            "operations": count,
            "points": {planner: next(found)["points"] for planner in config.planners},
            "simulated": {
                heuristic: [_simulated(ratio, next(found)) for ratio in ratios]
                for heuristic in config.heuristics
            },
            "checkmate": None,
            "checkmate_skipped": None,
        }
        if has_solver and count <= config.checkmate_operations:
            entry["checkmate"] = [{"ratio": ratio, **next(found)} for ratio in ratios]
        else:
            entry["checkmate_skipped"] = _why_not(config, count, has_solver=has_solver)
        entries.append(entry)
    asked = dataclasses.asdict(config) | {"logs": [log.path.name for log in logs]}
    output.json(asked, entries)
    output.csv(
        ["log", "plan", "parameter", "peak_bytes", "memory_ratio", "slowdown", "n_remat", "status"],
        [row for entry in entries for row in _rows(entry)],
    )
    output.summary(_summary(config, entries))
    if formats:
        _draw(config, output, entries)
    return output


def _why_not(config: Config, count: int, *, has_solver: bool) -> str:
    if config.checkmate_seconds == 0:
        return "not asked for"
    if not has_solver:
        return "SciPy is not installed (pip install scipy)"
    return f"{count} operations, at most {config.checkmate_operations} are solved"


def _simulated(ratio: float, result: dict[str, Any]) -> dict[str, Any]:
    fine = result["status"] == "ok"
    return {
        "ratio": ratio,
        "status": result["status"],
        "slowdown": slowdown(result) if fine else None,
        "peak_bytes": result["max_memory"] if fine else None,
        "n_remat": result["n_remat"] if fine else None,
    }


def _rows(entry: dict[str, Any]) -> list[list[Any]]:
    most = max(1, entry["baseline"]["max_memory"])
    planned = {
        planner: [p | {"ratio": p["peak_bytes"] / most, "status": "ok"} for p in points]
        for planner, points in entry["points"].items()
    }
    rows = []
    for name, points in (
        *planned.items(),
        *entry["simulated"].items(),
        ("checkmate", entry["checkmate"] or ()),
    ):
        for p in points:
            parameter = p.get("parameter", p["ratio"])
            figures = [p["peak_bytes"], p["ratio"], p["slowdown"], p.get("n_remat"), p["status"]]
            rows.append([entry["title"], name, parameter, *figures])
    return rows


def _best(entry: dict[str, Any], planner: str, ratio: float) -> float | None:
    budget = int(entry["baseline"]["max_memory"] * ratio)
    slow = [p["slowdown"] for p in entry["points"][planner] if p["peak_bytes"] <= budget]
    return min(slow, default=None)


def _summary(config: Config, entries: list[dict[str, Any]]) -> str:
    from rotor.report.text import table
    from rotor.units import format_bytes

    ratios = sorted(config.ratios)
    parts = [
        "static: slow-down by ratio of the baseline's memory; of planners the best of their "
        "schedules that fit (a dash where none does)"
    ]
    for entry in entries:
        parts.append(
            f"\n{entry['title']}: {entry['operations']} operations, "
            f"{format_bytes(entry['baseline']['max_memory'])}"
        )
        rows = [["ratio", *(f"{ratio:g}" for ratio in ratios)]]
        for planner in config.planners:
            best = [_best(entry, planner, ratio) for ratio in ratios]
            rows.append([planner, *("-" if slow is None else f"{slow:.4f}" for slow in best)])
        for heuristic, points in entry["simulated"].items():
            slow = [p["slowdown"] for p in points]
            failed = [p["status"].upper() for p in points]
            cells = [f"{x:.4f}" if x is not None else s for x, s in zip(slow, failed, strict=True)]
            rows.append([heuristic, *cells])
        if entry["checkmate"] is not None:
            rows.append(["checkmate", *(_checkmate_text(p) for p in entry["checkmate"])])
        parts.append(str(table(rows)))
        if entry["checkmate_skipped"]:
            parts.append(f"checkmate: {entry['checkmate_skipped']}")
    return "\n".join(parts)


def _checkmate_text(point: dict[str, Any]) -> str:
    if point["slowdown"] is None:
        return "-" if point["status"] == "infeasible" else "?"
    gap = f" (gap {point['gap']:.1%})" if point["gap"] else ""
    return f"{point['slowdown']:.4f}{gap}"


def _draw(config: Config, output: Output, entries: list[dict[str, Any]]) -> None:
    from rotor.report import simrd_figures

    panels = []
    for entry in entries:
        most = max(1, entry["baseline"]["max_memory"])
        curves: list[tuple[str, list[Any], list[Any], bool]] = []
        for planner in config.planners:
            points = [(p["peak_bytes"], p["slowdown"]) for p in entry["points"][planner]]
            if points:
                curve = Curve.from_points(points)
                ratios, values = (curve.bytes / most).tolist(), curve.seconds.tolist()
                curves.append((planner, ratios, values, True))
        found = entry["simulated"] | {"checkmate": entry["checkmate"]}
        for name, listed in found.items():
            if listed is not None:
                ratios, values = [p["ratio"] for p in listed], [p["slowdown"] for p in listed]
                curves.append((name, ratios, values, name == "checkmate"))
        names = ("label", "ratios", "values", "is_static")
        drawn = [dict(zip(names, curve, strict=True)) for curve in curves]
        panels.append(panel(entry["title"], entry["baseline"], drawn))
    output.files += simrd_figures.static_grid(panels, output.figure_stem(), output.formats)
