"""Plans for the blocks of a sharded model that is no chain: measured, and chosen together.

A block is a module that FSDP2 wraps by itself, called once in a forward. It is computed again in
the backward, or keeps the tensors that autograd saves, or, if it was captured, a part of them:
among these options `rotor.graph.assembly` chooses exactly. The model itself runs while it is
measured, with every block computed again. The code between the blocks is metered with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, median_low
from typing import Any, ClassVar

import torch
from torch import nn

from rotor.common.accounting import assumed_loss_bytes, scalar_bytes
from rotor.common.checksums import NO_ROOM, has_room
from rotor.common.joining import joined
from rotor.common.progress import progress
from rotor.common.ranks import RankError, Ranks
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.engines.chain.sharded import Sharding
from rotor.engines.parts.block_graphs import (
    GraphCalls,
    graphs_of,
    share_graphs,
    share_programs,
)
from rotor.engines.parts.blocks import (
    AGAIN,
    FIRST_PROGRAM,
    KEPT,
    Block,
    BlockStage,
    BlockStep,
    Calls,
    NoBlocks,
    apart,
    observe_blocks,
)
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.plan import Parts, PartsPlan, place_of
from rotor.errors import InfeasibleError
from rotor.graph.assembly import (
    Bases,
    Option,
    choose,
    largest_bases,
    least_bytes,
    peak_of,
    simulate,
)
from rotor.graph.link import Link
from rotor.meter import allocator
from rotor.tier.offload import Offload
from rotor.timing import Clock
from rotor.units import exact_bytes

_ROUNDS = 3


@dataclass
class Blocks(Parts):
    """Blocks of a model in the order of their calls."""

    label: ClassVar[str] = "blocks"

    sites: list[Block]
    bases: Bases
    loss_start_bytes: int
    """Bytes at the end of the forward, with all blocks to be computed again."""
    output_bytes: int
    device: torch.device
    has_loss: bool
    """True if the loss was a part of the measured step."""
    outside: dict[str, str]
    """Sharded modules that are not planned, with the reasons."""
    is_measured: bool = False
    offload: Offload | None = None
    link: Link | None = None
    """Link to the second tier for which programs were searched."""

    def may_offload(self) -> bool:
        """Return whether a block has a graph that a step can still run."""
        return any(
            block.graph is not None and not block.is_lost and not block.kept.reason
            for block in self.sites
        )

    def follow_link(self, ranks: Ranks) -> None:
        """Add programs for another speed of the tier; a collective operation."""
        self.link = None if self.offload is None else self.offload.link
        for kind in graphs_of(self.sites):
            kind.follow_link()
        share_programs(ranks, self.sites)
        for block in self.sites:
            if len(block.all_options) > FIRST_PROGRAM:
                others = block.all_options[:FIRST_PROGRAM]
                block.all_options = [*others, *block.program_options()]
        _join_options(ranks, self)

    def settled(self, choice: list[int]) -> list[int]:
        """Return a choice that names the only option of blocks that do not repeat."""
        chosen = zip(self.sites, choice, strict=True)
        return [KEPT if block.kept.reason else k for block, k in chosen]

    def described(self) -> str:
        """Return the number of blocks, and reasons for which some have no graph."""
        whole = {b.name: b.whole for b in self.sites if b.whole and not b.kept.reason}
        described = "".join(f"; {name} whole: {reason}" for name, reason in whole.items())
        kept = {block.name: block.kept.reason for block in self.sites if block.kept.reason}
        described += "".join(f"; {name} never computed again: {why}" for name, why in kept.items())
        return f"{len(self.sites)}{described}"

    def describe_outside(self) -> str:
        """Return the modules that are not planned, as part of a sentence."""
        if not self.outside:
            return ""
        described = "; ".join(f"{name}: {why}" for name, why in self.outside.items())
        return f"; sharded, but not planned: {described}"

    def with_assumed_loss(self, loss_tmp_bytes: int) -> Blocks:
        """Return the blocks with room for a loss that no step has shown yet."""
        if self.has_loss or self.is_measured:
            return self
        assumed = assumed_loss_bytes(self.output_bytes)
        if loss_tmp_bytes:
            assumed = self.output_bytes + loss_tmp_bytes
        *between, last = self.bases.between
        last = max(last, self.loss_start_bytes + assumed)
        return replace(self, bases=replace(self.bases, between=(*between, last)))

    def shifted(self, extra_bytes: int) -> Blocks:
        """Return the blocks with `extra_bytes` more at every moment."""
        parts = self.bases.forward, self.bases.backward, self.bases.between
        return replace(self, bases=Bases(*(tuple(b + extra_bytes for b in p) for p in parts)))


# -- measuring


@dataclass
class _Round:
    """Parts of one metered step, by name, and the times of the blocks in ns."""

    segments: list[allocator.Segment]
    output_bytes: int
    times: dict[str, int]


def measure_blocks(
    model: nn.Module,
    sharding: Sharding,
    stages: Sequence[BlockStage],
    call: Callable[[Any], Any],
    arguments: Any,
    *,
    has_loss: bool,
    preserve_rng_state: bool,
    captures: Captures,
) -> Blocks:
    """Run training steps without a trace, and measure the blocks in them.

    This is a collective operation: every rank runs the same number of steps. `call` runs the model
    on arguments, with the loss if `has_loss`. Raises NoBlocks with the reason if no module could be
    a block, and RankError if the ranks have different blocks.
    """
    device = tree_tensors(arguments)[0].device
    with apart(model, sharding, arguments) as own:
        calls = Calls(model, stages, own)
        calls.run(lambda: call(own))
    # New stages: the state that was found for other inputs belongs to the plans for those.
    by_module = {s.module: BlockStage(s.name, s.module, sharding) for s in stages}
    blocks = [
        Block(by_module[module], flags)
        for module, flags in calls.found.items()
        if module not in calls.reasons
    ]
    outside = {by_module[module].name: reason for module, reason in calls.reasons.items()}
    named = [(block.name, block.flags) for block in blocks]
    for rank, other in enumerate(sharding.ranks.exchange(named)):
        if other != named:
            raise RankError(
                f"rank {rank} has the blocks {[name for name, _ in other]}, and this one "
                f"{[name for name, _ in named]}, or other outputs of theirs: every rank needs the "
                "same model, and inputs of the same kind"
            )
    if not blocks:
        described = "; ".join(f"{name}: {why}" for name, why in outside.items())
        raise NoBlocks(
            f"none of the sharded modules could be computed again by itself ({described}): shard "
            "modules that take what they need as arguments and are called once in a forward"
        )
    with apart(model, sharding, arguments) as own:
        kept = observe_blocks(
            model, [block.stage for block in blocks], lambda: call(own), own, sharding.ranks
        )
    for block, why in zip(blocks, kept, strict=True):
        block.kept = why
    free = [block for block in blocks if not (block.kept.reason or block.kept.has_state)]
    capturing = progress(len(blocks), "capturing the blocks of the model")
    with apart(model, sharding, arguments) as own, capturing as update:
        GraphCalls(model, free, own, captures).run(lambda: call(own), update)
    for block in blocks:
        if block.kept.has_state:
            block.whole = "it changes state in Python"
    share_graphs(sharding.ranks, blocks)
    rounds = []
    for _ in range(_ROUNDS):
        with apart(model, sharding, arguments) as own:
            run = partial(call, own)
            rounds.append(_measured(blocks, run, device, preserve_rng_state))
    found = _priced(blocks, rounds, sharding, device, has_loss=has_loss, outside=outside)
    offload = captures.offload
    link = None if offload is None else offload.link
    return _joined(sharding.ranks, replace(found, offload=offload, link=link))


def _measured(
    blocks: Sequence[Block], call: Callable[[], Any], device: torch.device, preserve_rng_state: bool
) -> _Round:
    meter, clock = allocator.meter(device).start(), Clock(device)
    times: dict[str, int] = {}
    timed = ""

    def mark(name: str) -> None:
        nonlocal timed
        if timed:
            times[timed] = clock.stop()
        meter.mark(name)
        kind, _, number = name.partition(" ")
        timed = name if number and kind in ("forward", "backward", "recorded") else ""
        if timed:
            clock.start()

    try:
        with BlockStep(
            blocks,
            [AGAIN] * len(blocks),
            device,
            preserve_rng_state=preserve_rng_state,
            mark=mark,
            details=True,
        ):
            output = call()
        mark("loss")
        outputs = [t for t in output_tensors(output) if t.requires_grad]
        gradients = [torch.ones_like(t) for t in outputs]
        mark("end")
        torch.autograd.backward(outputs, gradients)
    finally:
        meter.stop()
    return _Round(meter.segments, allocator.storage_bytes(output_tensors(output)), times)


def _priced(
    blocks: list[Block],
    rounds: list[_Round],
    sharding: Sharding,
    device: torch.device,
    *,
    has_loss: bool,
    outside: dict[str, str],
) -> Blocks:
    # A thread of gloo frees blocks late in some rounds: the medians are right.
    columns = zip(*(r.segments for r in rounds), strict=True)
    segments = {
        column[0].name: (
            median_low(segment.start_bytes for segment in column),
            median_low(segment.peak_bytes for segment in column),
            median_low(segment.end_bytes for segment in column),
        )
        for column in columns
    }
    count = len(blocks)
    base = sharding.base_bytes(device) + sharding.all_reduced_bytes + scalar_bytes(device.type)
    found = {"forward": [0] * count, "backward": [0] * count, "between": [0] * (count + 1)}
    for name, (_, peak, _) in segments.items():
        part, k = place_of(name, count)
        found[part][k] = max(found[part][k], peak + base)
    forward, backward, between = found.values()
    for k, block in enumerate(blocks):
        block.all_options = _options(k, block, segments, rounds, backward[k] - base)
    last = median_low(r.segments[-1].end_bytes for r in rounds) + base
    between[0] = max(between[0], last + sharding.final_reduce_bytes([b.stage for b in blocks]))
    return Blocks(
        blocks,
        Bases(tuple(forward), tuple(backward), tuple(between)),
        segments["loss"][0] + base,
        max(r.output_bytes for r in rounds),
        device,
        has_loss,
        outside,
    )


def _options(
    k: int,
    block: Block,
    segments: dict[str, tuple[int, int, int]],
    rounds: list[_Round],
    backward_bytes: int,
) -> list[Option]:
    """Return the options of block `k`; the memory for its recomputation is a part of the bases."""

    def time_ns(kind: str) -> int:
        return int(median(r.times.get(f"{kind} {k}", 0) for r in rounds))

    forward, again, back = map(time_ns, ("forward", "backward", "recorded"))
    recomputed = Option(0, 0, 0, forward + again + back)
    if f"backward {k}" not in segments:
        return [recomputed, recomputed]
    begun, without, _ = segments[f"forward {k}"]
    started, peak, ended = segments[f"backward {k}"]
    kept = Option(
        max(0, ended - started),
        max(0, (peak - started) - (without - begun)),
        segments[f"recorded {k}"][1] - backward_bytes,
        again + back,
    )
    block.levels = begun - without, started - backward_bytes, kept.time_ns
    return [recomputed, kept, *block.program_options()]


def _joined(ranks: Ranks, mine: Blocks) -> Blocks:
    """Return one measure of all ranks' measures: mean times, and the largest bytes of any rank."""
    _join_options(ranks, mine)
    found = ranks.exchange((mine.bases, mine.loss_start_bytes, mine.output_bytes))
    return replace(
        mine,
        bases=largest_bases([bases for bases, *_ in found]),
        loss_start_bytes=max(start for _, start, _ in found),
        output_bytes=max(size for *_, size in found),
    )


def _join_options(ranks: Ranks, mine: Blocks) -> None:
    """Take mean times and the largest bytes of all ranks' options."""
    found = ranks.exchange([block.all_options for block in mine.sites])
    for k, site in enumerate(mine.sites):
        rows = [options[k] for options in found]
        fewest = min(map(len, rows))
        columns = zip(*(row[:fewest] for row in rows), strict=True)
        site.all_options = [joined(column, mean=["time_ns"]) for column in columns]


# -- planning


def make_blocks_plan(
    ranks: Ranks,
    blocks: Blocks,
    limit_bytes: int,
    *,
    reserve_bytes: int = 0,
    loss_tmp_bytes: int = 0,
    verify: str | int = "first",
) -> PartsPlan[Blocks]:
    """Return the fastest choice under the least limit of all ranks, made by the first of them.

    The blocks are the same on all ranks; the largest reserve and the first rank's `verify` hold.
    `loss_tmp_bytes` is the need of an unknown loss beside the gradient of the output; if it is 0, 4
    times the output is assumed, its gradient included. Raises InfeasibleError on every rank if no
    choice fits.
    """
    limit, reserve = ranks.joint_limit(limit_bytes, reserve_bytes)
    options, most = blocks.options(), blocks.tier_limit_bytes
    least = least_bytes(options, blocks.bases, most) + reserve
    # An assumed loss forbids no step: its real need is known after the first step.
    bases = blocks.with_assumed_loss(loss_tmp_bytes).bases
    assumed = least_bytes(options, bases, most) + reserve

    def decide() -> tuple[list[int], str | int]:
        if least > limit:
            found = choose(options, blocks.bases, least - reserve, most)
            raise InfeasibleError(
                f"no plan fits in {exact_bytes(limit)}: under every choice for its {len(options)}"
                f" blocks, the step needs {exact_bytes(least)}{blocks.describe_outside()}. "
                "Give at least that, or a smaller batch",
                least,
                peak=peak_of(options, blocks.bases, found, [block.name for block in blocks.sites]),
            )
        return choose(options, bases, max(limit, assumed) - reserve, most), verify

    choice, verify = ranks.decide(decide)
    blocks = replace(blocks, bases=bases)
    plan = PartsPlan(
        blocks.device,
        "the model is sharded",
        blocks,
        choice,
        simulate(options, bases, choice),
        limit,
        assumed,
        reserve_bytes=reserve,
        verify=verify,
    )
    if plan.tier is not None:
        ranks.together(plan.tier.prepare)
    values = 3 * sum(len(block.flags) for block in blocks.sites)
    if not has_room(blocks.device, values, limit):
        plan.proved.unproved = NO_ROOM
    return plan
