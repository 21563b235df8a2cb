"""Replicas of a captured graph that share their plans: two gloo processes under DDP.

Run as a script, this file is one of the two processes, which does the scenarios that are named, or
all of them.
"""

from __future__ import annotations

import copy
import errno
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_graphs import Net, differences
from fsdp_models import on_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import PROCESSES, run_processes, work
from unrepeatable import STATE, Stack, sample

import rotor
from rotor.common.ranks import RankError
from rotor.graph.link import Link
from rotor.meter.room import Room
from rotor.tier import DiskTier

NO_MORE = 1 << 30


def batch(rank: int, step: int, rows: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(20, (rows,), generator=generator)


def shared(model: nn.Module, limit: Any = "1 GB", **options: Any) -> Any:
    made: Any = rotor.Checkpointable(model, mem_limit=limit, effort="fast", **options)
    made.share_plans()
    return made


def tighten(model: Any, x: torch.Tensor, share: float = 0.1) -> int:
    """Plan close to the least limit of all ranks, where the program has to recompute."""
    model.measure(x)
    most = max(on_all(model.compute_sequence(mem_limit="1 GB").peak_bytes))
    try:
        model.compute_sequence(mem_limit=1)
    except rotor.InfeasibleError as error:
        least = error.minimum_bytes
    limit = int(least + share * max(most - least, 0))
    model.compute_sequence(mem_limit=limit)
    return limit


def steps(
    rank: int, model: Any, rows: list[int], first: int = 0, silent: int = 0
) -> tuple[list[float], list[torch.Tensor | None]]:
    """Losses and last gradients of steps with batches of these sizes."""
    ddp = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step, count in enumerate(rows, first):
        optimizer.zero_grad()
        for part in range(silent + 1):
            torch.manual_seed(1000 * rank + 10 * step + part)
            sync = ddp.require_backward_grad_sync
            ddp.require_backward_grad_sync = part == silent
            loss = ddp(batch(rank, 10 * step + part, count)).square().mean()
            loss.backward()
            ddp.require_backward_grad_sync = sync
            losses.append(loss.item())
        optimizer.step()
    return losses, [p.grad if p.grad is None else p.grad.clone() for p in ddp.parameters()]


def pair(limit: Any = "1 GB", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    plain = Net()
    return plain, shared(copy.deepcopy(plain), limit, **options)


def compare(rank: int, plain: nn.Module, planned: Any, rows: list[int], silent: int = 0):
    found = [steps(rank, model, rows, silent=silent) for model in (plain, planned)]
    for name, one in plain.state_dict().items():
        if not torch.equal(one, planned.state_dict()[name]):
            return [*differences(*found), name]
    return differences(*found)


def same_program(planned: Any, recomputes: bool = True) -> list[str]:
    """What is wrong with the latest plan of the ranks."""
    plan, found = planned.plan, []
    programs = on_all(plan.program.actions.tolist())
    if programs[0] != programs[1]:
        found.append("the programs differ")
    if recomputes and plan.program.runs.max() < 2:
        found.append("nothing is recomputed")
    if plan.predicted_bytes > plan.limit_bytes:
        found.append(f"predicted {plan.predicted_bytes}, limit {plan.limit_bytes}")
    if plan.measured_bytes is None or plan.measured_bytes > plan.predicted_bytes:
        found.append(f"measured {plan.measured_bytes}, predicted {plan.predicted_bytes}")
    return found


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def refused(rank: int, call: Callable[[], Any], kind: type[Exception], words: str) -> list[str]:
    """On rank 1 an error of its own, on rank 0 one that names rank 1; both with these words."""
    error = raised(call)
    expected = kind if rank == 1 else RankError
    if type(error) is not expected or words not in str(error):
        return [f"{type(error).__name__}: {error}"]
    return [] if rank == 1 or "rank 1 of 2" in str(error) else [str(error)]


# -- scenarios


def equal_to_plain(rank: int) -> list[str]:
    plain, planned = pair()
    tighten(planned, batch(rank, 0))
    found = compare(rank, plain, planned, [64] * 4) + same_program(planned)
    if "2 ranks run this program" not in planned.report():
        found.append(planned.report())
    return found + compare(rank, plain, planned, [64] * 3, silent=1) + same_program(planned)


def limits_differ(rank: int) -> list[str]:
    plain, planned = pair()
    limit = tighten(planned, batch(rank, 0))
    planned.compute_sequence(mem_limit=limit if rank else 2 * limit)
    found = compare(rank, plain, planned, [64] * 3) + same_program(planned)
    return found if planned.plan.limit_bytes == limit else [*found, str(planned.plan.limit_bytes)]


def larger_on_one(rank: int) -> list[str]:
    """Rank 1 has half as many rows again, and both keep the limit by one program."""
    rows = 96 if rank else 64
    plain, planned = pair()
    tighten(planned, batch(rank, 0, rows))
    found = compare(rank, plain, planned, [rows] * 3) + same_program(planned)
    needs = on_all(planned.plan.predicted_bytes)
    if not needs[0] < needs[1]:
        found.append(f"needs {needs}")
    error = raised(lambda: planned.compute_sequence(mem_limit=needs[0] // 2))
    texts = on_all(f"{type(error).__name__}: {error}")
    if texts[0] != texts[1] or "InfeasibleError: no plan" not in texts[0]:
        found.append(str(texts))
    if "on rank 1 most of all" not in texts[0]:
        found.append(texts[0])
    return found + compare(rank, plain, planned, [rows]) + same_program(planned)


def other_shapes(rank: int) -> list[str]:
    """Each combination of the ranks' shapes has one plan; a known shape is not captured again."""
    plain, planned = pair()
    limit = tighten(planned, batch(rank, 0, 96))
    rows = [96, 64, 96, 64, 96 if rank else 64, 96 if rank else 64]
    found = compare(rank, plain, planned, rows) + same_program(planned, recomputes=False)
    if len({key.measured for key in planned.plans}) != 3:
        found.append(f"{len(planned.plans)} plans")
    captures = {id(plan.step.capture) for plan in planned.plans.values()}
    if len(captures) != 2:
        found.append(f"{len(captures)} captures")
    if any(plan.limit_bytes != limit for plan in planned.plans.values()):
        found.append("limits")
    return found


class Tight(DiskTier):
    """A tier on disk that may be full."""

    is_full = False

    def allocate(self, nbytes: int) -> Any:
        if self.is_full and nbytes:
            raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes")
        return super().allocate(nbytes)


class Slow(Tight):
    """A tier whose reads take their time."""

    seconds = 0.0

    def wait(self, ticket: Any) -> None:
        time.sleep(self.seconds)
        super().wait(ticket)


def with_tier(rank: int, kind: type[Tight] = Tight) -> tuple[nn.Module, Any, Any]:
    tier: Any = kind(tempfile.mkdtemp())
    tier.least_bytes = 1
    plain, planned = pair(offload=tier)
    planned.offload.link = Link(1e12, 1e12, padding_bytes=tier.alignment_bytes)
    planned.offload.learned = NO_MORE
    planned.measure(batch(rank, 0))
    return plain, planned, tier


def on_disk(rank: int) -> list[str]:
    plain, planned, tier = with_tier(rank)
    peak = planned.compute_sequence(mem_limit="1 GB").peak_bytes
    planned.compute_sequence(mem_limit=peak * 7 // 10)
    found = compare(rank, plain, planned, [64] * 3) + same_program(planned, recomputes=False)
    if not planned.plan.program.offloaded_bytes or not tier.traffic.writes:
        found.append("nothing was offloaded")
    link = planned.plan.program.link
    # The slowest tier of all, and the least room.
    planned.offload.link = Link(1e9 * (1 + rank), 1e10, 1e-4 * rank, host_bytes=None)
    room = max(on_all(planned.plan.program.host_peak_bytes)) // 2
    planned.offload.limit_bytes = room if rank else None
    planned.compute_sequence(mem_limit=peak * 8 // 10)
    link = planned.offload.link
    if (link.write_bytes_per_s, link.latency_s, link.host_bytes) != (1e9, 1e-4, room):
        found.append(f"{link}")
    found += compare(rank, plain, planned, [64] * 3) + same_program(planned, recomputes=False)
    if planned.plan.layout is not None and planned.plan.layout.nbytes > room:
        found.append(f"{planned.plan.layout.nbytes} bytes on the tier, limit {room}")
    return found


def full_tier(rank: int) -> list[str]:
    plain, planned, tier = with_tier(rank)
    peak = planned.compute_sequence(mem_limit="1 GB").peak_bytes
    before, limit = planned.plan, peak * 7 // 10
    tier.is_full = rank == 1
    found = refused(rank, lambda: planned.compute_sequence(mem_limit=limit), OSError, "no room for")
    if planned.plans[before.key] is not before or planned.mem_limit == limit:
        found.append("the former plan is gone")
    tier.is_full = False
    planned.compute_sequence(mem_limit=limit)
    found += compare(rank, plain, planned, [64] * 2)
    # The room goes while the model trains: nothing runs on any rank.
    tier.is_full = rank == 1
    states = copy.deepcopy(planned.state_dict())
    found += refused(rank, lambda: planned(batch(rank, 0)), OSError, "no room for")
    if any(not torch.equal(value, states[name]) for name, value in planned.state_dict().items()):
        found.append("the step has changed something")
    tier.is_full = False
    return found + compare(rank, plain, planned, [64] * 2) + same_program(planned, False)


def waits_on_one(rank: int) -> list[str]:
    """A tier that is slow on rank 1 alone is planned for on both."""
    plain, planned, tier = with_tier(rank, Slow)
    peak = planned.compute_sequence(mem_limit="1 GB").peak_bytes
    planned.compute_sequence(mem_limit=peak * 7 // 10)
    planned.offload.learned = 0
    tier.seconds = 0.02 * rank
    link = planned.offload.link
    found = compare(rank, plain, planned, [64] * 8)
    slower = on_all(planned.offload.link)
    if slower[0] != slower[1] or slower[0].read_bytes_per_s >= link.read_bytes_per_s:
        found.append(f"{slower}, before {link}")
    return found + same_program(planned, recomputes=False)


class Moody(nn.Module):
    """A model whose code depends on Python values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.is_broken, self.is_long = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            torch._dynamo.graph_break()
        x = self.norm(x)
        if self.is_long:
            x = x + self.second(torch.tanh(self.first(x)))
        return x + self.second(torch.tanh(self.first(x)))


def refused_on_one(rank: int) -> list[str]:
    plain = Moody()
    planned = shared(copy.deepcopy(plain))
    x = torch.randn(8, 16)
    planned.module.is_broken = rank == 1
    before = copy.deepcopy(planned.state_dict())
    found = []
    for call in (planned.measure, planned):
        found += refused(
            rank, lambda c=call: c(x), rotor.CaptureError, "each process plans for itself"
        )
    if any(not torch.equal(value, before[name]) for name, value in planned.state_dict().items()):
        found.append("something has changed")
    if planned.plans:
        found.append("there is a plan")
    planned.module.is_broken = False
    models = [DistributedDataParallel(model) for model in (plain, planned)]
    outputs = [model(x) for model in models]
    return found if torch.equal(*outputs) else [*found, "outputs"]


def values_change(rank: int) -> list[str]:
    """Where a value changes on one rank, none runs; where it does on all, they plan again."""
    plain = Moody()
    planned = shared(copy.deepcopy(plain))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 16, generator=generator)
    models = [DistributedDataParallel(model) for model in (plain, planned)]

    def step() -> list[str]:
        outputs = [model(x) for model in models]
        for model, output in zip(models, outputs, strict=True):
            model.zero_grad()
            output.square().sum().backward()
        same = torch.equal(*outputs) and all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(plain.parameters(), planned.parameters(), strict=True)
        )
        return [] if same else ["a step"]

    found = step() + step()
    planned.module.is_long = rank == 1
    before = copy.deepcopy(planned.state_dict())
    error = raised(lambda: planned(x))
    if not isinstance(error, RankError) or "rank 1 of 2 has reached another graph" not in str(
        error
    ):
        found.append(f"{type(error).__name__}: {error}")
    if any(not torch.equal(value, before[name]) for name, value in planned.state_dict().items()):
        found.append("something has changed")
    plain.is_long = planned.module.is_long = True
    found += step() + step()
    plain.is_long = planned.module.is_long = False
    found += step()
    planned.module.is_long = rank == 1
    error = raised(lambda: planned.measure(x))
    if not isinstance(error, RankError) or "has captured" not in str(error):
        found.append(f"{type(error).__name__}: {error}")
    planned.module.is_long = False
    return found + step()


def differs_on_one(rank: int) -> list[str]:
    """A recomputed value that differs on rank 1 refuses the step on both; it is kept then."""
    plain = Stack("liar", norm=True)
    planned = shared(Stack("liar", norm=True))
    x = sample()
    tighten(planned, x, 0.0)
    for model in (plain, planned):
        model.zero_grad()
    states = copy.deepcopy(planned.state_dict())
    STATE["lies"] = rank == 1
    error = raised(lambda: planned(x).square().mean().backward())
    STATE["lies"] = False
    found = []
    if not isinstance(error, rotor.RecomputationError) or "Found on rank 1 of 2" not in str(error):
        found.append(f"{type(error).__name__}: {error}")
    if any(not torch.equal(value, states[name]) for name, value in planned.state_dict().items()):
        found.append("buffers have changed")
    if any(p.grad is not None for p in planned.parameters()):
        found.append("there are gradients")
    before = planned.plan
    # The least limit is that of a program that computes it again.
    texts = on_all(str(raised(lambda: planned(x))))
    if texts[0] != texts[1] or "no plan was found" not in texts[0]:
        found.append(str(texts))
    planned.compute_sequence(mem_limit="1 GB")
    for _ in range(2):
        losses = []
        for model in (plain, planned):
            model.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
        if not torch.equal(*losses) or not all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(plain.parameters(), planned.parameters(), strict=True)
        ):
            found.append("a step")
    if planned.plan is before:
        found.append("the same plan")
    return found + same_program(planned, recomputes=False)


def replaced_on_one(rank: int) -> list[str]:
    """Where one rank has to capture the model again, all measure and plan."""
    plain, planned = pair()
    tighten(planned, batch(rank, 0))
    found = compare(rank, plain, planned, [64] * 2)
    before = planned.plan
    if rank == 1:
        plain.drop, planned.module.drop = nn.Dropout(0.1), nn.Dropout(0.1)
    found += compare(rank, plain, planned, [64] * 3) + same_program(planned)
    return [*found, "the same plan"] if planned.plan is before else found


def outgrown_on_one(rank: int) -> list[str]:
    """Where one rank has less room than before, all plan for it."""
    plain, planned = pair(None)
    found = compare(rank, plain, planned, [64] * 3)
    before, is_outgrown = planned.plan, Room.is_outgrown
    Room.is_outgrown = lambda self, plan: rank == 1 and plan is before
    try:
        found += compare(rank, plain, planned, [64] * 2)
        found += same_program(planned, recomputes=False)
    finally:
        Room.is_outgrown = is_outgrown
    return [*found, "the same plan"] if planned.plan is before else found


def dropped_steps(rank: int) -> list[str]:
    plain, planned = pair()
    tighten(planned, batch(rank, 0))
    for model in (plain, planned):
        torch.manual_seed(rank)
        output = model(batch(rank, 5))
        del output
        if rank == 1:
            # A rank that evaluates alone waits for nobody.
            with torch.no_grad():
                model(batch(rank, 6))
    for buffer in (*plain.buffers(), *planned.buffers()):
        dist.broadcast(buffer, 0)
    return compare(rank, plain, planned, [64] * 3) + same_program(planned)


def copies(rank: int) -> list[str]:
    plain, planned = pair()
    limit = tighten(planned, batch(rank, 0))
    alone: Any = [copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))]
    if rank == 0:
        # A copy belongs to no ranks: it does not wait for the others.
        for model in alone:
            model.measure(batch(rank, 0))
            model(batch(rank, 0)).sum().backward()
            if model.plan.limit_bytes != limit:
                return [f"limit {model.plan.limit_bytes}"]
    return compare(rank, plain, planned, [64] * 2) + same_program(planned)


def loaded(rank: int) -> list[str]:
    plain, planned = pair()
    limit = tighten(planned, batch(rank, 0))
    found = compare(rank, plain, planned, [64] * 2)
    saved = planned.plan.program.to_json()
    roomy = planned.compute_sequence(mem_limit=2 * limit).to_json()
    planned.compute_sequence(mem_limit=2 * limit)
    loaded = planned.load_plan(saved)
    if planned.plan.program != loaded or loaded.to_json() != saved:
        found.append("another program")
    loss_bytes = planned.plan.loss_bytes
    found += compare(rank, plain, planned, [64] * 2)
    # A meter of a rank that sees another need of the loss has all plan again, rightly so.
    seen = on_all(planned.plan.loss_bytes - loss_bytes)
    if planned.plan.program != loaded and not any(seen):
        found.append("another program after steps")
    before = planned.plan
    error = raised(lambda: planned.load_plan(roomy if rank else saved))
    if saved != roomy and (not isinstance(error, RankError) or planned.plan is not before):
        found.append(f"{type(error).__name__}: {error}")
    error = raised(lambda: planned.load_plan("{}" if rank else saved))
    if type(error) is not (ValueError if rank else RankError) or planned.plan is not before:
        found.append(f"{type(error).__name__}: {error}")
    return found


def refusals(rank: int) -> list[str]:
    found = []
    given = {"engine": "dynamic" if rank else "graph"}
    model = rotor.Checkpointable(Net(), mem_limit="1 GB", **given)
    found += refused(rank, model.share_plans, ValueError, 'engine="dynamic"')
    model(batch(rank, 0)).sum().backward()  # It plans for itself, as before.
    for options, words in (
        ({"offload": DiskTier(tempfile.mkdtemp())}, "offload DiskTier"),
        ({"backend": "inductor"}, 'backend="inductor"'),
    ):
        model = rotor.Checkpointable(Net(), mem_limit="1 GB", **(options if rank else {}))
        error = raised(model.share_plans)
        if not isinstance(error, RankError) or words not in str(error):
            found.append(f"{type(error).__name__}: {error}")
    return found


def sequential_as_graph(rank: int) -> list[str]:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    planned = shared(copy.deepcopy(plain), engine="graph")
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    for model in (plain, planned):
        DistributedDataParallel(model)(x).sum().backward()
    same = all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), planned.parameters(), strict=True)
    )
    return ([] if same else ["gradients"]) + same_program(planned, recomputes=False)


SCENARIOS: dict[str, Callable[[int], list[str]]] = {
    "equal to plain": equal_to_plain,
    "limits differ": limits_differ,
    "larger on one": larger_on_one,
    "other shapes": other_shapes,
    "on disk": on_disk,
    "full tier": full_tier,
    "waits on one": waits_on_one,
    "refused on one": refused_on_one,
    "values change": values_change,
    "differs on one": differs_on_one,
    "replaced on one": replaced_on_one,
    "outgrown on one": outgrown_on_one,
    "dropped steps": dropped_steps,
    "copies": copies,
    "loaded": loaded,
    "refusals": refusals,
    "a Sequential as a graph": sequential_as_graph,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(__file__, tmp_path_factory.mktemp("ddp_shared"))


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_shared(found, scenario, rank):
    assert found[rank][scenario] == []


if __name__ == "__main__":
    chosen = {name: SCENARIOS[name] for name in sys.argv[3:] or SCENARIOS}
    work(int(sys.argv[1]), Path(sys.argv[2]), chosen)
    # Threads of gloo let go of tensors: not while the interpreter ends.
    time.sleep(1)
