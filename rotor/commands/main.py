"""The command line: ``rotor COMMAND``, which is ``python -m rotor COMMAND``.

Exit codes: 0 for success; 1 for a failure, such as a simulation that ran out of memory; 2 for
a wrong command line, an input that cannot be read or a limit that is too small, with one line on
stderr; 130 for an interruption. Only commands on models need PyTorch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import rotor
from rotor.commands import (
    HelpFormatter,
    check,
    check_folders,
    curve,
    examples,
    experiment,
    fit,
    info,
    measure,
    plan,
    recover,
    report,
    run,
    simulate,
    write_stderr,
)
from rotor.errors import InfeasibleError

__all__ = ["main"]

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_MODULES = (info, check, run, measure, curve, plan, fit, report, recover, simulate, experiment)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Parameters
    ----------
    argv
        The arguments, without the program's name; those of the process by default.

    Returns
    -------
    int
        The exit code: 0, 1 or 2 (docs/command-line.md).
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else _USAGE
    if getattr(arguments, "is_script", False):
        return _run_script(arguments)
    with warnings.catch_warnings(), _announced(arguments), _open_stdout():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show_warning
        try:
            check_folders(arguments)
            if "check" in arguments:
                arguments.check(arguments)
            command: Callable[[argparse.Namespace], int] = arguments.command
            code = command(arguments)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            kept = "; finished parts of an experiment are kept" if "experiment" in arguments else ""
            _complain(f"interrupted{kept}")
            return _INTERRUPTED
        except BrokenPipeError:
            # The reader of stdout has gone; buffered text must not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _FAILED
        except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
            if arguments.room is not None and isinstance(error, InfeasibleError):
                arguments.room.explain(error)
            _report(arguments, f"error: {_line(error)}")
            return _USAGE
        except Exception as error:
            shown = "" if arguments.debug else " (--debug shows where)"
            _report(arguments, f"failed: {type(error).__name__}: {_line(error)}{shown}")
            return _FAILED


@contextmanager
def _open_stdout() -> Iterator[None]:
    """Lose what is written to stdout in the context, if that is closed."""
    if sys.stdout is not None:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _run_script(arguments: argparse.Namespace) -> int:
    """Run a script, whose warnings and errors are its own."""
    try:
        check_folders(arguments)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except KeyboardInterrupt:
        _complain("interrupted")
        return _INTERRUPTED
    except (ImportError, OSError, TypeError, ValueError) as error:
        _report(arguments, f"error: {_line(error)}")
        return _USAGE


def _report(arguments: argparse.Namespace, text: str) -> None:
    if arguments.debug:
        traceback.print_exc()
    _complain(text)


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return " ".join(text.split()) or type(error).__name__


def _complain(text: str) -> None:
    write_stderr(f"rotor: {text}\n")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _complain(f"warning: {' '.join(str(message).split())}")


class _Lines(logging.Handler):
    """Handler that writes log records as lines on the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        _complain(record.getMessage().removeprefix("rotor: "))


@contextmanager
def _announced(arguments: argparse.Namespace) -> Iterator[None]:
    """Write the progress of a command on a model to stderr, unless it is to be quiet."""
    if arguments.quiet or not getattr(arguments, "announce", False):
        yield
        return
    logger, handler = logging.getLogger("rotor"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, and keeps the lines of examples."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**({"formatter_class": HelpFormatter} | settings))

    def error(self, message: str) -> NoReturn:
        if message.endswith(" required: LOG"):
            message += ", before the options"
        self.exit(_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rotor",
        description="Train PyTorch models in a given number of bytes: rotor plans which results of "
        "a step are kept, dropped and computed again, so that it stays within a limit. Out of "
        "memory? `curve` shows the step time under each limit, `fit` the batch that fits, `plan` "
        "the plan itself. A model is named by the function that makes it, FILE.py:FUNCTION, and an "
        "input by its shape. `rotor COMMAND --help` has the options and more examples.",
        epilog=examples(
            "info",
            "curve resnet18 --input 8,3,224,224",
            "curve train.py:make_model --input 32,3,224,224 --limit 2GiB --plot curve.png",
            "fit train.py:make_model --input 32,3,224,224 --limit 2GiB",
            "plan train.py:make_model --input 32,3,224,224 --limit 2GiB --html plan.html",
        ),
    )
    parser.add_argument("--version", action="version", version=f"rotor {rotor.__version__}")
    parser.set_defaults(quiet=False, debug=False, room=None)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command_name")
    for module in _MODULES:
        module.add(commands)
    simulate.add_list(commands)
    return parser
