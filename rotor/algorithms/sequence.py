"""Sequences of operations on a chain, which a solver returns and an executor runs.

An operation has a kind and a stage (Beaumont et al., hal-02352969, section 3.2):

======== =======================================================================
``Fn``   forward without a tape; its input is freed (also written ``Fng``)
``Fck``  forward without a tape; its input is kept (also written ``Fc`` or ``CF``)
``Fe``   forward that keeps everything its backward needs
``L``    the loss
``B``    backward
======== =======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from rotor.chain import Chain, Saved, check_header

FORMAT = "rotor.sequence"
VERSION = 1
KINDS = ("Fn", "Fck", "Fe", "L", "B")
FN, FCK, FE, LOSS, BACKWARD = range(len(KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)} | {"Fng": FN, "Fc": FCK, "CF": FCK}
_TOKEN = re.compile(r"(Fng|Fn|Fck|Fc|CF|Fe|B)_(\d+)|(L)(?:_(\d+))?")
_PUNCTUATION = str.maketrans("[],", "   ")
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Operation:
    """One operation: `kind` is one of "Fn" "Fck" "Fe" "L" "B", `stage` its stage (n for "L")."""

    kind: str
    stage: int

    @property
    def name(self) -> str:
        """Published name of `kind`."""
        return self.kind

    @property
    def index(self) -> int:
        """Published name of `stage`."""
        return self.stage

    def _key(self) -> tuple[str, int]:
        return (self.kind, 0 if self.kind == "L" else self.stage)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Operation) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return "L" if self.kind == "L" else f"{self.kind}_{self.stage}"

    def __repr__(self) -> str:
        return str(self)


class Forward(Operation):
    """A forward of stage `index`; base class of the three kinds."""

    __slots__ = ()

    def __init__(self, index: int, name: str = "F") -> None:
        super().__init__(name, index)


class ForwardNograd(Forward):
    """``Fn``: a forward without a tape, after which its input is freed."""

    __slots__ = ()

    def __init__(self, index: int) -> None:
        super().__init__(index, "Fn")


class ForwardCheck(Forward):
    """``Fck``: a forward without a tape, whose input is kept."""

    __slots__ = ()

    def __init__(self, index: int) -> None:
        super().__init__(index, "Fck")


class ForwardEnable(Forward):
    """``Fe``: a forward that keeps everything its backward needs."""

    __slots__ = ()

    def __init__(self, index: int) -> None:
        super().__init__(index, "Fe")


class Loss(Operation):
    """``L``: the loss; its stage follows from the sequence where `index` is left out."""

    __slots__ = ()

    def __init__(self, index: int = -1) -> None:
        super().__init__("L", index)


class Backward(Operation):
    """``B``: the backward of stage `index`."""

    __slots__ = ()

    def __init__(self, index: int) -> None:
        super().__init__("B", index)


_CLASSES = (ForwardNograd, ForwardCheck, ForwardEnable, Loss, Backward)


class Function:
    """Description of how a sequence was made: the name of a function and its arguments."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args

    def __repr__(self) -> str:
        return f"{self.name}({','.join(map(str, self.args))})"


@dataclass(frozen=True)
class Timeline:
    """Live bytes along a sequence, the chain's input counted.

    Attributes
    ----------
    peak_bytes
        The most bytes live during each operation, int64 [length].
    live_bytes
        Bytes live after each operation, int64 [length].
    """

    peak_bytes: npt.NDArray[np.int64]
    live_bytes: npt.NDArray[np.int64]


class Sequence(Saved):
    """A schedule: operations in order, priced on a chain by the simulator.

    Parameters
    ----------
    ops
        Operations, pairs ``(kind, stage)``, or int32 codes of shape [length, 2]; a `Function`, as
        published, begins an empty sequence that `insert` fills.
    chain
        The chain that prices it. Without one, the sequence can be printed, compared and stored.

    Raises
    ------
    InvalidSequenceError
        An operation needs something that is not in memory, or the end is missing; only with
        `chain`.
    ValueError
        An unknown kind.
    """

    def __init__(
        self,
        ops: Iterable[Operation | tuple[str, int]] | npt.NDArray[np.int32] | Function = (),
        chain: Chain | None = None,
    ) -> None:
        self.function = ops if isinstance(ops, Function) else None
        if isinstance(ops, Function):
            ops = ()
        codes = ops if isinstance(ops, np.ndarray) else _encode(ops)
        self.codes: npt.NDArray[np.int32] = np.ascontiguousarray(codes, dtype=np.int32)
        self.chain = chain
        self._time_ns: int | None = None
        self._peak_bytes: int | None = None
        self._timeline: Timeline | None = None
        if chain is not None:
            self._time_ns, self._peak_bytes, peaks, lives = chain.core.simulate(self.codes)
            self._timeline = Timeline(
                np.frombuffer(peaks, dtype=np.int64), np.frombuffer(lives, dtype=np.int64)
            )

    @classmethod
    def parse(cls, text: str, chain: Chain | None = None) -> Sequence:
        """Return the sequence that ``str(sequence)`` printed, such as ``"Fck_0 Fn_1 Fe_2 L B_2"``.

        Brackets and commas of a printed list are ignored.

        Raises
        ------
        ValueError, TypeError
            A word that is no operation; no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"expected the text of a sequence, got {text!r}")
        words = []
        for word in text.translate(_PUNCTUATION).split():
            match = _TOKEN.fullmatch(word)
            if match is None:
                raise ValueError(f"{word!r} is no operation, expected such as Fck_0, Fe_2, L, B_2")
            words.append(match.groups())
        last = max((int(stage) for _, stage, _, _ in words if stage is not None), default=-1)
        return cls(
            [
                (kind, int(stage)) if kind else ("L", last + 1 if n is None else int(n))
                for kind, stage, _, n in words
            ],
            chain,
        )

    def _priced(self) -> Chain:
        if self.chain is None:
            raise ValueError("this sequence was made without a chain, which alone can price it")
        return self.chain

    @property
    def makespan(self) -> float:
        """Seconds of one step, without the loss; from the simulator."""
        self._priced()
        assert self._time_ns is not None
        return self._time_ns / _NS

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at any moment, the chain's input counted; from the simulator."""
        self._priced()
        assert self._peak_bytes is not None
        return self._peak_bytes

    @property
    def timeline(self) -> Timeline:
        """Return the live bytes along the sequence."""
        self._priced()
        assert self._timeline is not None
        return self._timeline

    def insert(self, operation: Operation | tuple[str, int]) -> None:
        """Append an operation.

        Raises
        ------
        ValueError
            An unknown kind; the sequence has a chain, by which it is priced as it is.
        """
        self._extend(np.concatenate([self.codes, _encode([operation], _length(self.codes))]))

    def insert_sequence(self, sequence: Sequence) -> None:
        """Append the operations of another sequence; ValueError: this one has a chain."""
        self._extend(np.concatenate([self.codes, sequence.codes]))

    def _extend(self, codes: npt.NDArray[np.int32]) -> None:
        if self.chain is not None:
            raise ValueError(
                "the sequence is priced on a chain and complete: build one without a chain, and "
                "price it in the end with Sequence(list_of_operations, chain)"
            )
        self.codes = codes

    def list_operations(self) -> list[Operation]:
        """Return the operations, in order."""
        return list(self)

    def without_suffix(self) -> tuple[Sequence, int | None]:
        """Split off the stages that run ``Fe .. L B ..`` around the loss: plain autograd runs them.

        Returns
        -------
        tuple
            The sequence without them, and the first of these stages: ``None`` without any, and
            then the sequence is this one.

        Raises
        ------
        ValueError
            The sequence has no loss.
        """
        ops = list(self)
        kinds = [op.kind for op in ops]
        if "L" not in kinds:
            raise ValueError("the sequence has no loss L between its forward and backward parts")
        before, after = ops[: kinds.index("L")], ops[kinds.index("L") + 1 :]
        first = None
        while before and after and before[-1].kind == "Fe":
            if after[0] != Backward(before[-1].stage):
                break
            first = before.pop().stage
            after.pop(0)
        if first is None:
            return self, None
        arguments = () if self.function is None else (self.function.name, *self.function.args)
        found = Sequence(Function("Strip", *arguments, first))
        found.codes = _encode([*before, Loss(first), *after])
        return found, first

    def count_forwards(self) -> dict[int, int]:
        """Return how many times each stage runs forward."""
        forwards = self.codes[self.codes[:, 0] <= 2, 1]
        stages, counts = np.unique(forwards, return_counts=True)
        return dict(zip(stages.tolist(), counts.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[Operation]:
        for kind, stage in self.codes.tolist():
            yield _CLASSES[kind](stage)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Operation]: ...
    def __getitem__(self, index: int | slice) -> Operation | list[Operation]:
        if isinstance(index, slice):
            return [_CLASSES[k](s) for k, s in self.codes[index].tolist()]
        kind, stage = self.codes[index].tolist()
        return _CLASSES[kind](stage)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    def __str__(self) -> str:
        return " ".join(str(op) for op in self)

    def __repr__(self) -> str:
        if self.chain is None:
            return f"<Sequence of {len(self)} operations>"
        return (
            f"<Sequence of {len(self)} operations, {self.makespan:.6g} s, {self.peak_bytes} bytes>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the sequence, with its chain when it has one, as plain data for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "operations": [[op.kind, op.stage] for op in self],
            "chain": None if self.chain is None else self.chain.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Sequence:
        """Return the sequence that `to_dict` wrote.

        Raises
        ------
        ValueError
            Another format or version, or malformed operations.
        """
        fields = check_header(data, FORMAT, VERSION)
        operations = fields.get("operations")
        if not isinstance(operations, list):
            raise ValueError("a sequence needs the field 'operations', a list")
        chain = fields.get("chain")
        return cls(
            [_pair(item) for item in operations], None if chain is None else Chain.from_dict(chain)
        )


def _pair(item: Any) -> tuple[str, int]:
    if not (isinstance(item, list) and len(item) == 2 and isinstance(item[1], int)):
        raise ValueError(f"{item!r} is no operation, expected a pair such as ['Fe', 0]")
    return str(item[0]), item[1]


def _length(codes: npt.NDArray[np.int32]) -> int:
    """Return the number of stages that operations name."""
    return int(codes[:, 1].max()) + 1 if len(codes) else 0


def _encode(ops: Iterable[Operation | tuple[str, int]], length: int = 0) -> npt.NDArray[np.int32]:
    codes = []
    for op in ops:
        kind, stage = (op.kind, op.stage) if isinstance(op, Operation) else op
        if kind not in CODES:
            raise ValueError(f"unknown operation {kind!r}, expected one of {', '.join(KINDS)}")
        codes.append((CODES[kind], stage))
    try:
        found = np.array(codes, dtype=np.int32).reshape(-1, 2)
    except OverflowError:
        largest = max(stage for _, stage in codes)
        raise ValueError(f"stage {largest} is none: a chain has fewer than 2**31") from None
    unsaid = (found[:, 0] == CODES["L"]) & (found[:, 1] < 0)
    found[unsaid, 1] = max(length, _length(found))
    return found
