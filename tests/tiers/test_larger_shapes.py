"""Batches of many lengths, with parameters, gradients and states in a second tier."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiers.test_larger import GPT, OPTIMIZERS, assert_same, train
from torch.nn import functional as F

import rotor
from rotor.tier.homes import AwayTensor

LENGTHS = (32, 24, 40, 17, 32, 24, 48, 28)
LIMIT = 750_000


def batches(lengths=LENGTHS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    shapes = [(3, length) for length in lengths]
    return [(torch.randint(0, 200, s), torch.randint(0, 200, s)) for s in shapes]


def made() -> GPT:
    torch.manual_seed(0)
    return GPT()


@cache
def expected(way: str, kind: str):
    plain = made()
    optimizer = OPTIMIZERS[kind](plain.parameters())
    return train(plain, plain, optimizer, batches(), way), plain, optimizer


def wrapped(kind: str, **settings):
    model = made()
    optimizer = OPTIMIZERS[kind](model.parameters())
    settings = {"mem_limit": LIMIT, "offload": "disk", "effort": "fast", **settings}
    return rotor.Checkpointable(model, offload_state=optimizer, **settings), model, optimizer


@pytest.mark.filterwarnings("error::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(
    ("way", "kind", "settings"),
    [
        ("plain", "adamw", {}),
        ("plain", "momentum", {"planning": "before"}),
        ("accumulation", "adamw", {}),
        ("clipping", "adam", {"verify": "always"}),
    ],
)
def test_all_lengths_share_one_capture(way, kind, settings):
    losses, plain, optimizer = expected(way, kind)
    chk, model, mine = wrapped(kind, **settings)
    plans = []

    def call(*batch):
        loss = chk(*batch)
        plans.append(chk.plan)
        return loss

    assert train(call, model, mine, batches(), way) == losses
    assert_same(plain, model, optimizer, mine)
    assert {plan.engine for plan in plans} == {"graph"}
    measured = [plan for plan in plans if plan.measured_bytes is not None]
    assert measured
    assert all(plan.measured_bytes <= plan.limit_bytes for plan in measured)
    shapes = len(set(LENGTHS))
    assert f"{shapes} share 1 captured graph, 0 captured alone" in chk.report()
    assert sum(p.nbytes for p in plain.parameters()) > LIMIT // 2


def test_a_length_that_does_not_fit_is_refused_with_one_that_does():
    chk, *_ = wrapped("adamw", mem_limit=600_000)
    for batch in batches((16, 20)):
        chk(*batch).backward()
    with pytest.raises(
        rotor.InfeasibleError, match=r"fits words \[3, 400\].*the largest on the way"
    ):
        chk(*batches((400,))[0])


def transfers(chk) -> list[tuple]:
    """Return the direction, bytes, and bytes beside of each operation that moves bytes."""
    graph = chk.plan.program.graph
    return [
        (op.clock, *(graph.storages[s].bytes for s in op.outputs), op.extra, op.workspace_bytes)
        for op in graph.operations
        if op.clock != "compute"
    ]


def test_a_plan_of_another_length_moves_what_one_of_its_own_moves():
    chk, model, optimizer = wrapped("adamw", planning="before")
    train(chk, model, optimizer, batches())
    alone, *_ = wrapped("adamw", planning="before")
    for call in (chk, alone):
        call(*batches()[-1])
    assert "share 1 captured graph" in chk.report()
    assert len(transfers(alone)) > 4
    assert transfers(chk) == transfers(alone)


@pytest.mark.filterwarnings("error::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("limit", [1_350_000, 1_500_000, 1_650_000])
def test_the_need_of_a_loss_grows_with_the_length_and_not_with_parameters(limit):
    chk, *_ = wrapped("momentum", mem_limit=limit)
    for words, targets in batches((12, 16, 96)):
        F.cross_entropy(chk(words).flatten(0, 1), targets.flatten()).backward()
        assert chk.plan.measured_bytes <= limit
    assert "share 1 captured graph" in chk.report()


def test_gradients_are_added_in_memory_with_room_for_the_alignment():
    chk, *_ = wrapped("adamw", planning="before")
    for batch in batches((32, 32)):
        chk(*batch).backward()
    operations = chk.plan.program.graph.operations
    room = {op.workspace_bytes for op in operations if op.name.startswith("accumulate")}
    homes = [p.home for p in chk.module.parameters() if isinstance(p, AwayTensor)]
    assert room == {home.nbytes + home.tier.alignment_bytes - 1 for home in homes}
