"""Blocks of a sharded model that are computed again in the backward, each by its own node.

A model that is no chain runs as it is; only the forwards of the modules that FSDP2
(``fully_shard``) wraps one by one are replaced. The replacement runs within the hooks of
FSDP2, which gather its parameters before the forward and before the backward, and reduce its
gradients after. So the block runs once without a graph; its node's backward runs it again with one,
and a nested ``torch.autograd.backward`` through it leaves the gradients of whole parameters where
its hooks look for them. Blocks that do not repeat are found by measuring, and in verified steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.algorithms.sequence import Backward, ForwardCheck, ForwardEnable, Loss
from rotor.common.calls import call_signature
from rotor.common.checksums import Proved, recomputation_error
from rotor.common.ranks import Ranks, entered
from rotor.common.substitutes import PatchedForwards
from rotor.common.tensor_trees import Flags, check_output, grad_flags, tree_tensors, versions
from rotor.common.undisturbed import copied_arguments, gradients_aside, trial, values_kept
from rotor.engines.chain.observe import Observation, Observer, nodes_of, note_state
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.run import Run
from rotor.engines.chain.sharded import ShardedRun, ShardedStage, Sharding
from rotor.engines.chain.snapshot import CURE, StageOrigins, python_before
from rotor.engines.chain.stages import Stage
from rotor.engines.parts.chained import mark_backward
from rotor.engines.parts.kinds import Kind, backward_marks
from rotor.engines.parts.plan import PlacedStep, Placement
from rotor.engines.parts.probe import Saves
from rotor.engines.proofs import VARIED, Difference, RunProof, ShardedProof, buffers_before
from rotor.graph.assembly import Option

AGAIN, KEPT, FIRST_PROGRAM = 0, 1, 2
"""Options of a block: computed again, kept by autograd, the programs of its graph."""

_TWICE = Schedule([ForwardCheck(0), Loss(1), ForwardEnable(0), Backward(0)], 1, plain_tail=False)
"""Schedule of a block that is computed again."""


class BlockStage(ShardedStage):
    """Block in the form of a stage; its input is the arguments of its module's forward."""

    __slots__ = ("forward",)

    def __init__(self, name: str, module: nn.Module, sharding: Sharding) -> None:
        super().__init__([name], [module], sharding)
        self.forward: Callable[..., Any] = module.forward
        """Forward of the module that runs, which a step replaces by another one."""

    @property
    def module(self) -> nn.Module:
        """Module of the block."""
        found = self.functions[0]
        assert isinstance(found, nn.Module)
        return found

    def __call__(self, x: Any) -> Any:
        """Run the forward."""
        args, kwargs = x
        return self.forward(*args, **kwargs)


@dataclass(frozen=True)
class Kept:
    """Reason for which a block may run forward only once, and none of its graphs may be used."""

    reason: str = ""
    """Part of a sentence; empty if the block may run again."""
    varies: bool = False
    """True if two runs of it gave different bits."""
    has_state: bool = False
    """True if it changes state in Python, which a graph would not."""


@dataclass(eq=False)
class Block:
    """Block of a model."""

    stage: BlockStage
    flags: Flags
    """Flags of the tensors of its output that require gradients."""
    all_options: list[Option] = field(default_factory=list)
    """Options: to compute it again, to keep what autograd saves, and its graph's programs."""
    graph: Kind | None = field(default=None, repr=False)
    """Captured graph, and its programs; blocks that are alike share it."""
    signature: Any = None
    """Signature of the captured call."""
    is_held: bool = False
    """True if another block, called later, holds the outputs."""
    whole: str = ""
    """Reason for which it was not captured."""
    is_lost: bool = False
    """True if a step could not run its graph, which is not used any more."""
    kept: Kept = field(default_factory=Kept)
    """Reason for which it is never computed again."""
    around_bytes: ClassVar[int] = 0
    """Bytes around it that are beside the measured ones."""
    levels: tuple[int, int, int] = (0, 0, 0)
    """Bytes above the bases at which the forwards and the backwards of its programs begin, and
    their time in ns beside the operations of the graph.
    """

    @property
    def name(self) -> str:
        """Path of the block in the model."""
        return self.stage.name

    def described(self, k: int) -> str:
        """Return the name, and the treatment under option `k`."""
        treatment = "kept" if k == KEPT else "computed again" if self.is_again(k) else "a part kept"
        moves = k >= FIRST_PROGRAM and self.all_options[k].tier_bytes
        return f"{self.name}: {treatment}" + (", a part offloaded" if moves else "")

    def is_again(self, k: int) -> bool:
        """Return whether it is computed again, as a whole."""
        return k == AGAIN or (k != KEPT and self.is_lost)

    def recomputes(self, k: int) -> bool:
        """Return whether it, or an operation in it, is computed again."""
        kind = self.running(k)
        return self.is_again(k) or (kind is not None and kind.recomputes(k - FIRST_PROGRAM))

    @property
    def unrepeatable(self) -> str:
        """Reason for which it is never computed again; empty without one."""
        return self.kept.reason

    def options(self) -> list[Option]:
        """Return the options; those of a lost graph are replaced by computing the block again.

        All options of a block that does not repeat are to keep it.
        """
        if self.kept.reason:
            return [self.all_options[KEPT]] * len(self.all_options)
        if not self.is_lost:
            return self.all_options
        programs = [self.all_options[AGAIN]] * len(self.all_options[FIRST_PROGRAM:])
        return [*self.all_options[:FIRST_PROGRAM], *programs]

    def running(self, k: int) -> Kind | None:
        """Return the graph that runs under option `k`; ``None`` without one."""
        return self.graph if k >= FIRST_PROGRAM and not self.is_lost else None

    def program(self, k: int) -> Placement | None:
        """Return the program of option `k`, and the places of its values; ``None`` without one."""
        kind = self.running(k)
        return None if kind is None else kind.program(k - FIRST_PROGRAM)

    def program_options(self) -> list[Option]:
        """Return the options that are programs of its graph, by the measured levels.

        The gradients of the outputs exist when the backward begins, and are not counted.
        """
        if self.graph is None:
            return []
        forward, backward, time_ns = self.levels
        found, lowered = self.graph.options(self.is_held), self.graph.captured.lowered
        given = sum(lowered.storages[s][0] for s in set(lowered.tasks[lowered.loss].made.values()))
        least = min(option.time_ns for option in found)
        return [
            replace(
                option,
                forward_bytes=forward + option.forward_bytes,
                backward_bytes=backward + option.backward_bytes - given,
                time_ns=time_ns + option.time_ns - least,
            )
            for option in found
        ]


class BlockRun(ShardedRun):
    """Call of a block that its backward computes again: the run of a chain of one stage.

    The parameters are gathered and reduced by FSDP2's hooks around the block. `value` has the
    arguments of the block. `tell` is called at the start of the backward, between recomputation and
    gradients, and at the end: with "backward", "recorded" and "before".
    """

    def __init__(
        self,
        stage: BlockStage,
        flags: Flags,
        value: Any,
        device: torch.device,
        *,
        preserve_rng_state: bool,
        proof: Any,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        super().__init__(
            [stage],
            _TWICE,
            value,
            device=device,
            preserve_rng_state=preserve_rng_state,
            flags=[(), flags],
            proof=proof,
        )

    def output(self, value: Any) -> Any:
        """Run the forward; return the block's output, in the graph of the caller."""
        self.forward()
        if versions(value) != self.input_versions:
            raise RuntimeError(
                f"block {self.stages[0].name} changed its input in place, which it did not do when "
                "it was measured: it cannot be computed again. Call measure() again with the model "
                "as it is now"
            )
        return self.attach(value)

    def _note(self, i: int, y: Any) -> Flags:
        """Return the flags of the output; raise RuntimeError if its number of tensors is new."""
        flags, count = super()._note(i, y), len(tree_tensors(y))
        if count != len(flags):
            raise RuntimeError(
                f"block {self.stages[0].name} returned {count} tensors, and {len(flags)} when it "
                "was measured: call measure() again with the model as it is now"
            )
        return flags

    def backward_to(
        self, stage: int, need_x: bool, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Run the block again, and its backward."""
        self._tell("backward")
        found = super().backward_to(stage, need_x, needs)
        self._tell("before")
        return found

    def back(self, i: int, need_x: bool, needs: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        """Run the backward of the block, which may need less than its input."""
        self.x[0] = None
        self._tell("recorded")
        return Run.back(self, i, need_x, needs)


class BlockStep:
    """Context in which blocks of a model run as planned.

    The choice has an option for each block: `AGAIN`, `KEPT`, or a program, counted from
    `FIRST_PROGRAM`. `mark` is called with "forward k", "after k", "backward k" and "before k" of
    block k; with `details` also "recorded k", between recomputation and backward. `proof` compares
    recomputed values in verified steps, and `placed` has the places of offloaded values, if there
    are any.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        choice: Sequence[int],
        device: torch.device,
        *,
        preserve_rng_state: bool = True,
        mark: Callable[[str], object] | None = None,
        details: bool = False,
        proof: Any = None,
        placed: PlacedStep | None = None,
    ) -> None:
        self._proof = proof
        self._placed = placed or PlacedStep()
        self._blocks = blocks
        self._choice = choice
        self._device = device
        self._preserve_rng_state = preserve_rng_state
        self._mark = mark
        self._details = details
        self._places = {block.stage.module: k for k, block in enumerate(blocks)}
        self._called: set[int] = set()
        self.failed: list[int] = []
        """Blocks whose program could not run, and that are computed again instead."""

    def __enter__(self) -> Self:
        self._replaced = PatchedForwards(self._places, self._runner)
        self._replaced.__enter__()
        if self._mark is not None:
            self._mark("start")
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
            if self._mark is not None:
                self._mark(f"forward {k}")
            y = self._run(k, forward, args, kwargs)
            if self._mark is not None:
                self._mark(f"after {k}")
            return y

        return run

    def _run(self, k: int, forward: Any, args: Any, kwargs: Any) -> Any:
        option, block = self._choice[k], self._blocks[k]
        if option == KEPT:
            y = forward(*args, **kwargs)
            if self._mark is not None:
                mark_backward((args, kwargs), y, *backward_marks(self._mark, k))
            return y
        if (kind := block.running(option)) is not None:
            y, is_done = self._run_program(k, kind, option - FIRST_PROGRAM, args, kwargs)
            if is_done:
                return y
        value = (args, kwargs)
        block.stage.forward = forward
        run = BlockRun(
            block.stage,
            block.flags,
            value,
            self._device,
            preserve_rng_state=self._preserve_rng_state,
            proof=None if self._proof is None else self._proof.of_block(k),
            tell=partial(self._tell, k),
        )
        return run.output(value)

    def _run_program(self, k: int, kind: Kind, number: int, args: Any, kwargs: Any) -> Any:
        """Return the output of a program of a block's graph, and whether it could run."""
        block, module = self._blocks[k], self._blocks[k].stage.module
        if call_signature(args, kwargs) == block.signature:
            marks = None if self._mark is None else backward_marks(self._mark, k)
            code = kind.code_for(number, self._proof, k, block.name)
            with self._replaced.paused(module):
                y, failed = kind.call(code, module, args, kwargs, marks, self._placed.of(k))
            if not failed:
                return y, True
        self.failed.append(k)
        return None, False

    def _tell(self, k: int, name: str) -> None:
        if self._mark is not None and (self._details or name != "recorded"):
            self._mark(f"{name} {k}")


_SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


class NoBlocks(RuntimeError):
    """Absence of any module of a sharded model that could be computed again by itself."""


def candidates(model: nn.Module, sharding: Sharding) -> list[BlockStage]:
    """Return the modules that could be blocks, outermost first; raise NoBlocks if there are none.

    A unit that holds several units of one type contains blocks, and is no block itself.
    """
    names = {module: name for name, module in model.named_modules()}
    found = [module for unit in sharding.units for module in unit.modules if names.get(module)]
    inside = {m: [o for o in found if o is not m and o in set(m.modules())] for m in found}
    kept = [m for m in found if max(Counter(map(type, inside[m])).values(), default=0) < 2]
    hidden = {part for m in kept for part in inside[m]}
    stages = [BlockStage(names[m], m, sharding) for m in kept if m not in hidden]
    if not stages:
        raise NoBlocks(
            f"{type(model).__name__} is sharded as a whole (FSDP2), none of its blocks on its own: "
            "nothing in it can be computed again by itself. Call fully_shard() on each "
            "block first, then on the model (docs/fsdp.md)"
        )
    return stages


@contextmanager
def apart(model: nn.Module, sharding: Sharding, arguments: Any) -> Iterator[Any]:
    """Run a training step without a trace, in the model's forward or before the first one.

    The context gives copies of the arguments for the step.
    """
    device = tree_tensors(arguments)[0].device
    own = copied_arguments(arguments, copies_tensors=True)
    sharded = {id(p.shard) for unit in sharding.units for p in unit.parameters}
    sharded |= {id(p.whole) for unit in sharding.units for p in unit.parameters}
    plain = [p for p in model.parameters() if id(p) not in sharded]
    root = sharding.root
    inner = [unit for unit in sharding.units if unit is not root]
    with ExitStack() as stack:
        own_trial = trial(model, (), device, is_guarded=False, is_sharded=True)
        stack.enter_context(entered(sharding.ranks, own_trial))
        stack.enter_context(values_kept(model.buffers()))
        stack.enter_context(fsdp.undisturbed(sharding.units))
        if root is not None and not root.is_gathered:
            root.gather()
            stack.callback(root.reshard)
        stack.enter_context(fsdp.ending_backwards_of(inner))
        try:
            with gradients_aside(plain):
                yield own
        finally:
            for unit in sharding.units:
                for sharded_parameter in unit.parameters:
                    sharded_parameter.put_gradients((None, None, None))
            for unit in inner:
                unit.reshard()


class Calls:
    """Forward that observes the calls of possible blocks, and keeps nothing."""

    def __init__(self, model: nn.Module, stages: Sequence[BlockStage], arguments: Any) -> None:
        self._stages = {stage.module: stage for stage in stages}
        self._saves = Saves(model, arguments)
        self.found: dict[nn.Module, Flags] = {}
        """Called blocks, in order: flags of the tensors of their outputs that require gradients."""
        self.reasons: dict[nn.Module, str] = {}
        """Reasons for which modules cannot be blocks."""

    def run(self, call: Callable[[], Any]) -> None:
        """Run the forward."""
        with PatchedForwards(self._stages, self._watched), self._saves.watching():
            call()
        for module in self._stages:
            if module not in self.found:
                self.reasons.setdefault(module, "it was not called")

    def _watched(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if module in self.found:
                self.reasons[module] = "it is called several times"
                return forward(*args, **kwargs)
            before = versions((args, kwargs))
            y = forward(*args, **kwargs)
            reason = self._reason(module, (args, kwargs), y)
            if reason is None and versions((args, kwargs)) != before:
                reason = "it changes its input in place"
            self.found[module] = () if reason else grad_flags(y)
            if reason is not None:
                self.reasons[module] = reason
            return y

        return run

    def _reason(self, module: nn.Module, value: Any, y: Any) -> str | None:
        """Return the reason for which a call cannot be repeated by itself."""
        if not torch.is_grad_enabled():
            return "it runs without gradients"
        for leaf in core.tree_flatten(value)[0]:
            if not isinstance(leaf, (torch.Tensor, *_SIMPLE)):
                kind = type(leaf).__name__
                return f"it takes a {kind}, which may not be the same when it is run again"
        try:
            check_output("", y)
        except TypeError:
            return "it returns something other than tensors"
        if not any(grad_flags(y)):
            return "nothing in it needs a gradient"
        stage = self._stages[module]
        own = {id(p) for p in stage.current_parameters()} | {id(p) for p in module.parameters()}
        own |= {id(owner.whole) for owner in stage.every_owner()}
        inputs = tree_tensors(value)
        own |= {id(t) for t in inputs}
        nodes = nodes_of(tree_tensors(y), (t.grad_fn for t in inputs))
        leaves = (getattr(node, "variable", None) for node in nodes)
        if any(leaf is not None and id(leaf) not in own for leaf in leaves):
            return "it uses tensors that require gradients and are not among its arguments"
        return None


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
    saves = Saves(model, arguments)
    places = {stage.module: k for k, stage in enumerate(stages)}
    seen: dict[int, Observation] = {}

    def runner(module: nn.Module, forward: Any) -> Callable[..., Any]:
        k = places[module]

        def run(*args: Any, **kwargs: Any) -> Any:
            stages[k].forward, x = forward, (args, kwargs)
            named = zip(stages[k].names, stages[k].functions, strict=True)
            alone = trial(named, (), device, is_guarded=False, is_sharded=True)
            with alone, saves.paused() if saves.on_top() else nullcontext():
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
