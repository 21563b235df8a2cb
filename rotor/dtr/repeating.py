"""What does not repeat: operators tested by a second run, and replays proved by checksums.

An operator that is not PyTorch's own may draw random numbers from anywhere, or depend on state that
nobody sees. When it first runs on arguments of a layout, it runs twice from the same state of the
generators. Where a bit differs, its results are kept; so are they where that cannot be found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core
from rotor.common.checksums import EMPTY_OPERATORS, UNSPECIFIED_OUTPUTS, checksum
from rotor.common.undisturbed import generators_kept
from rotor.dtr.operators import Operator
from rotor.dtr.records import Record, tensors_of
from rotor.errors import RecomputationError

__all__ = ["Verifier", "known_repeats", "repeats"]

_known: dict[Any, bool] = {}

_EMPTY = frozenset(f"aten::{name}" for name in EMPTY_OPERATORS)
_UNSPECIFIED = UNSPECIFIED_OUTPUTS | {"logsumexp"}


def known_repeats() -> dict[Any, bool]:
    """Return what was found in this process, by the signatures of operators and arguments."""
    return _known


def _sums(results: Any) -> list[Any]:
    return [
        (tuple(tensor.shape), tensor.dtype, int(checksum(tensor))) for tensor in tensors_of(results)
    ]


def repeats(
    operator: Operator,
    args: Any,
    kwargs: dict[str, Any],
    results: Any,
    states: list[tuple[torch.Generator, torch.Tensor]],
) -> bool:
    """Run an operator a second time; return whether it makes the same bits.

    Parameters
    ----------
    operator, args, kwargs
        What ran just now; it writes to nothing.
    results
        What it made.
    states
        Generators, and their states before it ran. They end as they are now.
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


def _is_specified(operator: Operator, index: int) -> bool:
    """Return whether an operator writes all of a result."""
    if operator.is_custom:
        return True
    if operator.name in _EMPTY or operator.varies:
        return False
    names = core.schema_return_names(operator.call)
    named = names[index] if index < len(names) else ""
    return index == 0 or (bool(named) and named not in _UNSPECIFIED)


class Verifier:
    """Checksums of what a session evicts, compared when it is computed again.

    What the program dropped, and only an operator needs that runs again, is not compared itself:
    the result of that operator is. Results of operators that are not PyTorch's own are compared in
    any case.

    Parameters
    ----------
    book
        Of the session.
    differed
        Called with the operators that may have made something else.

    Attributes
    ----------
    compared
        How many values were.
    """

    def __init__(self, book: _core.Recorder, differed: Callable[[set[str]], object]) -> None:
        self._book = book
        self._differed = differed
        self._sums: dict[int, int | torch.Tensor] = {}
        self.compared = 0

    def ran(self, record: Record, made: list[torch.UntypedStorage]) -> None:
        """Note what an operator has made that is not PyTorch's own."""
        if record.operator.is_custom:
            record.sums = [checksum(_bytes_of(storage)) for storage in made]

    def evicting(self, node: int, storage: torch.UntypedStorage) -> None:
        """Note the bytes of a storage that is about to lose them."""
        self._sums[node] = checksum(_bytes_of(storage))

    def replayed(
        self,
        record: Record,
        place: int,
        node: int,
        made: torch.UntypedStorage,
        result: torch.Tensor | None,
        is_live: bool,
    ) -> None:
        """Compare what was made again, before the program sees it.

        Parameters
        ----------
        record
            The operation.
        place
            Of the node among its outputs.
        node
            What it made.
        made
            Its bytes now.
        result
            The result that lies on them, ``None`` for what was written to.
        is_live
            The program holds it, so that it was evicted; otherwise it was dropped.

        Raises
        ------
        RecomputationError
            A bit differs.
        """
        # A number may have been another node's, but whatever is live was evicted last.
        before = self._sums.pop(node, None) if is_live else None
        if record.sums is not None and place < len(record.sums):
            before = record.sums[place]
        if before is None or not self._is_comparable(record, place, made, result):
            return
        self.compared += 1
        if int(checksum(_bytes_of(made))) != int(before):
            raise self._error(record, result)

    def _error(self, record: Record, result: torch.Tensor | None) -> RecomputationError:
        name = record.operator.name
        suspects = {name} if record.operator.is_custom else {name} | self._unseen(record)
        self._differed(suspects)
        shape = "" if result is None else f" ({list(result.shape)}, {result.dtype})"
        others = ", ".join(sorted(suspects - {name}))
        also = f", or what it is computed from by {others}," if others else ""
        return RecomputationError(
            f"{name}{shape}{also} gave other bits when it ran again: what is computed from it "
            "would be wrong. It depends on random numbers or on state that recomputation cannot "
            "restore, or its kernel is not deterministic. In a model with a limit such results are "
            "kept from now on: run the step again. Within rotor.dtr.budget, call Session.pin on "
            "them",
            operation=name,
        )

    def _unseen(self, record: Record) -> set[str]:
        """Return the operators of dropped values that a record is computed from."""
        found: set[str] = set()
        waiting = list(record.nodes())
        seen = set(waiting)
        while waiting:
            node = self._book.describe(waiting.pop())
            made = node.record
            if node.is_live or made is None:
                continue
            maker = Record(*made) if isinstance(made, tuple) else made
            if not maker.operator.is_custom:
                found.add(maker.operator.name)
                new = maker.nodes() - seen
                seen |= new
                waiting.extend(new)
        return found

    def _is_comparable(
        self, record: Record, place: int, made: torch.UntypedStorage, result: torch.Tensor | None
    ) -> bool:
        """Return whether the operator, and those that wrote to it before, wrote every byte."""
        if result is not None and result.numel() * result.element_size() < made.nbytes():
            return False
        index = record.outputs[place]
        while index < 0:
            earlier = self._book.describe(record.origins[place]).record
            if len(record.outputs) != 1 or earlier is None:
                return earlier is None
            record = Record(*earlier) if isinstance(earlier, tuple) else earlier
            place, index = 0, record.outputs[0]
        return _is_specified(record.operator, index)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
