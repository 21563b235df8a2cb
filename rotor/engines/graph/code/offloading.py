"""Offloaded values of a step: their places in a second tier, and the code that moves them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rotor.common.tensor_trees import extent_of
from rotor.engines.graph.code.actions import Action, Kind, actions_of, offloaded, root_names
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.tier.interface import Tier, Traffic, bytes_within, placed

logger = logging.getLogger("rotor")


@dataclass
class Waits:
    """Time that steps of a program have spent in waits for a tier."""

    host_ns: int = 0
    """Waits of the host."""
    steps: int = 0
    seen_ns: int = 0
    """Time of all waits at the latest comparison with the plan."""
    seen_steps: int = 0
    """Number of steps at the latest comparison with the plan."""


@dataclass(frozen=True)
class Layout:
    """Places of a program's offloaded values in the area of a step."""

    tier: Tier
    offsets: dict[int, int]
    """First byte of each storage's place."""
    sizes: dict[int, int]
    """Bytes of each storage."""
    nbytes: int
    """Bytes of the area."""
    waits: Waits = field(default_factory=Waits)
    first: Traffic = field(default_factory=Traffic)
    """Traffic of the tier before the program's first step."""
    seen: Traffic = field(default_factory=Traffic)
    """Traffic of the tier at the latest comparison with the plan."""

    def prepare(self) -> None:
        """Reserve the area of a step once, so that a full disk is found before the step runs."""
        tier, area = placed(self.tier, self.nbytes)
        tier.release(area)

    def begin_area(self) -> StepArea:
        """Return the area of a new step, with one user."""
        if self.waits.steps == 0 and self.tier.traffic is not None:
            self.first.take(self.tier.traffic)
            self.seen.take(self.tier.traffic)
        self.waits.steps += 1
        return StepArea(self.tier, self.nbytes)

    def waited_ns(self) -> int:
        """Return the time of all waits so far, of the host and of the device."""
        traffic = self.tier.traffic
        on_device = 0 if traffic is None else traffic.waited_ns - self.first.waited_ns
        return self.waits.host_ns + on_device

    def see(self) -> None:
        """Note a comparison with the plan."""
        self.waits.seen_ns, self.waits.seen_steps = self.waited_ns(), self.waits.steps
        if self.tier.traffic is not None:
            self.seen.take(self.tier.traffic)


class StepArea:
    """Area of one step in a tier, given back when its last user has left."""

    def __init__(self, tier: Tier, nbytes: int) -> None:
        self._users = 1
        # A garbage collection may end a user while another one is counted.
        self._lock = threading.RLock()
        self.tier, self.area = placed(tier, nbytes)

    def join(self) -> StepArea:
        """Add a user; return the area."""
        with self._lock:
            self._users += 1
        return self

    def leave(self) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.tier.release(self.area)


@dataclass
class Places:
    """Source of the offloaded values of a step, or of a part of one, for code that plans share."""

    layout: Layout
    """Layout of the plan that runs next."""
    area: StepArea | None = None
    """Area of the whole step, for a part; ``None`` where each step of the layout has its own."""

    def begin(self) -> StepTier:
        """Return the offloaded values of a new step, or of the part."""
        area = self.layout.begin_area() if self.area is None else self.area.join()
        return StepTier(self.layout, area)


class StepTier:
    """Offloaded values of one step, a user of its area; they go with the last reference to it."""

    def __init__(self, layout: Layout, area: StepArea) -> None:
        self._tickets: dict[tuple[Kind, int], tuple[Any, torch.Tensor]] = {}
        self._forms: dict[int, tuple[Any, ...]] = {}
        self._layout = layout
        self._tier = area.tier
        self._step_area = area
        self._area = area.area

    def write(self, storage: int, tensor: torch.Tensor) -> None:
        """Begin to write the storage of a tensor."""
        memory, begin, room = tensor.untyped_storage(), 0, self._layout.sizes[storage]
        nbytes = memory.nbytes()
        if nbytes > room:
            # An operator has cloned more than the value: bytes before it, or beyond.
            begin = int(tensor.storage_offset()) * tensor.itemsize
            nbytes = extent_of(tensor.shape, tensor.stride()) * tensor.itemsize
        if nbytes > room:
            raise RuntimeError(
                f"a value of {nbytes} bytes is to be offloaded, and its plan has room for {room}: "
                "an operation has made more than when it was measured. Run measure() again"
            )
        source = bytes_within(memory, begin, nbytes)
        phase = source.data_ptr() % self._tier.alignment_bytes
        offset = tensor.storage_offset() - begin // tensor.itemsize
        form = tensor.shape, tensor.stride(), offset
        self._forms[storage] = tensor.dtype, tensor.device, form, nbytes, phase
        # An earlier write of the same values, by a first backward, is complete.
        ticket = self._tier.write(self._area, self._layout.offsets[storage], source)
        self._tickets[Kind.FINISH, storage] = ticket, source

    def written(self, storage: int) -> None:
        """Wait until a storage is written, and release its memory."""
        self._layout.waits.host_ns += self._wait(Kind.FINISH, storage)

    def fetch(self, storage: int) -> torch.Tensor:
        """Return a new tensor of a storage's form, whose bytes are on their way."""
        dtype, device, (shape, stride, offset), nbytes, phase = self._forms[storage]
        target = _new_bytes(nbytes, phase, self._tier.alignment_bytes, device)
        made = torch.empty(0, dtype=dtype, device=device)
        made.set_(target.untyped_storage(), offset, shape, stride)
        ticket = self._tier.read(self._area, self._layout.offsets[storage], target)
        self._tickets[Kind.FETCH, storage] = ticket, target
        return made

    def fetched(self, storage: int) -> None:
        """Wait until the bytes of a fetched storage have come."""
        self._layout.waits.host_ns += self._wait(Kind.FETCH, storage)

    def _wait(self, kind: Kind, storage: int) -> int:
        known = self._tickets.get((kind, storage))
        if known is None:
            # This is a second backward of the step: the first one has waited for the transfer.
            return 0
        begun = time.monotonic_ns()
        self._tier.wait(known[0])
        del self._tickets[kind, storage]
        return time.monotonic_ns() - begun

    def __del__(self) -> None:
        # Transfers that still run need their memory and their place.
        for ticket, _ in self._tickets.values():
            try:
                self._tier.wait(ticket)
            except Exception as error:
                logger.info("a transfer of a dropped step failed: %s", error)
        self._tickets.clear()
        self._step_area.leave()


def _new_bytes(nbytes: int, phase: int, alignment: int, device: torch.device) -> torch.Tensor:
    """Return new bytes, a storage of their own, whose address has a phase modulo an alignment.

    Operators that clone a tensor with its strides copy the storage from its begin: a value within
    larger memory would make them allocate more than for the first one.
    """
    if alignment == 1:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    room = torch.empty(nbytes + alignment, dtype=torch.uint8)
    begin = (phase - room.data_ptr()) % alignment
    return torch.from_numpy(room.numpy()[begin : begin + nbytes])


def layout_of(
    tier: Tier, lowered: Lowered, numbers: Sequence[int], sizes: Sequence[int]
) -> Layout | None:
    """Return places for a program's offloaded values; None if it has none.

    `sizes` are the bytes of all storages.
    """
    actions = actions_of(lowered, numbers)
    lives = _lives(actions, lowered.loss)
    if not lives:
        return None
    offsets, nbytes = _placed(lives, {s: tier.room(sizes[s]) for s in lives})
    return Layout(tier, offsets, {s: sizes[s] for s in lives}, nbytes)


def _lives(actions: Sequence[Action], loss: int) -> dict[int, tuple[int, int]]:
    """Return the first and the last position at which each storage has a place in the tier.

    Values that a forward has written and a backward fetches stay to the end: a backward that keeps
    its graph is followed by another one, which fetches them again.
    """
    boundary = next(
        k for k, action in enumerate(actions) if action.kind is Kind.RUN and action.number == loss
    )
    fetched: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.kind is Kind.FETCH:
            fetched[action.number] = last[action.number] = position
        for storage in action.reads:
            if fetched.get(storage) == last.get(storage) is not None:
                # The first reading after the latest fetch so far ends the fetch.
                last[storage] = position
                del fetched[storage]
    found = {}
    for storage, places in offloaded(actions).items():
        if places:
            crosses = places[0] < boundary < last[storage]
            found[storage] = places[0], len(actions) if crosses else last[storage]
    return found


def _placed(lives: dict[int, tuple[int, int]], rooms: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return an offset for each storage, and the bytes in all.

    Large storages come first; each is put at the lowest place that is free during its life.
    """
    order = sorted(lives, key=lambda s: (-rooms[s], s))
    begins = np.array([lives[s][0] for s in order], dtype=np.int64)
    ends = np.array([lives[s][1] for s in order], dtype=np.int64)
    lows = np.zeros(len(order), dtype=np.int64)
    highs = np.zeros(len(order), dtype=np.int64)
    for k, storage in enumerate(order):
        beside = np.flatnonzero((begins[:k] <= ends[k]) & (begins[k] <= ends[:k]))
        place = 0
        for other in beside[np.argsort(lows[beside], kind="stable")]:
            if lows[other] - place >= rooms[storage]:
                break
            place = max(place, int(highs[other]))
        lows[k], highs[k] = place, place + rooms[storage]
    offsets = {storage: int(lows[k]) for k, storage in enumerate(order)}
    return offsets, int(highs.max(initial=0))


class Moves:
    """Writer of the moves between memory and a second tier, with one that writes a function."""

    def __init__(
        self,
        lowered: Lowered,
        actions: Sequence[Action],
        kept: Sequence[set[int]],
        dying: Sequence[set[int]],
    ) -> None:
        self._names = root_names(lowered)
        self._actions = actions
        self._kept = kept
        self._dying = dying
        self._written: dict[int, list[int]] = {}
        found = offloaded(actions)
        for storage, positions in found.items():
            for position in positions:
                self._written.setdefault(position, []).append(storage)
        self._offloaded = set(found)
        self.pending: set[int] = set()
        """Storages that are being fetched, and have not been read."""
        self._arriving: set[int] = set()

    def begin_read(self, storages: Iterable[int]) -> None:
        """Note storages that an operation has begun to read from their homes."""
        self._arriving.update(storages)

    def move(self, writer: Any, position: int) -> None:
        """Write the end of an offload, or the begin of a fetch."""
        kind, storage = self._actions[position][:2]
        if kind is Kind.FETCH:
            if storage in self._kept[position]:
                writer.lines.append(f"{self._names[storage]} = tier.fetch({storage})")
                writer.define(self._names[storage], [storage])
                self.pending.add(storage)
            return
        self.receive(writer, [storage])
        if storage in self._offloaded:
            writer.lines.append(f"tier.written({storage})")
        writer.drop(sorted(self._dying[position]))

    def send(self, writer: Any, position: int) -> None:
        """Write the begin of the offloads of new values."""
        for storage in self._written.get(position, ()):
            writer.lines.append(f"tier.write({storage}, {self._names[storage]})")

    def receive(self, writer: Any, storages: Sequence[int]) -> None:
        """Write the waits for fetched storages that are about to be read."""
        for storage in storages:
            if storage in self.pending:
                self.pending.discard(storage)
                writer.lines.append(f"tier.fetched({storage})")
            if storage in self._arriving:
                self._arriving.discard(storage)
                writer.lines.append(f"arrived({self._names[storage]})")
