"""The runtime: a mode that sees every operator of the program, and keeps memory in the budget."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from rotor import _core, _dispatch, _torch, memory
from rotor.dtr.operators import Operator
from rotor.dtr.records import Record, pattern, read_flags, tensors_of
from rotor.dtr.signatures import guess, known_needs, run_measured
from rotor.dtr.storages import StorageRef, bytes_of
from rotor.errors import BudgetError, MemoryLimitWarning
from rotor.units import parse_bytes

_NAMED = 5
_SMALL_BYTES = 256
_NUMBER_BYTES = 16


@dataclass(frozen=True)
class Stats:
    """What a session has done since it began, or since `Session.reset_profile`.

    Attributes
    ----------
    budget_bytes
        The budget, ``None`` for none.
    peak_bytes
        The most that was in use, above the level on entry, as the runtime counts it: storages
        and the workspaces that operators were measured to take.
    operations
        Operators of the program that ran, those that only make views left out.
    evictions, rematerializations
        Storages whose bytes were freed to make room, and operators that ran again.
    overflows
        How often the budget was passed (``strict=False``).
    base_ns, remat_ns
        Time in the program's operators, and in those that ran again.
    search_ns, cost_ns
        Time spent choosing what to evict, and the part of it that is not the eviction itself.
    """

    budget_bytes: int | None
    peak_bytes: int
    operations: int
    evictions: int
    rematerializations: int
    overflows: int
    base_ns: int
    remat_ns: int
    search_ns: int
    cost_ns: int


class Session(_dispatch.DispatchMode):
    """A program that runs under a budget; `budget` makes and enters one."""

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
    ) -> None:
        super().__init__()
        self.device = device
        self.limit = limit
        self._strict = strict
        self._bytes = bytes_of(storage_swap)
        self._book = _core.Recorder(
            heuristic,
            -1 if limit is None else limit,
            seed=seed,
            sample=sample,
            ignore_small=ignore_small,
        )
        self._table: dict[int, StorageRef] = {}
        self._operators: dict[Any, Operator] = {}
        self._needs = known_needs(device)
        self._lock = threading.RLock()
        self._is_cpu = device.type == "cpu"
        self._is_open = True
        self._is_leaving = False
        self._overflows = 0
        self._search_ns = 0
        self._cost_ns = 0

    # -- figures

    @property
    def stats(self) -> Stats:
        """What the session has done."""
        counters = self._book.counters()
        return Stats(
            budget_bytes=self.limit,
            peak_bytes=counters["peak_bytes"],
            operations=counters["operations"],
            evictions=counters["evictions"],
            rematerializations=counters["rematerializations"],
            overflows=self._overflows,
            base_ns=counters["base_ns"],
            remat_ns=counters["remat_ns"],
            search_ns=self._search_ns,
            cost_ns=self._cost_ns,
        )

    def reset_profile(self) -> None:
        """Begin counts, times and the peak anew."""
        self._book.reset()
        self._overflows = self._search_ns = self._cost_ns = 0

    # -- storages

    def _gone(self, ref: StorageRef) -> None:
        if self._table.get(ref.key) is ref:
            del self._table[ref.key]
        if self._is_open:
            self._book.dead(ref.node)

    def _size(self, storage: torch.UntypedStorage) -> int:
        if storage.device != self.device:
            return 0
        return (
            storage.nbytes()
            if self._is_cpu
            else memory.rounded_bytes(storage.nbytes(), self.device)
        )

    def _adopt(self, storage: torch.UntypedStorage, is_foreign: bool) -> StorageRef:
        ref = StorageRef(storage, self._gone)
        ref.node = self._book.source(self._size(storage), is_foreign, ref)
        self._table[ref.key] = ref
        return ref

    def _ref_of(self, tensor: torch.Tensor) -> StorageRef:
        storage = tensor.untyped_storage()
        ref = self._table.get(_dispatch.storage_key(storage))
        if ref is None:
            # Numbers among an operator's arguments become tensors unseen.
            ref = self._adopt(storage, tensor.dim() > 0 or tensor.nbytes > _NUMBER_BYTES)
        return ref

    # -- making room, running again

    def _make_room(self, nbytes: int, least: int) -> None:
        """Evict until `nbytes` fit, or, where nothing is left to evict, at least `least`."""
        make_room = self._book.make_room
        start = perf_counter_ns()
        taking = 0
        found = make_room(nbytes)
        while found:
            now = perf_counter_ns()
            self._bytes.take(found[0])
            taking += perf_counter_ns() - now
            found = make_room(nbytes)
        if found is None:
            if taking:
                took = perf_counter_ns() - start
                self._search_ns += took
                self._cost_ns += took - taking
            return
        current = self._book.counters()["current_bytes"]
        assert self.limit is not None
        if current + least <= self.limit:
            return
        if self._strict and not self._is_leaving:
            raise self._no_room(current, least)
        if self._overflows == 0 and not self._is_leaving:
            warnings.warn(str(self._no_room(current, least)), MemoryLimitWarning, stacklevel=4)
        self._overflows += 1

    def _no_room(self, current: int, nbytes: int) -> BudgetError:
        described = [(self._book.describe(node), node) for node in self._book.nodes()]
        kept = sorted(
            (entry[0], entry[2], entry[4]) for entry, _ in described if entry[1] and entry[0]
        )
        named = ", ".join(
            f"{size} bytes ({'in use now' if locks else 'an input, parameter, gradient or pinned'})"
            for size, _, locks in reversed(kept[-_NAMED:])
        )
        minimum = current + nbytes
        return BudgetError(
            f"the budget of {self.limit} bytes is too small: the next operation needs {nbytes} "
            f"bytes beside {current} that cannot be evicted ({len(kept)} storages, the largest "
            f"{named}); a budget of {minimum} bytes gets past this operation",
            minimum,
        )

    def _storage(self, node: int) -> torch.UntypedStorage:
        storage: torch.UntypedStorage | None = self._book.storage(node)
        assert storage is not None
        return storage

    def _replay(self, record: Record) -> None:
        book = self._book
        nbytes, _ = book.wanted()
        copied: dict[int, torch.UntypedStorage] = {}
        if self._bytes.copies:
            nbytes *= 2
        self._make_room(nbytes, nbytes)
        _, wanted = book.wanted()  # Making room may have evicted an output that was there.
        reused = {record.origins[k] for k, _, _, may_reuse in wanted if may_reuse}

        def storage_of(node: int) -> torch.UntypedStorage:
            if node not in record.origins or node in reused:
                return self._storage(node)
            if node not in copied:
                storage = self._storage(node)
                copied[node] = torch.UntypedStorage(storage.nbytes(), device=storage.device)
                copied[node].copy_(storage)
            return copied[node]

        start = perf_counter_ns()
        results = record.run(storage_of)
        if not self._is_cpu:
            torch.cuda.synchronize(self.device)
        took = perf_counter_ns() - start
        for k, node, is_live, _ in wanted:
            index, origin = record.outputs[k], record.origins[k]
            made = results[index].untyped_storage() if index >= 0 else storage_of(origin)
            if not is_live:
                book.hold(node, made)
                continue
            storage = self._storage(node)
            if self._bytes.views and storage.nbytes() != made.nbytes():
                raise RuntimeError(
                    f"{record.operator.name} made a storage of {made.nbytes()} bytes where it "
                    f"made {storage.nbytes()} before: rotor cannot run this program again"
                )
            self._bytes.give(storage, made)
        book.replayed(took)

    def _catch_up(self) -> None:
        """Run again what the inputs of the operation that has begun need."""
        record = self._book.next()
        while record is not None:
            self._replay(record)
            record = self._book.next()

    def _restore(self, nodes: list[int]) -> None:
        """Bring nodes back into memory for good."""
        book = self._book
        for node in nodes:
            storage = self._storage(node)
            try:
                book.begin([node])
                self._catch_up()
            finally:
                book.abort()
            book.pin(node)
            del storage

    def _protect(self, node: int) -> None:
        """Before a source is written to: what was computed from it must not need it again."""
        if self._book.describe(node)[5] > 0:
            self._restore(self._book.dependents(node))

    # -- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator of the program."""
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func)
        if kwargs is None:
            kwargs = {}
        if operator.is_view and self._bytes.views:
            if operator.is_fresh:
                with self._lock:
                    self._see_fresh(args[0])
            return func(*args, **kwargs)
        with self._lock:
            return self._run(operator, args, kwargs)

    def _see_fresh(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if _dispatch.storage_key(storage) not in self._table:
            self._adopt(storage, False)

    def _run(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        book = self._book
        signature: list[Any] = [operator.call]
        tensors: list[torch.Tensor] = []
        _flatten(args, tensors, signature)
        for name, value in kwargs.items():
            signature.append(name)
            _flatten(value, tensors, signature)
        refs = {}
        node_of = {}
        read_bytes = 0
        for tensor in tensors:
            ref = self._ref_of(tensor)
            refs[ref.node] = ref
            node_of[id(tensor)] = ref.node
        is_recording = _dispatch.graph_task() < 0 or torch.is_grad_enabled()
        written = self._written(operator, args, kwargs, node_of)
        hidden: set[int] = set()
        replay_args = args
        if operator.training >= 0 and args[operator.training]:
            hidden = {node_of[id(t)] for t in args[3:5] if t is not None}
            for node in hidden:
                self._protect(node)
            written = [node for node in written if node not in hidden]
            replay_args = (*args[:3], None, None, *args[5:])
        for node in written:
            if book.describe(node)[2]:
                is_recording = False
                self._protect(node)
        nodes = [node for node in refs if node not in hidden]
        recorded = len(nodes)
        nodes.extend(hidden)

        needs = self._needs.get(key := tuple(signature))
        if needs is None:
            read_bytes = sum(ref_bytes(ref) for ref in refs.values())
            needs = self._needs[key] = guess(operator, args, kwargs, read_bytes)
        generator = state = None
        kept_bytes = 0
        try:
            book.begin(nodes)
            self._catch_up()
            if operator.is_random:
                generator, state = self._random_state(kwargs)
                kept_bytes = state.nbytes if generator.device == self.device else 0
            least = needs.made_bytes + (needs.workspace_bytes if needs.is_measured else 0)
            self._make_room(
                needs.made_bytes + needs.workspace_bytes + kept_bytes, least + kept_bytes
            )
            if needs.is_measured or not self._is_cpu or _torch.profiler_in_use():
                start = perf_counter_ns()
                results = operator.call(*args, **kwargs)
                took = perf_counter_ns() - start
                peak = -1
            else:
                start = perf_counter_ns()
                results, peak = run_measured(operator.call, args, kwargs)
                took = perf_counter_ns() - start
        except BaseException:
            book.abort()
            raise
        made, indices, places = self._new_storages(results)
        sizes = [self._size(storage) for storage in made]
        origins = [-1] * len(made)
        sources = [node for node in written if not book.describe(node)[2]]
        for node in sources:
            sizes.append(book.describe(node)[0])
            indices.append(-1)
            origins.append(node)
            places.append(refs[node])
        if peak >= 0:
            needs.made_bytes = sum(sizes[: len(made)])
            needs.workspace_bytes = max(peak - needs.made_bytes, 0)
            needs.is_measured = True
        record = None
        if is_recording and places and max(sizes) > _SMALL_BYTES:
            record = Record(
                operator,
                [pattern(value, node_of) for value in replay_args],
                {name: pattern(value, node_of) for name, value in kwargs.items()},
                indices,
                origins,
                torch.is_grad_enabled(),
                read_flags(),
                generator,
                state,
            )
        else:
            kept_bytes = 0
        numbers = book.finish(
            recorded if record is not None else -1,
            sizes,
            origins,
            took,
            needs.workspace_bytes if needs.is_measured else 0,
            kept_bytes,
            places,
            record,
        )
        for ref, number in zip(places, numbers, strict=True):
            ref.node = number
            self._table[ref.key] = ref
        return results

    def _written(
        self, operator: Operator, args: Any, kwargs: dict[str, Any], node_of: dict[int, int]
    ) -> list[int]:
        if not operator.written:
            return []
        found: dict[int, None] = {}
        for where in operator.written:
            if isinstance(where, str):
                value = kwargs.get(where)
            else:
                value = args[where] if where < len(args) else None
            for tensor in tensors_of(value):
                found[node_of[id(tensor)]] = None
        return list(found)

    def _new_storages(
        self, results: Any
    ) -> tuple[list[torch.UntypedStorage], list[int], list[StorageRef]]:
        made, indices, places = [], [], []
        seen = set()
        for index, tensor in enumerate(tensors_of(results)):
            storage = tensor.untyped_storage()
            key = _dispatch.storage_key(storage)
            if key in self._table or key in seen:
                continue
            seen.add(key)
            made.append(storage)
            indices.append(index)
            places.append(StorageRef(storage, self._gone))
        return made, indices, places

    def _random_state(self, kwargs: dict[str, Any]) -> tuple[torch.Generator, torch.Tensor]:
        generator = kwargs.get("generator")
        if generator is None:
            generator = (
                torch.default_generator
                if self._is_cpu
                else torch.cuda.default_generators[self.device.index or 0]
            )
        return generator, generator.get_state()

    # -- the end

    def close(self) -> None:
        """Bring back what is evicted and still in use, and forget everything."""
        if not self._is_open:
            return
        book = self._book
        self._is_leaving = True
        overflows = self._overflows
        try:
            self._restore(book.evicted())
        finally:
            self._is_open = False
            self._table.clear()
        if self._overflows > overflows:
            warnings.warn(
                "leaving the context brought back everything that was evicted and is still in "
                f"use: {book.counters()['current_bytes']} bytes above the level on entry, over "
                f"the budget of {self.limit}. Run the backward inside the context",
                MemoryLimitWarning,
                stacklevel=4,
            )


def ref_bytes(ref: StorageRef) -> int:
    """Bytes of the storage of a reference, 0 where it is gone."""
    storage = ref()
    return 0 if storage is None else storage.nbytes()


def _flatten(value: Any, tensors: list[torch.Tensor], signature: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        signature.append((value.shape, value.stride(), value.dtype))
    elif isinstance(value, list | tuple):
        signature.append(len(value))
        for item in value:
            _flatten(item, tensors, signature)
    elif isinstance(value, torch.Generator):
        signature.append(torch.Generator)
    else:
        signature.append(value)


_current: list[Session] = []


def current() -> Session | None:
    """The session that the program is in, ``None`` outside."""
    return _current[-1] if _current else None


def _bytes_of_limit(limit: int | str | float | None) -> int | None:
    if limit is None or (isinstance(limit, float) and math.isinf(limit) and limit > 0):
        return None
    return parse_bytes(limit)


@contextmanager
def budget(
    limit: int | str | float | None,
    *,
    heuristic: str = "DTREqClass",
    seed: int = 0,
    strict: bool = True,
    sample: bool = False,
    ignore_small: bool = False,
    guard: bool = True,
    record_log: Callable[..., object] | None = None,
    storage_swap: bool | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Session]:
    """Run a program with at most so much memory above the level on entry."""
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    found = torch.device(device)
    if str(found) == "cuda":
        found = torch.device("cuda", torch.cuda.current_device())
    if _current:
        raise RuntimeError("budgets do not nest: leave the one before, or change its limit")
    session = Session(
        _bytes_of_limit(limit),
        heuristic=heuristic,
        seed=seed,
        strict=strict,
        sample=sample,
        ignore_small=ignore_small,
        storage_swap=storage_swap,
        device=found,
    )
    _current.append(session)
    try:
        with session:
            yield session
    finally:
        _current.remove(session)
        session.close()
