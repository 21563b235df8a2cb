"""Rewrites of joint graphs: convolutions' backwards in two parts, BatchNorm by cuDNN."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import gradients_of, same
from zoo.models import Function

import rotor
from rotor._pytorch import cudnn

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 8, 3, stride=2, bias=False),
    "grouped": lambda: nn.Conv2d(6, 12, 3, groups=3),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3, stride=2),
    "one-dimensional": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(6, 8, 5)),
}


def net_of(convolution):
    forward = lambda self, x: self.second(torch.tanh(self.first(x))).square().mean()  # noqa: E731
    return Function(forward, first=nn.Conv2d(3, 6, 1), second=convolution)


def backward_masks(chk):
    return [
        tuple(task.node.args[-1])
        for task in chk.plan.step.lowered.tasks
        if task.node is not None and "convolution_backward" in str(task.node.target)
    ]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_are_those_of_the_whole(name):
    torch.manual_seed(0)
    plain = net_of(CONVOLUTIONS[name]())
    chk = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="64MiB", engine="graph", effort="fast"
    )
    x = torch.randn(2, 3, 9, 9)
    chk(x).backward()
    plain(x).backward()
    assert same(gradients_of(chk.module), gradients_of(plain))
    masks = backward_masks(chk)
    # The first convolution's input needs no gradient: one part. The second's backward is split.
    assert len(masks) == 3
    assert sum(mask[0] for mask in masks) == 1
    assert not any(mask[0] and any(mask[1:]) for mask in masks)


def test_frozen_weights_leave_one_part():
    model = net_of(nn.Conv2d(6, 8, 3))
    model.second.requires_grad_(False)
    chk = rotor.Checkpointable(model, mem_limit="64MiB", engine="graph", effort="fast")
    chk(torch.randn(2, 3, 9, 9)).backward()
    assert (True, False, False) in backward_masks(chk)
    assert len(backward_masks(chk)) == 2


def _normalise(x, weight, bias, mean, variance, training, momentum, epsilon):
    native = torch.ops.aten
    if mean is None:
        made = native._native_batch_norm_legit.no_stats(
            x, weight, bias, training, momentum, epsilon
        )
        mean = variance = weight.new_empty(0)
    else:
        mean, variance = mean.clone(), variance.clone()
        made = native.native_batch_norm(
            x, weight, bias, mean, variance, training, momentum, epsilon
        )
    return *made, mean, variance, torch.empty(64, dtype=torch.uint8)


def _normalise_backward(gradient, x, weight, mean, variance, kept_mean, kept_scale, *rest):
    assert rest[1].nbytes == 64
    given = (gradient, x, weight, mean, variance, kept_mean, kept_scale, True, rest[0])
    return torch.ops.aten.native_batch_norm_backward(*given, [True, True, True])


@pytest.fixture
def cudnn_here(monkeypatch):
    """Have the CPU take the place of cuDNN; its reserve has bytes that nothing writes."""
    library = torch.library.Library("rotor_cudnn", "IMPL")
    library.impl("cudnn_batch_norm", _normalise, "CPU")
    library.impl("cudnn_batch_norm_backward", _normalise_backward, "CPU")
    monkeypatch.setattr(cudnn, "normalises", lambda *_: True)
    monkeypatch.setattr(cudnn, "reserve_like", lambda x: x.new_empty((64,), dtype=torch.uint8))
    return library


@pytest.mark.parametrize("limit", ["64MiB", "1.5MB"])
def test_batch_norm_goes_to_cudnn_where_eager_pytorch_gives_it_there(cudnn_here, limit):
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
    )
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, engine="graph")
    x = torch.randn(8, 3, 32, 32)
    for _ in range(2):
        plain.zero_grad()
        chk.zero_grad()
        plain(x).square().mean().backward()
        chk(x).square().mean().backward()
        assert same(gradients_of(chk.module), gradients_of(plain))
        for ours, theirs in zip(chk.module.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    operators = [str(task.node.target) for task in chk.plan.step.lowered.tasks if task.node]
    assert sum("cudnn_batch_norm.default" in name for name in operators) == 3
    assert sum("cudnn_batch_norm_backward.default" in name for name in operators) == 3
    assert not any("native_batch_norm" in name for name in operators)
    assert (chk.plan.recomputed > 0) == (limit == "1.5MB")
