"""Warnings about habits that cost memory or time under a limit, each once for a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch

from rotor._pytorch import core, devices, dispatch
from rotor.common.accounting import is_new_maximum, noise_bytes
from rotor.common.frames import warn_caller
from rotor.common.rerun import StepNotes
from rotor.engines.contract import Context, Engine
from rotor.errors import CaptureError, MemoryLimitWarning
from rotor.meter.allocator import MeterBusyError, OtherThreadError, UncountedError
from rotor.meter.step_meter import cancel_running, is_running
from rotor.units import exact_bytes

_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter)


class _Step(threading.local):
    is_running = False

    def __enter__(self) -> None:
        self.is_running = True

    def __exit__(self, *_: object) -> None:
        self.is_running = False


step_of_this_thread = _Step()
"""State of this thread: a model with a limit is measured in it, or runs a training forward."""


def refuse_outer_transforms(context: Context) -> bool:
    """Return whether only plain PyTorch can run a step; raise RuntimeError if an engine is set."""
    # By name, the dynamic engine refuses nested budgets itself.
    if step_of_this_thread.is_running and context.settings.engine != "dynamic":
        context.warn(
            "nested",
            "a model with a limit was called within another model with a limit, which holds for "
            "both: here it runs as plain PyTorch. Wrap the outermost model only",
        )
        return True
    reason = _outer_transform()
    if not reason:
        return False
    if context.settings.engine != "auto" or context.peers.ranks is not None:
        raise RuntimeError(reason)
    context.warn(
        reason, f"{reason}. Until then such steps run as plain PyTorch, {_unlimited(context)}"
    )
    return True


def is_seen_by_a_mode(context: Context) -> bool:
    """Return whether the caller's own mode sees a step's operators, which no capture goes through.

    Engines that were asked for by name run such steps as they can, if they are not traced; that of
    graphs cannot.
    """
    name = dispatch.callers_tracer()
    if context.settings.engine in ("auto", "graph") and context.peers.ranks is None:
        name = name or dispatch.callers_mode()
    if name and context.settings.engine == "graph":
        raise CaptureError(
            f"{name} sees each operator of this step, so that none of it is captured: call the "
            'model without it, or use engine="auto", which then runs the step as plain PyTorch'
        )
    if name:
        context.warn(
            "mode",
            f"{name} sees each operator of this step, so that none of it is captured: such steps "
            f"run as plain PyTorch, {_unlimited(context)}",
        )
    return bool(name)


def runs_first(context: Context) -> bool:
    """Return whether a step is to run as plain PyTorch, because lazy modules are not made yet."""
    if context.structure.is_initialized():
        return False
    context.warn(
        "lazy",
        "lazy modules make their parameters in this step, which runs as plain PyTorch, "
        f"{_unlimited(context)}. Call the model once, under torch.no_grad() and with a small "
        "batch, before it is trained",
    )
    return True


def refuse_unmeasured(context: Context, error: MeterBusyError) -> bool:
    """Return whether a step that cannot be measured now may run all the same; raise otherwise.

    False: only as plain PyTorch, since another engine was asked for by name.
    """
    is_named = context.settings.engine != "auto" or context.peers.ranks is not None
    if isinstance(error, UncountedError) or (is_named and not isinstance(error, OtherThreadError)):
        raise error
    return not is_named


def warn_unmeasured(context: Context, error: MeterBusyError, *, is_limited: bool) -> None:
    """Warn of a step that another engine runs, or plain PyTorch, as it cannot be measured now."""
    text = f"this step {'was not planned' if is_limited else 'ran without a limit'}: {error}"
    if isinstance(error, OtherThreadError):
        warn_caller(text, MemoryLimitWarning)
    elif is_limited:
        context.warn(
            "unmeasured, limited",
            f"this step was not planned: {error}. Until then the dynamic engine runs such steps: "
            "it evicts and recomputes while they run",
        )
    else:
        context.warn(
            "unmeasured",
            f"this step ran without a limit: {error}. Until then such steps run as plain PyTorch, "
            f"{_unlimited(context)}",
        )


def _unlimited(context: Context) -> str:
    limit = context.settings.present_limit
    return f"and nothing keeps the limit{'' if limit is None else ' of ' + exact_bytes(limit)}"


def _outer_transform() -> str:
    """Return why a step cannot run under a plan where it is called; empty if it can."""
    if devices.is_capturing():
        return (
            "a training step under a limit cannot be captured as an accelerator's graph (such as "
            "torch.cuda.graph): it restores random states and measures memory. Capture the plain "
            "model, chk.module, or train without a capture"
        )
    if core.in_functorch():
        return (
            "torch.func transforms (grad, vmap, functional_call inside them) cannot go through "
            "a plan that recomputes: apply them to the plain model, chk.module"
        )
    if core.in_forward_ad():
        return (
            "forward-mode differentiation (torch.autograd.forward_ad) cannot go through a plan "
            "that recomputes: apply it to the plain model, chk.module"
        )
    if core.in_checkpoint() or core.in_backward():
        return (
            "a model with a limit was called within torch.utils.checkpoint, or otherwise in a "
            "backward: what a plan keeps would be computed twice. Remove that checkpoint, "
            "the plan recomputes what it must; or leave the limit to one model, the outermost"
        )
    return ""


def warn_of_later_code(context: Context, limit_bytes: int, output: Any) -> None:
    """Warn if the forward has returned code that runs when the caller asks for its results."""
    if isinstance(output, _LATER):
        context.warn(
            "later",
            f"the limit of {exact_bytes(limit_bytes)} is not kept: the forward returns a "
            f"{type(output).__name__}, whose code runs after the call, as in plain PyTorch. "
            "Return a list of the results, or limit a module that the code calls",
        )


def warn_of_measuring(context: Context, limit_bytes: int, peak_bytes: int) -> None:
    """Warn if measuring has taken more memory than a limit."""
    if peak_bytes > limit_bytes:
        context.warn(
            "measuring",
            f"the limit of {exact_bytes(limit_bytes)} was not kept before a first step: measuring "
            f"took {exact_bytes(peak_bytes)}, once. Costs that a run has measured are kept on "
            "disk, where a later run finds them",
        )


class RerunNotes(StepNotes):
    """Notes for parts of a step that a backward may run again without a plan; it warns of them.

    `is_pending` tells whether the step itself keeps values: as much as its limit, or what a step
    under its plan was seen to need.
    """

    __slots__ = ("_context", "_engine", "_is_pending", "_plan")

    def __init__(
        self, context: Context, engine: Engine, plan: Any, is_pending: Callable[[], bool]
    ) -> None:
        self.preserves_rng = context.settings.preserve_rng_state
        self._context, self._engine, self._plan = context, engine, plan
        self._is_pending = is_pending

    def _warn(self, most_bytes: int, cause: str, needed: str) -> None:
        limit_bytes = self._plan.limit_bytes
        if is_new_maximum(most_bytes, limit_bytes, self._context.rerun_bytes):
            self._context.rerun_bytes = most_bytes
            warn_caller(
                f"{cause}. The step needed {exact_bytes(most_bytes)} at most{needed}, and the "
                f"limit is {exact_bytes(limit_bytes)}",
                MemoryLimitWarning,
            )

    def report(self, needed_bytes: int, is_kept: bool | None) -> None:
        """Warn if a forward that ran again needed more than the limit."""
        limit = self._plan.limit_bytes
        # The figures of a step with such a forward say nothing about its plan.
        if cancel_running(all_steps=False) and is_kept is None and is_running():
            return  # The meter goes on, and reports an excess.
        if is_kept is None and needed_bytes <= limit + noise_bytes(limit):
            return
        is_beside = is_kept is not None and (is_kept or self._is_pending())
        self._warn(
            needed_bytes + max(limit, self._plan.most_bytes_seen) * is_beside,
            "a backward that no plan gives ran the model's forward again, in plain autograd: "
            "gradients of gradients (create_graph=True), of inputs before those of parameters, "
            "batched ones, a second backward, or code that reads other values than in the forward",
            f", {exact_bytes(needed_bytes)} of them beside what it kept" * is_beside,
        )

    def report_kept(self, more_bytes: int) -> None:
        """Warn if a further backward needed more than the limit."""
        # An engine that decides while a step runs makes room for such a backward.
        if self._engine.plans_ahead:
            self._warn(
                (self._plan.most_bytes_seen or self._plan.limit_bytes) + more_bytes,
                "a further backward through a graph that is kept (retain_graph=True) ran beside "
                "the gradients of the first one",
                f", {exact_bytes(max(more_bytes, 0))} of them for these",
            )


def warn_of_checkpointing(context: Context) -> None:
    """Warn if layers of the model recompute by themselves, as Hugging Face's can."""
    modules = list(context.module.modules())
    if any(getattr(module, "gradient_checkpointing", False) for module in modules):
        # Transformers 5 has given it another name.
        has_new = any(hasattr(module, "activation_checkpointing_disable") for module in modules)
        name = "activation_checkpointing" if has_new else "gradient_checkpointing"
        context.warn(
            "checkpointing",
            "gradient checkpointing is on: layers that recompute by themselves leave less to "
            "choose, and the limit decides what is recomputed. Call "
            f"model.{name}_disable(), or leave {name}=True out",
        )


def warn_of_forward(context: Context, forward: Callable[..., Any]) -> None:
    """Warn of a training call by another forward than the limited model's, which was not run."""
    if context.module.training and torch.is_grad_enabled():
        name = getattr(forward, "__qualname__", repr(forward))
        context.warn(
            "forward",
            f"this step ran without any limit: {name} is in the place of the limited model's "
            "forward, and does not call it. Replace the forward of the model before "
            "rotor.Checkpointable(model): then its steps are planned",
        )


def warn_of_searches(context: Context) -> None:
    """Warn if convolutions, which the model has, may take another algorithm when they run again."""
    has_some = any(hasattr(module, "transposed") for module in context.module.modules())
    if has_some and torch.backends.cudnn.benchmark:
        context.warn(
            "searches",
            "torch.backends.cudnn.benchmark is on: each thread searches the algorithms of "
            "convolutions for itself, so that a convolution that is computed again may give other "
            "bits than at first. Turn it off under a limit",
        )
