"""Bytes of storages: taken away and given back; to read them in between is an error."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotor._pytorch import core

Place = tuple[Any, str, Any]
"""An attribute for a time: the object, the name, and the value."""

_OWN_BYTES = 96
_GONE = (
    "the tensor was evicted by a memory budget of rotor, whose session does not see this read: "
    "call rotor.dtr.pin(tensor) in the thread of the budget before others read it"
)


def has_storage_swap() -> bool:
    """Return whether a storage can take over another's bytes without a copy (PyTorch 2.13)."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_bytes(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the bytes of two storages, and whether they may be read."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def empty_shell(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """Return a storage that claims `nbytes` and holds none."""
    shell: Any = torch._C._construct_storage_from_data_pointer(0, device, nbytes)
    return shell  # type: ignore[no-any-return]


def _own_bytes(storage: torch.UntypedStorage) -> Any:
    """Return the bytes of a storage's own object."""
    return (ctypes.c_ubyte * _OWN_BYTES).from_address(storage._cdata)


def _find_flags() -> tuple[int, ...]:
    """Return where a storage notes that accesses are checked, and that each raises; () if unknown.

    PyTorch's builds for accelerators alone set the second by name (CUDA graphs have it set).
    """
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty(1, device="cpu")
    own = _own_bytes(tensor.untyped_storage())
    before = bytes(own)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    changed = [k for k, was in enumerate(before) if was != own[k]]
    if len(changed) != 2 or any(before[k] for k in (*changed, changed[1] + 1)):
        return ()
    places = (changed[0], changed[1] + 1)  # The flag at `changed[1]` would let reads pass.
    storage: Any = torch.UntypedStorage(1)
    storage[0] = 1
    _write(storage, places, 1)
    try:
        _ = storage[0]
    except RuntimeError:
        _write(storage, places, 0)
        return places if storage[0] == 1 else ()
    return ()


def _write(storage: torch.UntypedStorage, places: tuple[int, ...], value: int) -> None:
    own = _own_bytes(storage)
    for place in places:
        own[place] = value


FLAGS = _find_flags()
_say_why = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def forbid_access(storage: torch.UntypedStorage) -> None:
    """Have every later access to a storage's bytes raise RuntimeError, by whatever code.

    While `torch.profiler` records, nothing is forbidden: it reads the addresses of all arguments.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return
    _write(storage, FLAGS, 1)
    if _say_why is not None and FLAGS:
        _say_why(storage._cdata, _GONE)


def allow_access(storage: torch.UntypedStorage) -> None:
    """Undo `forbid_access`."""
    _write(storage, FLAGS, 0)


def span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return what a dense tensor spans: the storage, if on meta; where it begins, and ends."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((count - 1) * stride for count, stride in sides)
    return storage._cdata if tensor.is_meta else 0, begin, begin + extent * tensor.itemsize


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether others than names refer to a tensor, which cannot be swapped then."""
    if weakref.getweakrefs(tensor):
        return True
    count = tensor._use_count()  # type: ignore[attr-defined]
    is_alone = count == 2 and tensor.is_leaf and tensor.requires_grad
    node = torch.autograd.graph.get_gradient_edge(tensor).node if is_alone else None
    # That of a node which adds to its gradient counts, if it was there.
    return bool(tensor._use_count() > 1 + (node is not None))  # type: ignore[attr-defined]


@contextmanager
def no_references(module: torch.nn.Module) -> Iterator[None]:
    """Have recurrent layers drop their weak references to weights for the context."""
    recurrent = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in recurrent:
            weights = layer._flat_weights
            layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


_before_export: Callable[[torch.Tensor], object] = id


def _prepared(export: Callable[..., Any]) -> Callable[..., Any]:
    # The result refers to nothing but PyTorch's function: dynamo keeps it when it is imported.
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _before_export(tensor)
        return export(tensor, *args, **kwargs)

    return run


_EXPORTS: list[tuple[Any, str, Any]] = [
    (home, name, getattr(home, name))
    for home, name in (
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
    )
    if hasattr(home, name)
]
_PREPARED = {export: _prepared(export) for _, _, export in _EXPORTS}


def dlpack_after(prepare: Callable[[torch.Tensor], None]) -> list[Place]:
    """Return what has exports by DLPack, in every thread, prepare their tensor first."""
    prepared = [(home, name, _PREPARED[export]) for home, name, export in _EXPORTS]
    return [(sys.modules[__name__], "_before_export", prepare), *prepared]


_MMAP_THRESHOLD = -3


def give_large_blocks_back(least_bytes: int) -> None:
    """Have the C library return freed blocks of so many bytes, or more, to the system at once.

    By default it learns to keep larger and larger ones. Where it cannot be told, it goes on so.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, least_bytes)


core.check(
    """
    Tensor._make_wrapper_subclass _C._DisableTorchDispatch
    _C._construct_storage_from_data_pointer _C._disabled_torch_function_impl
    _C._set_throw_on_mutable_data_ptr _C._to_dlpack autograd.profiler._is_profiler_enabled
    """
)

OPERATIONS_ONLY = torch._C._disabled_torch_function_impl
"""Override of functions for a type of tensors whose operations alone are overridden."""


def tensor_without_bytes(cls: type[torch.Tensor], like: Any, device: torch.device) -> Any:
    """Return a tensor of a type that overrides operations, with the form of `like`."""
    form = tuple(like.shape), tuple(like.stride() if callable(like.stride) else like.stride)
    made = torch.Tensor._make_wrapper_subclass(
        cls, form[0], strides=form[1], dtype=like.dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made
