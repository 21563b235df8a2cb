"""Marks of selective activation checkpointing in the plans of captured graphs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rotor

GELU = torch.ops.aten.gelu.default


def saves(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is GELU else CheckpointPolicy.PREFER_RECOMPUTE


def prefers(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if operator is GELU else CheckpointPolicy.PREFER_RECOMPUTE


def repeats(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def decides(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class Marked(nn.Module):
    """Residual layers whose operators a policy marks."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(drop), nn.Linear(128, 32))
            for _ in range(4)
        )
        self.policy = policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Silence what Dynamo says of policies."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def stepped(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def wrapped(model: nn.Module, limit: int | str) -> Any:
    return rotor.Checkpointable(
        copy.deepcopy(model), mem_limit=limit, engine="graph", planning="before"
    )


def runs_of(chk: Any, of: Callable[[str], bool]) -> list[int]:
    plan = chk.plan
    tasks = plan.step.lowered.tasks
    return [int(plan.program.runs[k]) for k, task in enumerate(tasks) if of(task.name)]


def least_and_most(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    chk = wrapped(model, "1GiB")
    stepped(chk, x)
    curve = chk.curve()
    return curve.minimum_bytes, int(curve.bytes[-1])


def is_activation(name: str) -> bool:
    return name.startswith("gelu") and "backward" not in name


def test_what_must_be_saved_is_never_computed_again() -> None:
    x = torch.randn(128, 32)
    free = Marked(decides)
    least, _ = least_and_most(free, x)
    marked = Marked(saves)
    limit, _ = least_and_most(marked, x)
    assert limit > least
    chk = wrapped(free, limit)
    stepped(chk, x)
    assert max(runs_of(chk, is_activation)) > 1
    chk = wrapped(marked, limit)
    found = stepped(chk, x)
    assert runs_of(chk, is_activation) == [1] * 4
    assert all(map(torch.equal, found, stepped(marked, x)))
    assert "4 MUST_SAVE" in chk.report()


def test_what_prefers_to_be_saved_is_computed_again_where_nothing_else_fits() -> None:
    x = torch.randn(128, 32)
    preferring = Marked(prefers)
    kept, most = least_and_most(Marked(saves), x)
    chk = wrapped(preferring, (kept + most) // 2)
    stepped(chk, x)
    assert runs_of(chk, is_activation) == [1] * 4
    chk = wrapped(preferring, (least_and_most(Marked(decides), x)[0] + kept) // 2)
    found = stepped(chk, x)
    assert max(runs_of(chk, is_activation)) > 1
    assert all(map(torch.equal, found, stepped(preferring, x)))


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_what_must_be_computed_again_does_not_wait_for_the_backward(drop: float) -> None:
    x = torch.randn(128, 32)
    marked = Marked(repeats, drop)
    chk = wrapped(marked, "1GiB")
    found = stepped(chk, x)
    assert all(map(torch.equal, found, stepped(copy.deepcopy(marked), x)))
    lowered = chk.plan.step.lowered
    phases = [t.phase for t in lowered.tasks if is_activation(t.name)]
    assert phases.count("forward") == 4
    # With dropout the backward reads none of them.
    assert phases.count("backward") == (0 if drop else 4)
    free = wrapped(Marked(decides, drop), "1GiB")
    stepped(free, x)
    assert chk.plan.predicted_bytes < free.plan.predicted_bytes


def test_shapes_that_share_a_graph_keep_what_must_be_saved() -> None:
    marked = Marked(saves)
    chk = wrapped(marked, "340KB")
    for rows in (64, 96, 80):
        x = torch.randn(rows, 32)
        found = stepped(chk, x)
        assert all(map(torch.equal, found, stepped(marked, x)))
        assert runs_of(chk, is_activation) == [1] * 4
        chk.zero_grad(set_to_none=True)
        marked.zero_grad(set_to_none=True)
