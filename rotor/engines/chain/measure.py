"""Measures of a model's stages, the input of a chain's cost model.

Each stage is run through the executor's own operations, once under an exact meter of allocated
bytes and then until its times are stable, one stage at a time, so that measuring needs no more
memory than the least schedule and copies of state (docs/memory-model.md). It changes nothing:
buffers are replaced by copies meanwhile, gradients are not accumulated, random states and
autocast's cache are as before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from statistics import median_low
from typing import Any

import torch
from torch import nn

from rotor import _core, timing
from rotor._pytorch import core, devices
from rotor._pytorch.casts import casts_are_shared
from rotor._pytorch.traces import Collectives
from rotor.algorithms.sequence import FE, FN, Operation
from rotor.algorithms.utils import ProgressCallback
from rotor.chain import Chain
from rotor.common.modes import autocast_off
from rotor.common.places import Place, Saved, tensors_in
from rotor.common.ranks import NeedsPeers, Ranks, entered, wait_for
from rotor.common.tensor_trees import flagged, grad_flags, map_tensors, tree_tensors
from rotor.common.undisturbed import buffers_copied, gradients_aside, trial
from rotor.engines.chain.alike import TimedStage, frozen_prefix, merge_stages, structure_of
from rotor.engines.chain.measures import Inspection, StageMeasure
from rotor.engines.chain.observe import Observation, named, observe
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.run import Run
from rotor.engines.chain.stages import Stage, shared_parameters
from rotor.meter import allocator
from rotor.meter.step_meter import check_idle

__all__ = ["Chain", "Inspection", "Measuring", "StageMeasure", "measure", "merge_stages"]


_ROUNDS, _FEW_ROUNDS = (5, 25), (3, 3)
_METERED_ROUNDS = 3
_TOLERANCE = 0.03
_NS_PER_STAGE = 2_000_000_000


def _bytes(tensors: Sequence[torch.Tensor | None], device: torch.device) -> int:
    return allocator.storage_bytes(t for t in tensors if t is not None and t.device == device)


def _tensors_of(places: Iterable[Place]) -> list[torch.Tensor]:
    return [tensor for place in places for tensor in tensors_in(place.get())]


class Measuring:
    """One pass over `stages`, from the input `arg` of the first to the output.

    The `observations` are one for each stage. `hold_output` tells whether the caller holds the
    output. With `few_rounds`, times are medians of three rounds. Unless it `is_alone`, other ranks
    measure too, in the same rounds, for stages may run collective operations.
    """

    run_class = Run
    sees_writes = True

    def __init__(
        self,
        stages: list[Stage],
        arg: Any,
        observations: Sequence[Observation],
        *,
        hold_output: bool,
        few_rounds: bool = False,
        is_alone: bool = True,
    ) -> None:
        n = len(stages)
        order = [
            *(("Fe", i) for i in range(n)),
            ("L", n),
            *(("B", i) for i in range(n - 1, -1, -1)),
        ]
        self.stages = stages
        self.hold_output = hold_output
        schedule = Schedule([Operation(kind, i) for kind, i in order], n, plain_tail=False)
        self.run = self.run_class(stages, schedule, arg, preserve_rng_state=False)
        self.device = self.run.device
        self.observations = observations
        self.last_input: Any = None
        self._state = Saved([])
        self._known = tree_tensors(arg)
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._least_rounds, self._most_rounds = _FEW_ROUNDS if few_rounds else _ROUNDS
        self._timed: dict[Hashable, TimedStage] = {}
        self._is_alone = is_alone

    @staticmethod
    def around(stage: Stage) -> AbstractContextManager[Any]:
        """Return the context in which an observed stage runs."""
        return nullcontext(stage)

    def stage(self, i: int) -> StageMeasure:
        """Measure stage i, whose input is set; set the input of the next one."""
        stage = self.stages[i]
        kept = self.run.x[i]
        seen = self.observations[i]
        self.run.flags[i + 1] = seen.flags
        self._state = Saved(stage.state)
        self._written = [(t, t.detach().clone()) for t in seen.written]
        structure = None
        if self._is_alone:
            structure = structure_of(stage, kept, self.run.flags_of(i), seen)
        earlier = None if structure is None else self._timed.get(structure)
        with stage.on_copies():
            if earlier is None:
                self._look_for_peers(i, kept)
                self._round(i, kept)
                self._choose_kernels(i, kept)
            clock = timing.Clock(self.device)
            clock.start()
            # A thread of gloo frees blocks late in some rounds: the medians are right.
            rounds = 1 if self._is_alone else _METERED_ROUNDS
            metered = [self._metered_round(i, kept) for _ in range(rounds)]
            rough_ns = clock.stop()
            if earlier is not None and earlier.is_like(metered[0], rough_ns):
                forward, record, backward = earlier.times
            else:
                forward, record, backward = self._times(i, kept)
            self._reset()
            before = _tensors_of(stage.state)
            self._forward(i, kept)
            left = self._left(stage, before)
            self._put_parameters()
        if structure is not None and earlier is None:
            self._timed[structure] = TimedStage(metered[0], rough_ns, (forward, record, backward))
        self.run.x[i] = None
        self.last_input = kept if i == len(self.stages) - 1 else None
        output_bytes, gradient, parameters, *_ = metered[0]
        xbar, forward_tmp, nograd_tmp, peak = (
            max(0, median_low(column))
            for column in zip(*(figures for *_, figures in metered), strict=True)
        )
        return StageMeasure(
            name=stage.name,
            forward_ns=forward,
            record_ns=record,
            backward_ns=backward,
            output_bytes=output_bytes,
            xbar_bytes=xbar,
            forward_tmp_bytes=forward_tmp,
            forward_nograd_tmp_bytes=nograd_tmp,
            backward_peak_bytes=peak,
            grad_bytes=gradient,
            pgrad_bytes=parameters,
            flags=seen.flags,
            uses_rng=seen.uses_rng,
            buffer_bytes=_bytes(
                [slots[name] for slots, name in (*(stage.mutable_buffers or ()), *stage.written)],
                self.device,
            )
            + _bytes(_tensors_of(p for p in stage.state if p.in_place), self.device)
            + sum(place.state_bytes(self.device) for place in stage.state),
            left_bytes=left,
            varies=not seen.repeats,
            leaves=bool(seen.leaves)
            or seen.is_fed
            or (i > 0 and self.observations[i - 1].passes_output),
        )

    def _metered_round(
        self, i: int, x: Any
    ) -> tuple[int, int, tuple[int, ...], tuple[int, int, int, int]]:
        """Run a round under a meter; return its bytes.

        They are those of the output, the input's gradient and each parameter's gradient; then the
        graph kept after Fe, and the peaks of Fe, Fn and B above what remains of them.
        """
        with allocator.meter(self.device) as meter:
            output_bytes, arriving, gradient, parameters = self._round(i, x, meter.mark)
        segments = {s.name: s for s in meter.segments}
        fe, back, fn = segments["Fe"], segments["B"], segments["Fn"]
        # A saved tensor may be dropped at the very start of B: its peak counts from the end of Fe.
        level = fe.end_bytes + arriving
        figures = (
            fe.end_bytes - fe.start_bytes,
            fe.peak_bytes - fe.end_bytes,
            fn.peak_bytes - fn.start_bytes - output_bytes,
            back.peak_bytes - level,
        )
        return output_bytes, gradient, parameters, figures

    def _left(self, stage: Stage, before: list[torch.Tensor]) -> int:
        """Return the bytes of tensors that a stage has put into state, each storage once."""
        known = {
            core.storage_identity(part)
            for t in (*before, *self._known)
            for part in core.strided_parts(t)
        }
        made = [
            part
            for tensor in _tensors_of(stage.state)
            for part in core.strided_parts(tensor)
            if core.storage_identity(part) not in known
        ]
        self._known += made
        return _bytes(made, self.device)

    def _reset(self) -> None:
        """Restore the state with which the stage began."""
        self._state.put()
        self._put_parameters()

    def _put_parameters(self) -> None:
        for tensor, before in self._written:
            tensor.data.copy_(before)

    def _forward(self, i: int, x: Any) -> None:
        self.run.x[i] = x
        with torch.no_grad():
            self.run.do(FN, i)

    def _look_for_peers(self, i: int, x: Any) -> None:
        """Raise NeedsPeers if a backward has collectives, before the number of rounds may vary."""
        if self._is_alone and core.is_distributed():
            with Collectives(NeedsPeers.check):
                self._round(i, x)

    def _choose_kernels(self, i: int, x: Any) -> None:
        """Let the thread of backwards, which runs the stage again, search for its kernels too."""
        if not devices.searches(self.device):
            return

        def forward() -> None:
            self._reset()
            self.before(i)
            self._forward(i, x)
            self.run.x[i + 1] = None

        devices.run_in_backward(self.device, forward)

    def _round(
        self, i: int, x: Any, mark: Callable[[str], object] | None = None
    ) -> tuple[int, int, int, tuple[int, ...]]:
        """Run Fe, B and Fn of stage i; return bytes.

        They are those of its output, the gradient that arrives, the input's gradient, and each
        parameter's gradient.
        """
        run = self.run
        mark = mark or _no_mark
        run.x[i] = x
        self.before(i)
        self._reset()
        mark("Fe")
        with torch.no_grad():
            run.do(FE, i)
        held = self._give_gradient(i, mark)
        arriving = _bytes(run.gradient or [], self.device)
        mark("B")
        found = self.back(i)
        mark("rest")
        gradient = _bytes(run.gradient or [], self.device)
        parameters = self.gradient_bytes(i, found)
        run.gradient = None
        del held, found
        self._reset()
        self.before(i)
        mark("Fn")
        self._forward(i, x)
        mark("end")
        output_bytes = _bytes(tree_tensors(run.x[i + 1]), self.device)
        run.x[i + 1] = None
        return output_bytes, arriving, gradient, parameters

    def _give_gradient(self, i: int, mark: Callable[[str], object]) -> Any:
        """Give the output of stage i a gradient of ones; return an output that the caller holds.

        A captured loss consumes the output, so that the last Fe keeps its memory without it.
        """
        run = self.run
        last = i == len(self.stages) - 1
        y, flags = run.x[i + 1], run.flags_of(i + 1)
        # Without memory of their own; gradients of distributed tensors are such themselves.
        likes = [(torch.empty_like(t, device="meta"), t.device) for t in flagged(y, flags)]
        if last and not self.hold_output:
            run.x[i + 1] = y = None
        mark("grad")
        dense = torch.contiguous_format
        run.gradient = [torch.ones_like(t, device=d, memory_format=dense) for t, d in likes]
        run.x[i + 1] = None
        return y if last else None

    def before(self, i: int) -> None:
        """Provide memory that must exist before stage i runs, and is not counted as its own."""

    def gradient_bytes(self, i: int, found: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
        """Return the bytes of the gradients from `back`, one number for each parameter."""
        del i
        return tuple(_bytes([g], self.device) for g in found)

    def is_enough(self, count: int, is_stable: bool, spent_ns: int) -> bool:
        """Return whether `count` rounds in `spent_ns` suffice; `is_stable`: times agree."""
        if timing.is_single():
            return True
        if not self._is_alone:
            return count >= _ROUNDS[0]
        return _core.repeats_are_enough(
            count,
            is_stable,
            spent_ns,
            self._least_rounds,
            self._most_rounds,
            _NS_PER_STAGE,
            min_comes_first=True,
        )

    def back(self, i: int) -> Sequence[torch.Tensor | None]:
        """Run B of stage i; return the gradients of its parameters."""
        # FSDP2 leaves reduced gradients in the parameters, where the caller takes them.
        aside = gradients_aside(self.run.parameters[i]) if self.sees_writes else nullcontext()
        with autocast_off(self.device.type), aside:
            found = self.run.back(i, True, [True] * len(self.run.parameters[i]))
        wait_for([*(self.run.gradient or ()), *found])
        return found

    def _times(self, i: int, x: Any) -> tuple[int, int, int]:
        """Return the medians of Fn, Fe and B of stage i, ns."""
        run = self.run
        clock = timing.Clock(self.device)
        samples: tuple[list[int], list[int], list[int]] = ([], [], [])
        spent = 0
        for count in range(1, self._most_rounds + 1):
            run.x[i] = x
            self.before(i)
            self._reset()
            clock.start()
            self._forward(i, x)
            samples[0].append(clock.stop())
            run.x[i] = x
            self._reset()
            clock.start()
            with torch.no_grad():
                run.do(FE, i)
            samples[1].append(clock.stop())
            held = self._give_gradient(i, _no_mark)
            clock.start()
            self.back(i)
            samples[2].append(clock.stop())
            run.gradient = None
            del held
            spent += sum(s[-1] for s in samples)
            medians = [timing.stable_median(s, _TOLERANCE) for s in samples]
            if self.is_enough(count, all(stable for _, stable in medians), spent):
                break
        return medians[0][0], medians[1][0], medians[2][0]

    def loss(self, loss_fn: Callable[..., torch.Tensor], targets: Sequence[Any]) -> tuple[int, int]:
        """Return the loss's peak above the level without it and its input, and its time in ns."""
        n = len(self.stages)
        run = self.run
        clock = timing.Clock(self.device)

        def once(mark: Callable[[str], object] = _no_mark) -> int:
            given = map_tensors(list(targets), lambda t: t.detach().clone())
            mark("output")
            self._reset()
            with self.stages[-1].on_copies():
                self._forward(n - 1, self.last_input)
            self._put_parameters()
            mark("loss")
            clock.start()
            with torch.enable_grad():
                token = run.token.detach().requires_grad_()
                loss = loss_fn(run.hand_over(token), *given)
            torch.autograd.grad(loss, token, allow_unused=True)
            run.gradient = None
            return clock.stop()

        once()
        with allocator.meter(self.device) as meter:
            once(meter.mark)
        segments = {s.name: s for s in meter.segments}
        peak = segments["loss"].peak_bytes - segments["output"].start_bytes
        repeats = 1 if timing.is_single() else self._least_rounds
        return peak, timing.stable_median([once() for _ in range(repeats)], _TOLERANCE)[0]


def _no_mark(name: str) -> None:
    del name


def measure(
    stages: Sequence[Stage],
    arg: Any,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    progress: ProgressCallback | None = None,
    measuring_class: type[Measuring] = Measuring,
    few_rounds: bool = False,
    observed: Callable[[list[Stage], list[Observation]], object] | None = None,
    ranks: Ranks | None = None,
) -> Inspection:
    """Measure every stage of a model on a sample of its input.

    Parameters
    ----------
    stages
        Stages from `find_stages`.
    arg
        Input: a tensor, or tensors in tuples, lists and dictionaries.
    loss_fn, targets
        If given, ``loss_fn(output, *targets)`` is measured too, and the output is assumed to be
        held by no caller.
    progress
        Function called as ``progress(done, total)`` after each stage.
    measuring_class
        Class that measures a stage.
    few_rounds
        True to take the median of three rounds, instead of five to 25 until it is stable.
    observed
        Function called with the stages and their observations, before any is measured.
    ranks
        Ranks that measure the stages together; ``None`` for a single process.

    Returns
    -------
    Inspection
        Measures of each stage, and of the loss.

    Raises
    ------
    ValueError
        The input holds no tensor; the first stage changes it in place; a stage writes to a module
        that no module has as a child.
    TypeError
        A stage returns something other than tensors.
    MeterBusyError
        A profiler is running, so that memory cannot be metered (CPU).
    """
    tensors = tree_tensors(arg)
    if not tensors:
        raise ValueError("the input holds no tensor, expected a tensor or a tuple with tensors")
    device = tensors[0].device
    check_idle(device)
    if device.type != "cpu":
        gc.collect()  # Garbage that is freed later would falsify the figures of a stage.
    stages = _with_shared_casts(stages, device)
    roots = [root for stage in stages for root in named(stage)]
    if loss_fn is not None:
        roots.append(("loss_fn", loss_fn))
    is_sharded = not measuring_class.sees_writes
    peers = () if ranks is None else ranks.members
    own_trial = trial(
        roots, (arg, targets), device, is_guarded=False, is_sharded=is_sharded, peers=peers
    )
    with entered(ranks, own_trial) as made:
        arg, targets = made.arguments
        with nullcontext() if is_sharded else made.guarded():
            merged = frozen_prefix(merge_stages(stages, arg, made.undo_writes), arg)
        made.check_hidden()
        made.put_back()
        merged, seen = observe(
            merged, arg, device, measuring_class.around, sees_writes=not is_sharded, ranks=ranks
        )
        made.put_back()
        if observed is not None:
            observed(merged, seen)
        measuring = measuring_class(
            merged,
            arg,
            seen,
            hold_output=loss_fn is None,
            few_rounds=few_rounds,
            is_alone=ranks is None,
        )
        measures = []
        for i in range(len(merged)):
            measures.append(measuring.stage(i))
            if progress is not None:
                progress(i + 1, len(merged))
        run = measuring.run
        output_grad = _bytes(flagged(run.x[-1], measures[-1].flags), device)
        run.x[-1] = None
        loss_peak, loss_ns = None, None
        if loss_fn is not None:
            inner = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
            with buffers_copied(slot for module in inner for slot in core.buffer_slots(module)):
                loss_peak, loss_ns = measuring.loss(loss_fn, targets)
        return Inspection(
            stages=merged,
            measures=measures,
            input_bytes=_bytes(tensors, device),
            output_grad_bytes=output_grad,
            input_flags=grad_flags(arg),
            device=device,
            loss_peak_bytes=loss_peak,
            loss_ns=loss_ns,
            reasons={i: s.reason() for i, s in enumerate(seen) if s.reason()},
        )


def _with_shared_casts(stages: Sequence[Stage], device: torch.device) -> list[Stage]:
    """Merge the stages between uses of a weight that autocast casts once for all of them.

    Their gradients are added in the lower precision, within one backward.
    """
    merged = list(stages)
    if casts_are_shared(device.type):
        for shared in shared_parameters(stages):
            using = [i for i, stage in enumerate(merged) if shared in map(id, stage.parameters())]
            merged[using[0] : using[-1] + 1] = [
                reduce(Stage.merged_with, merged[using[0] : using[-1] + 1])
            ]
    return merged
