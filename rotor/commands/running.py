"""Steps that commands run: plain, or under a limit for a model without a single plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rotor.commands import factories
from rotor.commands.losses import likely_loss
from rotor.commands.model import Subject
from rotor.common.accounting import assumed_loss_bytes
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import output_tensors
from rotor.fit import batches
from rotor.fit.steps import LimitedSteps, seconds_of
from rotor.meter import allocator
from rotor.wrapper.checkpointable import Checkpointable


def _step_of(subject: Subject, model: Any) -> Callable[[], None]:
    args, kwargs = sample_call(subject.sample, is_one=subject.is_one)
    loss = subject.loss or likely_loss
    parameters = list(subject.model.parameters())

    def step() -> None:
        if isinstance(model, Checkpointable) and subject.loss is not None:
            found = model(*args, targets=(), **kwargs)
        else:
            found = loss(model(*args, **kwargs))
        found.backward()
        del found
        for parameter in parameters:
            parameter.grad = None

    return step


def plain_step(subject: Subject) -> tuple[int, float] | None:
    """Return peak and seconds of a plain training step; ``None`` if it is out of memory.

    Nothing of the model is changed.
    """
    with batches.unchanged(subject.model, subject.device):
        step = _step_of(subject, subject.model)
        try:
            step()
            found = batches.step_bytes(step, subject.device)
            return found, seconds_of(step, subject.device)
        except (RuntimeError, MemoryError) as error:
            if not batches.is_out_of_memory(error):
                raise
            return None


def limited_steps(subject: Subject, model: Checkpointable) -> LimitedSteps:
    """Return the steps of a model without a single plan; to be run within `batches.unchanged`."""
    return LimitedSteps(
        model,
        lambda wrapped: _step_of(subject, wrapped),
        subject.device,
        lambda: factories.wrapper_of(subject.model, None, "dynamic", subject.loss),
    )


def set_aside_bytes(subject: Subject) -> int:
    """Return what plans set aside for an unknown loss; 0 if the loss is given."""
    if subject.loss is not None:
        return 0
    return assumed_loss_bytes(allocator.storage_bytes(output_tensors(subject.output)))
