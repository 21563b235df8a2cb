"""The functions of the published prototype, on current PyTorch.

There, tensors became managed one by one by ``tensor.checkpoint()`` and a budget was set for the
device. Here `set_memory_budget` begins to watch the whole program, as `rotor.dtr.budget` does,
until `unset_memory_budget`; what operators make is managed by itself, and the functions on tensors
say what holds for single ones. They work within ``with rotor.dtr.budget(...)`` too. As published,
`checkpoint` needs no budget: without one the program is watched, and nothing is evicted.

The prototype is that of Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. What it got
wrong is not repeated: classes of neighbours count once, products of bytes and time do not overflow,
a budget that cannot be kept is an error instead of an endless loop, shapes are read without
computing anything, random numbers and running statistics equal a single run's.
"""

from __future__ import annotations

import atexit
import gc
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from rotor._pytorch import core, devices, dispatch
from rotor.dtr.context import budget, current
from rotor.dtr.guard import Guard
from rotor.dtr.log import ProgramLog
from rotor.dtr.recall import Stats
from rotor.dtr.runtime import Session
from rotor.dtr.storages import StorageRef
from rotor.meter import allocator as memory
from rotor.simrd.log_writer import LogWriter
from rotor.units import exact_bytes, parse_bytes

__all__ = [
    "annotate_log",
    "base_compute_time",
    "checkpoint",
    "clear_checkpointpool",
    "compute_time",
    "cost_time",
    "decheckpoint",
    "install",
    "is_checkpoint",
    "loop_time",
    "new_log",
    "pin",
    "remat_compute_time",
    "reset_profile",
    "search_time",
    "set_memory_budget",
    "toggle_ignore_small_tensors",
    "toggle_log",
    "toggle_profile",
    "toggle_sampling",
    "try_checkpoint",
    "uncheckpoint",
    "uninstall",
    "unset_memory_budget",
]

_METHODS = frozenset(
    ["checkpoint", "decheckpoint", "is_checkpoint", "pin", "try_checkpoint", "uncheckpoint"]
)


@dataclass
class _Global:
    """State that the functions share."""

    context: AbstractContextManager[Session] | None = None
    session: Session | None = None
    level_bytes: int = 0
    sample: bool = True
    ignore_small: bool = True
    log: ProgramLog | None = None
    logged: Session | None = None
    ordinary: dict[int, StorageRef] = field(default_factory=dict)
    given: dict[int, StorageRef] = field(default_factory=dict)
    last: Session | None = None


_state = _Global()


def _watching(device: torch.device | None = None) -> Session:
    """Return the current session; begin one without a limit if none is active."""
    session = current()
    if session is None:
        session = _begin(None, device)
    _state.last = session
    return session


# -- the budget


def set_memory_budget(
    nbytes: int | str | float | None, *, device: torch.device | str | None = None
) -> None:
    """Keep all that is allocated on the device within a budget, from now on.

    Parameters
    ----------
    nbytes
        Bytes, or text such as ``"2GiB"``, for **everything** on the device, models and inputs
        included, as published; ``None`` or infinity: no limit, but all is watched (for logs).
    device
        As for `budget`. On the CPU, whose allocator keeps no count, the level is that of the
        tensors that Python knows.

    Raises
    ------
    ValueError
        No budget, or less than what is allocated already.
    RuntimeError
        The program is within ``with rotor.dtr.budget(...)``.

    Notes
    -----
    It holds in the thread that calls. Called again, it changes the budget; what is evicted stays
    so.
    """
    if current() is not None and current() is not _state.session:
        raise RuntimeError(
            "this is within rotor.dtr.budget, which has its own limit (above the level on entry): "
            "leave it, or give it the limit that you want"
        )
    limit = None if nbytes is None or nbytes == float("inf") else parse_bytes(nbytes)
    session = _state.session
    if session is None:
        _begin(limit, device)
        return
    if device is not None and torch.device(device).type != session.device.type:
        raise RuntimeError(
            f"the budget is one of {session.device}: call rotor.dtr.unset_memory_budget() before "
            f"one of {device}"
        )
    session.set_limit(None if limit is None else _above(limit, _state.level_bytes))


def _begin(limit: int | None, device: torch.device | str | None) -> Session:
    found = torch.device(device or devices.accelerator_in_use())  # as `budget` chooses
    level_bytes = _level(found)
    context = budget(
        None if limit is None else _above(limit, level_bytes),
        heuristic="DTREqClass",
        sample=_state.sample,
        ignore_small=_state.ignore_small,
        device=found,
    )
    session = context.__enter__()
    _state.context, _state.session, _state.level_bytes = context, session, level_bytes
    _state.last = session
    _state.ordinary.clear()
    _state.given.clear()
    return session


def _above(limit: int, level_bytes: int) -> int:
    if limit <= level_bytes:
        raise ValueError(
            f"a budget of {exact_bytes(limit)} is not above the {exact_bytes(level_bytes)} that "
            "are allocated already: budgets count everything on the device (rotor.dtr.budget "
            "counts above that)"
        )
    return limit - level_bytes


def _level(device: torch.device) -> int:
    if device.type != "cpu":
        return devices.allocated_bytes(device)
    gc.collect()
    tensors = []
    with warnings.catch_warnings(action="ignore"):  # Objects that warn when they are looked at.
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                tensors += [part for part in core.strided_parts(item) if _is_on(part, device)]
    return memory.storage_bytes(tensors)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor's memory is on a device; fake tensors are on none."""
    return tensor.device == device and tensor.untyped_storage().device == device


def unset_memory_budget() -> None:
    """End what `set_memory_budget` began; what is evicted and in use is brought back.

    Times can still be asked for. A log ends. Without a budget nothing happens.

    Raises
    ------
    RuntimeError
        Modes of PyTorch that were entered after the budget are still on.
    """
    context, session = _state.context, _state.session
    if context is None or session is None:
        return
    operators, functions = dispatch.innermost_modes()
    if operators is not session or not isinstance(functions, Guard):
        raise RuntimeError(
            "modes of PyTorch were entered after set_memory_budget and are still on: leave them "
            "before unset_memory_budget()"
        )
    _state.context = _state.session = None
    _state.ordinary.clear()
    _state.given.clear()
    try:
        context.__exit__(None, None, None)
    finally:
        if _state.logged is session:
            _end_log()


@atexit.register
def _at_exit() -> None:
    with warnings.catch_warnings(action="ignore"):
        unset_memory_budget()


def toggle_sampling(is_on: bool) -> None:
    """Look at about 2 sqrt(n) of n candidates for eviction only; on at first, as published.

    It may come before `set_memory_budget` or after it; `rotor.dtr.budget` has ``sample=`` instead.

    Raises
    ------
    TypeError
        It is no bool.
    """
    _set_option("sample", is_on, "toggle_sampling")


def toggle_ignore_small_tensors(is_on: bool) -> None:
    """Never evict what is below 1 % of the mean size; on at first, as published.

    It may come before `set_memory_budget` or after it; what was passed over until then becomes a
    candidate when it is used again. `rotor.dtr.budget` has ``ignore_small=`` instead.

    Raises
    ------
    TypeError
        It is no bool.
    """
    _set_option("ignore_small", is_on, "toggle_ignore_small_tensors")


def _set_option(name: str, is_on: bool, function: str) -> None:
    setattr(_state, name, _checked(is_on, function))
    if _state.session is not None:
        _state.session.consider(sample=_state.sample, ignore_small=_state.ignore_small)


def _checked(is_on: bool, function: str) -> bool:
    if not isinstance(is_on, bool):
        raise TypeError(f"{function} takes True or False, got {is_on!r}")
    return is_on


# -- tensors


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    return list(core.strided_parts(tensor))


def is_checkpoint(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is managed: made under a budget, or given to `checkpoint`.

    A tensor and its views share this. Without a budget none is.
    """
    parts = _parts(tensor)
    session = current()
    if session is None:
        return False
    for part in parts:
        ref = session.reference(part)
        if ref is None or _state.ordinary.get(ref.key) is ref:
            return False
    return True


def checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Have a tensor managed as a source: it stays in memory, and others are computed from it.

    Without a budget the program is watched from now on without a limit, on the tensor's device,
    until `unset_memory_budget`; `set_memory_budget` may give the limit later.

    Returns
    -------
    torch.Tensor
        The tensor itself.

    Raises
    ------
    TypeError
        It is no tensor.
    ValueError
        It was given before: `try_checkpoint` accepts that.
    """
    parts = _parts(tensor)
    session = _watching(tensor.device)
    for part in parts:
        ref = session.reference(part)
        if ref is not None and _state.given.get(ref.key) is ref:
            raise ValueError(
                "the tensor is a source already: rotor.dtr.try_checkpoint accepts that"
            )
    try_checkpoint(tensor)
    session.pin(tensor)
    for part in parts:
        _note(_state.given, session.reference(part))
    return tensor


def try_checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Have a tensor managed; one that is already stays as it is, with what computes it.

    Without a budget it does as `checkpoint` does.
    """
    parts = _parts(tensor)
    session = _watching(tensor.device)
    for part in parts:
        session.manage(part)
        ref = session.reference(part)
        if ref is not None:
            _state.ordinary.pop(ref.key, None)
    return tensor


def _note(refs: dict[int, StorageRef], ref: StorageRef | None) -> None:
    if ref is not None:
        refs[ref.key] = ref
    if len(refs) & (len(refs) - 1):
        return
    for key in [key for key, known in refs.items() if known() is None]:
        del refs[key]


def decheckpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Have a tensor ordinary again: in memory for good. One that is not managed stays as it is.

    Returns
    -------
    torch.Tensor
        The tensor itself; its values are in memory for all readers, outside PyTorch too.
    """
    parts = _parts(tensor)
    session = current()
    if session is not None and is_checkpoint(tensor):
        session.pin(tensor)
        for part in parts:
            ref = session.reference(part)
            _note(_state.ordinary, ref)
            if ref is not None:
                _state.given.pop(ref.key, None)
    return tensor


def uncheckpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a managed tensor in memory, as `decheckpoint` does.

    Raises
    ------
    TypeError
        It is no tensor.
    ValueError
        It is not managed.
    """
    if not is_checkpoint(tensor):
        raise ValueError(
            "the tensor is not managed: expected one that was made under a budget or given to "
            "rotor.dtr.checkpoint; rotor.dtr.decheckpoint accepts others too"
        )
    return decheckpoint(tensor)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a tensor again if need be, and keep it in memory for good.

    For reads that bypass the dispatcher: other threads, extensions. Without a
    budget nothing happens.
    """
    _parts(tensor)
    session = current()
    if session is not None:
        session.pin(tensor)
    return tensor


def clear_checkpointpool() -> None:
    """Compute again everything that is evicted and in use, and keep all that is in use for good.

    Without a budget nothing happens.

    Raises
    ------
    BudgetError
        It does not fit.
    """
    session = current()
    if session is not None:
        session.pin_all()


# -- logs


def new_log(path: str | os.PathLike[str] | Any) -> None:
    """Write a log of the program from now on; one that was begun before ends.

    What is in memory already is a constant of it. It ends with the budget, or a new log. Without a
    budget the program is watched without a limit, as by `checkpoint`.

    Parameters
    ----------
    path
        Of the file (``.gz``: compressed), or a file open in binary mode.

    Raises
    ------
    RuntimeError
        The context of the budget writes a log already (``record_log``).
    """
    session = _watching()
    if session.observer is not None and session.observer is not _state.log:
        raise RuntimeError("the context writes a log already: leave record_log= out")
    writer = LogWriter(path)
    _end_log()
    _state.log, _state.logged = ProgramLog(writer, session.bytes_of), session
    session.observer = _state.log


def _end_log() -> None:
    log, session = _state.log, _state.logged
    _state.log = _state.logged = None
    if session is not None and session.observer is log:
        session.observer = None
    if log is not None:
        log.close()


def _log() -> ProgramLog | None:
    session = current()
    log = None if session is None else session.observer
    return log if isinstance(log, ProgramLog) else None


def annotate_log(text: str) -> None:
    """Write a note to the log; where none is written, do nothing, as published.

    After ``"START"`` what is in memory is a constant.
    """
    log = _log()
    if log is not None:
        log.annotate(text)


def toggle_log(is_on: bool) -> None:
    """Stop writing the log for a while, or go on: what was made in between is a constant then.

    Raises
    ------
    RuntimeError
        No log is being written.
    TypeError
        It is no bool.
    """
    _checked(is_on, "toggle_log")
    log = _log()
    if log is not None:
        log.is_on = is_on
    elif is_on:
        raise RuntimeError("no log to go on with: call rotor.dtr.new_log(path) first")


# -- times


def _stats() -> Stats:
    session = current() or _state.last
    return Stats() if session is None else session.stats


def toggle_profile(is_on: bool) -> None:
    """Accept what published programs ask for: times are taken always, so nothing changes.

    Raises
    ------
    TypeError
        It is no bool.
    """
    _checked(is_on, "toggle_profile")


def reset_profile() -> None:
    """Set all times to zero: of the budget that holds, or else held last."""
    session = current() or _state.last
    if session is not None:
        session.reset_profile()


def base_compute_time() -> int:
    """Time in the program's operators, ns; of the budget that holds, or held last; else 0."""
    return _stats().base_ns


def remat_compute_time() -> int:
    """Time in operators that ran again, ns."""
    return _stats().remat_ns


def compute_time() -> int:
    """Time in all operators, ns."""
    stats = _stats()
    return stats.base_ns + stats.remat_ns


def search_time() -> int:
    """Time of making room: choosing what to evict, and evicting it, ns."""
    return _stats().search_ns


def cost_time() -> int:
    """Return the part of `search_time` that went into choosing, ns."""
    return _stats().cost_ns


def loop_time() -> int:
    """Return the rest of `search_time`, ns."""
    stats = _stats()
    return stats.search_ns - stats.cost_ns


# -- where published programs call them


def _installed() -> dict[str, tuple[Any, Any]]:
    """Return each function by name, with the owner that it has in the prototype."""
    names = [name for name in __all__ if name not in ("install", "uninstall")]
    return {n: (torch.Tensor if n in _METHODS else torch, globals()[n]) for n in names}


def install() -> None:
    """Put the functions where published programs call them, until `uninstall`.

    ``checkpoint``, ``try_checkpoint``, ``decheckpoint``, ``uncheckpoint``, ``is_checkpoint`` and
    ``pin`` become methods of `torch.Tensor`, all others functions of `torch`.

    Raises
    ------
    RuntimeError
        PyTorch, or another package, has one of the names.
    """
    found = _installed()
    taken = [
        f"{owner.__name__}.{name}"
        for name, (owner, function) in found.items()
        if getattr(owner, name, function) is not function
    ]
    if taken:
        raise RuntimeError(
            f"{', '.join(taken)} exists already: call the functions by their names in rotor.dtr"
        )
    for name, (owner, function) in found.items():
        setattr(owner, name, function)


def uninstall() -> None:
    """Take away what `install` has put in place."""
    for name, (owner, function) in _installed().items():
        if getattr(owner, name, None) is function:
            delattr(owner, name)
