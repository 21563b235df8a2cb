"""Stages that a chain cannot plan, and those that do not repeat, in `Checkpointable`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rotor.inspection import Inspection
from rotor.metering import cancel_running
from rotor.observing import Observation
from rotor.plan import Plan
from rotor.sharded_proofs import ShardedProof
from rotor.stage_proofs import StepProof
from rotor.stages import Stage, Structure

__all__ = ["UNMEASURED", "NeedsGraph", "ProvedChain"]

logger = logging.getLogger("rotor")

UNMEASURED: dict[str, Any] = {
    "_inspections": {},
    "_plans": {},
    "_latest": None,
    "_latest_key": None,
    "inspection_values": None,
}
"""Attributes of a copy that has to be measured again."""

_CHAIN_ONLY = ("names", "functions", "inspection_values", "_algorithm", "_inspections")


class NeedsGraph(Exception):
    """Values leave stages in a way that a graph of operations can follow, and a chain cannot."""


class ProvedChain:
    """Observed stages, and proofs of recomputed ones."""

    module: Any
    engine: str
    preserve_rng_state: bool
    verify: str | int
    _inspections: dict[Any, Inspection]
    _learned_loss: dict[Any, int]
    _graph_options: dict[str, Any]
    _loaded: dict[Any, Any]
    _plans: dict[Any, Plan]
    _ranks: Any
    _sharding: Any

    def _has_state(self) -> bool:
        """Whether stages have state of which a copy of the model has its own."""
        return any(s.state for found in self._inspections.values() for s in found.stages)

    def _observed(self, stages: Sequence[Stage], seen: Sequence[Observation]) -> None:
        """Have another engine plan what a chain cannot; warn of stages that are kept.

        Raises
        ------
        RuntimeError
            Values in the graph leave a stage of a sharded model otherwise than by its output.
        """
        leaving = [i for i, s in enumerate(seen) if s.leaves or s.is_fed]
        reason = f"stage {stages[leaving[0]].name}: {seen[leaving[0]].reason()}" if leaving else ""
        varying = [
            f"{stage.name} ({' and '.join(type(f).__name__ for f in stage.functions)})"
            for stage, s in zip(stages, seen, strict=True)
            if not s.repeats
        ]
        if self._sharding is not None:
            # All ranks go on, or none does.
            found = self._sharding.ranks.exchange((reason, varying))
            reason = next((other for other, _ in found if other), "")
            varying = list(dict.fromkeys(name for _, names in found for name in names))
        if reason:
            if self._sharding is not None:
                raise RuntimeError(
                    f"{reason}, which recomputing stages of a sharded model would lose: return it "
                    "from the stage, in a tuple with its output"
                )
            is_fed = any(s.is_fed for s in seen)
            shares = self._ranks is not None
            if self.engine == "auto" and self.preserve_rng_state and not (is_fed or shares):
                raise NeedsGraph(reason)
        if varying:
            self._warn_once(  # type: ignore[attr-defined]
                "varying",
                f"stage {', '.join(varying)} gave other bits in a second run from the same state: "
                "it is never recomputed, and what it makes is kept. It depends on state that "
                "cannot be set back, or one of its kernels is not deterministic "
                "(torch.use_deterministic_algorithms)",
            )

    def _check_options(self, options: dict[str, Any]) -> None:
        """Leave it to `_graphs_options`, which knows the engine."""

    def _graphs_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what the model is planned with as a graph; TypeError: no such option."""
        if options and self.engine == "chain":
            raise TypeError(f"unknown option {next(iter(options))!r}")
        if options:
            from rotor.graph.engine import check_options

            check_options(options)
        return options

    def _become_graph(self, reason: str) -> None:
        """Plan the model as a captured graph from now on."""
        from rotor.graphed_blocks import BlockCheckpointable

        logger.info("planned as a graph of operations, not as a chain: %s", reason)
        for name in _CHAIN_ONLY:
            self.__dict__.pop(name, None)
        self.__class__ = BlockCheckpointable  # type: ignore[assignment]
        self.__dict__.update(
            _options=self._graph_options, _structure=Structure(self.module), _learned_loss={}
        )
        self._begin()  # type: ignore[attr-defined]

    def _proof_of(self, plan: Plan) -> StepProof | None:
        """What compares the values of the next step; ``None`` where it is not verified."""
        if not plan.schedule.recomputed:
            return None
        # Ranks compare in the same steps.
        is_due = plan.proved.is_due(self.verify if self._sharding is None else plan.verify)
        plan.proved.ran += 1
        if not is_due:
            return None
        myself = weakref.ref(self)

        def failed(stages: list[int]) -> None:
            cancel_running()
            plan.refuted = plan.outdated = True
            for i in stages:
                measures = plan.inspection.measures
                measures[i] = replace(measures[i], varies=True)
                plan.inspection.reasons[i] = "it gave other bits when it ran again in a backward"
            if (model := myself()) is not None:
                model._forget_chains(plan)

        if self._sharding is not None:
            return ShardedProof(
                plan.inspection.stages,
                plan.proved,
                failed,
                self._sharding.ranks,
                self._sharding.gradients_now,
            )
        return StepProof(
            plan.inspection.stages,
            plan.proved,
            self.module.parameters(),
            plan.limit_bytes - plan.predicted_bytes - plan.reserve_bytes,
            failed,
        )

    def _forget_chains(self, refuted: Plan) -> None:
        """Have every plan of the same measure made again."""
        self._loaded.clear()
        for plan in self._plans.values():
            if plan.inspection is refuted.inspection:
                plan.refuted = plan.outdated = True

    def _measured_alike(self, key: Any) -> Inspection | None:
        """The measure for inputs that differ only in whether they require gradients."""

        def without_flags(measured: Any) -> Any:
            return tuple([tensor[:-1] for tensor in measured[0]]), measured[1:]

        for other, inspection in self._inspections.items():
            if without_flags(other) == without_flags(key):
                return inspection
        return None

    def _share_loss(self, measured: Any) -> None:
        """Take what the loss was seen to need on any rank."""
        assert self._ranks is not None
        learned = self._learned_loss.get(measured)
        found = self._ranks.exchange_ints(learned is not None, learned or 0)
        known = [size for is_known, size in found if is_known]
        if known:
            self._learned_loss[measured] = max(known)
