"""Private names of PyTorch for what captured code prints, logs and warns of.

It is said in each call, after the graph has run. Dynamo would say it once, or in no call at all.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["SAYING", "said_later"]

_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
SAYING: frozenset[Any] = frozenset(
    {print, warnings.warn, *(getattr(logging, name) for name in _LEVELS)}
)
"""Functions that say something."""
_ASKED = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")
_RETURNING = ("getChild", "makeRecord", "findCaller", "filter")


@contextmanager
def said_later() -> Iterator[None]:
    """Have code that is captured in the context say all it has to after its graph."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

    functions: Any = DebuggingVariable
    loggers: Any = LoggingLoggerVariable
    call_function, call_method = functions.call_function, loggers.call_method

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_warning = self.value is warnings.warn
        said = _say(tx, _warning(tx, kwargs) if is_warning else self.value, args, kwargs)
        return said or call_function(self, tx, args, kwargs)

    def method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        logger = self.value
        if name in _ASKED:
            return ConstantVariable.create(
                getattr(logger, name)(*(arg.as_python_constant() for arg in args))
            )
        if self.source is not None:
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        level = getattr(logging, name.partition("_")[0].upper(), logging.CRITICAL)
        if name == "log" and args and args[0].is_python_constant():
            level = args[0].as_python_constant()
        is_heard = logger.isEnabledFor(level)
        if is_heard or not any(isinstance(arg, TensorVariable) for arg in args):
            said = name not in _RETURNING and _say(tx, getattr(logger, name), args, kwargs)
            if said or is_heard:
                return said or call_method(self, tx, name, args, kwargs)
        return ConstantVariable.create(None)

    functions.call_function, loggers.call_method = call, method
    try:
        yield
    finally:
        functions.call_function, loggers.call_method = call_function, call_method


def _say(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Have a function called after the graph; return the variable of its result, if it can be."""
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.misc import DebuggingVariable, StringFormatVariable

    named = [value for value in kwargs.values() if not value.is_python_constant()]
    others = [a for a in args if not (a.is_python_constant() or isinstance(a, TensorVariable))]
    if named or not all(isinstance(one, StringFormatVariable) for one in others):
        return None
    constants = {key: value.as_python_constant() for key, value in kwargs.items()}
    positions = [k for k, arg in enumerate(args) if arg.is_python_constant()]
    fixed = {k: args[k].as_python_constant() for k in positions}
    said = functools.partial(_call, function, len(args), fixed, constants)
    source = GlobalSource(tx.output.install_global("__said", said))
    rest = [_value_now(tx, arg) for k, arg in enumerate(args) if k not in fixed]
    # Dynamo emits the messages of the outermost function only.
    tx.output.root_tx.debug_locals.append((DebuggingVariable(said, source=source), rest))
    return ConstantVariable.create(None)


def _call(function: Any, count: int, fixed: Any, constants: Any, *values: Any) -> None:
    rest = iter(values)
    function(*(fixed[k] if k in fixed else next(rest) for k in range(count)), **constants)


def _value_now(tx: Any, arg: Any) -> Any:
    """Return a tensor as it is now: its code may write to it before the graph ends."""
    from torch._dynamo.variables import TensorVariable

    if not isinstance(arg, TensorVariable):
        return arg
    return arg.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})


def _warning(tx: Any, kwargs: Any) -> Any:
    """Return a function that warns at the place of the code that is being captured."""
    level = kwargs["stacklevel"].as_python_constant() if "stacklevel" in kwargs else 1
    for _ in range(level - 1):
        tx = tx.parent or tx
    name = tx.f_globals.get("__name__", "<unknown>")
    return functools.partial(_warn, tx.f_code.co_filename, tx.lineno or 1, name)


def _warn(
    filename: str, line: int, module: str, message: Any, category: Any = None, *_: Any, **__: Any
) -> None:
    known = vars(sys.modules[module]) if module in sys.modules else {}
    registry = known.setdefault("__warningregistry__", {})
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    warnings.warn_explicit(message, kind, filename, line, module, registry)
