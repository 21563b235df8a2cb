"""One of the processes of test_fsdp.py: does every scenario and writes what differed to a file."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_blocks import BLOCK_SCENARIOS
from fsdp_graphs import GRAPH_SCENARIOS
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
    make_model,
    peak_of,
    ranks_that_differ,
    refused,
    run,
    same_plans,
    shard,
    squares,
    tighten,
    trained_in_backwards,
    with_loss,
)
from fsdp_proofs import PROOF_SCENARIOS
from fsdp_sequential import SEQUENTIAL_SCENARIOS
from fsdp_small_device import small_device
from fsdp_tier import TIER_SCENARIOS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_processes import SECONDS

import rotor
from rotor._pytorch.fsdp import Unit


def orders(*, root: bool, reshard: bool, shard_first: bool) -> list[str]:
    """Both are trained, by the plain and by the planned model; the limit is kept."""
    plain, planned = in_order(
        make_model, shard, shard_first, root=root, reshard_after_forward=reshard
    )
    if any(p.grad is not None for p in planned.parameters()):
        return ["measuring left gradients"]
    limit = tighten(planned)
    found = compare(plain, planned, STEPS)
    return found + kept(planned, limit, plain_bytes=peak_of(plain))


def first_step_measures() -> list[str]:
    """Without a sample, inside of the forward of a sharded root, which goes on afterwards."""
    plain, planned = shard(make_model(), root=True), rotor.Checkpointable(make_model())
    shard(planned, root=True)
    found = compare(plain, planned, 3)
    tighten(planned)
    return found + compare(plain, planned, 3)


def inside_of_a_sharded_model() -> list[str]:
    """The wrapped chain is a part; the root is around it, and the sample has to wait."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.first(x))

    def make(wrap: bool) -> Any:
        inner: Any = make_model()
        if wrap:
            inner = rotor.Checkpointable(inner)
        model = Around(inner)
        for k in range(1, BLOCKS + 1):
            fully_shard(inner[k], mesh=init_device_mesh(DEVICE, (PROCESSES,)))
        fully_shard(model, mesh=init_device_mesh(DEVICE, (PROCESSES,)))
        return model

    plain, planned = make(False), make(True)
    found = refused(lambda: planned.inner.measure(batch(0)), RuntimeError, "Give no sample")
    losses = [run(model, 2)[0] for model in (plain, planned)]
    tighten(planned.inner)
    losses += [run(model, 3)[0] for model in (plain, planned)]
    if losses[0] != losses[1] or losses[2] != losses[3]:
        found.append(f"losses {losses}")
    return found + differences(plain, planned) + same_plans(planned.inner)


def mixed_precision() -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for root in (True, False):
        plain = shard(make_model(), root=root, mp_policy=policy)
        planned = rotor.Checkpointable(shard(make_model(), root=root, mp_policy=policy))
        planned.measure(batch(0))
        limit = tighten(planned)
        found += compare(plain, planned, 4) + kept(planned, limit)
    return found


def prefetches_and_meshes() -> list[str]:
    """Blocks that are gathered ahead on request; replicas of shards, reduced in another type."""
    found = []
    low = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    cases: list[tuple[tuple[int, int], bool, dict[str, Any]]]
    cases = [((1, 2), True, {}), ((2, 1), False, {}), ((2, 1), False, low)]
    for shape, asked, policy in cases:
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicas", "shards"))
        models = []
        for _ in range(2):
            model = make_model()
            blocks = [fully_shard(block, mesh=mesh, **policy) for block in list(model)[1:-1]]
            for first, second in pairwise(blocks):
                if asked:
                    first.set_modules_to_forward_prefetch([second])
                    second.set_modules_to_backward_prefetch([first])
            models.append(fully_shard(model, mesh=mesh, **policy))
        plain, planned = models[0], rotor.Checkpointable(models[1])
        planned.measure(batch(0))
        limit = tighten(planned)
        found += compare(plain, planned, 4) + kept(planned, limit)
    return found


def replicas_keep_what_they_reduce() -> list[str]:
    """Buffers of all-reductions, which live to the end of a backward, are among those counted."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicas", "shards"))
    found = []
    for reduce_dtype in (torch.bfloat16, None):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        model = make_model()
        blocks = [fully_shard(part, mesh=mesh, mp_policy=policy) for part in list(model)[1:-1]]
        units = [Unit(block._get_fsdp_state()) for block in blocks]
        seen: list[int] = []

        def look(_: torch.Tensor, units: list[Unit] = units, seen: list[int] = seen) -> None:
            groups = [group for unit in units for group in unit._groups]
            states = [group._all_reduce_state for group in groups]
            seen.append(sum(state.all_reduce_input.nbytes for state in states if state))

        value = batch(0).requires_grad_()
        value.register_hook(look)
        model(value).square().sum().backward()
        counted = sum(unit.all_reduced_bytes for unit in units)
        if reduce_dtype is None and counted:
            found.append(f"{counted} bytes counted twice")
        elif reduce_dtype is not None and (not counted or seen != [counted]):
            found.append(f"{seen} bytes kept, {counted} counted")
    return found


def accumulation() -> list[str]:
    """Gradients of two backwards out of three are not reduced, but kept whole."""
    found = []
    for root in (True, False):
        plain = shard(make_model(), root=root)
        planned = rotor.Checkpointable(shard(make_model(), root=root))
        if not root:
            # Set on every block: there is no root to ask.
            for model in (plain, planned):
                model.__dict__["set_requires_gradient_sync"] = lambda on, m=model: [
                    part.set_requires_gradient_sync(on) for part in m
                ]
        planned.measure(batch(0))
        tighten(planned)
        planned.compute_sequence(mem_limit=planned.mem_limit + 200_000)
        found += compare(plain, planned, 2, parts=3)
    return found


def sharded_after_planning() -> list[str]:
    plain, planned = make_model(), rotor.Checkpointable(make_model(), batch(0), "1GB")
    planned(batch(0)).sum().backward()
    planned.zero_grad()
    for model in (plain, planned):
        shard(model, root=False)
    found = compare(plain, planned, 2)
    tighten(planned)
    return found + compare(plain, planned, 3)


def unusual_stages() -> list[str]:
    """A block that is used twice, one with a sharded child, frozen ones, one without FSDP2."""
    mesh = init_device_mesh(DEVICE, (PROCESSES,))

    def make(root: bool) -> nn.Sequential:
        model = make_model()
        model = nn.Sequential(model[0], model[1], model[2], model[1], model[3], model[4], model[5])
        model[4].requires_grad_(False)
        fully_shard(model[2].up, mesh=mesh)
        for k in (1, 2, 4):
            fully_shard(model[k], mesh=mesh)
        fully_shard(nn.Sequential.__getitem__(model, 5), mesh=mesh)
        if root:
            fully_shard(model, mesh=mesh)
        return model

    found = []
    for root in (True, False):
        plain, planned = make(root), rotor.Checkpointable(make(root))
        planned.measure(batch(0))
        tighten(planned)
        # The uses of a block are added up in another order.
        found += [f"root {root}: {name}" for name in compare(plain, planned, 3, tolerance=1e-6)]
    return found


def captured_loss() -> list[str]:
    plain, planned = (shard(make_model(), root=True) for _ in range(2))
    planned = rotor.Checkpointable(planned, loss_fn=squares)
    return with_loss(plain, planned, tighten) + same_plans(planned)


def evaluation() -> list[str]:
    plain, planned = shard(make_model(), root=True), rotor.Checkpointable(make_model(), batch(0))
    shard(planned, root=True)
    with torch.no_grad():
        same = torch.equal(plain.eval()(batch(0)), planned.eval()(batch(0)))
    return [] if same else ["outputs of the evaluation"]


def replicas_share_plans() -> list[str]:
    plain = make_model()
    planned = rotor.Checkpointable(copy.deepcopy(plain))
    planned.share_plans()
    planned.measure(batch(0))
    tighten(planned)
    copied = pickle.loads(pickle.dumps(planned))
    if dist.get_rank() == 0:
        # A copy belongs to no ranks: it does not wait for the others.
        copied.measure(batch(0))
    models = [DistributedDataParallel(model) for model in (plain, planned)]
    losses = [run(model, 4)[0] for model in models]
    found = differences(plain, planned) + same_plans(planned)
    return found if losses[0] == losses[1] else [*found, f"losses {losses}"]


def refusals() -> list[str]:
    mesh = init_device_mesh(DEVICE, (PROCESSES,))
    found = []
    for engine in ("graph", "dynamic"):
        model = shard(make_model(), root=True)
        found += refused(
            lambda m=model, e=engine: rotor.Checkpointable(m, engine=e), RuntimeError, "fully_shard"
        )
        later = rotor.Checkpointable(make_model(), engine=engine)
        fully_shard(later, mesh=mesh)
        found += refused(lambda m=later: m.forward(batch(0)), RuntimeError, "fully_shard")
    model = make_model()
    fully_shard([model[1], model[2]], mesh=mesh)
    found += refused(
        lambda: rotor.Checkpointable(model, engine="chain"), RuntimeError, "several stages"
    )
    model = make_model()
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device(DEVICE))
    found += refused(lambda: rotor.Checkpointable(model), RuntimeError, "use fully_shard")
    planned = rotor.Checkpointable(shard(make_model(), root=False), batch(0), "1GB")
    found += refused(lambda: pickle.dumps(planned), TypeError, "state_dict")
    found += refused(lambda: copy.deepcopy(planned), TypeError, "state_dict")
    tighten(planned)
    loss = planned(batch(0)).sum()
    loss.backward(retain_graph=True)
    found += refused(loss.backward, RuntimeError, "second backward")
    loss = planned(batch(0)).sum()
    found += refused(lambda: loss.backward(create_graph=True), RuntimeError, "create_graph")
    return found


def optimizer_between() -> list[str]:
    """Parameters that change between forward and recomputation are noticed."""
    model = shard(make_model(), root=False, reshard_after_forward=True)
    planned = rotor.Checkpointable(model, batch(0), "1GB")
    optimizer = torch.optim.AdamW(planned.parameters(), lr=0.1, foreach=False)
    tighten(planned)
    planned(batch(0)).sum().backward()
    loss = planned(batch(0)).sum()
    optimizer.step()
    return refused(loss.backward, RuntimeError, "changed or replaced")


def tied() -> nn.Sequential:
    """A layer between the blocks is used twice."""
    first, one, two, *others = make_model()
    layer = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    return nn.Sequential(first, one, layer, two, layer, *others)


def blocks_of(model: nn.Sequential) -> list[nn.Module]:
    return [part for part in list(model) if isinstance(part, Block)]


def unsharded_in_two_stages() -> list[str]:
    """What both uses of a parameter give is added up before it meets a gradient, or a hook."""
    models = [tied(), tied()]
    for model in models:
        for block in blocks_of(model):
            fully_shard(block, mesh=init_device_mesh(DEVICE, (PROCESSES,)))
    plain, planned = models[0], rotor.Checkpointable(models[1], batch(0), "1GB")
    limit = tighten(planned)
    for step in range(3):
        for model in (plain, planned):
            torch.manual_seed(step)
            model(batch(step)).square().mean().backward()
    found = differences(plain, planned) + same_plans(planned) + kept(planned, limit)
    x = batch(0).requires_grad_()
    y = planned(x).sum()
    found += refused(
        lambda: torch.autograd.grad(y, x, retain_graph=True), RuntimeError, "gradients of inputs"
    )
    return found + trained_in_backwards(tied, blocks_of, tighten, same_plans)


CHAIN_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    f"{'shard, wrap' if first else 'wrap, shard'}{', root' if root else ''}"
    f"{', reshard' if reshard else ''}": lambda first=first, root=root, reshard=reshard: orders(
        shard_first=first, root=root, reshard=reshard
    )
    for first, root, reshard in product((True, False), repeat=3)
} | {
    "first step measures": first_step_measures,
    "inside of a sharded model": inside_of_a_sharded_model,
    "mixed precision": mixed_precision,
    "prefetches and meshes": prefetches_and_meshes,
    "replicas keep what they reduce": replicas_keep_what_they_reduce,
    "accumulation": accumulation,
    "sharded after planning": sharded_after_planning,
    "unusual stages": unusual_stages,
    "captured loss": captured_loss,
    "ranks that differ": lambda: ranks_that_differ(
        shard(make_model(), root=True),
        shard(make_model(), root=True),
        tighten,
        same_plans,
        50_000,
        {},
    ),
    "evaluation": evaluation,
    "replicas share plans": replicas_share_plans,
    "refusals": refusals,
    "optimizer between": optimizer_between,
    "optimizer in backwards": lambda: trained_in_backwards(
        make_model, blocks_of, tighten, same_plans
    ),
    "unsharded in two stages": unsharded_in_two_stages,
}

_BY_KIND: dict[str, dict[str, Callable[[], list[str]]]] = {
    "chains": CHAIN_SCENARIOS,
    "blocks": BLOCK_SCENARIOS,
    "graphs": GRAPH_SCENARIOS,
    "proofs": PROOF_SCENARIOS | SEQUENTIAL_SCENARIOS,
    "tier": TIER_SCENARIOS,
}
LONG = frozenset(
    {name for name in CHAIN_SCENARIOS if name.startswith(("shard, ", "wrap, "))}
    - {"shard, wrap, root, reshard", "wrap, shard"}
) | {
    *("blocks: wrap, shard, root", "blocks: shard, wrap", "blocks: precision"),
    *("proofs: drifting, graphs of blocks", "chain or blocks, other limits", "tier: other speeds"),
    *("graphs: models of Hugging Face", "tier: limited", "proofs: escapes, blocks"),
    *("blocks: wrap, shard, reshard", "blocks: unusual"),
}
"""Scenarios that take long for what they add."""
GROUPS: dict[str, list[str]] = {
    f"{kind}{', long' if is_long else ''}": names
    for kind, found in _BY_KIND.items()
    for is_long in (False, True)
    if (names := [name for name in found if (name in LONG) == is_long])
}
"""Names of the scenarios of each launch."""

SIM_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    f"small device, {kind}": lambda kind=kind: small_device(kind) for kind in ("chain", "blocks")
}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def backend() -> str:
    """Give the processes their device; return the backend of its collectives."""
    if DEVICE == "cpu":
        return "gloo"
    import accelerator
    from accelerator import link

    accelerator.load()
    return link.register()


def work(rank: int, folder: Path, names: list[str]) -> None:
    dist.init_process_group(
        backend(),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=SECONDS),
    )
    found: dict[str, list[str]] = {}
    scenarios = dict(SIM_SCENARIOS)
    for more in _BY_KIND.values():
        scenarios |= more
    for name in names:
        began = time.process_time()
        with quiet():
            found[name] = scenarios[name]()
        sys.stderr.write(f"{name}: {time.process_time() - began:.1f} s\n")
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
