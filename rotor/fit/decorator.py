"""Decorator that gives a training function the batch size that fits in a limit."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from rotor._pytorch import devices
from rotor.errors import InfeasibleError
from rotor.fit.advice import advise, device_of_call
from rotor.fit.batches import check_counts, is_out_of_memory
from rotor.meter.room import checked_total, step_limit
from rotor.units import exact_bytes, parse_bytes
from rotor.wrapper.checkpointable import Checkpointable
from rotor.wrapper.outermost import OutermostCalls, unwrapped

logger = logging.getLogger("rotor")

R = TypeVar("R")


class _TooLarge(BaseException):
    """Signal that the first step of a batch size does not fit; not an error of the function."""

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(needed_bytes, limit_bytes)
        self.needed_bytes, self.limit_bytes = needed_bytes, limit_bytes


def fit_batch_size(
    mem_limit: int | str | None = None,
    *,
    starting_batch_size: int = 128,
    multiple_of: int = 1,
    total_limit: int | str | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a training function so that it gets the batch size that fits.

    The function takes a batch size as its first argument, and makes its model, optimizer and data
    with it. Before the first training forward runs, the step is planned, and its bytes are
    compared with the limit; if they do not fit, the function begins again with a smaller batch.
    So no step runs out of memory, as it does where errors of the allocator are awaited. A model
    that the function wraps with `rotor.Checkpointable` fits if its own limit has a plan.

    Parameters
    ----------
    mem_limit
        Most bytes that a training step may have allocated above the level at its start.
        ``None``: 90 % of what is free when the first forward begins.
    total_limit
        Most bytes of the process on the device, as for `rotor.Checkpointable`.
    starting_batch_size
        First batch size.
    multiple_of
        Try multiples of this size only.

    Returns
    -------
    callable
        Decorator; the decorated function takes the arguments after the batch size.

    Raises
    ------
    InfeasibleError
        The smallest batch does not fit; raised by the decorated function.
    ValueError, TypeError
        A number is not positive, or the limit cannot be read.

    Examples
    --------
    >>> import torch
    >>> @fit_batch_size("40 KB", starting_batch_size=256, multiple_of=16)
    ... def train(batch_size):
    ...     model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(2)])
    ...     model(torch.randn(batch_size, 32)).sum().backward()
    ...     return batch_size
    >>> train() in range(16, 256, 16)
    True
    """
    limits = None if mem_limit is None else parse_bytes(mem_limit), checked_total(total_limit)
    check_counts(starting_batch_size=starting_batch_size, multiple_of=multiple_of)
    if starting_batch_size < multiple_of:
        raise ValueError(
            f"starting_batch_size = {starting_batch_size} is below multiple_of = {multiple_of}"
        )

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def fitted(*args: Any, **kwargs: Any) -> R:
            units = starting_batch_size // multiple_of
            while True:
                size = units * multiple_of
                needed = 0
                try:
                    guard = _Guard(limits)
                    with OutermostCalls(guard.call) as calls:
                        guard.stop = calls.stop
                        return function(size, *args, **kwargs)
                except _TooLarge as found:
                    needed, allowed = found.needed_bytes, found.limit_bytes
                except InfeasibleError as error:
                    if units == 1:
                        raise
                    needed, allowed = error.minimum_bytes, 0
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or units == 1:
                        raise
                    allowed = 0
                gc.collect()
                devices.release_all()
                if units == 1:
                    raise InfeasibleError(
                        f"a batch of {size} does not fit in {exact_bytes(allowed)}: its step "
                        f"needs {exact_bytes(needed)}. Raise the limit, or wrap the "
                        "model with rotor.Checkpointable",
                        needed,
                    )
                scaled = units * allowed // needed if allowed and needed else units // 2
                following = max(1, min(scaled, units - 1))
                logger.info("batch %d does not fit, trying %d", size, following * multiple_of)
                units = following

        return fitted

    return decorate


class _Guard:
    """Handler that plans the first outermost training forward, and lets it run if it fits."""

    def __init__(self, limits: tuple[int | None, int | str | None]) -> None:
        self._limits = limits
        self.stop: Callable[[], None] = lambda: None

    def call(self, module: nn.Module, plain: Any, args: Any, kwargs: Any) -> Any:
        self.stop()
        if not isinstance(module, Checkpointable):
            device: torch.device = device_of_call(module, args, kwargs)
            limit = step_limit(device, *self._limits, unwrapped(module))
            needed = advise(unwrapped(module), args, kwargs).plain_bytes
            if needed > limit:
                raise _TooLarge(needed, limit)
        return plain(module, *args, **kwargs)
