"""The adversary's network: what not knowing the program costs, however clever the heuristic.

The network is that of the lower bound of [1]_.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, theorem 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotor.experiments.cells import Cell, run_cells
from rotor.experiments.output import Output
from rotor.simrd import heuristics
from rotor.simrd.networks import adversarial

__all__ = ["Config", "run"]


@dataclass(frozen=True)
class Config:
    """Settings of the experiment.

    Attributes
    ----------
    nodes
        Sizes of the network.
    paths
        Numbers of paths, which is also the memory in storages; each at least 3.
    heuristics
        Names as in `rotor.simrd.simulate`.
    runtime
        A name as in `rotor.simrd.simulate`.
    seed
        Of heuristics that draw.

    Raises
    ------
    ValueError
        A heuristic is unknown, or a number too small.
    """

    nodes: tuple[int, ...] = (32, 64, 128, 256, 512)
    paths: tuple[int, ...] = (4, 8, 16)
    heuristics: tuple[str, ...] = ("DTR", "DTREqClass", "DTRLocal", "LRU")
    runtime: str = "V2EagerOptimized"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.nodes or not self.paths or not self.heuristics:
            raise ValueError("expected at least one size, one number of paths and one heuristic")
        if min(self.nodes) < 1 or min(self.paths) < 3:
            raise ValueError(
                f"expected at least 1 node and 3 paths, got {min(self.nodes)} and {min(self.paths)}"
            )
        for name in self.heuristics:
            heuristics.get(name)


def adversarial_cell(
    nodes: int, paths: int, heuristic: str, runtime: str, seed: int
) -> dict[str, Any]:
    """Run one network; return its cost and the length of its paths."""
    found = adversarial(nodes, paths, heuristic, runtime=runtime, seed=seed)
    names = ("computations", "static_computations", "budget_bytes")
    return {**{name: getattr(found, name) for name in names}, "lengths": list(found.lengths)}


def run(
    config: Config,
    directory: Path,
    *,
    jobs: int = 1,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
) -> Output:
    """Run the experiment and write its files; parameters as of `rotor.experiments.sweeps.run`."""
    output = Output(directory, "adversarial", formats)
    places: list[dict[str, Any]] = [
        {"nodes": nodes, "paths": paths, "heuristic": heuristic}
        for paths in sorted(config.paths)
        for heuristic in config.heuristics
        for nodes in sorted(config.nodes)
    ]
    cells = []
    counts = ("computations", "static_computations")
    for place in places:
        settings = place | {"runtime": config.runtime, "seed": config.seed}
        cells.append(Cell(adversarial_cell, settings, {"kind": "adversarial", **settings}, counts))
    found = run_cells(cells, output.store(fresh=fresh), jobs=jobs, description="adversarial")
    rows: list[dict[str, Any]] = [
        {**place, "bound": place["nodes"] ** 2 / (2 * place["paths"]), **result}
        for place, result in zip(places, found, strict=True)
    ]
    output.rows(config, ["nodes", "paths", "heuristic", "bound", *counts], rows)
    output.summary(_summary(config, rows))
    if formats:
        _draw(config, output, rows)
    return output


def _of(rows: list[dict[str, Any]], paths: int, heuristic: str) -> list[int]:
    chosen = [row for row in rows if (row["paths"], row["heuristic"]) == (paths, heuristic)]
    return [row["computations"] for row in chosen]


def _summary(config: Config, rows: list[dict[str, Any]]) -> str:
    from rotor.report.text import table

    sizes = sorted(config.nodes)
    parts = [
        "adversarial: executions that a network built against the heuristic takes; known "
        "beforehand, it takes one for each node"
    ]
    for paths in sorted(config.paths):
        lines = [[f"{paths} paths, memory for {paths}", *(f"n={n}" for n in sizes)]]
        lines += [[name, *map(str, _of(rows, paths, name))] for name in config.heuristics]
        lines.append(["lower bound n^2 / (2 B)", *(f"{n * n / (2 * paths):.0f}" for n in sizes)])
        lines.append(["static order", *(str(n) for n in sizes)])
        parts += ["", str(table(lines))]
    return "\n".join(parts)


def _draw(config: Config, output: Output, rows: list[dict[str, Any]]) -> None:
    from rotor.report import simrd_figures

    sizes = sorted(config.nodes)
    panels = []
    for paths in sorted(config.paths):
        curves: list[dict[str, Any]] = [
            {"label": name, "x": sizes, "y": _of(rows, paths, name), "is_reference": False}
            for name in config.heuristics
        ]
        bound = [n * n / (2 * paths) for n in sizes]
        curves.append({"label": "n^2 / (2 B)", "x": sizes, "y": bound, "is_reference": True})
        curves.append({"label": "static order", "x": sizes, "y": sizes, "is_reference": True})
        panels.append({"title": f"B = {paths} paths", "curves": curves})
    output.files += simrd_figures.line_figure(
        panels, output.figure_stem(), output.formats, x_label="nodes", y_label="executions"
    )
