"""Scenarios of test_fsdp.py: a sharded Sequential is a chain, or blocks, as predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fsdp_graphs import Deep
from fsdp_models import BLOCKS, WIDTH, batch, compare, kept, on_all, shard
from torch import nn

import rotor


def deep(*, root: bool) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, WIDTH), *[Deep() for _ in range(BLOCKS)], nn.Linear(WIDTH, 4)
    )
    return shard(model, root=root)


def same_kind(model: rotor.Checkpointable) -> list[str]:
    plan = model.plan
    drawn = str(plan.sequence if plan.engine == "chain" else plan.choice)
    found = on_all((plan.engine, drawn, plan.limit_bytes))
    return [] if found[0] == found[1] else [f"plans {found}"]


def chosen_by_prediction(places: Sequence[tuple[bool, float]]) -> list[str]:
    """Between the least limit of the chain and plain: the better of both, and within the limit.

    Each place: whether the root is sharded too, and the share of the way.
    """
    found: list[str] = []
    for root, share in places:
        chain = rotor.Checkpointable(deep(root=root), engine="chain")
        chain.measure(batch(0))
        curve = chain.curve()
        least, most = int(curve.minimum_bytes), int(curve.bytes[-1])
        limit = int(least + share * (most - least))
        plain, planned = deep(root=root), rotor.Checkpointable(deep(root=root), mem_limit=limit)
        found += compare(plain, planned, 4, same=same_kind) + kept(planned, limit)
        lines = planned.report().splitlines()
        rows = lines[next(k for k, line in enumerate(lines) if line.startswith("compared")) :]
        recomputed = [float(row.split("step, ")[1].split("%")[0]) for row in rows[2:]]
        if [row.split()[0] for row in rows[2:]] != ["chain", "blocks"]:
            found.append(f"compared {rows}")
        is_best = recomputed[1] < recomputed[0] and rows[-1].endswith("runs")
        if not is_best or planned.plan.engine != "parts":
            found.append(f"chosen at {share}: {rows}")
    return found


SEQUENTIAL_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "chain or blocks": lambda: chosen_by_prediction([(True, 0.3)]),
    "chain or blocks, other limits": lambda: chosen_by_prediction(
        [(True, 0.6), (False, 0.3), (False, 0.6)]
    ),
}
