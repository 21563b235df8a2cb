"""The session: a mode whose operators run in C, and what they need of Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from rotor import _core
from rotor._core import Needs
from rotor._pytorch import core, devices, dispatch, profiler
from rotor.common.frames import warn_caller
from rotor.common.tensor_trees import result_tensors
from rotor.dtr.operators import Operator, kernel_of
from rotor.dtr.recall import LONGEST_CHAIN, Recall, Stats
from rotor.dtr.repeating import known_repeats, repeats
from rotor.dtr.signatures import guess, read_times, remember, run_measured, run_timed
from rotor.dtr.storages import StorageRef
from rotor.errors import MemoryLimitWarning
from rotor.meter import allocator
from rotor.units import exact_bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBER_BYTES = 16


class Session(Recall, _core.OperatorMode, dispatch.DispatchMode):  # type: ignore[misc]
    """A program that runs under a budget; `budget` makes and enters one.

    The handler in C (csrc/python/bind_dtr_handler.c) runs every operator. It calls the methods
    below for what is PyTorch's or a policy: new storages, operators and arguments of unusual kinds,
    what an operator takes that has not run yet.
    """

    def __init__(self, limit: int | None, *, device: torch.device, **settings: Any) -> None:
        super().__init__(limit, device=device, **settings)
        self.handler = self._handler
        self._handler.watches_writes = type(self)._protect is not Recall._protect
        self._warned_chain = False
        self._warned_kept: set[str] = set()
        self._generator_bytes: dict[torch.device, int] = {}

    # -- figures

    @property
    def stats(self) -> Stats:
        """Counts and times of the session."""
        read_times(self.device)
        counters, moves = self._book.counters(), {}
        names = {field.name for field in fields(Stats)} & counters.keys()
        if self._store is not None:
            moved = self._store.traffic
            moves = {
                "writes": moved.writes,
                "fetches": moved.reads,
                "written_bytes": moved.written_bytes,
                "fetched_bytes": moved.read_bytes,
                "waited_ns": self._store.waited_ns,
            }
        return Stats(
            budget_bytes=self.limit,
            overflows=self._overflows,
            search_ns=self._search_ns,
            cost_ns=self._cost_ns,
            **{name: counters[name] for name in names},
            **moves,
        )

    def counters(self) -> dict[str, int]:
        """Return the figures of the book: bytes, nodes, records, times; for tests and reports."""
        return self._book.counters()

    @property
    def compared(self) -> int:
        """Number of recomputed values that were compared bit for bit."""
        return 0 if self._verifier is None else self._verifier.compared

    def reset_profile(self) -> None:
        """Reset counts, times and the peak."""
        self._book.reset()
        self._overflows = self._search_ns = self._cost_ns = 0

    # -- storages

    def _size(self, storage: torch.UntypedStorage) -> int:
        if storage.device != self.device:
            return 0
        nbytes = storage.nbytes()
        return nbytes if self._is_cpu else allocator.rounded_bytes(nbytes, self.device)

    def _adopt(self, storage: torch.UntypedStorage, is_foreign: bool) -> StorageRef:
        return self._handler.adopt(storage, self._size(storage), is_foreign)

    def _ref_of(self, tensor: torch.Tensor) -> StorageRef:
        storage = tensor.untyped_storage()
        ref = self._handler.reference(storage)
        if ref is None:
            # PyTorch turns numbers among an operator's arguments into tensors by itself.
            ref = self._adopt(storage, tensor.dim() > 0 or tensor.nbytes > _NUMBER_BYTES)
        return ref

    def manage(self, tensor: torch.Tensor) -> None:
        """Count a tensor among the sources, before an operator reads it."""
        with self._handler, dispatch.without_functions():
            for part in core.strided_parts(tensor):
                self._ref_of(part)

    def _see_parts(self, tensor: torch.Tensor) -> None:
        """Count the storages of a tensor that was just made."""
        for part in core.strided_parts(tensor):
            storage = part.untyped_storage()
            if self._handler.reference(storage) is None:
                self._adopt(storage, False)

    # -- operators

    def _find_kernel(self, function: Any) -> _core.Kernel:
        """Return the facts of an operator that runs for the first time."""
        return kernel_of(function)

    def _refuse_types(self, types: Any) -> Any:
        """Return ``NotImplemented`` for arguments of other classes, ``None`` for tensors."""
        if any(issubclass(kind, dispatch.FakeTensor) for kind in types):
            raise RuntimeError(
                "torch.compile within rotor.dtr.budget: compiled kernels would read what is "
                "evicted. Leave the function uncompiled, or compile it and use "
                "rotor.Checkpointable"
            )
        return None if all(kind in _PLAIN for kind in types) else NotImplemented

    def _refuse_capture(self) -> None:
        asks = devices.capturing(self.device)
        if not self._is_cpu and (asks is None or not asks()):
            raise RuntimeError(
                "an operator runs on another stream than the one on which rotor.dtr.budget was "
                "entered: what one stream reads, the budget would free or compute again on the "
                "other. Enter the budget on the stream of the computation, and move side streams "
                "out of it"
            )
        raise RuntimeError(
            "CUDA graphs cannot be captured within rotor.dtr.budget: what they read may be "
            "evicted. Capture before entering the context"
        )

    def _refuse_opaque(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError for a tensor whose memory is not in a visible storage."""
        if tensor.is_mkldnn or (tensor.is_nested and tensor.layout is torch.strided):
            what = "in mkldnn's layout" if tensor.is_mkldnn else "nested in the strided layout"
            raise RuntimeError(
                f"tensors {what} within rotor.dtr.budget: their memory cannot be counted or "
                "evicted. Leave to_mkldnn() out, give torch.nested layout=torch.jagged, or use "
                "them outside the budget"
            )

    # -- what an operator takes

    def _guess(
        self,
        key: bytes | None,
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any],
        read_bytes: int,
    ) -> Needs:
        """Return needs of an operator that has not run on arguments of this layout yet."""
        needs = guess(operator, args, kwargs, read_bytes)
        if key is not None:
            remember(self._needs, key, needs)
        return needs

    def _measure(
        self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, int]:
        """Run an operator; return its results, and the bytes that it took or -1."""
        if profiler.profiler_in_use():
            return call(*args, **kwargs), -1
        return run_measured(call, args, kwargs, self.device)

    def _time(
        self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], needs: Needs
    ) -> tuple[Any, int]:
        """Run an operator whose needs are known; return its results and a number."""
        return run_timed(call, args, kwargs, needs, self.device)

    def _has_run(self, needs: Needs, state: torch.Tensor | None) -> None:
        """Note that an operator has run, before its results are recorded."""

    def _vary(self, operator: Operator, args: Any, known: Needs) -> Needs | None:
        """Return the needs of an operator with data-dependent results, from an earlier run's."""
        odd = operator.treatment
        if odd.varies_if is not None and not odd.varies_if(args):
            return None
        made = known.made_bytes
        workspace = known.workspace_bytes
        if odd.result_bytes is not None:
            made = odd.result_bytes(args, False)
            current = self._book.counters()["current_bytes"]
            if self.limit is not None and current + 2 * made > self.limit:
                made = odd.result_bytes(args, True)
        if odd.scales_workspace and known.is_measured and made > known.made_bytes > 0:
            workspace = -(-workspace * made // known.made_bytes)
        return Needs(made, workspace, known.is_measured)

    def _note_varying(self, key: bytes | None, needs: Needs) -> None:
        """Remember the needs of the largest run; make room if it made more than foreseen."""
        if key is not None:
            known = self._needs.get(key)
            if known is None or not known.is_measured or known.made_bytes < needs.made_bytes:
                remember(self._needs, key, needs)
        self._make_room(0, 0)

    # -- random numbers, and operators that are not PyTorch's own

    def _generator(self, kwargs: dict[str, Any]) -> Any:
        generator: Any | None = kwargs.get("generator")
        if generator is not None:
            return generator
        return devices.generator_of(self.device)

    def _state_bytes(self, generator: torch.Generator) -> int:
        """Return the bytes that a copy of a generator's state takes; states are CPU tensors."""
        if not self._is_cpu:
            return 0
        found = self._generator_bytes.get(generator.device)
        if found is None:
            found = self._generator_bytes[generator.device] = generator.get_state().nbytes
        return found

    def copied_state(self, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what a function that copies the CPU generator's state returns, and count it."""
        with self._handler, dispatch.without_functions(), dispatch.without_modes():
            if self._is_cpu:
                nbytes = self._state_bytes(torch.default_generator)
                self._book.begin([])
                self._make_room(nbytes, nbytes, is_wish=True)
                self._book.abort()
            state = copy()
            self._see_parts(state)
        return state

    def _states(
        self, generator: torch.Generator, state: torch.Tensor
    ) -> list[tuple[torch.Generator, torch.Tensor]]:
        """Return the generators that a custom operator may draw from, with their states."""
        states = [(generator, state)]
        if not self._is_cpu:
            states.append((torch.default_generator, torch.default_generator.get_state()))
        return states

    def _may_repeat(
        self,
        key: bytes | None,
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any],
        results: Any,
        needs: Needs,
        states: list[tuple[torch.Generator, torch.Tensor]],
        is_recording: bool,
    ) -> tuple[bool, bool]:
        """Return whether a custom operator can be run again, and whether it drew numbers."""
        if is_recording:
            is_recording = self._repeats(key, operator, args, kwargs, results, needs, states)
        generator, state = states[0]
        return is_recording, not torch.equal(generator.get_state(), state)

    def _repeats(
        self,
        key: bytes | None,
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any],
        results: Any,
        needs: Needs,
        states: list[tuple[torch.Generator, torch.Tensor]],
    ) -> bool:
        others = states[1:]  # Only one generator is put back when an operator runs again.
        if any(not torch.equal(g.get_state(), state) for g, state in others):
            return self._keep(operator)
        known = known_repeats().get(key)
        if known is None:
            made = sum(t.untyped_storage().nbytes() for t in result_tensors(results))
            if operator.written or key is None:
                return self._keep(operator)
            if self.limit is not None:
                again = 2 * made + needs.workspace_bytes
                Recall._make_room(self, again, 0, is_wish=True)
                if not self._fits(again):
                    # No room to test repeatability now: keep the results, test at a later call.
                    return False
            known = known_repeats()[key] = repeats(operator, args, kwargs, results, states)
        return known or self._keep(operator)

    def _keep(self, operator: Operator) -> bool:
        if operator.name not in self._warned_kept:
            self._warned_kept.add(operator.name)
            warn_caller(
                f"{operator.name} does not repeat bit for bit, or could not be tested: what it "
                "makes stays in memory, and is never computed again. Operators that draw from "
                "torch's default generator, or nothing at random, and that write to none of their "
                "arguments can be computed again",
                MemoryLimitWarning,
            )
        return False

    def _end_chain(self, node: int) -> None:
        """Keep a tensor that was written to very often."""
        if not self._warned_chain:
            self._warned_chain = True
            warn_caller(
                f"a tensor was written to in place {LONGEST_CHAIN} times: computing it again "
                "would repeat every write, so it stays in memory. Collect the parts in a list and "
                "use torch.stack or torch.cat to let it be evicted",
                MemoryLimitWarning,
            )
        self._restore([node])

    # -- the end

    def close(self, *, warn: bool = True) -> None:
        """Bring back what is evicted and still in use, and forget everything."""
        if not self._is_open:
            return
        book = self._book
        self._is_leaving = True
        overflows = self._overflows
        try:
            # Bringing one back may evict another that is not pinned yet. Nodes that the collector
            # takes together with the session stay evicted: their storages are gone already.
            earlier: list[int] = []
            while (nodes := book.evicted()) and nodes != earlier:
                self._restore(nodes)
                earlier = nodes
        except OSError:
            self._fill_lost()
            raise
        finally:
            self._is_open = self._handler.is_open = False
            self._handler.forget()
            self._drop_copies()
            book.forget_copies()
        if warn and self._overflows > overflows:
            warn_caller(
                "leaving the context brought back everything that was evicted and is still in "
                f"use: {exact_bytes(book.counters()['current_bytes'])} above the level on entry, "
                f"over the budget of {exact_bytes(self.limit or 0)}. Run the backward inside the "
                "context",
                MemoryLimitWarning,
            )
        if warn:
            self._warn_of_excess()
