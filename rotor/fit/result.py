"""Results of `rotor.largest_batch`. Needs no PyTorch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from rotor.chain import write_json
from rotor.report.text import table
from rotor.units import format_bytes, format_seconds

__all__ = ["BatchFit", "LargestBatch", "TriedBatch"]

FORMAT = "rotor.fit"
VERSION = 1


def shown_bytes(nbytes: int | None) -> str:
    """Return bytes as text, or a dash if they are unknown."""
    return "-" if nbytes is None else format_bytes(nbytes)


def shown_seconds(seconds: float | None) -> str:
    """Return seconds as text, or a dash if they are unknown."""
    return "-" if seconds is None else format_seconds(seconds)


@dataclass(frozen=True, slots=True)
class BatchFit:
    """A batch size within the limit; bytes are above the level at which a step begins.

    Attributes
    ----------
    batch
        Samples in a step.
    predicted_bytes
        Peak of a step as planned; for plain PyTorch, as extrapolated from smaller batches.
    measured_bytes
        Peak of a step that was run; ``None`` for a machine that is not here.
    seconds
        Median time of a step that was run, on the clock of `rotor.timing.Clock`, or planned time.
    """

    batch: int
    predicted_bytes: int
    measured_bytes: int | None
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """Throughput."""
        return self.batch / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self) | {"samples_per_second": self.samples_per_second}


@dataclass(frozen=True, slots=True)
class TriedBatch:
    """A batch size that was tried.

    Attributes
    ----------
    batch
        Samples in a step.
    runs
        Runner of this size: "rotor" or "plain".
    fits
        True if it stays within the limit.
    least_bytes
        The least limit in which rotor can plan it, ``None`` if unknown; for plain PyTorch, the
        bytes that it needs.
    measured_bytes, seconds
        Figures of a step that was run, ``None`` if none was.
    """

    batch: int
    runs: str
    fits: bool
    least_bytes: int | None
    measured_bytes: int | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LargestBatch:
    """Result of `largest_batch`.

    Attributes
    ----------
    limit_bytes
        The limit.
    engine
        The engine of the largest batch: "chain" or "graph", "parts" or "dynamic" without a single
        plan.
    device
        Device of the runs, or the machine that was planned for.
    multiple_of
        The step between the batch sizes that were tried.
    largest
        The largest batch that fits, as it ran, or as planned for a machine that is not here.
    best
        The batch of highest throughput among all that ran, with rotor or plain.
    best_runs
        Runner of `best`: "rotor" or "plain".
    plain
        The largest batch that plain PyTorch fits, as it ran; ``None`` if the smallest does not fit.
    table
        Every size that was tried, ascending; the size after `largest` is in it and does not
        fit, unless the search ended at ``max_batch``.
    """

    limit_bytes: int
    engine: str
    device: str
    multiple_of: int
    largest: BatchFit
    best: BatchFit
    best_runs: str
    plain: BatchFit | None
    table: tuple[TriedBatch, ...] = field(repr=False)

    @property
    def refused(self) -> TriedBatch | None:
        """The next size up, which does not fit; ``None`` if the search ended before it."""
        size = self.largest.batch + self.multiple_of
        return next((t for t in self.table if t.batch == size and t.runs == "rotor"), None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        plain_fields = ("limit_bytes", "engine", "device", "multiple_of")
        return {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in plain_fields},
            "largest": self.largest.to_dict(),
            "best": {"runs": self.best_runs, **self.best.to_dict()},
            "plain": None if self.plain is None else self.plain.to_dict(),
            "table": [tried.to_dict() for tried in self.table],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return it as JSON text; write it to `path` too if given."""
        return write_json(self.to_dict(), path)

    def __str__(self) -> str:
        rows = [["", "batch", "peak", "step", "samples/s"]]
        named = [
            ("plain PyTorch, largest", self.plain),
            ("rotor, largest", self.largest),
            (f"best throughput ({self.best_runs})", self.best),
        ]
        for name, fit in named:
            if fit is None:
                rows.append([name, "none", "-", "-", "-"])
                continue
            peak = format_bytes(fit.measured_bytes or fit.predicted_bytes)
            seconds = format_seconds(fit.seconds)
            rows.append([name, str(fit.batch), peak, seconds, f"{fit.samples_per_second:.4g}"])
        text = f"limit {format_bytes(self.limit_bytes)} on {self.device}, engine {self.engine}\n"
        text += str(table(rows))
        refused = self.refused
        if refused is None:
            return f"{text}\nthe search ended at batch {self.largest.batch}\n{self.sentence}"
        needs = refused.least_bytes
        reason = "does not fit" if needs is None else f"needs at least {format_bytes(needs)}"
        return f"{text}\nbatch {refused.batch} {reason}\n{self.sentence}"

    @property
    def sentence(self) -> str:
        """The result in one sentence: plain and largest batch, their throughputs, the fastest."""
        largest, plain = self.largest, self.plain
        fastest = f"fastest is {self.best.batch} ({self.best_runs})"
        if plain is None:
            return f"batch {largest.batch}, where plain PyTorch fits none; {fastest}"
        share = largest.samples_per_second / plain.samples_per_second
        changed = f"batch {plain.batch} -> {largest.batch} at {share:.2f} of the throughput"
        return f"{changed}; {fastest}"

    def display(self) -> str:
        """Return a table of every size that was tried."""
        rows = [["batch", "runs", "fits", "least", "measured", "step", "samples/s"]]
        for tried in self.table:
            sizes = [shown_bytes(tried.least_bytes), shown_bytes(tried.measured_bytes)]
            speed = f"{tried.batch / tried.seconds:.4g}" if tried.seconds else "-"
            ran = [*sizes, shown_seconds(tried.seconds), speed]
            rows.append([str(tried.batch), tried.runs, "yes" if tried.fits else "no", *ran])
        return table(rows)
