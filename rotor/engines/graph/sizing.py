"""Shapes of one model's calls: their captures, steps and plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rotor._pytorch import core
from rotor.common.progress import progress
from rotor.engines.contract import Call, CannotPlan, Context, Key
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.early import owners_of
from rotor.engines.graph.families import Families, Family, origins_of, shapes_of
from rotor.engines.graph.known import KnownOrders
from rotor.engines.graph.lowering import Lowered
from rotor.engines.graph.planned import GraphPlan
from rotor.engines.graph.profile import keys_of
from rotor.engines.graph.recorded import MEASURED, price
from rotor.engines.graph.repeating import described_unrepeatable, keep_unrepeatable
from rotor.engines.graph.shapes import SymbolicGraph
from rotor.engines.graph.symbols import origin_values
from rotor.errors import CaptureError, InfeasibleError
from rotor.report.text import Text
from rotor.units import exact_bytes

__all__ = ["Sizing", "warn_unrepeatable"]


def warn_unrepeatable(context: Context, graphs: Sequence[Lowered]) -> None:
    """Warn of operations that gave other bits in a second run."""
    text = described_unrepeatable(graphs)
    if text:
        context.warn("unrepeatable", text)


class Sizing:
    """Families of one model's calls, with their captures, steps and plans for the graph engine."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.families = Families()

    # -- measuring

    def step(
        self,
        key: Key,
        loss_fn: Any,
        arguments: Any,
        call: Call,
        make: Callable[[], Capture],
        steps: dict[Any, CapturedStep],
    ) -> CapturedStep | None:
        """Return the step of a further shape; None if its call is captured alone.

        `make` makes a capture. `steps` has the steps by `Key.measured`; those of shapes that were
        captured alone before are exchanged too. Raise CannotPlan if the capture of another shape
        has failed.
        """
        family = self.families.joined(key.measured, self.context.module, arguments)
        if family.error is not None:
            raise CannotPlan(CaptureError(*family.error.args))
        family.keep()
        shapes = shapes_of(core.tree_flatten(arguments)[0])
        differing = family.differing(shapes)
        family.shapes[key.measured] = shapes
        found = None
        if differing and not family.refusal:
            text, given = family.text(shapes, differing), (loss_fn, *arguments)
            with progress(1, f"capturing the model for any sizes ({text} first)"):
                found = family.reach(make, self.context.module, given, arguments, differing)
        if found is None:
            family.separate_count += 1
            return None
        try:
            if family.graph_of(found.captured) is None:
                self._add_graph(family, found, call, steps, loss_captured=loss_fn is not None)
            made = steps[key.measured] = self._resized(family, found)
        finally:
            found.drop()
        return made

    def captured_separately(self, key: Key, arguments: tuple[Any, ...], reason: str) -> None:
        """Note a shape that is captured alone, for a reason why no size can be a symbol."""
        family = self.families.joined(key.measured, self.context.module, arguments)
        shapes = shapes_of(core.tree_flatten(arguments)[0])
        for leaf, dimension in family.differing(shapes):
            name = f"dimension {dimension} of {family.names[leaf]}"
            family.constants[name] = f"{name} is a constant: {reason}"
        family.separate_count += key.measured not in family.shapes
        family.shapes[key.measured] = shapes

    def reached(self, key: Key, found: Unplanned) -> CapturedStep | None:
        """Return the step of a call that reached a known graph with symbols, if it did."""
        family = self.families.of(key.measured)
        if family is None or family.graph_of(found.captured) is None:
            return None
        made = self._resized(family, found)
        found.drop()
        return made

    @staticmethod
    def _resized(family: Family, found: Unplanned) -> CapturedStep:
        graph = family.graph_of(found.captured)
        assert graph is not None
        return graph.step(tuple(origin_values(found.captured.lowered, found.primals)))

    def _add_graph(
        self,
        family: Family,
        found: Unplanned,
        call: Call,
        steps: dict[Any, CapturedStep],
        *,
        loss_captured: bool,
    ) -> None:
        """Add a graph with symbols, with costs of its operations at the known shapes."""
        captured, device = found.captured, self.context.device_of(call)
        settings, context, lowered = self.context.settings, self.context, captured.lowered
        values = tuple(origin_values(lowered, found.primals))
        arguments = (*call.arguments, call.targets)
        origins, leaf_sizes = origins_of(captured, found.primals, core.tree_flatten(arguments)[0])
        graph = SymbolicGraph(
            family.shared_capture,
            captured,
            device,
            loss_captured=loss_captured,
            planned_for="" if settings.profile == MEASURED else settings.profile.device,
            owners=owners_of(lowered, found.primals, context.structure.parameters, arguments),
            verifies=settings.verify != "off",
            origins=origins,
            leaf_sizes=leaf_sizes,
            known=self._known_orders(device),
            offload=settings.offload,
        )
        with progress(1, "measuring the operations") as update:
            costs = price(
                settings.profile, graph.concrete(values), device, found.primals, progress=update
            )
        keep_unrepeatable(lowered, [cost.flags for cost in costs])
        warn_unrepeatable(context, [lowered])
        graph.add_point(values, costs)
        for measured, shapes in family.shapes.items():
            step, there = steps.get(measured), graph.values_at(shapes)
            if step is None or step.shares_shapes or there is None or there == values:
                continue
            known = dict(zip(keys_of(step.captured.lowered, device), step.costs, strict=True))
            graph.add_known(there, known)
            if measured in context.learned_loss:
                graph.losses[there] = context.learned_loss[measured]
            for key in [key for key in context.plans if key.measured == measured]:
                # From now on this shape runs on the graph with symbols, as the others do.
                graph.held[there] = context.plans.pop(key).limit_bytes
            steps[measured] = graph.step(there)
            family.separate_count -= 1
        family.graphs.append(graph)

    def _known_orders(self, device: torch.device) -> Callable[[Lowered], KnownOrders] | None:
        """Return a function that reads programs from disk; None where a seed decides alone."""
        is_open = self.context.may_improve_plans()
        has_tier = self.context.settings.offload is not None
        return partial(KnownOrders, device=device, has_tier=has_tier) if is_open else None

    def refuse(self, key: Key, error: CaptureError) -> None:
        """Have no other sizes captured of a call whose capture has failed."""
        family = self.families.of(key.measured)
        if family is not None:
            family.error = CaptureError(*error.args)  # Frames hold the arguments of the call.

    def forget(self, measured: Any) -> None:
        """Have a kind of step captured again."""
        family = self.families.of(measured)
        if family is None:
            return
        if family.error is not None:
            family.put_back()
        if list(family.shapes) in ([], [measured]) and not family.graphs:
            self.families.drop(measured)

    def forget_programs(self) -> None:
        """Drop all programs, since an option has changed."""
        for family in self.families:
            for graph in family.graphs:
                graph.forget_programs()

    # -- planning

    def plan(
        self,
        step: CapturedStep,
        key: Key,
        reserve_bytes: int,
        solve: Any,
        make: Callable[[int, Any], GraphPlan],
    ) -> GraphPlan:
        """Return the plan of a step, which shapes may share.

        `make` makes a plan from the bytes set aside and a search for programs: the step's own, else
        `solve`, and the planner's if that is None. Raise InfeasibleError if no program fits;
        `too_large` has a better message.
        """
        family, begun = self.families.of(key.measured), time.monotonic()
        plan = make(max(reserve_bytes, step.expected_excess), step.solver or solve)
        step.adopt(plan)
        if family is not None and step.shares_shapes:
            spent = family.seconds.get(key.measured, 0.0)
            family.seconds[key.measured] = spent + time.monotonic() - begun
        return plan

    def described(self, key: Key) -> str:
        """Return the shape of a call as text; empty if all calls have the same shape."""
        family = self.families.of(key.measured)
        if family is None or key.measured not in family.shapes:
            return ""
        shapes = family.shapes[key.measured]
        differing = family.differing(shapes)
        return f" for {family.text(shapes, differing)}" if differing else ""

    def too_large(
        self, step: CapturedStep, key: Key, limit: int, error: InfeasibleError
    ) -> InfeasibleError:
        """Return the error for a step that fits in no plan: it names the largest shape that does.

        `error` of the search for its plan is returned if no other shape is known.
        """
        family = self.families.of(key.measured)
        if not step.shares_shapes or family is None:
            return error
        shapes = family.shapes[key.measured]
        differing = family.differing(shapes)
        largest = step.largest_fitting(limit, shapes)
        found = "none is known that fits"
        if largest is not None:
            text = family.text(largest, differing)
            found = f"the largest on the way to it from shapes that fit is {text}"
        return InfeasibleError(
            f"no plan was found that fits {family.text(shapes, differing)} in "
            f"{exact_bytes(limit)}; the least limit for which one was found is "
            f"{exact_bytes(error.minimum_bytes)}, and at {exact_bytes(limit)} {found}: give more "
            "bytes, or smaller batches",
            *error.args[1:],
        )

    def remarks(self) -> list[Text]:
        """Return a note on the shapes of the calls, and the captures and plans that they share."""
        found = [family.describe() for family in self.families]
        return [Text(text) for text in found if text]
