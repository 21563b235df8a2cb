"""Heuristics against memory: the experiments pareto, ablation, banishing and accesses.

Every log is simulated under every series (a heuristic on a runtime) at every ratio of the
baseline's memory, as in [1]_. A run that fails has no slow-down: neither tables nor figures give
one, and a series may fail at a ratio and do well at a smaller one.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4 and appendix D.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotor.experiments.cells import Cell, run_cells
from rotor.experiments.output import LogFile, Output, find_logs, open_log
from rotor.simrd import heuristics
from rotor.simrd.results import Result
from rotor.simrd.settings import Baseline
from rotor.simrd.simulate import simulate

__all__ = ["GROUPS", "RATIOS", "Config", "Series", "failure_line", "run"]

RATIOS = tuple(round(0.1 * k, 1) for k in range(1, 11))
"""The published ratios of the baseline's memory: 0.1 to 1.0."""


@dataclass(frozen=True)
class Series:
    """One curve: a heuristic on a runtime.

    Attributes
    ----------
    label
        In figures and tables.
    heuristic, runtime
        Names as in `rotor.simrd.simulate`.
    """

    label: str
    heuristic: str
    runtime: str = "V2EagerOptimized"


def _by_name(*names: str) -> tuple[Series, ...]:
    return tuple(Series(name, name) for name in names)


def _ablation(numerator: str) -> tuple[Series, ...]:
    return _by_name(
        f"Ab{numerator}SizeStale",
        f"Ab{numerator}Size",
        f"Ab{numerator}Stale",
        f"Ab{numerator}" if numerator else "AbRandom",
    )


GROUPS: dict[str, dict[str, tuple[Series, ...]]] = {
    "pareto": {
        "": _by_name(
            "DTR", "DTREqClass", "DTRLocal", "LRU", "LargestStorage", "RandomStorage", "MSPS"
        )
    },
    "ablation": {
        "full_e": _ablation("E"),
        "eqclass": _ablation("Eq"),
        "local": _ablation("Local"),
        "none": _ablation(""),
    },
    "banishing": {
        "": (
            Series("banishing (V1, DTRUnopt)", "DTRUnopt", "V1"),
            Series("eager eviction (DTR)", "DTR"),
            Series("releases ignored (DTR)", "DTR", "no_dealloc"),
        )
    },
    "accesses": {"": _by_name("DTR", "DTREqClass", "DTRLocal")},
}
"""Of each experiment, its figures, and of each figure its curves."""


@dataclass(frozen=True)
class Config:
    """Settings of a sweep.

    Attributes
    ----------
    name
        One of `GROUPS`.
    logs
        Files, or directories of logs.
    ratios
        Of the baseline's memory, each above 0.
    overhead_limit
        A run is given up once it takes this many times the baseline's time.
    trials
        Runs of a heuristic that draws, with the seeds `seed`, `seed` + 1, ...
    seed
        Of the first trial.

    Raises
    ------
    ValueError
        The name is unknown, ratios or trials are missing, or a ratio is not positive.
    """

    name: str
    logs: tuple[str, ...]
    ratios: tuple[float, ...] = RATIOS
    overhead_limit: float = 2.0
    trials: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in GROUPS:
            raise ValueError(
                f"no sweep is named {self.name!r}, expected one of {', '.join(GROUPS)}"
            )
        check_ratios(self.ratios)
        if self.trials < 1:
            raise ValueError(f"trials = {self.trials}, expected at least 1")


def check_ratios(ratios: tuple[float, ...]) -> None:
    """Raise ValueError if ratios are missing, or one is not positive and finite."""
    if not ratios:
        raise ValueError("no ratios were given, expected numbers above 0 such as 0.5")
    for ratio in ratios:
        if not 0 < ratio < float("inf"):
            raise ValueError(f"ratio = {ratio}, expected a number above 0")


def simulate_cell(path: str, digest: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one simulation of a log in a file; return ``Result.to_dict()``."""
    return simulate(open_log(path, digest), **settings).to_dict()


def baseline_cell(path: str, digest: str) -> dict[str, Any]:
    """Return the baseline of a log's ratios, and the number of its ignored releases."""
    log = open_log(path, digest)
    return dataclasses.asdict(log.baseline) | {"ignored_releases": log.ignored_releases}


def simulation(log: LogFile, **settings: Any) -> Cell:
    """Return the cell of one simulation."""
    return Cell(
        simulate_cell,
        {"path": str(log.path), "digest": log.digest, "settings": settings},
        {"kind": "simulation", "digest": log.digest, "settings": settings},
        fields=("base_compute", *(name for name in _COLUMNS if name in _RESULT_FIELDS)),
    )


def baseline_of(log: LogFile) -> Cell:
    """Return the cell of a log's baseline."""
    return Cell(
        baseline_cell,
        {"path": str(log.path), "digest": log.digest},
        {"kind": "baseline", "digest": log.digest},
        fields=(*(field.name for field in dataclasses.fields(Baseline)), "ignored_releases"),
    )


_RESULT_FIELDS = {field.name for field in dataclasses.fields(Result)}


def run(
    config: Config,
    directory: Path,
    *,
    jobs: int = 1,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
) -> Output:
    """Run a sweep and write its files.

    Parameters
    ----------
    config
        Sweep to run.
    directory
        Directory of the output.
    jobs
        Processes.
    formats
        Of the figures, out of "pdf", "png", "svg".
    fresh
        Run again what was run before.

    Returns
    -------
    Output
        Its `files` and `text` are what was written and the summary.

    Raises
    ------
    FileNotFoundError
        No logs were found.
    MalformedLogError
        A log cannot be read.
    ImportError
        Figures are asked for and matplotlib is not installed.
    """
    output = Output(directory, config.name, formats)
    logs = find_logs(config.logs)
    groups = GROUPS[config.name]
    cells = [baseline_of(log) for log in logs]
    places: list[tuple[LogFile, str, Series, float]] = []
    shown = [(group, series) for group, listed in groups.items() for series in listed]
    for log, (group, series), ratio in itertools.product(logs, shown, sorted(config.ratios)):
        for seed in _seeds(config, series):
            places.append((log, group, series, ratio))
            cells.append(
                simulation(
                    log,
                    heuristic=series.heuristic,
                    runtime=series.runtime,
                    ratio=ratio,
                    seed=seed,
                    overhead_limit=config.overhead_limit,
                    count_accesses=config.name == "accesses",
                )
            )
    found = run_cells(cells, output.store(fresh=fresh), jobs=jobs, description=config.name)
    baselines = {log.path: result for log, result in zip(logs, found, strict=False)}
    results = list(zip(places, found[len(logs) :], strict=True))
    curves = {
        (log.path, group): [_curve(series, log, group, results) for series in listed]
        for log in logs
        for group, listed in groups.items()
    }
    _write(config, output, logs, baselines, curves, results)
    if formats:
        _draw(config, output, logs, baselines, curves)
    return output


def _seeds(config: Config, series: Series) -> list[int]:
    trials = config.trials if heuristics.get(series.heuristic).is_random else 1
    return [config.seed + trial for trial in range(trials)]


def _curve(series: Series, log: LogFile, group: str, results: list[Any]) -> dict[str, Any]:
    """Return a series on a log: mean, least and most of the successful trials of each ratio."""
    by_ratio: dict[float, list[dict[str, Any]]] = {}
    for (other, its_group, its_series, ratio), result in results:
        if (other, its_group, its_series) == (log, group, series):
            by_ratio.setdefault(ratio, []).append(result)
    points = []
    for ratio, trials in sorted(by_ratio.items()):
        fine = [trial for trial in trials if trial["status"] == "ok"]
        slow = [slowdown(trial) for trial in fine]
        reads = [trial["n_access"] for trial in fine if trial["n_access"] is not None]
        points.append(
            {
                "ratio": ratio,
                "trials": len(trials),
                "succeeded": len(fine),
                "statuses": [trial["status"] for trial in trials],
                "slowdown": sum(slow) / len(slow) if slow else None,
                "least": min(slow, default=None),
                "most": max(slow, default=None),
                "accesses": sum(reads) / len(reads) if reads else None,
            }
        )
    return {
        "label": series.label,
        "heuristic": series.heuristic,
        "runtime": series.runtime,
        "points": points,
        "failure": failure_line(points),
    }


def slowdown(result: dict[str, Any]) -> float:
    """Return the time of a simulation over that of its baseline."""
    base = result["base_compute"]
    return (base + result["remat_compute"]) / base if base else 1.0


def panel(title: str, baseline: dict[str, Any], curves: list[Any]) -> dict[str, Any]:
    """Return the curves of a log for a figure, with the marks of its baseline."""
    most = max(1, baseline["max_memory"])
    return {
        "title": title,
        "constant_ratio": baseline["const_memory"] / most,
        "bottleneck_ratio": baseline["bottleneck_memory"] / most,
        "curves": curves,
    }


def failure_line(points: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the end of a curve: the smallest ratio that succeeds, and the failure below it.

    Parameters
    ----------
    points
        Of ascending ratios, with "ratio", "succeeded" and "statuses".

    Returns
    -------
    dict or None
        "ratio", and "kind": "oom" or "thrash" (where both occur among the trials, "thrash"); None
        where it never fails below its smallest success, or never succeeds.
    """
    for below, point in zip([None, *points], points, strict=False):
        if point["succeeded"]:
            if below is None:
                return None
            kind = "thrash" if "thrash" in below["statuses"] else "oom"
            return {"ratio": point["ratio"], "kind": kind}
    return None


_COLUMNS = (
    "log",
    "group",
    "label",
    "heuristic",
    "runtime",
    "ratio",
    "seed",
    "budget",
    "status",
    "slowdown",
    "clock",
    "model_compute",
    "remat_compute",
    "max_memory",
    "n_evict",
    "n_remat",
    "n_model_ops",
    "n_eval",
    "n_access",
)


def _write(
    config: Config,
    output: Output,
    logs: list[LogFile],
    baselines: dict[Path, dict[str, Any]],
    curves: dict[tuple[Path, str], list[dict[str, Any]]],
    results: list[Any],
) -> None:
    asked = dataclasses.asdict(config) | {"logs": [log.path.name for log in logs]}
    results_of = [
        {
            "log": log.path.name,
            "title": log.title,
            "digest": log.digest,
            "baseline": baselines[log.path],
            "groups": {group: curves[log.path, group] for group in GROUPS[config.name]},
        }
        for log in logs
    ]
    output.json(asked, results_of)
    rows = []
    for (log, group, series, ratio), result in results:
        own = {
            "log": log.title,
            "group": group,
            "label": series.label,
            "ratio": ratio,
            "slowdown": slowdown(result) if result["status"] == "ok" else None,
        }
        rows.append([own[name] if name in own else result[name] for name in _COLUMNS])
    output.csv(_COLUMNS, rows)
    output.summary(_summary(config, logs, baselines, curves))


def _summary(
    config: Config,
    logs: list[LogFile],
    baselines: dict[Path, dict[str, Any]],
    curves: dict[tuple[Path, str], list[dict[str, Any]]],
) -> str:
    from rotor.report.text import table
    from rotor.units import format_bytes, format_seconds

    what = "accesses to metadata" if config.name == "accesses" else "slow-down"
    parts = [
        f"{config.name}: {what} by ratio of the baseline's memory; runs end as THRASH beyond "
        f"{config.overhead_limit:g} times the baseline's time"
    ]
    ratios = sorted(config.ratios)
    for log in logs:
        base = baselines[log.path]
        parts.append(
            f"\n{log.title}: {format_seconds(base['compute_ns'] / 1e9)}, "
            f"{format_bytes(base['max_memory'])} (constants {format_bytes(base['const_memory'])}, "
            f"bottleneck {format_bytes(base['bottleneck_memory'])})"
        )
        if base["ignored_releases"]:
            parts.append(f"{base['ignored_releases']} releases of undefined names were ignored")
        for group in GROUPS[config.name]:
            rows = [[group or "ratio", *(f"{ratio:g}" for ratio in ratios)]]
            for curve in curves[log.path, group]:
                cells = [_cell_text(point, config.name) for point in curve["points"]]
                rows.append([curve["label"], *cells])
            parts.append(str(table(rows)))
    return "\n".join(parts)


def _cell_text(point: dict[str, Any], name: str) -> str:
    if not point["succeeded"]:
        return "THRASH" if "thrash" in point["statuses"] else "OOM"
    missing = point["trials"] - point["succeeded"]
    mark = f" ({missing} failed)" if missing else ""
    if name == "accesses":
        return f"{point['accesses']:.0f}{mark}"
    return f"{point['slowdown']:.4f}{mark}"


def _draw(
    config: Config,
    output: Output,
    logs: list[LogFile],
    baselines: dict[Path, dict[str, Any]],
    curves: dict[tuple[Path, str], list[dict[str, Any]]],
) -> None:
    from rotor.report import simrd_figures

    is_access = config.name == "accesses"
    draw = simrd_figures.access_grid if is_access else simrd_figures.overhead_grid
    values = "accesses" if is_access else "slowdown"
    for group in GROUPS[config.name]:
        panels = []
        for log in logs:
            drawn = []
            for curve in curves[log.path, group]:
                points = curve["points"]
                columns = {"ratios": "ratio", "values": values, "least": "least", "most": "most"}
                drawn.append(
                    {
                        "label": curve["label"],
                        **{key: [point[name] for point in points] for key, name in columns.items()},
                        "has_band": any(point["trials"] > 1 for point in points),
                        "failure": curve["failure"],
                    }
                )
            panels.append(panel(log.title, baselines[log.path], drawn))
        stem = output.figure_stem(f"_{group}" if group else "")
        output.files += draw(panels, stem, output.formats)
