"""Rewrites of joint graphs: convolutions' backwards in two parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rotor

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 8, 3, stride=2, bias=False),
    "grouped": lambda: nn.Conv2d(6, 12, 3, groups=3),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3, stride=2),
    "one-dimensional": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(6, 8, 5)),
}


class Net(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 1)
        self.second = convolution

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def backward_masks(chk):
    return [
        tuple(task.node.args[-1])
        for task in chk.plan.step.lowered.tasks
        if task.node is not None and "convolution_backward" in str(task.node.target)
    ]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_are_those_of_the_whole(name):
    torch.manual_seed(0)
    plain = Net(CONVOLUTIONS[name]())
    chk = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="64MiB", engine="graph", effort="fast"
    )
    x = torch.randn(2, 3, 9, 9)
    chk(x).backward()
    plain(x).backward()
    for ours, theirs in zip(chk.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    masks = backward_masks(chk)
    # The first convolution's input needs no gradient: one part. The second's backward is split.
    assert len(masks) == 3
    assert sum(mask[0] for mask in masks) == 1
    assert not any(mask[0] and any(mask[1:]) for mask in masks)


def test_frozen_weights_leave_one_part():
    model = Net(nn.Conv2d(6, 8, 3))
    model.second.requires_grad_(False)
    chk = rotor.Checkpointable(model, mem_limit="64MiB", engine="graph", effort="fast")
    chk(torch.randn(2, 3, 9, 9)).backward()
    assert (True, False, False) in backward_masks(chk)
    assert len(backward_masks(chk)) == 2
