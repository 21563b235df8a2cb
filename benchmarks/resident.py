"""Does the memory that the kernel sees stay within a limit, on the CPU?

    python benchmarks/resident.py [MODEL ...]

Limits count the bytes of PyTorch's allocator. Resident memory has more: pages that the C library
keeps between blocks, scratch of libraries. Each model of truth.py trains in a process of its own,
within limits: as glibc does by itself, and with every block above 128 KiB mapped singly
(``MALLOC_MMAP_THRESHOLD_=131072``), which leaves no holes. Printed is the peak of resident memory
(``VmHWM``, reset before the steps) above the level at which the steps began, and what of it is
beyond the limit. The exit code is 1 if that is more than the constant of docs/memory-model.md
where blocks are mapped singly.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SHARES = (0.8, 0.5)
STEPS = 2
CONSTANT_BYTES = 16 << 20
SINGLY = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def resident(field: str) -> int:
    """Return a figure of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the kernel has no {field}")


def trim() -> None:
    """Give free pages back to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def steps(model: Any, batch: Any, count: int) -> None:
    """Train some steps, from no gradients each."""
    from common import cross_entropy

    for _ in range(count):
        model.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        del loss
    model.zero_grad()


def child(name: str, limit: int) -> None:
    """Train one model; print its figures."""
    import torch
    from cases import chosen

    import rotor
    from rotor import memory

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (case,) = chosen(torch.device("cpu"), [name])
    torch.manual_seed(0)
    model, batch = case.make(), case.batch(torch.device("cpu"))
    found: dict[str, Any] = {}
    if limit:
        model = rotor.Checkpointable(model, mem_limit=limit, verbosity=-1)
        try:
            model.measure(batch[0])
            model.compute_sequence()
        except rotor.InfeasibleError:
            print(json.dumps({"infeasible": True}))
            return
        steps(model, batch, 3)  # Metered ones: a profiler has memory of its own.
    else:
        steps(model, batch, 1)
        with memory.meter("cpu") as meter:
            steps(model, batch, 1)
        found["counted_bytes"] = meter.peak_bytes
    trim()
    start = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.thread_time()
    steps(model, batch, STEPS)
    found["seconds"] = (time.thread_time() - begin) / STEPS
    found["resident_bytes"] = resident("VmHWM") - start
    print(json.dumps(found))


def run(name: str, limit: int, settings: dict[str, str]) -> dict[str, Any]:
    """Return the figures of one process."""
    command = [sys.executable, __file__, "--child", name, str(limit)]
    environment = os.environ | settings
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print a row for each model and limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names, or parts of them")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "LIMIT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], int(given.child[1]))
        return 0
    import torch
    from cases import chosen

    bad = 0
    print("model           blocks   limit MiB  resident MiB  beyond MiB  seconds a step")
    for case in chosen(torch.device("cpu"), given.models):
        counted = run(case.name, 0, SINGLY)["counted_bytes"]
        runs = [(share, SINGLY) for share in SHARES]
        for share, settings in [*runs, (SHARES[-1], {})]:
            limit = int(share * counted)
            row = run(case.name, limit, settings)
            if "infeasible" in row:
                continue
            beyond = row["resident_bytes"] - limit
            is_bad = bool(settings) and beyond > CONSTANT_BYTES
            bad += is_bad
            sizes = [f"{size / (1 << 20):10.1f}" for size in (limit, row["resident_bytes"], beyond)]
            kind = "singly" if settings else "heap"
            seconds = f"{row['seconds']:8.2f}"
            print(f"{case.name:15}", f"{kind:7}", *sizes, seconds, "  !" * is_bad, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
