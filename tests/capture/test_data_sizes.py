"""Sizes that depend on values: refused by graphs in words, run by what ``engine="auto"`` takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo.models import Function

import rotor
from rotor.errors import CaptureError

WIDTH = 64


def nonzero(self, x):
    rows = (x[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, self.linear(x[rows]).tanh())


def index(self, x):
    return self.linear(x)[x[:, 0] > 0].square().sum() + self.linear(x).sum()


def masked_select(self, x):
    return torch.masked_select(self.linear(x), x > 0).tanh()


def unique(self, x):
    values, places = torch.unique((x[:, 0] * 3).round(), return_inverse=True)
    return self.linear(x) * values[places][:, None]


def repeat_interleave(self, x):
    return self.linear(x).repeat_interleave((x[:, 0] > 0).long() + 1, 0).tanh()


FORWARDS = [nonzero, index, masked_select, unique, repeat_interleave]


def net_of(forward):
    return Function(forward, linear=nn.Linear(WIDTH, WIDTH))


def gradients(model, batches):
    for x in batches:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


needs_names = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="dynamo of PyTorch 2.11 fails on unique() with an error of its own, before the operator "
    "is reached",
)
NAMED = [pytest.param(m, marks=[needs_names] * (m is unique)) for m in FORWARDS]


@pytest.mark.parametrize("forward", NAMED)
def test_auto_trains_models_whose_sizes_depend_on_data(forward):
    torch.manual_seed(0)
    model = net_of(forward)
    plain = copy.deepcopy(model)
    batches = [torch.randn(128, WIDTH) for _ in range(2)]
    wrapped = rotor.Checkpointable(model, mem_limit="40MB")
    with pytest.warns(rotor.MemoryLimitWarning, match=f"{forward.__name__}.* depends on"):
        found = gradients(wrapped, batches)
    for a, b in zip(found, gradients(plain, batches), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("forward", NAMED)
def test_a_graph_refuses_them_in_words_and_names_the_line(forward):
    wrapped = rotor.Checkpointable(net_of(forward), mem_limit="40MB", engine="graph")
    with pytest.raises(CaptureError) as raised:
        wrapped(torch.randn(128, WIDTH))
    message = str(raised.value)
    assert message.startswith(f"aten.{'_' * (forward is unique)}{forward.__name__}")
    assert "test_data_sizes.py" in message
    assert "x" in message.splitlines()[-1]
    assert "compiler_fn" not in message
