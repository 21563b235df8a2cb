"""Blocks of sharded models that do not repeat: found while measuring, and proved while running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor import _fsdp, _torch
from rotor.blocks import BlockStage
from rotor.checksums import Mismatch, Proof, Proved, recomputation_error
from rotor.distributed import Ranks
from rotor.graph.probing import Saves
from rotor.graph.proving import PartsTally, Prover, Running, Tally
from rotor.observing import Observation, Observer, note_state, undisturbed
from rotor.places import Place, Saved
from rotor.replacing import Replaced
from rotor.sharded_proofs import ShardedGradients, found_together
from rotor.stage_proofs import CURE, host_copy
from rotor.stages import Stage
from rotor.values import grad_flags, tensors_of, tensors_within

__all__ = ["BlocksProof", "Kept", "observe_blocks"]


@dataclass(frozen=True)
class Kept:
    """Why a block may run forward only once, and none of its graphs may be used.

    Attributes
    ----------
    reason
        As part of a sentence; empty where it may run again.
    varies
        Whether two runs of it gave different bits.
    has_state
        Whether it changes state in Python, which a graph would not.
    """

    reason: str = ""
    varies: bool = False
    has_state: bool = False


@contextmanager
def _around(stage: Stage) -> Iterator[None]:
    """Only units within the block, whose hooks run with it, end a backward."""
    assert isinstance(stage, BlockStage)
    inner = [unit for unit in stage.units if stage.module not in unit.modules]
    with _fsdp.alone(inner):
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
    """Run the model, and each block twice more from the same state; nothing of it is kept.

    A collective operation. Blocks are given the state that running them again has to restore.

    Parameters
    ----------
    model, stages
        The model, and its blocks.
    call
        Runs the model.
    arguments
        Of the model.
    ranks
        Those who run it: what one of them sees holds for all.
    """
    device = tensors_of(arguments)[0].device
    observer = Observer(device, _around)
    resident = [*model.parameters(), *model.buffers(), *tensors_of(arguments)]
    saves = Saves(resident, lambda *_: None)
    places = {stage.module: k for k, stage in enumerate(stages)}
    seen: dict[int, Observation] = {}

    def runner(module: nn.Module, forward: Any) -> Callable[..., Any]:
        k = places[module]

        def run(*args: Any, **kwargs: Any) -> Any:
            x = (forward, (args, kwargs))
            with undisturbed([stages[k]], device):
                if saves.on_top():
                    with saves.paused():
                        seen[k] = observer.stage(stages[k], x, grad_flags(x))[0]
                else:
                    seen[k] = observer.stage(stages[k], x, grad_flags(x))[0]
            return forward(*args, **kwargs)

        return run

    with Replaced(places, runner), saves.watching():
        call()
    note_state([stages[k] for k in seen], list(seen.values()))
    for stage in stages:
        # A later step may run in another mode: all buffers are looked at.
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
    """A block that gave other bits: which, and the words for it."""

    block: int
    operation: str
    module: str
    mismatch: Mismatch


class BlocksProof(PartsTally):
    """The comparisons of one step of sharded blocks, the same on all ranks.

    Made before the forward; `begin_with` takes its output. At the end of the backward, and of what
    FSDP2 does there, ranks show each other what differed.

    Parameters
    ----------
    model
        The model, whose buffers are put back.
    stages
        The blocks.
    proved
        Where the step is noted.
    ranks
        Those who run it.
    keep
        Copies the gradients that exist now.
    failed
        Called with the numbers of blocks that gave other bits.

    Attributes
    ----------
    names
        Paths of the blocks.
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
        """Have the backward of an output end with a look at what differed."""
        for tensor in tensors_within(output):
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
        # Called in the backward's end, this is put behind what FSDP2 has put there.
        _torch.check_after_backward(lambda: _torch.check_after_backward(self._settle))

    def first(self, k: int, value: Any) -> None:
        """Note the output of block k when it is made for the first time."""
        for j, tensor in enumerate(tensors_of(value)):
            self._proof.first((k, j), tensor)

    def again(self, k: int, value: Any) -> None:
        """Compare the output of block k, made again."""
        for j, tensor in enumerate(tensors_of(value)):
            self._proof.again((k, j), tensor)

    def begin(self) -> None:
        """A program has begun: `defer` is called when it has ended."""

    def defer(self, prover: Prover, running: Running) -> None:
        """Have a program's values read at the end."""
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
