"""``rotor curve``: step time against memory, before training."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotor.algorithms.curve import Curve, new_axes
from rotor.commands import add_options, add_output, examples, give, tell
from rotor.commands.model import (
    LIMIT,
    MESH,
    OFFLOAD,
    PROFILE,
    TOTAL,
    UNKNOWN,
    Subject,
    add_model,
    limit_of,
    within_total,
    wrapped,
)
from rotor.errors import InfeasibleError
from rotor.report.curves import Point, write_curve
from rotor.report.text import table
from rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rotor.wrapper.checkpointable import Checkpointable


_ROOM = 2
_POINTS = 16
_PLAIN = "plain PyTorch"
_LIMIT = "the limit"
_FORMS = {"graph": " as a graph", "chain": " as a chain", "parts": " in parts"}


def add(commands: Any) -> None:
    """Add ``curve`` to the commands of a parser."""
    sub = commands.add_parser(
        "curve",
        help="step time against memory, before training",
        usage="%(prog)s FACTORY --input SHAPE [--limit BYTES] [--plot FILE] [options]",
        description="Measure a model and print the time of a step under every limit, from the "
        "least memory possible to no recomputation, with plain PyTorch's peak, a limit, and this "
        "machine's free memory.",
        epilog=examples(
            "curve resnet18 --input 32,3,224,224",
            "curve train.py:make_model --input 8,512 --dtype int64 --high 1000 --limit 2GiB",
            "curve train.py:make_model --input 32,128 --profile gpu.json",
            "curve gpt2 --input 2,256 --dtype int64 --high 50257 --plot curve.png --json",
        ),
    )
    add_model(sub)
    options = {
        **PROFILE,
        **MESH,
        **OFFLOAD,
        "--limit BYTES": f"mark a limit, {LIMIT}",
        "--total BYTES": TOTAL,
        "--points N": "rows of the table at most; of a graph, limits that are planned "
        "(default: 16)",
        "--plot FILE": "draw it, to .png, .pdf or .svg, with matplotlib",
        "--no-plain": "do not run a plain step to see its peak",
    }
    add_options(sub, options, points=_POINTS)
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    limit = limit_of(arguments)
    if arguments.points < 2:
        raise ValueError(f"--points {arguments.points}: expected 2 or more")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    from rotor.commands import running
    from rotor.fit import batches
    from rotor.fit.steps import RanStep, has_single_plan, measured_curve, unplanned_step
    from rotor.meter import allocator
    from rotor.meter.room import step_limit

    subject = Subject(arguments)
    subject.check()
    limit = within_total(arguments, subject, limit)
    is_away = "offload_state" in subject.offload
    # Plain steps run before parameters leave memory.
    ran = running.plain_step(subject) if is_away and not arguments.no_plain else None
    model = wrapped(subject, arguments, effort="fast")
    is_planned = has_single_plan(model)
    profile, here = subject.profile, subject.profile is None
    free = allocator.free_bytes(subject.device) if profile is None else profile.free_bytes
    if is_planned:
        found: Curve = model.curve(arguments.points, training=True)
    else:

        def on_step(ran: RanStep) -> None:
            shown = format_bytes(ran.limit_bytes)
            tell(arguments, f"a step within {shown}: {'ran' if ran.fits else 'does not fit'}")

        most = step_limit(subject.device, module=subject.model)
        tell(arguments, "the model has no single plan: steps are run under several limits")
        with batches.unchanged(subject.model, subject.device):
            steps = running.limited_steps(subject, model)
            found = measured_curve(steps, most, arguments.points, on_step, limit)
    is_short, room = limit is not None and limit < found.minimum_bytes, arguments.room
    if room is not None and room.latest.step_bytes <= 0:
        limit = None
    facts = CurveFacts(limit_bytes=limit, is_measured=not is_planned, is_away=is_away)
    if is_planned and limit is not None:
        facts.note_plan(model, arguments.effort)
    if not here:
        step = unplanned_step(model)
        facts.plain_bytes = None if step is None else step.peak_bytes
    elif arguments.no_plain or is_away:
        facts.plain_bytes, facts.plain_seconds = ran or (None, None)
    elif free is not None and int(found.bytes[-1]) * _ROOM > free:
        tell(arguments, "plain PyTorch was not run: it might need more than is free")
    else:
        facts.plain_bytes, facts.plain_seconds = running.plain_step(subject) or (None, None)
    if here:
        facts.set_aside_bytes = running.set_aside_bytes(subject) if is_planned else 0
        facts.has_loss = subject.knows_loss()
    where = "this machine" if here else "that machine"
    marks = [(_PLAIN, facts.plain_bytes), (_LIMIT, limit), (f"free on {where}", free)]
    found.marks = tuple([(name, size) for name, size in marks if size is not None])
    if arguments.plot is not None:
        plain, path = _plain_point(found, facts), Path(arguments.plot)
        write_curve(found, path, plain=plain, limit_bytes=limit, title=subject.name)
        tell(arguments, f"{arguments.plot} has the picture")
    data = subject.described() | asdict(facts)
    data |= {} if model.homes is None else {"homes": model.homes}
    data |= {
        "curve": found.to_dict(),
        "minimum_bytes": found.minimum_bytes,
        "limit_seconds": _at(found, limit),
        "free_bytes": free,
    }
    text = curve_text(found, arguments.points, facts)
    if is_short and room is not None:
        text += f"\n{room.why(found.minimum_bytes)}."
    give(arguments, data, subject.heading() + text)
    return 2 if is_short else 0


def _plain_point(curve: Curve, facts: CurveFacts) -> Point:
    """Return the step that is 100 % in a picture: plain, or else the last point of the curve."""
    if facts.plain_bytes is None:
        return Point("no recomputation", int(curve.bytes[-1]), float(curve.seconds[-1]))
    return Point(_PLAIN, facts.plain_bytes, facts.base_seconds(curve))


@dataclass
class CurveFacts:
    """Facts that a table of a curve shows beside its points."""

    limit_bytes: int | None = None
    plain_bytes: int | None = None
    """Peak of a plain step; ``None`` if unknown."""
    plain_seconds: float | None = None
    """Time of a plain step; ``None`` if unknown."""
    set_aside_bytes: int = 0
    """Bytes of every limit that are set aside for an unknown loss."""
    is_measured: bool = False
    """True if the times are those of steps that were run, not planned."""
    is_away: bool = False
    """True if bytes are those of parameters, gradients and states in memory too."""
    has_loss: bool = True
    engine: str | None = None
    """Form in which training plans a step within the limit; ``None`` without such a plan."""
    predicted_bytes: int | None = None

    def note_plan(self, model: Checkpointable, effort: str) -> None:
        """Plan a step of a model within the limit as training does."""
        with suppress(InfeasibleError):
            plan = model.plan_step(self.limit_bytes, effort=effort or "default")
            self.engine, self.predicted_bytes = plan.engine, plan.predicted_bytes

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CurveFacts:
        """Return the facts in what a command wrote."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})

    def base_seconds(self, curve: Curve) -> float:
        """Return the time of a plain step, in measured or in planned seconds like the curve."""
        # Where parameters are fetched, no plan takes the time of a plain step.
        if (self.is_measured or self.is_away) and self.plain_seconds is not None:
            return self.plain_seconds
        return float(curve.seconds[-1])

    def scale(self, curve: Curve) -> float:
        """Return the factor from times of the curve to the time of the plain step as it ran."""
        base = self.base_seconds(curve)
        return 1.0 if self.plain_seconds is None or not base else self.plain_seconds / base


def _at(curve: Curve, limit: int | None) -> float | None:
    return None if limit is None or limit < curve.minimum_bytes else curve.at(limit)


def curve_text(curve: Curve, points: int, facts: CurveFacts | None = None) -> str:
    """Return a table of a curve: its marks and at most `points` others, and a sentence."""
    facts = facts or CurveFacts()
    count = len(curve.bytes)
    most = min(points, count)
    chosen = sorted({round(k * (count - 1) / max(most - 1, 1)) for k in range(most)})
    base, scale = facts.base_seconds(curve), facts.scale(curve)
    named = {format_bytes(size) for _, size in curve.marks}
    shown = zip(curve.bytes[chosen].tolist(), curve.seconds[chosen].tolist(), strict=True)
    lines = [(size, s, "") for size, s in shown if format_bytes(size) not in named]
    lines += [(size, _at(curve, size) or 0.0, name) for name, size in curve.marks]
    counted = "model and step" if facts.is_away else "memory of a step"
    rows = [[counted, "% of plain", "time", "x plain", ""]]
    for size, seconds, name in sorted(lines):
        # A plain step ran with its peak; plans set more aside for a loss that they cannot see.
        is_short = size < curve.minimum_bytes
        least = "nothing fits" if is_short and name != _PLAIN else ""
        share = f"{size / facts.plain_bytes:.0%}" if facts.plain_bytes else "-"
        times = f"{seconds / base:.2f}" if base and not is_short else "-"
        time = "-" if is_short else format_seconds(seconds * scale)
        if name == _PLAIN and facts.plain_seconds is not None:
            time, times = format_seconds(facts.plain_seconds), "1.00"
        if name.startswith("free"):
            share = time = times = ""
        note = ", ".join(part for part in (name, least) if part)
        rows.append([format_bytes(size), share, time, times, note])
    return "\n".join([str(table(rows)), *_remarks(curve, facts, base)])


def _remarks(curve: Curve, facts: CurveFacts, base: float) -> list[str]:
    found = []
    if facts.is_measured:
        loss = "" if facts.has_loss else f",\nwith {UNKNOWN}"
        found.append(f"Times and peaks are those of steps that were run{loss}.")
    elif facts.is_away:
        found.append("Times are planned, those of forward and backward without an update.")
    elif facts.plain_seconds is not None:
        found.append(
            "Times are planned, to the scale of plain PyTorch, which ran in "
            f"{format_seconds(facts.plain_seconds)}."
        )
    if facts.set_aside_bytes:
        found.append(
            f"Of each limit {format_bytes(facts.set_aside_bytes)} are set aside for a loss that is "
            "unknown:\n4 x the output (--loss cross_entropy plans the loss itself)."
        )
    limit, plain = facts.limit_bytes, facts.plain_bytes
    if limit is None:
        return found
    needs = "" if plain is None else f"; plain needs {format_bytes(plain)}"
    seconds = _at(curve, limit)
    if seconds is None:
        least = format_bytes(curve.minimum_bytes)
        found.append(f"At your {format_bytes(limit)} nothing fits: the least is {least}{needs}.")
    elif plain is not None and plain <= limit:
        found.append(f"At your {format_bytes(limit)} plain PyTorch fits{needs}.")
    else:
        times = f"{seconds / base:.2f} x the time" if base else "no time"
        form = _FORMS.get(facts.engine or "", "")
        found.append(f"At your {format_bytes(limit)}: {times}{form}{needs}.")
    return found


def check_plot(path: str) -> None:
    """Raise if a plot cannot be written to a path: its suffix, or a missing matplotlib."""
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {path!r}: expected a name that ends in .png, .pdf or .svg")
    new_axes("--plot")
