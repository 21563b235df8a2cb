"""Search for modules of a sharded model that are blocks: each can be computed again by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.common.forward_patch import PatchedForwards
from rotor.common.tensor_trees import Flags, check_output, grad_flags, tree_tensors, versions
from rotor.common.undisturbed import copied_arguments, gradients_aside, trial, values_kept
from rotor.engines.chain.sharded import Sharding
from rotor.engines.parts.blocks import BlockStage
from rotor.engines.parts.probe import Saves

__all__ = ["Calls", "NoBlocks", "apart", "candidates"]

_SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


class NoBlocks(RuntimeError):
    """Absence of any module of a sharded model that could be computed again by itself."""


def candidates(model: nn.Module, sharding: Sharding) -> list[BlockStage]:
    """Return the modules that could be blocks, outermost first; raise NoBlocks if there are none.

    A unit that holds several units of one type contains blocks, and is no block itself.
    """
    names = {module: name for name, module in model.named_modules()}
    found = [
        unit.modules[0]
        for unit in sharding.units
        if len(unit.modules) == 1 and names.get(unit.modules[0])
    ]
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
        stack.enter_context(trial(model, (), device, is_guarded=False, is_sharded=True))
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
        self._inside: list[nn.Module] = []
        resident = [*model.parameters(), *model.buffers(), *tree_tensors(arguments)]
        self._saves = Saves(resident, lambda *_: None)
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
        if getattr(module, "_compiled_call_impl", None) is not None:
            return "it is compiled by its own compile(): use torch.compile(block) instead"
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
        if _reaches_outside(tree_tensors(y), tree_tensors(value), own):
            return "it uses tensors that require gradients and are not among its arguments"
        return None


def _reaches_outside(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], own: set[int]
) -> bool:
    """Return whether the graph of outputs leads to parameters that are neither inputs nor `own`."""
    known = own | {id(t) for t in inputs}
    seen = {t.grad_fn for t in inputs if t.grad_fn is not None}
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return True
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False
