"""Record of the search for a program."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PlanningRecord"]


@dataclass
class PlanningRecord:
    """Record of the search for one kind of step's program."""

    origin: str = "searched before the step"
    """Or "estimated" by a run or two of each operation, "repaired", "kept on disk", "loaded"."""
    improved: int = 0
    """Number of better programs since."""
    is_final: bool = True
    """True if no better program is looked for."""
    seconds: float = 0.0
    """Time of the capture and of all searches, measurements included."""
    is_rough: bool = False
    """True if operations are left to measure between the steps."""
    told: int = 0
    """Number of better programs when the user was last told of them."""
    told_recomputation: float | None = None
    """Recomputation when the user was last told of it; None before."""

    @property
    def text(self) -> str:
        """Record as text."""
        times = {0: "", 1: ", improved once"}.get(
            self.improved, f", improved {self.improved} times"
        )
        state = "final" if self.is_final else "a better one is looked for"
        return f"{self.origin}{times}, {state}, {self.seconds:.1f} s"
