"""Choice of the observer of a planned step: a meter, or something cheaper."""

from __future__ import annotations

import weakref
from typing import Any

from rotor._pytorch import devices
from rotor.engines.contract import Engine
from rotor.meter import allocator
from rotor.meter.step_meter import StepBytes, StepMeter, StepWatch
from rotor.meter.watch import RAISED, LevelWatch, PeakWatch, is_due, passing
from rotor.wrapper.announcing import logging_at

_UNMEASURED = "this step's memory was not measured"


def observer_of_step(engine: Engine, plan: Any, absent: tuple[bool, ...]) -> StepWatch | None:
    """Return the observer of a step that begins now; ``None`` without one.

    `absent` is True for each parameter without a gradient, and empty if that is not known.
    """
    if plan.reserving is not None:
        plan.reserving.begin(plan.device, [] if plan.pool is None else plan.pool.blocks)
    is_first, context = plan.awaits_meter, engine.context
    if not is_first:
        if context.peers.ranks is not None and not engine.ranks_meter_later:
            return None
        has_gradients = not (absent and all(absent))
        if not is_due(plan, context.structure.current_parameters() if has_gradients else ()):
            if devices.type_of(plan.device) != "cpu":
                return PeakWatch(engine, plan)
            return LevelWatch(engine, plan) if plan.levels else None
    try:
        return _meter(engine, plan, is_first=is_first)
    except allocator.OtherThreadError:
        return None  # A later step is metered instead.
    except allocator.MeterBusyError as error:
        if is_first:
            context.warn("busy", f"{_UNMEASURED}: {error}")
        return None


def end_after_error(meter: StepWatch, owner: Any, plan: Any, *, may_go_on: bool) -> None:
    """End the observer of a step whose forward has raised, or have it warn at the backward's end.

    The caller may train on what the forward has noted; the owner has the context.
    """
    if may_go_on and isinstance(meter, StepMeter):
        meter.forward_raised(owner.context.module.parameters(), passing(owner, plan, RAISED))
    else:
        meter.cancel()


def _meter(engine: Engine, plan: Any, *, is_first: bool) -> StepMeter:
    context, learner = engine.context, weakref.ref(engine)
    verbosity = context.settings.verbosity

    def done(step: StepBytes) -> None:
        found = learner()
        if found is not None:
            with logging_at(verbosity):
                found.learn(plan, step)

    def lost(is_elsewhere: bool) -> None:
        found = learner()
        plan.meterings += is_elsewhere
        if found is not None and not is_elsewhere:
            found.context.warn("busy", f"{_UNMEASURED}: a profiler was started before its end")
        elif found is not None:
            found.context.warn(
                "lost",
                "the backward of this step runs in another thread than its forward: its memory "
                "cannot be measured, and whether it kept the limit is unknown. Run forward and "
                "backward of some steps in one thread",
            )

    return StepMeter(
        plan.device,
        done,
        context.gradients,
        plan.reserving,
        lost if is_first else int,
        passing(engine, plan),
    )
