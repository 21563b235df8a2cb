"""Steps of a model with captured pieces: their plan, and one run of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from rotor.common.accounting import scrap_bytes
from rotor.common.calls import call_signature
from rotor.common.substitutes import PatchedForwards
from rotor.engines.contract import Call
from rotor.engines.graph.code.emit import Emitted
from rotor.engines.graph.code.offloading import Placed
from rotor.engines.parts.chained import ChainKind, mark_backward
from rotor.engines.parts.kinds import Kind, backward_marks
from rotor.engines.parts.offloading import PlacedStep
from rotor.engines.parts.pieces import Pieces, Site
from rotor.engines.parts.plan import PartsPlan, choose_within, without_bases
from rotor.engines.proofs import StepProof
from rotor.errors import InfeasibleError
from rotor.graph.assembly import least_bytes, peak_of, simulate
from rotor.meter.allocator import MeterBusyError
from rotor.meter.step_meter import StepWatch
from rotor.meter.watch import LevelWatch
from rotor.units import exact_bytes


def make_pieces_plan(
    reason: str,
    pieces: Pieces,
    limit_bytes: int,
    reserve_bytes: int,
    verify: str | int,
) -> PartsPlan[Pieces]:
    """Return the fastest choice under a limit; raise InfeasibleError if the pieces alone do not
    fit.

    If the code between the pieces leaves too little, return the choice of the least peak: the need
    of that code is known only after a metered step, and no plan changes it.
    """
    pieces.captures.refresh(pieces.kinds)
    pieces.captures.follow_link(pieces.kinds)
    for chain in pieces.chains:
        chain.refresh()
    options, most = pieces.options(), pieces.tier_limit_bytes
    alone = without_bases(pieces.bases)
    least_alone = least_bytes(options, alone, most)
    if max(least_alone, least_bytes(options, pieces.bases, most)) > limit_bytes:
        # Programs of another shape may keep more than this shape needs.
        pieces.captures.search(pieces.kinds)
        options = pieces.options()
        least_alone = least_bytes(options, alone, most)
    least = least_bytes(options, pieces.bases, most)
    if least_alone > limit_bytes:
        choice = choose_within(options, alone, least_alone, most)
        enough = max(least_alone, least + reserve_bytes)
        enough += scrap_bytes(enough)
        names = [site.name for site in pieces.sites]
        raise InfeasibleError(
            f"no plan was found that fits in {exact_bytes(limit_bytes)}; the captured parts of the "
            f"model alone need {exact_bytes(least_alone)}, and a step with the code between them "
            f"about {exact_bytes(enough)}: give at least that, or a smaller batch",
            enough,
            peak=peak_of(options, alone, choice, names).in_all(enough, "between the parts"),
        )
    choice = choose_within(options, pieces.bases, limit_bytes - reserve_bytes, most)
    plan = PartsPlan(
        pieces.captures.device,
        reason,
        pieces,
        choice,
        simulate(options, pieces.bases, choice),
        limit_bytes,
        least + reserve_bytes,
        verify=verify,
        reserve_bytes=reserve_bytes,
    )
    if plan.tier is not None:
        plan.tier.prepare()
    return plan


def make_code(plan: PartsPlan[Pieces]) -> None:
    """Make the code of all parts before a step: within it, a watch of the heap would see it."""
    for site, number in zip(plan.parts.sites, plan.choice, strict=True):
        if isinstance(site.kind, Kind):
            site.kind.emitted(number)


class PiecesStep:
    """Runner of a plan's pieces during the model's forward, with a proof in a verified step."""

    def __init__(
        self, plan: PartsPlan[Pieces], meter: StepWatch | None, proof: StepProof | None = None
    ) -> None:
        self._plan = plan
        self._meter = meter
        self._proof = proof
        sites = enumerate(plan.parts.sites)
        self._sites = {(s.module, s.number): k for k, s in sites if isinstance(s.kind, Kind)}
        self._is_in_chain = False
        self._placed = PlacedStep() if plan.tier is None else plan.tier.begin()
        self._counts: dict[nn.Module, int] = {}
        self._stack = ExitStack()
        self.token: weakref.ref[torch.Tensor] | None = None

    def __enter__(self) -> Self:
        modules = dict.fromkeys(module for module, _ in self._sites)
        self._stack.enter_context(self._placed)
        self._replaced = self._stack.enter_context(PatchedForwards(modules, self._runner))
        self._others = self._stack.enter_context(
            PatchedForwards(self._plan.parts.uncalled_modules, self._uncalled)
        )
        if self._meter is not None:
            self._meter.mark("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forward(self, model: nn.Module, call: Call) -> Any:
        """Return the output of the model; call its stages one by one if some are a chain."""
        pieces = self._plan.parts
        if not pieces.chains:
            return model.forward(*call.args, **call.kwargs)
        (x,) = (*call.args, *call.kwargs.values())
        numbers = {site: k for k, site in enumerate(pieces.sites)}
        for unit in pieces.units:
            x = self._run_chain(numbers[unit], unit, x) if isinstance(unit, Site) else unit(x)
        return x

    def _run_chain(self, k: int, site: Site, x: Any) -> Any:
        """Return the output of a chain's stages."""
        chain, number = site.kind, self._plan.choice[k]
        assert isinstance(chain, ChainKind)
        if self._meter is not None:
            self._meter.mark(f"forward {k}")
        self._is_in_chain = True
        try:
            output = chain.run(number, x, self._proof, k)
        finally:
            self._is_in_chain = False
        if self._meter is not None:
            self._meter.mark(f"after {k}")
            mark_backward(x, output, *backward_marks(self._meter.mark, k))
        return output

    def _uncalled(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        """Return the forward of a module on a path where no pieces were searched."""
        pieces = self._plan.parts

        def run(*args: Any, **kwargs: Any) -> Any:
            pieces.is_stale = True
            has_parts = next(module.children(), None) is not None
            if not torch.is_grad_enabled() or not has_parts:
                return forward(*args, **kwargs)
            path = pieces.uncalled_modules[module]
            output, failed = self._call_as_found(path, module, args, kwargs)
            return forward(*args, **kwargs) if failed else output

        return run

    def _call_as_found(
        self, path: str, module: nn.Module, args: Any, kwargs: Any, k: int | None = None
    ) -> tuple[Any, str]:
        """Return the output of a call that is not in the plan, captured now, and whether it failed.

        It needs what was planned for call `k`, if possible.
        """
        with self._others.paused(), self._replaced.paused():
            signature = call_signature(args, kwargs)
            try:
                captures = self._plan.parts.captures
                kind = captures.kind_of(path, module, signature, args, kwargs)
            except MeterBusyError:
                return None, "now"  # An operation is not known yet, and the step is being metered.
            finally:
                if isinstance(self._meter, LevelWatch):
                    self._meter.cancel()
            if isinstance(kind, Kind):
                is_held, planned = False, None
                if k is not None:
                    site = self._plan.parts.sites[k]
                    is_held = site.is_held
                    planned = site.kind.options(is_held)[self._plan.choice[k]]
                emitted = kind.emitted(kind.in_place_of(planned, is_held))
                return self._call(kind, emitted, module, args, kwargs)
        return None, "now"

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[module] = self._counts.get(module, -1) + 1
            if self._is_in_chain or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            k = self._sites.get((module, number))
            if k is None:
                self._plan.parts.is_stale = True
                return forward(*args, **kwargs)
            site = self._plan.parts.sites[k]
            if site.failed or site.signature != call_signature(args, kwargs):
                self._plan.parts.is_stale |= not (site.failed or site.varies)
                # The call runs without a plan: the next metered step tells its need.
                self._plan.differs = True
                return forward(*args, **kwargs)
            assert isinstance(site.kind, Kind)
            return self._run(k, site, site.kind, forward, args, kwargs)

        return run

    def _run(self, k: int, site: Site, kind: Kind, forward: Any, args: Any, kwargs: Any) -> Any:
        emitted = kind.code_for(self._plan.choice[k], self._proof, k, site.path)
        marks = None
        if self._meter is not None:
            marks = backward_marks(self._meter.mark, k)
            self._meter.mark(f"forward {k}")
        with self._replaced.paused(site.module):
            output, failed = self._call(
                kind, emitted, site.module, args, kwargs, marks, self._placed.of(k)
            )
        if self._meter is not None:
            self._meter.mark(f"after {k}")
        if failed:
            site.failed = failed == "for good"
            self._plan.parts.is_stale = True
            if not site.failed:
                # The code has taken another branch than when it was captured.
                output, failed = self._call_as_found(site.path, site.module, args, kwargs, k)
            return forward(*args, **kwargs) if failed else output
        return output

    def _call(
        self,
        kind: Kind,
        emitted: Emitted,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        marks: Any = None,
        placed: Placed | None = None,
    ) -> tuple[Any, str]:
        output, failed = kind.call(emitted, module, args, kwargs, marks, placed)
        if not failed:
            self.token = kind.step.capture.token
        return output, failed
