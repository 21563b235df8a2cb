"""Marks of selective checkpointing that plans honour."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from graph_modules import Planned
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rotor


@pytest.fixture(autouse=True)
def _no_compiled_code_stays():
    yield
    torch._dynamo.reset()


def policy_of(saved, ctx, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return saved if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Marked(nn.Module):
    def __init__(self, saved: CheckpointPolicy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        policy = partial(policy_of, saved)
        self.context = partial(create_selective_checkpoint_contexts, policy)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.context).sin()


def products(saved: CheckpointPolicy) -> list[bool]:
    """Whether each product of the forward may be computed once only."""
    lowered = Planned(Marked(saved), (torch.randn(4, 16),)).lowered
    forward = [task for task in lowered.tasks if task.phase == "forward" and task.node]
    return [task.once for task in forward if "mm" in str(task.node.target)]


def test_values_that_must_be_saved_are_computed_once():
    assert products(CheckpointPolicy.MUST_SAVE) == [True] * 5
    assert products(CheckpointPolicy.PREFER_RECOMPUTE) == [False] * 5


def test_plans_keep_them_however_tight_the_limit():
    runs = {}
    for saved in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        chk = rotor.Checkpointable(Marked(saved), engine="graph", effort="fast", verbosity=0)
        chk.measure(torch.randn(512, 16))
        try:
            program = chk.compute_sequence(mem_limit=1)
        except rotor.InfeasibleError as error:
            program = chk.compute_sequence(mem_limit=error.minimum_bytes * 21 // 20)
        pairs = zip(chk.graph.operations, program.runs.tolist(), strict=True)
        runs[saved] = max(count for op, count in pairs if "mm" in op.name)
    assert runs[CheckpointPolicy.MUST_SAVE] == 1 < runs[CheckpointPolicy.PREFER_RECOMPUTE]
