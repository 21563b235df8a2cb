"""Driver that decides when a model is measured, planned, metered and planned again.

It runs the steps of one wrapped model, for any engine: the kind of the step, its measure, its
plan, the run, the metering, and the lessons of the meter.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor._pytorch import backwards, devices, dispatch, fsdp
from rotor.algorithms.curve import Curve
from rotor.common.frames import release
from rotor.common.model_state import ModelState
from rotor.common.ranks import Ranks
from rotor.common.rerun import STEP
from rotor.common.tensor_trees import tree_tensors, with_views
from rotor.common.undisturbed import Untriable, training_flags_kept
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    Engine,
    IsPending,
    Key,
    NothingToPlan,
    PlanAgain,
    Settings,
)
from rotor.engines.learning import MeteredEngine
from rotor.engines.peers import Peers, SharingRanks
from rotor.errors import InfeasibleError
from rotor.graph.planner import MOST_POINTS
from rotor.meter import allocator, watch
from rotor.meter.step_meter import StepWatch, Verdict, cancel_running
from rotor.units import check_count, exact_bytes, format_bytes
from rotor.wrapper.announcing import Announcer
from rotor.wrapper.attempts import TAKEN_OVER, Attempts, check_forward, is_of_caller, planning
from rotor.wrapper.caches import CacheRule
from rotor.wrapper.limits import Limits
from rotor.wrapper.metering import end_after_error, observer_of_step
from rotor.wrapper.order import Order
from rotor.wrapper.setting import agree_to_share, choose, peers_of
from rotor.wrapper.usage_warnings import (
    RerunNotes,
    is_seen_by_a_mode,
    refuse_outer_transforms,
    runs_first,
    step_of_this_thread,
    warn_of_checkpointing,
    warn_of_later_code,
    warn_of_measuring,
    warn_of_searches,
)


class Driver:
    """Runner of a model's steps within its limit; the wrapper is referenced weakly."""

    context: Context
    engines: list[Engine]
    """Engines of the model, in the order in which they are asked."""
    calls = 0
    """Number of calls of the wrapper's forward."""
    _is_pending: IsPending = None
    _thread = 0
    _is_crowded = _has_collected = False

    def __init__(self, settings: Settings, wrapper: nn.Module | None = None) -> None:
        self._begin(settings, wrapper, set())
        dispatch.watch_backwards()

    def _begin(self, settings: Settings, wrapper: nn.Module | None, warned: set[str]) -> None:
        self.settings = settings
        self._wrapper: Callable[[], nn.Module | None] = _reference(wrapper)
        self._group_peers = Peers()
        self._announcer = Announcer(settings.verbosity)
        self.limits = Limits(settings)
        self._attempts = Attempts()
        self._discover(None, warned)

    def _discover(self, latest: Any, warned: set[str]) -> None:
        """Find the structure of the model and its engines."""
        self._group_peers = peers_of(self.settings, self._group_peers)
        self.context = Context(
            self.settings,
            self._wrapper,
            ModelState(self.settings.module),
            self.limits.explain,
            peers=self._group_peers,
            latest=latest,
            warned=warned,
        )
        self._is_unit = fsdp.is_unit(self._wrapper())
        self._unplanned: set[Any] = set()
        self._caches = CacheRule(self.context)
        self.order = Order(self.context)
        self.engines = self.order.engines
        self.engines[0].check(self.settings.options)

    def _rediscover(self) -> None:
        """Drop all measures, and find structure and engines again."""
        self._discover(self.context.latest, self.context.warned)

    def _rediscover_if_changed(self) -> None:
        engine, is_same = self.engines[0], self.context.structure.is_current()
        is_other = engine.depends_on_structure and fsdp.is_unit(self._wrapper()) != self._is_unit
        if is_same and not is_other:
            return
        if engine.depends_on_structure:
            self._rediscover()
        else:
            self.context.structure = ModelState(self.settings.module)
            engine.check(self.settings.options)

    def attach(self, wrapper: nn.Module) -> None:
        """Make a module represent the model."""
        self._wrapper = self.context.wrapper = _reference(wrapper)

    def share_plans(self, ranks: Ranks, *, has_collectives: bool = False) -> None:
        """Make the processes of a group measure together and run one plan."""
        agree_to_share(ranks, self.settings, self.engines[0].name)
        self._group_peers = SharingRanks(ranks, has_collectives=has_collectives)
        self._rediscover()

    def check_portable(self) -> None:
        """Raise TypeError where the model is sharded, and cannot be copied or pickled."""
        if self.context.peers is not self._group_peers:
            raise TypeError(
                "a model sharded by fully_shard cannot be pickled or copied: save its state_dict() "
                "with torch.distributed.checkpoint, and shard and wrap a new model"
            )

    def __getstate__(self) -> dict[str, Any]:
        engine, context = self.engines[0], self.context
        kept = engine, dict(context.plans), dict(context.loaded), context.latest, context.latest_key
        is_portable = engine.is_portable and context.peers.ranks is None
        is_portable &= all(self.order.owner(plan) is engine for plan in context.plans.values())
        return {
            "settings": self.settings,
            "warned": context.warned,
            "kept": kept if is_portable else None,
            "learned_loss": dict(context.learned_loss),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["settings"], None, state["warned"])
        context, kept = self.context, state["kept"]
        context.learned_loss.update(state["learned_loss"])
        if kept is not None:
            engine, context.plans, context.loaded, context.latest, context.latest_key = kept
            engine.context, engine.settings = context, self.settings
            self.engines[0] = engine

    def is_pending(self) -> bool:
        """Return whether the backward of the latest step is still to come."""
        return self._is_pending is not None and self._is_pending()

    def _is_other_pending(self) -> bool:
        """Return whether another model's step is pending that is no garbage."""
        found = self._sees_other()
        if not found or self._has_collected:
            return found
        self._has_collected = True
        gc.collect()
        return self._sees_other()

    def _sees_other(self) -> bool:
        for other in list(_begun):
            if other is not self and other._thread == self._thread:
                if other.is_pending():
                    return True
                _begun.discard(other)
        return False

    # -- the limit

    def _device_of(self, key: Key) -> torch.device:
        """Return the device of a measured kind of step."""
        device = self.order.of(key).device_of(key)
        assert device is not None
        return device

    def planned(self) -> Any:
        """Return the plan that ran last; raise ValueError before one."""
        if self.context.latest is None:
            raise ValueError("no plan was made: call compute_sequence(), or train a step")
        return self.context.latest

    # -- measuring and planning

    def measure(self, call: Call) -> Any:
        """Measure on a sample, leaving no trace; return the measure if it is a single one.

        Raises ValueError if nothing in the step needs a gradient.
        """
        self._rediscover_if_changed()
        if not self.context.structure.is_initialized():
            raise ValueError(
                "lazy modules have no parameters yet, so that nothing can be measured: call the "
                "model once, under torch.no_grad() say, before it gets a limit"
            )
        with training_flags_kept(self.settings.module), torch.enable_grad():
            if not self.settings.module.training:
                self.settings.module.train()
            if (sharding := self.context.sharding) is not None:
                args, kwargs = sharding.cast(call.arguments)
                call = replace(call, args=args, kwargs=kwargs)
            call = self._caches.applied(call)
            key = self._agreed_key(call)[0]
            self.forget(key)
            self.context.refusals.pop(key.measured, None)
            try:
                with dispatch.keys_kept(), planning, self._announcer.timed(), step_of_this_thread:
                    return self._attempts.run(self, call, self._measured, measures=True)
            except NothingToPlan:
                raise ValueError(
                    "nothing in this step needs a gradient: call the plain model, chk.module"
                ) from None

    def _measured(self, call: Call) -> Any:
        self._attempts.asked = key = self._agreed_key(call)[0]
        found = self._measure(key, call)
        engine = self.order.of(key)
        if not engine.plans_ahead and self._attempts.failures is not None:
            self._make(key)
            engine.measure(key, call)
        elif not engine.plans_ahead and key.measured in self.context.refusals:
            check_forward(self.context, call)  # The sample itself may be the cause.
        self.context.latest_key = self.context.refined(key)
        return found

    def drop_first(self, reason: str) -> None:
        """Find the engines of the model without the first, which does not suit it."""
        self.settings.unsuited = self.settings.unsuited | {self.engines[0].name: reason}
        self._rediscover()

    def _agreed_key(self, call: Call) -> tuple[Key, bool]:
        engine, peers = self.engines[0], self.context.peers
        has_dropped = peers.ranks is not None and self.limits.drop_outgrown(self.context.plans)
        (measured, absent), is_one_behind = peers.agree(
            lambda: engine.key(call), has_dropped or self.context.is_behind()
        )
        return Key(measured, absent), is_one_behind

    def _measure(self, key: Key, call: Call, *, again: bool = False) -> Any:
        """Measure a kind of step by the first engine that can."""
        self.order.pass_over(key)
        before = self.context.refusals.get(key.measured)
        warn_of_checkpointing(self.context)
        while True:
            engine = self.order.of(key)
            if not engine.plans_ahead:
                if engine is self.engines[0] and not again:
                    if key not in self.context.plans:
                        self._make(key)
                    engine.measure(key, call)
                return None
            if engine.device_of(key) is not None and not again:
                return None
            try:
                places = {tensor.device for tensor in tree_tensors(call.arguments)}
                for device in places:
                    devices.prepare(device)
                    if devices.searches(device):
                        warn_of_searches(self.context)
                found = engine.measure(key, call)
                self.order.note_measured(engine, found)
                for device in places - {torch.device("cpu")}:
                    devices.release_cached(device)
                return found
            except CannotPlan as refused:
                if not self.order.refuse(key, call, str(refused.error)):
                    raise refused.error from None
                again = False
            except allocator.MeterBusyError:
                # The next step tries again.
                self.order.hand_back(key, before)
                raise

    def _make(self, key: Key, reserve_bytes: int = 0) -> Any:
        """Plan a measured kind of step."""
        make = partial(self.order.of(key).plan, key, reserve_bytes=reserve_bytes)
        plan = self.limits.planned(make, self._device_of(key), self.context)
        # Ranks share the least of their limits.
        self.settings.limit_bytes = plan.limit_bytes
        self.limits.check(self.context, plan)
        return self._install(key, plan)

    def _first(self, key: Key, call: Call) -> Any:
        """Plan a kind of step without a plan; no such steps are refused for their loss alone."""
        try:
            return self._make(key)
        except InfeasibleError as error:
            release(error)
            refusal = error
        try:
            if self.context.learned_loss.pop(key.measured, None) is not None:
                return self._first(key, call)
            return self._attempts.by_dynamic(self, key, call, refusal, lambda: self._make(key))
        finally:
            del refusal

    def _install(self, key: Key, plan: Any) -> Any:
        plan.key = key
        plan.why = self.order.why(key, getattr(plan, "engine", self.order.of(key).name))
        self.context.plans.pop(key, None)
        self.context.plans[key] = plan
        self.order.drop_unused(self.forget)
        self.context.latest, self.context.latest_key = plan, key
        return plan

    def forget(self, key: Key | None) -> None:
        """Drop the measures and plans of a kind of step."""
        if key is None:
            return
        for engine in self.engines:
            engine.forget(key.measured)
        for known in [k for k in self.context.plans if k.measured == key.measured]:
            del self.context.plans[known]

    def compute(
        self,
        limit_bytes: int | None,
        options: dict[str, Any],
        chosen: tuple[Any, int | None] | None = None,
    ) -> tuple[Any, Any]:
        """Plan the following steps again; restore the previous state on failure.

        With an algorithm and slots chosen, even if both are ``None``, the plan has the form of the
        first engine; else it is the one that training makes. Return it, and its result.
        """
        settings, context = self.settings, self.context
        engine, refusals = self.engines[0], dict(context.refusals)
        key = context.measured_key() if engine.plans_ahead else None
        self.order.ask_again()
        owner = engine if key is None else self.order.of(key)
        before = (dict(vars(settings)), context.plans, context.loaded)
        states = [(known, dict(vars(known))) for known in {engine, owner}]
        try:
            if chosen is None:
                settings.options = settings.given_options | options
            else:
                algorithm, slots = chosen
                choose(engine, algorithm, options)
                settings.mem_slots = slots or settings.mem_slots
            if limit_bytes is not None:
                settings.mem_limit = limit_bytes
            context.begin_planning()
            if key is None:
                return None, None
            with self._announcer.timed():
                plan = self._make(key)
            return plan, plan.result
        except BaseException:
            vars(settings).update(before[0])
            context.plans, context.loaded, context.refusals = *before[1:], refusals
            for known, state in states:
                vars(known).update(state)
            raise

    def finish_planning(self, timeout: float | None) -> bool:
        """Wait for background searches, some seconds at most; return whether none is left."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        measures = not self.is_pending()
        return all(searches.finish(end, measures=measures) for searches in self.context.searches)

    def curve(self, points: int, *, training: bool) -> tuple[Curve, torch.device]:
        """Return step time against limit by the latest measure, and the device of the steps."""
        points, engine = check_count(points, "points", 1, MOST_POINTS), self.engines[0]
        key = self.context.measured_key() if engine.plans_ahead else Key(None, None)
        if key.measured is not None:
            engine = self.order.of(key)
        return engine.curve(key, points, training=training)

    def load(self, source: Any) -> Any:
        """Run the following steps by a saved plan; return it."""
        engine = self.engines[0]
        if not isinstance(engine, MeteredEngine):
            raise ValueError(
                f'engine="{engine.name}" decides while a step runs, and has no plan to load: give '
                'engine="chain" or "graph"'
            )
        key = self.context.measured_key()
        # A kind of step taken over by another engine has no plan of the first one's form.
        limit = self.limits.limit_on(self._device_of(key), self.context.latest)
        plan = engine.load(key, source, limit)
        return self._install(key, plan).result

    # -- running

    def is_training(self, call: Call) -> bool:
        """Return whether a call trains; raise if it cannot be planned for."""
        if call.targets and self.settings.loss_fn is None:
            raise ValueError("targets are for a loss: give Checkpointable(..., loss_fn=) too")
        if not (self.settings.module.training and torch.is_grad_enabled()):
            return False
        context = self.context
        is_plain = refuse_outer_transforms(context) or is_seen_by_a_mode(context)
        return not (is_plain or runs_first(context))

    def plain(self, call: Call) -> Any:
        """Return the output of the plain model."""
        return self.context.plain(call.args, call.kwargs, call.targets)

    def step(self, call: Call) -> Any:
        """Run the forward of a training step under a plan, made first if none exists."""
        self._rediscover_if_changed()
        self._thread = threading.get_ident()
        self.order.steps += 1
        if self._is_other_pending() | cancel_running(all_steps=False):
            # Another step's backward is pending: a meter would mix both steps.
            self._is_crowded = True
        self.context.is_stepping = step_of_this_thread.is_running = True
        try:
            # The call is in no variable: a kept error's traceback may keep this frame alive.
            return self._attempts.run(self, self._caches.applied(call), self._step)
        finally:
            self.context.is_stepping = step_of_this_thread.is_running = False

    def _step(self, call: Call) -> Any:
        key, is_one_behind = self._agreed_key(call)
        self._attempts.asked, absent = key, key.absent
        failed, standby = None, None
        try:
            plan = self._ready(key, call, is_one_behind=is_one_behind)
        except allocator.MeterBusyError as error:
            standby, plan = self._attempts.unmeasured(self, key, call, error)
        except Exception as error:
            plan, failed = None, error
        if failed is not None:
            try:
                self._attempts.fail(self, key, call, failed)
            finally:
                del failed
        if plan is None:
            return self.plain(call)
        if self.is_pending():
            self._warn_pending(plan.limit_bytes)
        if standby is not None:
            return self.run_plan(plan, call, absent, standby)
        if plan is not self.context.latest and plan.key in self.context.plans:
            # Plans are kept in the order of their last use.
            self.context.plans[plan.key] = self.context.plans.pop(plan.key)
        self.context.latest, self.context.latest_key = plan, plan.key
        self._announcer.log_plan(plan)
        begun = time.perf_counter()
        try:
            try:
                while True:
                    try:
                        return self.run_plan(plan, call, absent)
                    except PlanAgain as found:
                        self.order.captured_again(plan, found.__cause__)
                    with self._announcer.timed(begun):
                        plan = self._make(plan.key, plan.reserve_bytes)
                    self._announcer.log_plan(plan)
            except CannotPlan as refused:
                # The call was captured before, but its code now asks for another graph each time.
                cancel_running()
                key = plan.key
                self.order.of(key).forget(key.measured)
                if not self.order.refuse(key, call, str(refused.error)):
                    self._attempts.fail(self, key, call, refused.error)
                self._measure(key, call)
                return self.run_plan(self._make(key), call, absent)
        except allocator.MeterBusyError as error:
            # A step that has a plan needs another one, since what its code reads has changed.
            self.order.take_back(self._attempts.refusals)
            standby, plan = self._attempts.unmeasured(self, plan.key, call, error)
        return self.plain(call) if plan is None else self.run_plan(plan, call, absent, standby)

    def _ready(self, key: Key, call: Call, *, is_one_behind: bool) -> Any:
        """Return the plan of a step; ``None`` if nothing in it needs a gradient."""
        plans, engine = self.context.plans, self.order.of(key)
        key = self.context.refined(key)
        plan = plans.get(key)
        verdict = None if plan is None else plan.verdict
        if verdict is Verdict.GIVE_UP:
            plan = self._give_up(key, call, plan)
            engine = self.order.of(key)
            verdict = None if plan is None else plan.verdict
        is_stale = verdict is Verdict.REMEASURE
        if is_stale:
            plan = None
        outgrown = None
        if plan is not None:
            plan.expect(self.context)
            if self.context.peers.ranks is None and self.limits.is_outgrown(plan):
                outgrown, plan = plan, None
                del plans[key]
        wants_plan = plan is None or plan.verdict is not Verdict.KEEP
        wants_measure, wants_plan, is_lost = self.context.peers.settle(
            is_one_behind, is_stale or engine.device_of(key) is None, wants_plan, plan is None
        )
        if plan is not None and not wants_plan:
            plan.key = key
            if engine.searches is not None and not self.is_pending():
                plan = engine.searches.improved(plan, call)
            if plan.verdict is Verdict.KEEP:
                return plan
        if key.measured in self._unplanned:
            return None
        planned = self._announcer.timed()
        with dispatch.keys_kept(), planning, planned, allocator.highest_peak() as peak_bytes:
            if wants_measure:
                is_stale |= self.context.peers.ranks is not None
                self._attempts.asked = key = self.order.kind_of(key, call, self._make)
                try:
                    self._measure(key, call, again=is_stale)
                except NothingToPlan:
                    self._unplanned.add(key.measured)
                    return None
            if is_lost:
                plans.pop(key, None)
            key = self.context.refined(key)
            old, make = plans.get(key), partial(self._make, key)
            try:
                if old is None:
                    plan = self._first(key, call)
                else:
                    plan = self.order.owner(old).replan(old, make)
            except InfeasibleError as error:
                plan = self._install(key, self.limits.going_on(outgrown, error, self.context))
            warn_of_measuring(self.context, plan.limit_bytes, peak_bytes())
        if plan.verdict is Verdict.GIVE_UP:
            return self._ready(key, call, is_one_behind=is_one_behind)
        return plan

    def _give_up(self, key: Key, call: Call, plan: Any) -> Any:
        """Return the next engine's plan if that engine keeps the limit; ``None`` to make one."""
        context, before = self.context, self.context.refusals.get(key.measured)
        plan.is_over, owner = False, self.order.owner(plan)
        if self.order.of(key) is not owner:
            needed = format_bytes(plan.measured_bytes or 0)
            context.lacking[plan.engine][plan.key.measured] = f"needed {needed} in a step"
            # What one way to run a step needs beside its plan says nothing about the others.
            plan.outdated, plan.reserve_bytes = True, 0
            return plan
        if not self.order.refuse(key, call, plan.describe_excess()):
            return plan
        following = self.order.of(key)
        if following.device_of(key) is None:
            return None
        taken = self._make(key)
        try:
            following.measure(key, call)
        except (InfeasibleError, Untriable):
            self.context.warn("over", plan.describe_excess())
            self.order.hand_back(key, before)
            return self._install(key, plan)
        self.context.warn("over", f"{plan.describe_excess()}. {TAKEN_OVER}")
        return taken

    def run_plan(self, plan: Any, call: Call, absent: Any, engine: Engine | None = None) -> Any:
        """Return the output of a step that runs by its plan's engine, or by a given one."""
        engine = engine or self.order.owner(plan)
        before = self._attempts.state_before(engine, call, plan, self.context)
        started: list[StepWatch] = []

        def start() -> StepWatch | None:
            is_crowded, self._is_crowded = self._is_crowded, False
            meter = None
            if not (is_crowded or backwards.in_pipeline()):
                meter = observer_of_step(engine, plan, absent)
            if meter is not None:
                started.append(meter)
            return meter

        previous = STEP.set(RerunNotes(self.context, engine, plan, self.is_pending))
        try:
            try:
                output, self._is_pending = engine.run(plan, call, start)
            except CannotPlan as refused:
                if self.order.of(plan.key) is engine:
                    raise
                self.context.lacking[plan.engine][plan.key.measured] = refused.line
                engine.forget(plan.key.measured)
                raise PlanAgain from refused
            _begun.add(self)
            output = with_views(output)
        except BaseException as error:
            may_go_on = is_of_caller(error, engine, self.context)
            while started:
                end_after_error(started.pop(), self, plan, may_go_on=may_go_on)
            if not isinstance(error, CannotPlan | PlanAgain):
                self._attempts.put_back(before)
            raise
        finally:
            STEP.reset(previous)
        self._attempts.proven.add(engine)
        warn_of_later_code(self.context, plan.limit_bytes, output)
        return output if started else watch.watch_loss(plan, output)

    def _warn_pending(self, limit_bytes: int) -> None:
        self.context.warn(
            "pending",
            "a forward began while the backward of an earlier one was still to come: each "
            f"keeps its own limit's worth of memory, {exact_bytes(limit_bytes)}",
        )
        # A meter of several steps at once tells nothing about one of them.
        self._is_crowded = True


_begun: weakref.WeakSet[Driver] = weakref.WeakSet()


def _reference(module: nn.Module | None) -> Callable[[], nn.Module | None]:
    return (lambda: None) if module is None else weakref.ref(module)
