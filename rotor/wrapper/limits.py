"""Limit of a model's steps: the given one, or the room on the device less future needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor._pytorch import core
from rotor.algorithms.curve import Curve
from rotor.engines.contract import Context, Key, Settings
from rotor.errors import InfeasibleError
from rotor.meter import allocator
from rotor.meter.room import Room
from rotor.tier.layered import LayeredTier
from rotor.units import exact_bytes

_MOST_STATES = 4
"""Bytes of an optimizer's states per byte of parameters, at most: more are looked for."""


class Limits:
    """Source of the limits of a model's plans."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._latest: tuple[int | str | None, Room] | None = None
        if settings.total_limit is not None:
            assert self.room is not None  # Blocks are given back from now on.

    @property
    def room(self) -> Room | None:
        """Room on the device that decides about limits; ``None`` where they are given."""
        total = self._settings.total_limit
        if self._settings.mem_limit is not None and total is None:
            return None
        if self._latest is None or self._latest[0] != total:
            self._latest = total, Room(self._settings.module, total)
        return self._latest[1]

    def limit_on(self, device: torch.device, latest: Any) -> int:
        """Return the limit of a step planned now; `latest` is ``None`` before the first plan."""
        limit = self._limit_on(device, latest)
        if self._settings.offload is not None:
            self._settings.offload.step_bytes = limit
        return limit

    def _limit_on(self, device: torch.device, latest: Any) -> int:
        settings = self._settings
        if settings.budget is not None:
            parameters = settings.module.parameters()
            absent = [p for p in parameters if p.requires_grad and p.grad is None]
            gradients = sum(allocator.rounded_bytes(p.nbytes, p.device) for p in absent)
            settings.mem_limit = settings.budget + gradients
        given, room = settings.mem_limit, self.room
        if room is None:
            assert given is not None
            return given - self.owned_bytes
        found = room.take(device, None if latest is None else latest.measured_bytes)
        return found if given is None else min(given - self.owned_bytes, found)

    def bytes_by_name(self) -> dict[str, int] | None:
        """Return the parts of the sum behind the limit, and of a bounded second tier, if any."""
        offload, room = self._settings.offload, self.room
        found = {} if room is None or room.latest is None else room.latest.bytes_by_name()
        if offload is not None and isinstance(offload.tier, LayeredTier):
            found["in_host"] = offload.tier.taken_bytes
            found["beneath"] = offload.tier.beneath.disk.taken_bytes
        return found or None

    @property
    def owned_bytes(self) -> int:
        """Bytes in memory of what the model owns, where the limit counts them."""
        away = self._settings.away
        return 0 if away is None else away.owned_bytes()

    def whole(self, curve: Curve) -> Curve:
        """Return a curve of steps as one of limits, which count what the model owns."""
        away = self._settings.away
        if away is None:
            return curve
        own, least = self.owned_bytes, away.least_update_bytes()
        needed = [max(size, least) + own for size in curve.bytes.tolist()]
        return Curve.from_points(zip(needed, curve.seconds.tolist(), strict=True))

    def is_outgrown(self, plan: Any) -> bool:
        """Return whether a plan is for other bytes than there are now."""
        settings = self._settings
        if settings.mem_limit is not None and settings.total_limit is None:
            return False
        room = self.room
        return room is not None and not plan.lacks_room and room.is_outgrown(plan)

    def drop_outgrown(self, plans: dict[Key, Any]) -> bool:
        """Drop plans that are for other bytes than there are now; return whether one was."""
        outgrown = [key for key, plan in plans.items() if self.is_outgrown(plan)]
        for key in outgrown:
            del plans[key]
        return bool(outgrown)

    def planned(self, make: Callable[[int], Any], device: torch.device, context: Context) -> Any:
        """Return what `make` plans for the limit of a step on a device.

        Planning itself takes from the room: it imports modules. So the sum is taken again after it.
        """
        limit = self.limit_on(device, context.latest)
        try:
            plan = make(limit)
            if self.room is not None and context.peers.ranks is None:
                limit = self.limit_on(device, context.latest)
                plan = make(limit) if self.is_outgrown(plan) else plan
            return plan
        except InfeasibleError as error:
            if self.room is not None:
                self.limit_on(device, context.latest)
            self.explain(error, limit)
            raise

    def going_on(self, plan: Any, error: InfeasibleError, context: Context) -> Any:
        """Return an accepted plan for which there is no room any more, with a warning.

        Raises the error where there is no such plan, and on an accelerator, whose allocator gives
        nothing beyond a total.
        """
        if plan is None or plan.device.type != "cpu":
            raise error
        plan.lacks_room = True
        context.warn("room", f"this step goes on by the plan that it has: {error.args[0]}")
        return plan

    def explain(self, error: InfeasibleError, limit_bytes: int) -> None:
        """Add what is behind the limit that a step was given to the error that it does not fit."""
        if not error.minimum_bytes:
            return
        given, room, away = self._settings.mem_limit, self.room, self._settings.away
        least, text = max(error.minimum_bytes, limit_bytes + 1), error.args[0]
        if limit_bytes <= 1:
            given_bytes = exact_bytes(limit_bytes)
            text = text.replace(f"a limit of {given_bytes}", given_bytes)
            text = text.replace(f"in {given_bytes}", "in no bytes")
        found = None if room is None else room.latest
        if given is not None and (found is None or given - self.owned_bytes <= found.step_bytes):
            found = None
            if away is not None and (own := given - limit_bytes) > 0:
                least = max(least, away.least_update_bytes()) + own
                error.lower_bound_bytes += own
                text = (
                    f"{text}. The limit, {exact_bytes(given)}, counts what the model keeps in "
                    f"memory too, {exact_bytes(own)}: in all, {exact_bytes(least)} would do"
                )
        if found is not None:
            assert room is not None
            text = f"{text}. {room.why(least)}"
        error.minimum_bytes = least
        error.args = (text, least, error.lower_bound_bytes, error.peak)

    def check(self, context: Context, plan: Any) -> None:
        """Warn, once, of a plan for a given limit that is more than is free."""
        is_elsewhere = not isinstance(self._settings.profile, str)
        if self.room is not None or "free" in context.warned or is_elsewhere:
            return
        parameters = [p for p in self._settings.module.parameters() if core.strided_parts(p)]
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        if plan.limit_bytes + _MOST_STATES * trained <= allocator.free_bytes(plan.device):
            return
        room = Room(self._settings.module, None)
        room.take(plan.device)
        assert room.latest is not None
        if plan.limit_bytes > room.available_bytes - room.coming_bytes:
            context.warn(
                "free",
                f"the limit of a step is {exact_bytes(plan.limit_bytes)}, and {plan.device} has "
                f"less for it: {room.latest}. Give as much, or leave it to rotor: "
                'total_limit="card"',
            )
