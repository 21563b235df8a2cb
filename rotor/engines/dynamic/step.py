"""Autograd node of a module's forward and backward, under a session of `rotor.dtr`.

A mode that stays on after the forward would watch the caller's program, and a mode entered
in a node of a backward has ended in the next. So the whole forward runs within the session, on
inputs of its own; outside, one node represents it, whose backward enters the session again and
runs a backward of its own through the graph of the forward.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import backwards, core, dispatch, ends
from rotor.common.accounting import (
    AHEAD,
    ESTIMATE_MARGIN,
    HELD_MARGIN,
    LOSS_GRADIENTS,
    SCRAPS_BYTES,
)
from rotor.common.frames import warn_caller
from rotor.common.places import exchange_kept, kept_tensors, slots_with_tensors
from rotor.common.rerun import Rerun, Surroundings
from rotor.common.substitutes import exchanged, replace_references, substituted
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.dtr.context import Unfollowed, current
from rotor.dtr.stepping import StepSession
from rotor.engines.around import around, is_around
from rotor.engines.dynamic.additions import AS_OPERATORS, Additions, Arrivals, Undo
from rotor.errors import BudgetError, InfeasibleError, MemoryLimitWarning, RecomputationError
from rotor.meter import allocator
from rotor.units import exact_bytes

_REENTRANT = (
    "torch.utils.checkpoint with use_reentrant=True runs a backward of its own, which PyTorch "
    "refuses within that of the dynamic engine: give use_reentrant=False, or leave the checkpoint "
    "out, as the limit decides what is computed again"
)

_paused: weakref.WeakSet[BudgetedStep] = weakref.WeakSet()


class BudgetedStep:
    """Forward of a module, and the backward that belongs to it.

    Only the graph references it: when the outputs are dropped without a backward, everything that
    the forward kept is freed. The limit is in bytes above the current level. `backward_began` and
    `ended` are called with the step before its first backward, and at its end in any case. A trial
    restores everything at the end, attributes of modules too. The settings are those of the
    session.
    """

    _ended: Callable[[BudgetedStep], None] | None = None

    def __init__(
        self,
        module: nn.Module,
        limit: int,
        device: torch.device,
        *,
        backward_began: Callable[[BudgetedStep], None],
        ended: Callable[[BudgetedStep], None],
        is_trial: bool = False,
        **settings: Any,
    ) -> None:
        self.explain: Callable[[InfeasibleError], object] = id
        """Function that completes the error of a step that does not fit."""
        self._modules = list(module.modules())
        self._is_trial = is_trial
        self._attributes_before = (
            [(vars(m), vars(m).copy()) for m in self._modules] if is_trial else []
        )
        self._backward_began: Callable[[BudgetedStep], None] | None = backward_began
        self._undo = Undo(self._modules, device)
        self._phase = "forward"
        self._edges: list[Any] | None = None
        self._outputs: list[torch.Tensor] = []
        self._asked: list[torch.Tensor] = []
        self._output_count = 0
        self._references: Counter[int] = Counter()
        self._spared: set[int] = set()
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.output_bytes = self.gradient_bytes = 0
        """Bytes of the outputs and of their gradients, once each exist."""
        self._rerun: Rerun | None = None
        self.reads, self.is_passed = None, False
        self._surroundings: Surroundings | None = None
        self._theirs: list[torch.Tensor] = []
        self._mine: list[weakref.ref[torch.Tensor]] = []
        self._call: Callable[..., Any] = tuple
        self._room: Callable[[BudgetedStep], tuple[int, int]] = lambda _: (0, 0)
        self._places_of_results: list[int] = []
        self._arrivals: Arrivals | None = None
        self._least_bytes = 0
        self.is_metered = False
        """True if a meter runs with the step."""
        self.tried_bytes = 0
        """Limit under which such a step ran before; 0 if unknown."""
        self.has_run = self.is_proved = False
        """True after a backward; after one in which all recomputed values were compared."""
        self.session = StepSession(
            limit,
            device=device,
            before_write=partial(_before_write, self._undo),
            root=module,
            **settings,
        )
        self.session.count_slack()
        self._ended = ended
        self.session.count([self._undo.random_state])

    # -- forward

    def forward(
        self,
        call: Callable[..., Any],
        value: Any,
        room: Callable[[BudgetedStep], tuple[int, int]],
        rerun: Rerun | None = None,
    ) -> Any:
        """Run ``call(*value)`` and return its result, in the graph of the caller.

        `room` is called with the step when its outputs are known, and returns the bytes to leave
        for the loss, and its known need. `rerun` is the state in which the forward begins, for
        backwards that are to be differentiated. Raises InfeasibleError if the limit cannot be kept;
        parameters, buffers and the random state are then as before.
        """
        outer, own, slots = _own_inputs(
            value, slots_with_tensors(self._modules, with_parameters=True)
        )
        inner = list(own.values())
        self._undo.inputs = tree_tensors(value)
        output = None
        found: list[torch.Tensor] = []
        held: list[torch.Tensor] = []
        self.session.note_results(inner)
        self._references = Counter({id(t): count for t, count in self.session.held()})
        if rerun is not None:
            self.session.count(rerun.copies())
            self._surroundings = rerun.surroundings
        self._room = room
        try:
            with (
                self.session.running(AS_OPERATORS),
                _OwnCasts(),
                substituted(value, own, slots) as mine,
            ):
                output = call(*mine)
            del mine
            found = list(_returned(output))
            self._pin(found)
            self.output_bytes = allocator.storage_bytes(found)
            returned = len(found)
            held = self._kept_elsewhere(found)
            self.session.keep(held)
            found += held
            nodes = _nodes([tensor.grad_fn for tensor in found])
            if any(map(backwards.is_reentrant, nodes)):
                raise Unfollowed(_REENTRANT)
            self._phase = "loss"
            self.session.leave_room(*room(self))
            self._least_bytes = self.session.current_bytes
        except BudgetError as error:
            output, found, held = None, [], []
            raise self._failed(error) from error
        except RecomputationError as error:
            output, found, held = None, [], []
            self._differed(error)
            raise
        except Unfollowed:
            self.undo()
            self.release()
            raise
        except BaseException:
            self.release()
            raise
        given = {id(mine): theirs for theirs, mine in zip(outer, inner, strict=True)}
        unique = {
            id(t): t for t in found if t.requires_grad and not t.is_leaf and id(t) not in given
        }
        self._output_count = sum(id(tensor) in unique for tensor in found[:returned])
        self._connect(list(unique.values()), inner, nodes)
        if unique:
            theirs = {id(mine): tensor for tensor, mine in zip(outer, inner, strict=True)}
            asked = [theirs.get(id(mine), mine) for mine in self._asked]
            if rerun is not None:
                everything = [
                    id(t) for t in (*output_tensors(output), *kept_tensors(self._modules))
                ]
                if all(key in everything and not t.retains_grad for key, t in unique.items()):
                    self._rerun, self._theirs = rerun, asked
                    # A closure over the step would make a cycle, and free the step too late.
                    self._call = call
                    self._places_of_results = [everything.index(key) for key in unique]
            results = _Node.apply(self, *asked)
            assert self._edges is not None
            numbers = backwards.inner_edges(nodes, self._edges)
            if numbers and self._rerun is not None:
                again, rerun, self._rerun = self._results_again, self._rerun, None
                results = around(results, rerun, again, asked, self._token, numbers, retains=True)
            self._mine = [*map(weakref.ref, results)]
            self._retained = backwards.Retained(nodes, self._edges, unique.values(), results)
            given |= dict(zip(unique, results, strict=True))
        self._watch(value, [given.get(id(t), t) for t in found])
        others = [mine for mine in inner if any(mine is tensor for tensor in found)]
        self._spared |= {id(own), id(inner), id(self._asked)}
        found, held, nodes, unique = [], [], [], {}
        output = exchanged(output, given)
        self._hand_over(given, others)
        if self._edges:
            _paused.add(self)
        else:
            self.release()
        return output

    def _pin(self, tensors: list[torch.Tensor]) -> None:
        """Keep tensors in memory; a variable of the caller would count as one that holds them."""
        for tensor in tensors:
            self.session.pin(tensor)

    def _token(self) -> BudgetedStep | None:
        """Return the step while its backward can run."""
        return None if self._edges is None else self

    def _results_again(self, value: Any) -> list[torch.Tensor]:
        """Return the node's outputs from a forward that runs again, without a session."""
        output = self._call(*value)
        everything = [*output_tensors(output), *kept_tensors(self._modules)]
        return [everything[k] for k in self._places_of_results]

    def _kept_elsewhere(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors beside outputs to which Python refers elsewhere than in the graph."""
        known = set(map(id, outputs))
        held = [
            pair
            for pair in self.session.held()
            if id(pair[0]) not in known and not backwards.is_of_checkpoint(pair[0])
        ]
        if any(count > self._references[id(tensor)] for tensor, count in held):
            nodes = _nodes([t.grad_fn for t in (*outputs, *(pair[0] for pair in held))])
            references, holders = self.session.held_by(nodes, held)
            self._references.update(references)
            self._spared |= holders
        return [tensor for tensor, count in held if count > self._references[id(tensor)]]

    def _connect(
        self, outputs: list[torch.Tensor], inner: list[torch.Tensor], nodes: list[Any]
    ) -> None:
        self._edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in outputs]
        self._outputs = outputs
        leaves = {id(n.variable): n.variable for n in nodes if hasattr(n, "variable")}
        mine = [tensor for tensor in inner if id(tensor) in leaves]
        known = {id(tensor) for tensor in mine}
        self._asked = [*mine, *(leaf for key, leaf in leaves.items() if key not in known)]

    def take_outputs(self) -> list[torch.Tensor]:
        """Return the outputs as tensors outside the inner graph, on the same storages, once."""
        outputs, self._outputs = self._outputs, []
        return [tensor.detach() for tensor in outputs]

    def _watch(self, value: Any, outputs: list[torch.Tensor]) -> None:
        """Note the versions of tensors that may be written to before the backward."""
        tensors = [*tree_tensors(value), *outputs]
        for module in self._modules:
            for slots in (core.parameter_slots(module), core.buffer_slots(module)):
                tensors.extend(where[name] for where, name in slots)
        self._watched = [(weakref.ref(t), t._version) for t in tensors if not t.is_inference()]

    # -- values of a forward that are kept elsewhere

    def _hand_over(self, given: dict[int, torch.Tensor], others: list[torch.Tensor]) -> None:
        """Replace tensors of the forward wherever Python refers to them, by `id`.

        The substitutes in `given` are in the graph of the caller; `others` are inputs that the
        forward has put somewhere.
        """
        exchange_kept(self._modules, given)
        # Attributes of modules are the usual place, and found faster than others.
        others += [
            tensor
            for tensor, count in self.session.held()
            if id(tensor) in given and not tensor.is_leaf and count > self._references[id(tensor)]
        ]
        self.session.forget_results()
        if others:
            replace_references(others, given, self._spared)

    # -- backward

    def backward(
        self, gradients: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the node's inputs, from its outputs' gradients.

        Raises InfeasibleError if the limit cannot be kept; parameters, their gradients, buffers and
        the random state are then as before the forward. Raises RuntimeError if a backward has run
        already and did not keep the graph, a tensor that the recomputation needs was written to
        since the forward, or this is part of another step's backward.
        """
        if current() is self.session:  # A hook inside, say, differentiates values kept elsewhere.
            asked = list(filter(backwards.is_asked_for, self._asked))
            own = self._made(gradients, asked, keeps=core.keeps_graph())
            by_leaf = dict(zip(map(id, asked), own, strict=True))
            return [by_leaf.get(id(leaf)) for leaf in self._asked]
        if current() is not None:
            raise RuntimeError(
                "a forward of the dynamic engine has read a result of an earlier one from a global "
                "name or a closure, and the gradient of that is not known: pass it as an argument, "
                'keep it in an attribute of the model, or use engine="auto"'
            )
        edges = self._edges or []
        roots = [k for k, gradient in enumerate(gradients) if gradient is not None]
        rerun = self._rerun
        if (
            roots
            and rerun
            and rerun.is_wanted(gradients, self._theirs, repeats=self._edges is not None)
        ):
            made_again = rerun.gradients(self._results_again, gradients, self._theirs, self._mine)
            return [made_again.pop(id(tensor), None) for tensor in self._theirs]
        if roots and (torch.is_grad_enabled() or self._edges is None):
            raise RuntimeError(
                "a backward with create_graph=True, or after one without retain_graph=True, has to "
                "run the model's forward again, and does not find all of its results there, or one "
                "that retains its gradient: use the plain model (chk.module)"
            )
        asked = [leaf for leaf, need in zip(self._asked, needed, strict=True) if need]
        if not asked or not roots:
            if self.is_passed and not core.keeps_graph():
                self.release()
            return [None] * len(needed)
        # Only operators see the memory of batched gradients.
        is_batched = dispatch.in_batched_backward()
        if self._backward_began is not None:
            # The gradients of values kept elsewhere are known only after a metered step.
            known = () if is_batched else gradients[: self._output_count]
            self.gradient_bytes = allocator.storage_bytes(g for g in known if g is not None)
            self._backward_began(self)
            self._backward_began = None
        elif not is_batched:
            # The gradients of the first backward were counted, and are gone.
            self.session.count(gradients)
        self._phase = "backward"
        keeps = core.keeps_graph()
        try:
            written = [
                t for ref, was in self._watched if (t := ref()) is not None and t._version != was
            ]
            if written and self.session.has_lost(written):
                raise RuntimeError(
                    "an input, output, parameter or buffer of the model was written to in place "
                    "between its forward and its backward, and what was computed from it was "
                    "evicted: write to it after the backward, or to a copy"
                )
            additions = self._additions_to(asked)
            self._arrivals = Arrivals(asked)
            with (
                core.without_hooks(core.hooks_of(asked)),
                additions,
                self._arrivals,
                self._retained.made(edges, self.session.pin),
                self.session.running(AS_OPERATORS),
            ):
                made = self._made(gradients, asked, keeps=keeps)
            for gradient in made:
                if gradient is not None and not is_batched:
                    self.session.pin(gradient)
            found = additions.finish(asked, made)
            del made
            if keeps:
                # Another backward may follow, with its part of the loss.
                self.session.leave_room(self._room(self)[0], 0)
        except BudgetError as error:
            raise self._failed(error) from error
        except RecomputationError as error:
            self._differed(error)
            raise
        except BaseException:
            self.release()
            raise
        self.has_run, self.is_proved = True, self.session.is_verifying
        if not keeps:
            self.release()
        following = iter(found)
        return [next(following) if need else None for need in needed]

    def _made(
        self, gradients: Sequence[torch.Tensor | None], asked: list[torch.Tensor], *, keeps: bool
    ) -> tuple[torch.Tensor | None, ...]:
        edges = [e for e, g in zip(self._edges or [], gradients, strict=True) if g is not None]
        given = [g for g in gradients if g is not None]
        return torch.autograd.grad(edges, asked, given, retain_graph=keeps, allow_unused=True)

    def _additions_to(self, leaves: list[torch.Tensor]) -> Additions:
        """Return early additions to existing gradients; in a proved step as late as possible."""
        session = self.session
        session.additions = Additions(
            leaves,
            waits=session.is_verifying,
            is_trial=self._is_trial,
            prepare=session.pin,
            leave_room=session.leave_room,
            is_idle=partial(is_around, self),
        )
        return session.additions

    # -- the end

    @property
    def is_done(self) -> bool:
        """True if nothing is kept any more."""
        return self._ended is None

    @property
    def is_crowded(self) -> bool:
        """True if another step waits for its backward."""
        return any(step is not self for step in _paused)

    def undo(self) -> None:
        """Restore parameters, buffers, inputs, random states and the modules' Python state."""
        self._undo.run()
        if self._surroundings is not None:
            self._surroundings.restore()
        for attributes, before in self._attributes_before:
            for name in [name for name in attributes if name not in before]:
                del attributes[name]
            attributes.update(before)
        self._attributes_before = []

    def release(self) -> None:
        """Drop the values that the forward kept; evicted ones that outlive it are brought back."""
        if self._is_trial:
            self._is_trial = False
            self.undo()
        if self._edges is not None:
            self._edges.clear()
        self._edges = None
        self._outputs = []
        self._asked = []
        self._watched = []
        self._surroundings = None
        self._undo.clear()
        _paused.discard(self)
        ended, self._ended = self._ended, None
        if ended is not None:
            before = self.session.stats.overflows
            self.session.close(warn=False)
            if self.session.stats.overflows > before and sys.exception() is None:
                warn_caller(
                    "a step kept more than its outputs, the attributes of its modules and "
                    f"gradients: {exact_bytes(self.session.current_bytes)} were brought back at "
                    "its end, "
                    f"over the limit of {exact_bytes(self.session.limit or 0)}",
                    MemoryLimitWarning,
                )
            ended(self)

    def _differed(self, error: RecomputationError) -> None:
        """Restore everything after a recomputed value differed."""
        traceback.clear_frames(error.__traceback__)
        self.session.stop_verifying()
        self.undo()
        self.release()

    def _gradient_bytes(self) -> int:
        """Return the bytes of the gradients that this step has still to compute."""
        if self._arrivals is not None:
            return self._arrivals.missing_bytes
        slots = [slot for module in self._modules for slot in core.parameter_slots(module)]
        parameters = dict.fromkeys(where[name] for where, name in slots if where[name] is not None)
        gradients = backwards.gradients_of(parameters)
        missing = zip(parameters, gradients, strict=True)
        return sum(
            p.nbytes
            for p, gradient in missing
            if p.requires_grad and gradient is None and not core.is_away(p)
        )

    def _estimate(self, error: BudgetError) -> int:
        """Return a limit that is likely to suffice for a step that failed."""
        session = self.session
        to_come = self._gradient_bytes()
        # The operation's backward reads inputs and results, and makes gradients of both, beside
        # the loss.
        minimum = error.minimum_bytes + to_come + AHEAD[self._phase] * error.needed_bytes
        minimum += minimum // ESTIMATE_MARGIN[self._phase]
        if self._phase != "backward":
            return minimum
        # Without any eviction the memory in use would only shrink from now on, but for gradients.
        held = session.counters()["held_peak_bytes"] + SCRAPS_BYTES + session.outside_bytes
        most = held + to_come + error.needed_bytes
        minimum = min(minimum, most + most // HELD_MARGIN)
        least = self._least_bytes + LOSS_GRADIENTS * self.gradient_bytes
        return max(minimum, least + least // HELD_MARGIN)

    def _failed(self, error: BudgetError) -> InfeasibleError:
        # Evicted values that frames of the failed program hold would be brought back.
        traceback.clear_frames(error.__traceback__)
        minimum = self._estimate(error)
        self.undo()
        additions = self.session.additions
        added = additions.added if additions is not None else 0
        self.release()
        is_known = self.tried_bytes >= error.minimum_bytes
        refused = InfeasibleError(str(error), self.tried_bytes if is_known else minimum)
        self.explain(refused)
        gradients = "its gradients, "
        if added:
            gradients = f"but for {added} gradients that this step was added to already, "
        least = exact_bytes(refused.minimum_bytes)
        named = (
            f"a step took no more than {least} before: give such a limit"
            if is_known
            else f"try a limit of {least}, estimated with room for the operations and gradients "
            "that are still to come, which may be too little or more than needed"
        )
        return InfeasibleError(
            f"the {self._phase} does not fit: {refused}. The model, {gradients}buffers and the "
            f"random state are as they were before this step: {named}, or a smaller batch",
            refused.minimum_bytes,
        )

    def __del__(self) -> None:
        if self._ended is not None and not sys.is_finalizing():
            self._kept = ends.from_destructor(self.release)


class _Node(Function):
    @staticmethod
    def forward(ctx: Any, step: BudgetedStep, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(step.take_outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *ctx.step.backward(gradients, ctx.needs_input_grad[1:])


class _OwnCasts:
    """Separation of weights cast by autocast in the forward from weights cast outside of it."""

    def __enter__(self) -> None:
        torch.clear_autocast_cache()

    def __exit__(self, *_: object) -> None:
        torch.clear_autocast_cache()


def _before_write(undo: Undo, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
    """Save a tensor before the running forward writes to it; warn paused steps."""
    for step in list(_paused):
        step.session.protect(storage)
    return undo.save(storage)


def _own_inputs(
    value: Any, places: Iterable[tuple[core.Slot, Any]]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], list[core.Slot]]:
    """Return tensors of the caller's graph, inner substitutes by ``id``, and slots of such ones."""
    outer = {id(tensor): tensor for tensor in _computed(value)}
    slots = []
    for slot, held in places:
        if found := _computed(held):
            slots.append(slot)
            outer |= {id(tensor): tensor for tensor in found}
    own = {key: tensor.detach().requires_grad_() for key, tensor in outer.items()}
    return list(outer.values()), own, slots


def _computed(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_tensors(value) if t.requires_grad and not t.is_leaf]


def _returned(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a model's output."""
    found: dict[int, torch.Tensor] = {}
    exchanged(value, {}, found)
    yield from found.values()


def _nodes(roots: Sequence[Any]) -> list[Any]:
    """Return the nodes of a graph."""
    seen = dict.fromkeys(root for root in roots if root is not None)
    waiting = list(seen)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                waiting.append(node)
    return list(seen)
