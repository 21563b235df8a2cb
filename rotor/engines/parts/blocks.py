"""Blocks of a sharded model that are computed again in the backward, each by its own node.

A model that is no chain runs as it is; only the forwards of the modules that FSDP2
(``fully_shard``) wraps one by one are replaced. The replacement runs within the hooks of
FSDP2, which gather its parameters before the forward and before the backward, and reduce its
gradients after. So the block runs once without a graph; its node's backward runs it again with one,
and a nested ``torch.autograd.backward`` through it leaves the gradients of whole parameters where
its hooks look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import core
from rotor.common.forward_patch import PatchedForwards
from rotor.common.generators import RngTracker
from rotor.common.modes import Modes
from rotor.common.tensor_trees import (
    Flags,
    detached,
    flagged,
    grad_flags,
    tree_tensors,
    versions,
    with_tensors,
)
from rotor.engines.chain.ends import apply_handoff, arrived_gradient, as_inputs, source_of
from rotor.engines.chain.sharded import ShardedStage, Sharding
from rotor.engines.chain.snapshot import Snapshot
from rotor.engines.graph.offloading import Placed
from rotor.engines.parts.offloading import PlacedStep

__all__ = ["AGAIN", "FIRST_PROGRAM", "KEPT", "BlockCall", "BlockStage", "BlockStep", "Marks"]

AGAIN, KEPT, FIRST_PROGRAM = 0, 1, 2
"""Options of a block: computed again, kept by autograd, the programs of its graph."""


class Marks(Protocol):
    """Receiver of the parts of a step, such as a meter."""

    def mark(self, name: str) -> None:
        """Begin a part of the step."""


class Comparisons(Protocol):
    """Comparison of a step's recomputed values with the first ones."""

    def first(self, k: int, value: Any) -> None:
        """Note the output of block k when it is computed for the first time."""

    def again(self, k: int, value: Any) -> None:
        """Compare the recomputed output of block k."""


class Programs(Protocol):
    """Captured block."""

    def run(
        self,
        number: int,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        on_phase: Callable[[str], None] | None,
        k: int,
        proof: Any,
        placed: Placed | None,
    ) -> tuple[Any, bool]:
        """Run it under a program; return its output, and whether it could run."""


class BlockStage(ShardedStage):
    """Block in the form of a stage that `rotor.common.generators.Snapshot` runs again.

    It is called with its module's forward and the arguments of the forward.

    Parameters
    ----------
    name, module
        Block.
    sharding
        Sharding of the model.
    """

    __slots__ = ()

    def __init__(self, name: str, module: nn.Module, sharding: Sharding) -> None:
        super().__init__([name], [module], sharding)

    @property
    def module(self) -> nn.Module:
        """Module of the block."""
        found = self.functions[0]
        assert isinstance(found, nn.Module)
        return found

    def __call__(self, x: Any) -> Any:
        """Run the forward."""
        forward, (args, kwargs) = x
        return forward(*args, **kwargs)


class _Out(Function):
    """Node that passes a block's outputs to the graph; its backward takes their gradients."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, token: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.take_outputs()
        ctx.mark_non_differentiable(
            *[t for t, flag in zip(outputs, call.flags, strict=True) if not flag]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: BlockCall = ctx.call
        call.take_gradients(
            [g for g, flag in zip(gradients, call.flags, strict=True) if flag],
        )
        return None, call.token


class _In(Function):
    """Node that takes a block's inputs from the graph; its backward is the whole block's."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, token: torch.Tensor, *_: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.call.backward()


_apply_out = core.bare_apply(_Out)
_apply_in = core.bare_apply(_In)


class BlockCall:
    """Call of a block that its backward computes again.

    Parameters
    ----------
    stage
        Block.
    flags
        Flags of the tensors of its output that require gradients.
    forward, args, kwargs
        Call to run.
    token
        Scalar on the block's device.
    rng
        Reader of random states, ``None`` if they are not to be preserved.
    on_phase
        Function called at the start of the backward, between recomputation and gradients, and at
        the end: with "backward", "recorded" and "before".
    proof, k
        Proof of its output, as that of block `k`; ``None`` in unverified steps.

    Attributes
    ----------
    is_done
        True if the backward has run, and nothing is kept.
    """

    def __init__(
        self,
        stage: BlockStage,
        flags: Flags,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        token: torch.Tensor,
        rng: RngTracker | None,
        on_phase: Callable[[str], None] | None,
        proof: Comparisons | None,
        k: int,
    ) -> None:
        self.flags = flags
        self._proof = proof
        self._k = k
        self.token = token
        self.is_done = False
        self._stage = stage
        self._forward = forward
        self._on_phase = on_phase
        self._value: Any = detached((args, kwargs))
        self._versions = versions((args, kwargs))
        self._input_flags = grad_flags((args, kwargs))
        self._modes = Modes(token.device.type)
        self._gradients: list[torch.Tensor | None] | None = None
        self._is_begun = False
        if rng is not None:
            rng.latest = None
        self._snapshot: Snapshot | None = Snapshot(stage, rng)
        self._outputs: list[torch.Tensor] = []

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the block's output, in the graph of the caller."""
        assert self._snapshot is not None
        with torch.no_grad():
            y = self._stage((self._forward, self._value))
            self._snapshot.finish()
        if self._proof is not None:
            self._proof.first(self._k, y)
        if self._modes.is_autocast:
            torch.clear_autocast_cache()
        if versions((args, kwargs)) != self._versions:
            raise RuntimeError(
                f"block {self._stage.name} changed its input in place, which it did not do when "
                "it was measured: it cannot be computed again. Call measure() again with the model "
                "as it is now"
            )
        self._outputs = [tensor.detach() for tensor in tree_tensors(y)]
        if len(self._outputs) != len(self.flags):
            raise RuntimeError(
                f"block {self._stage.name} returned {len(self._outputs)} tensors, and "
                f"{len(self.flags)} when it was measured: call measure() again with the model as "
                "it is now"
            )
        inputs = flagged((args, kwargs), self._input_flags)
        token = _apply_in(self, self.token.detach().requires_grad_(), *inputs)
        return with_tensors(y, _apply_out(self, token))

    def take_outputs(self) -> list[torch.Tensor]:
        """Return the outputs, once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Begin the backward.

        Raises
        ------
        RuntimeError
            The backward has begun before, or is to be differentiated itself.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True cannot go through a block of FSDP2 that is "
                "computed again: use the plain model (chk.module), or the model without FSDP2, "
                "which runs its forward again for it"
            )
        if self._is_begun:
            raise RuntimeError(
                "a second backward through the same forward: what it kept was freed by the first "
                "one. Call the model again before each backward; retain_graph=True works only for "
                "the plain model (chk.module)"
            )
        self._is_begun = True
        self._gradients = gradients

    def backward(self) -> list[torch.Tensor | None]:
        """Run the block again, and backward; return gradients of its inputs that require one."""
        given, self._gradients = self._gradients, None
        if given is None:
            return [None] * sum(self._input_flags)
        self._tell("backward")
        try:
            if self._modes.are_current():
                wanted, root, cell = self._record()
            else:
                with self._modes:
                    wanted, root, cell = self._record()
            self._value = self._snapshot = None
            self._tell("recorded")
            cell.append(given)
            del given
            torch.autograd.backward(root, self.token)
        finally:
            self._release()
        self._tell("before")
        return [arrived_gradient(tensor) for tensor in wanted]

    def _record(self) -> tuple[list[torch.Tensor], torch.Tensor, list[Any]]:
        assert self._snapshot is not None
        if versions(self._value) != self._versions:
            raise RuntimeError(
                f"an input of block {self._stage.name} was changed in place between its forward "
                "and its backward, and the block has to be computed again from it: change a copy "
                "instead"
            )
        with torch.enable_grad():
            given, wanted = as_inputs(self._value, self._input_flags, source_of(self.token.device))
            y = self._snapshot.recompute((self._forward, given), last=True)
            if self._proof is not None:
                self._proof.again(self._k, y)
            cell: list[Any] = []
            root = apply_handoff(cell, self.token, *flagged(y, self.flags))
        if self._modes.is_autocast:
            torch.clear_autocast_cache()
        return wanted, root, cell

    def _tell(self, name: str) -> None:
        if self._on_phase is not None:
            self._on_phase(name)

    def _release(self) -> None:
        self._value = self._snapshot = None
        self.is_done = True


class BlockStep:
    """Context in which the blocks of a model run as planned.

    Parameters
    ----------
    stages
        The blocks.
    flags
        For each block, flags of the tensors of its output that require gradients.
    choice
        Option of each block: `AGAIN`, `KEPT`, or a program, counted from `FIRST_PROGRAM`.
    device
        Device of the model.
    graphs
        Captured blocks, if they have programs.
    preserve_rng_state
        True to recompute with the random numbers of the first forward.
    marks
        Receiver of "forward k", "after k", "backward k" and "before k", for block k.
    details
        True to send "recorded k" too, between recomputation and backward.
    proof
        Comparison of recomputed values; ``None`` in unverified steps.
    placed
        Places of offloaded values; ``None``: no block offloads any.

    Attributes
    ----------
    latest
        Last call that the backward computes again.
    failed
        Blocks whose program could not run, and that are computed again instead.
    """

    def __init__(
        self,
        stages: Sequence[BlockStage],
        flags: Sequence[Flags],
        choice: Sequence[int],
        device: torch.device,
        graphs: Sequence[Programs | None] = (),
        *,
        preserve_rng_state: bool = True,
        marks: Marks | None = None,
        details: bool = False,
        proof: Any = None,
        placed: PlacedStep | None = None,
    ) -> None:
        self._proof = proof
        self._placed = placed or PlacedStep()
        self._stages = stages
        self._flags = flags
        self._choice = choice
        self._graphs = graphs
        self._rng = RngTracker(device) if preserve_rng_state else None
        self._token = torch.zeros((), device=device)
        self._marks = marks
        self._details = details
        self._places = {stage.module: k for k, stage in enumerate(stages)}
        self._called: set[int] = set()
        self.latest: BlockCall | None = None
        self.failed: list[int] = []

    def __enter__(self) -> Self:
        self._replaced = PatchedForwards(self._places, self._runner)
        self._replaced.__enter__()
        if self._marks is not None:
            self._marks.mark("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.__exit__()
        self._placed.__exit__()

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        k = self._places[module]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or k in self._called:
                return forward(*args, **kwargs)
            self._called.add(k)
            marks = self._marks
            if marks is not None:
                marks.mark(f"forward {k}")
            y = self._run(k, forward, args, kwargs)
            if marks is not None:
                marks.mark(f"after {k}")
            return y

        return run

    def _run(self, k: int, forward: Any, args: Any, kwargs: Any) -> Any:
        option = self._choice[k]
        if option == KEPT:
            y = forward(*args, **kwargs)
            if self._marks is not None:
                _watch_backward(self._marks, k, (args, kwargs), y)
            return y
        graph = self._graphs[k] if option >= FIRST_PROGRAM else None
        if graph is not None:
            y, is_done = self._run_program(k, graph, option - FIRST_PROGRAM, args, kwargs)
            if is_done:
                return y
        call = BlockCall(
            self._stages[k],
            self._flags[k],
            forward,
            args,
            kwargs,
            self._token,
            self._rng,
            self._teller(k),
            self._proof,
            k,
        )
        self.latest = call
        return call.run(args, kwargs)

    def _run_program(
        self, k: int, graph: Programs, number: int, args: Any, kwargs: Any
    ) -> tuple[Any, bool]:
        module = self._stages[k].module
        on_phase = None if self._marks is None else self._marks.mark
        with self._replaced.paused(module):
            y, is_done = graph.run(
                number, module, args, kwargs, on_phase, k, self._proof, self._placed.of(k)
            )
        if not is_done:
            self.failed.append(k)
        return y, is_done

    def _teller(self, k: int) -> Callable[[str], None] | None:
        marks, details = self._marks, self._details
        if marks is None:
            return None

        def on_phase(name: str) -> None:
            if details or name != "recorded":
                marks.mark(f"{name} {k}")

        return on_phase


def _watch_backward(marks: Marks, k: int, value: Any, y: Any) -> None:
    """Mark the start and the end of the backward of a block that runs in plain autograd."""
    inputs = [t for t in tree_tensors(value) if t.grad_fn is not None]
    known = {id(t) for t in tree_tensors(value)}
    begun: list[bool] = []
    waiting = {id(t) for t in inputs}

    def begin(_: torch.Tensor) -> None:
        if not begun:
            begun.append(True)
            marks.mark(f"backward {k}")

    for output in tree_tensors(y):
        if output.requires_grad and id(output) not in known:
            output.register_hook(begin)
    for tensor in inputs:

        def end(_: torch.Tensor, which: int = id(tensor)) -> None:
            waiting.discard(which)
            if begun and not waiting:
                marks.mark(f"before {k}")

        tensor.register_hook(end)
