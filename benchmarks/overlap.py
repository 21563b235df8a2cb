"""How much of DistributedDataParallel's overlap a plan keeps.

Two processes train a GPT-like model. A communication hook notes when each bucket of gradients is
ready, as a share of the backward: the eager model's, ours, and ours with all gradients at the end
of the backward, as a compiled graph gives them. What is sent early travels while the rest is
computed; the share of overlap kept is the mean time that is left after a bucket, against eager's.

    python benchmarks/overlap.py [--layers 6] [--steps 7]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rotor.models.gpt import gpt
from torch.nn.parallel import DistributedDataParallel

import rotor

PROCESSES = 2
WARM_STEPS = 3
BUCKET_MB = 1.0
SHARE = 0.6
"""The limit, as a share of what the step takes without recomputation."""


def build(layers: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    settings = {"vocab_size": 512, "context_length": 64, "layers": layers, "heads": 4, "width": 128}
    return gpt("gpt2", **settings), torch.randint(0, 512, (16, 64))


def ready(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> tuple[list[float], float]:
    """Per bucket the share of the backward after which it is ready; seconds of a backward."""
    times: list[float] = []
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)

    # PyTorch looks at the annotations of such a hook, which here would be text.
    def note(state, bucket):  # type: ignore[no-untyped-def]
        times.append(time.perf_counter())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    shares, seconds = [], []
    for step in range(WARM_STEPS + steps):
        times.clear()
        loss = ddp(ids).square().mean()
        begin = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - begin
        if step >= WARM_STEPS:
            shares.append([(moment - begin) / took for moment in times])
            seconds.append(took)
    return [median(column) for column in zip(*shares, strict=True)], median(seconds)


def work(options: argparse.Namespace) -> None:
    rank, folder = options.rank, Path(options.folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    found = {}
    model, ids = build(options.layers)
    found["eager"] = ready(model, ids, options.steps)
    for name in ("planned", "planned, gradients at the end"):
        model, ids = build(options.layers)
        chk = rotor.Checkpointable(model, engine="graph")
        chk.measure(ids)
        curve = chk.curve(8)
        chk.compute_sequence(int(curve.bytes[0] + SHARE * (curve.bytes[-1] - curve.bytes[0])))
        if name.endswith("end"):
            chk.plan.step.owners = None
        found[name] = ready(chk, ids, options.steps)
        found[name] = (*found[name], chk.mem_limit, chk.plan.measured_bytes)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sizes = ["--layers", str(options.layers), "--steps", str(options.steps)]
        command = [sys.executable, __file__, *sizes, "--folder", name]
        running = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment)
            for rank in range(PROCESSES)
        ]
        if any(process.wait() for process in running):
            raise SystemExit("one of the processes failed")
        found = json.loads((folder / "0.json").read_text())
    left = {way: 1 - sum(shares) / len(shares) for way, (shares, *_) in found.items()}
    for way, (shares, seconds, *limits) in found.items():
        listed = " ".join(f"{share:.2f}" for share in shares)
        print(
            f"{way}: buckets ready at {listed} of the backward, {seconds * 1e3:.0f} ms; "
            f"overlap kept {left[way] / left['eager']:.0%}"
        )
        if limits:
            print(f"    limit {limits[0]} bytes, measured {limits[1]}")
    if options.json:
        Path(options.json).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
