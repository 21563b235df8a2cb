"""Captured graphs of a sharded model's blocks: options between full and no recomputation.

A block is captured within the forward of the model, while FSDP2 has its parameters gathered. Its
programs keep a part of the tensors that autograd would save, and run in the block's forward: within
the hooks of FSDP2, which gather parameters before, and find the gradients of whole parameters
after. The programs come from the first rank; each rank computes their needs for its own graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.calls import call_signature
from rotor.common.ranks import Ranks, digest
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.engines.graph.making import signatures_of
from rotor.engines.parts.blocks import BlockStage
from rotor.engines.parts.captures import Captures
from rotor.engines.parts.kinds import Kind
from rotor.engines.parts.probe import Saves
from rotor.graph.assembly import Option

logger = logging.getLogger("rotor")


@dataclass(eq=False)
class BlockGraph:
    """Captured block."""

    kind: Kind
    """Graph, and its programs; blocks that are alike share it."""
    signature: Any
    is_held: bool = False
    """True if another block, called later, holds its outputs."""

    def options(self) -> list[Option]:
        """Return the needs of the programs, in bytes above the starts of the forward and the
        backward.

        The gradients of the outputs exist when the backward begins, and are not counted.
        """
        lowered = self.kind.captured.lowered
        given = sum(lowered.storages[s][0] for s in set(lowered.tasks[lowered.loss].made.values()))
        return [
            replace(o, backward_bytes=o.backward_bytes - given)
            for o in self.kind.options(self.is_held)
        ]


class GraphCalls:
    """Forward in which called blocks are captured without a trace, unless `captures` has them."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[BlockStage],
        arguments: Any,
        captures: Captures,
    ) -> None:
        self._stages = {stage.module: stage for stage in stages}
        self._saves = Saves(model, arguments)
        self._captures = captures
        self._outputs: dict[nn.Module, set[int]] = {}
        self._watched: list[tuple[torch.Tensor, int, nn.Module]] = []
        self.found: dict[nn.Module, BlockGraph] = {}
        self.reasons: dict[nn.Module, str] = {}
        """Reasons for which blocks could not be captured."""

    def run(self, call: Callable[[], Any], update: Callable[[int, int], object]) -> None:
        """Run the forward; call `update(called, all)` with numbers of blocks."""
        self._update = update
        obstacles = {module: _obstacle(stage) for module, stage in self._stages.items()}
        self.reasons = {module: reason for module, reason in obstacles.items() if reason}
        with PatchedForwards(self._stages, self._runner) as self._replaced, self._saves.watching():
            call()
        for tensor, version, module in self._watched:
            if tensor._version != version and self.found.pop(module, None) is not None:
                self.reasons[module] = "what it takes or gives is changed in place afterwards"
        self._watched.clear()

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._hold((args, kwargs))
            found = self._captured(module, args, kwargs)
            y = forward(*args, **kwargs)
            if isinstance(found, str):
                self.reasons[module] = found
            elif found is not None:
                self.found[module] = found
                watched = tree_tensors((args, kwargs))
                if found.kind.reads_outputs:
                    watched += output_tensors(y)
                self._watched += [(tensor, tensor._version, module) for tensor in watched]
                self._outputs[module] = set(self._saves.identities(output_tensors(y)))
            self._update(len(self.found) + len(self.reasons), len(self._stages))
            return y

        return run

    def _hold(self, value: Any) -> None:
        """Note the blocks whose outputs another block holds, as its inputs."""
        held = set(self._saves.identities(tree_tensors(value)))
        for module, outputs in self._outputs.items():
            outputs -= held
            self.found[module].is_held |= not outputs

    def _captured(self, module: nn.Module, args: Any, kwargs: Any) -> BlockGraph | str | None:
        if module in self.reasons:
            return None
        if not (torch.is_grad_enabled() and self._saves.on_top()):
            return "it runs within hooks for what autograd saves"
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
                return f"it has a parameter of type {type(parameter.data).__name__}"
        stage = self._stages[module]
        signature = call_signature(args, kwargs)
        with self._saves.paused(), self._replaced.paused():
            try:
                kind = self._captures.kind_of(stage.name, module, signature, args, kwargs)
            except Exception as error:
                # An error would leave the other ranks waiting: the block runs without a graph.
                logger.warning("block %s was not captured: %s", stage.name, error)
                return f"{type(error).__name__}: {error}"
        return kind if isinstance(kind, str) else BlockGraph(kind, signature)


def _obstacle(stage: BlockStage) -> str | None:
    """Return the obstacle to capturing the forward of a block, if any."""
    module = stage.module
    if any(unit.modules != (module,) for unit in stage.units):
        return "a part of it is sharded by itself, and gathered while it runs"
    if any(map(core.is_compiled, module.modules())):
        return "a part of it is compiled already"
    return None


def share_graphs(
    ranks: Ranks, graphs: Sequence[BlockGraph | None]
) -> list[tuple[BlockGraph | None, str]]:
    """Return for each block its graph, or ``None`` and the reason for giving its graph up.

    The graphs agree on all ranks, and have the programs of the first rank. This is a collective
    operation; ``None`` stands for a block without a graph.
    """
    order, first = _first_programs(ranks, graphs)
    mine = [None if g is None else (order.index(g.kind), _digest(g.kind)) for g in graphs]
    everyone = ranks.exchange(mine)
    shared: list[tuple[BlockGraph | None, str]] = []
    taken: set[int] = set()
    for graph, *found in zip(graphs, *everyone, strict=True):
        if graph is None:
            shared.append((None, ""))
        elif any(other != found[0] for other in found):
            shared.append((None, "its graph is not the same on all ranks"))
        else:
            if id(graph.kind) not in taken:
                taken.add(id(graph.kind))
                graph.kind.take_programs(first[order.index(graph.kind)])
            shared.append((graph, ""))
    return shared


def share_programs(ranks: Ranks, graphs: Sequence[BlockGraph | None]) -> None:
    """Set all ranks' programs to those of the first, after a search; a collective operation."""
    for kind, rows in zip(*_first_programs(ranks, graphs), strict=True):
        kind.take_programs(rows)


def _first_programs(
    ranks: Ranks, graphs: Sequence[BlockGraph | None]
) -> tuple[list[Kind], list[list[list[int]]]]:
    """Return the kinds of graphs, and the actions of the first rank's programs; a collective."""
    kinds = list(dict.fromkeys(graph.kind for graph in graphs if graph is not None))
    mine = [[program.actions.tolist() for program in kind.programs] for kind in kinds]
    return kinds, ranks.broadcast(mine)


def _digest(kind: Kind) -> int:
    """Return a number for the operations of a graph, under any sizes."""
    lowered = kind.captured.lowered
    return digest((signatures_of(lowered), [task.once for task in lowered.tasks]))
