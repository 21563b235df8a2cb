"""Tests of repeatability: second runs of operators, and replays proved by checksums.

An operator from outside PyTorch may draw random numbers from any source, or depend on hidden state.
When it first runs on arguments of a layout, it runs twice from the same state of the
generators. If a bit differs, or the test is not possible, its results are kept.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core
from rotor.common.checksums import (
    EMPTY_OPERATORS,
    PARTLY_WRITTEN,
    UNSPECIFIED_OUTPUTS,
    checksum,
    proof_bytes,
)
from rotor.common.tensor_trees import result_tensors
from rotor.common.undisturbed import generators_kept
from rotor.dtr.operators import Operator
from rotor.errors import RecomputationError

_known: dict[Any, bool] = {}
_unwritten: set[tuple[str, int]] = set()
"""Results of operators, by their numbers, that were found to be written in part."""
_PARTLY_WRITTEN = {(f"aten::{name}", index) for name, index in PARTLY_WRITTEN}
_PIECE = 1 << 20

_EMPTY = frozenset(f"aten::{name}" for name in EMPTY_OPERATORS)
_UNSPECIFIED = UNSPECIFIED_OUTPUTS | {"logsumexp"}


def known_repeats() -> dict[Any, bool]:
    """Return what was found in this process, by the signatures of operators and arguments."""
    return _known


def _sums(results: Any) -> list[Any]:
    return [
        (tuple(tensor.shape), tensor.dtype, int(checksum(tensor)))
        for tensor in result_tensors(results)
    ]


def repeats(
    operator: Operator,
    args: Any,
    kwargs: dict[str, Any],
    results: Any,
    states: list[tuple[torch.Generator, torch.Tensor]],
) -> bool:
    """Run an operator again that just ran; return whether it makes the same bits.

    It writes to no argument. `states` are generators, left as they are, with their earlier states.
    """
    after = [generator.get_state() for generator, _ in states]
    first = _sums(results)
    try:
        for generator, state in states:
            generator.set_state(state)
        with generators_kept():
            return _sums(operator.call(*args, **kwargs)) == first
    finally:
        for (generator, _), state in zip(states, after, strict=True):
            generator.set_state(state)


def _name_of(operator: Operator, index: int) -> str:
    names = core.schema_return_names(operator.call)
    return names[index] if index < len(names) else ""


def _is_specified(operator: Operator, index: int) -> bool:
    """Return whether an operator is known to write all of a result."""
    if operator.is_custom:
        return True
    if operator.name in _EMPTY or operator.varies:
        return False
    named = _name_of(operator, index)
    return index == 0 or (bool(named) and named not in _UNSPECIFIED)


def _may_be_specified(record: _core.Record, index: int) -> bool:
    """Return whether a result may be compared, provided that differences are examined."""
    operator = record.operator
    if operator.name in _EMPTY or any(origin >= 0 for origin in record.origins):
        return False
    return _name_of(operator, index) not in _UNSPECIFIED


def _leaves_unwritten(
    handler: _core.Handler,
    record: _core.Record,
    index: int,
    storages: tuple[torch.UntypedStorage, ...],
) -> bool:
    """Return whether an operator leaves memory of a result as it was; it runs again."""
    key = (record.operator.name, index)
    if key in _PARTLY_WRITTEN:
        return True
    if key not in _unwritten:
        # The plain run comes first: after the filled one it might be given the filled memory.
        plain = _is_fill(result_tensors(handler.rerun(record, storages, None))[index])
        filled = result_tensors(handler.rerun(record, storages, _run_filled))[index]
        if filled.shape == plain.shape and _any_beyond(filled, plain):
            _unwritten.add(key)
    return key in _unwritten


def _run_filled(call: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run with what operators allocate filled: not a number, the largest integer, or true."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(action="ignore"):
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            return call(*args, **(kwargs or {}))
        finally:
            settings.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)


def _any_beyond(filled: torch.Tensor, plain: torch.Tensor) -> bool:
    """Return whether an element is filled that `plain` does not mark; in pieces, to save memory."""
    pieces = zip(filled.reshape(-1).split(_PIECE), plain.reshape(-1).split(_PIECE), strict=True)
    return any(bool((_is_fill(piece) & ~fill).any()) for piece, fill in pieces)


def _is_fill(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that are what `_run_filled` fills memory with."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.isnan()
    if tensor.dtype == torch.bool:
        return tensor
    return tensor == torch.iinfo(tensor.dtype).max


def verifying_bytes(device: torch.device) -> int:
    """Return the bytes that comparing and waiting checksums take from a device's allocator."""
    return 0 if device.type == "cpu" else proof_bytes(device, 1) + _WAITING * _BLOCK_BYTES


_WAITING = 2048
_BLOCK_BYTES = 512


class Verifier:
    """Checksums of what a session evicts, compared when it is computed again.

    A value that the program has dropped, and that only a recomputed operator reads, is not compared
    itself: the result of this operator is. Results of operators that are not PyTorch's own are
    always compared. If a result differs that is not the first of its operator, the operator runs
    twice more, to see whether it leaves memory of the result unwritten, which may hold anything.
    `differed` is called with the operators that may have made other values; `compared` counts
    compared values.
    """

    def __init__(
        self, book: _core.Recorder, handler: _core.Handler, differed: Callable[[set[str]], object]
    ) -> None:
        self._book = book
        self._handler = handler
        self._differed = differed
        self._sums: dict[int, int | torch.Tensor] = {}
        self.compared = 0

    def ran(self, record: _core.Record, made: list[torch.UntypedStorage]) -> None:
        """Note what an operator has made that is not PyTorch's own."""
        record.sums = [checksum(_bytes_of(storage)) for storage in made]

    def evicting(self, node: int, storage: torch.UntypedStorage) -> None:
        """Note the bytes of a storage that is about to lose them."""
        self._sums[node] = checksum(_bytes_of(storage))

    def fetched(self, node: int, made: torch.UntypedStorage) -> None:
        """Compare what came back from the second tier; raise OSError if a bit differs."""
        before = self._sums.pop(node, None)
        if before is None:
            return
        self.compared += 1
        if int(checksum(_bytes_of(made))) != int(before):
            raise OSError(
                errno.EIO,
                f"{made.nbytes()} bytes of an offloaded value came back from the second tier with "
                "other bits than were written; the training step is lost, and the disk or memory "
                "of the tier has to be checked",
            )

    def replayed(
        self,
        record: _core.Record,
        place: int,
        node: int,
        made: torch.UntypedStorage,
        result: torch.Tensor | None,
        is_live: bool,
        storages: tuple[torch.UntypedStorage, ...],
    ) -> None:
        """Compare the bytes that an operation made again, before the program sees them.

        `place` is that of the node among the outputs of `record`, and `result` lies on the storage
        `made`; ``None`` for a storage that was written to. With `is_live` the program holds the
        node, so that it was evicted; otherwise it was dropped. `storages` are those of the
        operation's tensor arguments in order. Raises RecomputationError if a bit differs.
        """
        # A number may have been another node's, but every live node was evicted last.
        before = self._sums.pop(node, None) if is_live else None
        if record.sums is not None and place < len(record.sums):
            before = record.sums[place]
        if before is None or not self._is_comparable(record, place, made, result):
            return
        self.compared += 1
        if int(checksum(_bytes_of(made))) == int(before):
            return
        index = record.outputs[place]
        is_whole = index < 0 or _is_specified(record.operator, index)
        if is_whole or not _leaves_unwritten(self._handler, record, index, storages):
            raise self._error(record, place, result)

    def _error(
        self, record: _core.Record, place: int, result: torch.Tensor | None
    ) -> RecomputationError:
        name = record.operator.name
        suspects = {name} if record.operator.is_custom else {name} | self._unseen(record)
        self._differed(suspects)
        if result is None:
            origin = record.origins[place]
            _, shape, dtype = next(found for found in record.inputs if found[0] == origin)
        else:
            shape, dtype = result.shape, result.dtype
        module = record.module
        within = "" if module is None else f" in module {module!r}" if module else " in the model"
        others = ", ".join(sorted(suspects - {name}))
        also = f", or what it is computed from by {others}," if others else ""
        return RecomputationError(
            f"{name}{within} ({list(shape)}, {dtype}){also} gave other bits when it ran again: "
            "what is computed from it would be wrong. It depends on random numbers or on state "
            "that recomputation cannot restore, or its kernel is not deterministic. In a model "
            "with a limit such results are kept from now on: run the step again. Within "
            "rotor.dtr.budget, call Session.pin on them",
            module or "",
            name,
        )

    def _unseen(self, record: _core.Record) -> set[str]:
        """Return the operators of dropped values that a record is computed from."""
        found: set[str] = set()
        waiting = [found[0] for found in record.inputs]
        seen = set(waiting)
        while waiting:
            node = self._book.describe(waiting.pop())
            made = node.record
            if node.is_live or made is None:
                continue
            if not made.operator.is_custom:
                found.add(made.operator.name)
                new = {number for number, _, _ in made.inputs} - seen
                seen |= new
                waiting.extend(new)
        return found

    def _is_comparable(
        self,
        record: _core.Record,
        place: int,
        made: torch.UntypedStorage,
        result: torch.Tensor | None,
    ) -> bool:
        """Return whether the operator, and all that wrote to it before, wrote every byte."""
        if result is not None and result.numel() * result.element_size() < made.nbytes():
            return False
        index = record.outputs[place]
        if index >= 0:
            return _is_specified(record.operator, index) or _may_be_specified(record, index)
        while index < 0:
            earlier = self._book.describe(record.origins[place]).record
            if len(record.outputs) != 1 or earlier is None:
                return earlier is None
            record = earlier
            place, index = 0, record.outputs[0]
        return _is_specified(record.operator, index)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    # PyTorch makes no memory for tangents that are zero.
    return made if made.data_ptr() else made[:0]
