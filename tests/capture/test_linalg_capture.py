"""Captured models that use ``torch.linalg``: its checks are operations of the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import same
from unrepeatable import sample, step
from zoo.models import Function

import rotor

SIZE = 16
_EYE = torch.eye(SIZE)


def _positive(weight: torch.Tensor) -> torch.Tensor:
    return weight @ weight.t() + _EYE


OPERATORS = {
    "inv": lambda w, x: x @ torch.linalg.inv(w),
    "two inverses": lambda w, x: x @ torch.linalg.inv(w) @ torch.linalg.inv(w.t()),
    "solve": lambda w, x: torch.linalg.solve(w, x.t()).t(),
    "cholesky": lambda w, x: x @ torch.linalg.cholesky(_positive(w)),
    "lu_factor": lambda w, x: x @ torch.linalg.lu_factor(w)[0],
    "tensorinv": lambda w, x: x * torch.linalg.tensorinv(w.reshape(4, 4, 16))[0].sum(),
    "tensorsolve": lambda w, x: x * torch.linalg.tensorsolve(w.reshape(4, 4, 16), w[:4, :4]),
    # The check is in the backward.
    "eigvals": lambda w, x: x * torch.linalg.eigvals(w).abs().sum(),
    "eig and inv": lambda w, x: x @ torch.linalg.inv(w) * torch.linalg.eigvals(w).abs().sum(),
}


def net_of(operator):
    """Products around an operator of a weight and a value."""
    torch.manual_seed(0)
    forward = lambda self, x: self.last(operator(self.weight, torch.tanh(self.first(x))))  # noqa: E731
    weight = nn.Parameter(torch.randn(SIZE, SIZE) / 10 + _EYE)
    first, last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    return Function(forward, first=first, last=last, weight=weight)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_model_with_checks_is_captured(name):
    model, x = net_of(OPERATORS[name]), sample(64, SIZE)
    chk = rotor.Checkpointable(model, mem_limit="4 MB", engine="graph")
    assert all(same(step(chk, x), step(model, x)) for _ in range(2))


def test_a_failed_check_is_the_models_own_error():
    model, x = net_of(OPERATORS["inv"]), sample(64, SIZE)
    chk = rotor.Checkpointable(model, mem_limit="4 MB", engine="graph")
    step(chk, x)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(torch.linalg.LinAlgError):
        chk(x)


def test_effects_in_order_are_refused_in_words():
    class Prints(nn.Linear):
        def forward(self, x):
            torch._higher_order_ops.print("{}", 3)
            return super().forward(x)

    chk = rotor.Checkpointable(Prints(SIZE, SIZE), mem_limit="4 MB", engine="graph")
    with pytest.raises(rotor.CaptureError, match="effects that come in order"):
        chk(sample(64, SIZE))
