"""Observation of stages before they are measured: changes, kept values, and reads of each.

A stage runs twice from the same state, with a graph. If a graph is alive after the output was
dropped, a value has left the stage by another way: an attribute, a hook, a global name. A graph
that ends in a tensor that is neither the stage's input nor its parameter began elsewhere. A
stage whose outputs, or graph contents, differ between both runs does not repeat.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch.traces import Writes, untracked
from rotor.common.checksums import checksum
from rotor.common.modes import RngTracker
from rotor.common.module_state import Watch
from rotor.common.places import Place, Saved, is_scalar, tensors_in
from rotor.common.ranks import Ranks, stays_held
from rotor.common.tensor_trees import (
    Flags,
    check_output,
    detached,
    grad_flags,
    tree_tensors,
)
from rotor.common.undisturbed import gradients_aside
from rotor.engines.chain.stages import Stage, as_inputs, leaf_flags

_PATIENCE_SECONDS = 0.5
"""Time that a thread of gloo may take to drop the tensors of a finished operation."""


@dataclass
class Observation:
    """Behaviour of a stage beside its output."""

    flags: Flags
    """Tensors of the output that require gradients."""
    uses_rng: bool
    """True if a forward draws random numbers of PyTorch's own generators."""
    mutable_buffers: list[core.Slot]
    changes: list[Place]
    """Other state that a forward changes."""
    leaves: list[str]
    """Places by which values that require gradients leave the stage, beside its output."""
    passes_output: bool
    """True if a value that leaves was made of the output, or is the output."""
    reads: int
    """Earliest stage whose graph the stage reads beside its input; by default its own index."""
    is_fed: bool
    """True if the stage reads a value in the graph that no stage made."""
    repeats: bool
    """True if two runs gave the same bits."""
    written: list[torch.Tensor] = field(default_factory=list, repr=False)
    """Parameters that a forward writes to."""
    asks: bool = False
    """True if a run without a graph gave other bits, or left other state."""
    reaches: Any = field(default=None, repr=False)
    read: set[int] = field(default_factory=set, repr=False)
    """Ids of the parameters and of other stages' buffers that a forward reads."""

    def reason(self) -> str:
        """Return the reason for a single forward run; empty if the stage may run again."""
        if self.leaves:
            return f"{', '.join(self.leaves)} has values of its graph beside its output"
        if self.is_fed:
            return "it reads a value in the graph that no stage made"
        return "" if self.repeats else "two runs of it from the same state gave different bits"


def named(stage: Stage) -> list[tuple[str, Any]]:
    """Return the functions of a stage by their names."""
    return list(zip(stage.names, stage.functions, strict=True))


class _Mark:
    """Object in a node of a graph that dies with the node."""

    __slots__ = ("__weakref__",)


def _marked(node: Any, name: str = "rotor") -> weakref.ref[Any]:
    """Put a mark into a node, under a name; return a reference to it."""
    mark = node.metadata[name] = _Mark()
    return weakref.ref(mark)


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node that adds up the gradient of a leaf."""
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
        return node.next_functions[0][0]


class _Leaves:
    """Leaves of a stage's graph, which reveal a graph that survives the stage's output."""

    def __init__(self, leaves: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        self._nodes: list[Any] = []
        self._marks: list[weakref.ref[Any]] = []
        for parameter in parameters:
            if parameter.is_leaf:
                self._hold(parameter)

    def _hold(self, parameter: torch.Tensor) -> None:
        if _marked(_accumulator(parameter))() is not None:
            # Others hold the node themselves: DistributedDataParallel, or an earlier graph.
            _accumulator(parameter).metadata.pop("rotor", None)
            return
        self._nodes.append(_accumulator(parameter))
        self._marks.append(_marked(self._nodes[-1]))

    def watch_nodes(self, value: Any) -> None:
        """Watch the other nodes of an output's graph as well."""
        nodes = [n for n in nodes_of(tree_tensors(value)) if not hasattr(n, "variable")]
        self._marks += map(_marked, nodes)

    def are_alive(self, seconds: float) -> bool:
        """Return whether a graph ends in one of them; valid only after the output was dropped.

        Threads of collective operations have some time to drop their tensors.
        """
        self._nodes.clear()
        if not self._any():
            return False
        gc.collect()
        return stays_held(self._any, seconds)

    def _any(self) -> bool:
        return any(ref() is not None for ref in [*self._leaves, *self._marks])


class _Ends:
    """Start of an output's graph, which reveals a graph that survives the output."""

    def __init__(self, value: Any) -> None:
        self._marks: list[weakref.ref[Any]] = []
        for tensor in tree_tensors(value):
            if tensor.grad_fn is not None:
                self._marks.append(_marked(tensor.grad_fn, "rotor_end"))
            elif tensor.requires_grad:
                self._marks.append(weakref.ref(tensor))

    def are_alive(self) -> bool:
        """Return whether another node continues from here."""
        return any(ref() is not None for ref in self._marks)


@dataclass
class _Walk:
    """Walk over a stage's graph: its leaves, and a digest of the tensors that its nodes keep."""

    variables: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                found.append(getattr(node, name))
            except RuntimeError:
                continue
    with suppress(RuntimeError):
        found.append(getattr(node, "saved_tensors", ()))
    found += list(getattr(node, "__dict__", {}).values())
    for value in found:
        yield from tensors_in(value)


def nodes_of(tensors: Sequence[torch.Tensor], beyond: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph that tensors end, each once, up to the nodes `beyond`."""
    waiting = [t.grad_fn for t in reversed(tensors) if t.grad_fn is not None]
    seen = set(beyond)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [n for n, _ in reversed(node.next_functions) if n is not None]


def _walk(value: Any, known: set[int]) -> _Walk:
    walk = _Walk(outputs=[_digest(tensor) for tensor in tree_tensors(value)])
    walk.variables += [t for t in tree_tensors(value) if t.requires_grad and t.grad_fn is None]
    for node in nodes_of(tree_tensors(value)):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            walk.variables.append(variable)
            continue
        for tensor in _saved_tensors(node):
            if _is_strided(tensor):
                storages = core.storages_of([tensor])
                is_freed = tensor.numel() and not any(storages.values())
                # FSDP2 frees whole parameters when a stage has run.
                if is_freed or storages.keys() <= known:
                    continue
            walk.saved.append(_digest(tensor))
    return walk


def kept_bytes(stage: Stage, x: Any, y: Any) -> int:
    """Return the bytes of the tensors that a stage's output and its graph hold.

    The stage's input, parameters and buffers do not count.
    """
    tensors = list(tree_tensors(y))
    for node in nodes_of(tree_tensors(y)):
        tensors += _saved_tensors(node)
    sizes = core.storages_of(filter(_is_strided, tensors))
    own = [
        tensor
        for module in stage.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]
    given = core.storages_of(filter(_is_strided, [*tree_tensors(x), *own]))
    return sum(size for address, size in sizes.items() if address not in given)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _digest(tensor: torch.Tensor) -> Any:
    try:
        return tuple(tensor.shape), tensor.dtype, checksum(tensor.detach())
    except (TypeError, RuntimeError):
        return tuple(tensor.shape), tensor.dtype


def _buffers_left(originals: list[tuple[core.Slot, torch.Tensor]]) -> list[Any]:
    """Return the digests of the values in the slots of buffers."""
    values = [slots.get(name) for (slots, name), _ in originals]
    return [_digest(value) if isinstance(value, torch.Tensor) else None for value in values]


def _left_by(places: list[Place]) -> list[Any]:
    """Return places that a run has changed, each with the numbers in it that say which run it was.

    Numbers with a fraction do not: they may be times.
    """
    found = []
    for place in places:
        leaves = core.tree_flatten(place.get())[0]
        exact = [v for v in leaves if is_scalar(v) and not isinstance(v, float | complex)]
        tensors = [_digest(v) for v in leaves if isinstance(v, torch.Tensor)]
        found.append((place.identity, len(leaves), *map(repr, exact), *_as_numbers(tensors)))
    return found


def _as_numbers(digest: Sequence[Any]) -> list[Any]:
    return [
        tuple(int(part) if isinstance(part, torch.Tensor) else part for part in entry)
        for entry in digest
    ]


class Observer:
    """Observer that runs the stages in order, each in its context `around(stage)`.

    `leaves` tells which tensors of the first input are leaves. `slots` are buffers, and parameters
    that stages may write to; without `sees_writes`, writes to parameters are left alone, since
    FSDP2 fills and frees them. The `ranks` observe together, with equally many runs.
    """

    def __init__(
        self,
        device: torch.device,
        around: Callable[[Stage], AbstractContextManager[Any]],
        leaves: Flags | None = None,
        *,
        slots: Iterable[core.Slot] = (),
        sees_writes: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._around = around
        self._ranks = ranks
        self._leaves = leaves
        tensors = {id(t): t for slot in slots if (t := core.value_in(slot)) is not None}
        self._places = core.places_of(t for t in tensors.values() if isinstance(t, nn.Parameter))
        self._sees_writes = sees_writes
        self._writes = Writes(tensors)
        self._rng = RngTracker(device)
        self._makers: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._owners: dict[int, int] = {}
        self._count = 0

    def stage(self, stage: Stage, x: Any, flags: Flags) -> tuple[Observation, Any]:
        """Observe the next stage on its input; return its output as well, without a graph."""
        i = self._count
        self._count += 1
        watch = Watch(named(stage))
        states = self._rng.read()
        found, first = self._run(stage, x, flags, i, watch)[:2]
        changed = watch.changed()
        left = _left_by(changed)
        found.changes = changed
        if found.leaves:
            found.leaves = [
                place.name
                for place in changed
                if any(t.requires_grad for t in tensors_in(place.get()))
            ] or [f"an object that {stage.name} does not hold itself"]
        watch.restore()
        self._rng.write(states)
        if self._sees_writes:
            recorded = _as_numbers([*first[0], *first[2]]), {*map(id, found.written)}, left
            found.asks = (*self._bare(stage, x), _left_by(watch.changed())) != recorded
            watch.restore()
            self._rng.write(states)
        _, second, y = self._run(stage, x, flags, i, None)
        found.repeats = _as_numbers(first[0]) == _as_numbers(second[0])
        if self._on_any_rank(found.repeats and _as_numbers(first[1]) != _as_numbers(second[1])):
            # Kernels save workspaces with bytes that are never read: only gradients can tell.
            found.repeats &= self._same_gradients(stage, x, flags, watch, states)
        found.reaches = watch.reaches
        for parameter in stage.graph_leaves():
            self._owners.setdefault(id(parameter), i)
        self._leaves = None
        return found, y

    def _bare(self, stage: Stage, x: Any) -> tuple[list[Any], set[int]]:
        """Return what a stage makes, and writes to, where no graph is recorded.

        That is the digest of its output and of its buffers, and the ids of written parameters.
        """
        with self._around(stage), stage.on_copies() as originals:
            with torch.no_grad(), self._seen():
                y = stage(x)
            found = [*map(_digest, tree_tensors(y)), *_buffers_left(originals)]
            return _as_numbers(found), {*map(id, self._undo())}

    def _inputs(self, x: Any, flags: Flags) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        """Return a stage's input, its tensors that require gradients, and the leaves of these."""
        source = torch.zeros((), requires_grad=True)
        y, wanted = as_inputs(x, flags, source, self._leaves)
        return y, wanted, [source, *[tensor for tensor in wanted if tensor.is_leaf]]

    def _run(
        self, stage: Stage, x: Any, flags: Flags, i: int, watch: Watch | None
    ) -> tuple[Observation, tuple[list[Any], list[Any], list[Any]], Any]:
        with self._around(stage), stage.on_copies() as originals:
            before = [
                (slot, copy := slot[0][slot[1]], original, copy._version)
                for slot, original in originals
            ]
            states = self._rng.read()
            parameters = stage.graph_leaves()
            with torch.enable_grad():
                given, wanted, leaves = self._inputs(x, flags)
                alive = _Leaves(leaves, parameters)
                with self._seen():
                    y = stage(given)
            check_output(stage.name, y)
            buffers = [] if watch is None else _buffers_left(originals)
            uses_rng = self._rng.drawn_since(states)
            mutable = [
                slot
                for slot, copy, original, version in before
                if slot[0][slot[1]] is not copy
                or copy._version != version
                or (_is_strided(copy) and not torch.equal(copy, original))
            ]
        own = {id(t) for t in (*leaves, *parameters)}
        known = set(core.storages_of(filter(_is_strided, [*tree_tensors(x), *parameters])))
        walk = _walk(y, known)
        foreign = [t for t in walk.variables if id(t) not in own]
        reads, is_fed = self._origins(foreign, i)
        self._makers += [(weakref.ref(leaf), i) for leaf in leaves]
        found = Observation(
            flags=grad_flags(y),
            uses_rng=uses_rng,
            mutable_buffers=mutable,
            changes=[],
            leaves=[],
            passes_output=False,
            reads=reads,
            is_fed=is_fed,
            repeats=True,
        )
        found.written, found.read = self._undo(), set(self._writes.read)
        self._writes.read.clear()
        digest = walk.outputs, walk.saved, buffers
        alive.watch_nodes(y)
        end = _Ends(y)
        y = detached(y)
        del walk, foreign, leaves, given, wanted, before
        torch.clear_autocast_cache()
        patience = 0.0 if self._ranks is None else _PATIENCE_SECONDS
        if watch is not None and alive.are_alive(patience):
            found.leaves = [""]
            found.passes_output = end.are_alive()
        return found, digest, y

    def _seen(self) -> AbstractContextManager[Any]:
        return self._writes if self._sees_writes else nullcontext()

    def _undo(self) -> list[torch.Tensor]:
        """Put the bytes of the model's parameters that were written to back; return these."""
        moved = core.put_places_back(self._places)
        rewritten = self._writes.identities()
        found = {core.storage_identity(p): p for p, _ in self._places} if rewritten else {}
        self._writes.undo(lambda storage: storage not in found)
        return [*moved, *[p for storage, p in found.items() if storage in rewritten]]

    def _same_gradients(
        self, stage: Stage, x: Any, flags: Flags, watch: Watch, states: Any
    ) -> bool:
        """Return whether two more runs agree in gradients, or even one run's gradients vary."""
        after = Saved(watch.changed())
        rng = self._rng.read()

        def gradients(twice: bool) -> list[list[Any]]:
            watch.restore()
            self._rng.write(states)
            with self._around(stage), stage.on_copies():
                with torch.enable_grad(), self._seen():
                    given, wanted, _ = self._inputs(x, flags)
                    y = stage(given)
                inputs = [*wanted, *stage.graph_leaves()]
                ends = [t for t in tree_tensors(y) if t.requires_grad]
                if not ends or not inputs:
                    return [[], []]
                found = []
                for again in (True, False) if twice else (False,):
                    with gradients_aside(stage.graph_leaves()):
                        made = torch.autograd.grad(
                            ends,
                            inputs,
                            [torch.ones_like(t) for t in ends],
                            retain_graph=again,
                            allow_unused=True,
                        )
                    found.append(_as_numbers([_digest(g) for g in made if g is not None]))
                    del made
                self._undo()
                return found

        try:
            differ = self._on_any_rank(gradients(False) != gradients(False))
            return not differ or len(set(map(str, gradients(True)))) > 1
        finally:
            after.put(last=True)
            self._rng.write(rng)

    def _on_any_rank(self, flag: bool) -> bool:
        if self._ranks is None:
            return flag
        return any(other for (other,) in self._ranks.exchange_ints(flag))

    def _origins(self, foreign: Sequence[torch.Tensor], i: int) -> tuple[int, bool]:
        """Return the earliest stage that owns these leaves, and whether a leaf has no owner."""
        makers = {id(leaf): k for ref, k in self._makers if (leaf := ref()) is not None}
        origins = [makers.get(id(t), self._owners.get(id(t))) for t in foreign]
        known = [k for k in origins if k is not None and k < i]
        return min(known, default=i), any(k is None for k in origins)


def observe(
    stages: Sequence[Stage],
    arg: Any,
    device: torch.device,
    around: Callable[[Stage], AbstractContextManager[Any]] = nullcontext,
    *,
    sees_writes: bool = True,
    ranks: Ranks | None = None,
) -> tuple[list[Stage], list[Observation]]:
    """Return the stages and the observation of each; a stage that reads another's values joins it.

    The stages are in the form in which they can be cut apart, and `arg` is the model's input. The
    other parameters are as of `Observer`.
    """
    slots = [slot for stage in stages for slot in stage.slots()] * sees_writes
    observer = Observer(
        device, around, leaf_flags(arg), slots=slots, sees_writes=sees_writes, ranks=ranks
    )
    x, flags = detached(arg), grad_flags(arg)
    found: list[Observation] = []
    for stage in stages:
        with untracked():
            seen, x = observer.stage(stage, x, flags)
        flags = seen.flags
        found.append(seen)
    joined: list[Stage] = []
    seen_of: list[Observation] = []
    ends: list[int] = []
    for i, (stage, seen) in enumerate(zip(stages, found, strict=True)):
        while joined and ends[-1] >= seen.reads:
            earlier, before = joined.pop(), seen_of.pop()
            stage, seen = earlier.merged_with(stage), _joined(before, seen)
            ends.pop()
        joined.append(stage)
        seen_of.append(seen)
        ends.append(i)
    note_state(joined, seen_of)
    for stage, seen in zip(joined, seen_of, strict=True):
        stage.all_slots, stage.read = slots, seen.read
    return joined, seen_of


def _joined(a: Observation, b: Observation) -> Observation:
    return Observation(
        flags=b.flags,
        uses_rng=a.uses_rng or b.uses_rng,
        mutable_buffers=[*a.mutable_buffers, *b.mutable_buffers],
        changes=[*a.changes, *b.changes],
        leaves=[*a.leaves, *b.leaves],
        passes_output=b.passes_output,
        reads=min(a.reads, b.reads),
        is_fed=a.is_fed or b.is_fed,
        repeats=a.repeats and b.repeats,
        written=[*a.written, *b.written],
        asks=a.asks or b.asks,
        reaches=lambda place: a.reaches(place) or b.reaches(place),
        read=a.read | b.read,
    )


def note_state(stages: Sequence[Stage], observations: Sequence[Observation]) -> None:
    """Set in each stage the state that its recomputation has to restore, from the observations."""
    places: dict[Any, Place] = {}
    for seen in observations:
        for place in seen.changes:
            known = places.get(place.identity)
            if known is None or place.in_place:
                places[place.identity] = place
    for stage, seen in zip(stages, observations, strict=True):
        own = {place.identity for place in seen.changes}
        stage.asks = seen.asks
        stage.mutable_buffers = seen.mutable_buffers
        stage.note_written(seen.written)
        stage.state = [
            place
            for identity, place in places.items()
            if identity in own or (seen.reaches(place) and not place.is_generator)
        ]
