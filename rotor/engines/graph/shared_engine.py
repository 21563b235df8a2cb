"""Graph engine of replicas that run one program, each on its own batch.

Every decision is made before a step, by all ranks: which kind of step comes, whether it is measured
or planned, and by which program. Right before the captured forward they meet once more, since only
then each rank knows that its call has reached the planned graph, and that its tier has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from rotor.common.ranks import NeedsPeers, RankError, Ranks, digest
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    IsPending,
    Key,
    NothingToPlan,
    PlanAgain,
    StartMeter,
)
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.graph.making import ON_ITS_OWN, OtherGraphs, check_same, priced_together
from rotor.engines.graph.planned import GraphPlan
from rotor.errors import CaptureError
from rotor.report.text import Text
from rotor.units import exact_bytes

_READY, _ELSEWHERE, _FAILED = range(3)


class _Meeting:
    """Agreement of ranks, before anything of a step runs, that all can run it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.outcome: int | None = None
        """State of all ranks; None before they met."""

    def come(self, state: int, error: Exception | None = None) -> None:
        """Wait for the other ranks; raise `error` on a rank that has one.

        Raise RankError if a rank failed, or only some ranks have reached another graph.
        """
        self.outcome = _FAILED
        found = [other for (other,) in self._ranks.exchange_ints(state)]
        if _FAILED in found:
            self._ranks.all_well(error)
        elsewhere = [rank for rank, other in enumerate(found) if other == _ELSEWHERE]
        if 0 < len(elsewhere) < len(found):
            raise OtherGraphs(
                f"rank {', '.join(map(str, elsewhere))} of {len(found)} has reached another graph "
                "than the planned one: a Python value that the model's code depends on has changed "
                "there, and not on the other ranks. Keep such values in tensors, or the same on "
                f"all ranks, or {ON_ITS_OWN}"
            )
        self.outcome = state


class SharedGraphEngine(GraphEngine):
    """Captured steps of replicas that run the same programs, such as under DDP.

    Each rank captures and measures its own step. The least limit of all holds, the slowest link and
    the least limit of a tier; the first rank searches.
    """

    improves: ClassVar[bool] = False
    follows_shapes: ClassVar[bool] = False
    ranks_meter_later: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        assert context.peers.ranks is not None
        self._ranks: Ranks = context.peers.ranks
        self._meeting = _Meeting(self._ranks)
        self._forgotten: set[Any] = set()

    # -- measuring

    def measure(self, key: Key, call: Call) -> CapturedStep:
        """Capture and measure a step, on all ranks or on none."""
        before = self.steps.get(key.measured)
        try:
            found = self._ranks.together(partial(self._measured, key, call))
            refusals, members = zip(*found, strict=True)
            if any(members):
                raise NeedsPeers(frozenset().union(*members))
            if all(refusals):
                raise CannotPlan(CaptureError(refusals[self._ranks.rank]))
            for rank, refusal in enumerate(refusals):
                if refusal:
                    named = f"rank {rank} of {len(refusals)} cannot go on: {refusal}"
                    raise CannotPlan(RankError(named))
            is_needless = self.device_of(key) is None
            without = [nothing for (nothing,) in self._ranks.exchange_ints(is_needless)]
            if any(without):
                if all(without):
                    raise NothingToPlan
                needless = ", ".join(str(rank) for rank, nothing in enumerate(without) if nothing)
                raise RankError(
                    f"nothing in the step of rank {needless} needs a gradient, and the step of "
                    "others does: freeze the same parameters on every rank"
                )
            self._price_collectives(self.steps[key.measured])
        except BaseException:
            self.steps.pop(key.measured, None)
            if before is not None:
                self.steps[key.measured] = before
            raise
        if self.settings.offload is not None:
            self.settings.offload.share(self._ranks)
        return self.steps[key.measured]

    def _price_collectives(self, step: CapturedStep) -> None:
        lowered = step.captured.lowered
        try:
            check_same(self._ranks, lowered)
        except OtherGraphs as error:
            raise CannotPlan(RankError(*error.args)) from None
        if not step.planned_for:
            step.set_costs(priced_together(self._ranks, lowered, step.costs, step.device))

    def _measured(self, key: Key, call: Call) -> tuple[str, frozenset[int]]:
        """Measure this rank's step, or find it; return why not, where another engine may run it.

        The second result is empty, or the ranks of its collectives and of this group, where others
        take part. A step that needs no gradient is left unmeasured.
        """
        own = key.measured[0]
        alike = [step for measured, step in self.steps.items() if measured[0] == own]
        known = alike[-1] if alike and own not in self._forgotten else None
        self._forgotten.discard(own)
        try:
            if known is None:
                super().measure(key, call)
            else:
                self.steps[key.measured] = known
        except NothingToPlan:
            return "", frozenset()
        except NeedsPeers as needed:
            return "", needed.members
        except CannotPlan as refused:
            if self.context.peers.has_collectives:
                return str(refused.error), frozenset()
            raise CaptureError(
                f"{refused.error}\nshare_plans() is for chains and for models that are captured as "
                "one graph: without it this model can run in parts, or in the dynamic engine, "
                "where each process plans for itself"
            ) from None
        if self.settings.offload is not None:
            self.settings.offload.known_link(self.context.device_of(call))
        return "", frozenset()

    def forget(self, measured: Any) -> None:
        """Have a kind of step captured again, also if another combination of ranks has it."""
        super().forget(measured)
        self._forgotten.add(measured[0])

    @property
    def remarks(self) -> Sequence[Any]:
        """Note on the ranks and their limit."""
        least = f"the least limit of all, {exact_bytes(self.context.latest.limit_bytes)}"
        return [Text(f"{self._ranks.size} ranks run this program, under {least}")]

    # -- planning

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> GraphPlan:
        """Return this rank's plan of the program of all ranks, under the least limit of all."""
        limit, reserve = self._ranks.joint_limit(limit_bytes, reserve_bytes)
        if self.settings.offload is not None:
            self.settings.offload.share(self._ranks)
        return super().plan(key, limit, reserve)

    def replan(self, old: Any, make: Any) -> Any:
        """Return a plan that includes the lessons of metered steps, on all ranks or on none."""
        again = super().replan
        return self._ranks.jointly(lambda: again(old, make))

    def load(self, key: Key, source: Any, limit_bytes: int) -> GraphPlan:
        """Return the plan of a saved program, which all ranks load."""
        limit, _ = self._ranks.joint_limit(limit_bytes, 0)
        learned = self.context.learned_loss
        known = dict(learned)
        found: list[GraphPlan] = []

        def load() -> int:
            found.append(super(SharedGraphEngine, self).load(key, source, limit))
            return digest(found[0].program.actions.tolist())

        try:
            if len(set(self._ranks.together(load))) > 1:
                raise RankError("the ranks have loaded different programs: load one file on all")
        except BaseException:
            learned.clear()
            learned.update(known)
            raise
        return found[0]

    # -- running

    def run(self, plan: GraphPlan, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan, if all ranks can."""
        meeting = self._meeting = _Meeting(self._ranks)
        try:
            return super().run(plan, call, start)
        except PlanAgain:
            # All have captured the graph that they reached.
            self._ranks.all_well(None)
            raise
        except OtherGraphs as error:
            # Nothing has run on any rank.
            raise CannotPlan(RankError(*error.args)) from None
        except Exception as error:
            problem = error.error if isinstance(error, CannotPlan) else error
            if meeting.outcome is None:
                meeting.come(_FAILED, problem)
            elif meeting.outcome == _ELSEWHERE:
                self._ranks.all_well(problem)
            if problem is error:
                raise
            raise problem from None

    def _with_numbers(self, plan: GraphPlan, call: Call) -> tuple[Capture, Unplanned] | None:
        capture = super()._with_numbers
        return self._ranks.jointly(lambda: capture(plan, call))

    def _run_captured(self, plan: GraphPlan, loss_fn: Any, given: Any) -> Any:
        captured, capture, meeting = plan.step.captured, plan.step.capture, self._meeting
        for other in capture.graphs:
            if other is not captured:
                other.emitted = None
        captured.meet = partial(meeting.come, _READY)
        try:
            return super()._run_captured(plan, loss_fn, given)
        except Unplanned:
            meeting.come(_ELSEWHERE)
            raise
        finally:
            captured.meet = None
