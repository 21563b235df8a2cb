"""Captured models that use ``torch.linalg``: its checks are operations of the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from unrepeatable import same, sample, step

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


class Net(nn.Module):
    """Products around an operator of a weight and a value."""

    def __init__(self, operator) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 10 + _EYE)
        self.operator = operator

    def forward(self, x):
        """Return the result."""
        return self.last(self.operator(self.weight, torch.tanh(self.first(x))))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_model_with_checks_is_captured(name):
    model, x = Net(OPERATORS[name]), sample(64, SIZE)
    chk = rotor.Checkpointable(model, mem_limit="4 MB", engine="graph")
    assert all(same(step(chk, x), step(model, x)) for _ in range(2))


def test_a_failed_check_is_the_models_own_error():
    model, x = Net(OPERATORS["inv"]), sample(64, SIZE)
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
