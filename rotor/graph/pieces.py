"""The parts of a model that can be captured, where the model as a whole cannot.

Top-down over the calls of a probing forward: a child is captured as one graph, forward and
backward, or else its own children are tried. Captured children of one kind share the capture, the
costs and the programs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from rotor import _torch, memory
from rotor.errors import CaptureError, InfeasibleError
from rotor.graph import planner
from rotor.graph.assembly import Bases, Option, undominated
from rotor.graph.capture import Capture, Captured, NothingToPlan, Unplanned, fresh
from rotor.graph.emit import Emitted, emit
from rotor.graph.engine import build_graph, own_bytes
from rotor.graph.graph import Graph
from rotor.graph.lowering import Lowered
from rotor.graph.probing import (
    NeedsBackward,
    Saves,
    described_call,
    inner_modules,
    unchanged,
    weigh,
)
from rotor.graph.profile import Cost
from rotor.graph.program import Program
from rotor.replacing import Replaced
from rotor.values import tensors_of, tensors_within

__all__ = ["Captures", "Kind", "Pieces", "Site", "discover"]

logger = logging.getLogger("rotor")

Price = Callable[[Lowered, torch.device, Sequence[Any]], list[Cost]]

_SMALLEST_BYTES = 4096
_SMALLEST_SHARE = 500
"""A child that could save fewer bytes, or less than this part of all, stays eager."""

_LEVELS = 7
_MOST_SEARCHES = 4
_MOST_NAMES = 12
_LOSS_FACTOR = 4


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


@dataclass(eq=False)
class Kind:
    """One captured graph, and the ways to run it.

    Attributes
    ----------
    capture, captured, costs
        The graph and what its operations cost.
    programs
        The ways, and `options` what they need.
    """

    capture: Capture
    captured: Captured
    costs: list[Cost]
    device: torch.device
    programs: list[Program] = field(default_factory=list)
    _emitted: dict[int, Emitted] = field(default_factory=dict)
    _options: dict[bool, list[Option]] = field(default_factory=dict)

    @property
    def lowered(self) -> Lowered:
        """Its operations; outputs are not pinned: whoever needs them holds them."""
        lowered = self.captured.lowered
        outputs = set(lowered.tasks[lowered.loss].inputs)
        storages = [
            (size, pinned and s not in outputs) for s, (size, pinned) in enumerate(lowered.storages)
        ]
        return replace(lowered, storages=storages)

    def emitted(self, number: int) -> Emitted:
        """The functions of a program."""
        if number not in self._emitted:
            self._emitted[number] = emit(self.lowered, self.programs[number].ops.tolist())
        return self._emitted[number]

    def find_programs(self, options: dict[str, Any]) -> None:
        """Plan the graph for several amounts of what is kept, and several peaks."""
        lowered = self.lowered
        free = build_graph(lowered, self.costs, 0)
        unplanned = Program(free, range(len(free)))
        found = [unplanned]
        loss = lowered.loss
        # With a loss this large its moment is the peak: the budget is for what is kept.
        huge = sum(s.bytes for s in free.storages) + max(
            op.workspace_bytes for op in free.operations
        )
        handed = sum(
            free.storages[s].bytes
            for s in {*free.operations[loss].inputs, *free.operations[loss].outputs}
        )

        def add(workspace: int, budget: int) -> int | None:
            graph = build_graph(lowered, self.costs, workspace)
            try:
                program = planner.plan(graph, budget, **options)
            except InfeasibleError as error:
                return error.minimum_bytes
            found.append(Program(free, program.ops))
            return None

        most = self.option(unplanned, is_held=True).kept_bytes
        reached = add(huge, 1)
        least = 0 if reached is None else max(reached - huge - handed, 0)
        highest, lowest = unplanned.peak_bytes, add(0, 1) or 0
        caps = sorted({least + (most - least) * k // (_LEVELS - 1) for k in range(_LEVELS)})
        peaks = sorted({lowest + (highest - lowest) * k // 3 for k in range(3)})
        for cap in caps:
            add(huge, huge + cap + handed)
        for peak in peaks:
            for cap in caps[::3]:
                add(max(peak - cap - handed, 0), max(peak, 1))
        # One program of each that no other beats where outputs are held, or are not.
        best: list[Program] = []
        for is_held in (True, False):
            priced = [(self.option(program, is_held), program) for program in found]
            for option in undominated([option for option, _ in priced]):
                best.append(next(program for one, program in priced if one == option))
        self.programs = list(dict.fromkeys(best))

    def option(self, program: Program, is_held: bool) -> Option:
        """What a program needs.

        Parameters
        ----------
        program
            Of this graph, with a loss that needs nothing.
        is_held
            Whether others hold the outputs from the forward to the backward, so that keeping them
            costs nothing more.
        """
        graph, ops = program.graph, program.ops.tolist()
        boundary = ops.index(self.captured.lowered.loss)
        runs = program.runs
        replayed = sum(
            task.random and runs[k] > 1 for k, task in enumerate(self.captured.lowered.tasks)
        )
        own = own_bytes(self.device, replayed) - own_bytes(self.device, 0)
        kept = _read_before_made(graph, ops[boundary + 1 :])
        kept -= set(graph.operations[ops[boundary]].outputs)
        if is_held:
            kept -= set(graph.operations[ops[boundary]].inputs)
        timeline = program.timeline()
        return Option(
            kept_bytes=int(sum(graph.storages[s].bytes for s in kept) + own),
            forward_bytes=int(timeline.peak_bytes[:boundary].max(initial=0)) + own,
            backward_bytes=int(timeline.peak_bytes[boundary:].max(initial=0)) + own,
            time_ns=program.time_ns,
        )

    @property
    def reads_outputs(self) -> bool:
        """Whether anything is computed from the outputs: they may then have to stay as they are."""
        tasks = self.captured.lowered.tasks
        outputs = set(tasks[self.captured.lowered.loss].inputs)
        return any(outputs.intersection(task.inputs) for task in tasks if task.phase != "loss")

    @property
    def least_kept(self) -> Emitted:
        """The functions of the program that keeps least."""
        options = self.options(is_held=False)
        return self.emitted(options.index(min(options, key=lambda option: option.kept_bytes)))

    def options(self, is_held: bool) -> list[Option]:
        """What each of the programs needs."""
        if is_held not in self._options:
            self._options[is_held] = [self.option(p, is_held) for p in self.programs]
        return self._options[is_held]


def _read_before_made(graph: Graph, ops: Sequence[int]) -> set[int]:
    """Storages that a part of a program finds made, and reads."""
    read: set[int] = set()
    made: set[int] = set()
    for index in ops:
        operation = graph.operations[index]
        read.update(s for s in operation.inputs if s not in made)
        made.update(operation.outputs)
    return read


@dataclass(eq=False)
class Site:
    """One call of a captured module in the forward.

    Attributes
    ----------
    path, module, number
        The module, and how many calls of it came before.
    signature
        What it was called with.
    is_held
        Whether the code around it keeps its outputs for the backward.
    """

    path: str
    module: nn.Module
    number: int
    signature: Any
    kind: Kind
    is_held: bool = False
    failed: bool = False

    @property
    def name(self) -> str:
        """The path, with the number of the call where it is not the first."""
        return f"{self.path}, call {self.number + 1}" if self.number else self.path


@dataclass(eq=False)
class Pieces:
    """What was found: pieces in the order of the forward, and what lies between them.

    Attributes
    ----------
    captures
        The graphs.
    sites
        The captured calls.
    bases
        What the code between them keeps, estimated, or measured once a step has been metered.
    is_measured
        Which of these it is.
    outside
        Modules that hold parameters, or keep something, and are not planned.
    reasons
        Why modules could not be captured, by path.
    elsewhere
        Modules that the forward did not call, with their paths: when one is called, pieces are
        looked for again.
    """

    captures: Captures
    sites: list[Site]
    bases: Bases
    outside: list[str]
    reasons: dict[str, str]
    elsewhere: dict[nn.Module, str]
    is_measured: bool = False
    is_stale: bool = False
    searches: int = 1

    def options(self) -> list[list[Option]]:
        """The options of each piece."""
        return [site.kind.options(site.is_held) for site in self.sites]

    @property
    def wants_search(self) -> bool:
        """Whether a step took a path on which other pieces may be found."""
        return self.is_stale and self.searches < _MOST_SEARCHES

    def told(self) -> str:
        """What is planned and what is not."""
        names = _listed([site.name for site in self.sites])
        return (
            "no single graph of the model could be captured: "
            f"{len(self.sites)} parts of it were, and are planned together ({names})"
            f"{self.told_outside()}. What the rest keeps is measured, and peaks above the limit "
            "that the parts cannot make up for are reported."
        )

    def told_outside(self) -> str:
        """The modules that are not planned, as part of a sentence."""
        return f"; not planned: {_listed(self.outside)}" if self.outside else ""

    def with_earlier(self, old: Pieces) -> Pieces:
        """With the pieces that an earlier search found, and this one, on another path, did not.

        What all of them keep is then planned for, though no step has all of it.
        """
        known = {(site.module, site.number) for site in self.sites}
        rows = [
            (site, self.bases.forward[k], self.bases.backward[k], self.bases.between[k])
            for k, site in enumerate(self.sites)
        ]
        place = 0
        for k, site in enumerate(old.sites):
            if (site.module, site.number) in known:
                here = [(row[0].module, row[0].number) for row in rows]
                place = here.index((site.module, site.number)) + 1
            elif not site.failed:
                bases = (old.bases.forward[k], old.bases.backward[k], old.bases.between[k])
                rows.insert(place, (site, *bases))
                place += 1
        sites, forward, backward, between = zip(*rows, strict=True)
        last = max(self.bases.between[-1], old.bases.between[-1])
        called = {part for site in sites for part in site.module.modules()}
        return replace(
            self,
            sites=list(sites),
            bases=Bases(forward, backward, (*between, last)),
            elsewhere={
                module: path
                for module, path in self.elsewhere.items()
                if module in old.elsewhere and module not in called
            },
            searches=old.searches + 1,
        )


class Captures:
    """Captured graphs of a model's parts, by what those have in common.

    Parameters
    ----------
    device
        Of the model.
    price
        Gives the costs of captured operations.
    options
        Of `rotor.graph.plan`.

    Attributes
    ----------
    kinds
        The graphs.
    """

    def __init__(self, device: torch.device, price: Price, options: dict[str, Any]) -> None:
        self._device = device
        self._price = price
        self._options = options
        self._captures: dict[Any, Capture] = {}
        self._failures: dict[Any, str] = {}
        self.kinds: dict[int, Kind] = {}

    def kind_of(
        self, path: str, module: nn.Module, signature: Any, args: Any, kwargs: Any
    ) -> Kind | str:
        """The captured graph of a call, or why there is none."""
        key = (_shape_of(module), signature)
        if key in self._failures:
            return self._failures[key]
        logger.info("capturing %s", path)
        tried = [self._captures[key]] if key in self._captures else []
        for capture in [*tried, Capture(fresh(_run))]:
            for captured in capture.graphs:
                captured.emitted = None
            try:
                with warnings.catch_warnings():
                    # PyTorch looks at the gradients of what it traces, also of what is no leaf.
                    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
                    found = capture.reach(module, args, kwargs)
            except CaptureError as error:
                # A capture that others share may have been made for too many values.
                reason = str(error)
                continue
            except NothingToPlan:
                reason = "nothing in it needs a gradient"
                break
            self._captures[key] = capture
            return self._kind(capture, found)
        self._failures[key] = reason
        return reason

    def _kind(self, capture: Capture, found: Unplanned) -> Kind:
        captured = found.captured
        try:
            if id(captured) not in self.kinds:
                costs = self._price(captured.lowered, self._device, found.primals)
                kind = Kind(capture, captured, costs, self._device)
                kind.find_programs(self._options)
                self.kinds[id(captured)] = kind
        finally:
            found.primals.clear()
            found.__traceback__ = None
        return self.kinds[id(captured)]


class _Search:
    """One probing forward that captures what it can."""

    def __init__(
        self,
        model: nn.Module,
        wanted: set[tuple[nn.Module, int]],
        captures: Captures,
        progress: Callable[[int, int], object],
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.captures = captures
        self.progress = progress
        self.sites: list[Site] = []
        self.reasons: dict[str, str] = {}
        self.keepers: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        self.outputs: list[set[int]] = []
        self.inside = False
        # Autograd keeps the inputs of captured parts in every plan, so they may be held here too.
        self.watched: list[tuple[torch.Tensor, int, Site]] = []
        self.changed: set[tuple[nn.Module, int]] = set()

    def note(self, identity: int, size: int) -> None:
        if not self.inside:
            self.keep(identity, size, 2 * len(self.sites))

    def keep(self, identity: int, size: int, phase: int) -> None:
        self.sizes[identity] = size
        self.keepers.setdefault(identity, []).append(phase)

    def look_for_changes(self) -> None:
        """Note the calls whose inputs or outputs the model has changed in place since."""
        for tensor, version, site in self.watched:
            if tensor._version != version:
                self.changed.add((site.module, site.number))
        self.watched.clear()

    def found(self, site: Site, given: Sequence[torch.Tensor], made: set[int]) -> None:
        """Note a captured call."""
        self.sites.append(site)
        self.outputs.append(made)
        self.watched += [(tensor, tensor._version, site) for tensor in given]
        self.progress(len(self.sites), len(self.wanted))

    def run(self, args: Any, kwargs: Any) -> int:
        """The bytes of the model's outputs."""
        device = tensors_of((args, kwargs))[0].device
        paths = inner_modules(self.model)
        counts: dict[nn.Module, int] = {}
        resident = [*self.model.parameters(), *self.model.buffers(), *tensors_of((args, kwargs))]
        saves = Saves(resident, self.note)

        def replacement(module: nn.Module, forward: Any) -> Callable[..., Any]:
            def run(*given: Any, **named: Any) -> Any:
                number = counts[module] = counts.get(module, -1) + 1
                if self.inside or (module, number) not in self.wanted:
                    return forward(*given, **named)
                if not torch.is_grad_enabled() or not saves.on_top():
                    return forward(*given, **named)
                path = paths[module]
                signature = described_call(given, named)
                with saves.paused(), replaced.paused():
                    kind = self.captures.kind_of(path, module, signature, given, named)
                if isinstance(kind, str):
                    self.reasons.setdefault(path, kind)
                    return forward(*given, **named)
                for identity, size in saves.identities(tensors_of((given, named))).items():
                    self.keep(identity, size, 2 * len(self.sites) + 1)
                self.inside = True
                try:
                    output = forward(*given, **named)
                finally:
                    self.inside = False
                watched = tensors_of((given, named))
                if kind.reads_outputs:
                    watched += tensors_within(output)
                site = Site(path, module, number, signature, kind)
                self.found(site, watched, set(saves.identities(tensors_within(output))))
                return output

            return run

        with (
            unchanged(self.model, device),
            Replaced(paths, replacement) as replaced,
            saves.watching(),
        ):
            output = self.model.forward(*args, **kwargs)
            self.look_for_changes()
        for k, (site, own) in enumerate(zip(self.sites, self.outputs, strict=True)):
            site.is_held = all(max(self.keepers.get(i, [0])) > 2 * k + 1 for i in own)
        return memory.storage_bytes(tensors_within(output))

    def bases(self, output_bytes: int) -> Bases:
        """An estimate of what the code around the pieces keeps, and the gradients that appear."""
        count = len(self.sites)
        first = {identity: min(phases) for identity, phases in self.keepers.items()}
        starting = [0] * (2 * count + 1)
        largest = [0] * (2 * count + 1)
        for identity, phase in first.items():
            starting[phase] += self.sizes[identity]
            largest[phase] = max(largest[phase], self.sizes[identity])
        kept = list(accumulate(starting))
        later = self._gradients()
        transient = [2 * largest[2 * k] + later[k] for k in range(count + 1)]
        transient[count] = max(transient[count], _LOSS_FACTOR * output_bytes)
        return Bases(
            tuple(kept[2 * k + 1] for k in range(count)),
            tuple(kept[2 * k + 1] + later[k + 1] for k in range(count)),
            tuple(kept[2 * k] + transient[k] for k in range(count + 1)),
        )

    def _gradients(self) -> list[int]:
        """Bytes of the gradients of parameters that are there before the backward of each piece
        ends, those of its own included; those outside of pieces are there from the beginning.
        """
        owner: dict[nn.Parameter, int] = {}
        for k, site in enumerate(self.sites):
            owner.update({p: k for p in site.module.parameters() if p.requires_grad})
        found = [0] * (len(self.sites) + 1)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                size = memory.rounded_bytes(parameter.nbytes, parameter.device)
                found[owner.get(parameter, len(self.sites))] += size
        return list(accumulate(reversed(found)))[::-1]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _shape_of(module: nn.Module) -> Any:
    """What modules have in common that one capture may serve; its guards look closer."""
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    return (
        repr(module),
        tuple((type(part), part.training) for part in parts),
        tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
    )


def discover(
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    captures: Captures,
    progress: Callable[[int, int], object],
) -> Pieces | None:
    """Capture the largest children of a model that can be captured.

    The model is run twice, without keeping anything, and is then as it was before.

    Parameters
    ----------
    model, args, kwargs
        A call of it, with gradients enabled.
    captures
        Where graphs are kept; what is in there is not captured again.
    progress
        Called with (captured calls, calls that are worth it).

    Returns
    -------
    Pieces or None
        ``None`` where nothing worth planning can be captured.
    """
    try:
        calls, whole, called = weigh(model, args, kwargs)
        total = sum(whole.saved.values())
        smallest = max(total // _SMALLEST_SHARE, _SMALLEST_BYTES)
        worth = {(c.module, c.number) for c in calls if c.plannable_bytes > smallest}
        while True:
            search = _Search(model, worth, captures, progress)
            output_bytes = search.run(args, kwargs) if worth else 0
            if not search.changed:
                break
            worth -= search.changed
    except NeedsBackward:
        return None
    if not search.sites:
        return None
    inside = {part for site in search.sites for part in site.module.modules()}
    paths = inner_modules(model)
    unseen = {m: path for m, path in paths.items() if m not in inside}
    return Pieces(
        captures,
        search.sites,
        search.bases(output_bytes),
        outside=[p for m, p in unseen.items() if m in called and _torch.parameter_slots(m)],
        reasons=search.reasons,
        elsewhere={m: p for m, p in unseen.items() if m not in called},
    )
