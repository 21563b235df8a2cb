"""Weights in files of the format safetensors, read and written one tensor at a time.

A file is read by its bytes, not mapped: the address space of the process does not grow by it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rotor.chain import new_file

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_LONGEST_HEADER = 100_000_000

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]


class _Place(NamedTuple):
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class Weight(NamedTuple):
    """Tensor of a source, which is read when it is called for."""

    shape: tuple[int, ...] | None
    """``None`` before it is read."""
    read: Callable[[], torch.Tensor]


def weights_of(source: Weights) -> Callable[[str], Weight | None]:
    """Return a function that gives the tensor of a name; ``None`` where `source` has none.

    The source is a file in the format safetensors, or a folder of such files; or a mapping from
    names to tensors; or a function of a name that returns one. Raise ValueError if a file is not in
    this format, OSError if it cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        places = _places_in(Path(source))
        found = {name: Weight(at.shape, partial(_read, at)) for name, at in places.items()}
        return found.get
    if isinstance(source, Mapping):
        given = {
            name: Weight(tuple(tensor.shape), partial(source.__getitem__, name))
            for name, tensor in source.items()
        }
        return given.get
    if not callable(source):
        raise TypeError(
            "weights must be the path of a safetensors file or of a folder of them, a mapping from "
            f"names to tensors, or a function of a name, got {type(source).__name__}"
        )
    make = source
    return lambda name: Weight(None, partial(make, name))


def _places_in(path: Path) -> dict[str, _Place]:
    if not path.is_dir():
        return dict(_header(path))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file")
    return {name: place for file in files for name, place in _header(file)}


def _header(path: Path) -> Iterator[tuple[str, _Place]]:
    """Yield the names of a file's tensors, and where they are."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _LONGEST_HEADER
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file: its header is not in it")
        try:
            entries = json.loads(file.read(length))
            for name, entry in entries.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
                if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                    raise ValueError(f"the bytes of {name} are not in it")
                yield name, _Place(path, dtype, shape, 8 + length + begin, end - begin)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None


def _read(place: _Place) -> torch.Tensor:
    made = torch.empty(place.shape, dtype=place.dtype)
    if not place.nbytes:
        return made
    with place.path.open("rb") as file:
        file.seek(place.begin)
        if file.readinto(memoryview(bytes_of(made))) < place.nbytes:
            raise OSError(f"{place.path} ended within a tensor")
    return made


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an array, which shares its memory where that is possible."""
    values = tensor.detach().cpu().contiguous()
    whole = values.clone() if type(values) is not torch.Tensor else values
    return whole.reshape(-1).view(torch.uint8).numpy()


def save_weights(tensors: Iterable[tuple[str, torch.Tensor]], path: str | os.PathLike[str]) -> None:
    """Write named tensors to a safetensors file, one at a time.

    Parameters
    ----------
    tensors
        Names and tensors, such as ``model.state_dict().items()``; a tensor that comes again under
        another name is written once.
    path
        File, which is replaced once the new one is complete.

    Raises
    ------
    ValueError
        The format has no tensors of such a type.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"the format safetensors has no {tensor.dtype}, the type of {name}")
        named.setdefault(id(getattr(tensor, "home", tensor)), (name, tensor))
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in named.values():
        begin, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with new_file(path) as part, part.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _, tensor in named.values():
            file.write(memoryview(bytes_of(tensor)))
