"""Losses of a command line: functions of the output alone, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rotor.commands import factories
from rotor.common.tensor_trees import output_tensors
from rotor.fit import batches


def loss_of(name: str) -> Callable[[Any], torch.Tensor]:
    """Return the loss of a name: a function of the model's output alone.

    The names are "cross_entropy", "mse" and "sum", with targets of zeros, and those of callables,
    as for `rotor.commands.factories.load`, which raises ValueError if there is no such callable.
    """
    if name == "cross_entropy":
        return _cross_entropy
    if name == "mse":
        return _mse
    if name == "sum":
        return batches.sum_of
    return factories.load(name)


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
