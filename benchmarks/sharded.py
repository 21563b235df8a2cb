"""A model spread over two gloo processes: peak and CPU time of a step, per rank.

Compares plain ``fully_shard``, ``torch.utils.checkpoint`` around each block, and rotor at several
limits, the least one included, for both settings of ``reshard_after_forward``. With ``--split`` the
blocks are split by ``parallelize_module`` instead (tensor parallelism). The model is an
``nn.Sequential``, planned as a chain, or with ``--loop`` one whose forward loops over its blocks,
which then run programs of their captured graphs. Losses have to be equal. A peak is the larger of
the ranks', and of several steps the lowest: threads of gloo give back buffers unseen now and then.
Times are of the CPU, since both processes share the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import rotor
from rotor import memory
from rotor.report.text import table

PROCESSES = 2
HEADS = 4
WARM_STEPS = 6
"""In the first ones a plan is metered, and made again."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, length, width]."""
        b, t, w = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Recomputed(nn.Module):
    """A block under ``torch.utils.checkpoint``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        """What the block returns."""
        return checkpoint(self.block, x, use_reentrant=False)


class Loop(nn.Module):
    """Blocks in a loop, between two layers."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: torch.Tensor) -> Any:
        """Of [batch, length, 16]."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_model(arguments: argparse.Namespace, reshard: bool, recomputed: bool) -> Any:
    """Every block sharded, the rest by the root."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    blocks: list[nn.Module] = [Block(arguments.width) for _ in range(arguments.blocks)]
    for block in blocks:
        if arguments.split:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    if recomputed:
        blocks = [Recomputed(block) for block in blocks]
    ends = nn.Linear(16, arguments.width), nn.Linear(arguments.width, 16)
    model: nn.Module
    if arguments.loop:
        model = Loop(ends[0], blocks, ends[1])
    else:
        model = nn.Sequential(ends[0], *blocks, ends[1])
    if arguments.split:
        return model
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def train(model: Any, arguments: argparse.Namespace) -> tuple[int, float, list[float]]:
    """The peak of a step and its median CPU time, the larger of the ranks'; and the losses."""
    seed = 0 if arguments.split else distributed.get_rank()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(arguments.batch, arguments.length, 16, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, peaks, seconds = [], [], []
    for step in range(WARM_STEPS + 2 * arguments.steps):
        optimizer.zero_grad()
        is_metered = WARM_STEPS <= step < WARM_STEPS + arguments.steps
        meter = memory.meter("cpu").start() if is_metered else None
        distributed.barrier()
        began = time.process_time()
        loss = model(x).square().mean()
        loss.backward()
        if meter is not None:
            meter.stop()
            peaks.append(meter.peak_bytes)
        elif step >= WARM_STEPS:
            seconds.append(time.process_time() - began)
        losses.append(loss.item())
        optimizer.step()
    found: list[Any] = [None] * PROCESSES
    distributed.all_gather_object(found, (min(peaks), statistics.median(seconds)))
    return max(peak for peak, _ in found), max(time_ for _, time_ in found), losses


def compare(arguments: argparse.Namespace, reshard: bool) -> list[list[str]]:
    """The rows of one setting."""
    plain = train(make_model(arguments, reshard, False), arguments)
    segments = train(make_model(arguments, reshard, True), arguments)
    rows: list[tuple[str, int | None, tuple[int, float, list[float]]]]
    name = "parallelize_module" if arguments.split else "fully_shard"
    rows = [(name, None, plain), ("torch.utils.checkpoint", None, segments)]
    model = rotor.Checkpointable(make_model(arguments, reshard, False))
    shape = (arguments.batch, arguments.length, 16)
    model.measure(torch.randn(shape))
    least = int(model.curve().minimum_bytes)
    limits = {"its peak": segments[0], "least": least}
    limits |= {f"{share} of plain": int(share * plain[0]) for share in arguments.shares}
    for name, limit in sorted(limits.items(), key=lambda item: -item[1]):
        if limit >= least:
            planned = rotor.Checkpointable(make_model(arguments, reshard, False), mem_limit=limit)
            rows.append((f"rotor, {name}", limit, train(planned, arguments)))
    mb = 1e6
    return [
        [
            name,
            "" if limit is None else f"{limit / mb:.2f}",
            f"{peak / mb:.2f}",
            f"{peak / plain[0]:.2f}",
            f"{seconds / plain[1]:.2f}",
            "yes" if losses == plain[2] else "no",
        ]
        for name, limit, (peak, seconds, losses) in rows
    ]


def work(arguments: argparse.Namespace) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder}/store",
        rank=arguments.rank,
        world_size=PROCESSES,
        timeout=timedelta(minutes=5),
    )
    for reshard in (True,) if arguments.split else (True, False):
        rows = compare(arguments, reshard)
        if arguments.rank == 0:
            head = ["", "limit MB", "peak MB", "peak / plain", "CPU time / plain", "losses equal"]
            if not arguments.split:
                print(f"reshard_after_forward={reshard}")
            print(table([head, *rows]), end="\n\n", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--loop", action="store_true", help="a model that is no chain")
    parser.add_argument("--split", action="store_true", help="tensor parallelism, not FSDP2")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.8, 0.6])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--folder", folder]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment)
            for rank in range(PROCESSES)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
