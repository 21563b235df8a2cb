"""What holds tensors is freed by its count of references: the collector may be off."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import distributed

from rotor.common.ranks import Ranks
from rotor.common.substitutes import substituted


@pytest.fixture(autouse=True)
def collector_off():
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def ranks(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield Ranks()
    distributed.destroy_process_group()


def test_substitutes_in_a_tuple():
    value = torch.ones(2), {"sum": (torch.ones(3), 1)}
    other = torch.zeros(2)
    kept = [weakref.ref(t) for t in (value[0], value[1]["sum"][0], other)]
    with substituted(value, {id(value[0]): other}) as made:
        assert made[0] is other
    del value, made, other
    assert [found() for found in kept] == [None] * 3


def fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    "run",
    [
        lambda ranks: ranks.decide(fail),
        lambda ranks: ranks.together(fail),
        lambda ranks: ranks.all_well(ValueError("no")),
    ],
)
def test_errors_of_ranks(ranks, run):
    def try_with(tensor):
        try:
            run(ranks)
        except ValueError:
            return weakref.ref(tensor)

    kept = try_with(torch.ones(2))
    assert kept() is None
