"""Frames of the caller's code: lines that warnings point at, and tracebacks without our frames."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, ClassVar

import torch
from torch import nn

from rotor._pytorch import dispatch
from rotor.errors import InfeasibleError

FULL = "ROTOR_FULL_TRACEBACK"
"""Environment variable that keeps tracebacks whole."""

_ROTOR = str(Path(__file__).parents[1]) + os.sep
_MODELS = str(Path(__file__).parents[1] / "models") + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODULES = str(Path(nn.modules.__file__).parent) + os.sep
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep
_NAMES = "accelerate lightning lightning_fabric peft pytorch_lightning transformers"
_FRAMEWORKS = tuple(_PACKAGES + name + os.sep for name in _NAMES.split())


def _is_ours(code: CodeType) -> bool:
    name = code.co_filename
    is_rotor = name.startswith(_ROTOR) and not name.startswith(_MODELS)
    return is_rotor or name.startswith("<rotor ")


def _is_library(code: CodeType) -> bool:
    """Return whether code belongs to Python, PyTorch, or a framework that calls the caller's."""
    name = code.co_filename
    if name.startswith((_TORCH, *_FRAMEWORKS)) or name.startswith("<"):
        return True
    return name.startswith(_STANDARD) and not name.startswith(_PACKAGES)


def is_raised_by_caller(error: BaseException) -> bool:
    """Return whether the caller's own code raised an error, not a library that it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    return code is not None and not (_is_ours(code) or _is_library(code))


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line of the caller's own code: the innermost one outside of libraries.

    Where stderr is closed, as in a daemon, nothing is shown.
    """
    frame, level, found = sys._getframe(1), 2, 2
    while frame is not None:
        if not (_is_ours(frame.f_code) or _is_library(frame.f_code)):
            found = level
            break
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    with contextlib.suppress(ValueError):
        warnings.warn(text, category, stacklevel=found)


def reported(error: BaseException) -> str:
    """Return the line that a report of a defect should have: versions, type and place."""
    trace = error.__traceback__
    where = "no line"
    while trace is not None:
        if _is_ours(trace.tb_frame.f_code) or trace.tb_next is None:
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        "If plain PyTorch runs this, please report this line: "
        f"rotor {sys.modules['rotor'].__version__}, PyTorch {torch.__version__}, Python {python}, "
        f"{type(error).__name__} at {where}"
    )


def fold(error: BaseException) -> None:
    """Take our frames out of the traceback of an error in the caller's model.

    The frame that raised stays, and so does the first one; the others lose their variables. An
    error in our own code that no frame of the model has led to keeps all frames, unless it is an
    `InfeasibleError`.
    """
    first = error.__traceback__
    if first is None or os.environ.get(FULL):
        return
    inner: list[TracebackType] = []
    trace = first.tb_next
    while trace is not None:
        inner.append(trace)
        trace = trace.tb_next
    model = [k for k, trace in enumerate(inner) if _is_of_model(trace.tb_frame.f_code)]
    if not model and not isinstance(error, InfeasibleError):
        return
    begin = model[0] if model else len(inner)
    last = first
    for k, trace in enumerate(inner):
        is_ours = _is_ours(trace.tb_frame.f_code)
        if k + 1 == len(inner) or not (is_ours or (k < begin and _is_hidden(trace))):
            last.tb_next = last = trace
        elif is_ours:
            # A frame whose variable refers to the error would keep all frames, and their tensors.
            with contextlib.suppress(RuntimeError):  # A frame that still runs.
                trace.tb_frame.clear()
    last.tb_next = None


def _is_of_model(code: CodeType) -> bool:
    """Return whether code is the forward of a module, or else of the caller."""
    if _is_ours(code):
        return False
    if code.co_filename.startswith(_TORCH):
        return code.co_filename.startswith(_MODULES) and code.co_name == "forward"
    return not _is_library(code)


def _is_hidden(trace: TracebackType) -> bool:
    """Return whether a frame between ours and the model's says nothing about the model."""
    name = trace.tb_frame.f_code.co_filename
    return name.startswith(_TORCH) and not name.startswith(_MODULES)


def release(error: BaseException) -> None:
    """Drop the variables in the frames of an error, and of those that led to it.

    An error that a caller of ours is handling stays as it is.
    """
    running = [frame for frame, _ in traceback.walk_stack(None) if not _is_ours(frame.f_code)]
    waiting: list[BaseException | None] = [error]
    # Guards of PyTorch that a failed capture leaves in its frames end here, out of order.
    with dispatch.keys_kept():
        while waiting:
            this = waiting.pop()
            trace = None if this is None else this.__traceback__
            if this is not None and trace is not None and trace.tb_frame not in running:
                traceback.clear_frames(trace)
                this.__traceback__ = None
                waiting += [this.__cause__, this.__context__]


class WithoutCounterpart:
    """Published class that rotor has no counterpart of: making one raises NotImplementedError."""

    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"rotor has no counterpart of the published {type(self).__name__}: {self.instead}"
        )


def warn_of_ignored(name: str, options: Iterable[str], reason: str) -> None:
    """Warn of published options that have no effect, if any are given."""
    ignored = ", ".join(sorted(options))
    if ignored:
        text = f"{name} takes these published options, and they have no effect: {ignored}. {reason}"
        warn_caller(text, UserWarning)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, and does not keep its object."""
    owned: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = owned()
        assert found is not None
        return found(*args, **kwargs)

    return call
