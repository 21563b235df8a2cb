"""Scenario of test_sim_fsdp.py: a device with less memory than a plain sharded step needs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from fsdp_blocks import Network
from fsdp_blocks import shard as shard_blocks
from fsdp_models import DEVICE, batch, make_model, shard, squares

import rotor

ROWS = 2048
STEPS = 3
REST = 3 << 20
"""Slack of segments: the pools of FSDP2's streams are apart."""


def trained(model: Any, target: torch.Tensor) -> tuple[list[float], list[int]]:
    """Losses, and peaks by the device's counters above the level before each step."""
    losses, peaks = [], []
    for step in range(STEPS):
        model.zero_grad()
        x = batch(step, ROWS)
        torch.manual_seed(step)
        level = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        if isinstance(model, rotor.Checkpointable):
            loss = model(x, targets=(target,))
        else:
            loss = squares(model(x), target)
        loss.backward()
        peaks.append(torch.accelerator.max_memory_allocated() - level)
        losses.append(loss.item())
        del loss, x
    return losses, peaks


def small_device(kind: str) -> list[str]:
    """Plain training ends there; within a limit the model trains, equal bit for bit."""
    sim: Any = torch.get_device_module(DEVICE)

    def made() -> Any:
        if kind == "chain":
            return shard(make_model(), root=True)
        return shard_blocks(Network())

    target = torch.ones(ROWS, 4, device=DEVICE)
    plain, planned = made(), rotor.Checkpointable(made(), loss_fn=squares, verbosity=0)
    expected, needed = trained(plain, target)
    limit = int(0.6 * max(needed))
    planned.measure(batch(0, ROWS), targets=(target,))
    planned.compute_sequence(mem_limit=limit)
    kept = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    gc.collect()
    sim.empty_cache()
    resident = sim.memory_reserved()
    sim.set_capacity(resident + limit + REST)
    found: list[str] = []
    try:
        trained(plain, target)
        found.append(f"plain training fits into {limit} and {REST} bytes")
    except torch.OutOfMemoryError:
        pass
    # The step that was abandoned has left its units gathered.
    sim.set_capacity(1 << 30)
    plain = None
    gc.collect()
    sim.empty_cache()
    sim.set_capacity(sim.memory_reserved() + limit + REST)
    races = sim.races()
    losses, peaks = trained(planned, target)
    if losses != expected:
        found.append(f"losses {losses}, plain {expected}")
    for gradient, parameter in zip(kept, planned.parameters(), strict=True):
        if not torch.equal(gradient.to_local(), parameter.grad.to_local()):
            found.append("gradients")
    if max(peaks) > limit:
        found.append(f"peaks {peaks}, limit {limit}")
    if sim.races() > races:
        found.append(sim.last_race())
    sim.set_capacity(1 << 30)
    return found
