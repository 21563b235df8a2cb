"""`Checkpointable` for any module, also for one whose blocks are sharded by FSDP2."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor import _fsdp, memory, together
from rotor.algorithms.curve import Curve
from rotor.block_calls import candidates
from rotor.block_plan import (
    Blocks,
    BlocksPlan,
    make_blocks_plan,
    measure_blocks,
    most,
)
from rotor.block_proofs import BlocksProof, Kept
from rotor.blocks import BlockStage, BlockStep
from rotor.checkpointable import METERED_STEPS
from rotor.graph.calls import check_arguments, takes_targets
from rotor.graph.engine import CapturedStep
from rotor.graph.kinds import Captures
from rotor.graph.pieced import learn, pieces_curve
from rotor.graph.recorded import MEASURED, price
from rotor.graphed import GraphCheckpointable
from rotor.metering import StepBytes, cancel_running
from rotor.sharded import Sharding, find_sharding
from rotor.stages import Structure
from rotor.values import tensors_of, tensors_within

logger = logging.getLogger("rotor")


class BlockCheckpointable(GraphCheckpointable):
    """What ``engine="auto"`` makes of a module that is no ``nn.Sequential``.

    Where blocks of it are sharded by ``fully_shard``, before or after wrapping, there is no graph:
    each block keeps what autograd saves, or is computed again in the backward, as one plan says
    that all ranks share. All ranks measure, plan and train in step. Anything else is as in
    `rotor.graphed.GraphCheckpointable`.
    """

    _sharding: Sharding | None
    _candidates: list[BlockStage]
    _measured: dict[Any, Blocks]
    _captures: dict[torch.device, Captures]

    def _begin(self) -> None:
        super()._begin()
        self._look()

    def _look(self) -> None:
        """See whether the model is sharded; nothing is measured any more."""
        sharding = find_sharding(self.module, self)
        if sharding is not None:
            if self._profile != MEASURED:
                raise ValueError(
                    "the blocks of a sharded model are always measured here: profile= is for graphs"
                )
            found = candidates(self.module, sharding)
        self.__dict__.update(
            _sharding=sharding,
            _ranks=None if sharding is None else sharding.ranks,
            _candidates=[] if sharding is None else found,
            _is_unit=_fsdp.is_unit(self),
            _structure=Structure(self.module),
            _measured={},
            _captures={},
            _digests={},
            _steps={},
            _plans={},
            _reasons={},
            _pieces={},
            _unplanned=set(),
            _latest=None,
            _latest_key=None,
            _pending=None,
        )

    def _look_again(self) -> None:
        if not _fsdp.is_loaded() and self._sharding is None:
            return
        if not self._structure.is_current() or _fsdp.is_unit(self) != self._is_unit:
            self._look()

    def _check_sharded(self, model: nn.Module) -> None:
        del model

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ranks": None}

    # -- measuring and planning

    def measure(
        self, *args: Any, targets: Sequence[Any] = (), **kwargs: Any
    ) -> CapturedStep | None:
        """As `rotor.graphed.GraphCheckpointable.measure`; of a sharded model, measure its blocks.

        A collective operation then: every rank has to call it. ``None`` is returned.
        """
        self._look_again()
        if self._sharding is None:
            return super().measure(*args, targets=targets, **kwargs)
        flags = [(module, module.training) for module in self.module.modules()]
        if not self.module.training:
            self.module.train()
        try:
            with torch.enable_grad():
                self._sharding.prepare()
                if self._sharding.root is not None:
                    args, kwargs = self._sharding.root.cast_inputs((args, kwargs))
                key = self._key_of_all(args, targets, kwargs)[0]
                known: dict[Any, Any]
                for known in (self._plans, self._pieces):
                    for old in [k for k in known if k[0] == key[0]]:
                        del known[old]
                self._measured.pop(key[0], None)
                self._measure_all(key, args, targets, kwargs)
                self.__dict__["_latest_key"] = key
        finally:
            for module, training in flags:
                module.training = training
        return None

    def _key_of_all(
        self, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """The key of a step of all ranks, and whether one of them has something to learn."""
        sharding = self._sharding
        assert sharding is not None

        def own_key() -> tuple[Any, Any]:
            sharding.prepare()
            self._structure.check_dropout()
            required, absent = sharding.parameter_flags()
            return (*self._key(args, targets, kwargs)[:-1], required), absent

        is_behind = not self._measured or any(p.outdated for p in self._plans.values())
        return together.key_of_all(sharding.ranks, own_key, self._digests, is_behind)

    def _measure_all(
        self, key: Any, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        sharding = self._sharding
        assert sharding is not None
        problem: Exception | None = None
        try:
            self._check_devices((args, kwargs))
            check_arguments(self.module, args, kwargs)
            cancel_running()
            memory.meter(tensors_of((args, kwargs))[0].device).start().stop()
        except Exception as error:
            problem = error
        sharding.ranks.all_well(problem)

        def call(arguments: Any) -> Any:
            own_args, own_kwargs = arguments
            return self._with_loss(self.module.forward(*own_args, **own_kwargs), targets)

        device = tensors_of((args, kwargs))[0].device
        self._reasons[key[0]] = (device, "it is sharded")
        self._measured[key[0]] = measure_blocks(
            self.module,
            sharding,
            self._candidates,
            call,
            (args, kwargs),
            has_loss=bool(targets) and self.loss_fn is not None,
            preserve_rng_state=self.preserve_rng_state,
            captures=self._captures_on(device),
        )
        blocks = self._measured[key[0]].sites
        varying = [f"{b.name} ({type(b.stage.module).__name__})" for b in blocks if b.kept.varies]
        if varying:
            self._warn_once(
                "varying",
                f"block {', '.join(varying)} gave other bits in a second run from the same state: "
                "it is never recomputed, and what it makes is kept. It depends on state that "
                "cannot be set back, or one of its kernels is not deterministic "
                "(torch.use_deterministic_algorithms)",
            )
        kinds = dict.fromkeys(b.graph.kind for b in blocks if b.graph is not None)
        self._warn_unrepeatable([kind.lowered for kind in kinds])

    def _captures_on(self, device: torch.device) -> Captures:
        if device not in self._captures:
            options = {"effort": "fast"} | self._options
            self._captures[device] = Captures(device, partial(price, self._profile), options)
        return self._captures[device]

    def _blocks(self, key: Any) -> Blocks:
        """The blocks of a step, as they are known now."""
        known: Any = self._pieces.get(key)
        if known is not None:
            found: Blocks = known
            return found
        assert self._sharding is not None
        return self._measured[key[0]].shifted(self._sharding.unreduced_bytes())

    def curve(self, points: int = 40) -> Curve:
        """As `rotor.graphed.GraphCheckpointable.curve`; of a sharded model, of this rank."""
        if self._sharding is None:
            return super().curve(points)
        key = self._measured_key()
        blocks, plan = self._blocks(key), self._plans.get(key)
        if plan is None:
            blocks = blocks.with_assumed_loss(self.loss_tmp_memory_usage)
        reserve = self._sharding.late_bytes(blocks.device) if plan is None else plan.reserve_bytes
        found = pieces_curve(blocks, points)  # type: ignore[arg-type]
        return self._marked(Curve(found.bytes + reserve, found.seconds), blocks.device)

    def _make(self, key: Any, reserve_bytes: int = 0) -> Any:
        sharding = self._sharding
        if sharding is None:
            return super()._make(key, reserve_bytes)
        blocks = self._blocks(key)
        # Steps that were metered on one rank count for all.
        lost = [block.is_lost for block in blocks.sites]
        found = sharding.ranks.exchange((blocks.bases, blocks.is_measured, lost))
        blocks = replace(
            blocks,
            bases=most([bases for bases, *_ in found]),
            is_measured=any(is_measured for _, is_measured, _ in found),
        )
        for block, *flags in zip(blocks.sites, *(lost for *_, lost in found), strict=True):
            block.is_lost = any(flags)
        is_given = self.mem_limit is not None
        plan = make_blocks_plan(
            sharding.ranks,
            blocks,
            self._limit_on(blocks.device),
            reserve_bytes=max(reserve_bytes, sharding.late_bytes(blocks.device)),
            loss_tmp_bytes=self.loss_tmp_memory_usage,
            verify=self.verify,
        )
        if not is_given:
            self.__dict__["mem_limit"] = plan.limit_bytes
        self._pieces[key] = plan.pieces
        self._plans[key] = plan
        self.__dict__.update(_latest=plan, _latest_key=key)
        return plan

    # -- running

    def forward(self, *args: Any, targets: Any = (), **kwargs: Any) -> Any:
        """The model's output, or its loss where ``loss_fn`` and `targets` are given.

        In training mode with gradients enabled the plan is followed (and made, the first time);
        otherwise the plain model runs.
        """
        self._look_again()
        if self._sharding is None:
            return super().forward(*args, targets=targets, **kwargs)
        if self.loss_fn is None and targets != () and takes_targets(self.module):
            kwargs["targets"], targets = targets, ()
        if not self._checked_call(targets):
            return self._with_loss(self.module.forward(*args, **kwargs), targets)
        key, is_one_behind = self._key_of_all(args, targets, kwargs)
        plan = self._plans.get(key)
        wants_measure = key[0] not in self._measured
        wants_plan = plan is None or plan.outdated
        if is_one_behind or wants_plan:
            wanted = self._sharding.ranks.exchange_ints(wants_measure, wants_plan)
            wants_measure, wants_plan = (any(column) for column in zip(*wanted, strict=True))
        if wants_measure and wants_plan:
            self._measure_all(key, args, targets, kwargs)
        if plan is None or wants_plan:
            plan = self._replanned(key)
        self.__dict__.update(_latest=plan, _latest_key=key)
        assert isinstance(plan, BlocksPlan)
        return self._step_by_blocks(plan, args, targets, kwargs)

    def _step_by_blocks(
        self, plan: BlocksPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        pending: Any = None if self._pending is None else self._pending()
        if pending is not None and not pending.is_done:
            self._warn_pending(plan.limit_bytes)
        proof = self._blocks_proof(plan)
        meter = self._start_meter(plan)
        with BlockStep(
            [block.stage for block in plan.blocks],
            [block.flags for block in plan.blocks],
            plan.choice,
            plan.device,
            [None if block.is_lost else block.graph for block in plan.blocks],
            preserve_rng_state=self.preserve_rng_state,
            marks=meter,
            proof=proof,
        ) as step:
            output = self.module.forward(*args, **kwargs)
        if proof is not None:
            proof.begin_with(output)
        for k in step.failed:
            # Ranks agree before the next step that they have to plan again.
            plan.blocks[k].is_lost = plan.outdated = True
            logger.warning(
                "block %s was captured for other arguments or Python values: it is computed again "
                "whole from now on. Call measure() again where it stays as it is now",
                plan.blocks[k].name,
            )
        self.__dict__["_pending"] = None if step.latest is None else weakref.ref(step.latest)
        if meter is not None:
            meter.forward_done(tensors_within(output))
        return self._with_loss(output, targets)

    def _blocks_proof(self, plan: BlocksPlan) -> BlocksProof | None:
        """What compares the values of the next step; ``None`` where it is not verified."""
        if not plan.is_verified(self.verify):
            return None
        sharding = self._sharding
        assert sharding is not None
        myself = weakref.ref(self)

        def failed(numbers: list[int]) -> None:
            cancel_running()
            for k in numbers:
                plan.blocks[k].kept = Kept("it gave other bits when it ran again in a backward")
            plan.refuted = plan.outdated = True
            if (model := myself()) is not None:
                for other in model._plans.values():
                    if isinstance(other, BlocksPlan) and other.blocks == plan.blocks:
                        other.refuted = other.outdated = True

        return BlocksProof(
            self.module,
            [block.stage for block in plan.blocks],
            plan.proved,
            sharding.ranks,
            sharding.gradients_now,
            failed,
        )

    def _learn(self, plan: Any, step: StepBytes) -> None:
        if not isinstance(plan, BlocksPlan):
            super()._learn(plan, step)
            return
        assert self._sharding is not None
        step = step.shifted(self._sharding.base_bytes(plan.device))
        if plan.earlier is None and step.peak_bytes > plan.limit_bytes:
            # On the CPU, what threads of gloo give back is not seen: another step may tell.
            plan.earlier = step
            return
        if plan.earlier is not None and plan.earlier.peak_bytes < step.peak_bytes:
            step = plan.earlier
        plan.measured_timeline = step.timeline
        plan.outdated = learn(plan, step)
        is_over = step.peak_bytes > plan.limit_bytes
        if is_over and (not plan.outdated or plan.meterings >= METERED_STEPS):
            self._warn_once("over", plan.told_over())

    def _warn_over(self, plan: Any, least_bytes: int) -> None:
        if not isinstance(plan, BlocksPlan):
            super()._warn_over(plan, least_bytes)
        elif (plan.measured_bytes or 0) > plan.limit_bytes:
            self._warn_once("over", plan.told_over())
