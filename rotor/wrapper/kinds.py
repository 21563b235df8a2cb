"""Kinds of steps that a model has plans for: the longest unused ones are dropped."""

from __future__ import annotations

from rotor.engines.contract import Context, Key

_MOST = 64
_FEWEST = 8
_SHARE = 100
_BYTES = 2 << 20
"""Memory of the host that a captured kind keeps, about."""


def unused_kinds(context: Context) -> list[Key]:
    """Return captured kinds of steps above 64, or above a hundredth of the limit.

    The plans of the context are in the order of their last use. Kinds that share a capture are few
    bytes each, and stay.
    """
    limit = context.settings.present_limit or 0
    most = min(_MOST, max(_FEWEST, limit // _SHARE // _BYTES))
    alone = {key.measured: key for key, plan in context.plans.items() if plan.is_alone}
    return list(alone.values())[:-most]
