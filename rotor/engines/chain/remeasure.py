"""Reuse of a measure for inputs that differ only in requiring gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rotor.common.tensor_trees import grad_flags
from rotor.engines.chain.measure import measure
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.observe import Observation
from rotor.engines.chain.stages import Stage

__all__ = ["measured_alike", "with_other_input"]

_MOST = 3


def measured_alike(inspections: Mapping[Any, Inspection], measured: Any) -> Inspection | None:
    """Return a measure (by `Key.measured`) of an input that differs only in requiring gradients."""

    def without_flags(measured: Any) -> Any:
        return tuple([tensor[:-1] for tensor in measured[0]]), measured[1:]

    for other, inspection in inspections.items():
        if without_flags(other) == without_flags(measured):
            return inspection
    return None


def with_other_input(
    old: Inspection,
    stages: Sequence[Stage],
    arg: Any,
    observed: Callable[[list[Stage], list[Observation]], object] | None = None,
) -> Inspection | None:
    """Measure only the first stages again, until an output requires gradients as before.

    `old` has the measures for an input with other flags, and `observed` is as of `measure`. Returns
    ``None`` if more than a few stages are concerned.
    """
    for count in range(1, min(_MOST, len(old.stages) - 1) + 1):
        if any(grad_flags(arg)) and not any(old.flags[count]):
            continue
        # One stage more: the last one is measured with its output held.
        part = {name for stage in old.stages[: count + 1] for name in stage.names}
        found = measure([s for s in stages if s.names[0] in part], arg, observed=observed)
        end = _cut_after(found, old.stages[count - 1].names[-1])
        if end is None or found.flags[end] != old.flags[count]:
            continue
        places = {p.identity: p for stage in old.stages[:count] for p in stage.state}
        for stage in found.stages[:end]:
            own = {place.identity for place in stage.state}
            stage.state += [place for key, place in places.items() if key not in own]
        shift = end - count
        later = {i + shift: why for i, why in old.reasons.items() if i >= count}
        return replace(
            old,
            stages=[*found.stages[:end], *old.stages[count:]],
            measures=[*found.measures[:end], *old.measures[count:]],
            input_bytes=found.input_bytes,
            input_flags=found.input_flags,
            reasons={i: why for i, why in found.reasons.items() if i < end} | later,
        )
    return None


def _cut_after(found: Inspection, name: str) -> int | None:
    """Return the number of stages that end with a function; ``None`` if it is within one."""
    for i, stage in enumerate(found.stages[:-1]):
        if stage.names[-1] == name:
            return i + 1
    return None
