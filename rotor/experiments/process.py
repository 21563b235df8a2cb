"""One input of an experiment in a process of its own: watched, ended when silent, tried again."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

__all__ = ["WORKER", "Failure", "Limits", "ask", "describe"]

_WAITING = {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait busily for each other take 20 times as long where others run beside them."""

WORKER = (sys.executable, "-P", "-m", "rotor.experiments.worker")
"""The command whose process serves one request."""

_DESCRIBE_SECONDS = 300.0
_MOST_STDERR = 2000
_SILENT, _CRASHED = "Silent", "Crashed"


class Failure(RuntimeError):
    """A request had no answer.

    Parameters
    ----------
    kind
        "Silent", "Crashed", "Timeout", or the name of the exception in the process.
    message
        Text of the error.
    traceback
        Of the exception, or what the process last wrote to stderr.
    """

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.retries: list[str] = []

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Limits:
    """Time limits of an answer.

    Attributes
    ----------
    timeout
        Seconds in all, attempts together.
    attempt_timeout
        Seconds without a sign of life after which an attempt is ended.
    max_retries
        Attempts after the first.
    retry_on_error
        True if an exception in the process is tried again, like silence and crashes.
    """

    timeout: float
    attempt_timeout: float
    max_retries: int
    retry_on_error: bool


@dataclass
class Answer:
    """Events of the last attempt, and the failures of the attempts before."""

    events: list[dict[str, Any]]
    retries: list[str] = field(default_factory=list)


def describe(device: str, worker: Sequence[str]) -> dict[str, Any]:
    """Return the facts that a run on a device depends on: models, versions, the device's name.

    Raises
    ------
    ValueError
        The device does not exist, or PyTorch is not installed; the message says which.
    """
    limits = Limits(_DESCRIBE_SECONDS, _DESCRIBE_SECONDS, 0, False)
    try:
        answer = ask({"request": "describe", "device": device}, limits, worker=worker)
    except Failure as failure:
        lines = failure.traceback.strip().splitlines() if failure.kind == _CRASHED else []
        last = f"; its last words: {lines[-1]}" if lines else ""
        raise ValueError(f"experiments cannot run here: {failure}{last}") from failure
    return answer.events[-1]


def ask(
    request: Mapping[str, Any],
    limits: Limits,
    *,
    worker: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Serve a request in a fresh process, again where it fails.

    Parameters
    ----------
    request
        JSON data, written to the process's stdin.
    limits
        Of time and attempts.
    worker
        The command. It writes events, a line of JSON each, to stdout; the last one is "done",
        "described" or "error".
    environment
        Added to this process's.

    Returns
    -------
    Answer
        Events of the worker, and the number of repeated attempts.

    Raises
    ------
    Failure
        Failure of the last attempt; its ``retries`` are the attempts before.
    """
    deadline = time.monotonic() + limits.timeout
    retries: list[str] = []
    while True:
        try:
            events = _attempt(request, limits, deadline, worker, environment)
            return Answer(events, retries)
        except Failure as failure:
            again = failure.kind in (_SILENT, _CRASHED) or (
                limits.retry_on_error and failure.kind != "Timeout"
            )
            if not again or len(retries) >= limits.max_retries:
                failure.retries = retries
                raise
            retries.append(str(failure))


def _attempt(
    request: Mapping[str, Any],
    limits: Limits,
    deadline: float,
    worker: Sequence[str],
    environment: Mapping[str, str] | None,
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryFile() as stderr, _process(worker, stderr, environment) as process:
        lines = _lines(process)
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        while True:
            left = deadline - time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, min(left, limits.attempt_timeout)))
            except queue.Empty:
                if deadline - time.monotonic() <= 0:
                    text = f"not done within {limits.timeout:g} s"
                    raise Failure("Timeout", f"{text}, {_progress(events)}") from None
                text = f"no sign of life for {limits.attempt_timeout:g} s"
                raise Failure(_SILENT, f"{text}, {_progress(events)}") from None
            if line is None:
                code = process.wait()
                raise Failure(_CRASHED, f"{_exit(code)}, {_progress(events)}", _last(stderr))
            event = json.loads(line)
            if event["event"] == "error":
                raise Failure(event["error"], event["message"], event["traceback"])
            events.append(event)
            if event["event"] in ("done", "described"):
                return events


@contextlib.contextmanager
def _process(
    worker: Sequence[str], stderr: IO[bytes], environment: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in its own group, and end the whole group on exit."""
    process = subprocess.Popen(
        worker,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=_WAITING | os.environ | dict(environment or {}),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def _lines(process: subprocess.Popen[bytes]) -> queue.Queue[bytes | None]:
    """Return the lines of a process's stdout, then None, read by a thread that closes it."""
    found: queue.Queue[bytes | None] = queue.Queue()
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        with stream:
            for line in stream:
                found.put(line)
        found.put(None)

    threading.Thread(target=read, name="rotor-worker", daemon=True).start()
    return found


def _progress(events: Sequence[Mapping[str, Any]]) -> str:
    return f"last heard: {events[-1]['event']}" if events else "nothing was heard"


def _exit(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before it was done"


def _last(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _MOST_STDERR))
    return stderr.read().decode(errors="replace")
