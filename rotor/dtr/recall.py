"""Making room, and bringing back what was evicted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from rotor import _core
from rotor._pytorch import core, devices, dispatch
from rotor.common.accounting import SCRAPS_BYTES, is_new_maximum, scrap_bytes
from rotor.common.frames import warn_caller
from rotor.dtr.calling import ModulePaths
from rotor.dtr.operators import KERNELS
from rotor.dtr.repeating import Verifier, verifying_bytes
from rotor.dtr.signatures import known_needs, read_times
from rotor.dtr.storages import StorageRef, Store, bytes_of
from rotor.errors import BudgetError, MemoryLimitWarning
from rotor.meter import allocator
from rotor.units import exact_bytes

CLOCK: Callable[[], int] | None = None
"""Clock of the sessions that begin from now on, ns; ``None`` for the system's."""
SMALL_BYTES = 256
LONGEST_CHAIN = 64
MOVE_WEIGHT = 1.0
"""Weight of the time of a move to the second tier and back, against that of computing again."""
_NAMED = 5
_LOST_BYTE = 0xFF  # makes floating-point numbers not a number
_SLACK_BYTES = 1 << 20
"""Most that a caching allocator keeps with a block above 1 MiB."""


@dataclass(frozen=True)
class Stats:
    """Counts and times of a session since it began, or since `Session.reset_profile`.

    Attributes
    ----------
    budget_bytes
        The budget, ``None`` for none.
    peak_bytes
        The most that was in use, above the level on entry, as the runtime counts it: storages
        and the workspaces that operators were measured to take.
    held_peak_bytes
        The same of what the program holds, evicted or not: the peak without any eviction.
    operations
        Operators of the program that ran, those that only make views left out.
    evictions, rematerializations
        Storages whose bytes were freed to make room, and operators that ran again.
    overflows
        Number of times that the budget was exceeded (``strict=False``).
    thrashes
        Number of times that repeated recomputation was found to take longer than the program.
    base_ns, remat_ns
        Time in the program's operators, and in those that ran again.
    search_ns, cost_ns
        Time spent choosing what to evict, and the part of it that is not the eviction itself.
    writes, fetches
        Storages that were written to the second tier, and fetched from it.
    written_bytes, fetched_bytes
        Their bytes.
    waited_ns
        Time that was waited for the second tier.
    """

    budget_bytes: int | None = None
    peak_bytes: int = 0
    held_peak_bytes: int = 0
    operations: int = 0
    evictions: int = 0
    rematerializations: int = 0
    overflows: int = 0
    thrashes: int = 0
    base_ns: int = 0
    remat_ns: int = 0
    search_ns: int = 0
    cost_ns: int = 0
    writes: int = 0
    fetches: int = 0
    written_bytes: int = 0
    fetched_bytes: int = 0
    waited_ns: int = 0


class Observer(Protocol):
    """Listener that is called at every event of storages in a session, with their numbers.

    A number may be given out again after `released`. What a written storage is afterwards has a new
    number; the old one is released without a call.
    """

    def constant(self, node: int, nbytes: int) -> None:
        """Handle a storage that no operator made."""

    def operation(
        self,
        name: str,
        cost_ns: int,
        inputs: list[int],
        outputs: list[tuple[int, int]],
        written: list[tuple[int, int]],
        is_recorded: bool,
    ) -> None:
        """Handle an operator that ran.

        Parameters
        ----------
        name
            Of the operator.
        cost_ns
            Its time, ns.
        inputs
            Numbers of the storages that it read.
        outputs
            (number, bytes) of what it made.
        written
            (old, new) number of what it wrote to.
        is_recorded
            Without a record the outputs stay in memory: they are constants from now on.
        """

    def released(self, node: int) -> None:
        """Handle a storage that the program dropped."""

    def pinned(self, node: int) -> None:
        """Handle a storage that stays in memory from now on."""

    def evicted(self, node: int) -> None:
        """Handle a storage that lost its bytes to make room."""


class _Slack:
    """Counter of what a device has allocated above the level on entry, and a session does not know.

    It is the slack of segments that the caching allocator keeps with large blocks, and what code
    outside the operators allocates. The device is an accelerator; reading waits for nothing.
    `nbytes` are the bytes beyond the session's storages when the counter was read last, 0 for
    fewer; `most_per_block` is the most that the allocator keeps with one block above 1 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._level, self._peak = devices.counters(device)
        self.nbytes = 0
        self.most_per_block = 0 if devices.expandable_segments() else _SLACK_BYTES

    def read(self, current: int) -> None:
        """Read the counter, where a session's storages are `current` bytes."""
        self.nbytes = max(devices.allocated_bytes(self._device) - self._level - current, 0)

    def peak_bytes(self) -> int | None:
        """Return the most that was allocated above the level on entry.

        ``None`` if the device's counter has not risen, since it was higher before the entry.
        """
        peak = devices.counters(self._device)[1]
        return None if peak == self._peak else peak - self._level


class Recall:
    """The book of a session, and the storages in it.

    `outside_bytes` are the bytes of the limit that are known to be taken by what no operator makes,
    `told_bytes` the largest need above the limit that a warning has named. `paths` is a context in
    which the paths of modules are noted, where replays are compared. `refused` are the arguments of
    the latest BudgetError.
    """

    refused: tuple[Any, ...] | None = None

    def __init__(
        self,
        limit: int | None,
        *,
        heuristic: str,
        seed: int,
        strict: bool,
        sample: bool,
        ignore_small: bool,
        storage_swap: bool | None,
        device: torch.device,
        observer: Observer | None,
        verify: bool = False,
        kept: set[str] | None = None,
        root: torch.nn.Module | None = None,
        offload: Store | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.limit = limit
        self.outside_bytes = self.told_bytes = 0
        self._slack: _Slack | None = None
        self._strict = strict
        self._bytes = bytes_of(storage_swap)
        self._proof_bytes = verifying_bytes(device) if verify else 0
        self._book = _core.Recorder(
            heuristic,
            -1 if limit is None else max(limit - self._apart_bytes(limit), 0),
            seed=seed,
            sample=sample,
            ignore_small=ignore_small,
        )
        self._store = offload
        if offload is not None:
            self._book.set_tier(offload.link_on(device), MOVE_WEIGHT)
        self._needs = known_needs(device)
        self._kept = set() if kept is None else kept
        if core.is_distributed():
            # Another process would have to run a collective once more too.
            self._kept |= dispatch.collective_names()
        self._handler = _core.Handler(
            self._book,
            dispatch.handler_parts(device),
            self._needs,
            KERNELS,
            self._kept,
            device,
            self._bytes,
            block_bytes=allocator.rounded_bytes(1, device),
            small_bytes=SMALL_BYTES,
            longest_chain=LONGEST_CHAIN,
            swaps=self._bytes.views,
        )
        self._handler.observer = observer
        self._handler.clock = CLOCK
        self._verifier = None
        if verify:
            self._verifier = Verifier(self._book, self._handler, self._kept.update)
            self._handler.verifier = self._verifier
        self.paths: AbstractContextManager[None] = (
            ModulePaths(self._handler, root) if verify else nullcontext()
        )
        self._is_cpu = device.type == "cpu"
        self._is_open = True
        self._is_leaving = False
        self._overflows = 0
        self._thrashes = 0
        self._search_ns = 0
        self._cost_ns = 0

    @property
    def observer(self) -> Observer | None:
        """Listener to every event, or ``None``."""
        observer: Observer | None = self._handler.observer
        return observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._handler.observer = observer

    @property
    def is_verifying(self) -> bool:
        """True if recomputed values are compared with the first ones."""
        return self._verifier is not None

    def stop_verifying(self) -> None:
        """Compare nothing from now on."""
        self._verifier = self._handler.verifier = None

    def _apart_bytes(self, limit: int) -> int:
        """Return the bytes of a limit for what no operator makes: scraps, slack, and checksums."""
        return max(scrap_bytes(limit) + self.outside_bytes, self._slack_bytes) + self._proof_bytes

    @property
    def _slack_bytes(self) -> int:
        return 0 if self._slack is None else self._slack.nbytes

    def count_slack(self) -> None:
        """Have the limit include what an accelerator's counter has beyond storages, from now on."""
        if self.limit is not None and not self._is_cpu and devices.has_counters(self.device):
            # Let libraries take now what they keep, which would count as slack.
            devices.prepare(self.device)
            self._slack = _Slack(self.device)
            self._handler.slack_bytes = self._slack.most_per_block

    def _read_slack(self) -> int:
        """Return the bytes of the session's storages, and let the limit follow the device."""
        current: int = self._book.counters()["current_bytes"]
        if self._slack is not None:
            self._slack.read(current)
            self._handler.unread_blocks = 0
            self._follow()
        return current

    def _follow(self) -> None:
        """Set the limit of the book again, after a change of what is set aside of it."""
        self.set_limit(self.limit)

    def _warn_of_excess(self) -> None:
        """Warn if the device's own counter passed the budget, and nothing has said so yet."""
        peak = None if self._slack is None or self._overflows else self._slack.peak_bytes()
        if peak is not None and self.limit is not None and peak > self.limit:
            self._overflows += 1
            warn_caller(
                f"the budget of {exact_bytes(self.limit)} was passed: {self.device} counted "
                f"{exact_bytes(peak)} above the level on entry. Operators that run for the first "
                "time may take more than is foreseen, and so may code that allocates outside of "
                "the operators",
                MemoryLimitWarning,
            )

    def _make_room(self, nbytes: int, least: int, *, is_wish: bool = False) -> None:
        """Evict until `nbytes` fit, or, where nothing is left to evict, at least `least`.

        If neither fits, a wish is dropped; otherwise BudgetError is raised, or a warning given.
        """
        read_times(self.device)
        if self._slack is not None:
            self._read_slack()
        make_room, now = self._book.make_room, CLOCK or perf_counter_ns
        start = now()
        taking = 0
        # Inputs of the operation that has begun are not evicted for more than `least`.
        enough = -1 if self.limit is None else self.limit - self._apart_bytes(self.limit) - least
        found = make_room(nbytes, enough)
        while found:
            began = now()
            if self._verifier is not None:
                self._verifier.evicting(found[1], found[0])
            if found[2]:
                assert self._store is not None
                self._book.moved(found[1], self._store.write(found[0]))
            self._take(*found[:2])
            if self.observer is not None:
                self.observer.evicted(found[1])
            taking += now() - began
            found = make_room(nbytes, enough)
        if found is None:
            if taking:
                took = now() - start
                self._search_ns += took
                self._cost_ns += took - taking
            return
        assert self.limit is not None
        # Evicting a block also frees the unusable remainder of its segment.
        current = self._read_slack() + self._apart_bytes(self.limit)
        if is_wish or current + least <= self.limit:
            return
        if self._strict and not self._is_leaving:
            self.refused = self._no_room(current, least, nbytes).args
            raise BudgetError(*self.refused)
        is_first = self._overflows == 0 and not self._is_leaving
        if is_first and is_new_maximum(current + least, self.limit, self.told_bytes):
            self.told_bytes = current + least
            warn_caller(str(self._no_room(current, least, nbytes)), MemoryLimitWarning)
        self._overflows += 1

    def _take(self, storage: torch.UntypedStorage, node: int) -> None:
        """Free the bytes of a storage; those that NumPy shares count until the storage dies."""
        # NumPy's storages cannot be resized, nor can those that custom operators make of arrays.
        is_shared = self._is_cpu and not storage.resizable() and not self._is_custom(node)
        nbytes = storage.nbytes()
        taken = self._bytes.take(storage)
        if is_shared:
            self._handler.adopt(taken, nbytes, False)
            weakref.finalize(storage, id, taken)

    def _is_custom(self, node: int) -> bool:
        record = self._book.describe(node).record
        return record is not None and record.operator.is_custom

    def _no_room(self, current: int, nbytes: int, wished: int) -> BudgetError:
        described = [self._book.describe(node) for node in self._book.nodes()]
        found = [node for node in described if node.is_material and node.nbytes]
        kept = sorted((node.nbytes, node.is_source, node.locks) for node in found)
        named = ", ".join(
            f"{exact_bytes(size)}, "
            f"{'in use now' if locks else 'an input, parameter, gradient or pinned'}"
            for size, _, locks in reversed(kept[-_NAMED:])
        )
        minimum = current + nbytes
        outside = tier = ""
        if self.outside_bytes:
            outside = f", and {exact_bytes(self.outside_bytes)} outside the model"
        if self._store is not None:
            stored = exact_bytes(self._book.counters()["stored_bytes"])
            most = self._store.limit_bytes
            of = "" if most is None else f" of its limit of {exact_bytes(most)}"
            tier = f"; the second tier holds {stored}{of}"
        return BudgetError(
            f"the budget of {exact_bytes(self.limit or 0)} is too small: the next operation needs "
            f"{exact_bytes(nbytes)} beside {exact_bytes(current)} that cannot be evicted "
            f"({len(kept)} storages{', the largest ' if kept else ''}"
            f"{named}{outside}){tier}; a budget of {exact_bytes(minimum)} gets past this operation",
            minimum,
            max(nbytes, wished // 2),
        )

    def _fetch(
        self, node: int, copy: object, storage: torch.UntypedStorage | None
    ) -> torch.UntypedStorage:
        """Bring a node's bytes back from the second tier, into its storage if it has one."""
        assert self._store is not None
        nbytes = self._book.describe(node).nbytes
        times = 1 if self._bytes.views or storage is None else 2
        needed = times * nbytes + self._store.extra_bytes(nbytes)
        self._make_room(needed, needed)
        self._book.reach(needed)
        made = self._store.fetch(copy)
        if storage is None:
            return made
        if self._verifier is not None:
            self._verifier.fetched(node, made)
        self._bytes.give(storage, made)
        return storage

    def _storage(self, node: int) -> torch.UntypedStorage:
        """Return the storage of a node that an argument, a lock or a record holds."""
        storage: torch.UntypedStorage | None = self._book.storage(node)
        assert storage is not None
        return storage

    def _see_thrashing(self) -> None:
        found = self._book.counters()
        if self._thrashes == 0:
            warn_caller(
                f"thrashing: while {found['worst_operations']} operations of the program took "
                f"{found['worst_base_ns'] / 1e9:.3g} s, {found['worst_repeats']} operations that "
                f"had run again {_core.OFTEN} times and more ran once more, for "
                f"{found['worst_repeat_ns'] / 1e9:.3g} s. What they make stays in memory from now "
                f"on as far as the budget of {exact_bytes(self.limit or 0)} allows. With "
                f"{exact_bytes(found['held_peak_bytes'] + SCRAPS_BYTES)} nothing would have "
                "been computed again until now",
                MemoryLimitWarning,
            )
        self._thrashes = found["thrashes"]

    def _catch_up(self) -> None:
        """Run again what the inputs of the operation that has begun need."""
        self._handler.catch_up(self)

    def _restore(self, nodes: list[int]) -> None:
        """Have live nodes computed for good, except nodes that have died meanwhile.

        A second tier may take them from memory all the same.
        """
        book = self._book
        # References keep the storages alive, so that no number is given to another storage.
        held = [(node, storage) for node in nodes if (storage := book.storage(node)) is not None]
        for node, _ in held:
            if self._is_leaving or not book.describe(node).is_away:
                self._bring_node(node, False)
            self._pin(node, may_move=not self._is_leaving)

    def _pin(self, node: int, *, may_move: bool = False) -> None:
        self._book.pin(node, may_move)
        if self.observer is not None:
            self.observer.pinned(node)

    def bytes_of(self, node: int) -> int:
        """Return the bytes of the storage with a number that an observer received."""
        return self._book.describe(node).nbytes

    def set_limit(self, limit: int | None) -> None:
        """Keep another limit from the next operator on, bytes above the level on entry."""
        self.limit = limit
        self._book.limit(-1 if limit is None else max(limit - self._apart_bytes(limit), 0))

    def consider(self, *, sample: bool, ignore_small: bool) -> None:
        """Choose among other candidates from the next eviction on.

        With `sample`, only about 2 sqrt(n) of n candidates are looked at. With `ignore_small`,
        storages below 1 % of the mean size are passed over, and become candidates when they are
        used again.
        """
        self._book.consider(sample, ignore_small)

    def reference(self, tensor: torch.Tensor) -> StorageRef | None:
        """Return the session's reference to a tensor's storage, ``None`` if it has seen none."""
        with dispatch.without_functions():
            return self._handler.reference(tensor.untyped_storage())

    def pin_all(self) -> None:
        """Have everything that the program holds in memory for as long as the session lasts."""
        with self._handler, dispatch.without_functions(), dispatch.without_modes():
            for ref in self._handler.references():
                storage = ref()
                if storage is not None:
                    self._bring_node(ref.node, True)

    def materialize(self, tensor: torch.Tensor) -> None:
        """Have the bytes of a tensor in memory, until the next operator runs."""
        self._bring(tensor, False)

    def pin(self, tensor: torch.Tensor) -> None:
        """Have the bytes of a tensor in memory for as long as the session lasts."""
        self._bring(tensor, True)

    def give_up(self, tensor: torch.Tensor) -> None:
        """Keep a tensor that code outside the operators writes to; compute nothing from it."""
        self._bring(tensor, True)
        for part in core.strided_parts(tensor):
            with self._handler, dispatch.without_functions(), dispatch.without_modes():
                ref = self._handler.reference(part.untyped_storage())
                if ref is not None and self._is_open:
                    self._protect(ref.node)

    def _bring(self, tensor: torch.Tensor, pin: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
        for part in core.strided_parts(tensor):
            with self._handler, dispatch.without_functions():
                ref = self._handler.reference(part.untyped_storage())
                if ref is None or not self._is_open:
                    continue
                with dispatch.without_modes():
                    self._bring_node(ref.node, pin)

    def _bring_node(self, node: int, pin: bool) -> None:
        with self._handler:  # Which aborts what an exception leaves.
            self._book.begin([node])
            self._catch_up()
            self._book.abort()
        if pin:
            self._pin(node)

    def _protect(self, node: int) -> int:
        """Prepare a write to a source: results computed from it must not need it again.

        Returns the number of the source, a new one where the old one is a copy's from now on.
        """
        source = self._book.describe(node)
        nbytes = source.nbytes
        if source.needed == 0:
            return node
        if self.limit is not None and self._book.is_worth_a_copy(node):
            # A second tier might take the source before it is copied.
            self._book.begin([node])
            self._catch_up()
            self._make_room(nbytes, 0)
            is_needed = self._book.describe(node).needed > 0
            is_copied = is_needed and self._fits(nbytes)
            again = self._copy(node) if is_copied else node
            self._book.abort()
            if is_copied or not is_needed:
                return again
        self._restore(self._book.dependents(node))
        return node

    def _fits(self, nbytes: int) -> bool:
        assert self.limit is not None
        current = self._book.counters()["current_bytes"]
        return current + nbytes + self._apart_bytes(self.limit) <= self.limit

    def _fill_lost(self) -> None:
        """Give memory, without their values, to storages that cannot be brought back."""
        for node in self._book.evicted():
            storage = self._book.storage(node)
            if storage is not None:
                nbytes = storage.nbytes() or self._book.describe(node).nbytes
                made = torch.UntypedStorage(nbytes, device=storage.device)
                torch.empty(0, dtype=torch.uint8, device=made.device).set_(made).fill_(_LOST_BYTE)
                self._bytes.give(storage, made)

    def _drop_copies(self) -> None:
        """Free the copies of sources: nothing will run again."""
        if self._book.counters()["copied_bytes"] > 0:
            for node in self._book.nodes():
                found = self._book.describe(node)
                if found.is_material and found.is_source and not found.is_live:
                    self._book.hold(node, None)

    def _copy(self, node: int) -> int:
        """Have the records of a source read a copy of it; return the source's new number."""
        storage = self._storage(node)
        now = CLOCK or perf_counter_ns
        start = now()
        copy = torch.UntypedStorage(storage.nbytes(), device=storage.device)
        copy.copy_(storage)
        took = now() - start
        ref = self._handler.reference(storage)
        assert ref is not None
        again = ref.node = self._book.copied(node, copy)
        if self.observer is not None:
            size = self._book.describe(again).nbytes
            self.observer.operation("rotor::copy", took, [node], [(again, size)], [], False)
            self.observer.pinned(again)
            self.observer.released(node)
        return again
