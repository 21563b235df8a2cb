"""Runs a test file as a script in two processes that form a gloo group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PROCESSES = 2
SECONDS = 240
"""An end for what hangs; what works takes a tenth of it on an idle machine."""

Scenarios = dict[str, Callable[[int], list[str]]]


def work(rank: int, folder: Path, scenarios: Scenarios) -> None:
    """What one of the processes does: every scenario, in order; what it found goes to a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=SECONDS // 2),
    )
    found = {name: scenario(rank) for name, scenario in scenarios.items()}
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run_processes(
    script: str,
    folder: Path,
    seconds: float = SECONDS,
    *,
    names: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> list[dict[str, list[str]]]:
    """What each process found, in the scenarios of these names or in all.

    Both are ended when one fails or time is up. The settings are for their environment.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(settings or {})}
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = []
    for rank in range(PROCESSES):
        # To a file: a pipe that nobody reads fills up.
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, script, str(rank), str(folder), *names],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for process in processes:
            process.wait(timeout=seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"{rank}.log").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
