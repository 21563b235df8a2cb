"""FSDP2 (``fully_shard``) on two processes with a simulated device each."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_processes import PROCESSES, run_processes

WORKER = Path(__file__).with_name("fsdp_worker.py")
SECONDS = 300
SCENARIOS = ["small device, chain", "small device, blocks", "captured loss", "tier: several limits"]
MORE = [
    "wrap, shard, root, reshard",
    "shard, wrap",
    "first step measures",
    "inside of a sharded model",
    "mixed precision",
    "prefetches and meshes",
    "replicas keep what they reduce",
    "accumulation",
    "sharded after planning",
    "unusual stages",
    "ranks that differ",
    "optimizer between",
    "refusals",
    "blocks: shard, wrap, root, reshard",
    "blocks: wrap, shard, reshard",
    "graphs: several limits",
    "graphs: not captured",
    "graphs: lost",
    "tier: any programs",
    "tier: limited",
    "tier: lives of steps",
    "tier: failures",
    "tier: without graphs",
    "tier: other speeds",
]


def found_by(names, folder):
    settings = {"ROTOR_FSDP_DEVICE": "sim"}
    return run_processes(str(WORKER), folder, SECONDS, names=names, settings=settings)


def check(found, names):
    for rank in range(PROCESSES):
        assert found[rank] == {name: [] for name in names}


@pytest.mark.slow
def test_sharded_models(tmp_path):
    """Train where plain sharded training ends in OutOfMemoryError, bit-equal to it."""
    check(found_by(SCENARIOS, tmp_path), SCENARIOS)


@pytest.mark.slow
def test_other_scenarios(tmp_path):
    """Do what test_fsdp.py does on the CPU, by the device's counters."""
    check(found_by(MORE, tmp_path), MORE)
