"""Scenarios of test_fsdp.py: models that are no chains, with blocks sharded by FSDP2."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from fsdp_models import (
    BLOCKS,
    DEVICE,
    PROCESSES,
    STEPS,
    WIDTH,
    Block,
    batch,
    compare,
    differences,
    in_order,
    kept,
    on_all,
    peak_of,
    ranks_that_differ,
    refused,
    squares,
    trained_in_backwards,
    with_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rotor
from rotor.meter import allocator


class Network(nn.Module):
    """Blocks in a loop, between two layers."""

    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 4)
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def shard(model: Any, *, root: bool = True, **options: Any) -> Any:
    """Every block; with a root the ends of the model belong to it."""
    options.setdefault("mesh", init_device_mesh(DEVICE, (PROCESSES,)))
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        return fully_shard(model, **options)
    for end in (model.first, model.last):
        fully_shard(end, **options)
    return model


def tighten(model: rotor.Checkpointable, extra: int = 0) -> int:
    """Put a measured model under the least limit, or so much above it; returns it."""
    try:
        model.compute_sequence(mem_limit=1)
    except rotor.InfeasibleError as error:
        limit = error.minimum_bytes + extra
        model.compute_sequence(mem_limit=limit)
        if not is_slower(model):
            raise AssertionError("the limit makes nothing recompute") from None
        return limit
    raise AssertionError("a limit of one byte was accepted")


def is_slower(model: rotor.Checkpointable) -> bool:
    """Whether the plan computes anything again."""
    return model.plan.recomputation > 0


def same_choices(model: rotor.Checkpointable) -> list[str]:
    found = on_all((model.plan.choice, model.plan.limit_bytes))
    return [] if found[0] == found[1] else [f"choices {found}"]


def trained(plain: Any, planned: Any, steps: int, tolerance: float = 0.0) -> list[str]:
    """Trains both: what differs, and the choices of the ranks."""
    return compare(plain, planned, steps, tolerance, same=same_choices)


def peaks(plain: Any, planned: Any, limit: int, share: float = 0.8) -> list[str]:
    """Whether the limit was kept, and is below what plain steps need."""
    return kept(planned, limit, peak_of(plain), share)


def orders(*, root: bool, reshard: bool, shard_first: bool) -> list[str]:
    """Both are trained, under the least limit and under one in the middle; both are kept."""
    plain, planned = in_order(Network, shard, shard_first, root=root, reshard_after_forward=reshard)
    found = [] if not is_slower(planned) else ["recomputed within 1 GB"]
    if any(p.grad is not None for p in planned.parameters()):
        return ["measuring left gradients"]
    limit = tighten(planned)
    found += trained(plain, planned, STEPS) + peaks(plain, planned, limit)
    middle = tighten(planned, 300_000)
    chosen = zip(planned.plan.parts.sites, planned.plan.choice, strict=True)
    if all(block.is_again(k) for block, k in chosen):
        found.append("the limit in the middle is not used")
    found += trained(plain, planned, 3) + peaks(plain, planned, middle, share=0.95)
    if len(planned.curve().bytes) < 3 or "blocks" not in planned.report():
        found.append(f"{planned.curve()}, {planned.report()}")
    return found


def first_step_measures() -> list[str]:
    """Within the forward of a sharded root; also with existing gradients, and a limit given."""
    plain, planned = shard(Network()), rotor.Checkpointable(Network())
    shard(planned)
    found = trained(plain, planned, 2)
    for model in (plain, planned):
        torch.manual_seed(1)
        for _ in range(2):
            model(batch(1)).sum().backward()
    found += differences(plain, planned)
    planned.zero_grad()
    planned.measure(batch(0))
    limit = tighten(planned)
    found += trained(plain, planned, 3)
    return found + peaks(plain, planned, limit)


def empty_units() -> list[str]:
    """Train where the root has no parameter of its own, or where an inner unit has none."""
    found = []
    for inner in (False, True):
        plain, model = (shard(Network(), root=inner) for _ in range(2))
        mesh = init_device_mesh(DEVICE, (PROCESSES,))
        for sharded in (plain, model):
            fully_shard(sharded.blocks[0].drop if inner else sharded, mesh=mesh)
        planned = rotor.Checkpointable(model)
        planned.measure(batch(0))
        found += trained(plain, planned, 2)
    return found


def left_in_cycles(planned: Any) -> list[str]:
    """Tensors of a step that live until Python collects cycles."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    planned(batch(0)).square().mean().backward()
    gc.collect()
    gc.set_debug(0)
    gc.enable()
    left = [type(one).__name__ for one in gc.garbage if isinstance(one, torch.Tensor)]
    gc.garbage.clear()
    return [f"in cycles: {left}"] if left else []


class Masked(nn.Module):
    """Keyword arguments, several outputs, buffers that a forward changes, a sharded part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor, state: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        y = self.down(torch.dropout(torch.relu(self.up(self.norm(x))), 0.1, self.training))
        return x + y * mask, {"sum": state["sum"] + y, "mask": mask, "number": 1}


class Unusual(Network):
    """What blocks take and give: nested values; one is used twice; the last ones form one unit."""

    def __init__(self) -> None:
        super().__init__(Masked)
        self.twice = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = Block().requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        mask = (x[:, :1] > 0).to(x.dtype)
        x = self.twice(self.frozen(self.first(x * scale)))
        state: dict[str, Any] = {"sum": x}
        for block in self.blocks:
            x, state = block(x, mask=mask, state=state)
        return self.last(self.norm(self.twice(x) + state["sum"]))


def unusual_blocks() -> list[str]:
    mesh = init_device_mesh(DEVICE, (PROCESSES,))

    def make(wrap: bool) -> Any:
        model = Unusual()
        fully_shard(model.blocks[1].up, mesh=mesh)
        for part in (*model.blocks, model.twice, model.frozen, [model.norm, model.last]):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return rotor.Checkpointable(model) if wrap else model

    plain, planned = make(False), make(True)
    planned.measure(batch(0))
    limit = tighten(planned)
    names = [block.name for block in planned.plan.parts.sites]
    expected = ["frozen", *(f"blocks.{k}" for k in range(BLOCKS)), "norm", "last"]
    found = [] if names == expected else [f"blocks {names}"]
    outside = planned.plan.parts.describe_outside()
    if "twice: it is called several times" not in outside:
        found.append(outside)
    found += trained(plain, planned, 4)
    gc.collect()
    gc.disable()
    found += peaks(plain, planned, limit, share=0.9)
    gc.enable()
    for (name, a), (_, b) in zip(plain.named_buffers(), planned.named_buffers(), strict=True):
        if not torch.equal(a, b):
            found.append(name)
    return found + left_in_cycles(planned)


def precision() -> list[str]:
    """Autocast, mixed precision of FSDP2; gradients that are not reduced in every backward."""
    found = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, planned = shard(Network(), mp_policy=policy), shard(Network(), mp_policy=policy)
    planned = rotor.Checkpointable(planned)
    planned.measure(batch(0))
    limit = tighten(planned)
    found += trained(plain, planned, 3) + peaks(plain, planned, limit)
    plain, planned = shard(Network()), rotor.Checkpointable(shard(Network()))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        planned.measure(batch(0))
        tighten(planned)
    for model in (plain, planned):
        torch.manual_seed(3)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(batch(0)).float().square().mean()
        loss.backward()
    found += differences(plain, planned)
    if not is_slower(planned):
        found.append("nothing is recomputed under autocast")
    plain, planned = shard(Network()), rotor.Checkpointable(shard(Network()))
    planned.measure(batch(0))
    tighten(planned, 150_000)
    return found + compare(plain, planned, 2, parts=3, same=same_choices)


def captured_loss() -> list[str]:
    plain, planned = shard(Network()), rotor.Checkpointable(shard(Network()), loss_fn=squares)
    return with_loss(plain, planned, tighten) + same_choices(planned)


def several_forwards() -> list[str]:
    """A forward before an earlier one's backward is warned of, though nothing is recomputed."""
    planned = rotor.Checkpointable(shard(Network()), batch(0), "1GB")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.stack([planned(batch(0)) for _ in range(2)]).sum().backward()
        first = [str(one.message) for one in told]
        planned(batch(0)).sum().backward()
    later = [str(one.message) for one in told[len(first) :]]
    return later if any("each keeps its own" in line for line in first) else ["no warning"]


def shared_memory() -> list[str]:
    """Without a limit, the processes of one machine share what is free."""
    planned = rotor.Checkpointable(shard(Network()))
    kept, allocator.free_bytes = allocator.free_bytes, lambda _: 1_000_000_000
    os.environ["LOCAL_WORLD_SIZE"] = str(PROCESSES)
    try:
        planned(batch(0)).sum().backward()
    finally:
        allocator.free_bytes = kept
        del os.environ["LOCAL_WORLD_SIZE"]
    # Less Adam's states; the root's parameters, gathered at that moment, count as a whole.
    states = 138_016
    return [] if planned.mem_limit == 450_000_000 - states else [f"limit {planned.mem_limit}"]


class Closed(nn.Module):
    """Takes a tensor that needs a gradient from elsewhere than its arguments."""

    def __init__(self, weight: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight = weight
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.weight[0]


def refusals() -> list[str]:
    mesh = init_device_mesh(DEVICE, (PROCESSES,))
    found = []
    for engine in ("graph", "dynamic"):
        model = shard(Network())
        found += refused(
            lambda m=model, e=engine: rotor.Checkpointable(m, engine=e), RuntimeError, '"auto"'
        )
    whole = fully_shard(Network(), mesh=mesh)
    found += refused(lambda: rotor.Checkpointable(whole), RuntimeError, "none of its blocks")
    model = Network()
    model.blocks = nn.ModuleList([Closed([model.last.bias.sum()])])
    closed = rotor.Checkpointable(shard(model, root=False))
    closed.measure(batch(0))
    closed.compute_sequence(mem_limit="1GB")
    if "blocks.0: it uses tensors that require" not in closed.plan.parts.describe_outside():
        found.append("a block with a gradient of its own way is planned")
    planned = rotor.Checkpointable(shard(Network(), root=False), batch(0), "1GB")
    found += refused(lambda: copy.deepcopy(planned), TypeError, "state_dict")
    tighten(planned)
    loss = planned(batch(0)).sum()
    loss.backward(retain_graph=True)
    found += refused(loss.backward, RuntimeError, "second backward")
    planned = rotor.Checkpointable(shard(Network(), root=False), batch(0), "1GB")
    tighten(planned)
    loss = planned(batch(0)).sum()
    found += refused(lambda: loss.backward(create_graph=True), RuntimeError, "create_graph")
    planned = rotor.Checkpointable(shard(Network(), root=False), batch(0), "1GB")
    tighten(planned)
    optimizer = torch.optim.AdamW(planned.parameters(), lr=0.1)
    planned(batch(0)).sum().backward()
    loss = planned(batch(0)).sum()
    optimizer.step()
    return found + refused(loss.backward, RuntimeError, "changed or replaced")


def evaluation() -> list[str]:
    plain, planned = shard(Network()), rotor.Checkpointable(shard(Network()), batch(0))
    with torch.no_grad():
        same = torch.equal(plain.eval()(batch(0)), planned.eval()(batch(0)))
    return [] if same else ["outputs of the evaluation"]


BLOCK_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    f"blocks: {'shard, wrap' if first else 'wrap, shard'}{', root' if root else ''}"
    f"{', reshard' if reshard else ''}": lambda first=first, root=root, reshard=reshard: orders(
        shard_first=first, root=root, reshard=reshard
    )
    for first, root, reshard in (
        (True, True, True),
        (False, True, False),
        (False, False, True),
        (True, False, False),
    )
} | {
    "blocks: first step measures": first_step_measures,
    "blocks: units without parameters": empty_units,
    "blocks: unusual": unusual_blocks,
    "blocks: precision": precision,
    "blocks: captured loss": captured_loss,
    "blocks: ranks that differ": lambda: ranks_that_differ(
        shard(Network()), shard(Network()), tighten, same_choices, 200_000, None
    ),
    "blocks: several forwards": several_forwards,
    "blocks: shared memory": shared_memory,
    "blocks: refusals": refusals,
    "blocks: evaluation": evaluation,
    "blocks: optimizer in backwards": lambda: trained_in_backwards(
        Network, attrgetter("blocks"), tighten, same_choices
    ),
}
