"""Silence of trials: what their code prints, logs, warns of or writes to files is dropped.

The descriptor of a file leads to the null device meanwhile, whichever object writes to it, so that
files opened for appending, and pipes, stay as they were.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from rotor.errors import MemoryLimitWarning

_HEARD = ("rotor", "torch")
"""Loggers whose messages stay, for they hold for the user's steps too."""
_FILES: Any = io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom | io.FileIO


def is_file(stream: Any) -> bool:
    """Return whether a stream is an open file, with nothing but buffers in between, to write to."""
    while isinstance(stream, _FILES):
        if stream.closed or not stream.writable():
            return False
        if isinstance(stream, io.FileIO):
            return True
        stream = stream.buffer if isinstance(stream, io.TextIOWrapper) else stream.raw
    return False


class _Unheard:
    """Standard stream that drops what one thread writes.

    Other threads write to `stream`, and so does rotor itself.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> Any:
        """Write, unless the thread is the one that made this."""
        writer = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if writer in ("warnings", "rotor") or threading.get_ident() != self._thread:
            return self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def silence(files: Iterable[Any]) -> Iterator[None]:
    """Drop what this thread prints or logs in the context, and all that is written to files.

    Warnings, which the user's own forward shows, are dropped too, and show up there all the same.
    """
    with ExitStack() as stack:
        stack.enter_context(_unlogged())
        stack.enter_context(_unwarned())
        for file in files:
            stack.enter_context(_unwritten(file))
        standard = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        unheard = {name: _Unheard(stream) for name, stream in standard.items() if stream}
        vars(sys).update(unheard)
        try:
            yield
        finally:
            for name, stream in unheard.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, standard[name])


@contextmanager
def _unlogged() -> Iterator[None]:
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.name.partition(".")[0] in _HEARD

    known = vars(logging)["_handlerList"]  # A filter of a logger sees nothing of its children's.
    handlers = [handler for reference in known if (handler := reference())]
    for handler in handlers:
        handler.addFilter(is_heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_heard)


@contextmanager
def _unwarned() -> Iterator[None]:
    is_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        filters: Any = warnings.filters
        known = [f for f in filters if issubclass(MemoryLimitWarning, f[2])]
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", MemoryLimitWarning)
        filters[:0] = [(*f[:2], MemoryLimitWarning, *f[3:]) for f in known]
        # What PyTorch warns of once in a process has not been warned of.
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(is_always)


@contextmanager
def _unwritten(file: Any) -> Iterator[None]:
    file.flush()
    number, position = file.fileno(), file.tell() if file.seekable() else None
    is_inherited, kept = os.get_inheritable(number), os.dup(number)
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, number, is_inherited)
        os.close(nowhere)
        yield
    finally:
        if not file.closed:
            file.flush()
            os.dup2(kept, number, is_inherited)
            if position is not None:
                file.seek(position)
        os.close(kept)
