"""FSDP2 (``fully_shard``) on two gloo processes: what fsdp_worker.py finds there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from fsdp_worker import GROUPS, LONG
from two_processes import PROCESSES, run_processes

WORKER = Path(__file__).with_name("fsdp_worker.py")
SECONDS = 400
CASES = [
    pytest.param(group, scenario, marks=[pytest.mark.slow] * (scenario in LONG))
    for group, scenarios in GROUPS.items()
    for scenario in scenarios
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    @cache
    def run(group):
        folder = tmp_path_factory.mktemp("fsdp")
        return run_processes(str(WORKER), folder, SECONDS, names=GROUPS[group])

    return run


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize(("group", "scenario"), CASES)
def test_fsdp(found, group, scenario, rank):
    assert found(group)[rank][scenario] == []
