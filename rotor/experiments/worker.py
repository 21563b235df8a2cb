"""The process in which one input of an experiment runs: ``python -m rotor.experiments.worker``.

It reads one JSON object from stdin and writes a line of JSON to its first stdout for everything
that it has done, so that whoever waits knows that it lives; what others print goes to stderr. The
requests are ``{"request": "describe"}`` and what `rotor.experiments.runs` sends for an input.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rotor
from rotor._pytorch import devices
from rotor.meter import allocator
from rotor.simrd.log_writer import LogWriter

__all__ = ["describe", "main", "run"]

Emit = Callable[[dict[str, Any]], None]
_MS = 1e3
_MB = 1e6
_NS_PER_MS = 1e6


def main(workloads: Any = None, dtr: Any = None) -> int:
    """Serve the request on stdin; 0 once it is answered, be it with an error.

    Parameters
    ----------
    workloads, dtr
        Replacements of `rotor.models.workloads` and `rotor.dtr`; these by default.

    Returns
    -------
    int
        The exit code.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        lines.write(json.dumps(event) + "\n")
        lines.flush()

    try:
        request = json.loads(sys.stdin.read())
        workloads = workloads or importlib.import_module("rotor.models.workloads")
        dtr = dtr or importlib.import_module("rotor.dtr")
        if request["request"] == "describe":
            emit({"event": "described", **describe(request["device"], workloads)})
        else:
            run(request, emit, workloads, dtr)
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
        emit({"event": "error", **found, "traceback": traceback.format_exc()})
    return 0


def describe(device: str, workloads: Any) -> dict[str, Any]:
    """Return the facts that a run depends on: models and their parameters, versions, device."""
    chosen = _device(device)
    name = "CPU" if chosen.type == "cpu" else devices.name_of(chosen)
    return {
        "models": {name: workloads.accepted(name) for name in workloads.names()},
        "device": str(chosen),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rotor": rotor.__version__,
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        return devices.chosen(None)
    try:
        return devices.chosen(name)
    except ValueError as error:
        raise ValueError(f"device = {error}, or auto") from None


def run(request: dict[str, Any], emit: Emit, workloads: Any, dtr: Any) -> None:
    """Run one input, and report each repetition.

    Every repetition has a new model and a new batch, drawn from the input's seed, so that all of an
    input do the same. The first ``warm_ups`` of them are not counted. On the CPU, memory is metered
    in repetitions of their own, before the timed ones: a meter costs time. On CUDA it
    costs none.

    Parameters
    ----------
    request
        As `rotor.experiments.runs` makes it.
    emit
        Called with each event: "begun", "warm", "metered", "rep", "logged", "done".
    workloads
        `rotor.models.workloads`, or what serves as it.
    dtr
        `rotor.dtr`, or what serves as it.
    """
    device = _device(request["device"])
    seed = request["seed"] if request["seed"] is not None else secrets.randbits(31)
    runner = _Runner(request, device, seed, workloads, dtr)
    emit({"event": "begun", "seed": seed})
    for _ in range(request["warm_ups"]):
        runner.repetition()
        emit({"event": "warm"})
    peaks = []
    if device.type == "cpu":
        peaks.append(runner.repetition(metered=True)["total_mem"])
        emit({"event": "metered", "total_mem": peaks[0]})
    for number in range(request["n_reps"]):
        measured = runner.repetition(metered=device.type != "cpu")
        measured.setdefault("total_mem", max(peaks, default=0.0))
        emit({"event": "rep", "rep": number, **measured})
    if request["log"] is not None:
        runner.repetition(log=request["log"])
        _mark_start(Path(request["log"]))
        emit({"event": "logged", "log": request["log"]})
    emit({"event": "done", "params": runner.params, **runner.sizes()})


def _mark_start(path: Path) -> None:
    """Begin a log of one step with START, like the logs of the prototype."""
    writer = LogWriter()
    writer.annotate("START")
    mark, log = writer.getvalue(), path.read_bytes()
    if mark not in log:
        path.write_bytes(mark + log)


@dataclass
class _Runner:
    request: dict[str, Any]
    device: torch.device
    seed: int
    workloads: Any
    dtr: Any

    def __post_init__(self) -> None:
        self.params: dict[str, Any] = {}
        given = dict(self.request["params"])
        if self.request["batch_size"] is not None:
            given["batch_size"] = self.request["batch_size"]
        self.given = self.workloads.from_published(
            self.request["model"], given, small=self.request["sizes"] == "small"
        )

    def sizes(self) -> dict[str, Any]:
        """Return the batch size as configurations name it, and the examples of a step."""
        meaning = self.workloads.meaning(self.request["model"], self.request["params"])
        return {
            "batch_size": self.params.get(meaning.get("batch_size", "batch_size")),
            "examples": self.params.get("batch_size"),
        }

    def repetition(self, *, metered: bool = False, log: str | None = None) -> dict[str, Any]:
        """Run one step of a new model; return its figures, times in ms and memory in MB."""
        gc.collect()
        if self.request["set_seed"]:
            random.seed(self.seed)
            np.random.seed(self.seed % (1 << 32))  # noqa: NPY002
            torch.manual_seed(self.seed)
        training = self.workloads.build(
            self.request["model"], seed=self.seed, device=self.device, **self.given
        )
        self.params = {
            key: value
            for key, value in dict(training.params).items()
            if isinstance(value, bool | int | float | str)
        }
        batch = training.make_batch(self.seed)
        self._synchronize()
        level = self._level(training)
        figures = {"input_mem": training.input_bytes / _MB, "model_mem": training.model_bytes / _MB}
        if not metered:
            return figures | self._step(training, batch, level, log)
        with allocator.meter(self.device) as meter:
            figures |= self._step(training, batch, level, log)
        return figures | {"total_mem": (level + meter.peak_bytes) / _MB}

    def _level(self, training: Any) -> int:
        """Return bytes allocated before the step."""
        if self.device.type != "cpu":
            return devices.allocated_bytes(self.device)
        return int(training.model_bytes) + int(training.input_bytes)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            devices.synchronize(self.device)

    def _step(self, training: Any, batch: Any, level: int, log: str | None) -> dict[str, Any]:
        if self.request["type"] == "baseline":
            return self._timed(training, batch)
        with self._context(level, log) as session:
            session.reset_profile()
            figures = self._timed(training, batch)
            stats = session.stats
            for name in ("base", "remat", "search", "cost"):
                key = f"{name}_compute_time" if name in ("base", "remat") else f"{name}_time"
                figures[key] = getattr(stats, f"{name}_ns") / _NS_PER_MS
            counts = ("evictions", "rematerializations")
            return figures | {name: getattr(stats, name) for name in counts}

    def _context(self, level: int, log: str | None) -> Any:
        budget = self.request["budget_bytes"]
        limit = None if budget is None else budget - level
        if limit is not None and limit <= 0:
            raise ValueError(
                f"a budget of {budget} bytes is not above the {level} bytes that the model and its "
                "inputs take: expected a larger one"
            )
        return self.dtr.budget(
            limit,
            heuristic=self.request["heuristic"],
            seed=self.seed,
            sample=self.request["sample"],
            ignore_small=self.request["ignore_small"],
            record_log=log,
        )

    def _timed(self, training: Any, batch: Any) -> dict[str, Any]:
        is_other = self.device.type != "cpu"
        events = [torch.Event(self.device, enable_timing=True) for _ in range(2 * is_other)]
        on_device = torch.accelerator.device_index(self.device.index or 0) if is_other else None
        with contextlib.nullcontext() if on_device is None else on_device:
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            if is_other:
                events[0].record()
            result = training.step(batch)
            if is_other:
                events[1].record()
            stepped = time.perf_counter()
            self._synchronize()
            end, end_cpu = time.perf_counter(), time.thread_time()
        total = (end - begin) * _MS
        figures = {
            "time": total,
            "gpu_time": events[0].elapsed_time(events[1]) if is_other else total,
            "cpu_time": (end_cpu - begin_cpu) * _MS,
            "sync_time": (end - stepped) * _MS if is_other else 0.0,
        }
        loss = result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else None
        # Exact text: it is compared, and JSON has no NaN.
        return figures | {"loss": None if loss is None else float(loss).hex()}


if __name__ == "__main__":
    raise SystemExit(main())
