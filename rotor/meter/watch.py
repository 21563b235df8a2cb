"""Cheap watching of every step: data of the same shape may need more than was measured.

A stage that works on selected rows, or eager code between captured parts, was measured on the first
batch. The memory that they keep in later steps is compared with that: on the CPU by the level of
the C library's heap before and after, which costs some microseconds. After a difference, and
now and then, a step is metered again. On an accelerator the allocator's counter shows a new peak.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import backwards, core, devices, dispatch, ends
from rotor.common.accounting import METERED_STEPS, is_metered_again, is_new_maximum, noise_bytes
from rotor.common.frames import warn_caller
from rotor.common.tensor_trees import tree_tensors
from rotor.errors import MemoryLimitWarning
from rotor.meter import allocator as memory
from rotor.meter.step_meter import Metered
from rotor.units import exact_bytes


class _Watch:
    """Observer of a step at its marks and at the end of its backward."""

    def __init__(self, engine: Any, plan: Any) -> None:
        self._engine = weakref.ref(engine)
        self._plan = plan
        self._thread = threading.get_ident()
        self._is_open = False

    def mark(self, name: str) -> None:
        """Begin another part of the step."""

    def cancel(self) -> None:
        """Stop without a result: nothing was started."""

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward, and watch for the end of the backward."""
        self.mark("loss")
        for tensor in tree_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_arrived)
                return

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        self.mark("backward")
        if torch.is_grad_enabled():
            self._is_open = True
            dispatch.after_last_backward(self._thread, type(self).__name__, self._finish)
        elif not self._is_open:
            ends.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        raise NotImplementedError


class LevelWatch(_Watch):
    """Comparison of the bytes at the marks of a step with the bytes of a metered step.

    ``engine.learn_levels`` gets the bytes beyond ``plan.levels``, if any, at a backward's end.
    """

    def __init__(self, engine: Any, plan: Any) -> None:
        super().__init__(engine, plan)
        self._more: dict[str, int] = {}
        self._begin = _core.heap_bytes()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Compare nothing: what has no part in the step was put on the heap meanwhile."""
        self._more.clear()
        self._is_cancelled = True

    def mark(self, name: str) -> None:
        """Compare the level at the start of a part of the step.

        Captured parts, whose memory does not vary, are left out: reading the heap takes time.
        """
        if name.startswith(("after ", "before ")) or self._is_cancelled:
            return
        expected = self._plan.levels.get(name)
        if expected is None:
            return
        noise = noise_bytes(expected)
        slack = self._plan.slack.get(name, noise // 2)
        more = _core.heap_bytes() - self._begin - expected - slack
        if more > noise:
            self._more[name] = max(more, self._more.get(name, 0))
            return
        self._plan.differs |= more > noise // 2
        self._plan.slack[name] = min(max(slack + more, 0), noise)

    def _finish(self) -> None:
        engine = self._engine()
        if self._more and engine is not None:
            found, self._more = self._more, {}
            engine.learn_levels(self._plan, found)


class PeakWatch(_Watch):
    """Reader of an accelerator's peak counter around a step, without resetting it.

    ``engine.learn_peak`` gets the peak at the end of a backward in which the counter has risen.
    """

    def __init__(self, engine: Any, plan: Any) -> None:
        super().__init__(engine, plan)
        self._begin, self._before = devices.counters(plan.device)

    def _new_peak(self) -> int:
        """Return the bytes of the step if they are more than were seen before; else 0."""
        _, peak = devices.counters(self._plan.device)
        reserving = self._plan.reserving
        if reserving is None:
            return peak - self._begin if peak > self._before else 0
        grown = reserving.grown_bytes(self._plan.device)
        return grown if grown > self._plan.most_bytes_seen else 0

    def _finish(self) -> None:
        engine, peak_bytes = self._engine(), self._new_peak()
        if peak_bytes and engine is not None:
            if self._is_open:
                passing(engine, self._plan)(peak_bytes)
            else:
                engine.learn_peak(self._plan, peak_bytes)


_MOST_LOSSES = 8
"""Losses of as many sizes are told apart: more vary in every step, and metering helps no more."""


def watch_loss(plan: Any, output: Any) -> Any:
    """Return an output; its step is told from others by the loss that the caller makes of it.

    Autograd numbers its nodes by thread: on the CPU two numbers tell how many the loss has made.
    After as many as never before, the next step is metered.
    """
    if len(plan.losses) >= _MOST_LOSSES:
        return output
    tensors = (output,) if isinstance(output, torch.Tensor) else tree_tensors(output)
    for tensor in tensors:
        if tensor.is_cpu and tensor.grad_fn is not None:
            begun = backwards.next_node()
            noted = partial(_note_loss, weakref.ref(plan), threading.get_ident(), begun)
            tensor.grad_fn.register_prehook(noted)
            break
    return output


def _note_loss(found: Any, thread: int, begun: int, _: Any) -> None:
    plan = found()
    if plan is None or thread != threading.get_ident():
        return
    nodes = backwards.next_node() - begun
    if nodes not in plan.losses:
        plan.differs |= bool(plan.losses)
        plan.losses.add(nodes)


def sparse_growth(plan: Metered, parameters: Iterable[Any]) -> int:
    """Return the bytes of sparse gradients that exist beyond the ones of metered steps.

    Sparse gradients are added up side by side, until they are coalesced or dropped: each step of
    gradient accumulation needs more. If they grow, the next step of the plan is metered.
    """
    found = 0
    for gradient in backwards.gradients_of(parameters):
        if gradient is not None and gradient.layout is not torch.strided:
            found += memory.storage_bytes(core.strided_parts(gradient))
    more = max(found - plan.sparse_bytes, 0)
    plan.sparse_bytes += more
    plan.differs |= more > 0
    return more if plan.measured_bytes is not None else 0


def is_due(plan: Metered, parameters: Iterable[Any] = ()) -> bool:
    """Count an unmetered step; return whether it should be metered after all."""
    plan.unmetered += 1
    sparse_growth(plan, parameters)
    due = plan.differs or is_metered_again(plan.unmetered)
    plan.differs = False
    return due


DIFFERENTIATED = (
    "whose gradients were differentiated (create_graph=True)",
    "what is kept for gradients of gradients",
)
RAISED = "whose forward raised an error", "what a caller notes before, and trains on,"


def passing(owner: Any, plan: Any, kind: tuple[str, str] = DIFFERENTIATED) -> Callable[[int], None]:
    """Return a function of the peak of a step of an unplanned kind: text on it, and why.

    It warns, and teaches the plan nothing: with a lower one such backwards would need more. The
    owner has the context.
    """
    myself = weakref.ref(owner)

    def passed(peak_bytes: int) -> None:
        found = myself()
        plan.meterings += 1
        if plan.meterings >= METERED_STEPS:
            plan.measured_bytes = peak_bytes
        told = 0 if found is None else found.context.rerun_bytes
        if found is None or not is_new_maximum(peak_bytes, plan.limit_bytes, told):
            return
        found.context.rerun_bytes = peak_bytes
        warn_caller(
            f"a step {kind[0]} needed {exact_bytes(peak_bytes)}, and the limit is "
            f"{exact_bytes(plan.limit_bytes)}: {kind[1]} is not planned. A limit of as much "
            "would do, or a smaller batch",
            MemoryLimitWarning,
        )

    return passed


def note_peak(plan: Metered, peak_bytes: int) -> None:
    """Note the bytes that a step needed."""
    plan.least_bytes_seen = min(plan.least_bytes_seen or peak_bytes, peak_bytes)
    plan.most_bytes_seen = max(plan.most_bytes_seen, peak_bytes)


def warn_sparse(plan: Any, peak_bytes: int) -> None:
    """Warn of a step above the limit due to accumulated sparse gradients, as `warn_excess`."""
    _warn(
        plan,
        peak_bytes,
        f"{exact_bytes(plan.sparse_bytes)} of sparse gradients existed, "
        "which PyTorch puts side by side, not one on the other, and copies whenever more are "
        "added. They grow with every step of gradient accumulation, and no plan changes that: "
        "coalesce them after each backward (p.grad = p.grad.coalesce()), accumulate over fewer "
        "steps, or give a higher limit",
    )


def warn_excess(plan: Any, peak_bytes: int, where: Sequence[str] = ()) -> None:
    """Warn of a step above the limit, once for each new maximum.

    `where` names the parts of the model that kept more than was measured, if known.
    """
    named = f" by {', '.join(where)}" if where else ""
    _warn(
        plan,
        peak_bytes,
        "the memory of this model depends on the values of its "
        f"input, and more was needed{named} than when it was measured. The following steps are "
        "planned for as much; measure the model on a batch that needs the most, or give a lower "
        "limit",
    )


def _warn(plan: Any, peak_bytes: int, reason: str) -> None:
    if is_new_maximum(peak_bytes, plan.limit_bytes, plan.warned_bytes):
        plan.warned_bytes = peak_bytes
        warn_caller(
            f"a step needed about {exact_bytes(peak_bytes)}, and the limit is "
            f"{exact_bytes(plan.limit_bytes)}: {reason}",
            MemoryLimitWarning,
        )
