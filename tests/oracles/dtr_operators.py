"""The operators of a budget in plain Python: what the path in C has to do, step by step.

It uses the same book (`rotor._core.Recorder`), so that an equal program makes equal decisions, and
none of the handler's code that reads, runs and records operators or runs them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any
from unittest import mock

import torch

from rotor._pytorch import core, dispatch
from rotor.common.tensor_trees import result_tensors
from rotor.dtr import recall
from rotor.dtr.operators import Operator, kernel_of
from rotor.dtr.runtime import Session
from rotor.dtr.signatures import Needs

_MOST_INDEX_BYTES = 1 << 16


def _now() -> int:
    return (recall.CLOCK or perf_counter_ns)()


class Spec(tuple):
    """A tensor argument: node, shape, stride, offset, dtype, device, conjugate, negative."""


def _pattern(value: Any, node_of: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        place = value.shape, value.stride(), value.storage_offset()
        bits = value.is_conj(), value.is_neg()
        return Spec((node_of[id(value)], *place, value.dtype, value.device, *bits))
    if isinstance(value, list | tuple):
        return [_pattern(item, node_of) for item in value]
    return value


def _filled(value: Any, storage_of: Callable[[int], torch.UntypedStorage]) -> Any:
    if isinstance(value, Spec):
        node, shape, stride, offset, dtype, device, *bits = value
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage_of(node), offset, shape, stride)
        return dispatch.unconjugated(tensor, *bits)
    if isinstance(value, list):
        return [_filled(item, storage_of) for item in value]
    return value


@dataclass
class Record:
    """An operation that may run again."""

    operator: Operator
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[int]
    origins: list[int]
    grad_enabled: bool
    flags: Any
    generator: torch.Generator | None
    state: torch.Tensor | None
    needs: Needs
    counted_bytes: int

    def run(self, storage_of: Callable[[int], torch.UntypedStorage]) -> list[torch.Tensor]:
        """Run it as it ran first."""
        now, flags, guards = torch.is_grad_enabled(), dispatch.backend_flags(), None
        state = None if self.generator is None else self.generator.get_state()
        replay = self.operator.call
        odd = self.operator.treatment
        if odd.replay is not None and odd.hidden and self.operator.written:
            replay = odd.replay
        try:
            core.set_grad_enabled(self.grad_enabled)
            dispatch.write_flags(self.flags)
            if self.generator is not None and self.state is not None:
                self.generator.set_state(self.state)
            guards = dispatch.below_autograd()
            args = [_filled(value, storage_of) for value in self.args]
            kwargs = {name: _filled(v, storage_of) for name, v in self.kwargs.items()}
            return result_tensors(replay(*args, **kwargs))
        finally:
            del guards
            if self.generator is not None and state is not None:
                self.generator.set_state(state)
            dispatch.write_flags(flags)
            core.set_grad_enabled(now)


@dataclass
class Call:
    """An operator, its arguments, and the nodes of their storages."""

    operator: Operator
    args: Any
    kwargs: dict[str, Any]
    node_of: dict[int, int]
    nodes: list[int]
    recorded: int
    refs: dict[int, Any]
    written: list[int]


def _refs(session: Session, values: Any) -> tuple[dict[int, Any], dict[int, int]]:
    refs, node_of = {}, {}
    for tensor in result_tensors(values):
        if tensor.layout is not torch.strided:
            node_of[id(tensor)] = -1
            continue
        ref = session._ref_of(tensor)
        refs[ref.node] = ref
        node_of[id(tensor)] = ref.node
    return refs, node_of


def _written(operator: Operator, args: Any, kwargs: Any, node_of: dict[int, int]) -> list[int]:
    values = [
        kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        for where in operator.written
    ]
    found = dict.fromkeys(node_of[id(tensor)] for tensor in result_tensors(values))
    return [node for node in found if node >= 0]


def _dispatch(session: Session, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with session._handler, dispatch.without_functions():
        operator = kernel_of(func).operator
        shares = [result.alias_info is not None for result in func._schema.returns]
        is_view = bool(shares) and all(shares) and not operator.written
        if (is_view or operator.treatment.is_view) and session._bytes.views:
            if operator.treatment.is_fresh:
                session._see_parts(args[0])
            return func(*args, **(kwargs or {}))
        return _run(session, operator, args, kwargs or {})


def _run(session: Session, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    book, odd = session._book, operator.treatment
    is_recording = dispatch.graph_task() < 0 or torch.is_grad_enabled()
    refs, node_of = _refs(session, (args, list(kwargs.values())))
    is_recording = is_recording and -1 not in node_of.values()
    written = _written(operator, args, kwargs, node_of)
    hidden: dict[int, None] = {}
    replay_args = args
    now: dict[int, int] = {}
    if odd.hidden_if >= 0 and len(args) > odd.hidden_if and args[odd.hidden_if]:
        held = [args[at] for at in odd.hidden if args[at] is not None]
        before = dict.fromkeys(node_of[id(tensor)] for tensor in held)
        now = {node: session._protect(node) for node in before}
        written = [node for node in written if node not in before]
        hidden = dict.fromkeys(now.values())
        replay_args = tuple(None if at in odd.hidden else v for at, v in enumerate(args))
    if odd.reshapes:
        written, is_recording = [], False
        for node in refs:
            session._restore([node])
            now[node] = session._protect(node)
    for node in written:
        if book.describe(node).is_source:
            pass
        elif not torch.is_grad_enabled():
            session._restore([node])
        elif book.describe(node).version >= recall.LONGEST_CHAIN:
            session._end_chain(node)
        if book.describe(node).is_source:
            is_recording = False
            now[node] = session._protect(node)
    if any(node != again for node, again in now.items()):
        refs = {ref.node: ref for ref in refs.values()}
        node_of = {key: now.get(node, node) for key, node in node_of.items()}
        written = [now.get(node, node) for node in written]
    nodes = [node for node in refs if node not in hidden]
    call = Call(
        operator, replay_args, kwargs, node_of, [*nodes, *hidden], len(nodes), refs, written
    )
    return _run_begun(session, call, args, is_recording)


def _run_begun(session: Session, call: Call, args: Any, is_recording: bool) -> Any:
    book, operator, kwargs = session._book, call.operator, call.kwargs
    key = session._handler.signature(operator.kernel, args, kwargs)
    needs = session._needs.get(key)
    if needs is None:
        storages = [ref() for ref in call.refs.values()]
        needs = session._guess(key, operator, args, kwargs, sum(s.nbytes() for s in storages))
    varying = None
    generator = state = None
    kept_bytes = 0
    book.begin(call.nodes)
    try:
        session._catch_up()
        is_random = torch.Tag.nondeterministic_seeded in operator.call.tags
        if is_random or operator.is_custom:
            generator = session._generator(kwargs)
            kept_bytes = session._state_bytes(generator)
        if operator.varies:
            varying = session._vary(operator, args, needs)
            needs = varying or needs
        least = needs.made_bytes + (needs.workspace_bytes if needs.is_measured else 0)
        wished = needs.made_bytes + needs.workspace_bytes
        session._make_room(wished + kept_bytes, least + kept_bytes)
        state = None if generator is None else generator.get_state()
        is_measured = session._is_cpu and (varying is not None or not needs.is_measured)
        start, peak = _now(), -1
        if is_measured:
            results, peak = session._measure(operator.call, args, kwargs)
        else:
            results = operator.call(*args, **kwargs)
        took = _now() - start
        if not needs.is_measured:
            session._has_run(needs, state)
        if operator.is_custom:
            states = [(generator, state)]
            is_recording, has_drawn = session._may_repeat(
                key, operator, args, kwargs, results, needs, states, is_recording
            )
            if not has_drawn:
                generator, state, kept_bytes = None, None, 0
        _complete(session, call, results, needs, is_recording, took, peak, generator, state,
                  kept_bytes)  # fmt: skip
    except BaseException:
        book.abort()
        raise
    if varying is not None and peak >= 0:
        session._note_varying(key, needs)
    return results


def _complete(
    session: Session,
    call: Call,
    results: Any,
    needs: Needs,
    is_recording: bool,
    took: int,
    peak: int,
    generator: torch.Generator | None,
    state: torch.Tensor | None,
    kept_bytes: int,
) -> None:
    book, operator, refs = session._book, call.operator, call.refs
    made, indices = [], []
    for index, tensor in enumerate(result_tensors(results)):
        if tensor.layout is not torch.strided:
            is_recording = False
            session._see_parts(tensor)
            for node in refs:
                session._pin(node)
            continue
        storage = tensor.untyped_storage()
        if session._handler.reference(storage) is None and storage not in made:
            made.append(storage)
            indices.append(index)
    if operator.treatment.reshapes:
        for node, ref in refs.items():
            book.resized(node, session._size(ref()))
    sizes = [session._size(storage) for storage in made]
    origins = [-1] * len(made)
    places = [session._handler.track(storage) for storage in made]
    for node in call.written:
        if not book.describe(node).is_source:
            sizes.append(book.describe(node).nbytes)
            indices.append(-1)
            origins.append(node)
            places.append(refs[node])
    if peak >= 0:
        needs.made_bytes = sum(sizes[: len(made)])
        needs.workspace_bytes = max(peak - needs.made_bytes, 0)
        needs.is_measured = True
    record = None
    workspace = needs.workspace_bytes if needs.is_measured else 0
    if is_recording and places and max(sizes) > recall.SMALL_BYTES:
        args = [_pattern(value, call.node_of) for value in call.args]
        kwargs = {name: _pattern(value, call.node_of) for name, value in call.kwargs.items()}
        record = Record(operator, args, kwargs, indices, origins, torch.is_grad_enabled(),
                        dispatch.backend_flags(), generator, state, needs, workspace)  # fmt: skip
    numbers = book.finish(
        call.recorded if record is not None else -1,
        sizes,
        origins,
        took,
        workspace,
        kept_bytes if record is not None else 0,
        places,
        record,
    )
    for ref, number in zip(places, numbers, strict=True):
        ref.node = number
    if session.observer is not None:
        new = list(zip(numbers, sizes, origins, strict=True))
        session.observer.operation(
            operator.name,
            took,
            call.nodes,
            [(number, size) for number, size, origin in new if origin < 0],
            [(origin, number) for number, _, origin in new if origin >= 0],
            record is not None,
        )
    outputs = result_tensors(results)
    for number, index, storage in zip(numbers, indices, made, strict=False):
        dtype = outputs[index].dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if is_integer and session._is_cpu and storage.nbytes() <= _MOST_INDEX_BYTES:
            session._pin(number)


def _catch_up(session: Session) -> None:
    while (record := session._book.next()) is not None:
        _replay(session, record)


def _replay(session: Session, record: Record) -> None:
    book, needs = session._book, record.needs
    nbytes = book.replay_bytes()
    if session._bytes.copies:
        nbytes = max(nbytes, 2 * (nbytes - record.counted_bytes))
    if record.state is not None and session._is_cpu:
        nbytes += record.state.nbytes
    unknown = needs.workspace_bytes - record.counted_bytes
    session._make_room(nbytes + unknown, nbytes + (unknown if needs.is_measured else 0))
    wanted = book.wanted()
    reused = {record.origins[k] for k, _, _, may_reuse in wanted if may_reuse}
    copied: dict[int, torch.UntypedStorage] = {}

    def storage_of(node: int) -> torch.UntypedStorage:
        if node in record.origins and node not in reused:
            if node not in copied:
                copied[node] = session._storage(node).clone()
            return copied[node]
        return session._storage(node)

    start = _now()
    results = record.run(storage_of)
    took = _now() - start
    for k, node, storage, _ in wanted:
        index, origin = record.outputs[k], record.origins[k]
        made = results[index].untyped_storage() if index >= 0 else storage_of(origin)
        if storage is None:
            book.hold(node, made)
        else:
            assert storage.nbytes() == made.nbytes() or not session._bytes.views
            session._bytes.give(storage, made)
    if book.replayed(took) > session._thrashes:
        session._see_thrashing()


@contextmanager
def in_python(is_on: bool = True) -> Iterator[None]:
    """Run the operators of sessions in Python, in the context."""
    with ExitStack() as stack:
        if is_on:
            stack.enter_context(mock.patch.object(Session, "__torch_dispatch__", _dispatch))
            stack.enter_context(mock.patch.object(Session, "_catch_up", _catch_up))
        else:
            stack.enter_context(nullcontext())
        yield
