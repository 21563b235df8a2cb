"""Record of the search for a program."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PlanningRecord"]


@dataclass
class PlanningRecord:
    """Record of the search for one kind of step's program.

    Attributes
    ----------
    origin
        Origin of the first program: "searched before the step", "estimated" by a run or two of each
        operation, "repaired" from an earlier one, "kept on disk", or "loaded".
    improved
        Number of better programs since.
    is_final
        True if no better one is looked for.
    seconds
        Time of the capture and of all searches, measurements included.
    is_rough
        True if operations are left to measure between the steps.
    told, told_recomputation
        Number of better programs, and recomputation, of the latest line about it; ``None`` before.
    """

    origin: str = "searched before the step"
    improved: int = 0
    is_final: bool = True
    seconds: float = 0.0
    is_rough: bool = False
    told: int = 0
    told_recomputation: float | None = None

    @property
    def text(self) -> str:
        """Record as text."""
        times = {0: "", 1: ", improved once"}.get(
            self.improved, f", improved {self.improved} times"
        )
        state = "final" if self.is_final else "a better one is looked for"
        return f"{self.origin}{times}, {state}, {self.seconds:.1f} s"
