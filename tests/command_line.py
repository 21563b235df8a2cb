"""Commands run in this process, in a folder with a file of Python of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotor.commands.main import main


@contextmanager
def folder_with(name: str, text: str, tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Make a folder with a file the current one; forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / name).write_text(text, encoding="utf-8")
    yield tmp_path
    sys.modules.pop(f"rotor_factory_{Path(name).stem}", None)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command."""
    _forget_modules()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def data_of(capsys, *arguments: object) -> dict:
    """Return the JSON that a command prints; it must succeed, and print nothing else."""
    code, out, err = run(capsys, *arguments, "--json", "--quiet")
    assert (code, err) == (0, "")
    return json.loads(out)


def _forget_modules() -> None:
    """Have Dynamo look up the modules of the script to run: it knows those of an earlier one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("rotor."):
            for alias in [key for key in vars(module) if key.startswith("__import_")]:
                del vars(module)[alias]
        elif name == "torch._dynamo.symbolic_convert":
            module._import_module.cache_clear()
