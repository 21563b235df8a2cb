"""What the callbacks of all frameworks share: the model that they plan, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rotor.integrations.planned import PlannedForward
from rotor.wrapper.checkpointable import Checkpointable

__all__ = ["Limited"]


class Limited:
    """Part of a callback: at most one module is planned, and tells about it.

    Parameters
    ----------
    mem_limit
        Of `rotor.Checkpointable`.
    options
        The other arguments of it.

    Attributes
    ----------
    model
        The `rotor.Checkpointable` that plans; ``None`` before there is one.
    """

    _begin = "train"
    """What starts the training, for messages."""

    def __init__(self, mem_limit: int | str | None, options: Mapping[str, Any]) -> None:
        self.model: Checkpointable | None = None
        self._planned: PlannedForward | None = None
        self._settings = {"mem_limit": mem_limit, **options}

    def report(self, path: str | os.PathLike[str] | None = None, *, snapshot: bool = False) -> str:
        """Limit, predicted and measured peak, and time: `rotor.Checkpointable.report`.

        Raises
        ------
        ValueError
            No step was trained yet; those of `rotor.Checkpointable.report`.
        """
        if self.model is None:
            raise ValueError(
                f"no plan was made: give this callback to a Trainer, and {self._begin}"
            )
        return self.model.report(path, snapshot=snapshot)

    def _plan(
        self, module: nn.Module, has_loss: Callable[[Mapping[str, Any]], bool] | None
    ) -> PlannedForward:
        """Plans the forward of a module, and no other's; it is not installed yet."""
        if self._planned is None or self.model is None or self.model.module is not module:
            self._remove()
            self._planned = PlannedForward(module, has_loss=has_loss, **self._settings)
            self.model = self._planned.model
        return self._planned

    def _remove(self) -> None:
        if self._planned is not None:
            self._planned.remove()
