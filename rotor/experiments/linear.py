"""The uniform linear network: how much is recomputed as it grows, in memory that grows slower.

The network is that of [1]_.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, theorem 3.1: in memory of
   2 sqrt(n), the heuristic (c + e) / size executes O(n) operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotor.experiments.cells import Cell, run_cells
from rotor.experiments.output import Output
from rotor.simrd import heuristics
from rotor.simrd.logs import Log
from rotor.simrd.networks import linear
from rotor.simrd.results import EVENT_KINDS
from rotor.simrd.simulate import simulate

__all__ = ["BOUNDS", "Config", "chen_extra", "residency", "run", "treeverse_extra"]

BOUNDS: dict[str, Callable[[int], float]] = {
    "sqrt(n)": math.sqrt,
    "2 sqrt(n)": lambda n: 2 * math.sqrt(n),
    "4 sqrt(n)": lambda n: 4 * math.sqrt(n),
    "6 sqrt(n)": lambda n: 6 * math.sqrt(n),
    "8 sqrt(n)": lambda n: 8 * math.sqrt(n),
    "log2(n)": math.log2,
    "3 log2(n)": lambda n: 3 * math.log2(n),
    "n / 2": lambda n: n / 2,
    "n": lambda n: n,
}
"""Memory as a function of n; rounded up to whole storages."""

_MOST_COLUMNS = 1000
_COMPUTE, _EVICT, _BANISH = (EVENT_KINDS.index(kind) for kind in ("compute", "evict", "banish"))


@dataclass(frozen=True)
class Config:
    """Settings of the experiment.

    Attributes
    ----------
    sizes
        Operations in each direction.
    bounds
        Names out of `BOUNDS`.
    heuristics
        Names as in `rotor.simrd.simulate`.
    runtime
        A name as in `rotor.simrd.simulate`.
    most_extra
        A run is given up beyond this many times n rematerializations.
    heat_size, heat_bound, heat_heuristic
        The run whose storages are shown over time; size 0 for none.
    seed
        Of heuristics that draw.

    Raises
    ------
    ValueError
        A bound is unknown, a size is below 2, or no size is given.
    """

    sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    bounds: tuple[str, ...] = ("2 sqrt(n)", "log2(n)", "3 log2(n)")
    heuristics: tuple[str, ...] = ("DTR", "DTREqClass", "AbESize", "DTRLocal", "LRU")
    runtime: str = "V2EagerOptimized"
    most_extra: float = 60.0
    heat_size: int = 200
    heat_bound: str = "2 sqrt(n)"
    heat_heuristic: str = "AbESize"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (*self.bounds, self.heat_bound):
            if name not in BOUNDS:
                raise ValueError(f"no bound is named {name!r}, expected one of {', '.join(BOUNDS)}")
        if not self.sizes or not self.bounds or not self.heuristics:
            raise ValueError("expected at least one size, one bound and one heuristic")
        if min(self.sizes) < 2:
            raise ValueError(f"sizes must be at least 2, got {min(self.sizes)}")
        for name in self.heuristics:
            heuristics.get(name)


def chen_extra(n: int) -> float:
    """Return the operations beyond 2 n of Chen's sqrt(n) segments: every forward once more."""
    return float(n)


def treeverse_extra(n: int) -> float:
    """Return operations beyond 2 n of a recursive bisection in memory of log2(n).

    f(n) - n with f(n) = n / 2 + 2 f(n / 2) and f(1) = 2.
    """

    def total(m: float) -> float:
        return 2.0 if m <= 1 else m / 2 + 2 * total(m / 2)

    return total(float(n)) - n


@lru_cache(maxsize=2)
def _network(n: int) -> Log:
    return linear(n)


def linear_cell(
    n: int, budget: int, heuristic: str, runtime: str, most_extra: float, seed: int
) -> dict[str, Any]:
    """Run one cell; return ``Result.to_dict()``."""
    return simulate(
        _network(n),
        heuristic,
        budget_bytes=budget,
        runtime=runtime,
        overhead_limit=1 + most_extra / 2,
        seed=seed,
    ).to_dict()


def _budget(bound: str, n: int) -> int:
    return max(1, math.ceil(BOUNDS[bound](n)))


def residency(n: int, budget: int, heuristic: str, *, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Return which storages of the linear network are in memory at each moment.

    Parameters
    ----------
    n, budget, heuristic, seed
        The network, the bytes it runs in, and under which heuristic.

    Returns
    -------
    numpy.ndarray
        bool [2 n, T]: of each storage, in the order of their making, after each of the T
        executions. A run that fails is shown as far as it went.
    """
    log = _network(n)
    result = simulate(
        log, heuristic, budget_bytes=budget, overhead_limit=math.inf, seed=seed, trace=True
    )
    events = result.events
    assert events is not None
    owner = log.tensors["storage"]
    computes = int(np.count_nonzero(events["kind"] == _COMPUTE))
    grid = np.zeros((len(log.storages), computes), dtype=np.bool_)
    now = np.zeros(len(log.storages), dtype=np.bool_)
    column = 0
    for kind, index in zip(events["kind"].tolist(), events["index"].tolist(), strict=True):
        if kind == _COMPUTE:
            now[owner[index]] = True
            grid[:, column] = now
            column += 1
        elif kind in (_EVICT, _BANISH):
            now[index] = False
    return grid


def run(
    config: Config,
    directory: Path,
    *,
    jobs: int = 1,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
) -> Output:
    """Run the experiment and write its files; parameters as of `rotor.experiments.sweeps.run`."""
    output = Output(directory, "linear", formats)
    rows: list[dict[str, Any]] = [
        {"bound": bound, "heuristic": heuristic, "n": n}
        for bound in config.bounds
        for heuristic in config.heuristics
        for n in sorted(config.sizes)
    ]
    cells = []
    for row in rows:
        settings = {
            "n": row["n"],
            "budget": _budget(row["bound"], row["n"]),
            "heuristic": row["heuristic"],
            "runtime": config.runtime,
            "most_extra": config.most_extra,
            "seed": config.seed,
        }
        identity = {"kind": "linear", **settings}
        cells.append(Cell(linear_cell, settings, identity, ("budget", "status", "n_remat")))
    found = run_cells(cells, output.store(fresh=fresh), jobs=jobs, description="linear")
    for row, result in zip(rows, found, strict=True):
        row |= {name: result[name] for name in ("budget", "status")}
        row["extra"] = result["n_remat"] if result["status"] == "ok" else None
    output.rows(config, ["bound", "heuristic", "n", "budget", "status", "extra"], rows)
    output.summary(_summary(config, rows))
    if formats:
        _draw(config, output, rows)
    return output


def _extras(rows: list[dict[str, Any]], bound: str, heuristic: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["bound"] == bound and row["heuristic"] == heuristic]


def _summary(config: Config, rows: list[dict[str, Any]]) -> str:
    from rotor.report.text import table

    sizes = sorted(config.sizes)
    parts = ["linear: rematerializations of the uniform linear network, beside 2 n operations"]
    for bound in config.bounds:
        lines = [[f"memory {bound}", *(f"n={n}" for n in sizes)]]
        for heuristic in config.heuristics:
            cells = [
                str(row["extra"]) if row["status"] == "ok" else row["status"].upper()
                for row in _extras(rows, bound, heuristic)
            ]
            lines.append([heuristic, *cells])
        lines.append(["Chen, sqrt(n) segments", *(f"{chen_extra(n):.0f}" for n in sizes)])
        lines.append(["bisection", *(f"{treeverse_extra(n):.0f}" for n in sizes)])
        parts += ["", str(table(lines))]
    return "\n".join(parts)


def _draw(config: Config, output: Output, rows: list[dict[str, Any]]) -> None:
    from rotor.report import simrd_figures

    sizes = sorted(config.sizes)
    references = {
        "Chen": [chen_extra(n) for n in sizes],
        "bisection": [treeverse_extra(n) for n in sizes],
    }
    panels = []
    for bound in config.bounds:
        found: dict[str, list[Any]] = {
            heuristic: [row["extra"] for row in _extras(rows, bound, heuristic)]
            for heuristic in config.heuristics
        }
        curves = [
            {"label": name, "x": sizes, "y": values, "is_reference": name in references}
            for name, values in (found | references).items()
        ]
        panels.append({"title": f"memory {bound}", "curves": curves})
    output.files += simrd_figures.line_figure(
        panels,
        output.figure_stem(),
        output.formats,
        x_label="n, operations in each direction",
        y_label="rematerializations",
    )
    if config.heat_size:
        budget = _budget(config.heat_bound, config.heat_size)
        grid = residency(config.heat_size, budget, config.heat_heuristic, seed=config.seed)
        stride = -(-grid.shape[1] // _MOST_COLUMNS) if grid.shape[1] else 1
        output.files += simrd_figures.heat_map(
            grid[:, ::stride].tolist(),
            output.figure_stem("_heat"),
            output.formats,
            title=f"{config.heat_heuristic}, n = {config.heat_size}, memory for {budget} storages",
            x_label="executions" if stride == 1 else f"executions / {stride}",
            y_label="storage, in order of making",
        )
