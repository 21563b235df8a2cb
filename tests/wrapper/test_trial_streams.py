"""What a forward writes, or warns of, comes once in each step, and never from a trial."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rotor
from rotor.common.undisturbed import Untriable, trial

pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")

WIDTH = 32
Write = Callable[[Any], Any]
LOG: Any = None


class Writes(nn.Module):
    """Layers, each of which writes a line."""

    def __init__(self, log: Any, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.log, self.write = log, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.write(self.log)
        return x


def written(log: Any, made: Any, write: Write, read: Callable[[], Any], engine: str | None) -> Any:
    """What has been written after each of three steps."""
    model: Any = Writes(made, write)
    if engine:
        model = rotor.Checkpointable(model, engine=engine, mem_limit="60 KB")
    found = []
    for _ in range(3):
        model(torch.ones(64, WIDTH)).square().mean().backward()
        log.flush()
        found.append(read())
    return found


def write_text(log: Any) -> None:
    log.write("a line\n")


def write_lines(log: Any) -> None:
    log.writelines(["a line\n", "another\n"])


def print_it(log: Any) -> None:
    print("a line", file=log)


def write_global(log: Any) -> None:
    LOG.write("a line\n")


def write_row(log: Any) -> None:
    log.writerow([1, "a line"])


def write_bytes(log: Any) -> None:
    log.write(b"a line\n")


def call(log: Any) -> None:
    log("a line\n")


KINDS: dict[str, tuple[str, Callable[[Any], Any], Write]] = {
    "written": ("w", lambda f: f, write_text),
    "appended": ("a", lambda f: f, write_text),
    "changed": ("w+", lambda f: f, write_text),
    "binary": ("wb", lambda f: f, write_bytes),
    "lines": ("w", lambda f: f, write_lines),
    "printed": ("w", lambda f: f, print_it),
    "table": ("w", csv.writer, write_row),
    "bound": ("a", lambda f: f.write, call),
    "global": ("w", lambda f: None, write_global),
}


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_files(tmp_path, monkeypatch, kind, engine):
    mode, make, write = KINDS[kind]

    def found(engine: str | None) -> Any:
        path = tmp_path / f"{engine}"
        with path.open(mode) as log:
            monkeypatch.setitem(globals(), "LOG", log)
            return written(log, make(log), write, path.read_bytes, engine)

    assert found(engine) == found(None)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_in_memory(monkeypatch, kind):
    mode, make, write = KINDS[kind]

    def found(engine: str | None) -> Any:
        log = io.BytesIO() if mode == "wb" else io.StringIO()
        monkeypatch.setitem(globals(), "LOG", log)
        return written(log, make(log), write, log.getvalue, engine)

    assert found("auto") == found(None)


@pytest.mark.parametrize("redirects", [True, False])
def test_standard_output(capsys, redirects):
    def found(engine: str | None) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) if redirects else contextlib.nullcontext():
            out: Any = sys.stdout
            read = out.getvalue if redirects else lambda: capsys.readouterr().out
            return written(out, None, lambda _: sys.stdout.write("a line\n"), read, engine)

    assert found("auto") == found(None)


def test_streams_that_cannot_be_set_back(tmp_path):
    def found(engine: str | None) -> Any:
        path = tmp_path / f"{engine}.gz"
        with gzip.open(path, "wt") as log:
            written(log, log, write_text, lambda: None, engine)
        return gzip.decompress(path.read_bytes())

    assert found("auto") == found(None)
    with gzip.open(tmp_path / "other", "wt") as log:
        model = Writes(log, write_text)
        with pytest.raises(Untriable, match=r"the model\.log is a stream"):
            trial(model, (), torch.device("cpu")).__enter__()


def test_a_pipe_gets_nothing_of_a_trial():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb") as log:
        model = Writes(log, write_bytes)
        log.write(b"before ")
        with trial(model, (), torch.device("cpu")):
            model(torch.ones(2, WIDTH))
            log.flush()
        log.write(b"after")
        log.close()
        assert pipe.read() == b"before after"


class Warns(nn.Linear):
    """A layer that warns of itself, and has PyTorch warn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("of a layer", stacklevel=1)
        y = torch.tanh(super().forward(x))
        return y + nn.functional.l1_loss(y.detach()[:1], y.detach()[:2])


def warned(engine: str | None, action: Any) -> list[list[str]]:
    """What the forwards of three steps have warned of."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Warns(WIDTH, WIDTH) for _ in range(4)])
    if engine:
        model = rotor.Checkpointable(model, engine=engine, mem_limit="60 KB", verbosity=0)
    found = []
    for module in (sys.modules[__name__], nn.functional):
        vars(module).pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(action)
        for _ in range(3):
            said.clear()
            y = model(torch.ones(64, WIDTH))
            texts = [str(one.message)[:20] for one in said if one.category is UserWarning]
            found.append(texts)
            y.square().mean().backward()
    return found


@pytest.mark.parametrize("action", ["always", "default"])
def test_warnings(action):
    assert warned("chain", action) == warned(None, action)


def test_a_trial_in_which_warnings_are_errors_runs():
    def fails(engine: str | None) -> None:
        with pytest.raises(UserWarning, match="of a layer"):
            warned(engine, "error")

    fails(None)
    fails("chain")
    model = nn.Sequential(Warns(WIDTH, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trial(model, (), torch.device("cpu")):
            model(torch.ones(2, WIDTH))
        with pytest.raises(UserWarning, match="of a layer"):
            model(torch.ones(2, WIDTH))
