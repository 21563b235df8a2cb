"""The runtime: a mode that sees every operator of the program, and keeps memory in the budget."""

from __future__ import annotations

import warnings
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from rotor._pytorch import core, dispatch, profiler
from rotor.dtr.operators import Operator
from rotor.dtr.recall import LONGEST_CHAIN, SMALL_BYTES, Recall, Stats
from rotor.dtr.records import Needs, Record, pattern, tensors_of
from rotor.dtr.repeating import known_repeats, repeats
from rotor.dtr.signatures import (
    guess,
    remember,
    run_measured,
    varies_by_elements,
    varying_bytes,
)
from rotor.dtr.storages import StorageRef, reference
from rotor.errors import MemoryLimitWarning
from rotor.meter import allocator

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBER_BYTES = 16


class Call(NamedTuple):
    """An operator and its arguments, as they were before it ran.

    Attributes
    ----------
    operator, args, kwargs
        What to repeat.
    node_of
        The nodes of tensors, by their ``id``.
    nodes, recorded
        The nodes that it began with, of which the first so many are what it is computed from.
    refs
        Their storages.
    written
        The nodes that it writes to.
    """

    operator: Operator
    args: Any
    kwargs: dict[str, Any]
    node_of: dict[int, int]
    nodes: list[int]
    recorded: int
    refs: dict[int, StorageRef]
    written: list[int]


class Session(Recall, dispatch.DispatchMode):
    """A program that runs under a budget; `budget` makes and enters one."""

    def __init__(self, limit: int | None, *, device: torch.device, **settings: Any) -> None:
        super().__init__(limit, device=device, **settings)
        self._handler.watches_writes = type(self)._protect is not Recall._protect
        self._warned_chain = False
        self._warned_kept: set[str] = set()
        self._generator_bytes: dict[torch.device, int] = {}

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
            thrashes=counters["thrashes"],
            base_ns=counters["base_ns"],
            remat_ns=counters["remat_ns"],
            search_ns=self._search_ns,
            cost_ns=self._cost_ns,
        )

    def counters(self) -> dict[str, int]:
        """The figures of the book: bytes, nodes, records, times; for tests and reports."""
        return self._book.counters()

    @property
    def compared(self) -> int:
        """How many values that were computed again were compared, bit for bit."""
        return 0 if self._verifier is None else self._verifier.compared

    def reset_profile(self) -> None:
        """Begin counts, times and the peak anew."""
        self._book.reset()
        self._overflows = self._search_ns = self._cost_ns = 0

    # -- storages

    def _size(self, storage: torch.UntypedStorage) -> int:
        if storage.device != self.device:
            return 0
        return (
            storage.nbytes()
            if self._is_cpu
            else allocator.rounded_bytes(storage.nbytes(), self.device)
        )

    def _adopt(self, storage: torch.UntypedStorage, is_foreign: bool) -> StorageRef:
        ref = reference(storage, self._handler.gone)
        ref.node = self._book.source(self._size(storage), is_foreign, ref)
        self._table[ref.key] = ref
        if self.observer is not None:
            self.observer.constant(ref.node, storage.nbytes())
        return ref

    def _ref_of(self, tensor: torch.Tensor) -> StorageRef:
        storage = tensor.untyped_storage()
        ref = self._table.get(dispatch.storage_key(storage))
        if ref is None:
            # Numbers among an operator's arguments become tensors unseen.
            ref = self._adopt(storage, tensor.dim() > 0 or tensor.nbytes > _NUMBER_BYTES)
        return ref

    def manage(self, tensor: torch.Tensor) -> None:
        """Count a tensor among the sources, before an operator reads it."""
        with self._lock, dispatch.without_functions():
            for part in core.strided_parts(tensor):
                self._ref_of(part)

    # -- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator of the program."""
        with self._lock:
            return self._handler.run(self, func, types, args, kwargs)

    def _handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        """Run an operator that the handler in C leaves to Python."""
        if dispatch.in_function_modes():
            with dispatch.without_functions():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if types and not all(kind in _PLAIN for kind in types):
            if any(issubclass(kind, dispatch.FakeTensor) for kind in types):
                raise RuntimeError(
                    "torch.compile within rotor.dtr.budget: compiled kernels would read what is "
                    "evicted. Leave the function uncompiled, or compile it and use "
                    "rotor.Checkpointable"
                )
            return NotImplemented
        kernel = self._handler.kernels.get(func)
        if kernel is None:
            is_watched = bool(self._kept) and dispatch.schema_of(func).name in self._kept
            kernel = self._handler.kernels[func] = Operator(func, is_watched=is_watched).kernel
        operator = kernel.operator
        if kwargs is None:
            kwargs = {}
        if operator.is_view and self._bytes.views:
            if operator.is_fresh:
                self._see_fresh(args[0])
            return func(*args, **kwargs)
        return self._run(operator, args, kwargs)

    def _see_fresh(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if dispatch.storage_key(storage) not in self._table:
            self._adopt(storage, False)

    def _run(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        book = self._book
        if not self._is_cpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "CUDA graphs cannot be captured within rotor.dtr.budget: what they read may be "
                "evicted. Capture before entering the context"
            )
        _refuse_opaque((args, tuple(kwargs.values())))
        is_recording = dispatch.graph_task() < 0 or torch.is_grad_enabled()
        refs, node_of = self._refs(args, kwargs)
        if -1 in node_of.values():
            is_recording = False
        written = self._written(operator, args, kwargs, node_of)
        hidden: set[int] = set()
        replay_args = args
        now: dict[int, int] = {}
        if operator.training >= 0 and args[operator.training]:
            before = {node_of[id(t)] for t in args[3:5] if t is not None}
            now = {node: self._protect(node) for node in before}
            written = [node for node in written if node not in before]
            hidden = set(now.values())
            replay_args = (*args[:3], None, None, *args[5:])
        if operator.dropout >= 0 and all(args[operator.dropout : operator.dropout + 2]):
            is_recording = False
        if operator.is_reshaping:
            written = []
            is_recording = False
            for node in refs:
                self._restore([node])
                now[node] = self._protect(node)
        for node in written:
            if not torch.is_grad_enabled():
                # What optimizers and initialisations write to lives long: a version for every step
                # would keep all that it was computed from.
                self._restore([node])
            elif book.describe(node).version >= LONGEST_CHAIN:
                self._end_chain(node)
            if book.describe(node).is_source:
                is_recording = False
                now[node] = self._protect(node)
        if any(node != again for node, again in now.items()):
            refs = {ref.node: ref for ref in refs.values()}
            node_of = {key: now.get(node, node) for key, node in node_of.items()}
            written = [now.get(node, node) for node in written]
        nodes = [node for node in refs if node not in hidden]
        recorded = len(nodes)
        nodes.extend(hidden)

        if operator.name in self._kept:
            is_recording = False
        varies = operator.varies and varies_by_elements(operator, args)
        needs = self._needs_of(operator, args, kwargs, refs)
        generator = state = None
        kept_bytes = 0
        book.begin(nodes)
        try:
            self._catch_up()
            if operator.is_random or operator.is_custom:
                generator = self._generator(kwargs)
                kept_bytes = self._state_bytes(generator)
            if varies:
                needs = self._varying_needs(operator, args, needs)
            least = needs.made_bytes + (needs.workspace_bytes if needs.is_measured else 0)
            self._make_room(
                needs.made_bytes + needs.workspace_bytes + kept_bytes, least + kept_bytes
            )
            states = []
            if generator is not None:
                state = generator.get_state()
                states = self._states(operator, generator, state)
            watches = self._is_cpu and (varies or not needs.is_measured)
            if not watches or profiler.profiler_in_use():
                start = perf_counter_ns()
                results = operator.call(*args, **kwargs)
                took = perf_counter_ns() - start
                peak = -1
            else:
                start = perf_counter_ns()
                results, peak = run_measured(operator.call, args, kwargs)
                took = perf_counter_ns() - start
            _refuse_opaque(results)
            self._has_run(needs, state)
            if operator.is_custom and is_recording:
                is_recording = self._may_repeat(operator, args, kwargs, results, needs, states)
            if operator.is_custom and torch.equal(states[0][0].get_state(), states[0][1]):
                generator = state = None
                kept_bytes = 0
            call = Call(operator, replay_args, kwargs, node_of, nodes, recorded, refs, written)
            self._complete(
                call, results, needs, is_recording, took, peak, (generator, state, kept_bytes)
            )
        except BaseException:
            book.abort()
            raise
        if varies and peak >= 0:
            self._note_varying(operator, args, kwargs, needs)
        return results

    def _has_run(self, needs: Needs, state: torch.Tensor | None) -> None:
        """An operator has run, before its results are taken in."""

    def _states(
        self, operator: Operator, generator: torch.Generator, state: torch.Tensor
    ) -> list[tuple[torch.Generator, torch.Tensor]]:
        states = [(generator, state)]
        if operator.is_custom and not self._is_cpu:
            states.append((torch.default_generator, torch.default_generator.get_state()))
        return states

    def _may_repeat(
        self,
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any],
        results: Any,
        needs: Needs,
        states: list[tuple[torch.Generator, torch.Tensor]],
    ) -> bool:
        """Return whether an operator that is not PyTorch's own can be run again."""
        key = self._handler.signature(operator.kernel, args, kwargs)
        others = states[1:]  # Only one generator is put back when an operator runs again.
        if any(not torch.equal(g.get_state(), state) for g, state in others):
            return self._keep(operator)
        known = known_repeats().get(key)
        if known is None:
            made = sum(t.untyped_storage().nbytes() for t in tensors_of(results))
            if operator.written or key is None:
                return self._keep(operator)
            if self.limit is not None:
                again = 2 * made + needs.workspace_bytes
                Recall._make_room(self, again, 0, is_wish=True)
                if not self._fits(again):
                    # Another time: until then they are kept.
                    return False
            known = known_repeats()[key] = repeats(operator, args, kwargs, results, states)
        return known or self._keep(operator)

    def _keep(self, operator: Operator) -> bool:
        if operator.name not in self._warned_kept:
            self._warned_kept.add(operator.name)
            warnings.warn(
                f"{operator.name} does not repeat bit for bit, or could not be tested: what it "
                "makes stays in memory, and is never computed again. Operators that draw from "
                "torch's default generator, or nothing at random, and that write to none of their "
                "arguments can be computed again",
                MemoryLimitWarning,
                stacklevel=5,
            )
        return False

    def _varying_needs(self, operator: Operator, args: Any, known: Needs) -> Needs:
        """What an operator takes whose results depend on elements: what is known is of others."""
        found = varying_bytes(operator, args, exactly=False)
        current = self._book.counters()["current_bytes"]
        if found is not None and self.limit is not None and current + 2 * found > self.limit:
            found = varying_bytes(operator, args, exactly=True)
        made = known.made_bytes if found is None else found
        workspace = known.workspace_bytes
        if operator.name == "aten::index" and known.is_measured and made > known.made_bytes > 0:
            # The positions that masks stand for; others take as much as their arguments.
            workspace = -(-workspace * made // known.made_bytes)
        return Needs(made, workspace, known.is_measured)

    def _note_varying(
        self, operator: Operator, args: Any, kwargs: dict[str, Any], needs: Needs
    ) -> None:
        """Remember the largest run; where more was made than foreseen, make room after it."""
        key = self._handler.signature(operator.kernel, args, kwargs)
        if key is not None:
            known = self._needs.get(key)
            if known is None or not known.is_measured or known.made_bytes < needs.made_bytes:
                remember(self._needs, key, needs)
        self._make_room(0, 0)

    def _refs(self, args: Any, kwargs: Any) -> tuple[dict[int, StorageRef], dict[int, int]]:
        """The storages of the tensors among arguments by node, and the nodes by ``id``."""
        refs = {}
        node_of = {}
        for tensor in tensors_of((args, tuple(kwargs.values()))):
            if tensor.layout is not torch.strided:
                node_of[id(tensor)] = -1
                continue
            ref = self._ref_of(tensor)
            refs[ref.node] = ref
            node_of[id(tensor)] = ref.node
        return refs, node_of

    def _needs_of(
        self, operator: Operator, args: Any, kwargs: Any, refs: dict[int, StorageRef]
    ) -> Needs:
        key = self._handler.signature(operator.kernel, args, kwargs)
        needs = self._needs.get(key)
        if needs is None:
            needs = guess(operator, args, kwargs, sum(ref_bytes(ref) for ref in refs.values()))
            if key is not None:
                remember(self._needs, key, needs)
        return needs

    def _complete_odd(
        self,
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any] | None,
        results: Any,
        took: int,
        is_recording: bool,
    ) -> None:
        """Take in results that the handler in C does not know how to."""
        kwargs = kwargs or {}
        refs, node_of = self._refs(args, kwargs)
        nodes = list(refs)
        needs = self._needs_of(operator, args, kwargs, refs)
        written = self._written(operator, args, kwargs, node_of)
        call = Call(operator, args, kwargs, node_of, nodes, len(nodes), refs, written)
        self._complete(call, results, needs, is_recording, took, -1, (None, None, 0))

    def _complete(
        self,
        call: Call,
        results: Any,
        needs: Needs,
        is_recording: bool,
        took: int,
        peak: int,
        random: tuple[torch.Generator | None, torch.Tensor | None, int],
    ) -> None:
        """Take in what an operator made: new storages, new versions, and how to repeat it."""
        book = self._book
        operator, refs = call.operator, call.refs
        generator, state, kept_bytes = random
        made, indices, places = self._new_storages(results)
        if operator.is_reshaping:
            self._see_sizes(refs)
        if any(tensor.layout is not torch.strided for tensor in tensors_of(results)):
            # What lies in tensors of other layouts cannot be evicted or computed again.
            is_recording = False
            for node in refs:
                self._pin(node)
        if any(storage.device != self.device for storage in made):
            is_recording = False
        sizes = [self._size(storage) for storage in made]
        origins = [-1] * len(made)
        sources = [node for node in call.written if not book.describe(node).is_source]
        for node in sources:
            sizes.append(book.describe(node).nbytes)
            indices.append(-1)
            origins.append(node)
            places.append(refs[node])
        if peak >= 0:
            needs.made_bytes = sum(sizes[: len(made)])
            needs.workspace_bytes = max(peak - needs.made_bytes, 0)
            needs.is_measured = True
        record = None
        if is_recording and places and max(sizes) > SMALL_BYTES:
            record = Record(
                operator,
                [pattern(value, call.node_of) for value in call.args],
                {name: pattern(value, call.node_of) for name, value in call.kwargs.items()},
                indices,
                origins,
                torch.is_grad_enabled(),
                dispatch.backend_flags(),
                generator,
                state,
                needs,
                needs.workspace_bytes if needs.is_measured else 0,
            )
            if self._verifier is not None:
                self._verifier.ran(record, made)
        else:
            kept_bytes = 0
        numbers = book.finish(
            call.recorded if record is not None else -1,
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
        if self.observer is not None:
            new = list(zip(numbers, sizes, origins, strict=True))
            self.observer.operation(
                operator.name,
                took,
                call.nodes,
                [(number, size) for number, size, origin in new if origin < 0],
                [(origin, number) for number, _, origin in new if origin >= 0],
                record is not None,
            )

    def _end_chain(self, node: int) -> None:
        if not self._warned_chain:
            self._warned_chain = True
            warnings.warn(
                f"a tensor was written to in place {LONGEST_CHAIN} times: computing it again "
                "would repeat every write, so it stays in memory. Collect the parts in a list and "
                "use torch.stack or torch.cat to let it be evicted",
                MemoryLimitWarning,
                stacklevel=5,
            )
        self._restore([node])

    def _see_sizes(self, refs: dict[int, StorageRef]) -> None:
        for node, ref in refs.items():
            storage = ref()
            if storage is not None and storage.device == self.device:
                self._book.resized(node, self._size(storage))

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
        found.pop(-1, None)
        return list(found)

    def _new_storages(
        self, results: Any
    ) -> tuple[list[torch.UntypedStorage], list[int], list[StorageRef]]:
        made, indices, places = [], [], []
        seen = set()
        for index, tensor in enumerate(tensors_of(results)):
            if tensor.layout is not torch.strided:
                for part in core.strided_parts(tensor):
                    self._see_fresh(part)
                continue
            storage = tensor.untyped_storage()
            key = dispatch.storage_key(storage)
            if key in self._table or key in seen:
                continue
            seen.add(key)
            made.append(storage)
            indices.append(index)
            places.append(reference(storage, self._handler.gone))
        return made, indices, places

    def _generator(self, kwargs: dict[str, Any]) -> torch.Generator:
        generator: torch.Generator | None = kwargs.get("generator")
        if generator is not None:
            return generator
        if self._is_cpu:
            return torch.default_generator
        return torch.cuda.default_generators[self.device.index or 0]

    def _state_bytes(self, generator: torch.Generator) -> int:
        """Bytes that a copy of a generator's state takes; states are tensors of the CPU."""
        if not self._is_cpu:
            return 0
        found = self._generator_bytes.get(generator.device)
        if found is None:
            found = self._generator_bytes[generator.device] = generator.get_state().nbytes
        return found

    # -- the end

    def close(self, *, warn: bool = True) -> None:
        """Bring back what is evicted and still in use, and forget everything."""
        if not self._is_open:
            return
        book = self._book
        self._is_leaving = True
        overflows = self._overflows
        try:
            # Bringing one back may evict another that is not pinned yet.
            while nodes := book.evicted():
                self._restore(nodes)
        finally:
            self._is_open = self._handler.is_open = False
            self._table.clear()
            self._drop_copies()
        if warn and self._overflows > overflows:
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


def _refuse_opaque(values: Any) -> None:
    """Tensors whose memory is no storage that can be seen are not for a budget."""
    for tensor in tensors_of(values):
        if tensor.is_mkldnn or (tensor.is_nested and tensor.layout is torch.strided):
            what = "in mkldnn's layout" if tensor.is_mkldnn else "nested in the strided layout"
            raise RuntimeError(
                f"tensors {what} within rotor.dtr.budget: their memory cannot be counted or "
                "evicted. Leave to_mkldnn() out, give torch.nested layout=torch.jagged, or use "
                "them outside the budget"
            )
