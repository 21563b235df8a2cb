"""Settings of dynamo while it captures code that logs, prints, branches or marks its inputs.

What captured code says is said in each call, after the graph has run. Dynamo would say it once, or
in no call at all.

Dynamo traces without values and refuses every branch on a tensor. The value of one that is made of
numbers alone, such as a comparison of positions, is the same in each call.
"""

from __future__ import annotations

import dis
import functools
import importlib
import logging
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial, partialmethod
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rotor._pytorch import backwards, captures, core, patches
from rotor._pytorch.draws import Draws, cached_effects_refused
from rotor._pytorch.scripts import functions_run_whole
from rotor.errors import CaptureError

_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
SAYING: frozenset[Any] = frozenset(
    {print, warnings.warn, *(getattr(logging, name) for name in _LEVELS)}
)
"""Functions that say something."""
_ASKED = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")
_FOLLOWED = ("enum", "torch")
"""Packages whose metaclasses dynamo knows."""
_RETURNING = ("getChild", "makeRecord", "findCaller", "filter")


@contextmanager
def said_later() -> Iterator[None]:
    """Have code that is captured in the context say all it has to after its graph."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

    call_function: Any = DebuggingVariable.call_function
    call_method: Any = LoggingLoggerVariable.call_method

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

    with (
        core.replaced(DebuggingVariable, call_function=call),
        core.replaced(LoggingLoggerVariable, call_method=method),
    ):
        yield


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


core.check("utils._python_dispatch._disable_current_modes")

_JUMPS = [n for name, n in dis.opmap.items() if name.startswith("POP_JUMP") and "NONE" not in name]


class _Varies(Exception):
    """Signal that a value differs from call to call."""


class _Repeats(_python_dispatch.TorchDispatchMode):
    """Context in which operators whose results vary raise `_Varies`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in operator.tags or "empty" in str(operator):
            raise _Varies
        return operator(*args, **(kwargs or {}))


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that depends on no input; raise `_Varies` if there is none."""
    if node not in known:
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda arg: _value(arg, known) if isinstance(arg, fx.Node) else arg,
        )
        if node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            raise _Varies
    return known[node]


def _truth(node: fx.Node) -> bool | None:
    """Return the truth of a node's value; ``None`` if it depends on an input."""
    with _python_dispatch._disable_current_modes(), torch.no_grad(), _Repeats():
        try:
            return bool(_value(node, {}))
        except (_Varies, RuntimeError, TypeError):
            return None


@contextmanager
def constant_branches() -> Iterator[None]:
    """Have dynamo take branches on tensors that depend on no input."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    def taken(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(tx: Any, instruction: Any) -> None:
            condition = tx.stack[-1]
            if isinstance(condition, TensorVariable):
                truth = _truth(condition.as_proxy().node)
                if truth is not None:
                    tx.stack[-1] = ConstantVariable.create(truth)
            jump(tx, instruction)

        return run

    kinds: list[Any] = [InstructionTranslatorBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kept = [(kind.dispatch_table, list(kind.dispatch_table)) for kind in kinds]
    for table, before in kept:
        for opcode in _JUMPS:
            table[opcode] = before[opcode] and taken(before[opcode])
    try:
        yield
    finally:
        for table, before in kept:
            table[:] = before


class Branches:
    """Answers to code that asks whether it is compiled: no, as in plain execution, where possible.

    Functions whose plain branch cannot be captured are told that they are compiled.
    """

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._asked: set[tuple[str, str]] = set()

    def answer(self, tx: Any) -> bool:
        """Return the answer to the code that dynamo's instruction translator is tracing."""
        asking = set()
        while tx is not None:
            asking.add((tx.f_code.co_filename, tx.f_code.co_name))
            tx = tx.parent
        self._asked |= asking
        return not self._told.isdisjoint(asking)

    def take(self, error: BaseException | None) -> bool:
        """Give other answers after a capture failed; False if there are no others.

        The function in which dynamo's error arose, or else the next one around it that asked, is
        told that it is compiled; all functions are told so if none of these asked.
        """
        stack = getattr(error, "real_stack", None) or ()
        frames = [(frame.filename, frame.name) for frame in stack]
        asked = self._asked - self._told
        within = next(({frame} for frame in reversed(frames) if frame in asked), asked)
        self._told |= within
        return bool(within)

    def take_back(self) -> None:
        """Tell no function that it is compiled."""
        self._told.clear()


@contextmanager
def capturing(branches: Branches, draws: Draws) -> Iterator[None]:
    """Let captured code print, log and warn in the context: what it says comes after its graph.

    `branches` answers code that asks whether it is compiled; `draws` are the random numbers that
    the captured code draws. Garbage is left to the caller.
    """
    from torch._dynamo import config, convert_frame
    from torch._functorch import config as of_backwards

    # Dynamo's decompositions of add_(alpha=), addcmul_ and addcdiv_ round otherwise.
    # A hook that is registered or removed later makes another graph.
    wanted = {
        "run_gc_after_compile": False,
        "enable_dynamo_decompositions": False,
        "skip_nnmodule_hook_guards": False,
    }
    kept: Any = {name: value for name, value in wanted.items() if hasattr(config, name)}
    settings = config.patch(
        reorderable_logging_functions=config.reorderable_logging_functions | SAYING, **kept
    )
    with ExitStack() as entered:  # Python nests 20 contexts in one statement at most.
        enter: Any = entered.enter_context
        # Code captured by another thread would see what is patched.
        enter(convert_frame.compile_lock)
        enter(settings)
        enter(said_later())
        # A backward is outside of the autocast of its forward.
        enter(of_backwards.patch(backward_pass_autocast="off"))
        enter(warnings.catch_warnings())
        enter(captures.noted())
        enter(patches.methods_followed())
        enter(captures.checks_kept())
        enter(_answered_by(branches))
        enter(functions_run_whole())
        enter(constant_branches())
        enter(backwards.reads_noted())
        enter(_bounded_deques())
        enter(_absence_guarded())
        enter(_metaclasses_refused())
        enter(_kernels_of_eager())
        enter(draws.drawn_anew())
        enter(captures.examples_forgotten())
        enter(captures.guards_freed())
        enter(cached_effects_refused())
        enter(_unordered_settings())
        enter(_layouts_of_outputs())
        enter(_silent_logs())
        # Dynamo reads the gradients of all tensors, also of those that are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


@contextmanager
def _answered_by(branches: Branches) -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` and the like answered, except in PyTorch's own code.

    Questions whether a stream is being captured get False: without an accelerator dynamo could not
    trace them.
    """
    from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable
    from torch._dynamo.variables import torch as variables

    asked = {f for f, answer in variables.tracing_state_functions().items() if answer}
    owners = variables.TorchInGraphFunctionVariable, SkipFunctionVariable

    def answered(call: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        caller = str(tx.f_globals.get("__name__", ""))
        if caller.partition(".")[0] != "torch":
            if self.value in asked:
                return ConstantVariable.create(branches.answer(tx))
            if getattr(self.value, "__name__", "") == "is_current_stream_capturing":
                return ConstantVariable.create(False)
        return call(self, tx, args, kwargs)

    with ExitStack() as entered:
        for owner in owners:
            asking = partialmethod(partial(answered, owner.call_function))
            entered.enter_context(core.replaced(owner, call_function=asking))
        yield


@contextmanager
def _kernels_of_eager() -> Iterator[None]:
    """Have operators traced as the kernels that eager PyTorch runs, not as sums of others."""
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    found = []
    for operator in _decomposed():
        found.append((operator, {k: operator.py_kernels.pop(k, None) for k in keys}))
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in found:
            operator.py_kernels.update({k: kernel for k, kernel in kernels.items() if kernel})
            operator._dispatch_cache.clear()


@cache
def _decomposed() -> list[Any]:
    """Return the operators that have a kernel and that PyTorch decomposes where it traces.

    It decomposes normalisations into others that do not write running statistics.
    """
    importlib.import_module("torch._decomp")
    key, composite = torch._C.DispatchKey.Autograd, "CompositeImplicitAutograd"
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else ()
        for operator in (getattr(packet, overload) for overload in overloads):
            if key not in operator.py_kernels or "batch_norm" in name:
                continue
            is_sum = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), composite)
            if "upsample" in name or not is_sum:
                found.append(operator)
    return found


@cache
def _announcer() -> Any:
    from torch._dynamo.callback import callback_handler

    return callback_handler


class CapturingAgain:
    """Context in which `capturing` is entered if a call is captured; else it costs little."""

    __slots__ = ("_branches", "_draws", "_entered", "_thread")

    def __init__(self, branches: Branches, draws: Draws) -> None:
        self._branches, self._draws, self._thread = branches, draws, threading.get_ident()
        self._entered: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        _announcer().register_start_callback(self._begin)
        _announcer().register_end_callback(self._end)

    def __exit__(self, *_: object) -> None:
        self._end(None)
        _announcer().remove_start_callback(self._begin)
        _announcer().remove_end_callback(self._end)

    def _begin(self, _: object) -> None:
        # Captures of other threads are announced too.
        if threading.get_ident() == self._thread:
            entered = capturing(self._branches, self._draws)
            entered.__enter__()
            self._entered = entered

    def _end(self, _: object) -> None:
        if threading.get_ident() == self._thread and self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None


def _bounded_deques() -> AbstractContextManager[None]:
    """Return a context in which deques from outside of captured code keep their greatest length."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.lists import BaseListVariable, DequeVariable

    given: Any = BaseListVariable.cls_for_instance

    def cls_for_instance(value: Any) -> Any:
        if type(value) is deque:
            return partial(DequeVariable, maxlen=ConstantVariable.create(value.maxlen))
        return given(value)

    return core.replaced(BaseListVariable, cls_for_instance=staticmethod(cls_for_instance))


@contextmanager
def _absence_guarded() -> Iterator[None]:
    """Have captured code guarded where it misses a key of a dictionary, or reads ``os``.

    Dynamo takes a key for absent in every call where an error tells so, as in ``os.environ``, and
    any key of a ``__dict__``, also where the code then makes it. It takes names of the standard
    library for constant: ``os.getenv`` has ``os.environ`` of one.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import dicts

    kind: Any = dicts.ConstDictVariable
    guard: Any = kind.install_dict_contains_guard
    missing: Any = kind.getitem_const_raise_exception_if_absent
    is_constant: Any = symbolic_convert.is_stdlib
    namespace: Any = getattr(dicts, "DunderDictVariable", None)

    def getitem(self: Any, tx: Any, key: Any) -> Any:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return missing(self, tx, key)

    def calling(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "setdefault":
            guard(self, tx, args[:1])
        return call_method(self, tx, name, args, kwargs)

    with ExitStack() as entered:
        enter = entered.enter_context
        enter(core.replaced(kind, getitem_const_raise_exception_if_absent=getitem))
        is_stdlib = {"is_stdlib": lambda module: module is not os and is_constant(module)}
        enter(core.replaced(symbolic_convert, **is_stdlib))
        if namespace is not None:
            call_method = namespace.call_method
            enter(core.replaced(namespace, install_dict_contains_guard=guard, call_method=calling))
        yield


@contextmanager
def _metaclasses_refused() -> Iterator[None]:
    """Refuse captures in the context that read a value of a metaclass, or call one.

    Dynamo takes such a value for constant, and makes objects without that call.
    """
    from torch._dynamo.variables import GetAttrVariable, UserDefinedClassVariable

    reader = core.attribute_reader()
    read: Any = getattr(UserDefinedClassVariable, reader)
    call: Any = UserDefinedClassVariable.call_function

    def refuse(kind: type, name: str) -> None:
        raise CaptureError(f"{kind.__qualname__}.{name} is of a metaclass, which no graph follows")

    def reading(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if type(found) is GetAttrVariable and not callable(getattr(self.value, name, len)):
            refuse(self.value, name)
        return found

    def calling(self: Any, *args: Any) -> Any:
        kind = type(self.value)
        is_followed = kind.__module__.partition(".")[0] in _FOLLOWED
        if isinstance(kind.__call__, FunctionType) and not is_followed:
            refuse(self.value, "__call__")
        return call(self, *args)

    with core.replaced(UserDefinedClassVariable, **{reader: reading, "call_function": calling}):
        yield


def _layouts_of_outputs() -> AbstractContextManager[None]:
    """Return a context in which gradients of outputs are traced in the layout of the outputs.

    PyTorch 2.13 has them so, and most losses give them that layout. Outputs whose elements share
    memory have no gradients of it.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    if getattr(config, "guess_tangent_strides_as_outputs", True):
        return core.NOTHING
    given: Any = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_strided = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
        is_shared = is_strided and torch._debug_has_internal_overlap(tensor) == 1
        with config.patch(guess_tangent_strides_as_outputs=not is_shared):
            return given(tensor, *args, **kwargs)

    return core.replaced(MemoryFormatMeta, from_tensor=staticmethod(from_tensor))


@contextmanager
def _silent_logs() -> Iterator[None]:
    """Have PyTorch log nothing of code that cannot be traced, unless it was asked to log more.

    A refused capture is told in an error or a warning of ours, and may be no fault at all.
    """
    names = ("torch._dynamo", "torch._subclasses", "torch.fx.experimental")
    loggers = [logging.getLogger(name) for name in names]
    kept = [(each, each.level) for each in loggers if each.getEffectiveLevel() >= logging.WARNING]
    for each, _ in kept:
        each.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for each, level in kept:
            each.setLevel(level)


def _unordered_settings() -> AbstractContextManager[None]:
    """Return a context in which dynamo's metrics say nothing of settings that they cannot write.

    PyTorch 2.11 sorts functions that are settings, and logs an error.
    """
    from torch._dynamo import utils

    name = "_get_dynamo_config_for_logging"
    written = getattr(utils, name, None)
    if written is None:
        return core.NOTHING

    def written_if_possible() -> Any:
        try:
            return written()
        except TypeError:
            return None

    return core.replaced(utils, **{name: written_if_possible})
