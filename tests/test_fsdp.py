"""FSDP2 (``fully_shard``) on two gloo processes: what fsdp_worker.py finds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp_worker import PROCESSES, SCENARIOS

WORKER = Path(__file__).with_name("fsdp_worker.py")
SECONDS = 400


def run_processes(folder: Path) -> list[dict[str, list[str]]]:
    """What each process found; both are ended when one fails or time is up."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fsdp(found, scenario, rank):
    assert found[rank][scenario] == []
