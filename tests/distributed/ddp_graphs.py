"""What each of the processes of `test_ddp` does with models that are captured as a graph."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from eager_inductor import stand_in
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.models import FeedForward

import rotor
from rotor.engines.graph.code.early import EarlyCode

WIDTH = 32


class Net(nn.Module):
    """Blocks, a tied weight, dropout, running statistics, and perhaps a parameter left out."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(FeedForward(WIDTH, 4, 0.0) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight
        if unused:
            self.unused = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


class Headed(nn.Module):
    """A model with a limit inside of one without."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.body = body
        self.scale = nn.Linear(20, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scale(self.body(ids))


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(20, (64,), generator=generator)


def limited(model: nn.Module, **options: Any) -> rotor.Checkpointable:
    """The model under little more than the least limit, where it has to recompute."""
    wrapped = rotor.Checkpointable(model, engine="graph", effort="fast", **options)
    wrapped.measure(batch(0, 0))
    try:
        wrapped.compute_sequence(mem_limit=1)
    except rotor.InfeasibleError as error:
        program = wrapped.compute_sequence(mem_limit=error.minimum_bytes * 21 // 20)
    if program.runs.max() < 2:
        raise AssertionError("the limit makes nothing recompute")
    return wrapped


def train(
    rank: int, model: DistributedDataParallel, steps: int, silent: int = 0
) -> tuple[list[float], list[torch.Tensor | None]]:
    """Losses and last gradients; each step adds up `silent` backwards without communication."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(silent + 1):
            torch.manual_seed(1000 * rank + 10 * step + part)
            with model.no_sync() if part < silent else nullcontext():
                loss = model(batch(rank, 10 * step + part)).square().mean()
                loss.backward()
            losses.append(loss.item())
        if step < steps - 1:
            optimizer.step()
    grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return losses, grads


def differences(plain: Any, planned: Any) -> list[str]:
    """What of two trainings is not bit-equal."""
    found = [] if plain[0] == planned[0] else [f"losses {plain[0]} {planned[0]}"]
    for k, (one, other) in enumerate(zip(plain[1], planned[1], strict=True)):
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
            found.append(f"gradient {k}")
    return found


class Graphs:
    """Scenarios on one captured model: capturing takes longest."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.plain = Net()
        self.start = copy.deepcopy(self.plain.state_dict())
        self.planned = limited(copy.deepcopy(self.plain))

    def compare(self, rank: int, steps: int = 3, silent: int = 0, **options: Any) -> list[str]:
        found = []
        for model in (self.plain, self.planned):
            model.load_state_dict(self.start)
            model.zero_grad(set_to_none=True)
            found.append(train(rank, DistributedDataParallel(model, **options), steps, silent))
        return differences(*found) + self.is_planned()

    def is_planned(self) -> list[str]:
        found = []
        step = self.planned.plan.step
        if len(step.capture.graphs) != 1:
            found.append(f"{len(step.capture.graphs)} graphs")
        plan = self.planned.plan
        if plan.measured_bytes is None or plan.measured_bytes > plan.limit_bytes:
            found.append(f"measured {plan.measured_bytes} bytes, limit {plan.limit_bytes}")
        return found

    def twenty_steps(self, rank: int) -> list[str]:
        return self.compare(rank, steps=20)

    def buckets_leave_early(self, rank: int) -> list[str]:
        """The first bucket is sent before the last recomputation runs."""
        events: list[str] = []
        model = DistributedDataParallel(self.planned, bucket_cap_mb=0.02)

        # PyTorch looks at the annotations of such a hook, which here would be text.
        def sent(state, bucket):  # type: ignore[no-untyped-def]
            events.append("bucket")
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        class Noted(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                if func is torch.ops.aten.mm.default:
                    events.append("product")
                return func(*args, **kwargs or {})

        model.register_comm_hook(None, sent)
        for step in range(2):
            events.clear()
            loss = model(batch(rank, step)).square().mean()
            with Noted():
                loss.backward()
        sending = [k for k, event in enumerate(events) if event == "bucket"]
        after = [events[k:].count("product") for k in sending]
        count = events.count("product")
        good = len(sending) > 3 and after[0] > count // 2 and after[1] > 0
        return [] if good else [f"{count} products, after each bucket {after}: {events}"]


def verified_gradients_come_in_order(rank: int) -> list[str]:
    """Buckets are built by the first backward, in which the embedding's gradient is made last."""
    torch.manual_seed(7)
    planned = limited(Net())
    order: list[str] = []
    for name, parameter in planned.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    DistributedDataParallel(planned)(batch(rank, 0)).square().mean().backward()
    found = order.index("blocks.2.up.weight") < order.index("embed.weight")
    return [] if found else [str(order)]


def inside_of_a_model(rank: int) -> list[str]:
    torch.manual_seed(7)
    plain = Headed(Net())
    planned = Headed(limited(copy.deepcopy(plain.body)))
    planned.load_state_dict(plain.state_dict())
    found = [train(rank, DistributedDataParallel(model), 3) for model in (plain, planned)]
    step = planned.body.plan.step
    graphs = len(step.capture.graphs)
    return differences(*found) + ([] if graphs == 1 else [f"{graphs} graphs"])


def compiled_with_existing_views(rank: int) -> list[str]:
    """Inductor's kernels add to the buckets' views what new gradients would be."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
        stand_in(patched, folder)
        torch.manual_seed(7)
        model = Net()
        start = copy.deepcopy(model.state_dict())
        model = rotor.Checkpointable(model, engine="graph", backend="inductor", effort="fast")
        found, wrong = [], []
        for set_to_none in (True, False):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            places = []
            for step in range(3):
                optimizer.zero_grad(set_to_none=set_to_none)
                torch.manual_seed(1000 * rank + step)
                ddp(batch(rank, step)).square().mean().backward()
                places.append([p.grad.data_ptr() for p in model.parameters()])
                optimizer.step()
            found.append(([], [p.grad.clone() for p in model.parameters()]))
            in_parts = isinstance(model.plan.emitted, EarlyCode)
            if in_parts == set_to_none:
                wrong.append(f"{set_to_none}: {type(model.plan.emitted).__name__}")
            if not set_to_none and places[1] != places[2]:
                wrong.append("the gradients moved")
        return wrong + differences(*found)


def unused_parameters(rank: int) -> list[str]:
    torch.manual_seed(7)
    plain = Net(unused=True)
    start = copy.deepcopy(plain.state_dict())
    planned = limited(copy.deepcopy(plain))
    differ = []
    chosen: list[dict[str, Any]] = [{"find_unused_parameters": True}, {"static_graph": True}]
    for options in chosen:
        found = []
        for model in (plain, planned):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            found.append(train(rank, DistributedDataParallel(model, **options), 3))
        differ += [f"{options}: {name}" for name in differences(*found)]
    return differ


def wrapped_from_outside(rank: int) -> list[str]:
    differ = []
    for model in (Net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        for engine in ("auto", "graph", "dynamic"):
            inner: nn.Module = DistributedDataParallel(model)
            if isinstance(model, nn.Sequential):
                inner = nn.Sequential(inner, nn.ReLU())
            try:
                rotor.Checkpointable(inner, engine=engine)
            except TypeError as error:
                if "DistributedDataParallel(rotor.Checkpointable(" not in str(error):
                    differ.append(str(error))
            else:
                differ.append(f"accepted: {engine}")
    return differ


def offloaded(rank: int) -> list[str]:
    """Each process has a file of its own, and gradients leave early as without."""
    torch.manual_seed(7)
    plain = Net()
    planned: Any = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1 GB", engine="graph", effort="fast", offload="disk"
    )
    tier = planned.offload.tier
    planned.offload.link = rotor.graph.Link(
        1e12, 1e12, least_bytes=1, padding_bytes=tier.alignment_bytes
    )
    planned.measure(batch(0, 0))
    planned.compute_sequence(mem_limit=planned.compute_sequence().peak_bytes * 7 // 10)
    found = [train(rank, DistributedDataParallel(model), 3) for model in (plain, planned)]
    if not tier.traffic.writes:
        return ["nothing was offloaded"]
    return differences(*found)


def scenarios() -> dict[str, Callable[[int], list[str]]]:
    """By name: each gives what is wrong."""
    made: list[Graphs] = []

    def graphs() -> Graphs:
        if not made:
            made.append(Graphs())
        return made[0]

    return {
        "graph, twenty steps": lambda rank: graphs().twenty_steps(rank),
        "graph, no_sync": lambda rank: graphs().compare(rank, silent=1),
        "graph, static_graph": lambda rank: graphs().compare(rank, static_graph=True),
        "graph, bucket view": lambda rank: graphs().compare(rank, gradient_as_bucket_view=True),
        "graph, verified": verified_gradients_come_in_order,
        "graph, buckets leave early": lambda rank: graphs().buckets_leave_early(rank),
        "graph, inside": inside_of_a_model,
        "graph, compiled": compiled_with_existing_views,
        "graph, unused parameters": unused_parameters,
        "graph, offloaded": offloaded,
        "wrapped from outside": wrapped_from_outside,
    }
