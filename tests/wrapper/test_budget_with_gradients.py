"""Budgets of Rockmate where gradients exist when a step begins."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from zoo.models import normed

import rotor


class WideHead(nn.Module):
    """Small body, and a head whose new gradient is larger than anything else."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(32, 8000)

    def forward(self, x):
        return self.head(self.body(x)[:8])


def least_budget(kind):
    with pytest.raises(rotor.InfeasibleError) as caught:
        kind(WideHead(), torch.randn(256, 32), 1000, verbosity=0)
    return caught.value.minimum_bytes


def losses(model, *, set_to_none=None):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(256, 32)).square().mean()
        loss.backward()
        optimizer.step()
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", [rotor.Rockmate, rotor.PureRotor])
@pytest.mark.parametrize("set_to_none", [None, False])
def test_an_accepted_budget_trains_on_once_gradients_exist(kind, set_to_none):
    torch.manual_seed(0)
    model = WideHead()
    chk = kind(copy.deepcopy(model), torch.randn(256, 32), least_budget(kind), verbosity=0)
    expected = losses(model, set_to_none=set_to_none)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert losses(chk, set_to_none=set_to_none) == expected
    (text,) = [str(w.message) for w in caught]
    assert f"the budget of {rotor.units.exact_bytes(chk.budget)}" in text
    assert "zero_grad(set_to_none=True)" in text


def test_gradients_that_are_set_to_none_need_no_more():
    torch.manual_seed(0)
    model = WideHead()
    budget = 3 * least_budget(rotor.Rockmate)
    chk = rotor.Rockmate(copy.deepcopy(model), torch.randn(256, 32), budget, verbosity=0)
    assert losses(chk, set_to_none=True) == losses(model, set_to_none=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [rotor.Rockmate, rotor.PureRotor])
@pytest.mark.parametrize("model, x", [(normed, (256, 64)), (WideHead, (256, 32))])
def test_what_is_expected_stays_within_an_accepted_budget_once_gradients_exist(kind, model, x):
    net, x = model(), torch.randn(x)
    with pytest.raises(rotor.InfeasibleError) as caught:
        kind(net, x, 1000, verbosity=0)
    for share in (100, 120, 200):
        budget = caught.value.minimum_bytes * share // 100
        chk = kind(copy.deepcopy(net), x, budget, verbosity=0)
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                chk(x).square().mean().backward()
            assert max(chk.expect_mem(overhead=True)) <= budget
            assert max(chk.expect_mem()) <= budget
            assert chk.plan.budget_bytes == budget
