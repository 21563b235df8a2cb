"""Parts of a model that can be captured, if the model as a whole cannot.

Top-down over the calls of a probing forward: a child is captured as one graph, forward and
backward, or else its own children are tried. Captured children of one kind share the capture, the
costs and the programs. Measured stages of an ``nn.Sequential`` that are not captured are parts too:
chains of stages in a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.accounting import CODE_FACTOR, assumed_loss_bytes
from rotor.common.calls import call_signature
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import device_of, output_tensors, tree_tensors
from rotor.common.undisturbed import Trial, trial
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.chained import (
    Called,
    CalledStages,
    ChainKind,
    MeasuredStages,
    StageCalls,
    Unsaved,
)
from rotor.engines.parts.kinds import Kind
from rotor.engines.parts.plan import Parts, Placement
from rotor.engines.parts.probe import (
    NeedsBackward,
    Saves,
    inner_modules,
    weigh,
)
from rotor.graph.assembly import Bases, Option
from rotor.meter import allocator
from rotor.tier.offload import Offload

logger = logging.getLogger("rotor")

_SMALLEST_BYTES = 4096
_SMALLEST_SHARE = 500
"""Divisor of all bytes; a child that could save less than this part, or few bytes, stays eager."""

_MOST_SEARCHES = 4
_MOST_NAMES = 12


@dataclass(eq=False)
class Site:
    """Call of a captured module in the forward, or calls of the stages of a chain."""

    path: str
    module: nn.Module
    number: int
    """Number of earlier calls of the module; of a chain, its first module."""
    signature: Any
    """Signature of the arguments; ``None`` for a chain, which takes any."""
    kind: Kind | ChainKind
    following: Sequence[tuple[nn.Module, int]] = ()
    """Further calls of a chain, in order."""
    is_held: bool = False
    """True if the code around it keeps its outputs for the backward."""
    around_bytes: int = 0
    """Bytes that autograd keeps around it while it runs, its inputs included."""
    failed: bool = False
    varies: bool = False
    """True if an earlier search found it called with another signature: no new search follows."""

    @property
    def calls(self) -> list[tuple[nn.Module, int]]:
        """Called modules, with the numbers of their earlier calls."""
        return [(self.module, self.number), *self.following]

    @property
    def modules(self) -> list[nn.Module]:
        """Called modules, each once."""
        return list(dict.fromkeys(module for module, _ in self.calls))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of these modules, each once."""
        found = (p for module in self.modules for p in module.parameters())
        return list(dict.fromkeys(found))

    @property
    def name(self) -> str:
        """Path, with the number of the call if it is not the first; the stages of a chain."""
        if isinstance(self.kind, ChainKind):
            return self.kind.name
        return f"{self.path}, call {self.number + 1}" if self.number else self.path

    def options(self) -> list[Option]:
        """Return the needs of each way to run it."""
        return self.kind.options(self.is_held)

    def program(self, k: int) -> Placement | None:
        """Return a program, and the places of its values in a tier; ``None`` for a schedule."""
        return self.kind.program(k) if isinstance(self.kind, Kind) else None

    def described(self, k: int) -> str:
        """Return the name, with the treatment of what is not captured."""
        if isinstance(self.kind, ChainKind):
            return f"{self.name}: {self.kind.treatment(k)}"
        return self.name

    def recomputes(self, k: int) -> bool:
        """Return whether anything is computed again."""
        return self.kind.recomputes(k)

    @property
    def unrepeatable(self) -> int:
        """Number of operations, or stages, that are never recomputed."""
        return self.kind.unrepeatable


@dataclass(eq=False)
class Pieces(Parts):
    """Pieces found in a model."""

    label: ClassVar[str] = "parts"

    captures: Captures
    sites: list[Site]
    bases: Bases
    outside: list[str]
    """Modules that hold parameters, or keep something, and are not planned."""
    reasons: dict[str, str]
    """Reasons for which modules could not be captured, by path."""
    uncalled_modules: dict[nn.Module, str]
    """Modules that the forward did not call: a call of one starts another search for pieces."""
    units: list[Any] = field(default_factory=list)
    """Chains, and modules to call between them, in order; empty without chains."""
    is_measured: bool = False
    is_stale: bool = False
    searches: int = 1

    def has_shared_parameters(self, model: nn.Module) -> bool:
        """Return whether a captured call has a parameter that other code of the model uses too."""
        calls = [module for site in self.sites for module, _ in site.calls]
        inside = {inner for module in calls for inner in module.modules()}
        uses = Counter(p for module in calls for p in module.parameters())
        for module in model.modules():
            if module not in inside:
                uses.update(module.parameters(recurse=False))
        return any(uses[p] > 1 for module in calls for p in module.parameters())

    @property
    def offload(self) -> Offload | None:  # type: ignore[override]
        """Second tier of the model; ``None`` without one."""
        return self.captures.offload

    @property
    def kinds(self) -> list[Kind]:
        """Captured graphs, each once."""
        kinds = dict.fromkeys(site.kind for site in self.sites)
        return [kind for kind in kinds if isinstance(kind, Kind)]

    @property
    def chains(self) -> list[ChainKind]:
        """Chains of stages that are not captured."""
        return [site.kind for site in self.sites if isinstance(site.kind, ChainKind)]

    def described(self) -> str:
        """Return the number of pieces, and the stages that run as chains."""
        names = _listed([chain.name for chain in self.chains])
        return f"{len(self.sites)}" + (f"; not captured, a chain: {names}" if names else "")

    def describe_again(self, choice: Sequence[int]) -> str:
        """Return the chains that are recomputed under a choice, as part of a sentence."""
        names = _listed(
            [
                f"{site.name} {site.kind.treatment(k)}"
                for site, k in zip(self.sites, choice, strict=True)
                if isinstance(site.kind, ChainKind) and site.kind.recomputes(k)
            ]
        )
        return f"; not captured: {names}" if names else ""

    def graphs(self) -> list[Lowered]:
        """Return the operations of the captured parts, each graph once."""
        return [kind.lowered for kind in self.kinds]

    @property
    def wants_search(self) -> bool:
        """True if a step took a path on which other pieces may be found."""
        return self.is_stale and self.searches < _MOST_SEARCHES

    def describe(self) -> str:
        """Return a sentence on the planned and the unplanned parts."""
        names = _listed([site.name for site in self.sites if isinstance(site.kind, Kind)])
        chains = _listed([chain.name for chain in self.chains])
        others = f", with stages that were not, each kept or run again ({chains})" if chains else ""
        return (
            "no single graph of the model could be captured: "
            f"{len(self.sites) - len(self.chains)} parts of it were, and are planned together "
            f"({names}){others}{self.describe_outside()}. What the rest keeps is measured, and "
            "peaks above the limit that the parts cannot make up for are reported."
        )

    def describe_outside(self) -> str:
        """Return the modules that are not planned, as part of a sentence."""
        return f"; not planned: {_listed(self.outside)}" if self.outside else ""

    def with_earlier(self, old: Pieces) -> Pieces:
        """Return these pieces with the ones of an earlier search on another path.

        The plan is then for the memory of all of them, though no step has all of it.
        """
        known = {(site.module, site.number): site for site in self.sites}
        rows = [
            (site, self.bases.forward[k], self.bases.backward[k], self.bases.between[k])
            for k, site in enumerate(self.sites)
        ]
        place = 0
        for k, site in enumerate(old.sites):
            if (again := known.get((site.module, site.number))) is not None:
                again.varies = site.varies or again.signature != site.signature
                here = [(row[0].module, row[0].number) for row in rows]
                place = here.index((site.module, site.number)) + 1
            elif not site.failed and isinstance(site.kind, Kind):
                bases = (old.bases.forward[k], old.bases.backward[k], old.bases.between[k])
                rows.insert(place, (site, *bases))
                place += 1
        sites, forward, backward, between = zip(*rows, strict=True)
        last = max(self.bases.between[-1], old.bases.between[-1])
        called = {part for site in sites for module in site.modules for part in module.modules()}
        return replace(
            self,
            sites=list(sites),
            bases=Bases(forward, backward, (*between, last)),
            uncalled_modules={
                module: path
                for module, path in self.uncalled_modules.items()
                if module in old.uncalled_modules and module not in called
            },
            searches=old.searches + 1,
        )


class _Search:
    """Probing forward that captures as many calls as it can."""

    def __init__(
        self,
        model: nn.Module,
        wanted: set[tuple[nn.Module, int]],
        captures: Captures,
        progress: Callable[[int, int], object],
        existing: set[int],
        stages: MeasuredStages | None,
        units: Sequence[Any],
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.captures = captures
        self.existing = existing
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
        self.stages = stages
        self.stage_calls = StageCalls([]) if stages is None else stages.in_forward()
        self.units = list(units)
        self.saved: set[int] = set()

    def note(self, identity: int, size: int) -> None:
        self.saved.add(identity)
        if not self.inside:
            self.keep(identity, size, 2 * len(self.sites))

    def keep(self, identity: int, size: int, phase: int) -> None:
        self.sizes[identity] = size
        self.keepers.setdefault(identity, []).append(phase)

    def found(self, site: Site, given: Sequence[torch.Tensor], made: set[int]) -> None:
        """Note a captured call."""
        self.sites.append(site)
        self.outputs.append(made)
        self.watched += [(tensor, tensor._version, site) for tensor in given]
        self.progress(len(self.sites), len(self.wanted))

    def run(self, args: Any, kwargs: Any) -> int:
        """Return the bytes of the model's outputs."""
        device = device_of((args, kwargs), self.model)
        with trial(self.model, (args, kwargs), device) as made:
            return self._run(made, *made.arguments)

    def _run(self, made: Trial, args: Any, kwargs: Any) -> int:
        paths = inner_modules(self.model)
        counts: dict[nn.Module, int] = {}
        saves = Saves(self.model, (args, kwargs), self.note)

        def replacement(module: nn.Module, forward: Any) -> Callable[..., Any]:
            def run(*given: Any, **named: Any) -> Any:
                number = counts[module] = counts.get(module, -1) + 1
                with self.stage_calls.entered(module, number):
                    return called(module, number, forward, given, named)

            return run

        def called(module: nn.Module, number: int, forward: Any, given: Any, named: Any) -> Any:
            is_watched = torch.is_grad_enabled() and saves.on_top() and made.is_innermost()
            if self.inside or (module, number) not in self.wanted or not is_watched:
                return forward(*given, **named)
            path = paths[module]
            signature = call_signature(given, named)
            with saves.paused(), replaced.paused(), made.paused():
                kind = self.captures.kind_of(path, module, signature, given, named)
            if isinstance(kind, str):
                self.reasons.setdefault(path, kind)
                return forward(*given, **named)
            for identity, size in saves.identities(tree_tensors((given, named))).items():
                self.keep(identity, size, 2 * len(self.sites) + 1)
            begin = len(self.stage_calls.calls)
            self.inside = True
            try:
                output = forward(*given, **named)
            finally:
                self.inside = False
            watched = tree_tensors((given, named))
            if kind.reads_outputs:
                watched += output_tensors(output)
            site = Site(path, module, number, signature, kind)
            self.found(site, watched, set(saves.identities(output_tensors(output))))
            self.stage_calls.note_captured(module, number, begin)
            return output

        with PatchedForwards(paths, replacement) as replaced, saves.watching():
            if self.units:
                output = self.in_units(paths, args, saves)
            else:
                output = self.model.forward(*args, **kwargs)
            # The model may have changed inputs or outputs of calls in place since.
            changed = [site for tensor, then, site in self.watched if tensor._version != then]
            self.changed.update((site.module, site.number) for site in changed)
            self.watched.clear()
        for k, (site, own) in enumerate(zip(self.sites, self.outputs, strict=True)):
            site.is_held = all(max(self.keepers.get(i, [0])) > 2 * k + 1 for i in own)
        self.hand_over()
        return allocator.storage_bytes(output_tensors(output))

    def in_units(self, paths: Mapping[nn.Module, str], args: Any, saves: Saves) -> Any:
        """Return the output of the model, whose units are called in a row; note the chains."""
        (x,) = args
        for place, unit in enumerate(self.units):
            if isinstance(unit, CalledStages):
                self.units[place], x = self.chained(unit, paths, x, saves)
            else:
                x = unit(x)
        return x

    def chained(
        self, chain: CalledStages, paths: Mapping[nn.Module, str], x: Any, saves: Saves
    ) -> tuple[Site, Any]:
        """Run the stages of a chain; return its site, and its output."""
        assert self.stages is not None
        inputs = tree_tensors(x)
        values, saved = [saves.identities(inputs)], []
        self.inside = True
        for stage in self.stages.inspection.stages[chain.begin : chain.end]:
            self.saved = set()
            x = stage(x)
            values.append(saves.identities(tree_tensors(x)))
            saved.append(self.saved)
        self.inside = False
        for identity, size in values[0].items():
            if identity in set().union(*saved):
                self.keep(identity, size, 2 * len(self.sites) + 1)
        kind = self.stages.kind(chain.begin, chain.end, Unsaved.of(values, saved))
        first, *following = chain.calls
        site = Site(paths[first[0]], *first, None, kind, following)
        self.found(site, inputs, set(values[-1]))
        return site, x

    def hand_over(self) -> None:
        """Let the pieces add to the existing gradients.

        Gradients of a parameter that several calls read are first added up by autograd: they count
        as new ones.
        """
        if not self.existing and self.captures.away is None:
            return
        calls = Counter(id(p) for site in self.sites for p in site.parameters())
        self.existing -= {identity for identity, count in calls.items() if count > 1}
        for site in self.sites:
            if isinstance(site.kind, Kind):
                site.kind = site.kind.with_existing(site.module, self.existing)

    def bases(self, output_bytes: int) -> Bases:
        """Return an estimate of the memory around the pieces, and the gradients that appear."""
        count = len(self.sites)
        first = {identity: min(phases) for identity, phases in self.keepers.items()}
        starting = [0] * (2 * count + 1)
        largest = [0] * (2 * count + 1)
        for identity, phase in first.items():
            starting[phase] += self.sizes[identity]
            largest[phase] = max(largest[phase], self.sizes[identity])
        kept = list(accumulate(starting))
        for site, size in zip(self.sites, kept[1::2], strict=False):
            site.around_bytes = size
        later, fetched = self._gradients(), self._fetched_bytes()
        transient = [CODE_FACTOR * largest[2 * k] + later[k] + fetched for k in range(count + 1)]
        transient[count] = max(transient[count], output_bytes + assumed_loss_bytes(output_bytes))
        return Bases(
            tuple(kept[2 * k + 1] for k in range(count)),
            tuple(kept[2 * k + 1] + later[k + 1] for k in range(count)),
            tuple(kept[2 * k] + transient[k] for k in range(count + 1)),
        )

    def _fetched_bytes(self) -> int:
        """Return the most bytes of a parameter that other code fetches, and of its gradient."""
        away = self.captures.away
        if away is None:
            return 0
        inside = {p for site in self.sites for p in site.parameters()}
        outside = (p for p in self.model.parameters() if away.has(p) and p not in inside)
        return max((2 * p.nbytes for p in outside), default=0)

    def _gradients(self) -> list[int]:
        """Return the bytes of gradients that exist at the end of each piece's backward.

        Its own are included; gradients of parameters outside of pieces exist from the beginning.
        """
        owner: dict[nn.Parameter, int] = {}
        for k, site in enumerate(self.sites):
            owner.update({p: k for p in site.parameters() if p.requires_grad})
        found = [0] * (len(self.sites) + 1)
        away = self.captures.away
        for parameter in self.model.parameters():
            stays = away is None or not away.has(parameter)
            if parameter.requires_grad and stays and id(parameter) not in self.existing:
                size = allocator.rounded_bytes(parameter.nbytes, parameter.device)
                found[owner.get(parameter, len(self.sites))] += size
        return list(accumulate(reversed(found)))[::-1]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def discover(
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    captures: Captures,
    progress: Callable[[int, int], object],
    existing: Collection[int] = (),
    stages: MeasuredStages | None = None,
) -> Pieces | None:
    """Capture the largest children of a model that can be captured, in a call with gradients
    enabled.

    The model is run two or three times, and is left unchanged. Graphs that `captures` has already
    are not captured again. `progress` is called with (captured calls, calls of sufficient size).
    `existing` has the ids of the parameters that have a gradient when a step begins. Stages that
    are not captured run as chains. Returns ``None`` if nothing of sufficient size can be captured.
    """
    try:
        calls, whole, called = weigh(model, args, kwargs)
        total = sum(whole.saved.values())
        smallest = max(total // _SMALLEST_SHARE, _SMALLEST_BYTES)
        worth = {(c.module, c.number) for c in calls if c.plannable_bytes > smallest}
        inside = {(c.module, c.number): c.plannable_bytes for c in calls}
        barred: set[Called] = set()
        units: list[Any] | None = None
        while True:
            search = _Search(model, worth, captures, progress, set(existing), stages, units or [])
            output_bytes = search.run(args, kwargs) if worth else 0
            if search.changed:
                worth -= search.changed
                barred |= search.changed
                units = None
            elif stages is not None and units is None and search.sites:
                chains = stages.uncaptured(search.stage_calls, inside, smallest)
                chains = [chain for chain in chains if chain.calls[0] not in barred]
                units = search.stage_calls.units(chains)
                if not chains:
                    break
            else:
                break
    except allocator.MeterBusyError:
        raise
    except (NeedsBackward, NotImplementedError, RuntimeError) as error:
        # Such as transforms of torch.func, which run under no hooks for saved tensors.
        logger.info("no parts of the model can be captured: %s", error)
        return None
    if not any(isinstance(site.kind, Kind) for site in search.sites):
        return None
    parts = {p for site in search.sites for module in site.modules for p in module.modules()}
    paths = inner_modules(model)
    unseen = {m: path for m, path in paths.items() if m not in parts}
    return Pieces(
        captures,
        search.sites,
        search.bases(output_bytes),
        outside=[p for m, p in unseen.items() if m in called and core.parameter_slots(m)],
        reasons=search.reasons,
        uncalled_modules={m: p for m, p in unseen.items() if m not in called},
        units=search.units,
    )
