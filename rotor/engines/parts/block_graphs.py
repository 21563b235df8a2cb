"""Captured graphs of a sharded model's blocks: options between full and no recomputation.

A block is captured within the forward of the model, while FSDP2 has its parameters gathered. Its
programs keep a part of the tensors that autograd would save, and run in the block's forward: within
the hooks of FSDP2, which gather parameters before, and find the gradients of whole parameters
after. The programs come from the first rank; each rank computes their needs for its own graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.calls import call_signature
from rotor.common.ranks import Ranks, digest
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.engines.graph.making import signatures_of
from rotor.engines.parts.blocks import Block, BlockStage
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.kinds import Kind
from rotor.engines.parts.probe import Saves

logger = logging.getLogger("rotor")


class GraphCalls:
    """Forward in which called blocks are captured without a trace, unless `captures` has them."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], arguments: Any, captures: Captures
    ) -> None:
        self._blocks = {block.stage.module: block for block in blocks}
        self._saves = Saves(model, arguments)
        self._captures = captures
        self._outputs: dict[nn.Module, set[int]] = {}
        self._watched: list[tuple[torch.Tensor, int, Block]] = []

    def run(self, call: Callable[[], Any], update: Callable[[int, int], object]) -> None:
        """Run the forward; call `update(called, all)` with numbers of blocks.

        The blocks get their graphs, or the reasons for which they could not be captured.
        """
        self._update = update
        for block in self._blocks.values():
            block.whole = _obstacle(block.stage)
        with PatchedForwards(self._blocks, self._runner) as self._replaced, self._saves.watching():
            call()
        for tensor, version, block in self._watched:
            if tensor._version != version:
                block.graph = None
                block.whole = "what it takes or gives is changed in place afterwards"
        self._watched.clear()

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        block = self._blocks[module]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._hold((args, kwargs))
            if not block.whole:
                self._capture(block, args, kwargs)
            y = forward(*args, **kwargs)
            if block.graph is not None:
                watched = tree_tensors((args, kwargs))
                if block.graph.reads_outputs:
                    watched += output_tensors(y)
                self._watched += [(tensor, tensor._version, block) for tensor in watched]
                self._outputs[module] = set(self._saves.identities(output_tensors(y)))
            blocks = self._blocks.values()
            done = sum(one.graph is not None or bool(one.whole) for one in blocks)
            self._update(done, len(blocks))
            return y

        return run

    def _hold(self, value: Any) -> None:
        """Note the blocks whose outputs another block holds, as its inputs."""
        held = set(self._saves.identities(tree_tensors(value)))
        for module, outputs in self._outputs.items():
            outputs -= held
            self._blocks[module].is_held |= not outputs

    def _capture(self, block: Block, args: Any, kwargs: Any) -> None:
        """Capture the call of a block, or note why not."""
        module = block.stage.module
        if not (torch.is_grad_enabled() and self._saves.on_top()):
            block.whole = "it runs within hooks for what autograd saves"
            return
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
                block.whole = f"it has a parameter of type {type(parameter.data).__name__}"
                return
        block.signature = call_signature(args, kwargs)
        with self._saves.paused(), self._replaced.paused():
            try:
                call = block.signature, args, kwargs
                found = self._captures.kind_of(block.name, module, *call)
            except Exception as error:
                # An error would leave the other ranks waiting: the block runs without a graph.
                logger.warning("block %s was not captured: %s", block.name, error)
                found = f"{type(error).__name__}: {error}"
        if isinstance(found, str):
            block.whole = found
        else:
            block.graph = found


def _obstacle(stage: BlockStage) -> str:
    """Return the obstacle to capturing the forward of a block; empty without one."""
    module = stage.module
    if any(unit.modules != (module,) for unit in stage.units):
        return "a part of it is sharded by itself, and gathered while it runs"
    if any(map(core.is_compiled, module.modules())):
        return "a part of it is compiled already"
    return ""


def graphs_of(blocks: Sequence[Block]) -> list[Kind]:
    """Return the captured graphs of blocks, each once."""
    return list(dict.fromkeys(block.graph for block in blocks if block.graph is not None))


def share_graphs(ranks: Ranks, blocks: Sequence[Block]) -> None:
    """Give up graphs that differ between ranks; all others get the programs of the first rank.

    This is a collective operation.
    """
    order = graphs_of(blocks)
    found = [block.graph and (order.index(block.graph), _digest(block.graph)) for block in blocks]
    everyone = ranks.exchange(found)
    for block, *column in zip(blocks, *everyone, strict=True):
        if block.graph is not None and any(other != column[0] for other in column):
            block.graph, block.whole = None, "its graph is not the same on all ranks"
    share_programs(ranks, blocks)


def share_programs(ranks: Ranks, blocks: Sequence[Block]) -> None:
    """Set all ranks' programs to those of the first, after a search; a collective operation."""
    kinds = graphs_of(blocks)
    mine = [[program.actions.tolist() for program in kind.programs] for kind in kinds]
    for kind, rows in zip(kinds, ranks.broadcast(mine), strict=True):
        kind.take_programs(rows)


def _digest(kind: Kind) -> int:
    """Return a number for the operations of a graph, under any sizes."""
    lowered = kind.captured.lowered
    return digest((signatures_of(lowered), [task.once for task in lowered.tasks]))
