"""Scripts that are run as they are, while the outermost training forward is observed."""

from __future__ import annotations

import argparse
import gc
import runpy
import shlex
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor._pytorch import devices, optimizers
from rotor.commands import tell, write_command_json, write_stderr
from rotor.commands.variables import OWN, is_of_user, variable_of
from rotor.common.frames import release
from rotor.common.modes import Modes
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.errors import InfeasibleError
from rotor.fit import batches
from rotor.fit.advice import Advice, advise, device_of_call
from rotor.integrations.planned import PlannedForward
from rotor.meter.room import CARD, Room
from rotor.meter.step_meter import StepMeter
from rotor.tier.offload import UnreachableError, checked_offload
from rotor.units import format_bytes, parse_bytes
from rotor.wrapper.checkpointable import Checkpointable
from rotor.wrapper.outermost import OutermostCalls, unwrapped

_FAILED, _USAGE = 1, 2


def run(arguments: argparse.Namespace, limits: dict[str, Any]) -> int:
    """Run a script, and return its exit code.

    `limits` are those of the outermost module, if any, by their names in `rotor.Checkpointable`.
    """
    if "offload" in limits:  # A tier that cannot be made is an error before the script runs.
        made = checked_offload(limits["offload"], None, "auto", limits["host_limit"])
        assert made is not None
        limits = limits | {"offload": made.tier, "host_limit": None}
    watcher = _Watcher(arguments, limits)
    error: BaseException | None = None
    try:
        with OutermostCalls(watcher.call, in_any_thread=True) as calls:
            watcher.stop = calls.stop
            _run_main(arguments)
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error, code = raised, _FAILED
    sys.stdout.flush()
    if error is None:
        watcher.finish()
        return code
    if batches.is_out_of_memory(error):
        place = _place_of(error)
        tell(arguments, f"out of memory{place}: {_first_line(error)}", always=True)
        if arguments.debug:
            traceback.print_exception(error)
        release(error)
        del error
        watcher.explain_failure()
        return code
    own = isinstance(error, InfeasibleError | UnreachableError) and limits
    if own and not arguments.debug:
        tell(arguments, f"error: {_first_line(error)}", always=True)
        return _USAGE
    trace = _of_script(error.__traceback__)
    if trace is None and arguments.is_module and isinstance(error, ImportError):
        tell(arguments, f"error: {_first_line(error)}", always=True)
        return _USAGE
    write_stderr("".join(traceback.format_exception(type(error), error, trace)))
    return code


def _run_main(arguments: argparse.Namespace) -> None:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [arguments.script, *arguments.rest]
    try:
        if arguments.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments.script).resolve().parent))
            # Python gives a script an absolute path as its __file__.
            runpy.run_path(str(Path(arguments.script).absolute()), run_name="__main__")
    finally:
        sys.argv = argv
        sys.path[:] = path


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    write_stderr(f"{ended.code}\n")
    return _FAILED


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that begins in the script, if it has begun."""
    found = trace
    while found is not None:
        name = found.tb_frame.f_code.co_filename
        if not (name.startswith(OWN) or "runpy" in name):
            return found
        found = found.tb_next
    return None


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(_of_script(error.__traceback__))
    own = [f for f in frames if is_of_user(f.filename)]
    return f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""


def _forget_graphs(variables: dict[str, Any]) -> None:
    """Drop what a backward would read, of the results in the variables of an ended script."""
    for name, value in list(variables.items()):
        if any(tensor.grad_fn is not None for tensor in tree_tensors(value)):
            variables[name] = value.detach() if isinstance(value, torch.Tensor) else None


class _Watcher:
    """Observer of the outermost training forwards of a script."""

    def __init__(self, arguments: argparse.Namespace, limits: dict[str, Any]) -> None:
        self._arguments = arguments
        self._limits = limits
        self.stop: Callable[[], None] = lambda: None
        self._outer: nn.Module | None = None
        self._module: nn.Module | None = None
        self._main = sys.modules["__main__"]
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._modes: Any = nullcontext()
        self._devices: set[torch.device] = set()
        self._name = ""
        self._hint = ""
        self._planned: PlannedForward | None = None
        self._needs: int | None = None
        self._is_explained = False
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._others: set[str] = set()
        self._limited = ""

    def _tell(self, text: str) -> None:
        tell(self._arguments, text, always=True)

    def call(self, module: nn.Module, plain: Any, args: Any, kwargs: Any) -> Any:
        """Make an outermost call: note the first module, and plan or meter its steps."""
        if isinstance(module, Checkpointable):
            self._limited = type(module.module).__name__
            return plain(module, *args, **kwargs)
        if self._outer is None:
            self._begin(module, args, kwargs)
        elif module is not self._outer:
            self._meet(unwrapped(module))
            return plain(module, *args, **kwargs)
        if self._limits or not self._arguments.watch:
            return plain(module, *args, **kwargs)
        self._keep(module, args, kwargs)
        if self._needs is not None:
            self.stop()
            self.explain()
            return plain(module, *args, **kwargs)
        return self._metered(module, plain, args, kwargs)

    def _begin(self, outer: nn.Module, args: Any, kwargs: Any) -> None:
        self._outer = outer
        self._module = module = unwrapped(outer)
        self._keep(module, args, kwargs)
        self._devices = {parameter.device for parameter in module.parameters()}
        self._main = sys.modules["__main__"]
        self._name, self._hint = variable_of(outer)
        if self._limits:
            self._planned = self._limit(module)
            tell(self._arguments, f"{type(module).__name__} trains within {self._shown_limits()}")
        elif not self._arguments.watch:
            self.stop()
            if module is outer:
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _limit(self, module: nn.Module) -> PlannedForward:
        """Have a module train within the limit, and return its planned forward."""
        self._known.add(module)
        planned = PlannedForward(module, **self._limits)
        planned.install()
        if self._limits.get("offload_state"):
            planned.take(optimizers.of(module.parameters()))
        return planned

    def _meet(self, module: nn.Module) -> None:
        """Take note of another module that trains: one of the first one's class has its limit."""
        if module in self._known:
            return
        if self._limits and type(module) is type(self._module):
            self._limit(module)
        else:
            self._known.add(module)
            self._others.add(type(module).__name__)

    def _shown_limits(self) -> str:
        given, total = self._limits["mem_limit"], self._limits["total_limit"]
        whole = "the card" if total == CARD else f"{format_bytes(total or 0)} in all"
        named = [*([format_bytes(given)] if given else []), *([whole] if total else [])]
        return " and ".join(named)

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._keep(module, args, kwargs)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the arguments of a call, and the autocast around it."""
        self._call = (args, kwargs)
        self._modes = Modes(device_of_call(module, args, kwargs).type)

    def _metered(self, module: nn.Module, plain: Any, args: Any, kwargs: Any) -> Any:
        def passed(peak_bytes: int) -> None:
            self._needs = peak_bytes

        device = device_of_call(module, args, kwargs)
        existing = [p.grad for p in module.parameters() if p.grad is not None]
        meter = StepMeter(device, lambda step: passed(step.peak_bytes), existing, passed=passed)
        try:
            output = plain(module, *args, **kwargs)
        except BaseException:
            meter.cancel()
            raise
        meter.forward_done(output_tensors(output))
        return output

    def _advise(self, room: Room | None = None) -> Advice:
        """Plan in the script's main module, where a capture looks names up; it may have ended."""
        assert self._module is not None
        args, kwargs = self._call
        main, sys.modules["__main__"] = sys.modules["__main__"], self._main
        try:
            with self._modes:
                return advise(self._module, args, kwargs, room, self._needs)
        finally:
            sys.modules["__main__"] = main

    def explain(self) -> None:
        """Say what the step of the noted call needs, and what a limit costs."""
        self._is_explained = True
        try:
            advice = self._advise()
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            needs = "" if self._needs is None else f"needs {format_bytes(self._needs)}, and "
            self._tell(f"a training step {needs}could not be planned: {_first_line(error)}")
            return
        self._say(advice)

    def explain_failure(self) -> None:
        """Say what the step that ran out of memory needs, and what the free memory costs."""
        if self._module is None:
            self._tell("no module was training before: the memory went elsewhere")
            return
        for parameter in self._module.parameters():
            parameter.grad = None
        _forget_graphs(vars(self._main))
        gc.collect()
        devices.release_all()
        try:
            if len(self._devices) == 1:  # Lightning moves a model to the CPU when it fails.
                self._module.to(next(iter(self._devices)))
            room = Room(self._module, CARD)
            advice = self._advise(room)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            self._tell(f"the training step could not be planned: {_first_line(error)}")
            return
        self._say(advice, room)

    def _say(self, advice: Advice, room: Room | None = None) -> None:
        """Say what a limit costs: one of a step, or one of all bytes if a room is given."""
        limit, script = advice.limit_bytes, self._arguments.script
        plain = advice.plain_bytes if self._needs is None else self._needs
        needs = f"this step needs {format_bytes(plain)} above the model"
        name = self._name or "model"
        line: str | None = None
        cost: float | None = None
        if advice.slowdown is None:
            least = format_bytes(advice.curve.minimum_bytes)
            self._tell(f"{needs}; within {format_bytes(limit)} nothing fits: the least is {least}")
        elif limit >= plain and room is None:
            self._tell(f"{needs}; no plan needs less")
        else:
            # After a failure, even a plan without recomputation may help: it holds fewer values.
            cost = advice.slowdown - 1
            shown = _rounded(limit)
            limit = parse_bytes(shown)
            option, flag = ("mem_limit", "limit") if room is None else ("total_limit", "total")
            value = shown if room is None else CARD
            line = f'{name} = rotor.Checkpointable({name}, {option}="{value}")'
            if room is not None:
                self._tell(f"{room.latest}")
            self._tell(f"{needs}; within {shown} it costs {cost:+.0%}: add this line{self._hint}")
            write_stderr(f"    {line}\n")
            if not self._name:
                kind = type(self._module).__name__
                self._tell(f"(no variable was found that holds the {kind}: it is named model here)")
            words = [*(["-m"] if self._arguments.is_module else []), script, *self._arguments.rest]
            self._tell(f"or run it so: rotor run --{flag} {value} {shlex.join(words)}")
        if self._arguments.json is not None:
            data = {
                "script": script,
                "needs_bytes": plain,
                "limit_bytes": limit,
                "minimum_bytes": advice.curve.minimum_bytes,
                "slowdown": None if cost is None else 1 + cost,
                "engine": advice.engine,
                "predicted_bytes": advice.predicted_bytes,
                "line": line,
                "variable": self._name or None,
                "curve": advice.curve.to_dict(),
            }
            write_command_json(self._arguments, data, self._arguments.json)

    def finish(self) -> None:
        """Explain the noted call if none was explained, and tell how a limit was kept."""
        if self._limited and self._module is None:
            self._tell(f"{self._limited} trained within a limit of the script's own")
        elif self._arguments.watch and self._module is None:
            self._tell("no module trained: nothing was seen to plan")
        elif self._arguments.watch and not self._is_explained:
            self.explain()
        if self._limits and self._planned is None and not self._limited:
            self._tell("no module trained: the limit was for none")
        if self._planned is not None and self._planned.model is not None:
            self._finish_limit(self._planned.model)
            self._planned.remove()

    def _finish_limit(self, model: Checkpointable) -> None:
        plan = model.plan
        peak = None if plan is None else plan.measured_bytes
        if plan is None:
            kind = type(model.module).__name__
            self._tell(f"the limit was not kept: no step of {kind} ran by a plan")
        if plan is not None and peak is not None:
            most = format_bytes(plan.limit_bytes)
            tell(self._arguments, f"the metered step peaked at {format_bytes(peak)} of {most}")
        if plan is not None and self._arguments.json is not None:
            data = {
                "script": self._arguments.script,
                "limit_bytes": plan.limit_bytes,
                "engine": plan.engine,
                "predicted_bytes": plan.predicted_bytes,
                "measured_bytes": peak,
            }
            write_command_json(self._arguments, data, self._arguments.json)
        if self._others:
            names = ", ".join(sorted(self._others))
            self._tell(f"the limit was for {type(model.module).__name__} alone, not for {names}")


def _rounded(nbytes: int) -> str:
    """Return bytes as text that a limit is given in, rounded up by half a percent at most."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 2 * scale:
            return f"{-(-nbytes * 100 // scale) / 100:g}{unit}"
    return str(nbytes)
