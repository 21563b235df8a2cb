"""The option counts=, where it is refused; test_sim_reserved.py has its limits."""

import pytest
import torch
from torch import nn

import rotor


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "chain"}, 'engine="chain"'),
        ({"engine": "dynamic"}, 'engine="dynamic"'),
    ],
)
def test_engines_without_an_order_of_allocations(options, named):
    with pytest.raises(ValueError, match="order of all allocations") as found:
        rotor.Checkpointable(nn.Linear(2, 2), mem_limit="1 MiB", counts="reserved", **options)
    assert named in str(found.value)


def test_an_unknown_value():
    with pytest.raises(ValueError, match="unknown counts 'active', expected one of allocated"):
        rotor.Checkpointable(nn.Linear(2, 2), mem_limit="1 MiB", counts="active")


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_the_cpu_reserves_nothing(model):
    wrapped = rotor.Checkpointable(model, mem_limit="1 MiB", counts="reserved")
    assert wrapped.counts == "reserved"
    with pytest.raises(ValueError, match="is for accelerators"):
        wrapped(torch.zeros(1, 2))
