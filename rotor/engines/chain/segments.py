"""Ways around a chain's schedule, for backwards that it cannot give.

The chain runs again in little memory, one segment after the other. A segment, stages in a row, is
one node of autograd that keeps its input. Its gradients that are to be differentiated are one node
too, which keeps the gradients that it was given. Both run the segment again when they are
differentiated. What second derivatives give to the segment's input and parameters waits for the
gradient of its output, so that sums are made in plain autograd's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import islice, pairwise, repeat
from typing import Any
from weakref import WeakMethod

import torch
from torch.autograd.function import Function

from rotor._pytorch import backwards, core, devices, dispatch
from rotor.common.modes import Modes, UncountedStates
from rotor.common.rerun import Rerun, Unit
from rotor.common.tensor_trees import Flags, apart_of, detached, tree_tensors, with_tensors
from rotor.engines.around import attach
from rotor.engines.chain.measures import Inspection, StageMeasure
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.snapshot import Snapshot
from rotor.engines.chain.stages import Stage, keeping_nothing, token_of

Gradients = Sequence[torch.Tensor | None]


def bounds_of_segments(measures: Sequence[StageMeasure]) -> list[int]:
    """Return the first stage of each segment, and the last one's end, for the least need in all."""
    handed = (0, *(m.output_bytes for m in measures[:-1]))
    return _bounds(tuple(m.xbar_bytes for m in measures), handed)


def bounds_around_shared(bounds: Sequence[int], stages: Sequence[Stage]) -> list[int]:
    """Return the bounds that leave all stages with a parameter, if it has several, in one segment.

    In several segments, what it gets from each would be added up in another order.
    """
    first: dict[int, int] = {}
    inner: set[int] = set()
    for k, stage in enumerate(stages):
        for parameter in stage.parameters():
            inner.update(range(first.setdefault(id(parameter), k) + 1, k + 1))
    return [bound for bound in bounds if bound not in inner]


@lru_cache
def _bounds(kept: tuple[int, ...], handed: tuple[int, ...]) -> list[int]:
    best = (float(sum(kept)), [0, len(kept)])
    for halves in range(1, 2 * len(kept).bit_length()):
        most = max(sum(kept) / 2 ** (halves / 2), *kept)
        paths = [(0, [0])]
        for end in range(1, len(kept) + 1):
            begin, size, found = end, 0, []
            while begin and size + kept[begin - 1] <= most:
                begin -= 1
                size += kept[begin]
                found.append((paths[begin][0] + handed[begin], begin))
            cost, begin = min(found)
            paths.append((cost, [*paths[begin][1], end]))
        best = min(best, (paths[-1][0] + most, paths[-1][1]))
    return best[1]


def run_in_segments(
    stages: Sequence[Stage],
    measures: Sequence[StageMeasure],
    bounds: Sequence[int],
    value: Any,
    device: torch.device,
    note: Callable[[int], object],
) -> Any:
    """Return the output of stages in a row, in a graph whose nodes run segments of them again.

    `bounds` has the first stage of each segment, and the end of the last. A single segment runs in
    plain autograd, as do stages that vary from run to run. `value` is the input of the first stage.
    `note` is called, where a segment needs most, with the bytes that its backward adds.
    """
    for begin, end in pairwise(bounds):
        own, costs = stages[begin:end], measures[begin:end]
        more_bytes = max(m.backward_peak_bytes for m in costs)
        if len(bounds) == 2 or any(m.varies for m in costs):
            for stage in own:
                value = stage(value)
            note(more_bytes)
        else:
            segment = _Segment(own, costs[-1].flags, value, device, note, more_bytes)
            *outputs, _ = _apply_outputs(segment, *tree_tensors(value), *segment.parameters)
            value = with_tensors(segment.output, outputs)
    return value


class _Segment:
    """Stages that run together, and the state in which each began."""

    def __init__(
        self,
        stages: Sequence[Stage],
        flags: Flags,
        value: Any,
        device: torch.device,
        note: Callable[[int], object],
        more_bytes: int,
    ) -> None:
        self.parameters = list({id(p): p for s in stages for p in s.parameters()}.values())
        self.flags, self.token, self.count = flags, token_of(device), len(tree_tensors(value))
        self.output: Any = None
        """The output, with tokens in the place of its tensors."""
        self.waiting: dict[int, list[list[Gradients]]] = {}
        """By backward: gradients of the outputs, and those of the gradients made of them."""
        self._stages, self._note, self._more_bytes = stages, note, more_bytes
        self._input = with_tensors(value, repeat(self.token))
        self._states, self._modes = UncountedStates(device), Modes(devices.type_of(device))
        self._snapshots: list[Snapshot] = []

    def first(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs; note the state in which each stage begins."""
        asks = any(stage.asks for stage in self._stages)
        with keeping_nothing() if asks else nullcontext(), torch.set_grad_enabled(asks):
            value = self._through(map(self._noted, self._stages), tensors)
        self.output = with_tensors(value, repeat(self.token))
        return tree_tensors(detached(value))

    def _noted(self, stage: Stage) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            snapshot = Snapshot(stage, self._states)
            value = stage(value)
            snapshot.finish()
            self._snapshots.append(snapshot)
            return value

        return run

    def _through(
        self, functions: Iterable[Callable[[Any], Any]], tensors: Sequence[torch.Tensor]
    ) -> Any:
        value = with_tensors(self._input, tensors)
        for function in functions:
            value = function(value)
            if self._modes.is_autocast:
                torch.clear_autocast_cache()
        return value

    def _again(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of another run, with its graph."""
        runs = [partial(snapshot.recompute, last=False) for snapshot in self._snapshots]
        with backwards.outside_transforms(), self._modes:
            return tree_tensors(self._through(runs, tensors))

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        ways: Sequence[Sequence[Gradients]],
        wanted: Gradients,
        *,
        is_first: bool = False,
        is_differentiable: bool = False,
    ) -> Gradients:
        """Return the sums of some gradients of a run of the segment on `tensors`, each tensor's
        once.

        Each of the `ways` gives a term: gradients of the outputs; or these, gradients of the
        gradients that are made of them, and so on. `wanted` has inputs, parameters, and gradients
        among `ways`. With `is_first`, the sums are computed as in a backward whose result is
        differentiated, and with `is_differentiable` they have a graph, all of which is kept.
        """
        if not _present(wanted) or not any(_present(way[-1]) for way in ways):
            return [None] * len(wanted)
        apart = dict[int, torch.Tensor]()
        with torch.enable_grad():
            with backwards.outside_transforms():
                inner = apart_of((tensors, [way[:-1] for way in ways]), apart, is_differentiable)
            # Gradients that arrive from outside are added last, as in the whole graph.
            outputs = [t.view_as(t) if t.requires_grad else t for t in self._again(inner[0])]
            sources = [apart.get(id(t), t) for t in (*tensors, *self.parameters)]
            asked = {
                id(t): apart.get(id(t), t) for t in wanted if t is not None and t.requires_grad
            }
            with core.without_hooks(core.hooks_of([*sources, *asked.values()])):
                roots = list[tuple[torch.Tensor, torch.Tensor]]()
                for levels, way in zip(inner[1], ways, strict=True):
                    roots += _pairs(_derived(outputs, sources, levels, way[-1]), way[-1])
                self._note(0 if any(len(way) > 1 for way in ways) else self._more_bytes)
                found = _grad(
                    roots, list(asked.values()), create_graph=is_first or is_differentiable
                )
                self._note(0)
        apart.clear()
        by_id = dict(zip(asked, found, strict=True))
        return [by_id.pop(id(tensor), None) for tensor in wanted]


def _derived(
    made: Gradients,
    sources: Sequence[torch.Tensor | None],
    levels: Sequence[Gradients],
    latest: Gradients,
) -> Gradients:
    """Return gradients of gradients, one level after the other, from the outputs on.

    They are made where the next level, and `latest` after all, has gradients of them: PyTorch has
    no formula for some others, such as those of batch norms in third order.
    """
    for given, following in zip(levels, [*levels, latest][1:], strict=True):
        asked = [None if g is None else t for t, g in zip(sources, following, strict=True)]
        own = [t for t in asked if t is not None and t.requires_grad]
        found = iter(_grad(_pairs(made, given), own, create_graph=True))
        made = [None if t is None or not t.requires_grad else next(found) for t in asked]
        sources = [*sources, *given]
    return made


def _present(tensors: Gradients) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _pairs(tensors: Gradients, gradients: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tensors and their gradients, where there are both."""
    return [
        (t, g)
        for t, g in zip(tensors, gradients, strict=True)
        if t is not None and g is not None and t.requires_grad
    ]


def _grad(
    roots: list[tuple[torch.Tensor, torch.Tensor]],
    asked: list[torch.Tensor],
    *,
    create_graph: bool,
) -> Gradients:
    if not roots or not asked:
        return [None] * len(asked)
    outputs, given = zip(*roots, strict=True)
    return torch.autograd.grad(outputs, asked, given, create_graph=create_graph, allow_unused=True)


class _Outputs(Function):
    """Node of a segment; the last output is its token."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, *tensors: torch.Tensor) -> Any:
        ctx.segment = segment
        ctx.set_materialize_grads(False)
        inputs, token = tensors[: segment.count], segment.token.detach()
        outputs = segment.first(inputs)
        fixed = [t for t, flag in zip(outputs, segment.flags, strict=True) if not flag]
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*inputs, token)
        return *outputs, token

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        segment, given = ctx.segment, given[:-1]
        *inputs, token = ctx.saved_tensors
        wanted = (*inputs, *segment.parameters)
        ways = [[given], *reversed(segment.waiting.pop(dispatch.graph_task(), []))]
        if _is_differentiated_batch(given):
            return None, *segment.gradients(inputs, ways, wanted, is_differentiable=True)
        if torch.is_grad_enabled() and _present(given):
            return None, *_apply_gradients(segment, [len(given)], token, *wanted, *given)
        return None, *segment.gradients(inputs, ways, wanted)


class _Gradients(Function):
    """Node of a segment's gradients that are to be differentiated, of any order."""

    @staticmethod
    def forward(
        ctx: Any,
        segment: _Segment,
        sizes: list[int],
        token: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        ctx.segment, ctx.sizes = segment, sizes
        ctx.set_materialize_grads(False)
        known = segment.count + len(segment.parameters)
        inputs, given = tensors[: segment.count], tensors[known:]
        ctx.save_for_backward(token, *inputs, *given)
        found = segment.gradients(
            inputs, [_levels(given, sizes)], tensors[: len(tensors) - sizes[-1]], is_first=True
        )
        return tuple([None if g is None else g.detach() for g in found])

    @staticmethod
    def backward(ctx: Any, *latest: torch.Tensor | None) -> Any:
        segment, sizes = ctx.segment, [*ctx.sizes, len(latest)]
        token, *tensors = ctx.saved_tensors
        inputs, given = tensors[: segment.count], tensors[segment.count :]
        way = [*_levels(given, ctx.sizes), latest]
        others = (*inputs, *segment.parameters)
        if not _present(latest):
            found: Gradients = [None] * (len(others) + len(given))
        elif _is_differentiated_batch(latest):
            found = segment.gradients(inputs, [way], (*others, *given), is_differentiable=True)
        elif torch.is_grad_enabled():
            found = _apply_gradients(segment, sizes, token, *others, *given, *latest)
        elif len(way) > 2:
            own = (*others, *given)
            asked = [None if t is None or not backwards.is_asked_for(t) else t for t in own]
            found = segment.gradients(inputs, [way], asked)
        else:
            if backwards.is_asked_for(token):
                segment.waiting.setdefault(dispatch.graph_task(), []).append(way)
            found = [*[None] * len(others), *segment.gradients(inputs, [way], given)]
        return None, None, None, *found


def _is_differentiated_batch(given: Gradients) -> bool:
    """Return whether gradients are batches, and those made of them are to be differentiated.

    PyTorch has no nodes of such batches but its own.
    """
    return torch.is_grad_enabled() and any(map(backwards.is_batched, _present(given)))


def _levels(given: Gradients, sizes: Sequence[int]) -> list[Gradients]:
    """Return the gradients of each level."""
    following = iter(given)
    return [list(islice(following, size)) for size in sizes]


_apply_outputs = core.bare_apply(_Outputs)
_apply_gradients = core.bare_apply(_Gradients)


class Around:
    """Ways around the schedule of one step; `arg` is the input of the stage that runs next.

    One leads around the stages that the schedule runs, so that the stages of plain autograd see
    every backward. Another leads around the whole chain for gradients that are to be
    differentiated, so that their sums are made in the order of plain autograd; unless values leave
    the stages, or the last ones have registered hooks, which would be called without a gradient.
    """

    def __init__(
        self,
        unit: Unit,
        inspection: Inspection,
        schedule: Schedule,
        arg: Any,
        *,
        is_whole: bool = True,
    ) -> None:
        self._unit, self._inspection, self._schedule = unit, inspection, schedule
        self._is_whole, self._arg = is_whole, None
        self._rerun: Rerun | None = None
        # The heap of the C library is slow to count, and only a schedule's own stages need it.
        counts = is_whole and schedule.tail > schedule.head
        self._start_bytes = devices.level(inspection.device) if counts else None
        self._hooks, self._is_hooked = 0, False
        if schedule.tail == schedule.head:
            # A step that leaves all to plain autograd too shows which buffers forwards write to.
            unit.note_written()
        elif schedule.head == 0:
            self.begin(arg)

    def begin(self, arg: Any, run: Any = None) -> None:
        """Note the run of the schedule's stages, and the state before them, unless it is known."""
        if self._rerun is None:
            device, is_whole = self._inspection.device, self._is_whole
            self._arg, self._rerun = arg, Rerun(self._unit, arg, device, is_whole=is_whole)
            self._rerun.needs.start_bytes = self._start_bytes
        if run is not None:
            self._rerun.leave = WeakMethod(run.release)

    def stages(self, output: Any) -> Any:
        """Return the output of the schedule's stages, for other backwards too."""
        schedule, self._hooks = self._schedule, backwards.hooks_made()
        return self._attach(output, schedule.head, schedule.tail)

    def end(self) -> None:
        """Note whether the stages after those of the schedule have registered hooks."""
        self._is_hooked = self._hooks != backwards.hooks_made()

    def whole(self, output: Any) -> Any:
        """Return the chain's output, for gradients of gradients too."""
        schedule = self._schedule
        is_one = schedule.tail in (schedule.head, schedule.n)
        if is_one or self._is_hooked or self._inspection.plain != (0, schedule.n):
            return output
        return self._attach(output, 0, schedule.n, is_outer=True)

    def _attach(self, output: Any, begin: int, end: int, *, is_outer: bool = False) -> Any:
        inspection, rerun = self._inspection, self._rerun
        stages, measures = inspection.stages[begin:end], inspection.measures[begin:end]
        assert rerun is not None

        def forward(value: Any) -> Any:
            bounds = [0, len(stages)]
            if not rerun.is_batched:
                bounds = bounds_around_shared(bounds_of_segments(measures), stages)
            return run_in_segments(
                stages, measures, bounds, value, inspection.device, rerun.needs.note
            )

        inputs = [tensor for tensor in tree_tensors(self._arg) if tensor.requires_grad]
        parameters = {id(p): p for stage in stages for p in stage.parameters()}
        leaves = [*inputs, *parameters.values()]
        # A schedule runs one backward: the token is as a dead reference.
        return attach(output, rerun, forward, leaves, lambda: None, is_outer=is_outer)
