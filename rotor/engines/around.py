"""Way around a captured call: gradients from a forward that runs again in plain autograd.

A call is one node, whose outputs know nothing of each other. Where one of them is computed from
another, as logits from a hidden state, the caller may ask for the gradient of the one in the
other. So an output from which others are computed has a node of its own here, an input of theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from rotor._pytorch import backwards, core, dispatch
from rotor.common.places import exchange_kept, kept_tensors
from rotor.common.rerun import Level, Rerun, let_go, present
from rotor.common.substitutes import exchanged
from rotor.common.tensor_trees import output_tensors


class _Part:
    """Captured call, and the way around it; arguments are as of `around`.

    `token` is told to pass. `made` are the caller's tensors of the results.
    """

    def __init__(
        self,
        rerun: Rerun,
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        leaves: Sequence[torch.Tensor],
        token: Any,
        inner: Sequence[int],
        *,
        is_outer: bool,
        retains: bool,
    ) -> None:
        self._rerun, self._outputs, self.token, self._inner = rerun, outputs, token, inner
        self._leaves, self._is_outer, self._retains = let_go(leaves), is_outer, retains
        self.made: list[Any] = []
        self._task, self._is_wanted = -1, False
        self._given: dict[int, torch.Tensor | None] = {}
        self._by_levels = False

    def backward(
        self, level: Level, given: Sequence[torch.Tensor | None]
    ) -> Iterable[torch.Tensor | None]:
        """Return gradients of a level's outputs, its earlier ones and leaves.

        Those of the outputs are ``None``, or all others.
        """
        passed = (*given, *[None] * (len(level.earlier) + len(self._leaves)))
        token, is_new = self.token(), self._task != dispatch.graph_task()
        is_past = is_new and token is None and all(gradient is None for gradient in given)
        if is_past or (self._is_outer and not torch.is_grad_enabled()):
            return passed
        if is_new:
            self._begin(token, given)
        if not self._is_wanted:
            return passed
        leaves = [*map(present, self._leaves)]
        wanted = [leaf for leaf in leaves if leaf is not None]
        self._given.update(zip(level.own, given, strict=True))
        if not self._by_levels and level.earlier:
            return [None] * len(passed)
        found = self._rerun.gradients(
            self._outputs,
            [self._given.pop(k, None) for k in range(len(self.made))],
            wanted,
            self.made,
            level if self._by_levels else None,
        )
        return (
            *[None] * len(given),
            *[found.get(k) for k in level.earlier],
            *[found.pop(id(leaf), None) for leaf in leaves],
        )

    def _begin(self, token: Any, given: Sequence[torch.Tensor | None]) -> None:
        """Decide on a backward that begins."""
        self._task = dispatch.graph_task()
        self._given.clear()
        has_changed = token is not None and token.reads is not None and bool(token.reads.changed())
        # Sums of gradients that are made in one go have the order of plain autograd.
        self._by_levels = bool(self._inner) and self._is_asked()
        has_changed |= self._by_levels
        repeats = token is not None
        self._is_wanted = self._rerun.is_wanted(
            given, map(present, self._leaves), repeats=repeats, has_changed=has_changed
        )
        if token is not None:
            token.is_passed = self._is_wanted

    def _is_asked(self) -> bool:
        """Return whether gradients of inner outputs are asked for, by the call or by hooks."""
        made = [tensor for k in self._inner if (tensor := self.made[k]()) is not None]
        edges = backwards.edges_asked_for() if made else ()
        return any(
            backwards.is_hooked(tensor)
            or (tensor.grad_fn, tensor.output_nr) in edges
            or (tensor.retains_grad and not self._retains)
            for tensor in made
        )


class _Again(Function):
    """Node that passes gradients on to a captured call, or takes them past it."""

    @staticmethod
    def forward(ctx: Any, part: _Part, level: Level, *tensors: torch.Tensor) -> Any:
        ctx.part, ctx.level = part, level
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors[: len(level.own)]])

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        return None, None, *ctx.part.backward(ctx.level, given)


def is_around(token: Any, node: Any) -> bool:
    """Return whether a node belongs to the way around a call, whose backward runs, by its token."""
    part = getattr(node, "part", None)
    return isinstance(part, _Part) and part.token() is token


_apply_again = core.bare_apply(_Again)


def around(
    results: Sequence[torch.Tensor],
    rerun: Rerun,
    outputs: Callable[[Any], Sequence[torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    token: Any,
    inner: Sequence[int] = (),
    *,
    is_outer: bool = False,
    retains: bool = False,
) -> Sequence[torch.Tensor]:
    """Return the results of a captured call, with a way around the call in their graph.

    `rerun` is the state in which the call began, and `outputs` the function from its arguments to
    the results. The call's backward makes gradients of `leaves`; `token` returns the object that
    lives while that backward can run. `inner` are the numbers of results from which others are
    computed, in their order; with `retains` that backward sets the gradients that they retain.
    With `is_outer` it runs again only for gradients that are to be differentiated.
    """
    part = _Part(rerun, outputs, leaves, token, inner, is_outer=is_outer, retains=retains)
    if not inner:
        level = Level(range(len(results)), ())
        found: Sequence[torch.Tensor] = _apply_again(part, level, *results, *leaves)
        part.made = [*map(weakref.ref, found)]
        return found
    given: dict[int, torch.Tensor] = {}
    for level in _levels(inner, len(results)):
        own, earlier = [results[k] for k in level.own], [given[k] for k in level.earlier]
        made = _apply_again(part, level, *own, *earlier, *leaves)
        given.update(zip(level.own, made, strict=True))
    found = [given[k] for k in range(len(results))]
    part.made = [*map(weakref.ref, found)]
    return found


def attach(
    output: Any,
    rerun: Rerun,
    forward: Callable[[Any], Any],
    leaves: Sequence[torch.Tensor],
    token: Any,
    captured: Any = None,
    *,
    is_outer: bool = False,
) -> Any:
    """Return the nested result of a captured call, with a way around the call in its graph.

    `forward` returns the same for arguments. Of a graph in `captured`, attributes and hooks of
    modules may hold results too, which are replaced there. For the other parameters see `around`.
    """
    tensors = output_tensors(output)
    inner = () if captured is None else captured.lowered.inner_outputs
    node = core.compiled_node(tensors) if inner else None
    kept: list[torch.Tensor] = []
    if node is not None and captured.keeps is not False:
        kept = kept_tensors(rerun.modules)
        captured.keeps = any(core.output_number(tensor, node) is not None for tensor in kept)
    modules = rerun.modules if kept and captured.keeps else ()
    positions: dict[int, int] = {}
    results = []
    for k, tensor in enumerate([*tensors, *kept]):
        is_own = k < len(tensors) or core.output_number(tensor, node) is not None
        is_new = id(tensor) not in positions and id(tensor) not in rerun.arguments
        if is_own and is_new and tensor.grad_fn is not None:
            positions[id(tensor)] = k
            results.append(tensor)
    if not positions or not leaves:
        return output

    def outputs(value: Any) -> list[torch.Tensor]:
        tensors = output_tensors(forward(value))
        everything = [*tensors, *kept_tensors(modules)]
        return [everything[k] for k in positions.values()]

    if inner:
        numbers = [core.output_number(tensor, node) for tensor in results]
        inner = [numbers.index(k) for k in inner if k in numbers]
    made = around(results, rerun, outputs, leaves, token, inner, is_outer=is_outer)
    given = dict(zip(positions, made, strict=True))
    if modules:
        exchange_kept(modules, given)
    return exchanged(output, given)


def _levels(inner: Sequence[int], count: int) -> list[Level]:
    """Return the numbers of results by their nodes, the inner ones first."""
    levels = [Level([k], inner[:i]) for i, k in enumerate(inner)]
    last = [k for k in range(count) if k not in inner]
    return [*levels, Level(last, inner)] if last else levels
