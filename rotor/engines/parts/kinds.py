"""Captured graphs of parts of a model: the ways to run each, and the needs of each way.

Parts of one kind, called alike, share the capture, the costs and the programs. A program is known
for several amounts of kept memory, and several peaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import nn

from rotor._pytorch import core
from rotor.common.accounting import GENERATOR_BYTES, generator_bytes
from rotor.common.rerun import Rerun, Unit
from rotor.common.tensor_trees import output_tensors
from rotor.engines.graph.capture import Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.actions import Action, actions_of
from rotor.engines.graph.code.actions import Kind as ActionKind
from rotor.engines.graph.code.early import Marks, slots_of
from rotor.engines.graph.code.emit import Emitted
from rotor.engines.graph.code.offloading import Layout, StepArea
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.code.proving import Prover
from rotor.engines.graph.searching import Entry
from rotor.engines.proofs import StepProof
from rotor.errors import CaptureError, InfeasibleError, InvalidSequenceError
from rotor.graph import planner
from rotor.graph.assembly import Option, undominated
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program
from rotor.tier.state import AwayState

logger = logging.getLogger("rotor")

Failure = Literal["", "now", "for good"]
"""Failure of a call, which has to run plain, or of all calls; empty if it ran as planned."""

_LEVELS = 7
_PEAKS = 4
"""Peaks below that of the order of the model, for programs with a second tier."""


def read_before_made(actions: Iterable[Action]) -> set[int]:
    """Return the storages that a part of a program finds made, and reads."""
    read: set[int] = set()
    made: set[int] = set()
    for action in actions:
        read.update(s for s in action.reads if s not in made)
        made.update(action.makes)
    return read


def fetched_last(actions: Iterable[Action]) -> set[int]:
    """Return the storages that were fetched after their last making."""
    found: set[int] = set()
    for action in actions:
        if action.kind is ActionKind.FETCH:
            found.update(action.makes)
        else:
            found.difference_update(action.makes)
    return found


@dataclass(eq=False)
class Kind(CapturedStep):
    """Captured graph of a part, and the ways to run it; its users hold its outputs."""

    releases_outputs: ClassVar[bool] = True
    search: dict[str, Any] = field(default_factory=dict)
    """Options of its searches for programs, those of `rotor.graph.plan`."""
    orders: dict[Any, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    """Actions of programs at any shape, by existing gradients and unrepeatable operations."""
    programs: list[Program] = field(init=False, default_factory=list)
    """Ways to run it; `options` has their needs."""
    planned_link: Link | None = field(default=None, init=False, repr=False)
    """Link to the second tier on which the programs count."""
    is_carried: bool = field(default=False, init=False)
    _entries: list[Entry] = field(init=False, default_factory=list)
    _options: dict[bool, list[Option]] = field(init=False, default_factory=dict)
    _layouts: dict[int, Layout | None] = field(init=False, default_factory=dict)
    _units: WeakKeyDictionary[nn.Module, Unit] = field(
        init=False, default_factory=WeakKeyDictionary
    )
    _known: int = field(default=0, init=False)

    def with_existing(self, module: nn.Module, existing: set[int]) -> Kind:
        """Return this graph for steps that begin with gradients of parameters with these ids.

        Gradients with homes in a second tier leave in each step.
        """
        slots = slots_of(module)
        found = self.existing_among([id(core.value_in(slot)) not in existing for slot in slots])
        kind = self.base.variant(found, frozenset())
        assert isinstance(kind, Kind)
        if not kind.programs:
            kind.find_programs()
        return kind

    def emitted(self, number: int) -> Emitted:
        """Return the functions of a program."""
        entry = self._entries[number]
        if entry.code is None:
            numbers = self.programs[number].actions.tolist()
            entry.code = self.code(numbers, self._layout_of(number))
        return entry.code

    def _layout_of(self, number: int) -> Layout | None:
        """Return the places of a program's offloaded values; ``None`` if it has none."""
        if number not in self._layouts:
            self._layouts[number] = self.layout(self.programs[number])
        return self._layouts[number]

    def verified(self, number: int) -> tuple[Emitted, Prover] | None:
        """Return a program's functions with comparisons; ``None`` if it recomputes nothing."""
        program, entry = self.programs[number], self._entries[number]
        if program.runs.max(initial=0) < 2:
            return None
        if entry.verified is None:
            prover = Prover(self.lowered, self.captured.lowered)
            code = self.code(program.actions.tolist(), self._layout_of(number), prover)
            entry.verified = code, prover
        return entry.verified

    def code_for(self, number: int, step: StepProof | None, k: int, place: str) -> Emitted:
        """Return the functions of a program for run k of a verified step, or for another one.

        The `place` is the path of the module that runs.
        """
        found = None if step is None else self.verified(number)
        if step is None or found is None:
            return self.emitted(number)
        code, prover = found
        prover.prepare(step, k, place)
        return code

    def recomputes(self, number: int) -> bool:
        """Return whether a program runs an operation again."""
        return self.verified(number) is not None

    def program(self, number: int) -> tuple[Program, Layout | None]:
        """Return a program, and the places of its values in the second tier."""
        return self.programs[number], self._layout_of(number)

    @property
    def unrepeatable(self) -> int:
        """Number of operations that are never recomputed."""
        return len(self.captured.lowered.unrepeatable)

    def refresh(self) -> None:
        """Search again for programs if an operation gave other bits."""
        if self.unrepeatable != self._known:
            self.find_programs()

    def find_programs(self, *, again: bool = False) -> None:
        """Plan the graph for several amounts of kept memory, and several peaks.

        Programs that were found at another shape are taken as they are; with `again`, the graph is
        planned at this shape too.
        """
        self._known = len(self.captured.lowered.unrepeatable)
        self.planned_link = self.link
        known = self.orders.setdefault((self.existing, self._known), [])
        carried = self._priced(known, self.planned_link)
        self.is_carried = bool(carried) and not again
        if self.is_carried:
            self._take_best(carried)
            return
        self._take_best([*self._searched(), *carried])
        known.extend(program.actions for program in self.programs)

    def follow_link(self) -> None:
        """Add programs for the latest speed of the second tier; the others keep their numbers."""
        link = self.link
        if link == self.planned_link:
            return
        self.planned_link = link
        old = self._priced([program.actions for program in self.programs], _lenient(link))
        known = {program.actions.tobytes() for program in old}
        new = {program.actions.tobytes(): program for program in self._searched()}
        self._add([new[actions] for actions in new if actions not in known], old)

    def _graph(self, workspace: int) -> Graph:
        """Return the cost model, whose outputs are not pinned.

        The workspace is that of what runs between its forward and its backward. With a link, values
        may move to a second tier, but not the outputs, which others hold.
        """
        lowered, moves = self.lowered, self.planned_link is not None
        held = lowered.tasks[lowered.loss].inputs if moves else ()
        return build_graph(lowered, self.costs, workspace, moves=moves, held=held, homes=self.homes)

    def _searched(self) -> list[Program]:
        """Return programs, beginning with the one that recomputes nothing.

        Programs that use the link to a second tier are added to others.
        """
        free = self._graph(0)
        unplanned = Program(free, range(len(free)))
        found = [unplanned]
        # With a loss this large the peak is at the loss, and the budget limits the kept memory.
        huge = sum(s.bytes for s in free.storages)
        huge += max(op.workspace_bytes for op in free.operations)
        loss = free.operations[self.lowered.loss]
        handed = sum(free.storages[s].bytes for s in {*loss.inputs, *loss.outputs})

        def add(workspace: int, budget: int, tier: Link | None = None) -> int | None:
            try:
                program = planner.plan(self._graph(workspace), budget, link=tier, **self.search)
            except InfeasibleError as error:
                return error.minimum_bytes
            is_moved = len(program.actions) > len(program.ops)
            found.append(Program(free, program.actions, tier if is_moved else None))
            return None

        def add_all(caps: list[int], peaks: list[int], tier: Link | None = None) -> None:
            for cap in caps:
                add(huge, huge + cap + handed, tier)
            for peak in peaks:
                for cap in caps[::3]:
                    add(max(peak - cap - handed, 0), max(peak, 1), tier)

        most = self.option(unplanned, is_held=True).kept_bytes
        reached = add(huge, 1)
        least = 0 if reached is None else max(reached - huge - handed, 0)
        highest, lowest = unplanned.peak_bytes, add(0, 1) or 0
        caps = sorted({least + (most - least) * k // (_LEVELS - 1) for k in range(_LEVELS)})
        peaks = sorted({lowest + (highest - lowest) * k // 3 for k in range(3)})
        add_all(caps, peaks)
        if self.planned_link is not None:
            # Values that cannot be made again may go to the tier, so that less memory is possible.
            caps = sorted({most * k // (_LEVELS - 1) for k in range(_LEVELS)})
            bound = planner.lower_bound(free, moves=True)
            peaks = sorted({bound + (highest - bound) * k // _PEAKS for k in range(_PEAKS)})
            add_all(caps, peaks, self.planned_link)
        return found

    def _priced(self, rows: Iterable[Any], link: Link | None) -> list[Program]:
        """Return programs with these actions, but for those that are impossible at this shape."""
        free = self._graph(0)
        found = []
        for row in rows:
            is_moved = any(number >= len(free) for number in row)
            try:
                found.append(Program(free, row, link if is_moved else None))
            except InvalidSequenceError:
                # A value is too small to be moved here, or the tier is too small for the values.
                if link is None:
                    raise
        return found

    def _add(self, found: Sequence[Program], known: Sequence[Program]) -> None:
        """Set the programs: known ones keep their numbers, and their code."""
        self.programs = [*known, *found]
        self._entries += [self.entry(program.actions) for program in found]
        self._options.clear()

    def _take(self, found: Sequence[Program]) -> None:
        """Set the programs, none of which has code yet."""
        self._entries.clear()
        self._layouts.clear()
        self._add(found, ())

    def _take_best(self, found: list[Program]) -> None:
        """Keep a program for each option that no other beats, with outputs held or not held."""
        best: list[Program] = []
        for is_held in (True, False):
            priced = [(self.option(program, is_held), program) for program in found]
            for option in undominated([option for option, _ in priced]):
                best.append(next(program for one, program in priced if one == option))
        self._take(list(dict.fromkeys(best)))

    def take_programs(self, rows: Sequence[Sequence[int]]) -> None:
        """Set the programs to those that another process found for this graph, given as actions.

        Sizes of values may differ here: none is too small for the tier, and its limit is kept by
        the choice among the programs.
        """
        self.planned_link = self.link
        self._take(self._priced(rows, _lenient(self.planned_link)))

    def option(self, program: Program, is_held: bool) -> Option:
        """Return the needs of a program of this graph, with a loss that needs nothing.

        With `is_held`, others hold the outputs from the forward to the backward, so that keeping
        them costs nothing more.
        """
        graph, numbers = program.graph, program.actions.tolist()
        boundary = numbers.index(self.lowered.loss)
        runs = program.runs
        random = [k for k, task in enumerate(self.lowered.tasks) if task.random and runs[k] > 1]
        own = generator_bytes(self.device.type, len(random))
        # While an operation draws its random numbers again, the current state is held too.
        held = own - GENERATOR_BYTES if own else 0
        is_early = any(numbers[:boundary].count(k) > 1 for k in random)
        actions = actions_of(self.lowered, numbers)
        kept = read_before_made(actions[boundary + 1 :])
        kept -= set(actions[boundary].makes)
        if is_held:
            kept -= set(actions[boundary].reads)
        padding = 0 if program.link is None else program.link.padding_bytes
        fetched = fetched_last(actions[:boundary])
        timeline = program.timeline()
        layout = self.layout(program)
        return Option(
            kept_bytes=sum(graph.storages[s].bytes + padding * (s in fetched) for s in kept) + held,
            forward_bytes=int(timeline.peak_bytes[:boundary].max(initial=0))
            + (own if is_early else held),
            backward_bytes=int(timeline.peak_bytes[boundary:].max(initial=0)) + own,
            time_ns=program.time_ns,
            tier_bytes=0 if layout is None else layout.nbytes,
            link_ns=round(program.link_time * 1e9),
        )

    @property
    def reads_outputs(self) -> bool:
        """True if a computation reads the outputs: they may then have to stay as they are."""
        tasks = self.captured.lowered.tasks
        outputs = set(tasks[self.captured.lowered.loss].inputs)
        return any(outputs.intersection(task.inputs) for task in tasks if task.phase != "loss")

    def in_place_of(self, planned: Option | None, is_held: bool) -> int:
        """Return the number of the program that passes the needs of a planned one by least.

        It has nothing in a tier. Without a planned one, it is the program that keeps least.
        """
        options = self.options(is_held)

        def excess(k: int) -> tuple[int, int]:
            option = options[k]
            if planned is None:
                return option.kept_bytes, 0
            more = (
                option.kept_bytes - planned.kept_bytes,
                option.forward_bytes - planned.forward_bytes,
                option.backward_bytes - planned.backward_bytes,
            )
            return max(0, *more), option.time_ns

        return min((k for k, o in enumerate(options) if not o.tier_bytes), key=excess)

    def options(self, is_held: bool) -> list[Option]:
        """Return the needs of each program."""
        if is_held not in self._options:
            self._options[is_held] = [self.option(p, is_held) for p in self.programs]
        return self._options[is_held]

    def call(
        self,
        emitted: Emitted,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        marks: Marks | None = None,
        placed: tuple[Layout, StepArea] | None = None,
    ) -> tuple[Any, Failure]:
        """Return the output of a captured module under a program, and whether the call failed.

        The output is ``None`` after a failure. The module's original forward must be installed. The
        marks are called when the backward begins, and when it ends; `placed` has the places of
        offloaded values, for a program that has any.
        """
        if emitted.places is not None:
            assert placed is not None
            emitted.places.layout, emitted.places.area = placed
        self.capture.forget_programs()
        if module not in self._units:
            self._units[module] = Unit(module.modules())
        rerun = Rerun(self._units[module], (args, kwargs), self.device, is_whole=False)
        try:
            installed = self.installed(slots_of(module), (args, kwargs), emitted, marks)
            with in_place(self.state, module), installed as ((given, named), early):
                output = self.capture(module, given, named)
                if early is not None:
                    output = early.returned(output)
        except Unplanned as reached:
            # A Python value that the code depends on has changed.
            reached.primals.clear()
            return None, "now"
        except CaptureError as error:
            logger.warning("a part of the model is no longer planned: %s", error)
            return None, "for good"
        finally:
            self.captured.emitted = None
        if len(self.captured.lowered.output_of_tangent) > 1:
            self.capture.note_absent_tangents(output_tensors(output))
        return self.capture.with_a_way_around(
            output, rerun, lambda value: module.forward(*value[0], **value[1])
        ), ""


def in_place(away: AwayState | None, module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which captured code gets the module's parameters that have homes."""
    return core.NOTHING if away is None else away.shells(slots_of(module))


def _lenient(link: Link | None) -> Link | None:
    """Return a link of the same speed that moves values of any size, and any number."""
    return None if link is None else replace(link, least_bytes=1, host_bytes=None)


def backward_marks(mark: Callable[[str], object], k: int) -> Marks:
    """Return marks of the start and end of part `k`'s backward: "backward k", "before k"."""
    return lambda: mark(f"backward {k}"), lambda: mark(f"before {k}")
