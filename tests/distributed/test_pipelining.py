"""Stages of a pipeline with limits, on gloo processes, and backwards that come in halves."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_models import differences
from layouts import BATCH, blocks, sharded, split
from torch import nn
from two_processes import PROCESSES, run_processes, work

import rotor

WIDTH = 32
PARTS = 4
ROWS = 128
SPREAD = 4
"""Processes of two stages on two processes each."""


def stage_module(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    blocks = [
        (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(3)
    ]
    return nn.Sequential(*(module for block in blocks for module in block))


def limited(model: nn.Module, engine: str) -> rotor.Checkpointable:
    """The model under the least limit, where it has to recompute."""
    wrapped = rotor.Checkpointable(model, engine=engine)
    if engine == "dynamic":
        wrapped.compute_sequence(mem_limit="500 KB")
        return wrapped
    wrapped.measure(torch.randn(ROWS, WIDTH, requires_grad=True))
    with pytest.raises(rotor.InfeasibleError) as caught:
        wrapped.compute_sequence(mem_limit=1)
    wrapped.compute_sequence(mem_limit=caught.value.minimum_bytes)
    plan: Any = wrapped.plan
    assert plan.schedule.recomputed if engine == "chain" else plan.recomputed
    return wrapped


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def compare(rank: int, engine: str, schedule: str) -> list[str]:
    from torch.distributed import pipelining

    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS * PARTS, WIDTH).unbind()
    plain = [stage_module(number) for number in range(PROCESSES)]
    module = limited(copy.deepcopy(plain[rank]), engine)
    stage = pipelining.PipelineStage(module, rank, PROCESSES, torch.device("cpu"))
    step = getattr(pipelining, schedule)(stage, PARTS, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        module.zero_grad()
        losses.clear()
        if rank == 0:
            step.step(x)
        else:
            step.step(target=y, losses=losses)
    whole = nn.Sequential(*plain)
    parts = [loss_of(whole(a), b) for a, b in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)]
    torch.stack(parts).mean().backward()
    found = []
    for (name, p), q in zip(module.named_parameters(), plain[rank].parameters(), strict=True):
        if p.grad is None or q.grad is None:
            found.append(f"{name} has no gradient")
        elif not (error := (p.grad - q.grad).norm()) <= 1e-5 * q.grad.norm():
            found.append(f"{name} differs by {error / q.grad.norm():.1e}")
    if losses and not torch.equal(torch.stack(losses), torch.stack(parts)):
        found.append("losses")
    if module.plan.measured_bytes is not None:
        found.append("a step was metered while messages were on their way")
    for _ in range(2):
        # The first one comes after several at once.
        module(torch.randn(ROWS, WIDTH)).sum().backward()
    if module.plan.measured_bytes is None:
        found.append("a step outside of the schedule was not metered")
    return found


def scenario(engine: str, schedule: str) -> Callable[[int], list[str]]:
    return lambda rank: compare(rank, engine, schedule)


def spread(inner: str) -> list[str]:
    """Compare stages on one dimension of a mesh; the other is that of the pipeline."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "within"))
    place, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    x, y = torch.randn(2, PARTS * BATCH[0], *BATCH[1:], generator=torch.manual_seed(2)).unbind()
    models = []
    for is_limited in (False, True):
        torch.manual_seed(place)
        model: Any = nn.Sequential(*blocks()[:4])
        if inner == "tp":
            split(model, mesh["within"])
        shard = partial(sharded, mesh=mesh["within"], reshard_after_forward=False)
        if inner == "fsdp":
            shard(model, list(model))
        models.append(model)
        if is_limited:
            model = rotor.Checkpointable(model, mem_limit="2.2 MB")
        if inner == "wrapped, fsdp":
            shard(models[-1], list(models[-1]))
        stage = pipelining.PipelineStage(model, place, 2, torch.device("cpu"), group=group)
        schedule = pipelining.Schedule1F1B(stage, PARTS, loss_fn=loss_of)
        for _ in range(2):
            model.zero_grad()
            schedule.step(*([] if place else [x]), **({"target": y} if place else {}))
    print(inner, model.report(), flush=True)
    return differences(*models)


SCENARIOS = {
    f"{engine} {schedule}": scenario(engine, schedule)
    for engine in ("chain", "graph", "dynamic")
    for schedule in ("ScheduleGPipe", "Schedule1F1B")
}


SPREADS: dict[str, Callable[[int], list[str]]] = {
    inner: lambda _, inner=inner: spread(inner) for inner in ("tp", "fsdp", "wrapped, fsdp")
}


def test_stages_on_several_processes(tmp_path):
    found = run_processes(__file__, tmp_path, names=["spread"], count=SPREAD)
    assert found == [{inner: [] for inner in SPREADS}] * SPREAD


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(__file__, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_schedules_with_whole_backwards(found, scenario, rank):
    assert found[rank][scenario] == []


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_zero_bubble_backwards_are_refused(engine):
    """What the zero-bubble schedules call for a stage that is not the first."""
    from torch.distributed.pipelining import _backward

    model = limited(stage_module(0), engine)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    output = model(x)
    with pytest.raises(RuntimeError) as caught:
        _backward.stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
    reason = str(caught.value.__cause__ or caught.value)
    # Where AOTAutograd saved what it means to overwrite, it is the first to refuse.
    assert "gradients of inputs only" in reason or "donated buffers" in reason
    assert x.grad is None


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_gradients_of_inputs_alone_can_be_asked_for(engine):
    plain = stage_module(0)
    model = limited(copy.deepcopy(plain), engine)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (got,) = torch.autograd.grad(model(x).sum(), x)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.equal(got, expected)


def test_several_microbatches_in_flight_are_not_metered():
    # Steps that other tests have refused are pending until they are collected.
    gc.collect()
    model = limited(stage_module(0), "chain")
    x = torch.randn(ROWS, WIDTH)
    with pytest.warns(rotor.MemoryLimitWarning, match="each keeps its own"):
        outputs = [model(x) for _ in range(3)]
    for output in outputs:
        output.sum().backward()
    assert model.plan.measured_bytes is None
    del outputs
    model(x).sum().backward()
    assert model.plan.measured_bytes is not None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    scenarios = (SPREADS, SPREAD) if sys.argv[3:] else (SCENARIOS, PROCESSES)
    work(int(sys.argv[1]), Path(sys.argv[2]), *scenarios)
