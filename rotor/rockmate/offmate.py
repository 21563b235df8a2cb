"""Offmate: Rockmate's plans with a second tier, for parameters and optimizer states too."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from rotor.wrapper.checkpointable import Checkpointable


class Offmate(Checkpointable):
    """Model that trains within a budget by recomputing and offloading, by its published call.

    It is ``Checkpointable(..., engine="graph", offload=, offload_state=optimizer)``: with an
    optimizer, `budget` counts parameters, gradients and states too, as far as they are in memory.

    Parameters
    ----------
    original_mod
        Any module.
    model_inputs
        A sample of the input: a tensor, a list or tuple of positional arguments, a dictionary of
        keyword arguments. ``None``: the first training forward measures.
    budget
        The most bytes, or text such as "700MiB".
    optimizer
        Optimizer whose states, and the model's parameters and gradients, live in the tier;
        ``None``: values of a step alone go there.
    offload
        Second tier, as of `Checkpointable`; by default the host's memory, and a disk for a model on
        the CPU.
    **options
        Options of `Checkpointable`.

    Notes
    -----
    Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont: OffMate: full fine-tuning of LLMs on a
    single GPU by re-materialization and offloading, hal-04660745.
    """

    _shown_name = "Offmate"

    def __init__(
        self,
        original_mod: nn.Module,
        model_inputs: Any = None,
        budget: int | str | None = None,
        optimizer: Optimizer | None = None,
        *,
        offload: Any = None,
        **options: Any,
    ) -> None:
        if offload is None:
            kinds = {parameter.device.type for parameter in original_mod.parameters()}
            offload = "disk" if kinds <= {"cpu", "meta"} else "host"
        if isinstance(model_inputs, list):
            model_inputs = tuple(model_inputs)
        given = {"offload": offload, "offload_state": optimizer, "engine": "graph"} | options
        super().__init__(original_mod, model_inputs, budget, **given)
