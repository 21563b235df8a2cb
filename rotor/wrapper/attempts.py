"""Attempts at a call by one engine after the other.

Under ``engine="auto"``, an error that plain PyTorch does not raise too is no error of the caller's:
the next engine is asked, and the last one is plain PyTorch. An error of plain PyTorch is the
caller's own; then everything is as it was before the call.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from rotor._pytorch import core, dispatch
from rotor.common.frames import is_raised_by_caller, reported
from rotor.common.modes import RngTracker
from rotor.common.module_state import Watch
from rotor.common.ranks import NeedsPeers, RankError, Ranks
from rotor.common.tensor_trees import output_tensors
from rotor.common.undisturbed import Untriable, trial
from rotor.engines.contract import (
    Call,
    Context,
    Engine,
    Key,
    NothingToPlan,
    Refusal,
    Unsuited,
)
from rotor.engines.plain import PlainEngine, PlainPlan
from rotor.errors import CaptureError, InfeasibleError, RecomputationError
from rotor.meter.allocator import MeterBusyError, storage_bytes
from rotor.tier.interface import TransferError
from rotor.tier.offload import UnreachableError
from rotor.units import exact_bytes
from rotor.wrapper.usage_warnings import refuse_unmeasured, warn_unmeasured

TAKEN_OVER = (
    "The dynamic engine keeps the limit: from now on it runs the model, evicts and recomputes "
    "while a step runs, and nothing is planned"
)

_ANSWERS = (
    InfeasibleError,
    RecomputationError,
    RankError,
    NothingToPlan,
    MeterBusyError,
    UnreachableError,
    TransferError,
    torch.OutOfMemoryError,
    Warning,
)
"""Errors that are for the caller, whoever raises them."""

planning = threading.RLock()
"""Measuring and planning patch PyTorch for the whole process: one thread at a time does."""

_SMALL_BYTES = 1 << 16
"""Bytes up to which a buffer is copied before the first step of an engine."""


class _StateBefore:
    """State in which a step begins, restored for another engine if the first one fails."""

    def __init__(self, model: nn.Module, call: Call, device: torch.device) -> None:
        self._rng = RngTracker(device)
        self._states = self._rng.read()
        self._watch = Watch([("the model", model)])
        buffers = {id(b): b for b in model.buffers()}
        small = [b for b in buffers.values() if storage_bytes([b]) <= _SMALL_BYTES]
        self._copies = [(buffer, buffer.clone()) for buffer in small]
        self._slots = [
            (slots, slots.copy())
            for module in model.modules()
            for slots in core.slots_of_module(module)
            if isinstance(slots, dict)
        ]
        copied = {id(buffer) for buffer, _ in self._copies}
        others = [*model.parameters(), *buffers.values(), *output_tensors((call.args, call.kwargs))]
        self._versions = [
            (t, t._version) for t in others if id(t) not in copied and not t.is_inference()
        ]

    def put_back(self) -> bool:
        """Restore the state; return False where something was written to that is not copied."""
        if any(tensor._version != version for tensor, version in self._versions):
            return False
        for slots, values in self._slots:
            slots.clear()
            slots.update(values)
        with torch.no_grad():
            for buffer, value in self._copies:
                buffer.copy_(value)
        self._watch.restore()
        self._rng.write(self._states)
        return True


class _Failures:
    """Engines that failed at one call, and the state of the driver before the first failure."""

    def __init__(self, driver: Any, refusals: dict[Any, Refusal]) -> None:
        self.first: Exception
        """Error of the first engine that failed."""
        self._named: list[str] = []
        self._report = ""
        context = driver.context
        self._settings = context.settings
        self._before = dict(vars(driver)), self._settings.unsuited, refusals
        self._told = set(context.warned)
        # One warning about all failures replaces the one about the capture.
        context.warned.add("capture")

    def add(self, engine: Engine, error: Exception) -> str:
        """Note the failure of an engine; return it as text."""
        report = reported(error)
        if not self._named:
            self.first, self._report = error, report
        text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no text'])[0]}"
        self._named.append(f"the {engine.name} engine raised {text}")
        # Nobody needs the values that the failed code held.
        traceback.clear_frames(error.__traceback__)
        return f"{text}\n{report}"

    def take_back(self, driver: Any) -> None:
        """Restore the driver as it was: the caller's own code has failed."""
        vars(driver).update(self._before[0])
        driver.context.refusals = self._before[2]
        driver.context.warned.clear()
        driver.context.warned.update(self._told)
        self._settings.unsuited = self._before[1]

    def text(self, engine: Engine) -> str:
        """Return a sentence on the failures and on the engine that runs instead."""
        limit = exact_bytes(self._settings.present_limit or 0)
        runs = {
            "plain": f"plain PyTorch runs such steps, and nothing keeps the limit of {limit}",
            "dynamic": "the dynamic engine runs such steps: it evicts and recomputes",
        }.get(engine.name, f"the {engine.name} engine plans such steps")
        return f"{', and '.join(self._named)}; {runs}. {self._report}"


class Attempts:
    """Attempts of a driver at its calls, one call at a time."""

    def __init__(self) -> None:
        self.asked: Key | None = None
        """Kind of the step that is being attempted; ``None`` before it is known."""
        self.failures: _Failures | None = None
        self.proven: weakref.WeakSet[Engine] = weakref.WeakSet()
        """Engines that have run a step."""
        self._is_unspoilt, self._measures = True, False
        self.refusals: dict[Any, Refusal] = {}
        """Refusals before the call."""

    def run(
        self, driver: Any, call: Call, function: Callable[[Call], Any], *, measures: bool = False
    ) -> Any:
        """Return ``function(call)`` by the first engine that can.

        Raises an error that plain PyTorch raises too; where a sample is measured, the error of the
        first engine.
        """
        self.failures, self._measures = None, measures
        self.refusals = dict(driver.context.refusals)
        while True:
            self.asked, self._is_unspoilt, raised = None, True, None
            try:
                found = function(call)
                break
            except Unsuited as reason:
                driver.drop_first(str(reason))
            except NeedsPeers as needed:
                driver.share_plans(Ranks.of(needed.members), has_collectives=True)
            except Exception as error:
                raised = self._error_of(driver, call, error, measures=measures)
                if raised is error:
                    raised = self.failures = None
                    raise
            except BaseException:
                # What an interrupted step has asked of engines says nothing of the next one.
                driver.order.take_back(self.refusals)
                raise
            if raised is not None:
                self.failures = None
                try:
                    raise raised
                finally:
                    # An error in its own frames would keep what they hold.
                    del raised
        self._report(driver)
        return found

    def _error_of(
        self, driver: Any, call: Call, error: Exception, *, measures: bool
    ) -> Exception | None:
        """Return the error to raise after that of an engine; ``None`` if the next one is asked."""
        key, failures = self.asked, self.failures
        engine = driver.engines[0] if key is None else driver.order.of(key)
        is_only = key is not None or len(driver.engines) == 1
        may_go_on = _is_free(driver.context) and not isinstance(error, _ANSWERS)
        if not (may_go_on and is_only):
            if measures and isinstance(error, CaptureError):
                check_forward(driver.context, call)
            if failures is not None:
                error.add_note(failures.text(engine))
            return error
        is_spoilt = engine in self.proven and not self._is_unspoilt
        if isinstance(engine, PlainEngine) or is_spoilt:
            # As far as can be told, the error is one of the caller's own code.
            if failures is None:
                return error
            failures.take_back(driver)
            driver.forget(key)
            return failures.first if measures else error
        if failures is None:
            failures = self.failures = _Failures(driver, self.refusals)
        reason = failures.add(engine, error)
        driver.forget(key)
        if key is None or not driver.order.refuse(key, call, reason):
            driver.drop_first(reason)
        return None if self._is_unspoilt else error

    def by_dynamic(
        self, driver: Any, key: Key, call: Call, refusal: InfeasibleError, make: Callable[[], Any]
    ) -> Any:
        """Return the dynamic engine's plan of steps for which a limit is too small otherwise.

        Raises InfeasibleError with the least need if that engine cannot keep the limit either.
        """
        order, context = driver.order, driver.context
        try:
            if not order.refuse_size(key, call, str(refusal)):
                raise refusal
            engine = order.of(key)
            try:
                plan = make()
                engine.measure(key, call)
            except Exception as error:
                is_less = (
                    isinstance(error, InfeasibleError)
                    and error.minimum_bytes < refusal.minimum_bytes
                    and _fits(engine, key, call, error.minimum_bytes - driver.limits.owned_bytes)
                )
                order.hand_back(key, None)
                context.plans.pop(key, None)
                raise (error if is_less else refusal) from None
            context.warn(
                "small",
                f"no schedule fits in the limit of {exact_bytes(plan.limit_bytes)}: such steps "
                f"need {exact_bytes(refusal.minimum_bytes)} by a plan. {TAKEN_OVER}",
            )
            return plan
        finally:
            # An error in its own frames would keep the arguments of the step.
            del refusal

    def unmeasured(
        self, driver: Any, key: Key, call: Call, busy: MeterBusyError
    ) -> tuple[Engine | None, Any]:
        """Return an engine for a step that cannot be measured now, and its plan; warn of it.

        ``None`` twice for plain PyTorch. Raises the error if another engine was asked for by name.
        """
        context, found = driver.context, (None, None)
        may_choose = refuse_unmeasured(context, busy)
        if may_choose and context.settings.counts == "allocated":
            limit_bytes = driver.limits.limit_on(context.device_of(call), context.latest)
            with dispatch.keys_kept(), planning:
                try:
                    found = driver.order.standby(key, call, limit_bytes, str(busy))
                except Exception as error:  # Whatever it is, the plain model says it better.
                    traceback.clear_frames(error.__traceback__)
        warn_unmeasured(context, busy, is_limited=found[1] is not None)
        return found

    def fail(self, driver: Any, key: Key, call: Call, error: Exception) -> NoReturn:
        """Raise an error of a step, or that of its forward if plain PyTorch raises one too.

        Where the caller's code raises it, that forward runs, and what it does before stays; after
        PyTorch's own error for a wrong argument, all is as before. Under ``engine="auto"`` plain
        PyTorch is asked next anyway.
        """
        context, own = driver.context, None
        try:
            if not (_is_free(context) or isinstance(error, _ANSWERS)):
                own = _error_of_forward(context, call)
            if own is not None:
                driver.forget(key)
                if is_raised_by_caller(own):
                    device = context.device_of(call)
                    plan = PlainPlan(device, driver.limits.limit_on(device, context.latest), "")
                    driver.run_plan(plan, call, key.absent, PlainEngine(context))
            raise own or error from None
        finally:
            del error, own

    def _report(self, driver: Any) -> None:
        """Warn of engines that failed, and of one that has taken the step over."""
        failures, self.failures = self.failures, None
        if failures is not None:
            engine = driver.order.of(self.asked)
            driver.context.warn(engine.name, failures.text(engine))
        driver.order.announce(self.asked)

    def state_before(
        self, engine: Engine, call: Call, plan: Any, context: Context
    ) -> _StateBefore | None:
        """Return the state to put back if an engine fails in its first step; else ``None``."""
        if engine in self.proven or isinstance(engine, PlainEngine) or not _is_free(context):
            return None
        return _StateBefore(context.module, call, plan.device)

    def put_back(self, before: _StateBefore | None) -> None:
        """Put the state back after a failed step, where that is possible."""
        self._is_unspoilt = before is not None and before.put_back()


def _fits(engine: Engine, key: Key, call: Call, limit_bytes: int) -> bool:
    """Return whether a step fits in a limit that an engine has estimated, without a trace."""
    try:
        engine.plan(key, limit_bytes)
        engine.measure(key, call)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return False
    return True


def is_of_caller(error: BaseException, engine: Engine, context: Context) -> bool:
    """Return whether an error of a forward is the caller's own, as far as can be told."""
    is_last = isinstance(engine, PlainEngine) or not _is_free(context)
    return is_last and isinstance(error, Exception) and not isinstance(error, _ANSWERS)


def check_forward(context: Context, call: Call) -> None:
    """Raise the error of a forward that plain PyTorch cannot run either."""
    error = _error_of_forward(context, call)
    try:
        if error is not None:
            raise error
    finally:
        del error


def _error_of_forward(context: Context, call: Call) -> Exception | None:
    """Return the error of a forward that plain PyTorch cannot run either; ``None`` if it can.

    The forward leaves no trace.
    """
    if context.peers.ranks is not None:
        return None  # A forward of one rank alone may wait for the others.
    found = None
    for mode in (torch.no_grad, torch.enable_grad):  # The former needs less memory.
        try:
            with trial(context.module, call.arguments, context.device_of(call)) as run, mode():
                args, kwargs = run.arguments
                context.module.forward(*args, **kwargs)
            return None
        except (Untriable, NeedsPeers, torch.OutOfMemoryError):
            return None
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            found = error
    try:
        return found
    finally:
        del found  # It would keep this frame alive, and that one it.


def _is_free(context: Context) -> bool:
    """Return whether the engine is free to choose."""
    return context.settings.engine == "auto" and context.peers.ranks is None
