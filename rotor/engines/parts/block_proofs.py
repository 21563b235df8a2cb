"""Blocks of sharded models that do not repeat: found by measuring, proved in running steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.common.checksums import Mismatch, Proof, Proved, recomputation_error
from rotor.common.places import Place, Saved
from rotor.common.ranks import Ranks
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import grad_flags, output_tensors, tree_tensors
from rotor.common.undisturbed import trial
from rotor.engines.chain.observe import Observation, Observer, note_state
from rotor.engines.chain.proofs import CURE, ShardedGradients, found_together, host_copy
from rotor.engines.chain.stages import Stage
from rotor.engines.graph.code.proving import PartsTally, Prover, Running, Tally
from rotor.engines.parts.blocks import BlockStage
from rotor.engines.parts.probe import Saves


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


@dataclass(frozen=True)
class _Difference:
    """Block that gave other bits, with the words for it."""

    block: int
    operation: str
    module: str
    mismatch: Mismatch


class BlocksProof(PartsTally):
    """Comparisons of one step of sharded blocks, the same on all ranks.

    Made before the forward; `begin_with` takes its output. At the end of the backward, FSDP2's last
    part included, ranks exchange the differences. After one, the buffers of the model are restored,
    and `failed` is called with the numbers of blocks that gave other bits. `keep` copies the
    existing gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[BlockStage],
        proved: Proved,
        ranks: Ranks,
        keep: Callable[[], ShardedGradients],
        failed: Callable[[list[int]], object],
    ) -> None:
        Tally.__init__(self, proved)
        self.names = [stage.name for stage in stages]
        """Paths of the blocks."""
        self._stages = stages
        self._ranks = ranks
        self._keep = keep
        self._failed = failed
        self._proof = Proof()
        self._programs: list[tuple[Prover, Running]] = []
        self._gradients: ShardedGradients | None = None
        self._is_armed = False
        with torch.no_grad():
            self._buffers = [(buffer, host_copy(buffer)) for buffer in model.buffers()]
        places: dict[Any, Place] = {p.identity: p for stage in stages for p in stage.state}
        self._saved = Saved(places.values())

    def begin_with(self, output: Any) -> None:
        """Check for differences at the end of the backward of an output."""
        for tensor in output_tensors(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.register_prehook(self._arm)

    def _arm(self, gradients: Any) -> None:
        del gradients
        if self._is_armed:
            return
        self._is_armed = True
        if self._gradients is None:
            self._gradients = self._keep()
        # Registered in the backward's end, this comes after FSDP2's callbacks.
        core.check_after_backward(lambda: core.check_after_backward(self._settle))

    def first(self, k: int, value: Any) -> None:
        """Note the output of block k when it is computed for the first time."""
        for j, tensor in enumerate(tree_tensors(value)):
            self._proof.first((k, j), tensor)

    def again(self, k: int, value: Any) -> None:
        """Compare the recomputed output of block k."""
        for j, tensor in enumerate(tree_tensors(value)):
            self._proof.again((k, j), tensor)

    def begin(self) -> None:
        """Note the start of a program; its end calls `defer`."""

    def defer(self, prover: Prover, running: Running) -> None:
        """Leave a program's values to be read at the end."""
        self._programs.append((prover, running))

    def _own(self) -> list[_Difference]:
        found: dict[int, _Difference] = {}
        for mismatch in self._proof.finish():
            k: int = mismatch.site[0]  # type: ignore[index]
            kind = type(self._stages[k].module).__name__
            found.setdefault(k, _Difference(k, kind, self.names[k], mismatch))
        for prover, running in self._programs:
            differing = running.proof.finish()
            if differing:
                tasks, operation, mismatch = prover.roots(differing)
                module = ".".join(part for part in (running.place, tasks[0].module) if part)
                k = self.names.index(running.place)
                found.setdefault(k, _Difference(k, operation, module, mismatch))
        return [found[k] for k in sorted(found)]

    def _settle(self) -> None:
        self._is_armed = False
        values = self._proof.compared + sum(r.proof.compared for _, r in self._programs)
        found: list[_Difference]
        found, where = found_together(self._ranks, self._own())
        self._programs = []
        if not found:
            self._proved.add(values)
            self._gradients, self._buffers = None, []
            return
        self._restore()
        blocks = sorted({one.block for one in found})
        self._failed(blocks)
        one = next(one for one in found if one.block == blocks[0])
        raise recomputation_error(
            one.operation, one.module, one.mismatch, f"{where}. {CURE}", others=len(blocks) - 1
        )

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._saved.put(last=True)
        if self._gradients is not None:
            self._gradients.restore()
