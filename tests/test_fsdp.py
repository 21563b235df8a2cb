"""FSDP2 (``fully_shard``) on two gloo processes: what fsdp_worker.py finds there."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_worker import SCENARIOS
from two_processes import PROCESSES, run_processes

WORKER = Path(__file__).with_name("fsdp_worker.py")
SECONDS = 400


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(str(WORKER), tmp_path_factory.mktemp("fsdp"), SECONDS)


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fsdp(found, scenario, rank):
    assert found[rank][scenario] == []
