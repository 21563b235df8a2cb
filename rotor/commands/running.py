"""Steps that commands run: plain, or under a limit for a model without a single plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rotor.commands import factories
from rotor.commands.model import Subject
from rotor.common.accounting import assumed_loss_bytes
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import output_tensors
from rotor.errors import InfeasibleError
from rotor.fit import batches
from rotor.fit.steps import LimitedSteps, plain_figures, plain_resident_bytes
from rotor.meter import allocator
from rotor.units import exact_bytes
from rotor.wrapper.checkpointable import Checkpointable


def _step_of(subject: Subject, model: Any) -> Callable[[], None]:
    args, kwargs = sample_call(subject.sample, is_one=subject.is_one)

    def loss() -> Any:
        if isinstance(model, Checkpointable) and subject.loss is not None:
            return model(*args, targets=(), **kwargs)
        return (subject.loss or factories.likely_loss)(model(*args, **kwargs))

    return batches.training_step(subject.model, loss)


def plain_step(subject: Subject) -> tuple[int, float] | None:
    """Return peak and seconds of a plain training step; ``None`` if it is out of memory.

    Nothing of the model is changed.
    """
    with batches.unchanged(subject.model, subject.device):
        beside = plain_resident_bytes(subject.model, subject.offload)
        return plain_figures(_step_of(subject, subject.model), subject.device, beside)


def measured_step(
    subject: Subject, model: Checkpointable, limit: int, remark: str = ""
) -> tuple[Checkpointable, int, float]:
    """Run steps of a model without a single plan; return what ran, and a step's bytes and time.

    Raises InfeasibleError, with the remark or the least bytes, if a step does not fit in the limit.
    """
    with batches.unchanged(subject.model, subject.device):
        steps = limited_steps(subject, model)
        steps.meter_parts()
        ran = steps.run(limit)
    if not ran.fits or ran.measured_bytes is None or ran.seconds is None:
        needs = f": try {exact_bytes(ran.least_bytes)}" if ran.least_bytes else ""
        text = f"a step does not fit in {exact_bytes(limit)}{remark or needs}"
        raise InfeasibleError(text, ran.least_bytes or 0)
    return steps.runner, ran.measured_bytes, ran.seconds


def limited_steps(subject: Subject, model: Checkpointable) -> LimitedSteps:
    """Return the steps of a model without a single plan; to be run within `batches.unchanged`."""
    return LimitedSteps(
        model,
        lambda wrapped: _step_of(subject, wrapped),
        subject.device,
        lambda: Checkpointable(
            subject.model, engine="dynamic", loss_fn=subject.loss, verbosity=-1, **subject.offload
        ),
    )


def set_aside_bytes(subject: Subject) -> int:
    """Return what plans set aside for an unknown loss; 0 if the loss is given."""
    if subject.loss is not None:
        return 0
    return assumed_loss_bytes(allocator.storage_bytes(output_tensors(subject.output)))
