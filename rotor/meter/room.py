"""Room for a step on a device: the limit that follows from the device, and the sum behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor import _core
from rotor._pytorch import devices, optimizers
from rotor.common.accounting import FREE_PERCENT, ROOM_GROWTH, SLACK_BYTES, SLACK_SHARE
from rotor.common.ranks import sharers
from rotor.errors import InfeasibleError
from rotor.meter import allocator
from rotor.units import exact_bytes, format_bytes, parse_bytes

_MAPPED_BYTES = 1 << 20
_SLACK_ROUNDS = 40
"""Rounds after which the slack of a room that it is a share of has settled to a byte."""

CARD = "card"
"""Value of ``total_limit=`` for all that the device has, less what others hold."""


def checked_total(total: int | str | None) -> int | str | None:
    """Return a total limit in bytes, "card", or ``None`` for none."""
    if total is None or total == CARD:
        return total
    return parse_bytes(total, name="total_limit")


@dataclass(frozen=True)
class Sum:
    """Bytes of a process on a device, part by part."""

    total_bytes: int
    parts: tuple[tuple[str, str, int], ...]
    """Names, words and bytes; the last part is a step."""

    @property
    def step_bytes(self) -> int:
        """Bytes that are left for a step; 0 or less if the other parts are too large."""
        return self.parts[-1][2]

    def bytes_by_name(self) -> dict[str, int]:
        """Return the bytes of each part by its name."""
        return {name: size for name, _, size in self.parts}

    def __str__(self) -> str:
        shown = [f"{format_bytes(size)} {words}" for _, words, size in self.parts if size > 0]
        lacking = min(self.step_bytes, 0)
        less = f" - {format_bytes(-lacking)} that are lacking" if lacking else ""
        return f"{format_bytes(self.total_bytes)} = {' + '.join(shown)}{less}"


class Room:
    """Limit of a model's steps that follows from its device, taken again when others need more.

    `module` is ``None`` where the model is not known. `total` is the most bytes of this process on
    the device, "card" for all of its memory that others leave, or ``None``: nine tenths of what is
    free. `latest` is the sum of the latest look at the device. `available_bytes` are bytes beyond
    those that the process holds, of which states of optimizers will take `coming_bytes`.
    """

    def __init__(self, module: nn.Module | None, total: int | str | None) -> None:
        self._module = module
        self._total = total
        self.latest: Sum | None = None
        self.available_bytes = self.coming_bytes = 0
        self._level = self._changes = self._now_coming = 0
        optimizers.watch()
        if module is not None and all(p.device.type == "cpu" for p in module.parameters()):
            _give_blocks_back(total)

    def take(self, device: torch.device, peak_bytes: int | None = None) -> int:
        """Look at the device, and return the bytes for a step that begins now.

        `peak_bytes` is the measured peak of such steps above their beginning, if known: on an
        accelerator the slack of the allocator is what it has reserved beyond that.
        """
        own = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
        optimizers.find([p for p in own if p.requires_grad])
        self._changes = optimizers.number_of_changes()
        self._level = devices.level(device)
        coming, name = optimizers.coming_bytes(own, device)
        outside, allocated = _held_bytes(device)
        if isinstance(self._total, int) and device.type != "cpu":
            # A smaller total of before would hold for what is free.
            devices.cap_reserved(device, self._total - outside, allocator.driver_bytes(device)[1])
        available = allocator.free_bytes(device) // sharers(device)
        if isinstance(self._total, int):
            available = min(available, self._total - outside - allocated)
        self._slack_of = partial(self._slack_bytes, device, allocated, peak_bytes)
        slack = self._slack_of(available)
        parameters, gradients = (
            allocator.storage_bytes([t for t in tensors if t is not None and t.device == device])
            for tensors in (own, [t.grad for t in own if t.is_leaf])
        )
        made = optimizers.made_bytes(device)
        others = max(allocated - parameters - gradients - made, 0)
        self.available_bytes = available
        self.coming_bytes = self._now_coming = coming
        self.latest = Sum(
            outside + allocated + available,
            (
                ("context", "Python and libraries" if device.type == "cpu" else "context", outside),
                ("parameters", "parameters", min(parameters, allocated)),
                ("gradients", "gradients", gradients),
                ("optimizer", "optimizer states", made),
                ("other", "other data", others),
                ("optimizer_to_come", f"{name}, still to come", coming),
                ("slack", "slack", slack),
                ("step", "for a step", available - coming - slack),
            ),
        )
        return max(self.latest.step_bytes, 1)

    def explain(self, error: InfeasibleError) -> None:
        """Add the sum to the error of a step that does not fit, if it names a least limit."""
        if error.minimum_bytes:
            text = f"{error.args[0]}. {self.why(error.minimum_bytes)}"
            error.args = (text, *error.args[1:])

    def why(self, step_bytes: int) -> str:
        """Return what the error of a step that needs some bytes says of the sum."""
        assert self.latest is not None
        is_left = self.latest.step_bytes > 0
        why = "The limit follows from" if is_left else "Nothing is left for a step:"
        return f"{why} {self.latest}: in all, {exact_bytes(self.total_for(step_bytes))} would do"

    def total_for(self, step_bytes: int) -> int:
        """Return the total that leaves some bytes for a step, in whole MiB above the bytes.

        What a process holds beside varies from run to run, by a tenth of a MiB on the CPU.
        """
        assert self.latest is not None
        held = self.latest.total_bytes - self.available_bytes
        available = step_bytes + self.coming_bytes
        for _ in range(_SLACK_ROUNDS):
            available = step_bytes + self.coming_bytes + self._slack_of(available)
        return (((held + available) >> 20) + 2) << 20

    def _slack_bytes(
        self, device: torch.device, allocated: int, peak_bytes: int | None, available: int
    ) -> int:
        parts = 100 // (100 - FREE_PERCENT) if self._total is None else SLACK_SHARE
        assumed = max(available, 0) // parts
        if device.type == "cpu":
            return assumed
        assumed = max(assumed, min(SLACK_BYTES, available // 4))
        if peak_bytes is None:
            return assumed
        seen = devices.reserved_bytes(device) - allocated - peak_bytes
        return min(max(seen, assumed), 2 * assumed)

    def is_outgrown(self, plan: Any) -> bool:
        """Return whether a plan takes more than there is now, or could take more with a gain.

        Whatever was allocated on the device since the latest look is subtracted from the room.
        """
        if self.latest is None:
            return False
        has_changed = self._changes != optimizers.number_of_changes()
        if has_changed:
            self._changes = optimizers.number_of_changes()
            own = () if self._module is None else self._module.parameters()
            self._now_coming = optimizers.coming_bytes(own, plan.device)[0]
        grown = devices.level(plan.device) - self._level + self._now_coming - self.coming_bytes
        room = self.latest.step_bytes - grown
        is_planned = plan.unlimited_bytes is not None
        if room < (plan.predicted_bytes if is_planned else plan.limit_bytes):
            return True
        is_slower = not is_planned or plan.recomputation > 0
        return has_changed and is_slower and room > plan.limit_bytes * ROOM_GROWTH


def _give_blocks_back(total: int | str | None) -> None:
    """Have the heap give large blocks back, where the process has a limit.

    It would keep them in pieces that are too small for other blocks: as much as a third of a step's
    bytes was seen.
    """
    probe = _core.probe_memory()
    limits = probe["address_space_limit_bytes"], probe["data_limit_bytes"]
    if total is not None or max(limits) > 0:
        _core.map_blocks(_MAPPED_BYTES)


def _held_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device that PyTorch's allocator has not, and those it has given out.

    On an accelerator the former are contexts, libraries, and what other processes hold. On the CPU
    they are the process's resident bytes outside of the C library's heap.
    """
    if device.type == "cpu":
        probe = _core.probe_memory()
        used, kept = max(probe["heap_used_bytes"], 0), max(probe["heap_kept_bytes"], 0)
        return max(probe["resident_bytes"] - kept - used, 0), used
    free, total = allocator.driver_bytes(device)
    outside = total - free - devices.reserved_bytes(device)
    return max(outside, 0), devices.allocated_bytes(device)


def step_limit(
    device: torch.device,
    mem_limit: int | str | None = None,
    total_limit: int | str | None = None,
    module: nn.Module | None = None,
) -> int:
    """Return the limit in bytes of a step that begins now, from limits of `rotor.Checkpointable`.

    Processes that train on the same memory have equal parts of it. The optimizer of `module` may
    have states still to come; ``None`` where the model is not known.
    """
    given = None if mem_limit is None else parse_bytes(mem_limit)
    if given is not None and total_limit is None:
        return given
    found = Room(module, checked_total(total_limit)).take(device)
    return found if given is None else min(given, found)


def step_limit_there(
    free_bytes: int | None,
    mem_limit: int | str | None = None,
    total_limit: int | str | None = None,
) -> int:
    """Return the limit in bytes of a step on a machine that is not here, with so much free."""
    if total_limit is not None:
        raise ValueError("a total is of this machine, and the profile of another: give mem_limit")
    if mem_limit is not None:
        return parse_bytes(mem_limit)
    if free_bytes is None:
        raise ValueError("the profile does not say what is free on that machine: give --limit")
    return free_bytes * FREE_PERCENT // 100
