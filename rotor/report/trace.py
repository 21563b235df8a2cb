"""Plans and metered steps in the Trace Event Format, which Perfetto and chrome://tracing read.

The format is described in "Trace Event Format" of the Chromium project: a JSON object with a list
of events; "X" is a complete event with a duration, "C" a sample of a counter, "M" names a process
or a thread; times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotor.graph.chains import ChainProgram
from rotor.graph.contraction import places
from rotor.graph.program import Program
from rotor.graph.summaries import summarise
from rotor.graph.transfers import Transfer, Transfers, transfers_of

if TYPE_CHECKING:
    from rotor.common.timeline import PredictedTimeline, Timeline
    from rotor.engines.parts.plan import PartsTier


FORMAT = "rotor.trace"
VERSION = 1
SUFFIXES = (".json", ".json.gz")
"""Endings of a trace's file name."""

PLAN, MEASURED = 1, 2
"""Processes of a trace: the prediction, and the measurement."""

_PHASES = ("forward", "loss", "backward")
_THREAD = 1
_TRACKS = {"written": 2, "fetched": 3, "waited": 4}
"""Threads of a second tier."""

_LEAST_NS = 1
"""Length of entries without duration: the next would hide their bytes."""

_LIVE, _LIMIT = "live bytes", "limit"
_COLORS = {
    "kept": "good",
    "checkpoint": "good",
    "offloaded": "rail_load",
    "dropped": "grey",
    "recomputed": "bad",
    "loss": "thread_state_iowait",
    "backward": "thread_state_runnable",
}
"""Names of the colours that chrome://tracing has; Perfetto chooses its own."""

Event = dict[str, Any]


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return whether a file name has the ending of a trace."""
    return os.fspath(path).lower().endswith(SUFFIXES)


def write_plan_trace(plan: Any, path: str | os.PathLike[str]) -> Path:
    """Write the trace of a plan of any engine, and of its last metered step; return the path.

    The process "plan" has the prediction: each run of an operation, within its phase and module,
    and counters of the live bytes, of the limit, and of the measurement, brought to the clock of
    the prediction. The process "measured step" has the measurement on its own clock. A plan without
    a program has only the second process. Raises ValueError if nothing is predicted, and no step
    was metered over time.
    """
    program, measured = getattr(plan, "program", None), plan.measured_timeline
    figures = {
        "limit_bytes": plan.limit_bytes,
        "measured_bytes": plan.measured_bytes,
        "device": str(plan.device),
    }
    if program is None:
        return _write(*_measured_trace(plan, figures), path)
    figures |= {"predicted_bytes": plan.predicted_bytes, "own_bytes": plan.executor_bytes}
    events = _program_events(program, plan.executor_bytes, plan.limit_bytes)
    if measured is not None:
        events += _compared_events(measured, plan.predicted_timeline)
        events += _measured_events(measured, plan.limit_bytes)
    return _write(events, figures, path)


def write_program_trace(
    program: Program, path: str | os.PathLike[str], limit_bytes: int | None = None
) -> Path:
    """Write the trace of a program of a graph, or of a chain; return the path."""
    figures = {"limit_bytes": limit_bytes, "predicted_bytes": program.peak_bytes}
    return _write(_program_events(program, 0, limit_bytes), figures, path)


def _measured_trace(plan: Any, figures: dict[str, Any]) -> tuple[list[Event], dict[str, Any]]:
    if plan.measured_timeline is None:
        raise ValueError(
            "nothing to trace: no run is predicted, and no step was metered over time; "
            "train a step on the CPU first"
        )
    events = _measured_events(plan.measured_timeline, plan.limit_bytes)
    if (tier := getattr(plan, "tier", None)) is not None:
        events += _parts_tier_events(tier)
        figures |= {
            "written_bytes": tier.offloaded_bytes,
            "fetched_bytes": tier.fetched_bytes,
            "waited_predicted_ns": round(1e9 * tier.waited),
            "waited_measured_ns": tier.waited_ns(),
        }
    return events, figures


@dataclass
class _Run:
    """One run of an operation."""

    name: str
    path: tuple[str, ...]
    fate: str
    phase: str
    cost_ns: int
    before_bytes: int
    peak_bytes: int
    figures: dict[str, Any] = field(default_factory=dict)
    waited_ns: int = 0


def _program_events(program: Program, executor_bytes: int, limit_bytes: int | None) -> list[Event]:
    runs = _program_runs(program)
    return _plan_events(runs, executor_bytes, limit_bytes) + _tier_events(program)


def _program_runs(program: Program) -> list[_Run]:
    graph, timeline, summary = program.graph, program.timeline(runs_only=True), summarise(program)
    numbers, where = program.ops.tolist(), places(graph)
    labels, of = [graph.operations[number].name for number in numbers], "module"
    if isinstance(program, ChainProgram):
        labels, of = list(map(str, program.sequence)), "stage"
    seen = [0] * len(graph)
    runs = []
    now = 0
    levels = zip(
        timeline.before_bytes.tolist(),
        timeline.peak_bytes.tolist(),
        transfers_of(program, _LEAST_NS).waits_ns,
        strict=True,
    )
    for number, label, (before, peak, waited) in zip(numbers, labels, levels, strict=True):
        op = graph.operations[number]
        now = max(now, _PHASES.index(op.phase))
        seen[number] += 1
        fate = summary.operations[number]
        if seen[number] > 1:
            fate = "recomputed"
        elif fate == "recomputed":
            first = "checkpoint" if label.startswith("Fck_") else "dropped"
            fate = first if op.phase == "forward" else op.phase
        # Of the runs of a stage, Fe makes the tape.
        is_light, made = label.startswith(("Fn_", "Fck_")), [graph.storages[s] for s in op.outputs]
        path = (_PHASES[now], *(where[number].split(".") if where[number] else ()))
        figures = {
            of if op.module else "module": op.module,
            "run": seen[number],
            "makes_bytes": sum(one.bytes for one in made if not (is_light and one.lazy)),
            "workspace_bytes": op.workspaces[is_light],
        }
        cost_ns = int(program.run_ns[number])
        runs.append(_Run(label, path, fate, op.phase, cost_ns, before, peak, figures, waited))
    return runs


def _tier_events(program: Program) -> list[Event]:
    """Return the transfers of a program, written and fetched, each on a track of its own."""
    moved = transfers_of(program, _LEAST_NS).moved
    tracks = [_track(kind) for kind in _TRACKS if any(one.kind == kind for one in moved)]
    return tracks + [_moved(program, one, one.begin_ns) for one in moved]


def _track(kind: str) -> Event:
    return _thread(PLAN, _TRACKS[kind], f"second tier, {kind}")


def _moved(program: Program, one: Transfer, begin_ns: int) -> Event:
    maker = program.graph.operations[program.graph.producers[one.storage]].name
    figures = {"storage": one.storage, "bytes": one.nbytes}
    event = _slice(maker, one.kind, begin_ns, one.end_ns - one.begin_ns, PLAN, figures)
    return event | {"tid": _TRACKS[one.kind]}


def _parts_tier_events(tier: PartsTier) -> list[Event]:
    """Return the predicted transfers of all parts and their waits, each kind on its own track.

    Forwards of the parts that move values follow one another, and their backwards in reverse order;
    the code between them, and other parts, take no time there.
    """
    programs = [program for program in tier.programs if program is not None]
    if not programs:
        return []
    found = [transfers_of(program) for program in programs]
    forwards = [_forward_ns(*one) for one in zip(programs, found, strict=True)]
    total, before, later = sum(forwards), 0, 0
    backward_begins = []
    for forward, moves in zip(reversed(forwards), reversed(found), strict=True):
        backward_begins.append(total + later - forward)
        later += moves.end_ns - forward
    events = _named(PLAN, "plan", "parts") + [_track(kind) for kind in _TRACKS]
    for program, moves, forward, back in zip(
        programs, found, forwards, reversed(backward_begins), strict=True
    ):

        def placed(at: int, first: int = before, edge: int = forward, last: int = back) -> int:
            return at + (first if at < edge else last)

        events += [_moved(program, one, placed(one.begin_ns)) for one in moves.moved]
        now = 0
        for number, wait in zip(program.ops.tolist(), moves.waits_ns, strict=True):
            operation = program.graph.operations[number]
            if wait:
                slices = _slice(operation.name, "waited", placed(now), wait, PLAN)
                events.append(slices | {"tid": _TRACKS["waited"]})
            now += wait + int(program.run_ns[number])
        before += forward
    return events


def _forward_ns(program: Program, moves: Transfers) -> int:
    """Return the time of a program up to its loss, waits before the loss included."""
    elapsed = 0
    for number, wait in zip(program.ops.tolist(), moves.waits_ns, strict=True):
        operation = program.graph.operations[number]
        elapsed += wait
        if operation.phase == "loss":
            break
        elapsed += int(program.run_ns[number])
    return elapsed


def _plan_events(runs: Iterable[_Run], executor_bytes: int, limit_bytes: int | None) -> list[Event]:
    events = _named(PLAN, "plan", "operations")
    opened: list[Event] = []
    now = 0

    def close(depth: int) -> None:
        while len(opened) > depth:
            event = opened.pop()
            event["dur"] = (now - round(event["ts"] * 1000)) / 1000

    path: tuple[str, ...] = ()
    level = executor_bytes
    for run in runs:
        common = 0
        while common < min(len(path), len(run.path)) and path[common] == run.path[common]:
            common += 1
        close(common)
        path = run.path
        for name in path[common:]:
            group = "phase" if not opened else "module"
            opened.append(_slice(name, group, now, 0, PLAN))
            events.append(opened[-1])
        length = max(run.cost_ns, _LEAST_NS)
        if run.waited_ns:
            events.append(_slice("second tier", "waited", now, run.waited_ns, PLAN))
            now += run.waited_ns
        level = run.peak_bytes + executor_bytes
        known = {"live_before_bytes": run.before_bytes + executor_bytes, "live_bytes": level}
        categories = run.phase if run.fate == run.phase else f"{run.phase},{run.fate}"
        slices = _slice(run.name, categories, now, length, PLAN, run.figures | known)
        slices["cname"] = _COLORS[run.fate]
        events += [slices, _counter(_LIVE, "predicted", now, level, PLAN)]
        now += length
    close(0)
    events.append(_counter(_LIVE, "predicted", now, level, PLAN))
    if limit_bytes is not None:
        events += [_counter(_LIMIT, _LIMIT, at, limit_bytes, PLAN) for at in (0, now)]
    return events


def _compared_events(measured: Timeline, predicted: PredictedTimeline) -> list[Event]:
    """Return the measured events, on the clock of the prediction."""
    moments = (measured.on_clock_of(predicted) * 1e9).round().astype(int).tolist()
    levels = measured.live_bytes.tolist()
    return [
        _counter("live bytes, measured", "measured", at, level, PLAN)
        for at, level in zip(moments, levels, strict=True)
    ]


def _measured_events(measured: Timeline, limit_bytes: int) -> list[Event]:
    """Return the measured events, on their own clock."""
    events = _named(MEASURED, "measured step", "phases")
    moments = (measured.seconds * 1e9).round().astype(int).tolist()
    marks = {name: round(seconds * 1e9) for name, seconds in measured.marks}
    end = moments[-1]
    backward = min(marks.get("backward", end), end)
    bounds = [0, min(marks.get("loss", backward), backward), backward, end]
    for name, begin, until in zip(_PHASES, bounds[:-1], bounds[1:], strict=True):
        if until > begin:
            events.append(_slice(name, "phase", begin, until - begin, MEASURED))
    for at, level in zip(moments, measured.live_bytes.tolist(), strict=True):
        events.append(_counter(_LIVE, "measured", at, level, MEASURED))
    return events + [_counter(_LIMIT, _LIMIT, at, limit_bytes, MEASURED) for at in (0, end)]


def _named(process: int, name: str, thread: str) -> list[Event]:
    return [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}},
        _thread(process, _THREAD, thread),
    ]


def _thread(process: int, number: int, name: str) -> Event:
    return {
        "name": "thread_name",
        "ph": "M",
        "pid": process,
        "tid": number,
        "args": {"name": name},
    }


def _slice(
    name: str,
    category: str,
    begin_ns: int,
    length_ns: int,
    process: int,
    figures: dict[str, Any] | None = None,
) -> Event:
    event: Event = {"name": name, "cat": category, "ph": "X", "ts": begin_ns / 1000}
    event |= {"dur": length_ns / 1000, "pid": process, "tid": _THREAD}
    return event | {"args": figures} if figures else event


def _counter(name: str, series: str, at_ns: int, level: int, process: int) -> Event:
    return {"name": name, "ph": "C", "ts": at_ns / 1000, "pid": process, "args": {series: level}}


def _write(events: list[Event], figures: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the file: entries without a time first, then all by time, outer ones first.

    It is compressed if the name ends in ``.gz``.
    """
    path = Path(path)
    trace = {
        "format": FORMAT,
        "version": VERSION,
        "displayTimeUnit": "ns",
        "otherData": {name: value for name, value in figures.items() if value is not None},
        "traceEvents": sorted(events, key=lambda event: event.get("ts", -1.0)),
    }
    data = (json.dumps(trace, separators=(",", ":")) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)
    return path
