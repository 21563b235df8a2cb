"""Memory and time that operators need, known once they have run on arguments of a signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor._pytorch import dispatch, profiler
from rotor.dtr.operators import Operator
from rotor.dtr.records import Needs, tensors_of

_MOST_KNOWN = 1 << 16
_needs: dict[str, dict[Any, Needs]] = {}


def known_needs(device: torch.device) -> dict[Any, Needs]:
    """Return the needs that this process knows of the operators on a device, by signature."""
    return _needs.setdefault(f"{device} {torch.get_num_threads()}", {})


def remember(known: dict[Any, Needs], key: bytes, needs: Needs) -> None:
    """Note the needs of a signature; forget all when the table grows without end."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = needs


def guess(operator: Operator, args: Any, kwargs: dict[str, Any], read_bytes: int) -> Needs:
    """Return needs before the first run: outputs by the operator's meta kernel if it has one.

    The workspace is taken to be as large as all inputs and outputs.
    """
    try:
        args, kwargs = _on_meta(args), _on_meta(kwargs)
        results = operator.call(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return Needs(read_bytes, read_bytes, False)
    made = 0
    # Its targets exist already.
    seen = {
        dispatch.storage_key(tensor.untyped_storage())
        for tensor in tensors_of((args, list(kwargs.values())))
    }
    for tensor in tensors_of(results):
        if tensor.layout is not torch.strided:
            return Needs(read_bytes, read_bytes, False)
        storage = tensor.untyped_storage()
        if dispatch.storage_key(storage) not in seen:
            seen.add(dispatch.storage_key(storage))
            made += storage.nbytes()
    return Needs(made, made + read_bytes, False)


def varies_by_elements(operator: Operator, args: Any) -> bool:
    """Return whether the sizes of results depend on elements: indexing, with masks only."""
    return operator.name != "aten::index" or any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def varying_bytes(operator: Operator, args: Any, *, exactly: bool) -> int | None:
    """Return the bytes of results whose size depends on elements; ``None`` if unknown.

    Parameters
    ----------
    operator, args
        The operator and its positional arguments, which are in memory.
    exactly
        Look at the elements where that is cheap; otherwise the most that it could be.
    """
    x: torch.Tensor = args[0]
    name = operator.name
    if name == "aten::nonzero":
        return _true(x, exactly) * x.dim() * 8
    if name == "aten::masked_select":
        mask: torch.Tensor = args[1]
        numel: int = torch.broadcast_shapes(x.shape, mask.shape).numel()
        return _true(mask, exactly) * (numel // max(mask.numel(), 1)) * x.element_size()
    if name == "aten::index":
        indices: list[Any] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                place = torch.empty(_true(index, exactly), dtype=torch.int64, device="meta")
                indices.extend([place] * index.dim())
            else:
                indices.append(_on_meta(index))
        result: torch.Tensor = operator.call(_on_meta(x), indices)
        return result.numel() * x.element_size()
    if name in ("aten::unique_consecutive", "aten::_unique2", "aten::unique_dim", "aten::_unique"):
        return int(x.numel()) * (x.element_size() + 16)
    if name == "aten::repeat_interleave" and len(args) == 1:
        return int(x.sum()) * 8
    if name == "aten::bincount":
        return (int(x.max()) + 1 if x.numel() else 0) * 8
    return None


def _true(mask: torch.Tensor, exactly: bool) -> int:
    return int(torch.count_nonzero(mask)) if exactly else mask.numel()


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
    """Run an operator with the CPU's allocator watched; return its results and its peak bytes."""
    trace = profiler.AllocationTrace()
    trace.start()
    try:
        results = call(*args, **kwargs)
    finally:
        events = trace.stop()
    level = peak = 0
    for event in events:
        if isinstance(event, profiler.Allocation):
            level += event.nbytes
            peak = max(peak, level)
    return results, peak
