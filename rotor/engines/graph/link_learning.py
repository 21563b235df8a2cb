"""Lessons of steps on the link to a second tier.

A plan counts on a speed. Where steps wait for the tier longer than the plan says, or where the tier
is much faster, plans count on the speed that the steps have shown.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rotor.tier.offload import PLANNED_SHARE, Offload
from rotor.units import format_bytes

if TYPE_CHECKING:
    from rotor.engines.graph.offloading import Layout
    from rotor.engines.graph.planned import GraphPlan
    from rotor.graph.link import Link

__all__ = ["follows_link", "learn_link"]

logger = logging.getLogger("rotor")

_FIRST_STEPS, _STEPS = 3, 16
"""Steps after which a new plan is compared with its link, and between later comparisons."""

_WAITED = 0.05
"""Share of a step by which waits may exceed the plan's."""

_FASTER = 1.5
"""Ratio of the shown speeds to the planned ones from which a new plan is worth it."""


def learn_link(plan: GraphPlan) -> bool:
    """Return whether a plan is to be made again, between two of its steps, for a new tier speed."""
    layout, offload, link = plan.layout, plan.step.offload, plan.program.link
    if layout is None or offload is None or link is None or not _is_current(plan):
        return False
    program = plan.program
    figures = (program.waited, program.link_time, plan.makespan)
    return follows_link(layout, offload, link, *figures)


def follows_link(
    layout: Layout,
    offload: Offload,
    planned_for: Link,
    planned_wait: float,
    link_time: float,
    makespan: float,
) -> bool:
    """Return whether steps have shown another speed of a tier, and note this speed.

    `layout` has the waits and the traffic of the steps. `planned_wait`, `link_time` and `makespan`
    are the planned seconds of a step's waits, of its transfers, and of all of it.
    """
    waits, link = layout.waits, offload.link
    steps = waits.steps - waits.seen_steps
    due = _FIRST_STEPS if waits.seen_steps == 0 else _STEPS
    if link is None or steps < due or not offload.may_learn:
        return False
    waited = (layout.waited_ns() - waits.seen_ns) / steps / 1e9
    traffic = layout.tier.traffic
    rates = None if traffic is None else traffic.since(layout.seen).rates(planned_for.latency_ns)
    layout.see()
    excess = waited - planned_wait
    if rates is None:
        share = link_time / (link_time + max(excess, 0.0)) if link_time else 1.0
        rates = link.write_bytes_per_s * share, link.read_bytes_per_s * share
        rates = rates[0] / PLANNED_SHARE, rates[1] / PLANNED_SHARE
    planned = link.write_bytes_per_s, link.read_bytes_per_s
    is_slow = excess > _WAITED * makespan and (rates[0] < planned[0] or rates[1] < planned[1])
    faster = PLANNED_SHARE / _FASTER
    is_fast = faster * rates[0] > planned[0] and faster * rates[1] > planned[1]
    if not is_slow and not is_fast:
        return False
    logger.info(
        "second tier: %s/s written and %s/s read in steps, %.3g s waited in each, %.3g s planned: "
        "planning again",
        format_bytes(round(rates[0])),
        format_bytes(round(rates[1])),
        waited,
        planned_wait,
    )
    offload.learn(*rates)
    return True


def _is_current(plan: GraphPlan) -> bool:
    """Return whether a plan counts on the known speed; it may have less room on the tier."""
    link, offload = plan.program.link, plan.step.offload
    assert offload is not None
    assert offload.link is not None
    return link is not None and replace(link, host_bytes=offload.link.host_bytes) == offload.link
