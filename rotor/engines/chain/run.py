"""Execution of a chain's schedule: the numbers of the plain model, in less memory.

The real activations and gradients live in a `Run`, their only owner, so that they are freed as
early as in plain autograd. Autograd sees one small node for each stage with parameters, chained by
tokens without memory: the gradients of parameters leave the node as soon as they are computed, so
hooks on them (as DistributedDataParallel has) run stage by stage. The backward of a node
executes the schedule up to its own B: recomputations, and ``torch.autograd.grad`` over Fe's graph.

Stages that the schedule keeps right up to the loss run in plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from rotor._pytorch import core, devices
from rotor.algorithms.sequence import FE, FN
from rotor.common.frames import warn_caller
from rotor.common.modes import SPLIT_BACKWARD, Modes, RngTracker
from rotor.common.tensor_trees import (
    Flags,
    check_output,
    detached,
    differentiable,
    flagged,
    grad_flags,
    tree_tensors,
    versions,
    with_tensors,
)
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.segments import Around
from rotor.engines.chain.snapshot import Snapshot
from rotor.engines.chain.stages import (
    Stage,
    arrived_gradient,
    as_inputs,
    keeping_nothing,
    leaf_flags,
    root_of,
    source_of,
    token_of,
)
from rotor.engines.proofs import RunProof


class _Entry(Function):
    """Node between the inputs of the chain and its first token."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return run.token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run = ctx.run
        if run.is_passed:
            return (None,) * len(ctx.needs_input_grad)
        if not run.is_done():
            run.backward_to(run.schedule.head, True, ())
        gradient, run.gradient = run.gradient, None
        return None, *[None] * len(run.anchors), *gradient


class _StageNode(Function):
    """Node of one stage with parameters; its backward ends with the B of that stage."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, stage: int, token: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        ctx.run = run
        ctx.stage = stage
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run = ctx.run
        if run.is_passed:
            return None, None, run.token, *[None] * len(run.parameters[ctx.stage])
        _, _, need_x, *needs = ctx.needs_input_grad
        return None, None, run.token, *run.backward_to(ctx.stage, need_x, needs)


class _Boundary(Function):
    """Node that hands the last activation to plain autograd, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, run: Run, token: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        stage = run.schedule.tail
        outputs = [tensor.detach() for tensor in tree_tensors(run.x[stage])]
        fixed = [t for t, flag in zip(outputs, run.flags_of(stage), strict=True) if not flag]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run = ctx.run
        run.take_gradient(
            [g for g, flag in zip(gradients, run.flags_of(run.schedule.tail), strict=True) if flag]
        )
        return None, run.token


def _any_given(gradient: Sequence[torch.Tensor | None]) -> bool:
    return any(g is not None for g in gradient)


_apply_entry = core.bare_apply(_Entry)
_apply_stage = core.bare_apply(_StageNode)
_apply_boundary = core.bare_apply(_Boundary)


class Run:
    """State of one training step: activations, recorded graphs, and the current gradient.

    `arg` is the input of the first stage after the schedule's head. `flags` tells which tensors of
    each activation require gradients, [n + 1]; by default all could. With `accumulate`, the nested
    backward adds to ``.grad`` of the parameters and returns nothing.
    """

    anchors: tuple[torch.Tensor, ...] = ()
    """Tensors without memory that stand for parameters which the graph does not show."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        arg: Any,
        *,
        preserve_rng_state: bool = True,
        flags: Sequence[Flags] | None = None,
        proof: RunProof | None = None,
        accumulate: bool = False,
        device: torch.device | None = None,
    ) -> None:
        n, head, tail = schedule.n, schedule.head, schedule.tail
        self.stages = stages
        self.schedule = schedule
        self.accumulate = accumulate
        self.proof = proof
        self.is_passed = False
        """True in a backward that brings no gradient to the last activation."""
        self.device = device or tree_tensors(arg)[0].device
        self.token = token_of(self.device)
        self.source = source_of(self.device)
        self.x: list[Any] = [None] * (n + 1)
        self.x[head] = detached(arg)
        self.input_versions = versions(arg)
        self.known_flags = flags
        self.flags: list[Flags | None] = [None] * (n + 1)
        self.flags[head] = grad_flags(arg)
        self.leaves = leaf_flags(arg)
        self.parameters: list[list[torch.nn.Parameter]] = [
            stages[i].plain_parameters() if head <= i < tail else [] for i in range(n)
        ]
        self.tapes: list[Any] = [None] * n
        self.snapshots: list[Snapshot | None] = [None] * n
        self.left = [runs - 1 for runs in schedule.runs]
        self.rng = RngTracker(self.device) if preserve_rng_state else None
        self.modes = Modes(devices.type_of(self.device))
        self.modes_differ = False
        self.gradient: list[torch.Tensor | None] | None = None
        self.next = tail - 1
        receivers = [i for i in range(head, tail) if self.parameters[i]]
        self.lowest = head if any(self.flags_of(head)) else min(receivers, default=head)

    def flags_of(self, i: int) -> Flags:
        """Return flags of the tensors of x_i that require gradients; none while unknown."""
        return self.flags[i] or ()

    # -- operations

    def do(self, kind: int, i: int) -> None:
        """Run Fn, Fck or Fe of stage i; gradients are disabled around it."""
        if kind == FE:
            self._record(i)
        else:
            y = self._call_unkept(i) if self.stages[i].asks else self._call(i, self.x[i])
            if self.flags[i + 1] is None:
                self._note(i, y)
            self.x[i + 1] = y
            if kind == FN and i > self.schedule.head:
                self.x[i] = None

    def _call(self, i: int, x: Any) -> Any:
        stage = self.stages[i]
        if i not in self.schedule.recomputed:
            if self.rng is not None:
                self.rng.latest = None
            y = stage(x)
        elif (snapshot := self.snapshots[i]) is None:
            snapshot = Snapshot(stage, self.rng)
            y = stage(x)
            snapshot.finish()
            self.snapshots[i] = snapshot
            if self.proof is not None:
                self.proof.first(i, y)
        else:
            if i == self.schedule.head and versions(x) != self.input_versions:
                raise RuntimeError(
                    f"the input of {stage.name} was changed in place between its forward and its "
                    "backward, from which that runs again: change a copy instead"
                )
            self.left[i] -= 1
            y = snapshot.recompute(x, last=self.left[i] == 0)
            if self.proof is not None:
                self.proof.again(i, y)
        if self.modes.is_autocast:
            torch.clear_autocast_cache()
        return y

    def _note(self, i: int, y: Any) -> Flags:
        """Note the tensors of stage i's output that require gradients, when it is first seen."""
        check_output(self.stages[i].name, y)
        if self.known_flags is not None:
            flags = self.known_flags[i + 1]
        elif any(self.flags_of(i)) or self.parameters[i]:
            flags = differentiable(y)
        else:
            flags = (False,) * len(tree_tensors(y))
        self.flags[i + 1] = flags
        return flags

    def _inputs(self, i: int) -> tuple[Any, list[torch.Tensor]]:
        leaves = self.leaves if i == self.schedule.head else None
        return as_inputs(self.x[i], self.flags_of(i), self.source, leaves)

    def _call_unkept(self, i: int) -> Any:
        """Run a stage that asks autograd something, with a graph of which nothing is kept."""
        core.set_grad_enabled(True)
        try:
            with keeping_nothing():
                return detached(self._call(i, self._inputs(i)[0]))
        finally:
            core.set_grad_enabled(False)

    def _record(self, i: int) -> None:
        core.set_grad_enabled(True)
        try:
            x, wanted = self._inputs(i)
            before = versions(x)
            y = self._call(i, x)
            if versions(x) != before:
                raise RuntimeError(
                    f"stage {self.stages[i].name} changed its input in place, which it did not "
                    "when it was measured, and its backward needs the input: change a copy instead"
                )
            root, cell = root_of(flagged(y, self.flags[i + 1] or self._note(i, y)), self.token)
        finally:
            core.set_grad_enabled(False)
        self.tapes[i] = (wanted, root, cell)
        self.x[i + 1] = detached(y)

    def back(self, i: int, need_x: bool, needs: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        """Run B of stage i: replace the current gradient, of its output, by that of its input.

        Returns the gradients of the stage's parameters, ``None`` where `needs` does not ask for
        one, or where the backward accumulates; `need_x` asks for the gradient of the input.
        """
        wanted, root, cell = self.tapes[i]
        self.tapes[i] = None
        self.x[i + 1] = None
        self.snapshots[i] = None
        gradient, self.gradient = self.gradient, [None] * len(wanted)
        parameters = self.parameters[i]
        found: Sequence[torch.Tensor | None] = [None] * len(needs)
        if root.requires_grad and gradient and (gradient[0] is not None or _any_given(gradient)):
            given = gradient[0]
            if cell is not None:
                cell.append(gradient)
                given = self.token
            del gradient
            if self.accumulate:
                found = self._accumulate(i, root, given)
                self.gradient = [arrived_gradient(tensor) for tensor in wanted]
            else:
                inputs = wanted if need_x else []
                # Autograd drops gradients of parameters that were frozen after the forward.
                needs = [
                    need and p.requires_grad for p, need in zip(parameters, needs, strict=True)
                ]
                asked = [p for p, need in zip(parameters, needs, strict=True) if need]
                if inputs or asked:
                    everything = (*inputs, *asked)
                    hooked = core.hooks_of(asked)
                    if hooked:
                        with core.without_hooks(hooked):
                            answer = core.run_backward(root, given, everything)
                    else:
                        answer = core.run_backward(root, given, everything)
                    self.gradient = list(answer[: len(inputs)])
                    found = answer[len(inputs) :]
                    if not all(needs):
                        following = iter(found)
                        found = [next(following) if need else None for need in needs]
        if i > self.schedule.head:
            self.x[i] = None
        return found

    def _accumulate(
        self, i: int, root: torch.Tensor, given: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """Run the backward of stage i, which adds to the gradients of its parameters."""
        del i
        torch.autograd.backward(root, given)
        return ()

    # -- a whole step

    def forward(self) -> None:
        """Run the operations before the loss, except the tail's."""
        with torch.no_grad():
            for kind, i in self.schedule.forward:
                self.do(kind, i)
        if self.rng is not None:
            self.rng.latest = None

    def attach(self, arg: Any) -> Any:
        """Put the stages before the tail into the graph; return the input of the tail."""
        head, tail = self.schedule.head, self.schedule.tail
        inputs = [*self.anchors, *flagged(arg, self.flags_of(head))]
        token = _apply_entry(self, *inputs) if inputs else self.token.detach()
        for i in range(head, tail):
            if self.parameters[i]:
                token = _apply_stage(self, i, token, *self.parameters[i])
        return self.hand_over(token)

    def hand_over(self, token: torch.Tensor) -> Any:
        """Return the input of the tail, in the graph after `token`, and drop it from the run."""
        tail = self.schedule.tail
        outputs = _apply_boundary(self, token)
        value = with_tensors(self.x[tail], outputs)
        self.x[tail] = None
        return value

    def splits_backward(self) -> bool:
        """Return whether the running backward leaves parameters' gradients to another one."""
        return core.splits_backward(p for stage in self.parameters for p in stage)

    def check(self, *_: Any) -> None:
        """Raise if what a recomputation depends on was written to since the forward."""
        for snapshot in self.snapshots:
            if snapshot is not None:
                snapshot.check()

    def take_gradient(self, gradient: list[torch.Tensor | None]) -> None:
        """Begin a backward; raise RuntimeError if neither the schedule nor a rerun can give it."""
        self.is_passed = not _any_given(gradient)
        if self.is_passed:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True cannot go through a schedule that recomputes, "
                "of CheckpointOptim or with FSDP2: use rotor.Checkpointable without FSDP2, which "
                "runs the forward again for it, the plain model, or a limit under which nothing is "
                "recomputed"
            )
        if self.next != self.schedule.tail - 1 or self.gradient is not None:
            raise RuntimeError(
                "a second backward through the same forward: its activations were freed by the "
                "first one. Call the model again before each backward; retain_graph=True works "
                "only for the plain model (chk.module)"
            )
        if self.splits_backward():
            raise RuntimeError(SPLIT_BACKWARD)
        self.check()
        self.gradient = gradient
        self.modes_differ = not self.modes.are_current()

    def backward_to(
        self, stage: int, need_x: bool, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Execute everything down to the B of `stage`; return the gradients of its parameters."""
        found: Sequence[torch.Tensor | None] = ()
        try:
            while self.next >= stage:
                i = self.next
                if self.modes_differ:
                    with self.modes:
                        self._redo(i)
                else:
                    self._redo(i)
                self.next = i - 1
                if i == stage:
                    found = self.back(i, need_x, needs)
                else:
                    self.back(i, True, [False] * len(self.parameters[i]))
            if self.next < self.lowest and self.proof is not None:
                self.proof.settle()
        except BaseException:
            self.release()
            raise
        if self.next < self.lowest:
            self.release()
        return found

    def _redo(self, i: int) -> None:
        for kind, k in self.schedule.segments[i][:-1]:
            self.do(kind, k)

    def is_done(self) -> bool:
        """Return whether the backward is complete."""
        return self.next < self.lowest

    def release(self) -> None:
        """Free every remaining activation, graph and snapshot: no other backward comes."""
        self.next = min(self.next, self.lowest - 1)
        self.x = [None] * len(self.x)
        self.tapes = [None] * len(self.tapes)
        self.snapshots = [None] * len(self.snapshots)
        self.proof = None


def run_chain(
    stages: Sequence[Stage],
    schedule: Schedule,
    arg: Any,
    *,
    preserve_rng_state: bool = True,
    flags: Sequence[Flags] | None = None,
    started: Callable[[Run], None] | None = None,
    run_class: type[Run] = Run,
    proof: RunProof | None = None,
    around: Around | None = None,
) -> Any:
    """Return the output of the last stage, in the graph, so that its backward follows the schedule.

    `arg` is a tensor, or tensors in tuples, lists and dictionaries. `flags` tells which tensors of
    each activation require gradients; ``None`` means all that could. `started` is called with the
    state of the run, if one is made; `around` has the ways for other backwards.
    """
    y = arg
    for stage in stages[: schedule.head]:
        y = stage(y)
    run = None
    if schedule.tail > schedule.head:
        run = run_class(
            stages, schedule, y, preserve_rng_state=preserve_rng_state, flags=flags, proof=proof
        )
        if started is not None:
            started(run)
        if around is not None:
            around.begin(y, run)
        run.forward()
        y = run.attach(y) if around is None else around.stages(run.attach(y))
    for stage in stages[schedule.tail :]:
        y = stage(y)
    if around is not None:
        around.end()
    if run is not None and schedule.tail < len(stages):
        for tensor in tree_tensors(y):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(run.check)
    return y


def _last(sequence: Sequence[Any], n: int) -> int:
    """Return the number of stages before the loss of a sequence."""
    losses = [op.stage for op in sequence if getattr(op, "kind", None) == "L"]
    if losses and losses[0] < 0:
        return max((op.stage + 1 for op in sequence), default=n)
    return losses[0] if losses else n


class CheckpointOptim(Function):
    """Autograd node of a whole chain, as published.

    ``CheckpointOptim.apply(functions, sequence, names, preserve_rng_state, arg)`` runs `functions`
    one after the other on `arg`, a tensor or a tuple of tensors, by `sequence`, and returns the
    output of the last one that the sequence names. The gradients of parameters are added to their
    ``.grad`` by the nested backward of each stage. `Checkpointable` uses the finer form of
    `run_chain`.

    Raises
    ------
    ValueError
        A Backward in the forward part of the sequence, or a Loss in the backward part.
    AttributeError
        An unknown operation.
    TypeError
        `arg` is no tensor, and contains none.

    Warns
    -----
    UserWarning
        `arg` requires no gradient: autograd will not call the backward.

    Notes
    -----
    Beaumont et al., hal-02352969, section 5.
    """

    @classmethod
    def apply(
        cls,
        functions: Sequence[Callable[[Any], Any]],
        sequence: Iterable[Any],
        names: Sequence[str] | None,
        preserve_rng_state: bool,
        arg: Any,
    ) -> Any:
        """Run the functions by the sequence; see the class."""
        sequence = list(sequence)
        if [getattr(op, "kind", None) for op in sequence] == ["L"]:
            # Sequence.without_suffix left every stage to the caller.
            return arg
        # Autograd sees only tensors given one by one, none within a tuple.
        tensors = [] if isinstance(arg, torch.Tensor) else tree_tensors(arg)
        return super().apply(functions, sequence, names, preserve_rng_state, arg, *tensors)

    @staticmethod
    def forward(
        ctx: Any,
        functions: Sequence[Callable[[Any], Any]],
        sequence: Iterable[Any],
        names: Sequence[str] | None,
        preserve_rng_state: bool,
        arg: Any,
        *parts: torch.Tensor,
    ) -> Any:
        """Run the operations before the loss; see the class for the parameters."""
        del parts
        if not tree_tensors(arg):
            raise TypeError(f"arg must be a tensor or a tuple of tensors, got {type(arg).__name__}")
        if names is None:
            names = [str(i) for i in range(len(functions))]
        stages = [Stage([name], [f]) for name, f in zip(names, functions, strict=True)]
        sequence = list(sequence)
        # The caller runs the stages that Sequence.without_suffix left out. The number of the first
        # of them is that of the loss.
        stages = stages[: _last(sequence, len(stages))]
        schedule = Schedule(sequence, len(stages), plain_tail=False)
        ctx.is_one = isinstance(arg, torch.Tensor)
        if not any(tensor.requires_grad for tensor in tree_tensors(arg)):
            warn_caller(
                "the input requires no gradient, so autograd will not call the backward of the "
                "chain and its parameters will get none: call arg.requires_grad_(), or use "
                "Checkpointable",
                UserWarning,
            )
        run = Run(stages, schedule, arg, preserve_rng_state=preserve_rng_state, accumulate=True)
        run.forward()
        ctx.run = run
        ctx.set_materialize_grads(False)
        value = run.x[schedule.n]
        run.x[schedule.n] = None
        tensors = tree_tensors(value)
        flags = run.flags_of(schedule.n)
        ctx.mark_non_differentiable(
            *[t for t, flag in zip(tensors, flags, strict=True) if not flag]
        )
        flat = isinstance(value, tuple) and not any(isinstance(v, tuple | list) for v in value)
        outputs = value if flat else tuple(tensors)
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in outputs]
        return value if isinstance(value, torch.Tensor) else outputs

    @staticmethod
    def backward(ctx: Any, *args: torch.Tensor | None) -> Any:
        """Run the operations after the loss; return the gradient of `arg`."""
        run: Run = ctx.run
        flags = run.flags_of(run.schedule.n)
        given = [g for g, is_tensor in zip(args, ctx.is_tensor, strict=True) if is_tensor]
        run.take_gradient([g for g, flag in zip(given, flags, strict=True) if flag])
        needs = [True] * len(run.parameters[0])
        run.lowest = 0
        run.backward_to(0, any(ctx.needs_input_grad[4:]), needs)
        gradient, run.gradient = iter(run.gradient or ()), None
        found = [next(gradient, None) if flag else None for flag in run.flags_of(0)]
        return None, None, None, None, *(found if ctx.is_one else (None, *found))
