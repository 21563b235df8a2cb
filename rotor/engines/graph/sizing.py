"""Shapes of one model's calls: which share a capture, their steps and plans."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, symbols
from rotor.common.calls import PlainValues, leaf_expressions
from rotor.common.frames import release
from rotor.common.progress import progress
from rotor.engines.contract import Call, CannotPlan, Context, Key
from rotor.engines.graph.capture import Capture, Captured, Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.early import owners_of
from rotor.engines.graph.code.handover import Away
from rotor.engines.graph.costs.profile import Cost, keys_of
from rotor.engines.graph.costs.repeating import described_unrepeatable, keep_unrepeatable
from rotor.engines.graph.costs.symbols import AnySize, Shapes, origin_values
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import CaptureError, InfeasibleError
from rotor.report.text import Text
from rotor.tier.state import AwayState
from rotor.units import exact_bytes

_MOST_GRAPHS = 4
"""Number of captures with symbols of one family after which further shapes are captured alone."""

_MOST_NAMES = 3
"""Number of arguments that a warning names."""

Dimensions = Sequence[tuple[int, int]]
"""Dimensions of a call's arguments: (leaf, number)."""


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """Return the shapes of the tensors among the leaves of a call."""
    return tuple([tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves])


def named_arguments(module: nn.Module, arguments: Any) -> list[tuple[str, Any]]:
    """Return (arguments by position, by name, targets) by their names."""
    args, kwargs, targets = arguments
    parameters = list(inspect.signature(module.forward).parameters)
    named: list[tuple[str, Any]] = [
        (parameters[k] if k < len(parameters) else f"argument {k}", value)
        for k, value in enumerate(args)
    ]
    named += kwargs.items()
    named += [
        (f"target {k}", value) for k, value in enumerate((None,) if targets is None else targets)
    ]
    return named


def leaf_names(module: nn.Module, arguments: Any) -> list[str]:
    """Return a name for each leaf of (arguments by position, by name, targets)."""
    found = []
    for name, value in named_arguments(module, arguments):
        leaves = core.tree_flatten(value)[0]
        found += [name if len(leaves) == 1 else f"{name}[{k}]" for k in range(len(leaves))]
    return found


def note_reads(context: Context, key: Key, captured: Captured | None, call: Call) -> None:
    """Note which numbers and texts among the arguments a capture, if there is one, reads."""
    values = PlainValues.of(key.measured)
    arguments = (*call.arguments, call.targets)
    expressions = leaf_expressions(arguments)
    read = [k for k in values.values if captured and captured.reads(expressions[k])]
    many = values.reads.note(frozenset(read), values)
    if many:
        known = leaf_names(context.module, arguments)
        names = [known[k] for k in many]
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} more"]
        context.warn(
            f"values of {names[0]}",
            f"{' and '.join(names)} had three values so far, and the model, "
            "whose code depends on them, was captured and planned anew for each: give numbers "
            "that change as tensors, and leave out what the model need not know",
        )
    named = named_arguments(context.module, arguments)
    structures = {name: str(core.tree_flatten(value)[1]) for name, value in named}
    tensors = tuple(part for part in key.measured[1] if isinstance(part, tuple))
    varied = context.structures[tensors, key.measured[3:]].note(structures)
    if varied:
        context.warn(
            f"structures of {varied[0]}",
            f"{' and '.join(varied)} had three structures so far (lengths of lists, keys of "
            "dictionaries), and the model was captured and planned anew for each: keep what "
            "grows in an object, and leave out what the model need not know",
        )


_KEPT_APART = frozenset(("before", "capture"))


@dataclass
class Family:
    """Calls that differ in the sizes of tensors only."""

    names: list[str]
    """Name of each leaf of the arguments."""
    shapes: dict[Any, Shapes] = field(default_factory=dict)
    """Shapes of the calls so far, by their `Key.measured`."""
    capture: Capture | None = None
    """Capture with symbols; None before the second shape."""
    graphs: list[CapturedStep] = field(default_factory=list)
    """First step of each graph with symbols."""
    alone: dict[Any, CapturedStep] = field(default_factory=dict)
    """Steps of shapes that were captured alone, by their `Key.measured`."""
    constants: dict[str, str] = field(default_factory=dict)
    """Reasons why sizes became constants of a graph, by size."""
    refusal: str = ""
    """Reason why further shapes are captured alone; empty if they are not."""
    error: CaptureError | None = None
    """Error of a capture, after which no other shape is tried."""
    separate_count: int = 0
    """Number of shapes that were captured alone."""
    seconds: dict[Any, float] = field(default_factory=dict)
    """Time of planning each shape, by its `Key.measured`."""
    before: dict[str, Any] = field(default_factory=dict)
    """State before the latest new shape."""

    def keep(self) -> None:
        """Keep the state, before a new shape."""
        self.before = {
            name: copy(value) for name, value in vars(self).items() if name not in _KEPT_APART
        }

    def put_back(self) -> None:
        """Restore the state before the latest new shape."""
        vars(self).update(self.before)

    def differing(self, shapes: Shapes) -> list[tuple[int, int]]:
        """Return the dimensions, as (leaf, number), in which calls so far differ."""
        known = [*self.shapes.values(), shapes]
        found: set[tuple[int, int]] = set()
        for other in known[1:]:
            for leaf, (one, two) in enumerate(zip(known[0], other, strict=True)):
                if one is not None and two is not None:
                    found.update((leaf, d) for d in range(len(one)) if one[d] != two[d])
        return sorted(found)

    def note(self, measured: Any, arguments: Any) -> Dimensions:
        """Note the shapes of a call; return the dimensions in which calls differ."""
        shapes = shapes_of(core.tree_flatten(arguments)[0])
        differing = self.differing(shapes)
        self.shapes[measured] = shapes
        return differing

    def step_of(self, found: Unplanned) -> CapturedStep | None:
        """Return the step of a call that has reached a known graph with symbols; else None."""
        captured = found.captured
        known = next((step for step in self.graphs if step.captured is captured), None)
        return known and known.at(origin_values(captured.lowered, found.primals))

    def text(self, shapes: Shapes, among: Dimensions = ()) -> str:
        """Return the shapes of a call as text.

        `among` are dimensions that differ: if there are any, only their leaves are named.
        """
        leaves = {leaf for leaf, _ in among}
        return ", ".join(
            f"{name} {list(shape)}"
            for k, (name, shape) in enumerate(zip(self.names, shapes, strict=True))
            if shape is not None and (not leaves or k in leaves)
        )

    def reach(
        self,
        make: Callable[[], Capture],
        module: nn.Module,
        given: tuple[Any, ...],
        arguments: Any,
        differing: Dimensions,
    ) -> Unplanned | None:
        """Capture a call with symbols, or find its graph; None if it has to be captured alone.

        `make` makes a capture, whose function takes `given` beside the module. `arguments` are
        those of the call, and `differing` their dimensions that become symbols.
        """
        leaves = core.tree_flatten(arguments)[0]
        if self.capture is None:
            self.capture = make()
        marked = [(leaves[leaf], dimension) for leaf, dimension in differing]
        try:
            found = self.capture.reach(module, *given, symbolic=marked)
        except CaptureError as error:
            lines = [text.strip() for text in str(error).splitlines() if text.strip()]
            shown = lines if len(lines) < 3 else [lines[0], *lines[-2:]]
            self.refusal = f"the capture with symbols failed: {' ... '.join(shown)}"
            return None
        captured = found.captured
        known = self.step_of(found)
        if known is not None:
            broken = known.broken
            if not broken:
                return found
            self.constants[broken] = f"kernels hold only where {broken}"
            found.drop()
            return None
        constants = self._constants(captured, found.primals, leaves, differing)
        self.constants.update(constants)
        if not captured.lowered.symbols:
            self.refusal = "; ".join(constants.values()) or "no size of the graph is a symbol"
            return None
        if len(self.graphs) >= _MOST_GRAPHS:
            self.refusal = f"its code asked for more than {_MOST_GRAPHS} graphs with symbols"
            return None
        return found

    def _constants(
        self,
        captured: Captured,
        primals: Sequence[Any],
        leaves: Sequence[Any],
        differing: Dimensions,
    ) -> dict[str, str]:
        """Return reasons, by size, for marked sizes that became constants of a graph."""
        nodes = {
            id(primal): node for node, primal in zip(captured.lowered.primals, primals, strict=True)
        }
        found = {}
        for leaf, dimension in differing:
            node = nodes.get(id(leaves[leaf]))
            value = None if node is None else node.meta.get("val")
            if not isinstance(value, torch.Tensor) or symbols.is_symbol(value.shape[dimension]):
                continue
            size = int(value.shape[dimension])
            name = f"dimension {dimension} of {self.names[leaf]}"
            line = symbols.line_of_constant(value, dimension)
            because = f", by {line}" if line else ""
            if size in (0, 1):
                because = ": captures take sizes 0 and 1 as constants"
            found[f"{name} = {size}"] = f"{name} is the constant {size}{because}"
        return found

    def describe(self) -> str:
        """Return the shapes, captures and times of planning as text; empty if all are alike."""
        count = len(self.shapes)
        if count < 2:
            return ""
        differing = self.differing(next(iter(self.shapes.values())))
        shared = count - self.separate_count
        lines = [
            f"shapes: {count} of {', '.join(sorted({self.names[leaf] for leaf, _ in differing}))}; "
            f"{shared} share {len(self.graphs)} captured graph{'s' * (len(self.graphs) != 1)}, "
            f"{self.separate_count} captured alone"
        ]
        if self.seconds:
            slowest = max(self.seconds, key=lambda key: self.seconds[key])
            total = sum(self.seconds.values())
            lines.append(
                f"planning took {total:.3g} s in all, {total / len(self.seconds):.3g} s a shape, "
                f"at most {self.seconds[slowest]:.3g} s "
                f"({self.text(self.shapes[slowest], differing)})"
            )
        lines += [f"a graph of its own: {reason}" for reason in self.constants.values()]
        if self.refusal:
            lines.append(f"each further shape is captured alone: {self.refusal}")
        return "\n".join(lines)


def kind_of(measured: Any) -> Any:
    """Return what calls that differ in the sizes of tensors only have in common."""
    spec, leaves, *rest = measured
    kinds = [
        (len(leaf[0]), *leaf[2:])
        if isinstance(leaf, tuple) and isinstance(leaf[0], torch.Size)
        else leaf
        for leaf in leaves
    ]
    return (spec, tuple(kinds), *rest)


class Families(dict[Any, Family]):
    """Families of the calls of one model."""

    def of(self, measured: Any) -> Family | None:
        """Return the family of a kind of step, if it has one."""
        return self.get(kind_of(measured)) if self else None

    def joined(self, measured: Any, module: nn.Module, arguments: Any) -> Family:
        """Return the family of a call, made if it is new."""
        key = kind_of(measured)
        if key not in self:
            self[key] = Family(leaf_names(module, arguments))
        return self[key]


def origins_of(
    captured: Captured, primals: Sequence[Any], leaves: Sequence[Any]
) -> tuple[list[tuple[int, int]] | None, dict[int, list[str]]]:
    """Return the origins of a graph's symbols among a call's leaves, and the sizes of the leaves.

    For each symbol, in the order of `Lowered.symbols`, the leaf and its dimension; None if a symbol
    has no origin. The sizes are expressions, by leaf.
    """
    places = {id(leaf): k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    origins: dict[str, tuple[int, int]] = {}
    sizes: dict[int, list[str]] = {}
    for node, primal in zip(captured.lowered.primals, primals, strict=True):
        place = places.get(id(primal))
        value = node.meta.get("val")
        if place is None or not isinstance(value, torch.Tensor):
            continue
        sizes[place] = [symbols.text_of(size) for size in value.shape]
        for dimension, text in enumerate(sizes[place]):
            origins.setdefault(text, (place, dimension))
    names = list(captured.lowered.symbols)
    known = set(names) <= set(origins)
    return [origins[name] for name in names] if known else None, sizes


def made_step(
    kind: type[CapturedStep],
    capture: Capture,
    found: Unplanned,
    slots: Sequence[core.Slot],
    arguments: Any,
    device: torch.device,
    price: Callable[[Lowered], list[Cost]],
    state: AwayState | None,
    family: Family | None = None,
    **facts: Any,
) -> CapturedStep:
    """Return the step of a captured call; with a family, of one whose graph its shapes share.

    That of a known graph has its costs. `slots` are those of the module's parameters, and `state`
    has those that are in a second tier. A new graph with symbols has the costs that `price` returns
    at the sizes of the call, and those of the shapes that were captured alone. `facts` are other
    fields of the step.
    """
    captured, lowered = found.captured, found.captured.lowered
    if family is not None and (known := family.step_of(found)) is not None:
        return known
    with core.NOTHING if state is None else state.shells(slots):
        owners = owners_of(lowered, found.primals, slots, arguments)
    if family is None:
        costs = price(lowered)
    else:
        leaves, values = core.tree_flatten(arguments)[0], origin_values(lowered, found.primals)
        any_size = AnySize(lowered, device, *origins_of(captured, found.primals, leaves))
        costs = price(any_size.concrete(values))
        keep_unrepeatable(lowered, [cost.flags for cost in costs])
        any_size.add_point(values, costs)
        for measured, one in family.alone.items():
            there = any_size.values_at(family.shapes[measured])
            if there is not None and there != values:
                priced = zip(keys_of(one.captured.lowered, device), one.costs, strict=True)
                any_size.add_known(there, dict(priced))
        facts |= {"any_size": any_size, "values": values}
    away = Away.of(state, lowered, owners, slots)
    step = kind(capture, captured, costs, device, owners=owners, away=away, **facts)
    if family is not None:
        family.graphs.append(step)
    return step


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

    def shared(
        self,
        key: Key,
        loss_fn: Any,
        arguments: Any,
        make: Callable[[], Capture],
        profiled: Callable[..., CapturedStep],
    ) -> CapturedStep | None:
        """Return the step of a further shape; None if its call is captured alone.

        `make` makes a capture, and `profiled` a step of it, a captured call and a family. Raise
        CannotPlan if the capture of another shape has failed.
        """
        family = self.families.joined(key.measured, self.context.module, arguments)
        if family.error is not None:
            raise CannotPlan(CaptureError(*family.error.args))
        family.keep()
        family.alone.pop(key.measured, None)
        found, differing = None, family.note(key.measured, arguments)
        if differing and not family.refusal:
            text = family.text(family.shapes[key.measured], differing)
            doing = f"capturing the model for any sizes ({text} first)"
            with progress(1, doing), self.context.shells():
                given = (loss_fn, *arguments)
                found = family.reach(make, self.context.module, given, arguments, differing)
        try:
            if found is not None:
                return profiled(family.capture, found, family=family)
        except CaptureError as error:
            # A kernel cannot be compiled for all sizes.
            family.refusal = str(error).splitlines()[-1]
            release(error)
        family.separate_count += 1
        return None

    def captured_separately(self, key: Key, arguments: tuple[Any, ...], reason: str) -> None:
        """Note a shape that is captured alone, for a reason why no size can be a symbol."""
        family = self.families.joined(key.measured, self.context.module, arguments)
        family.separate_count += key.measured not in family.shapes
        for leaf, dimension in family.note(key.measured, arguments):
            name = f"dimension {dimension} of {family.names[leaf]}"
            family.constants[name] = f"{name} is a constant: {reason}"

    def reached(self, key: Key, found: Unplanned) -> CapturedStep | None:
        """Return the step of a call that reached a known graph with symbols, if it did."""
        family = self.families.of(key.measured)
        step = None if family is None else family.step_of(found)
        if step is not None:
            found.drop()
            if step.broken:
                raise CannotPlan(CaptureError(f"kernels hold only where {step.broken}"))
        return step

    def add(self, key: Key, made: CapturedStep, steps: dict[Any, CapturedStep]) -> None:
        """Add a new step to `steps`, by `Key.measured`.

        Shapes that were captured alone run on its graph from now on, if they can.
        """
        steps[key.measured] = made
        family, context = self.families.of(key.measured), self.context
        if made.any_size is None:
            if family is not None:
                family.alone[key.measured] = made
            return
        assert family is not None
        for measured in list(family.alone):
            there = made.any_size.values_at(family.shapes[measured])
            if there is None or there == made.values or made.any_size.broken_at(there):
                continue
            if measured in context.learned_loss:
                made.any_size.losses[there] = context.learned_loss[measured]
            for other in [other for other in context.plans if other.measured == measured]:
                made.any_size.held[there] = context.plans.pop(other).limit_bytes
            steps[measured] = made.at(there)
            del family.alone[measured]
            family.separate_count -= 1

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
        family.alone.pop(measured, None)
        if list(family.shapes) in ([], [measured]) and not family.graphs:
            del self.families[kind_of(measured)]

    # -- planning

    @contextmanager
    def timed(self, key: Key) -> Iterator[None]:
        """Count the time of a context as that of planning a shape, unless it raises."""
        begun = time.monotonic()
        yield
        spent, family = time.monotonic() - begun, self.families.of(key.measured)
        if family is not None:
            family.seconds[key.measured] = family.seconds.get(key.measured, 0.0) + spent

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
        found = [family.describe() for family in self.families.values()]
        return [Text(text) for text in found if text]
