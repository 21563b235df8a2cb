"""Engine of sharded blocks: modules that FSDP2 shards one by one, planned together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rotor.algorithms.curve import Curve
from rotor.common.accounting import METERED_STEPS
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.engines.chain.growth import kept_until_backward
from rotor.engines.chain.sharded import Sharding
from rotor.engines.contract import Call, Context, IsPending, Key, StartMeter
from rotor.engines.graph.calls import captured_key, check_arguments
from rotor.engines.graph.costs.recorded import MEASURED, source_of
from rotor.engines.graph.engine import check_generator
from rotor.engines.graph.sizing import warn_unrepeatable
from rotor.engines.learning import MeteredEngine, confirmed
from rotor.engines.parts.block_graphs import graphs_of
from rotor.engines.parts.block_plan import (
    Blocks,
    make_blocks_plan,
    measure_blocks,
)
from rotor.engines.parts.blocks import BlocksProof, BlockStep, candidates
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.plan import PartsPlan, learn, parts_curve
from rotor.engines.peers import SharingRanks
from rotor.graph.assembly import largest_bases
from rotor.meter.step_meter import StepBytes
from rotor.tier.offload import check_device

logger = logging.getLogger("rotor")


class ShardedBlocksEngine(MeteredEngine):
    """Blocks sharded by ``fully_shard``, before or after wrapping.

    The model has no graph: each block keeps the tensors that autograd saves, or is computed again
    in the backward, by one plan that all ranks share. All ranks measure, plan and train in step.
    """

    name: ClassVar[str] = "blocks"
    published: ClassVar[frozenset[str]] = frozenset(
        ["graph", "program", "cost_model", "graph_plan"]
    )

    def __init__(self, context: Context, sharding: Sharding) -> None:
        super().__init__(context)
        context.peers = SharingRanks(sharding.ranks)
        self._ranks = sharding.ranks
        self._sharding = context.sharding = sharding
        self._candidates = candidates(context.module, sharding)
        self._measured: dict[Any, Blocks] = {}
        self._blocks: dict[Key, Blocks] = {}
        self._captures: dict[torch.device, Captures] = {}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if an option is unknown, random numbers may differ, or costs are given."""
        super().check(options)
        check_generator(self.context)
        self.settings.profile = source_of(self.settings.profile)
        if self.settings.profile != MEASURED:
            raise ValueError(
                "the blocks of a sharded model are always measured here: profile= is for graphs"
            )

    # -- measuring and planning

    def key(self, call: Call) -> Key:
        """Return the kind of a step on this rank; ValueError without a tensor to compute with."""
        if not tree_tensors(call.arguments):
            raise ValueError("the arguments of a sharded model hold no tensor, expected one")
        self._sharding.prepare()
        self.context.structure.check_dropout()
        required, absent = self._sharding.parameter_flags()
        return Key((*captured_key(self.context, call).measured[:-1], required), absent)

    def forget(self, measured: Any) -> None:
        """Drop the measure of a kind of step."""
        self._measured.pop(measured, None)
        for key in [key for key in self._blocks if key.measured == measured]:
            del self._blocks[key]

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of such steps; ``None`` before the blocks were measured."""
        blocks = self._measured.get(key.measured)
        return None if blocks is None else blocks.device

    def measure(self, key: Key, call: Call) -> None:
        """Measure the blocks in training steps without a trace; every rank has to take part."""
        device, offload = self.context.device_of(call), self.settings.offload

        def check() -> None:
            check_arguments(self.context.module, *call.arguments)
            if offload is not None:
                check_device(offload.tier, device)
                offload.known_link(device)

        self.prepare_measuring(call.arguments, check)
        self._share_link()

        found = self._measured[key.measured] = measure_blocks(
            self.context.module,
            self._sharding,
            self._candidates,
            lambda given: self.context.plain(given[0], given[1], call.targets),
            call.arguments,
            has_loss=self.context.loss_of(call) is not None,
            preserve_rng_state=self.settings.preserve_rng_state,
            captures=self._captures.setdefault(device, Captures(self.settings, device)),
        )
        names = [
            f"{b.name} ({type(b.stage.module).__name__})" for b in found.sites if b.kept.varies
        ]
        self.warn_varying("block", names)
        warn_unrepeatable(self.context, [kind.lowered for kind in graphs_of(found.sites)])

    def _share_link(self) -> None:
        """Count on the slowest tier of all ranks, and the least limit; a collective operation."""
        offload = self.settings.offload
        if offload is not None and offload.link is not None:
            offload.share(self._ranks)

    def _known_blocks(self, key: Key) -> Blocks:
        """Return the blocks of a step, with the latest facts on them."""
        if key in self._blocks:
            return self._blocks[key]
        return self._measured[key.measured].shifted(self._sharding.unreduced_bytes())

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> PartsPlan[Blocks]:
        """Return the fastest choice under the least limit of all ranks."""
        blocks = self._known_blocks(key)
        # Steps that were metered on one rank count for all.
        lost = [block.is_lost for block in blocks.sites]
        found = self._ranks.exchange((blocks.bases, blocks.is_measured, lost))
        blocks = replace(
            blocks,
            bases=largest_bases([bases for bases, *_ in found]),
            is_measured=any(is_measured for _, is_measured, _ in found),
        )
        for block, *flags in zip(blocks.sites, *(lost for *_, lost in found), strict=True):
            block.is_lost = any(flags)
        self._share_link()
        if blocks.offload is not None and blocks.link != blocks.offload.link:
            blocks.follow_link(self._ranks)
        plan = make_blocks_plan(
            self._ranks,
            blocks,
            limit_bytes,
            reserve_bytes=max(reserve_bytes, self._sharding.deferred_free_bytes(blocks.device)),
            loss_tmp_bytes=self.settings.loss_tmp_memory_usage,
            verify=self.settings.verify,
        )
        self._blocks[key] = plan.parts
        return plan

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return time of this rank's blocks against limit."""
        blocks, plan = self._known_blocks(key), self.context.plans.get(key)
        if plan is None:
            blocks = blocks.with_assumed_loss(self.settings.loss_tmp_memory_usage)
        deferred = self._sharding.deferred_free_bytes
        reserve = deferred(blocks.device) if plan is None else plan.reserve_bytes
        found = parts_curve(blocks, points)
        return Curve(found.bytes + reserve, found.seconds), blocks.device

    def load(self, key: Key, source: Any, limit_bytes: int) -> Any:
        """Raise ValueError: the model has no graph."""
        self.graph_plan()

    def graph_plan(self) -> Any:
        """Raise ValueError: the model has no graph."""
        raise ValueError("the model runs without a graph: it is sharded")

    cost_model = graph_plan

    # -- running

    def run(self, plan: PartsPlan[Blocks], call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run the model with blocks kept or computed again as planned."""
        tier = plan.tier
        if tier is not None:
            # Ranks agree before the next step to plan again.
            tier.learn(plan.makespan)
        proof = None
        if plan.is_verified(plan.verify):
            sites, module = plan.parts.sites, self.context.module
            proof = BlocksProof(module, sites, plan.proved, self._sharding)
        placed = None if tier is None else tier.begin()
        meter = start()
        with BlockStep(
            plan.parts.sites,
            plan.choice,
            plan.device,
            preserve_rng_state=self.settings.preserve_rng_state,
            mark=None if meter is None else meter.mark,
            proof=proof,
            placed=placed,
        ) as step:
            output = self.context.module.forward(*call.args, **call.kwargs)
        if proof is not None:
            proof.begin_with(output)
        for k in step.failed:
            # Ranks agree before the next step to plan again.
            plan.parts.sites[k].is_lost = plan.outdated = True
            logger.warning(
                "block %s was captured for other arguments or Python values: it is computed again "
                "whole from now on. Call measure() again where it stays as it is now",
                plan.parts.sites[k].name,
            )
        if meter is not None:
            meter.forward_done(output_tensors(output))
        pending = kept_until_backward(output)
        return self.context.with_loss(output, call.targets), pending

    # -- learning

    def learn(self, plan: PartsPlan[Blocks], step: StepBytes) -> None:
        """Compare metered steps with their plan."""
        step = step.shifted(self._sharding.base_bytes(plan.device))
        known = confirmed(plan, step, is_doubtful=step.peak_bytes > plan.limit_bytes)
        if known is None:
            return
        plan.measured_timeline = known.timeline
        plan.outdated = learn(plan, known)
        is_final = not plan.outdated or plan.meterings >= METERED_STEPS
        if known.peak_bytes <= plan.limit_bytes:
            return
        if is_final:
            self.context.warn("over", plan.describe_excess())
        else:
            self.warn_early(plan)

    def warn_over(self, plan: PartsPlan[Blocks], least_bytes: int) -> None:
        """Warn of a limit that could not be kept, on ranks that went over."""
        if (plan.measured_bytes or 0) > plan.limit_bytes:
            self.context.warn("over", plan.describe_excess())
