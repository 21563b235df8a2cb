"""What operators take beside their inputs: known once an operator has run on such arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor import _dispatch, _torch
from rotor.dtr.operators import Operator
from rotor.dtr.records import Needs, tensors_of

_MOST_KNOWN = 1 << 16
_needs: dict[str, dict[Any, Needs]] = {}


def known_needs(device: torch.device) -> dict[Any, Needs]:
    """What is known in this process of the operators on a device, by signature."""
    return _needs.setdefault(f"{device} {torch.get_num_threads()}", {})


def remember(known: dict[Any, Needs], key: bytes, needs: Needs) -> None:
    """Note the needs of a signature; what is known is forgotten where it grows without end."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = needs


def guess(operator: Operator, args: Any, kwargs: dict[str, Any], read_bytes: int) -> Needs:
    """Needs before the first run: outputs from the operator's meta kernel where it has one.

    The workspace is taken to be as large as all inputs and outputs.
    """
    try:
        results = operator.call(*_on_meta(args), **_on_meta(kwargs))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return Needs(read_bytes, read_bytes, False)
    made = 0
    seen = set()
    for tensor in tensors_of(results):
        if tensor.layout is not torch.strided:
            return Needs(read_bytes, read_bytes, False)
        storage = tensor.untyped_storage()
        if _dispatch.storage_key(storage) not in seen:
            seen.add(_dispatch.storage_key(storage))
            made += storage.nbytes()
    return Needs(made, made + read_bytes, False)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)([_on_meta(item) for item in value])
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def run_measured(call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Run an operator with the CPU's allocator watched: its results, and its peak in bytes."""
    trace = _torch.AllocationTrace()
    trace.start()
    try:
        results = call(*args, **kwargs)
    finally:
        events = trace.stop()
    level = peak = 0
    for event in events:
        if isinstance(event, _torch.Allocation):
            level += event.nbytes
            peak = max(peak, level)
    return results, peak
