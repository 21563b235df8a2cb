"""Results of a configuration: statistics, slow-downs, tables, and the data of the figures.

Times are in milliseconds and memory in megabytes (10^6 bytes), as the prototype had them; budgets
are in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rotor.experiments.configuration import Configuration, Trial
from rotor.experiments.keys import NO_LIMIT
from rotor.experiments.output import Output
from rotor.report import experiment_figures as figures
from rotor.report.text import table

__all__ = ["METRICS", "Outcome", "entries", "summarize", "write"]

METRICS = (
    "time",
    "gpu_time",
    "cpu_time",
    "input_mem",
    "model_mem",
    "total_mem",
    "sync_time",
    "base_compute_time",
    "remat_compute_time",
    "search_time",
    "cost_time",
    "evictions",
    "rematerializations",
)
"""Of a repetition, in the order of the CSV files' columns."""

UNITS = {"time": "ms", "memory": "MB (10^6 bytes)", "memory_budget": "bytes", "throughput": "1/s"}
_RESAMPLES = 10_000
_CONFIDENCE = (2.5, 97.5)
_SEED = 0
_NS_PER_MS = 1e6
_BYTES_PER_MB = 1e6


@dataclass
class Outcome:
    """Result of a trial.

    Attributes
    ----------
    trial
        Trial that was run.
    budget_bytes
        The budget; None for no limit, for a baseline, and where a ratio could not be resolved.
    inputs
        Of each input: "status", "rows", "num_retries"; where it failed "error" and "message". Of a
        replay, the fields of a `rotor.simrd.results.Result`.
    baseline
        The inputs of the same workload without a budget, where they were run.
    """

    trial: Trial
    budget_bytes: int | None
    inputs: list[dict[str, Any]]
    baseline: list[dict[str, Any]] | None = None

    @property
    def failure(self) -> dict[str, Any] | None:
        """The first input that failed."""
        return next((found for found in self.inputs if found["status"] != "ok"), None)

    @property
    def retries(self) -> int:
        """Attempts that failed before one did not, of all inputs."""
        return sum(found.get("num_retries", 0) for found in self.inputs)

    def rows(self) -> list[dict[str, Any]]:
        """Return the repetitions of all inputs."""
        return [row for found in self.inputs for row in found.get("rows", [])]


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, median, spread, and confidence intervals of a metric.

    Parameters
    ----------
    values
        Of the repetitions, at least one.

    Returns
    -------
    dict
        "mean", "median", "std" (of the sample; 0 of one value), "min", "max", and "mean_conf" and
        "median_conf", pairs: the 95 % percentile intervals of 10,000 bootstrap samples, drawn from
        a fixed seed.
    """
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(_SEED).integers(0, len(data), (_RESAMPLES, len(data)))
    samples = data[drawn]
    return {
        "mean": float(data.mean()),
        "median": float(np.median(data)),
        "std": float(data.std(ddof=1)) if len(data) > 1 else 0.0,
        "min": float(data.min()),
        "max": float(data.max()),
        "mean_conf": np.percentile(samples.mean(axis=1), _CONFIDENCE).tolist(),
        "median_conf": np.percentile(np.median(samples, axis=1), _CONFIDENCE).tolist(),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        metric: summarize([row[metric] for row in rows])
        for metric in METRICS
        if all(metric in row for row in rows)
    }


def _params(outcome: Outcome) -> dict[str, Any]:
    trial = outcome.trial
    ran = next((found["batch_size"] for found in outcome.inputs if found.get("batch_size")), None)
    batch = trial.batch_size if trial.batch_size is not None else ran
    found: dict[str, Any] = {"batch_size": batch}
    if trial.type != "baseline":
        found["memory_budget"] = _limit(outcome)
        if trial.ratio is not None:
            found["ratio"] = trial.ratio
        for name in ("heuristic", "runtime", "use_sampling", "ignore_small_tensors"):
            if name in trial.options:
                found[name] = trial.options[name]
        found["use_sampling"] = trial.samples(outcome.budget_bytes)
    return found | trial.params


def _limit(outcome: Outcome) -> int | str | None:
    if outcome.budget_bytes is not None:
        return outcome.budget_bytes
    return None if outcome.trial.ratio is not None else NO_LIMIT


def _slowdown(outcome: Outcome, metric: str) -> float | None:
    """Return the median of a time over that of the baseline, where that was run."""
    inputs = outcome.baseline
    if not inputs or any(found["status"] != "ok" for found in inputs):
        return None
    plain = np.median([row[metric] for found in inputs for row in found["rows"]])
    own = np.median([row[metric] for row in outcome.rows()])
    return float(own / plain) if plain else None


def _losses(inputs: Iterable[dict[str, Any]]) -> dict[Any, set[Any]]:
    found: dict[Any, set[Any]] = {}
    for entry in inputs:
        for row in entry.get("rows", []):
            if row.get("loss") is not None:
                found.setdefault(entry["seed"], set()).add(row["loss"])
    return found


def _losses_equal(outcome: Outcome) -> bool | None:
    """Return whether every loss equals the baseline's bit for bit; None without a baseline."""
    own, plain = _losses(outcome.inputs), _losses(outcome.baseline or [])
    shared = own.keys() & plain.keys()
    if not shared:
        return None
    return all(len(own[seed] | plain[seed]) == 1 for seed in shared)


def entry_of(outcome: Outcome) -> dict[str, Any]:
    """Return a trial as the data files have it."""
    trial = outcome.trial
    entry: dict[str, Any] = {
        "command_id": trial.command_id,
        "type": trial.type,
        "kind": trial.kind,
        "specific_params": _params(outcome),
        "num_retries": outcome.retries,
        "slowdown": None,
        "cpu_slowdown": None,
        "throughput": None,
    }
    failure = outcome.failure
    if failure is not None:
        return entry | {"summary": "error", "error": _error(failure)}
    if trial.type == "simrd":
        return entry | _replayed(outcome.inputs[0])
    summary = _summary(outcome.rows())
    median = summary["gpu_time"]["median"]
    examples = next((found["examples"] for found in outcome.inputs if found.get("examples")), None)
    return entry | {
        "summary": summary,
        "input_summaries": [_summary(found["rows"]) for found in outcome.inputs],
        "slowdown": _slowdown(outcome, "gpu_time"),
        "cpu_slowdown": _slowdown(outcome, "cpu_time"),
        "throughput": examples / median * 1000 if examples and median else None,
        "losses_equal": None if trial.type == "baseline" else _losses_equal(outcome),
    }


def _error(failure: dict[str, Any]) -> dict[str, Any]:
    if "error" in failure:
        return {key: failure[key] for key in ("error", "message", "traceback")}
    reason = {"oom": "out of memory", "thrash": "rematerializations passed their limit"}
    status = failure["status"]
    return {"error": status.upper(), "message": f"simulated: {reason[status]}", "traceback": ""}


def _replayed(result: dict[str, Any]) -> dict[str, Any]:
    base, remat = result["base_compute"] / _NS_PER_MS, result["remat_compute"] / _NS_PER_MS
    values = {
        "base_compute_time": base,
        "remat_compute_time": remat,
        "total_mem": result["max_memory"] / _BYTES_PER_MB,
        "evictions": result["n_evict"],
        "rematerializations": result["n_remat"],
    }
    return {
        "summary": {name: summarize([value]) for name, value in values.items()},
        "slowdown": (base + remat) / base if base else None,
    }


def entries(outcomes: Iterable[Outcome]) -> dict[str, list[dict[str, Any]]]:
    """Return the trials of each model as the data files have them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.trial.model, []).append(entry_of(outcome))
    return found


def write(
    config: Configuration, environment: dict[str, Any], outcomes: Sequence[Outcome], output: Output
) -> None:
    """Write the data, the summary and the figures of a configuration.

    Parameters
    ----------
    config
        Configuration that was run.
    environment
        Of `rotor.experiments.process.describe`.
    outcomes
        One for each of its trials, in their order.
    output
        Files of the results; its ``text`` becomes the summary.
    """
    models = entries(outcomes)
    machine = {key: value for key, value in environment.items() if key != "models"}
    settings = {"configuration": json.loads(config.text), "environment": machine, "units": UNITS}
    output.json(settings, models)
    for outcome in outcomes:
        if outcome.rows():
            output.csv(*_command_csv(outcome), suffix=_csv_suffix(outcome))
    output.csv(*_table_csv(models))
    failed = [
        {"model": model, **{key: entry[key] for key in ("command_id", "specific_params", "error")}}
        for model, listed in models.items()
        for entry in listed
        if entry["summary"] == "error"
    ]
    if failed:
        output.json({}, failed, suffix="_errors")
    output.summary(_text(config, machine, models))
    if output.formats:
        _draw(output, models, "cpu_time" if machine["device"] == "cpu" else "gpu_time")


def _csv_suffix(outcome: Outcome) -> str:
    trial = outcome.trial
    batch = _params(outcome)["batch_size"]
    budget = "none" if trial.type == "baseline" else _limit(outcome)
    kind = trial.kind or trial.type
    return f"/cmd-{trial.command_id}-{kind}-{batch or 'default'}-{budget}-{trial.model}"


def _command_csv(outcome: Outcome) -> tuple[list[str], list[list[Any]]]:
    params = outcome.trial.params
    columns = ["input", "rep", "num_retries", *METRICS, "loss", "memory_budget", *params]
    limit = None if outcome.trial.type == "baseline" else _limit(outcome)
    rows = []
    for number, found in enumerate(outcome.inputs):
        for row in found.get("rows", []):
            loss = None if row.get("loss") is None else float.fromhex(row["loss"])
            metrics = [row.get(metric) for metric in METRICS]
            head = [number, row["rep"], found["num_retries"]]
            rows.append([*head, *metrics, loss, limit, *params.values()])
    return columns, rows


def _table_csv(models: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[Any]]]:
    """Return a row for each command: medians."""
    columns = ["model", "command", "type", "kind", "batch_size", "ratio", "memory_budget"]
    columns += ["params", "status", *_RESULTS, *METRICS]
    rows = []
    for model, listed in models.items():
        for entry in listed:
            params = entry["specific_params"]
            failed = entry["summary"] == "error"
            own = {key: params[key] for key in params if key not in figures.SETTINGS}
            rows.append(
                [
                    model,
                    *(entry[key] for key in ("command_id", "type", "kind")),
                    *(params.get(key) for key in ("batch_size", "ratio", "memory_budget")),
                    json.dumps(own) if own else None,
                    entry["error"]["error"] if failed else "ok",
                    *(entry[key] for key in _RESULTS),
                    *(None if failed else _median(entry, metric) for metric in METRICS),
                ]
            )
    return columns, rows


_RESULTS = ("slowdown", "cpu_slowdown", "throughput", "num_retries")


def _median(entry: dict[str, Any], metric: str) -> float | None:
    found = entry["summary"].get(metric)
    return None if found is None else float(found["median"])


def _text(
    config: Configuration, machine: dict[str, Any], models: dict[str, list[dict[str, Any]]]
) -> str:
    parts = [
        f"{config.name}: {_counts(config)}; medians, times "
        "in ms, memory in MB (10^6 bytes) with the model and its inputs; CPU: the slow-down in CPU "
        "time",
        f"on {machine['device_name']}, {machine['threads']} threads, PyTorch {machine['torch']}",
    ]
    for model, listed in models.items():
        head = ["command", "batch", "budget", "time", "95 %", "slow-down", "CPU", "peak"]
        head += ["evicted", "recomputed", "loss", "retries"]
        rows = [head, *(_line(entry) for entry in listed)]
        parts += ["", model, str(table(rows))]
        for entry in listed:
            if entry["summary"] == "error":
                error = entry["error"]
                message = " ".join(error["message"].split())
                parts.append(f"{_name(entry)}: {error['error']}: {message}")
    return "\n".join(parts)


def _counts(config: Configuration) -> str:
    found = {(config.n_inputs, config.n_reps)}
    for trial in config.trials:
        if trial.type != "simrd":
            found.add((trial.options["n_inputs"], trial.options["n_reps"]))
    return " or ".join(f"{inputs} inputs of {reps} repetitions" for inputs, reps in sorted(found))


def _name(entry: dict[str, Any]) -> str:
    params = entry["specific_params"]
    own = [f"{key}={params[key]}" for key in params if key not in figures.SETTINGS]
    word = f"{entry['type']} {entry['kind']}".strip()
    return " ".join([str(entry["command_id"]), word, *own])


def _line(entry: dict[str, Any]) -> list[str]:
    params = entry["specific_params"]
    budget = params.get("memory_budget")
    shown = f"{budget / _BYTES_PER_MB:.1f}" if isinstance(budget, int) else budget or "-"
    if "ratio" in params:
        shown = f"{params['ratio']:g} = {shown}"
    head = [_name(entry), str(params["batch_size"] or "-"), shown]
    if entry["summary"] == "error":
        return [*head, "error", *["-"] * 7, str(entry["num_retries"])]
    time = entry["summary"].get("gpu_time")
    equal = {None: "-", True: "equal", False: "DIFFERS"}[entry.get("losses_equal")]
    interval = "-" if time is None else "{:.1f} to {:.1f}".format(*time["median_conf"])
    numbers = (
        (_median(entry, "gpu_time"), ".1f"),
        (entry["slowdown"], ".3f"),
        (entry["cpu_slowdown"], ".3f"),
        (_median(entry, "total_mem"), ".1f"),
        (_median(entry, "evictions"), ".0f"),
        (_median(entry, "rematerializations"), ".0f"),
    )
    median, *others = ["-" if value is None else format(value, form) for value, form in numbers]
    return [*head, median, interval, *others, equal, str(entry["num_retries"])]


def _draw(output: Output, models: dict[str, list[dict[str, Any]]], clock: str) -> None:
    for suffix, panels, draw in (
        ("_slowdown", figures.budget_panels(models, clock), figures.budget_grid),
        ("_ratio", figures.ratio_panels(models, clock), figures.ratio_grid),
        ("_throughput", figures.sweep_panels(models), figures.throughput_grid),
        ("_breakdown", figures.sweep_panels(models), figures.breakdown_grid),
    ):
        if panels:
            output.files += draw(panels, output.figure_stem(suffix), output.formats)
