"""FSDP2 (``fully_shard``) on two gloo processes: what fsdp_worker.py finds there."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_worker import GROUPS
from two_processes import PROCESSES, run_processes

WORKER = Path(__file__).with_name("fsdp_worker.py")
SECONDS = 400
CASES = [
    pytest.param(group, scenario, id=scenario)
    for group, scenarios in GROUPS.items()
    for scenario in scenarios
]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    names = list(GROUPS[request.param])
    return run_processes(str(WORKER), tmp_path_factory.mktemp("fsdp"), SECONDS, names=names)


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize(("found", "scenario"), CASES, indirect=["found"])
def test_fsdp(found, scenario, rank):
    assert found[rank][scenario] == []
