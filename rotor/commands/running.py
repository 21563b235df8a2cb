"""Losses by their names, and the steps that commands run: plain, or without a single plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rotor.commands import factories
from rotor.common.accounting import assumed_loss_bytes
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import output_tensors
from rotor.fit import batches
from rotor.fit.steps import LimitedSteps, plain_figures
from rotor.meter import allocator
from rotor.units import exact_bytes
from rotor.wrapper.checkpointable import Checkpointable

if TYPE_CHECKING:
    from rotor.commands.model import Subject


def loss_of(name: str) -> Callable[[Any], torch.Tensor]:
    """Return the loss of a name: a function of the model's output alone.

    The names are "cross_entropy", "mse" and "sum", with targets of zeros, and those of callables,
    as for `rotor.commands.factories.load`, which raises ValueError if there is no such callable.
    """
    known = {"cross_entropy": _cross_entropy, "mse": _mse, "sum": batches.sum_of}
    return known.get(name) or factories.load(name)


def has_own_loss(output: Any) -> bool:
    """Return whether an output holds the loss."""
    return isinstance(output, Mapping) and output.get("loss") is not None


def likely_loss(output: Any) -> torch.Tensor:
    """Return the loss of an output that has one, else one as large in memory as most are.

    Every output that needs a gradient is normalised as a cross-entropy does, in float32.
    """
    if has_own_loss(output):
        return batches.sum_of(output)
    found = [t for t in output_tensors(output) if t.requires_grad and t.dim()]
    return batches.sum_of([nn.functional.log_softmax(t, -1, dtype=torch.float32) for t in found])


def _scores(output: Any) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, dict) else None
    found = [logits] if isinstance(logits, torch.Tensor) else output_tensors(output)
    if not found or found[0].dim() < 2:
        raise ValueError(
            "--loss cross_entropy: the output has no dimension of classes; give FILE.py:FUNCTION"
        )
    return found[0]


def _cross_entropy(output: Any) -> torch.Tensor:
    """Return the cross-entropy; classes are the last dimension, or the second of four and more."""
    scores = _scores(output)
    if scores.dim() == 3:
        scores = scores.flatten(0, 1)
    shape = (scores.shape[0], *scores.shape[2:])
    labels = torch.zeros(shape, dtype=torch.int64, device=scores.device)
    return nn.functional.cross_entropy(scores, labels)


def _mse(output: Any) -> torch.Tensor:
    found = output_tensors(output)[0]
    return nn.functional.mse_loss(found, torch.zeros_like(found))


def _step_of(subject: Subject, model: Any) -> Callable[[], None]:
    args, kwargs = sample_call(subject.sample, is_one=subject.is_one)

    def loss() -> Any:
        if isinstance(model, Checkpointable) and subject.loss is not None:
            return model(*args, targets=(), **kwargs)
        return (subject.loss or likely_loss)(model(*args, **kwargs))

    return batches.training_step(subject.model, loss)


def plain_step(subject: Subject) -> tuple[int, float] | None:
    """Return peak and seconds of a plain training step; ``None`` if it is out of memory.

    Nothing of the model is changed.
    """
    with batches.unchanged(subject.model, subject.device):
        return plain_figures(_step_of(subject, subject.model), subject.device)


def measured_step(
    subject: Subject, model: Checkpointable, limit: int, remark: str = ""
) -> tuple[Checkpointable, int, float]:
    """Run steps of a model without a single plan; return what ran, and a step's bytes and time.

    Raises ValueError, with the remark or the least bytes, if a step does not fit in the limit.
    """
    with batches.unchanged(subject.model, subject.device):
        steps = limited_steps(subject, model)
        steps.meter_parts()
        ran = steps.run(limit)
    if not ran.fits or ran.measured_bytes is None or ran.seconds is None:
        needs = f": try {exact_bytes(ran.least_bytes)}" if ran.least_bytes else ""
        raise ValueError(f"a step does not fit in {exact_bytes(limit)}{remark or needs}")
    return steps.runner, ran.measured_bytes, ran.seconds


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
