"""Runs a test file as a script in two processes, or more, that form a gloo group."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import children
import pytest
import torch.distributed as dist

PROCESSES = 2
SECONDS = 240
"""An end for what hangs; what works takes a tenth of it on an idle machine."""
LOST_SECONDS = 10
"""For a process to notice that its peer is gone."""

Scenarios = dict[str, Callable[[int], list[str]]]


def work(rank: int, folder: Path, scenarios: Scenarios, count: int = PROCESSES) -> None:
    """What one of the processes does: every scenario, in order; what it found goes to a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=SECONDS),
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
    count: int = PROCESSES,
) -> list[dict[str, list[str]]]:
    """What each process found, in the scenarios of these names or in all.

    All of the `count` are ended when one fails or time is up; what they said is shown, the one that
    failed first before the others. The settings are for their environment.
    """
    environment = children.environment(**{"OMP_NUM_THREADS": "1", **(settings or {})})
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    for rank in range(count):
        # To a file: a pipe that nobody reads fills up.
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, script, str(rank), str(folder), *names],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    failed = {}
    end = time.monotonic() + seconds
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(0.1)
            for rank, process in enumerate(processes):
                if process.poll() and rank not in failed:
                    # The others lose their peer: they end soon, and their logs have less to say.
                    failed[rank] = process.returncode
                    end = min(end, time.monotonic() + LOST_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        codes = failed | {k: p.returncode for k, p in enumerate(processes) if k not in failed}
        ends = [f"rank {k} ended with {c}:\n{last_lines(logs[k])}" for k, c in codes.items()]
        pytest.fail("\n".join(ends), pytrace=False)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def last_lines(log: Path, lines: int = 40) -> str:
    """The end of a log, without what every step says."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in said if not line.startswith("rotor: ")][-lines:])
