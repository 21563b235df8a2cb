"""Checksums of tensors' bits, computed on the tensors' devices, and the proof of a step with them.

A checksum has 64 bits. On a CPU the C core reads a tensor once, with keys of every word's own
(`checksum.h`): changes go unseen in one case of about 2^64. On other devices the words are summed,
wrapping, in a prime number of columns, which reads memory once with all threads of the device and
needs a few KiB; the columns go into 64 bits, each with keys of its own. There changes also go
unseen where they cancel in every column.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core as _torch
from rotor.common.accounting import has_room_for_proofs
from rotor.errors import RecomputationError

VERIFIED_STEPS = 3
"""Planned steps of every plan that ``verify="first"`` verifies."""

NO_ROOM = "the limit has no room for checksums on its device"
"""Reason for which a plan with a small limit is not proved."""

EMPTY_OPERATORS = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Names of PyTorch's operators whose result is uninitialised memory, which no checksum reads."""

UNSPECIFIED_OUTPUTS = frozenset(
    (
        *("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"),
        *("log_sumexp", "reserve", "workspace"),
    )
)
"""Names of other outputs that may be uninitialised: states without dropout, padding, scratch."""

PARTLY_WRITTEN = {("_ctc_loss", 1), ("_cudnn_rnn", 3), ("miopen_rnn", 3), ("mkldnn_rnn_layer", 3)}
"""Operators, and the numbers of outputs without a name of which they write a part."""

_COLUMNS = 4093
_SLOTS = 2048
_KEY_SEED = 20_261_122
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_keys: dict[torch.device, torch.Tensor] = {}


def _keys_on(device: torch.device) -> torch.Tensor:
    """Return odd factors for the columns, two for each, which are kept on the device."""
    if device not in _keys:
        with torch.inference_mode(False):
            generator = torch.Generator("cpu").manual_seed(_KEY_SEED)
            bounds = (-(1 << 62), 1 << 62)
            keys = torch.randint(*bounds, (2 * _COLUMNS,), generator=generator, device="cpu")
            _keys[device] = (keys * 2 + 1).to(device)
    return _keys[device]


def _memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all elements in the order of memory, one dimension; ``None`` for one with gaps."""
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=lambda k: tensor.stride(k), reverse=True)
        tensor = tensor.permute(order)
        if not tensor.is_contiguous():
            return None
    return tensor.reshape(-1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, 64 bits each where size and address allow it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    words = tensor.view(_WORDS[tensor.element_size()])
    if words.numel() * words.element_size() % 8 == 0 and words.data_ptr() % 8 == 0:
        words = words.view(torch.int64)
    return words


def _column_sums(words: torch.Tensor, out: torch.Tensor) -> None:
    rows, rest = divmod(words.numel(), _COLUMNS)
    whole = rows * _COLUMNS
    torch.sum(words[:whole].view(rows, _COLUMNS), 0, dtype=torch.int64, out=out)
    if rest:
        out[:rest] += words[whole:]


def _in_core(tensor: torch.Tensor) -> int:
    return _core.checksum(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())


def _on_device(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Put the checksum into `out`, of one element, by operations of the device alone."""
    flat = _memory_order(tensor)
    words = _words(tensor.contiguous().reshape(-1) if flat is None else flat)
    if words.numel() < 2 * _COLUMNS:
        columns = words.to(torch.int64, copy=True)
    else:
        columns = torch.empty(_COLUMNS, dtype=torch.int64, device=tensor.device)
        _column_sums(words, columns)
    # Of changed signs, linear sums show only whether their number is odd.
    columns ^= columns >> 32
    columns *= _keys_on(tensor.device)[: columns.numel()]
    torch.sum(columns, 0, keepdim=True, out=out)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory without autograd, lazy conjugation and lazy sign."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    return tensor.resolve_neg()


def checksum(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return 64 bits made of all bits of a tensor of any type, layout and strides.

    Checksums compare between tensors of the same type, layout, strides and shape. That of a tensor
    on a CPU is a number, any other a tensor of one int64 on its device, for which the host has not
    waited. Raises TypeError if the memory cannot be read, as that of MKL-DNN's layout.
    """
    if _torch.is_without_memory(tensor):
        tensor = tensor.new_zeros(1)
    parts = _torch.strided_parts(tensor)
    if not parts:
        raise TypeError(f"the bits of a tensor of layout {tensor.layout} cannot be read")
    if all(part.is_cpu for part in parts):
        # Conjugation and sign as lazy flags are no part of the memory.
        sums = [_in_core(part) for part in parts]
        return sums[0] if len(sums) == 1 else _in_core(torch.tensor(sums, device="cpu"))
    with torch.no_grad():
        found = torch.empty(len(parts), dtype=torch.int64, device=tensor.device)
        for k, part in enumerate(parts):
            _on_device(_plain(part), found[k : k + 1])
        if len(parts) == 1:
            return found
        return (found * _keys_on(tensor.device)[: len(parts)]).sum(0, keepdim=True)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return (
        tuple(tensor.shape),
        tensor.dtype,
        strides,
        tensor.device,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )


@dataclass(frozen=True)
class Mismatch:
    """A value that differed when it was computed again."""

    site: Hashable
    """Name of the value, as given to `Proof.first`."""
    first: str
    """Shape and type of the first value."""
    again: str
    """Shape and type of the recomputed value."""


@dataclass
class _Entry:
    layout: tuple[Any, ...]
    sum: int  # on a CPU the checksum, else the slot that holds it


class Proof:
    """Checksums of one step: recomputed values against the first ones.

    On a device the host waits for nothing before `finish`, which reads all checksums at once.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._pairs: list[tuple[Hashable, int, int]] = []
        self._slots: dict[torch.device, list[torch.Tensor]] = {}
        self._used: dict[torch.device, int] = {}
        self._mismatches: dict[Hashable, Mismatch] = {}
        self._compared: set[Hashable] = set()

    def first(self, site: Hashable, tensor: torch.Tensor) -> None:
        """Note a value when it is computed for the first time; `again` finds it by its site."""
        self._entries[site] = _Entry(_layout(tensor), self._put(tensor))

    def again(self, site: Hashable, tensor: torch.Tensor) -> None:
        """Compare a recomputed value; raise KeyError for a site that `first` was not given."""
        entry = self._entries[site]
        self._compared.add(site)
        layout = _layout(tensor)
        if layout != entry.layout:
            self._differ(site, entry.layout, layout)
            return
        found = self._put(tensor)
        if not self._is_read(tensor):
            self._pairs.append((site, entry.sum, found))
        elif found != entry.sum:
            self._differ(site, entry.layout, layout)

    @property
    def sites(self) -> frozenset[Hashable]:
        """Names of the noted values."""
        return frozenset(self._entries)

    @property
    def compared(self) -> int:
        """Number of values that were recomputed and compared."""
        return len(self._compared)

    def finish(self) -> list[Mismatch]:
        """Return the differences found since the last call, after one reading of each device."""
        sums = {device: torch.cat(parts).tolist() for device, parts in self._slots.items()}
        for site, first, again in self._pairs:
            entry = self._entries[site]
            table = sums[entry.layout[3]]
            if table[first] != table[again]:
                self._differ(site, entry.layout, entry.layout)
        found = list(self._mismatches.values())
        self._pairs.clear()
        self._mismatches.clear()
        return found

    def _differ(self, site: Hashable, first: tuple[Any, ...], again: tuple[Any, ...]) -> None:
        def described(layout: tuple[Any, ...]) -> str:
            return f"{list(layout[0])}, {str(layout[1]).removeprefix('torch.')}"

        self._mismatches.setdefault(site, Mismatch(site, described(first), described(again)))

    @staticmethod
    def _is_read(tensor: torch.Tensor) -> bool:
        """Return whether the checksum is known at once, not only on a device."""
        return tensor.device.type == "cpu"

    def _put(self, tensor: torch.Tensor) -> int:
        found = checksum(tensor)
        if isinstance(found, int):
            return found
        device = tensor.device
        at = self._used.get(device, 0)
        slots = self._slots.setdefault(device, [])
        if at == len(slots) * _SLOTS:
            slots.append(torch.zeros(_SLOTS, dtype=torch.int64, device=device))
        slots[-1][at % _SLOTS : at % _SLOTS + 1].copy_(found)
        self._used[device] = at + 1
        return at


def proof_bytes(device: torch.device, values: int) -> int:
    """Return the bytes that the proof of a step with so many checksums takes from an allocator."""
    if device.type == "cpu" or not values:
        return 0
    chunks = -(-values // _SLOTS)
    # Keys, columns, their shifted copy, and the workspace of a reduction over blocks of the device.
    return 16 * _SLOTS * chunks + 64 * (_COLUMNS + 3) + (1 << 20)


def has_room(device: torch.device, values: int, limit_bytes: int) -> bool:
    """Return whether the proof of a step with so many checksums takes at most 1/50 of its limit."""
    return has_room_for_proofs(proof_bytes(device, values), limit_bytes)


@dataclass
class Proved:
    """Results of the verified steps of one plan."""

    ran: int = 0
    steps: int = 0
    """Steps in which every recomputed value was compared and equal."""
    values: int = 0
    """Recomputed values that were compared in the last verified step."""
    unproved: str = ""
    """Reason for which nothing can be compared; empty if values can be."""

    def add(self, values: int) -> None:
        """Note a step in which `values` recomputed values were compared and equal."""
        self.steps += 1
        self.values = values

    def is_due(self, verify: str | int) -> bool:
        """Return whether the next step is to be verified; steps without a backward do not count."""
        if self.unproved:
            return False
        return is_verified(verify, min(self.ran, self.steps) if self.is_new else self.ran)

    def begins(self, verify: str | int) -> bool:
        """Return whether the step that begins is to be verified, and count it."""
        is_due = self.is_due(verify)
        self.ran += 1
        return is_due

    @property
    def is_new(self) -> bool:
        """True while fewer steps are proved than the first ones that are to be."""
        return self.steps < VERIFIED_STEPS

    def text(self, verify: str | int) -> str:
        """Return a line for reports."""
        if self.unproved:
            return f"not proved: {self.unproved}"
        if not self.steps:
            return "not proved" + (': verify="off"' if verify == "off" else " yet")
        steps = f"{self.steps} step" + ("s" if self.steps > 1 else "")
        if not self.values:
            return f"proved in {steps}: nothing was recomputed"
        values = f"{self.values} recomputed value" + ("s" if self.values > 1 else "")
        return f"proved in {steps}: {values}, bit for bit"


def checked_verify(value: Any) -> str | int:
    """Return a value of ``verify=`` as it is: "first", "always", "off", or n for every n-th step.

    With n the first steps are verified too. Raises ValueError or TypeError for all else.
    """
    expected = 'expected "first", "always", "off", or a number n >= 1 for every n-th step'
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"verify={value!r}, {expected}")
    if value in ("first", "always", "off") or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError(f"verify={value!r}, {expected}")


def is_verified(verify: str | int, ran: int) -> bool:
    """Return whether a step's recomputation is compared after `ran` steps under the plan."""
    if verify == "off":
        return False
    if verify == "always" or ran < VERIFIED_STEPS:
        return True
    return isinstance(verify, int) and ran % verify == 0


def recomputation_error(
    operation: str, module: str, mismatch: Mismatch, cure: str, others: int = 0
) -> RecomputationError:
    """Return the error for recomputed values that differ, with a sentence on the user's `cure`.

    `module` is a path, empty for the model itself; `others` is the number of other such values.
    """
    place = f"module {module!r}" if module else "the model"
    also = f" and {others} other value" + ("s" if others > 1 else "") if others else ""
    shapes = mismatch.first
    if mismatch.again != mismatch.first:
        shapes = f"{mismatch.first} first, {mismatch.again} again"
    return RecomputationError(
        f"{operation} in {place} ({shapes}){also} gave other bits when it ran again in the "
        "backward: gradients made from it would be wrong, and none was handed on. It depends on "
        "random numbers or on state that recomputation cannot restore, or its kernel is not "
        f"deterministic. {cure}",
        module,
        operation,
    )
