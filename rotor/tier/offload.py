"""Choice of a second tier, and the speed of the link to it."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rotor._core import PIECE_BYTES
from rotor._pytorch import devices
from rotor.common.joining import joined
from rotor.common.ranks import Ranks
from rotor.graph.link import Link
from rotor.tier.disk import DiskTier
from rotor.tier.host import HostTier
from rotor.tier.interface import Tier, placed
from rotor.tier.layered import LayeredTier
from rotor.units import format_bytes, parse_bytes

logger = logging.getLogger("rotor")

PLANNED_SHARE = 0.75
"""Share of a varying speed that plans count on: a slow link costs more than a fast one gains."""

_STEADY = 0.95
"""Share of a speed's median in its slowest sample from which it counts as steady."""

_MOST_LESSONS = 3
_SAMPLES = 5
_SAMPLE_BYTES = 16 << 20
_MOST_TRANSFERS = 256
_SMALL_BYTES = 1 << 12
_SHARE = 16
"""Part of a step's limit in which the speed of a link is measured."""
_COMPUTED = 256


_NAME = re.compile("(disk|host)(:.+)?", re.DOTALL)
_measured: weakref.WeakKeyDictionary[Tier, tuple[Link, float]] = weakref.WeakKeyDictionary()
"""Link of each tier, and the share of its speed that the slowest sample had."""


class Homes(NamedTuple):
    """Links to the homes of parameters and gradients, on which plans count."""

    links: Mapping[Tier, Link]
    """By tier, the nearest first."""
    room_bytes: int | None = None
    """Room for gradients in the nearest tier; ``None`` for any."""


@dataclass
class Offload:
    """Second tier of a model."""

    tier: Tier
    limit_bytes: int | None = None
    """Most bytes that a step may have there; ``None`` for any."""
    link: Link | None = None
    """Speed on which plans count; ``None`` before it is measured."""
    learned: int = 0
    """Number of times that metered steps have corrected it."""
    step_bytes: int | None = None
    """Limit of a step, which measuring the speed keeps too; ``None`` for any."""
    planned_share: float = PLANNED_SHARE
    """Share of the last speed seen that plans count on."""
    coming_bytes: int = 0
    """Bytes of homes to come, whose room in the tier is not for values of steps."""
    beneath: tuple[Link, int] | None = None
    """Speed of the tier beneath, and room for gradients above it, once these are known."""

    def known_link(self, device: torch.device) -> Link:
        """Return the link on which plans count, measured at the first time."""
        if self.link is None:
            found, self.planned_share = known_speed(self.tier, device, self.step_bytes)
            if isinstance(self.tier, LayeredTier):
                left = max(self.tier.free_bytes() - self.coming_bytes, 0)
                given = left if self.limit_bytes is None else self.limit_bytes
                self.limit_bytes = min(given, left, self.tier.spare_bytes())
            planned = _planned(found, self.planned_share)
            self.link = replace(planned, host_bytes=self.limit_bytes)
            logger.info(
                "second tier: %s/s written, %s/s read, planned for %.0f %% of it",
                format_bytes(round(found.write_bytes_per_s)),
                format_bytes(round(found.read_bytes_per_s)),
                100 * self.planned_share,
            )
        return self.link

    def homes(self, device: torch.device) -> Homes:
        """Return the links to homes in the tier and beneath, measured at the first time."""
        link = self.known_link(device)
        if not isinstance(self.tier, LayeredTier):
            return Homes({self.tier: link})
        if self.beneath is None:
            far = _planned(*known_speed(self.tier.beneath, device, self.step_bytes))
            # Gradients come before states, and find the same room in each step.
            self.beneath = far, self.tier.free_bytes()
        far, room_bytes = self.beneath
        return Homes({self.tier: link, self.tier.beneath: far}, room_bytes)

    def share(self, ranks: Ranks) -> None:
        """Count on the slowest tier of all ranks, and the least limit; a collective operation.

        Every rank knows its link, as of `known_link`.
        """
        assert self.link is not None
        found = ranks.exchange((self.link, self.limit_bytes, self.learned, self.planned_share))
        self.limit_bytes = min((limit for _, limit, *_ in found if limit is not None), default=None)
        links = [replace(link, host_bytes=self.limit_bytes) for link, *_ in found]
        self.learned = max(learned for *_, learned, _ in found)
        self.planned_share = min(share for *_, share in found)
        self.link = joined(links, least=["write_bytes_per_s", "read_bytes_per_s", "duplex"])

    @property
    def may_learn(self) -> bool:
        """True while steps may still correct the speed."""
        return self.learned < _MOST_LESSONS

    def learn(self, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        """Have later plans count on a share of the speed that steps have shown."""
        assert self.link is not None
        self.learned += 1
        self.planned_share = PLANNED_SHARE
        self.link = replace(
            self.link,
            write_bytes_per_s=PLANNED_SHARE * write_bytes_per_s,
            read_bytes_per_s=PLANNED_SHARE * read_bytes_per_s,
        )


def checked_offload(
    offload: Any,
    offload_limit: int | str | None,
    engine: str,
    host_limit: int | str | None = None,
) -> Offload | None:
    """Return the second tier of an option: None, text as of `tier_of`, or a `Tier`.

    Raises ValueError or TypeError for wrong options, or if the engine does not suit.
    """
    is_on_host = isinstance(offload, str) and offload.partition(":")[0] == "host"
    if host_limit is not None and not is_on_host:
        raise ValueError(
            f"host_limit = {host_limit!r} bounds the memory of the host, and offload is "
            f'{offload!r}: give offload="host", or leave it out'
        )
    if offload is None:
        if offload_limit is not None:
            raise ValueError(
                f"offload_limit = {offload_limit!r} is for offloaded values, and offload is None: "
                'give offload="disk", or leave it out'
            )
        return None
    is_known = isinstance(offload, Tier)
    if not is_known and not isinstance(offload, str):
        raise TypeError(f"offload must be None, text or a rotor.Tier, got {type(offload).__name__}")
    if not is_known and not _NAME.fullmatch(offload):
        raise ValueError(
            f'unknown offload {offload!r}, expected "disk", "disk:FOLDER", "host", "host:FOLDER" '
            "or a rotor.Tier"
        )
    if is_on_host and offload != "host" and host_limit is None:
        raise ValueError(
            f"offload = {offload!r} names a folder for what exceeds a limit of the host's memory: "
            'give host_limit= too, or offload="host"'
        )
    if engine == "chain":
        raise ValueError(
            'offload= moves values of captured graphs and of eager steps, and engine="chain" has '
            'none: use engine="graph", "dynamic" or "auto"'
        )
    limit = None if offload_limit is None else parse_bytes(offload_limit, name="offload_limit")
    return Offload(offload if is_known else tier_of(offload, host_limit), limit)


def tier_of(offload: str, host_limit: int | str | None = None) -> Tier:
    """Return a new tier by its name, "host" or "disk", or one of these with ":" and a folder."""
    name, _, folder = offload.partition(":")
    if name == "host" and host_limit is None:
        return HostTier()
    disk = DiskTier(folder or None)
    return disk if host_limit is None else LayeredTier(host_limit, disk)


def known_speed(
    tier: Tier, device: torch.device, most_bytes: int | None = None
) -> tuple[Link, float]:
    """Return the speed of a tier, measured once, and the share of it that plans count on."""
    known = _measured.get(tier)
    if known is None:
        known = _measured[tier] = _measure(tier, device, most_bytes)
    found, slowest = known
    return found, slowest if slowest >= _STEADY else PLANNED_SHARE


def _planned(link: Link, share: float) -> Link:
    """Return a link at a share of its speed."""
    return replace(
        link,
        write_bytes_per_s=share * link.write_bytes_per_s,
        read_bytes_per_s=share * link.read_bytes_per_s,
    )


def trial_tier(offload: str, engine: str, host_limit: int | str | None = None) -> Tier:
    """Return a new tier by its name, as `checked_offload`; its folder keeps no finished steps."""
    checked = checked_offload(offload, None, engine, host_limit)
    assert checked is not None
    if isinstance(checked.tier, DiskTier):
        checked.tier.is_named = False
    return checked.tier


def measure_link(
    tier: Tier, device: torch.device | str = "cpu", most_bytes: int | None = None
) -> Link:
    """Return the median speed of a tier while the device computes.

    Parameters
    ----------
    tier
        Tier.
    device
        Device whose memory is moved.
    most_bytes
        Bytes of the device that it may take at most, about; ``None`` for any.

    Returns
    -------
    Link
        Medians over a few transfers of large and small blocks.

    Raises
    ------
    ValueError
        The tier does not reach the device.
    OSError
        A transfer failed.
    """
    return _measure(tier, torch.device(device), most_bytes)[0]


def _measure(tier: Tier, place: torch.device, most_bytes: int | None) -> tuple[Link, float]:
    """Return the link, and the share of its speed that the slowest sample had."""
    check_device(tier, place)
    try:
        return _timed_link(tier, place, most_bytes)
    finally:
        if place.type != "cpu":
            # A step's blocks that fell into memory cached here would be larger than planned.
            torch.accelerator.synchronize(place)
            devices.release_cached(place)


def _timed_link(tier: Tier, place: torch.device, most_bytes: int | None) -> tuple[Link, float]:
    """Return the median speed, and a share of it; memory of the device stays cached.

    A block moves again and again: values move in such pieces, and a sample of them needs no more.
    """
    alignment = tier.alignment_bytes
    room = PIECE_BYTES if most_bytes is None else most_bytes // _SHARE
    block = max(min(room, PIECE_BYTES) // _SMALL_BYTES, 2) * _SMALL_BYTES
    count = min(_SAMPLE_BYTES // block, _MOST_TRANSFERS)
    buffer = torch.zeros(block, dtype=torch.uint8, device=place)
    side = min(_COMPUTED, math.isqrt(block // 4))
    matrix = torch.full((side, side), 1.0 / side, device=place)
    spare = tier.spare_bytes()
    if spare is not None:
        count = max(min(count, spare // tier.room(block)), 1)
    tier, area = placed(tier, count * tier.room(block))

    def seconds(nbytes: int, *, is_write: bool) -> float:
        """Return the seconds of one transfer of several."""
        before = None if tier.traffic is None else tier.traffic.copy()
        begun = time.monotonic_ns()
        move, moved = tier.write if is_write else tier.read, buffer[:nbytes]
        tickets = [move(area, k * tier.room(block), moved) for k in range(count)]
        torch.mm(matrix, matrix)
        for ticket in tickets:
            tier.wait(ticket)
        if place.type != "cpu":
            torch.accelerator.synchronize(place)
        if tier.traffic is None or before is None:
            return (time.monotonic_ns() - begun) / 1e9 / count
        found = tier.traffic.since(before)
        return max(found.writing_ns if is_write else found.reading_ns, 1) / 1e9 / count

    def speed(quick: float, slow: float) -> float:
        """Return the bytes a second of whole pieces, from the seconds of small and large blocks."""
        grown = max(slow - quick, slow / 10) / (block - _SMALL_BYTES)
        return PIECE_BYTES / (slow + grown * (PIECE_BYTES - block))

    try:
        samples = [
            tuple(
                seconds(nbytes, is_write=is_write)
                for nbytes in (_SMALL_BYTES, block)
                for is_write in (True, False)
            )
            for _ in range(_SAMPLES)
        ]
    finally:
        tier.release(area)
    quick_write, quick_read, write, read = map(statistics.median, zip(*samples, strict=True))
    slowest = min(min(write / seen[2], read / seen[3]) for seen in samples)
    link = Link(
        speed(quick_write, write),
        speed(quick_read, read),
        latency_s=min(quick_write, quick_read),
        duplex=tier.duplex,
        least_bytes=tier.least_bytes,
        padding_bytes=alignment if alignment > 1 else 0,
    )
    return link, slowest


class UnreachableError(ValueError):
    """Choice of a tier that does not reach the memory of the step's device."""


def check_device(tier: Tier, device: torch.device) -> None:
    """Raise UnreachableError if a tier does not reach the memory of a device."""
    if not tier.reaches(device):
        raise UnreachableError(
            f"{type(tier).__name__} does not reach the memory of {device.type}, on which this step "
            'runs: offload="disk" is for the CPU, offload="host" for accelerators'
        )
