"""Blocks of sharded models that do not repeat: found by measuring, proved in running steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from rotor._pytorch import fsdp
from rotor.common.checksums import Proved, recomputation_error
from rotor.common.ranks import Ranks
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import grad_flags, tree_tensors
from rotor.common.undisturbed import trial
from rotor.engines.chain.observe import Observation, Observer, note_state
from rotor.engines.chain.proofs import CURE, StageOrigins, python_before
from rotor.engines.chain.sharded import Sharding
from rotor.engines.chain.stages import Stage
from rotor.engines.parts.blocks import BlockStage
from rotor.engines.parts.probe import Saves
from rotor.engines.proofs import VARIED, Difference, RunProof, ShardedProof, buffers_before


@dataclass(frozen=True)
class Kept:
    """Reason for which a block may run forward only once, and none of its graphs may be used."""

    reason: str = ""
    """Part of a sentence; empty if the block may run again."""
    varies: bool = False
    """True if two runs of it gave different bits."""
    has_state: bool = False
    """True if it changes state in Python, which a graph would not."""


@contextmanager
def _around(stage: Stage) -> Iterator[None]:
    """End backwards only for units within the block, whose hooks run with it, in the context."""
    assert isinstance(stage, BlockStage)
    inner = [unit for unit in stage.units if stage.module not in unit.modules]
    with fsdp.ending_backwards_of(inner):
        yield
    for unit in inner:
        unit.settle()


def observe_blocks(
    model: nn.Module,
    stages: Sequence[BlockStage],
    call: Callable[[], Any],
    arguments: Any,
    ranks: Ranks,
) -> list[Kept]:
    """Run the model without a trace, and each block twice more from the same state.

    This is a collective operation: an observation of one rank holds for all. The blocks get the
    list of state that their recomputation has to restore.
    """
    device = tree_tensors(arguments)[0].device
    observer = Observer(device, _around)
    resident = [*model.parameters(), *model.buffers(), *tree_tensors(arguments)]
    saves = Saves(resident, lambda *_: None)
    places = {stage.module: k for k, stage in enumerate(stages)}
    seen: dict[int, Observation] = {}

    def runner(module: nn.Module, forward: Any) -> Callable[..., Any]:
        k = places[module]

        def run(*args: Any, **kwargs: Any) -> Any:
            stages[k].forward, x = forward, (args, kwargs)
            named = zip(stages[k].names, stages[k].functions, strict=True)
            with trial(named, (), device, is_guarded=False, is_sharded=True):
                if saves.on_top():
                    with saves.paused():
                        seen[k] = observer.stage(stages[k], x, grad_flags(x))[0]
                else:
                    seen[k] = observer.stage(stages[k], x, grad_flags(x))[0]
            return forward(*args, **kwargs)

        return run

    with PatchedForwards(places, runner), saves.watching():
        call()
    note_state([stages[k] for k in seen], list(seen.values()))
    for stage in stages:
        # A later step may run in another mode: all buffers are observed.
        stage.mutable_buffers = None
    mine = [
        Kept(seen[k].reason(), not seen[k].repeats, bool(stages[k].state)) if k in seen else Kept()
        for k in range(len(stages))
    ]
    return [
        Kept(
            next((one.reason for one in column if one.reason), ""),
            any(one.varies for one in column),
            any(one.has_state for one in column),
        )
        for column in zip(*ranks.exchange(mine), strict=True)
    ]


class BlocksProof(ShardedProof):
    """Verified step of a model with sharded blocks, the sites of its plan."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Any],
        proved: Proved,
        sharding: Sharding,
    ) -> None:
        undo = buffers_before(model.buffers()), python_before(site.stage for site in sites)
        super().__init__(proved, undo, sharding.ranks, sharding.gradients_before)
        self._sites = sites

    def of_block(self, k: int) -> RunProof:
        """Return the comparison of the output of block k, as of a chain's only stage."""
        return RunProof(self, StageOrigins([self._sites[k].stage], self.keep), k)

    def keep(self, blocks: Iterable[int]) -> None:
        """Have blocks run forward only once from now on."""
        for k in blocks:
            self._sites[k].kept = Kept(VARIED)

    def refused(
        self, runs: Sequence[RunProof], found: Sequence[Difference], where: str
    ) -> Exception:
        """Return the error, on all ranks, and have the blocks that differed kept."""
        blocks = sorted({one.run for one in found})
        self.keep(blocks)
        one = next(one for one in found if one.run == blocks[0])
        words = one.operation, one.module, one.mismatch, f"{where}. {CURE}"
        return recomputation_error(*words, others=len(blocks) - 1)
