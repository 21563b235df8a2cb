"""One of the processes of test_layouts.py: trains layouts, plain and within a limit."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from math import isclose
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import differences
from layouts import BATCH, LAYOUTS, Layout
from torch import nn
from torch._C._distributed_c10d import _get_work_registry_size

import rotor
from rotor import memory

STEPS = 4
METERED = 4
SECONDS = 60
TOLERANCE = 1e-5
"""For sums in another order."""


def batch(step: int, layout: Layout, *, is_short: bool = False) -> torch.Tensor:
    seed = 100 + step + (0 if layout.same_batch else 1000 * dist.get_rank())
    shape = (BATCH[0] // 2, *BATCH[1:]) if is_short else BATCH
    generator = torch.Generator().manual_seed(seed)
    if layout.words:
        return torch.randint(layout.words, shape[:2], generator=generator)
    return torch.randn(shape, generator=generator)


def made(layout: Layout) -> nn.Module:
    torch.manual_seed(1)
    return layout.make()


def train(model: Any, layout: Layout, way: str = "") -> tuple[list[float], int]:
    """Losses of steps of gradient descent, and the lowest peak of the metered ones.

    The lowest: threads of gloo give a buffer back a moment late now and then. The way is empty, or
    "shapes" for batches of two sizes in turn, "added" for gradients of two batches, or "second" for
    a loss with the gradient of the input.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    losses, peaks = [], []
    for step in range(STEPS + METERED):
        if way != "added" or step % 2 == 0:
            optimizer.zero_grad()
        gc.collect()
        x = batch(step, layout, is_short=way == "shapes" and step % 2 == 1)
        torch.manual_seed(step)
        is_metered = step >= STEPS
        with memory.meter("cpu") if is_metered else nullcontext() as meter, layout.around():
            loss = layout.loss(model(x.requires_grad_(way == "second")))
            if way == "second":
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + gradient.square().sum()
            loss.backward()
        if is_metered and (not way or step % 2 == 0):
            peaks.append(meter.peak_bytes)
        losses.append(loss.item())
        if step % 2 and step < STEPS + METERED - 1:
            optimizer.step()
    return losses, min(peaks)


def least_limit(layout: Layout) -> int:
    """The limit that the error of a limit of one byte names, on this rank."""
    model = rotor.Checkpointable(made(layout), mem_limit=1, engine=layout.engine)
    try:
        model(batch(0, layout))
    except rotor.InfeasibleError as error:
        return error.minimum_bytes
    raise AssertionError("a limit of one byte was accepted")


def check(layout: Layout, share: str, way: str = "") -> list[str]:
    """What differs from the plain model, and whether the limit was passed.

    The share may be "peak": then it is the measured peak, without recomputation.
    """
    if share == "peak":
        return [str(train(rotor.Checkpointable(made(layout), mem_limit="1GiB"), layout)[1])]
    plain, limited = made(layout), made(layout)
    losses, plain_peak = train(plain, layout, way)
    pending = _get_work_registry_size()
    limit = least_limit(layout) if share == "least" else int(float(share) * plain_peak)
    model = rotor.Checkpointable(
        limited, mem_limit=limit, engine=layout.engine, backend=layout.backend
    )
    found_losses, peak = train(model, layout, way)
    is_second = way == "second"
    tolerance = TOLERANCE * (is_second or layout.backend != "fx")
    found = differences(plain, limited, tolerance)
    if not all(
        isclose(*pair, rel_tol=tolerance) for pair in zip(losses, found_losses, strict=True)
    ):
        found.append(f"losses {losses}, {found_losses}")
    if left := _get_work_registry_size() - pending:
        # PyTorch holds their results for good.
        found.append(f"{left} collectives were not waited for")
    if peak > limit and not is_second:
        found.append(f"peak {peak}, limit {limit}, plain {plain_peak}")
    share_of_plain = limit / plain_peak
    print(f"{model.plan.engine}: {peak} of {limit} bytes, {share_of_plain:.2f} of plain")
    return found


def main() -> None:
    """Check layouts, each given as ``name@share``, or ``name@share@way``."""
    rank, folder, cases = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    names = [case.partition("@")[0] for case in cases]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=LAYOUTS[names[0]].processes,
        timeout=timedelta(seconds=SECONDS),
    )
    found = {}
    for name, case in zip(names, cases, strict=True):
        print(case, flush=True)
        members = LAYOUTS[name].members or dist.get_world_size()
        found[case] = check(LAYOUTS[name], *case.split("@")[1:]) if rank < members else []
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
