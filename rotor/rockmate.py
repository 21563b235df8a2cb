"""Rockmate's published name for a model that trains within a budget."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from rotor.graphed import GraphCheckpointable

__all__ = ["Rockmate"]


class Rockmate(GraphCheckpointable):
    """``Checkpointable(model, sample, budget, engine="graph")``, by its published call.

    Outputs are the model's own, and ``loss.backward()`` is all that a step needs.

    Parameters
    ----------
    original_mod
        Any module.
    model_inputs
        A sample of the input: a tensor, a tuple for several arguments, a dictionary for keyword
        arguments. ``None``: the first training forward measures.
    budget
        The limit of one training step: bytes, or text such as "700MiB"; ``None``: 90 % of what is
        free.
    **options
        Those of `Checkpointable`.
    """

    _shown_name = "Rockmate"

    def __init__(
        self,
        original_mod: nn.Module,
        model_inputs: Any = None,
        budget: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(original_mod, model_inputs, budget, engine="graph", **options)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the backward is that of the loss.

        Warns
        -----
        DeprecationWarning
            Always: ``loss.backward()`` has run the whole backward.
        """
        warnings.warn(
            "Rockmate.backward() does nothing and is not needed: loss.backward() runs the whole "
            "backward",
            DeprecationWarning,
            stacklevel=2,
        )
