"""Parts that the callbacks of all frameworks share: the planned model, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rotor.integrations.planned import PlannedForward
from rotor.wrapper.checkpointable import Checkpointable

__all__ = ["Limited"]


class Limited:
    """Base of a callback: plans at most one module, and reports on it.

    Parameters
    ----------
    mem_limit
        Limit of `rotor.Checkpointable`.
    options
        Its other arguments.

    Attributes
    ----------
    model
        The `rotor.Checkpointable` that plans; ``None`` before it is made.
    """

    _begin = "train"
    """Call that starts the training, for messages."""

    def __init__(self, mem_limit: int | str | None, options: Mapping[str, Any]) -> None:
        self.model: Checkpointable | None = None
        self._planned: PlannedForward | None = None
        self._settings = {"mem_limit": mem_limit, **options}

    def report(self, path: str | os.PathLike[str] | None = None, *, snapshot: bool = False) -> str:
        """Return limit, predicted and measured peak, and time: `rotor.Checkpointable.report`.

        Raises
        ------
        ValueError
            No step was trained yet; also errors of `rotor.Checkpointable.report`.
        """
        if self.model is None:
            raise ValueError(
                f"no plan was made: give this callback to a Trainer, and {self._begin}"
            )
        return self.model.report(path, snapshot=snapshot)

    def _plan(
        self, module: nn.Module, has_loss: Callable[[Mapping[str, Any]], bool] | None
    ) -> PlannedForward:
        """Plan the forward of a module, and no other's; it is not installed yet."""
        if self._planned is None or self.model is None or self.model.module is not module:
            self._remove()
            self._planned = PlannedForward(module, has_loss=has_loss, **self._settings)
            self.model = self._planned.model
        return self._planned

    def _remove(self) -> None:
        if self._planned is not None:
            self._planned.remove()
