"""The exceptions that rotor raises beside Python's own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rotor.algorithms.peaks import Peak


class InfeasibleError(ValueError):
    """Error: no schedule fits in the budget.

    Parameters
    ----------
    message
        The request, with figures.
    minimum_bytes
        The smallest budget, in bytes, in which a schedule exists; counted like the given budget
        (with the chain's input, or without it). For graphs the smallest for which one was found.
        For the dynamic engine an estimate, which may be too small or too large.
    lower_bound_bytes
        Bytes below which provably no schedule exists; 0 if unknown.
    peak
        The moment that sets the minimum: operation, module, and its bytes in parts; ``None`` if
        unknown.
    """

    def __init__(
        self, message: str, minimum_bytes: int, lower_bound_bytes: int = 0, peak: Peak | None = None
    ) -> None:
        super().__init__(message, minimum_bytes, lower_bound_bytes, peak)
        self.minimum_bytes = minimum_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.peak = peak

    @property
    def bound_bytes(self) -> int:
        """Another name of `lower_bound_bytes`."""
        return self.lower_bound_bytes

    @property
    def culprit(self) -> Peak | None:
        """Another name of `peak`."""
        return self.peak

    def __str__(self) -> str:
        return f"{self.args[0]}{'' if self.peak is None else f'. The least is set by {self.peak}'}"


class InvalidSequenceError(ValueError):
    """Error: a sequence needs something that is not in memory, or does not finish.

    Parameters
    ----------
    message
        The fault.
    position
        Index of the operation that cannot be done; the length of the sequence when it ends
        before the backward of stage 0.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message, position)
        self.position = position

    def __str__(self) -> str:
        where = f" (operation {self.position})" if self.position >= 0 else ""
        return f"{self.args[0]}{where}"


class CaptureError(RuntimeError):
    """Error: a model could not be captured as one graph; the message has reason and place."""


class RecomputationError(RuntimeError):
    """Error: a recomputed value differs from the first one; raised before gradients are used.

    Parameters
    ----------
    message
        The module, the operation, shapes and the cure.
    module
        Path of the module that the value belongs to; empty for the model itself.
    operation
        The operation, or stage, that made the value.
    """

    def __init__(self, message: str, module: str = "", operation: str = "") -> None:
        super().__init__(message, module, operation)
        self.module = module
        self.operation = operation

    def __str__(self) -> str:
        return str(self.args[0])


class MalformedLogError(ValueError):
    """Error: a log of the simulator is not in the format of `rotor.simrd.parse`.

    Parameters
    ----------
    message
        The text that was found and the text that was expected.
    line
        Number of the line that is wrong, from 1.
    source
        The name of the log, if it has one.
    """

    def __init__(self, message: str, line: int = 0, source: str = "") -> None:
        super().__init__(message, line, source)
        self.line = line
        self.source = source

    def __str__(self) -> str:
        where = f"{self.source or 'log'}, line {self.line}: " if self.line else ""
        return f"{where}{self.args[0]}"


class MemoryLimitWarning(UserWarning):
    """Warning: a memory limit could not be kept, or cannot be promised; it has the figures."""


class BudgetError(MemoryError, ValueError):
    """Error: a program cannot go on within the budget of `rotor.dtr.budget`.

    Parameters
    ----------
    message
        The request, the storages that cannot be evicted, with figures.
    minimum_bytes
        The smallest budget, in bytes, with which the operation that failed would have run.
    needed_bytes
        Bytes that the operation takes, with half of the guess if its workspace is not known.
    """

    def __init__(self, message: str, minimum_bytes: int, needed_bytes: int = 0) -> None:
        super().__init__(message, minimum_bytes, needed_bytes)
        self.minimum_bytes = minimum_bytes
        self.needed_bytes = needed_bytes

    def __str__(self) -> str:
        return str(self.args[0])


_FORMER = """
    chained dynamic graphed graphed_blocks graphed_inductor graphed_pieces plan schedule sharded
    stages together
"""
FORMER_MODULES = frozenset(f"rotor.{name}" for name in _FORMER.split())


class FormerModules:
    """Finder of modules that says how the pickle of an earlier version is brought to this one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of an earlier version."""
        if name in FORMER_MODULES:
            raise ModuleNotFoundError(
                f"{name} was a module of an earlier version of rotor, whose pickles of wrapped "
                "models and plans this version cannot read: save model.state_dict() there, and "
                "load it into a new rotor.Checkpointable here; files of `rotor plan --out` load",
                name=name,
            )


def refuse_former_modules() -> None:
    """Ask for modules of earlier versions last, after all finders of Python."""
    sys.meta_path.append(FormerModules)
