"""Figures of experiments that train models, from plain data. Needs matplotlib to draw.

The data has the form of `rotor.experiments.analysis.entries`: a list of commands for each model.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rotor.report.figures import COLORS, curve_style, gaps, grid

PARTS = ("base", "rematerialization", "eviction loop", "cost compute", "unprofiled")
"""Parts of the time of a step, from the bottom of a bar."""

_PART_COLORS = dict(zip(PARTS, (*COLORS[:4], "0.75"), strict=True)) | {"baseline": "0.45"}
SETTINGS = (
    "batch_size",
    "memory_budget",
    "ratio",
    "heuristic",
    "runtime",
    "use_sampling",
    "ignore_small_tensors",
)
"""Parameters of commands that are none of their models."""
_BYTES_PER_MB = 1e6
_BAR = 0.7
_TITLE = 34
Models = Mapping[str, Sequence[Mapping[str, Any]]]
_grid = functools.partial(grid, single=5.0, height=2.9, title="medium")
_tall_grid = functools.partial(_grid, height=3.6)


def profile(entry: Mapping[str, Any], clock: str = "gpu_time") -> dict[str, float] | None:
    """Return medians in ms of the parts of a step; None if it failed or has no time.

    A baseline has one part, "baseline". The parts of other commands add up to the median of the
    clock; if more than that is profiled, no time is left as unprofiled. The profile is in wall
    time; each part has the same share of another clock. The search for a storage to evict contains
    the computation of costs.
    """
    summary = entry["summary"]
    if summary == "error" or "gpu_time" not in summary:
        return None

    def median(metric: str) -> float:
        return float(summary[metric]["median"]) if metric in summary else 0.0

    height = median(clock)
    if entry["type"] == "baseline":
        return {"baseline": height}
    wall = median("time")
    scale = height / wall if wall else 1.0
    cost = median("cost_time")
    parts = {
        "base": median("base_compute_time") * scale,
        "rematerialization": median("remat_compute_time") * scale,
        "eviction loop": max(median("search_time") - cost, 0.0) * scale,
        "cost compute": cost * scale,
    }
    return parts | {"unprofiled": max(height - sum(parts.values()), 0.0)}


def _slowdown(entry: Mapping[str, Any], clock: str) -> float | None:
    is_cpu = clock == "cpu_time" and entry["type"] != "simrd"
    found: float | None = entry["cpu_slowdown" if is_cpu else "slowdown"]
    return found


def _own(entry: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the parameters of the model."""
    params = entry["specific_params"]
    return tuple((key, value) for key, value in params.items() if key not in SETTINGS)


def _workload(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return (entry["specific_params"]["batch_size"], *_own(entry))


def _workloads(listed: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[Any, ...]]:
    """Return the workloads of the commands of a kind, each once."""
    return list(dict.fromkeys(_workload(entry) for entry in listed if entry["kind"] == kind))


def _settings(workload: tuple[Any, ...]) -> str:
    batch, *own = workload
    parts = [f"batch {batch}"] if batch else []
    return ", ".join([*parts, *(f"{key} {value}" for key, value in own)])


def _title(model: str, workload: tuple[Any, ...]) -> str:
    return "\n".join([model, *textwrap.wrap(_settings(workload), _TITLE)])


def _budget_text(budget: Any) -> str:
    if not isinstance(budget, int):
        return "no limit" if budget else "?"
    megabytes = budget / _BYTES_PER_MB
    return f"{megabytes / 1000:.3g} GB" if megabytes >= 1000 else f"{megabytes:.3g} MB"


def _key(budget: Any) -> float:
    return float(budget) if isinstance(budget, int) else math.inf


def budget_panels(models: Models, clock: str = "gpu_time") -> list[dict[str, Any]]:
    """Return the data of `budget_grid`: the commands of kind "fixed", a panel for each workload."""
    panels = []
    for model, listed in models.items():
        for workload in _workloads(listed, "fixed"):
            same = [entry for entry in listed if _workload(entry) == workload]
            plain = next((e for e in same if e["type"] == "baseline"), None)
            parts = None if plain is None else profile(plain, clock)
            unit = None if parts is None else sum(parts.values())
            found = [entry for entry in same if entry["kind"] == "fixed"]
            found.sort(key=lambda entry: -_key(entry["specific_params"]["memory_budget"]))
            simulated = {
                entry["specific_params"]["memory_budget"]: entry["slowdown"]
                for entry in same
                if entry["type"] == "simrd" and entry["slowdown"] is not None
            }
            bars = [_bar("baseline", parts, unit)] if plain is not None else []
            for entry in found:
                budget = entry["specific_params"]["memory_budget"]
                bar = _bar(_budget_text(budget), profile(entry, clock), unit)
                bars.append(bar | {"simulated": simulated.get(budget) if unit else None})
            panels.append(
                {"title": _title(model, workload), "bars": bars, "is_relative": unit is not None}
            )
    return panels


def _bar(label: str, parts: dict[str, float] | None, unit: float | None) -> dict[str, Any]:
    scaled = None if parts is None else {key: value / (unit or 1) for key, value in parts.items()}
    return {"label": label, "parts": scaled, "simulated": None}


@_grid
def budget_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw slow-down against the budget, as bars of the parts of a step's time.

    Each panel has "title", "is_relative" (heights are multiples of the baseline's time, else ms)
    and "bars": "label", "parts" (heights by the names of `PARTS`, None where the command failed),
    "simulated" (the simulator's result in the same budget, or None).
    """
    bars = panel["bars"]
    _stack(ax, bars)
    marks = [(x, bar["simulated"]) for x, bar in enumerate(bars) if bar["simulated"]]
    if marks:
        label = "simulated"
        ax.plot(*zip(*marks, strict=True), "kD", markersize=4, linestyle="", label=label)
    if panel["is_relative"]:
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set_xlabel("memory budget")
    ax.set_ylabel("slow-down (x)" if panel["is_relative"] else "time of a step (ms)")


def _stack(ax: Any, bars: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(bars))
    bottom = [0.0] * len(bars)
    for part in ("baseline", *PARTS):
        heights = [bar["parts"].get(part, 0.0) if bar["parts"] else 0.0 for bar in bars]
        if not any(heights):
            continue
        ax.bar(places, heights, _BAR, bottom=bottom, color=_PART_COLORS[part], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, bar in enumerate(bars):
        if bar["parts"] is None:
            _mark_error(ax, x)
    ax.set_xlim(-0.6, len(bars) - 0.4)
    ax.set_xticks(list(places), [bar["label"] for bar in bars], rotation=35, ha="right")
    ax.grid(axis="x", visible=False)


def _mark_error(ax: Any, x: float) -> None:
    text = {"rotation": 90, "ha": "center", "va": "bottom", "color": "#aa0000"}
    ax.text(x, 0.02, "error", transform=ax.get_xaxis_transform(), **text)


def ratio_panels(models: Models, clock: str = "gpu_time") -> list[dict[str, Any]]:
    """Return the data of `ratio_grid`: a panel for each model that has commands of kind "ratio"."""
    panels = []
    for model, listed in models.items():
        workloads = _workloads(listed, "ratio")
        curves = []
        for workload in workloads:
            same = [entry for entry in listed if _workload(entry) == workload]
            name = (
                ""
                if len(workloads) == 1
                else _title(model, workload).partition("\n")[2].replace("\n", " ")
            )
            for kind, word in (("ratio", "DTR"), ("", "simulated")):
                curves += _ratio_curves(same, kind, f"{name} {word}".strip(), clock)
        if curves:
            title = _title(model, workloads[0]) if len(workloads) == 1 else model
            panels.append({"title": title, "curves": curves})
    return panels


def _ratio_curves(same: list[Any], kind: str, label: str, clock: str) -> list[dict[str, Any]]:
    wanted = "dtr" if kind else "simrd"
    found = [e for e in same if e["type"] == wanted and e["kind"] == kind]
    found = [entry for entry in found if "ratio" in entry["specific_params"]]
    heuristics = list(dict.fromkeys(e["specific_params"]["heuristic"] for e in found))
    curves = []
    for heuristic in heuristics:
        own = [e for e in found if e["specific_params"]["heuristic"] == heuristic]
        own.sort(key=lambda entry: entry["specific_params"]["ratio"])
        curves.append(
            {
                "label": label if len(heuristics) == 1 else f"{label}, {heuristic}",
                "ratios": [entry["specific_params"]["ratio"] for entry in own],
                "values": [_slowdown(entry, clock) for entry in own],
                "failed": [entry["summary"] == "error" for entry in own],
                "is_simulated": wanted == "simrd",
            }
        )
    return curves


@_grid
def ratio_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw slow-down against the memory ratio.

    Each panel has "title" and "curves": "label", "ratios" ascending, "values" (None if missing),
    "failed" (marked by a cross below), "is_simulated" (drawn dashed).
    """
    for index, curve in enumerate(panel["curves"]):
        style = curve_style(index)
        if curve["is_simulated"]:
            style |= {"linestyle": "--", "linewidth": 1.0, "markersize": 3.5}
        ax.plot(curve["ratios"], gaps(curve["values"]), label=curve["label"], **style)
        lost = [r for r, bad in zip(curve["ratios"], curve["failed"], strict=True) if bad]
        for ratio in lost:
            cross = {"color": style["color"], "ha": "center", "va": "bottom"}
            ax.text(ratio, 0.01, "×", transform=ax.get_xaxis_transform(), **cross)
    ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set_xlim(0, max([1.0, *(r for curve in panel["curves"] for r in curve["ratios"])]) * 1.1)
    ax.set_xlabel("memory ratio")
    ax.set_ylabel("slow-down (x)")


def sweep_panels(models: Models) -> list[dict[str, Any]]:
    """Return the data of `throughput_grid` and `breakdown_grid`: models with "param_sweep"."""
    panels = []
    for model, listed in models.items():
        workloads = _workloads(listed, "param_sweep")
        if not workloads:
            continue
        rows: dict[str, dict[str, Any]] = {}
        shown = _varying(workloads)
        labels = [_variant(workload, shown) for workload in workloads]
        for entry in listed:
            is_baseline = entry["type"] == "baseline"
            if (not is_baseline and entry["kind"] != "param_sweep") or (
                _workload(entry) not in workloads
            ):
                continue
            name = "baseline" if is_baseline else _series(entry)
            series = rows.setdefault(name, {})
            series[_variant(_workload(entry), shown)] = entry
        panels.append({"title": model, "labels": labels, "series": rows})
    return panels


def _series(entry: Mapping[str, Any]) -> str:
    params = entry["specific_params"]
    if "ratio" in params:
        return f"DTR, {params['ratio']:g} x baseline"
    return f"DTR, {_budget_text(params['memory_budget'])}"


def _named(workload: tuple[Any, ...]) -> dict[str, Any]:
    return {"batch": workload[0], **dict(workload[1:])}


def _varying(workloads: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the names of the parameters in which the workloads differ."""
    named = [_named(workload) for workload in workloads]
    names = dict.fromkeys(name for one in named for name in one)
    varying = [name for name in names if len({repr(one.get(name)) for one in named}) > 1]
    return varying or ["batch"]


def _variant(workload: tuple[Any, ...], names: Sequence[str]) -> str:
    named = _named(workload)
    return ", ".join(f"{name} {named.get(name)}" for name in names)


@_grid
def throughput_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw examples per second against the swept parameters, the budgets side by side."""
    labels, series = panel["labels"], panel["series"]
    width = 0.8 / len(series)
    for index, (name, found) in enumerate(series.items()):
        places = [k + (index - (len(series) - 1) / 2) * width for k in range(len(labels))]
        values = [found[label]["throughput"] if label in found else None for label in labels]
        color = "0.6" if name == "baseline" else COLORS[index % len(COLORS)]
        ax.bar(places, [value or 0.0 for value in values], width, color=color, label=name)
        for x, label in zip(places, labels, strict=True):
            if label in found and found[label]["summary"] == "error":
                _mark_error(ax, x)
    ax.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    ax.grid(axis="x", visible=False)
    ax.set_ylabel("examples / s")


@_tall_grid
def breakdown_grid(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draw the parts of a step's time, in ms, for all swept parameters."""
    bars = [
        _bar(f"{label}: {name.removeprefix('DTR, ')}", profile(found[label]), None)
        for label in panel["labels"]
        for name, found in panel["series"].items()
        if label in found
    ]
    _stack(ax, bars)
    ax.set_ylabel("time of a step (ms)")
