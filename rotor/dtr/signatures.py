"""Memory and time that operators need, known once they have run on arguments of a signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor._core import Needs
from rotor._pytorch import dispatch, profiler
from rotor.common.tensor_trees import result_tensors
from rotor.dtr.operators import Operator, on_meta
from rotor.timing import Clock

_MOST_KNOWN = 1 << 16
_IS_TIMED = -2
_needs: dict[str, dict[Any, Needs]] = {}
_timed: dict[torch.device, list[tuple[Needs, Callable[[], int]]]] = {}


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
    if operator.treatment.needs is not None:
        return Needs(*operator.treatment.needs(args), True)
    try:
        args, kwargs = on_meta(args), on_meta(kwargs)
        results = operator.call(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return Needs(read_bytes, read_bytes, False)
    made = 0
    # Its targets exist already.
    seen = {
        dispatch.storage_key(tensor.untyped_storage())
        for tensor in result_tensors((args, list(kwargs.values())))
    }
    for tensor in result_tensors(results):
        if tensor.layout is not torch.strided:
            return Needs(read_bytes, read_bytes, False)
        storage = tensor.untyped_storage()
        if dispatch.storage_key(storage) not in seen:
            seen.add(dispatch.storage_key(storage))
            made += storage.nbytes()
    return Needs(made, made + read_bytes, False)


def run_measured(
    call: Callable[..., Any], args: Any, kwargs: dict[str, Any], device: torch.device
) -> tuple[Any, int]:
    """Run an operator with a device's allocator watched; return its results and its peak bytes."""
    trace = profiler.AllocationTrace(device_type=device.type)
    trace.start()
    try:
        results = call(*args, **kwargs)
    finally:
        events = trace.stop()
    return results, int(events.nbytes.cumsum().max(initial=0))


def run_timed(
    call: Callable[..., Any], args: Any, kwargs: dict[str, Any], needs: Needs, device: torch.device
) -> tuple[Any, int]:
    """Run an operator between two events; return its results, and a number for its unknown time.

    The time is the accelerator's: a launch takes the same for all operators. The needs get it from
    `read_times`, once the device has come that far; the host waits for nothing.
    """
    clock = Clock(device)
    clock.start()
    results = call(*args, **kwargs)
    _timed.setdefault(device, []).append((needs, clock.stop_later()))
    return results, _IS_TIMED


def read_times(device: torch.device) -> None:
    """Note the times of operators whose events have passed."""
    waiting = _timed.pop(device, None)
    if waiting is None:
        return
    for place, (needs, found) in enumerate(waiting):
        ns = found()
        if ns < 0:
            # A stream passes its events in order.
            _timed[device] = waiting[place:]
            return
        needs.cost_ns = ns
