"""The running backward: what it was asked for, how to leave its transforms, what its code reads."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from rotor._pytorch import core

core.check(
    """
    _C._autograd.SavedTensor _C._autograd._get_sequence_nr _C._autograd._unsafe_set_version_counter
    _C._functorch.is_batchedtensor
    _C._functorch.is_legacy_batchedtensor _C._vmapmode_decrement_nesting
    _C._vmapmode_increment_nesting _C._will_engine_execute_node
    autograd._unsafe_preserve_version_counter autograd.graph._engine_run_backward
    utils.hooks.RemovableHandle.next_id
    """
)


def gradients_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return tensors' gradients; ``None`` for results that keep none, which PyTorch warns of."""
    return [t.grad if t is not None and (t.is_leaf or t.retains_grad) else None for t in tensors]


def hooks_made() -> int:
    """Return how many hooks of any kind this process has registered so far."""
    return int(RemovableHandle.next_id)


def in_pipeline() -> bool:
    """Return whether a schedule, or a stage, of a pipeline is running.

    A send in flight when a profiler ends is reported to the profiler later, in freed memory.
    """
    return _PIPELINES in sys.modules and _runs(_PIPELINES)


def in_split_backward() -> bool:
    """Return whether a pipeline's schedule runs the half of a backward in some thread."""
    return _runs(f"{_PIPELINES}._backward")


_PIPELINES = "torch.distributed.pipelining"


def _runs(name: str) -> bool:
    """Return whether code of a module, or of a package, is running in some thread."""
    frame: Any
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith(name):
                return True
            frame = frame.f_back
    return False


def is_of_checkpoint(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values, but the inputs of a checkpoint: of PyTorch 2.11."""
    return type(tensor.grad_fn).__name__ == "_NoopSaveInputsBackward"


def is_reentrant(node: Any) -> bool:
    """Return whether a node is that of ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
    return type(node).__name__ == "CheckpointFunctionBackward"


def is_asked_for(tensor: torch.Tensor) -> bool:
    """Return whether the running backward makes the gradient of a tensor, or passes through it."""
    try:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # PyTorch does not answer for the leaves that torch.autograd.grad was asked for.
        return True


def is_hooked(tensor: torch.Tensor) -> bool:
    """Return whether hooks of the caller's get the gradient of a tensor, not only observers."""
    hooks = (tensor._backward_hooks or {}).values()
    return not all(str(getattr(hook, "__module__", "")).startswith(_OBSERVERS) for hook in hooks)


_OBSERVERS = ("rotor.", "torch.distributed.")
"""Packages whose hooks on results only note that a backward has come so far."""


def inner_edges(nodes: Iterable[Any], edges: Sequence[Any]) -> list[int]:
    """Return the numbers of the edges from which others of a graph are computed, in their order."""
    if len(edges) < 2:
        return []
    used = {edge for node in nodes for edge in node.next_functions}
    found = [k for k, edge in enumerate(edges) if edge[:2] in used]
    return sorted(found, key=lambda k: edges[k].node._sequence_nr())


def edges_asked_for() -> set[tuple[Any, int]]:
    """Return the nodes, and numbers of their outputs, whose gradients running backwards return."""
    edges = [
        one if isinstance(one, GradientEdge) else _edge_of(one)
        for names in _locals_of(torch.autograd.graph._engine_run_backward.__code__)
        for one in names["args"][3]
    ]
    return {(edge.node, edge.output_nr) for edge in edges}


def _locals_of(code: CodeType) -> Iterator[dict[str, Any]]:
    """Yield the variables of a function's running calls, in all threads."""
    for start in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(start):
            if frame.f_code is code:
                yield frame.f_locals


_edge_of = torch.autograd.graph.get_gradient_edge


_IS_READABLE = all(hasattr(torch._C._autograd.SavedTensor, n) for n in ("data", "unpack_hook"))
"""True if this PyTorch tells what is saved as it is, without unpacking it."""


class Saved(NamedTuple):
    """Values that nodes of a graph keep for their backwards."""

    contexts: list[dict[str, Any]]
    """Attributes of the nodes of ``torch.autograd.Function``."""
    tensors: list[torch.Tensor]
    packed: list[Any]
    """Results of hooks on saved tensors: each entry is one reference."""


def saved_by(nodes: Iterable[Any]) -> Saved:
    """Return what nodes of a graph keep, without a call of the caller's hooks."""
    saved, names = Saved([], [], []), dict[type, list[str]]()
    for node in nodes:
        kind = type(node)
        if kind not in names:
            found = dir(kind) if _IS_READABLE else ()
            names[kind] = [name for name in found if name.startswith("_raw_saved_")]
        if isinstance(node, BackwardCFunction):
            saved.contexts.append(vars(node))
        for name in names[kind]:
            with suppress(RuntimeError):  # A backward has run already, and freed it.
                raw = getattr(node, name)
                for one in raw if isinstance(raw, list | tuple) else (raw,):
                    value = one.data
                    if one.unpack_hook is not None:
                        saved.packed.append(value)
                    elif value is not None:
                        saved.tensors.append(value)
    return saved


def bases_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that views among values hold outside of Python."""
    found = [value._base for value in values if isinstance(value, torch.Tensor)]
    return [base for base in found if base is not None]


@contextmanager
def cut(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let gradients of tensors go no further than to who asks for them."""
    numbers: dict[Any, set[int]] = {}
    for tensor in tensors:
        edge = _edge_of(tensor)
        numbers.setdefault(edge.node, set()).add(edge.output_nr)
    handles = [node.register_prehook(_without(own)) for node, own in numbers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without(numbers: Collection[int]) -> Any:
    def leave_out(gradients: Sequence[torch.Tensor | None]) -> Any:
        return tuple(None if k in numbers else g for k, g in enumerate(gradients))

    return leave_out


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a batch, as under ``is_grads_batched=True``."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor))


def load_checks() -> None:
    """Import what ``torch.autograd.grad`` imports at its first call: it would count as memory."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leave all ``torch.func`` transforms, and batches of gradients, in the context."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    batches = torch._C._vmapmode_increment_nesting()
    for _ in range(batches):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(batches - 1):
            torch._C._vmapmode_increment_nesting()


next_node: Any = torch._C._autograd._get_sequence_nr
"""Function that returns the number of the next node that autograd makes in this thread."""

version_kept: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Context in which writes to a tensor leave its version as it was."""


def are_related(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a graph knows that tensors are views of the same one, or one of the other."""
    bases = [tensor if tensor._base is None else tensor._base for tensor in (a, b)]
    return bases[0] is bases[1]


@contextmanager
def versions_set(pairs: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Give tensors these versions, and back their own when the context ends."""
    tensors = tuple(tensor for tensor, _ in pairs)
    own = tuple(tensor._version for tensor in tensors)
    set_versions = torch._C._autograd._unsafe_set_version_counter
    set_versions(tensors, tuple(version for _, version in pairs))
    try:
        yield
    finally:
        set_versions(tensors, own)


@contextmanager
def hooks_moved(tensor: torch.Tensor, newer: torch.Tensor) -> Iterator[None]:
    """Have a tensor's hooks called with the gradient of the same value in a newer graph.

    The tensor is joined to that graph inside. It leaves the older one, which would else live as
    long, unless it is a view or its gradient is retained: PyTorch moves that hook itself, with the
    part of the gradient that comes by this tensor.
    """
    stays = tensor.retains_grad or tensor._is_view()
    if hooks := tensor._backward_hooks:
        newer._backward_hooks, tensor._backward_hooks = hooks, None
        if stays:
            newer._backward_hooks = OrderedDict(hooks)
            hooks.clear()  # They would be called with None.
        if newer.grad_fn is not None:
            newer.grad_fn._register_hook_dict(newer)
    retained = tensor.grad if tensor.retains_grad else None
    if not stays:
        tensor.detach_()
    yield
    if tensor.retains_grad:
        tensor.grad = retained
        reference, before = weakref.ref(tensor), list[torch.Tensor | None]()

        def note(_: torch.Tensor) -> None:
            if (kept := reference()) is not None:
                before.append(kept.grad)

        def retain(gradient: torch.Tensor) -> None:
            if (kept := reference()) is not None:
                earlier = before.pop() if before else kept.grad
                kept.grad = gradient if earlier is None else earlier + gradient

        tensor.register_hook(note)
        newer.register_hook(retain)


class Retained:
    """Gradients of results from which a graph inside a node computes others, for the caller.

    By itself, the caller's tensor in `outer` would retain the part by its use outside alone. It
    retains the gradient of the result in `inner` instead; `nodes` and `edges` are of that graph.
    """

    def __init__(
        self,
        nodes: Iterable[Any],
        edges: Sequence[Any],
        inner: Iterable[torch.Tensor],
        outer: Sequence[torch.Tensor],
    ) -> None:
        self._outer = [*map(weakref.ref, outer)]
        self._before: dict[int, torch.Tensor | None] = {}
        used = {edge for node in nodes for edge in node.next_functions} if len(outer) > 1 else ()
        for k, (own, theirs) in enumerate(zip(inner, outer, strict=True)):
            if own.retains_grad or own._backward_hooks or edges[k][:2] in used:
                theirs.register_hook(self._noting(k, theirs._version))
                if own.retains_grad:
                    theirs.retain_grad()

    def _noting(self, k: int, version: int) -> Any:
        outer, before = self._outer[k], self._before

        def note(_: torch.Tensor | None) -> None:
            tensor = outer()
            if tensor is not None and tensor.retains_grad and tensor._version == version:
                before[k] = tensor.grad

        return note

    @contextmanager
    def made(self, edges: Sequence[Any], prepare: Any) -> Iterator[None]:
        """Have tensors retain what the backward inside makes, after a call of `prepare` with it."""
        handles = []
        while self._before:
            k, before = self._before.popitem()
            if (tensor := self._outer[k]()) is not None:
                tensor.grad = before
                handles.append(
                    edges[k].node.register_prehook(_retaining(tensor, edges[k], prepare))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _retaining(tensor: torch.Tensor, edge: Any, prepare: Any) -> Any:
    def retain(gradients: Sequence[torch.Tensor | None]) -> None:
        gradient = gradients[edge.output_nr]
        if gradient is not None:
            form = {} if gradient.is_sparse else {"memory_format": torch.contiguous_format}
            before = tensor.grad
            tensor.grad = gradient.clone(**form) if before is None else before + gradient
            prepare(tensor.grad)

    return retain


@contextmanager
def reads_noted() -> Iterator[None]:
    """Have captures in the context note what the code of backwards and of tensors' hooks reads.

    Dynamo runs it with the forward, and guards the values for the next forward, not for its
    backward.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

    def noting(run: Any) -> Any:
        def noted(self: Any, tx: Any, held: Any, *args: Any, **kwargs: Any) -> Any:
            # A context, or the hook, holds values of the forward.
            known, push = _sources_within(tx, held), InstructionTranslatorBase.push
            before, found = set(tx.output.guards), set[Any]()

            def pushing(self: Any, value: Any) -> None:
                found.add(value.source)
                push(self, value)

            with core.replaced(InstructionTranslatorBase, push=pushing):
                result = run(self, tx, held, *args, **kwargs)
            found |= {guard.originating_source for guard in tx.output.guards if guard not in before}
            scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
            names = {source.name for source in found - known if source}
            context = tx.output.tracing_context
            context.rotor_reads = getattr(context, "rotor_reads", set[str]()).union(
                name for name in names if _may_change(name, scope)
            )
            return result

        return noted

    def hooked(self: Any, tx: Any, name: str, hook: Any) -> Any:
        return noting(lambda self, tx, hook: register(self, tx, name, hook))(self, tx, hook)

    function: Any = AutogradFunctionApplyVariable
    register: Any = TensorVariable._method_register_hook
    with (
        core.replaced(function, trace_backward_graph=noting(function.trace_backward_graph)),
        core.replaced(TensorVariable, _method_register_hook=hooked),
    ):
        yield


def noted_reads() -> set[str]:
    """Return dynamo's expressions of what the backward of the running capture reads."""
    from torch._guards import TracingContext

    found: set[str] = getattr(TracingContext.get(), "rotor_reads", set())
    return found


def _may_change(expression: str, scope: dict[str, Any]) -> bool:
    """Return whether an expression is neither code nor a module."""
    try:
        value = eval(expression, dict(scope))
    except Exception:
        return False
    return not (callable(value) or isinstance(value, ModuleType))


def _sources_within(tx: Any, variable: Any) -> set[Any]:
    """Return the sources of the values that a variable of dynamo's holds by itself."""
    from torch._dynamo.variables.base import VariableTracker

    stored = tx.output.side_effects.store_attr_mutations
    saved = getattr(getattr(variable, "saved_tensors", None), "tensors", ())
    waiting, found, seen = [variable, *saved], set[Any](), dict[int, Any]()

    def note(one: Any) -> None:
        found.add(one.source)
        if one.source is None:
            waiting.extend(stored.get(one, {}).values())
        else:  # What that object holds may change after the forward.
            seen.update({id(part): part for part in vars(one).values()})

    while waiting:
        VariableTracker.visit(note, waiting.pop(), seen)
    return found
