"""Entering and leaving a budget."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, BinaryIO

import torch

from rotor import _core
from rotor._pytorch import devices, dispatch
from rotor._pytorch.pointers import Place
from rotor.common.frames import warn_caller
from rotor.dtr.guard import Guard
from rotor.dtr.log import ProgramLog
from rotor.dtr.recall import Observer
from rotor.dtr.runtime import Session
from rotor.dtr.storages import Store
from rotor.errors import BudgetError, MemoryLimitWarning
from rotor.meter.room import step_limit
from rotor.simrd.log_writer import LogWriter
from rotor.units import parse_bytes

_left = threading.Condition()
_PATIENCE = 60.0
"""Seconds that a thread waits for the budget of another one: guards are set for all threads."""
_NESTED = (
    "a budget holds already, and they do not nest: leave the one before, or change its limit; wrap "
    "the outermost model only, and do not use it within rotor.dtr.budget"
)


class Unfollowed(RuntimeError):
    """Code that a budget does not follow: compiled functions, reentrant checkpoints."""


class _Entry:
    """A session that a thread has entered, and what was in the places that it has taken."""

    def __init__(self, session: Session) -> None:
        self.thread = threading.get_ident()
        self._session = weakref.ref(session)
        self._before: list[Place] = []

    @property
    def session(self) -> Session | None:
        """The session, ``None`` once it has ended, whatever an interrupt kept from being undone."""
        session = self._session()
        return session if session is not None and session.handler.is_open else None

    def take(self, places: Iterable[Place]) -> None:
        """Put values in places, until `leave`."""
        for home, name, value in places:
            self._before.append((home, name, getattr(home, name)))
            setattr(home, name, value)

    def leave(self) -> None:
        """Undo what was begun; where an interrupt comes between, the next entry does."""
        global _entry
        with _left:
            if _entry is self:
                for home, name, value in reversed(self._before):
                    setattr(home, name, value)
                _entry = None
                _left.notify_all()


_entry: _Entry | None = None


def current() -> Session | None:
    """Return the session that this thread runs in, ``None`` outside."""
    entry = _entry
    return entry.session if entry is not None and entry.thread == threading.get_ident() else None


def _is_left() -> bool:
    return _entry is None or _entry.session is None


@contextmanager
def _entered(session: Session) -> Iterator[_Entry]:
    """Make a session the current one; wait for that of another thread."""
    global _entry
    entry = _Entry(session)
    try:
        with _left:
            if current() is not None or not _left.wait_for(_is_left, _PATIENCE):
                raise RuntimeError(_NESTED)
            if _entry is not None:
                _entry.leave()
            _entry = entry
        yield entry
    finally:
        entry.leave()


def _bytes_of_limit(limit: int | str | float | None) -> int | None:
    if limit is None or (isinstance(limit, float) and math.isinf(limit) and limit > 0):
        return None
    return parse_bytes(limit)


def check_heuristic(name: object) -> None:
    """Raise ValueError if a name is that of no heuristic of the C core."""
    if name not in [known for known, _ in _core.heuristics()]:
        raise ValueError(
            f"unknown heuristic {name!r}, expected a name of rotor.simrd.heuristics.names(), such "
            "as DTR or LRU"
        )


@contextmanager
def budget(
    limit: int | str | float | None = None,
    *,
    heuristic: str = "DTRAncestors",
    seed: int = 0,
    strict: bool = True,
    sample: bool = False,
    ignore_small: bool = False,
    guard: bool = True,
    record_log: Observer | str | os.PathLike[str] | BinaryIO | None = None,
    storage_swap: bool | None = None,
    device: torch.device | str | None = None,
    verify: str = "off",
    offload: Store | None = None,
    total_limit: int | str | None = None,
) -> Iterator[Session]:
    """Run a program with at most so much memory above the level on entry.

    Every operator within the context is watched. Results that can be computed again are evicted
    when memory gets short, and computed again when they are read. Values, gradients, buffers and
    random numbers equal those of the plain program bit for bit.

    Parameters
    ----------
    limit
        Bytes, or text such as ``"2GiB"``, that may be allocated on the device above what was
        allocated on entry; ``None`` or infinity: no limit.
    total_limit
        Most bytes of the process on the device, as for `rotor.Checkpointable`: the limit is what
        is left of it on entry, less the states that optimizers will make.
    heuristic
        Heuristic that chooses what to evict, by its name in `rotor.simrd.heuristics`. "DTREqClass"
        is the published default.
    seed
        Seed of heuristics that draw random numbers, and of `sample`.
    strict
        Raise `BudgetError` before an operator that cannot be made to fit; otherwise warn, count
        (``stats.overflows``) and go on.
    sample
        Look at about 2 sqrt(n) of n candidates only.
    ignore_small
        Never evict what is below 1 % of the mean size.
    guard
        Watch reads that no operator makes, such as ``tensor.numpy()``.
    record_log
        Path (``.gz``: compressed) or binary file of a log that `rotor.simrd` replays. Or an
        `Observer`, which is called at every event.
    storage_swap
        True: storages exchange their bytes (PyTorch 2.13). False: they are resized and copied. The
        default is the best that this PyTorch supports.
    device
        Device whose memory is limited; the accelerator where one is in use, else the CPU.
    offload
        Second tier of memory, `rotor.tier.TierStore`: what takes less time to fetch than to compute
        again moves there, and so may what cannot be computed again.
    verify
        "always": compare checksums of all bits when something is computed again; "off".

    Yields
    ------
    Session
        With figures in `Session.stats`.

    Raises
    ------
    BudgetError
        The program cannot go on in the budget; the message has the smallest that suffices.
    RecomputationError
        A recomputed value differs from the first one (``verify="always"``).
    ValueError
        An argument is not as described.
    RuntimeError
        A budget is active already, or a function is being compiled.

    Warns
    -----
    MemoryLimitWarning
        The budget could not be kept, or cannot be promised.

    Notes
    -----
    Evicted results that are still in use when the context is left are brought back. Functions that
    ``torch.compile`` compiled before run uncompiled within the context.

    References
    ----------
    Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021.

    Examples
    --------
    >>> with rotor.dtr.budget("500MiB") as session:  # doctest: +SKIP
    ...     loss = model(x).sum()
    ...     loss.backward()
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "rotor.dtr.budget cannot be entered in a function that is compiled: compile less, or "
            "use rotor.Checkpointable, whose graph engine plans compiled models"
        )
    found = devices.accelerator_in_use() if device is None else devices.known(device)
    if verify not in ("always", "off"):
        raise ValueError(f'verify={verify!r}, expected "always" or "off"')
    if current() is not None:
        raise RuntimeError(_NESTED)
    check_heuristic(heuristic)
    most = _bytes_of_limit(limit)
    session = Session(
        most if total_limit is None else step_limit(found, most, total_limit),
        heuristic=heuristic,
        seed=seed,
        strict=strict,
        sample=sample,
        ignore_small=ignore_small,
        storage_swap=storage_swap,
        device=found,
        observer=None,
        verify=verify == "always",
        offload=offload,
    )
    session.observer = _observer_of(record_log, session)
    session.count_slack()
    failed = True
    try:
        with running(session, guard=guard):
            yield session
        failed = False
    finally:
        last, session.observer = session.observer, None
        try:
            session.close(warn=not failed)
        finally:
            if isinstance(last, ProgramLog) and last is not record_log:
                last.close()


def _observer_of(
    record_log: Observer | str | os.PathLike[str] | BinaryIO | None, session: Session
) -> Observer | None:
    if record_log is None or hasattr(record_log, "operation"):
        return record_log  # type: ignore[return-value]
    return ProgramLog(LogWriter(record_log), session.bytes_of)


def _uncompiled() -> Place:
    """Return what leaves functions uncompiled: their kernels would read what is evicted."""

    def leave(model: Any = None, **_: Any) -> Any:
        """Return the model uncompiled (`torch.compile`)."""
        if sys._getframe(1).f_globals["__name__"].startswith("torch._higher_order_ops"):
            raise Unfollowed(
                "an operator that compiles its functions (torch.cond, while_loop, scan, map) "
                "within rotor.dtr.budget: compiled kernels would read what is evicted. Write it "
                "as Python's if or for, or leave it to the graph engine of rotor.Checkpointable"
            )
        warn_caller(
            "torch.compile within rotor.dtr.budget: compiled kernels would read what is evicted, "
            "so the function is left as it is written, after the budget too. Compile it before, "
            "for use outside, or use rotor.Checkpointable",
            MemoryLimitWarning,
        )
        return (lambda function: function) if model is None else model

    return torch, "compile", leave


def _states_counted(session: Session) -> list[Place]:
    """Return what counts copies of the CPU generator's state that code takes (``fork_rng``)."""
    original, known = torch.get_rng_state, weakref.ref(session)

    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        # Dynamo, first imported in such a context, keeps this function.
        here = current()
        return original() if here is None or here is not known() else here.copied_state(original)

    return [(home, "get_rng_state", get_rng_state) for home in (torch, torch.random)]


def _forced_eager() -> AbstractContextManager[object]:
    """Return a context in which what was compiled before runs uncompiled."""
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


@contextmanager
def running(
    session: Session, *, guard: bool = True, places: Iterable[Place] = ()
) -> Iterator[None]:
    """Enter a session that may be entered again, and places; it is not closed in the end."""
    mode = Guard(session) if guard else nullcontext()
    try:
        with _entered(session) as entry:
            entry.take([_uncompiled(), *_states_counted(session), *places])
            if isinstance(mode, Guard):
                entry.take(mode.places)
            with dispatch.layouts_unseen(), _forced_eager(), mode, session.paths, session:
                yield
    except RuntimeError as error:
        # The interpreter of scripts puts an error of its own in the place of any other.
        if session.refused is None or "TorchScript interpreter" not in str(error):
            raise
        raise BudgetError(*session.refused) from None
