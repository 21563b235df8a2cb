"""Order in which the engines of a model are asked, and the kinds of steps that each has refused."""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from rotor.common.calls import PlainValues
from rotor.common.undisturbed import Untriable
from rotor.engines.contract import Call, CannotPlan, Context, Engine, Key, Refusal
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.plain import PlainEngine
from rotor.engines.sequential import SequentialEngine
from rotor.errors import CaptureError, InfeasibleError
from rotor.wrapper.registry import engines_for

_HOPELESS = 4
"""Number of refused kinds of step after which a model without any graph is captured no more."""

ENDLESS, AMONG = 16, 24
"""New kinds of step among the latest steps, after which no further kind is captured."""

_ADVICE = (
    "Texts, numbers or structures among the arguments differ: leave out what the model need not "
    "know, and give numbers that change as tensors; then such steps share a plan"
)

_CHANGES = (
    "the model's code depends on Python values that keep changing: it was captured anew as a step "
    "ran, and then asked for another graph again. A counter that the code reads, or a mode of the "
    "caller's that counts calls, does that: keep such values in tensors, or leave the mode out"
)

_MOST = 64
FEWEST = 8
_SHARE = 100
_BYTES = 2 << 20
"""Memory of the host that a captured kind keeps, about."""


class Order:
    """Engines of a model, in the order in which they are asked."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.engines = engines_for(context)
        self.taken_over: dict[Engine, str] = {}
        """Engines that took steps over and have not announced it, each with the reason."""
        self.measured: set[Engine] = set()
        """Engines that have measured a step."""
        self.steps = 0
        """Steps so far."""
        self._new: deque[int] = deque(maxlen=ENDLESS)
        """Steps that were of new kinds, each of which was captured or passed over."""
        self._passed: deque[Key] = deque(maxlen=FEWEST)
        """Latest kinds that were passed over: one that comes again is captured."""
        self._unkept: dict[Any, int | None] = {}
        """Limits that the dynamic engine does not keep, by `Key.measured`."""
        self._again: tuple[int, Engine] | None = None
        """Latest step that was captured again as it ran, and its engine."""
        self._dropped = 0
        """Dropped kinds whose captures are not freed yet."""
        self._standby: DynamicEngine | None = None

    def of(self, key: Key) -> Engine:
        """Return the engine that plans a kind of step."""
        refusals = self._context.refusals
        refusal = refusals.get(key.measured) if refusals else None
        return self.engines[0 if refusal is None else refusal.engine]

    def owner(self, plan: Any) -> Engine:
        """Return the engine that runs a plan."""
        engine = self.of(plan.key)
        return engine.others.get(plan.engine, engine)

    def refuse(self, key: Key, call: Call, reason: str) -> bool:
        """Hand a kind of step to the next engine; return False after the last one.

        Plans of it, and of kinds that are measured alike, are dropped: that engine makes its own.
        """
        known = self._context.refusals.get(key.measured)
        number = 0 if known is None else known.engine
        if number + 1 >= len(self.engines):
            return False
        why = ({} if known is None else known.why) | {self.engines[number].name: reason}
        device = self._context.device_of(call)
        self._context.refusals[key.measured] = Refusal(number + 1, device, reason, why)
        self.taken_over[self.engines[number + 1]] = reason
        plans = self._context.plans
        for alike in [k for k in plans if k.measured == key.measured]:
            del plans[alike]
        return True

    def refuse_size(self, key: Key, call: Call, reason: str) -> bool:
        """Hand steps too large for a chain to the dynamic engine; return False without one."""
        settings, engines = self._context.settings, self.engines
        if not isinstance(self.of(key), SequentialEngine) or self._context.peers.ranks is not None:
            return False
        if len(engines) == 1 and settings.preserve_rng_state:
            engines.append(DynamicEngine(self._context))
        handed_over = self.refuse(key, call, reason)
        self.taken_over.clear()
        return handed_over

    def standby(self, key: Key, call: Call, limit_bytes: int, reason: str) -> tuple[Engine, Any]:
        """Return the engine that measures nothing, and its plan of a step.

        Raises ValueError if it cannot run the model, and InfeasibleError.
        """
        context = self._context
        if self._standby is None:
            self._standby = DynamicEngine(context)
        self._standby.check(context.settings.options)
        before, device = context.refusals.get(key.measured), context.device_of(call)
        context.refusals[key.measured] = Refusal(0, device, reason, {})
        try:
            plan = self._standby.plan(key, limit_bytes)
            plan.key = key
            if key.measured not in plan.accepted:
                self._standby.measure(key, call)
        finally:
            self.hand_back(key, before)
        return self._standby, plan

    def ask_again(self) -> None:
        """Return steps that were too large for a chain, before another limit."""
        if isinstance(self.engines[0], SequentialEngine):
            self._context.refusals.clear()

    def hand_back(self, key: Key, before: Refusal | None) -> None:
        """Return a kind of step to its former engine."""
        self.taken_over.clear()
        if before is None:
            self._context.refusals.pop(key.measured, None)
        else:
            self._context.refusals[key.measured] = before

    def take_back(self, before: dict[Any, Refusal]) -> None:
        """Restore earlier refusals; drop the plans of kinds that another engine plans then."""
        context, plans = self._context, self._context.plans
        now, context.refusals = context.refusals, dict(before)
        for key in [k for k in plans if now.get(k.measured) != before.get(k.measured)]:
            del plans[key]

    def announce(self, key: Key) -> None:
        """Warn by the engine that runs such steps now, if it has taken them over."""
        if not self.taken_over:
            return
        reason = self.taken_over.get(self.of(key))
        self.taken_over.clear()
        engine = self.of(key)
        if reason is not None and engine.fallback:
            self._context.warn(
                # Failures of the others are told with the name of the last engine.
                engine.name if isinstance(engine, PlainEngine) else "capture",
                f"{engine.fallback} The reason:\n{reason}",
            )

    def pass_over(self, key: Key) -> None:
        """Hand a new kind of step past the engines that capture, if none had a plan so far."""
        refusals = self._context.refusals
        number = self._capturing
        if key.measured in refusals or number == len(self.engines):
            return
        refused = list(refusals.values())
        if (
            len(refused) >= _HOPELESS
            and all(refusal.engine >= number for refusal in refused)
            and self.measured.isdisjoint(self.engines[:number])
        ):
            refusals[key.measured] = refused[-1]

    @property
    def _capturing(self) -> int:
        """Number of the engines that capture steps, which are asked first."""
        return sum(engine.plans_ahead for engine in self.engines)

    def kind_of(self, key: Key, call: Call, make: Callable[[Key], Any]) -> Key:
        """Return the kind under which a step without a measure runs.

        Where kinds are new without end, it is one for all steps on such tensors, which the dynamic
        engine runs if it keeps the limit in a trial. `make` makes its plan.
        """
        if not self._is_endless(key):
            return key
        described = tuple(part for part in key.measured[1] if isinstance(part, tuple))
        alike = Key(("", described, (), *key.measured[3:]), key.absent)
        limit = self._context.settings.mem_limit
        if alike.measured not in self._unkept or self._unkept[alike.measured] != limit:
            self._new.append(self.steps)
            self._passed.append(key)
            if self._is_kept(alike, call, make):
                return alike
            self._unkept[alike.measured] = limit
        PlainValues.of(key.measured).reads.begin_again()
        return key

    def _is_endless(self, key: Key) -> bool:
        """Return whether a step is of a new kind after many others."""
        context, number = self._context, self._capturing
        is_free = context.is_stepping and context.peers.ranks is None
        following = self.engines[number : number + 1]
        if not (is_free and following and isinstance(following[0], DynamicEngine)):
            return False
        if key.measured in context.refusals or self.of(key).device_of(key) is not None:
            return False
        if PlainValues.of(key.measured).reads.is_endless:
            return True
        is_often = len(self._new) == ENDLESS and self.steps - self._new[0] <= AMONG
        return is_often and key not in self._passed

    def _is_kept(self, alike: Key, call: Call, make: Callable[[Key], Any]) -> bool:
        """Return whether the dynamic engine keeps the limit in a step; have it run such ones."""
        context = self._context
        reason = "most steps were of new kinds, each of which was captured: further kinds are not"
        for _ in range(self._capturing) if alike.measured not in context.refusals else ():
            self.refuse(alike, call, reason)
        self.taken_over.clear()
        try:
            plan = make(alike)
            if alike.measured not in plan.accepted:
                self.of(alike).measure(alike, call)
        except (InfeasibleError, Untriable) as error:
            traceback.clear_frames(error.__traceback__)
            self.hand_back(alike, None)
            context.plans.pop(alike, None)
            context.warn(
                "endless, over",
                "most of the latest steps were of new kinds, each of which is captured and "
                "planned, and takes its time: the dynamic engine, which captures nothing, does not "
                f"keep the limit ({error}). {_ADVICE}",
            )
            return False
        context.warn(
            "endless",
            "most of the latest steps were of new kinds, each of which was captured and planned: "
            "further kinds are not. The dynamic engine runs them, evicts and recomputes meanwhile. "
            f"{_ADVICE}",
        )
        return True

    def captured_again(self, plan: Any, cause: BaseException | None) -> None:
        """Note that the code of a step has asked for another graph, or that an engine has none.

        An engine whose new graph does not fit the same step either has no more plans of such steps.
        Raise CannotPlan if no other engine is compared with it.
        """
        engine, before = self.owner(plan), self._again
        self._again = (self.steps, engine)
        if before != self._again:
            return
        refused = cause if isinstance(cause, CannotPlan) else CannotPlan(CaptureError(_CHANGES))
        if self.of(plan.key) is engine:
            raise refused from None
        self._context.lacking[plan.engine][plan.key.measured] = refused.line
        engine.forget(plan.key.measured)

    def note_measured(self, engine: Engine, found: Any) -> None:
        """Note that an engine has measured a step; `found` is its measure."""
        self.measured.add(engine)
        if not getattr(found, "shares_shapes", True):
            self._new.append(self.steps)

    def why(self, key: Key, name: str) -> dict[str, str]:
        """Return the engines that were asked for such steps, and why each handed over.

        The last entry has the name of the engine that runs them.
        """
        known = self._context.refusals.get(key.measured)
        refused = {} if known is None else known.why
        return self._context.settings.unsuited | refused | {name: "runs the step"}

    def drop_unused(self, forget: Callable[[Key], None]) -> None:
        """Have captured kinds of steps above 64, or above a hundredth of the limit, forgotten.

        Plans are in the order of their last use. Kinds that share a capture are few bytes each, and
        stay.
        """
        context = self._context
        limit = context.settings.present_limit or 0
        most = min(_MOST, max(FEWEST, limit // _SHARE // _BYTES))
        alone = {key.measured: key for key, plan in context.plans.items() if plan.is_alone}
        for key in list(alone.values())[:-most]:
            forget(key)
            self._dropped += 1
        if self._dropped >= FEWEST and gc.isenabled():
            # Captures are cycles, and each new one puts off Python's own search for old ones.
            self._dropped = 0
            gc.collect()
