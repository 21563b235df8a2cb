"""Steps of plans that have nothing left to learn: what they no longer look at."""

from __future__ import annotations

import sys
from collections import Counter

import torch
from torch import nn
from zoo.models import Residual

import rotor


def _settled(blocks: int) -> tuple[rotor.Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Residual(8, 8) for _ in range(blocks)])
    chk = rotor.Checkpointable(
        model, mem_limit="1 GB", engine="graph", planning="before", effort="fast", verbosity=0
    )
    x = torch.randn(4, 8)
    for _ in range(12):
        chk(x).square().sum().backward()
        chk.zero_grad()
    return chk, x


def _calls(chk: rotor.Checkpointable, x: torch.Tensor) -> Counter[str]:
    """Number of calls of Python functions in the fewest of several steps, by name."""
    found = []
    for _ in range(4):
        counts: Counter[str] = Counter()

        def note(frame, event, argument, counts=counts):
            if event == "call":
                counts[frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            chk(x).square().sum().backward()
        finally:
            sys.setprofile(None)
        chk.zero_grad()
        found.append(counts)
    return min(found, key=Counter.total)


def test_a_settled_step_neither_walks_modules_nor_takes_arguments_apart():
    calls = _calls(*_settled(4))
    assert calls["Module.named_modules"] == 0
    assert not any("TreeSpec" in name for name in calls)


def test_a_layer_more_costs_a_settled_step_no_call_of_ours():
    few, many = _calls(*_settled(4)), _calls(*_settled(12))
    more = {name: many[name] - few[name] for name in many if many[name] > few[name]}
    theirs = {"AOTDispatchAutograd", "_AutogradSavedState", "unwrap_dead_wrappers"}
    assert {name.split(".")[0] for name in more} <= theirs


def test_a_layer_that_loses_its_bias_is_noticed():
    chk, x = _settled(4)
    chk.module[2].up.bias = None
    chk(x).square().sum().backward()
    ours = [p.grad.clone() for p in chk.module.parameters()]
    chk.zero_grad()
    chk.module(x).square().sum().backward()
    assert all(map(torch.equal, ours, [p.grad for p in chk.module.parameters()]))
