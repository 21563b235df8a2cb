"""Measures of stages against what can be counted by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import rotor
from rotor.engines.chain.stages import find_stages
from rotor.inspection import Chain, measure, merge_stages

F = 4  # bytes of a float


def measures_of(model: nn.Module, x, **kwargs):
    return measure(find_stages(model), x, **kwargs)


def test_sizes_of_a_perceptron():
    batch, a, b, c = 32, 100, 200, 50
    model = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))
    inspection = measures_of(model, torch.randn(batch, a))
    first, relu, last = inspection.measures
    assert inspection.input_bytes == batch * a * F
    assert [m.output_bytes for m in inspection.measures] == [
        batch * b * F,
        batch * b * F,
        batch * c * F,
    ]
    assert [m.xbar_bytes for m in inspection.measures] == [
        batch * b * F,
        batch * b * F,
        batch * c * F,
    ]
    assert first.pgrad_bytes == (a * b * F, b * F)
    assert relu.pgrad_bytes == ()
    assert first.grad_bytes == 0
    assert relu.grad_bytes == batch * b * F
    assert last.grad_bytes == batch * b * F
    assert relu.forward_tmp_bytes == 0
    assert relu.backward_peak_bytes == batch * b * F
    assert last.backward_peak_bytes == batch * b * F + (b * c + c) * F
    assert inspection.output_grad_bytes == batch * c * F
    assert all(m.forward_ns > 0 and m.backward_ns > 0 for m in inspection.measures)


def test_kept_storages_count_once_and_masks_count():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5))
    inspection = measures_of(model, torch.randn(16, 64))
    activation = 16 * 64 * F
    _, gelu, dropout = inspection.measures
    assert gelu.xbar_bytes == activation
    assert dropout.xbar_bytes in (2 * activation, activation + activation // F)
    assert dropout.uses_rng
    assert not gelu.uses_rng


def test_a_backward_that_frees_before_it_makes():
    class Chain3(nn.Module):
        def forward(self, x):
            return x.exp().tanh().mean(1, keepdim=True)

    inspection = measures_of(
        nn.Sequential(nn.Linear(8, 4096), Chain3(), nn.Linear(1, 2)), torch.randn(64, 8)
    )
    measure_ = inspection.measures[1]
    chain = inspection.chain(
        loss_tmp_bytes=0, hold_output=True, missing=[[True] * 2, [], [True] * 2], sums=[0] * 3
    )
    assert measure_.xbar_bytes > 2 * 64 * 4096 * F
    assert chain.backward_tmp_bytes[1] == measure_.backward_peak_bytes - measure_.grad_bytes
    assert chain.backward_tmp_bytes[1] <= 64 * 4096 * F


def test_batchnorm_buffers_are_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    inspection = measures_of(model, torch.randn(4, 8))
    assert [m.buffer_bytes for m in inspection.measures] == [0, 8 * F + 8 * F + 8, 0]
    model.eval()
    assert [m.buffer_bytes for m in measures_of(model, torch.randn(4, 8)).measures] == [0, 0, 0]


def test_loss_is_measured_with_its_gradient():
    model = nn.Sequential(nn.Linear(8, 1000))
    x, target = torch.randn(64, 8), torch.randint(0, 1000, (64,))
    inspection = measures_of(model, x, loss_fn=nn.functional.cross_entropy, targets=(target,))
    logits = 64 * 1000 * F
    assert inspection.loss_peak_bytes is not None
    assert 2 * logits <= inspection.loss_peak_bytes <= 3 * logits + 4096
    assert inspection.loss_ns > 0


def test_merging():
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Unflatten(1, (2, 4)),
        nn.Flatten(),
        nn.Identity(),
        nn.Linear(8, 8),
    )
    merged = merge_stages(find_stages(model), torch.randn(3, 8))
    assert [stage.name for stage in merged] == ["0+1+2+3+4+5", "6"]


def test_a_module_used_twice_stands_twice():
    shared = nn.Linear(4, 4)
    assert [s.name for s in find_stages(nn.Sequential(shared, nn.Tanh(), shared))] == [
        "0",
        "1",
        "2",
    ]


def test_hooked_sequentials_stay_whole():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(inner, nn.Linear(4, 4))
    assert [s.name for s in find_stages(model)] == ["0.0", "0.1", "1"]
    inner.register_forward_hook(lambda *_: None)
    assert [s.name for s in find_stages(model)] == ["0", "1"]


def test_inspection_is_plain_data():
    inspection = measures_of(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    data = json.loads(json.dumps(inspection.to_dict()))
    assert data["format"] == "rotor.inspection"
    assert data["stages"][0]["name"] == "0"


def test_published_names():
    assert rotor.inspection.Chain is rotor.Chain is Chain
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rotor.nonsense  # noqa: B018
