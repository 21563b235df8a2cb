"""Core private names of PyTorch that rotor uses; importing fails if one is missing."""

from __future__ import annotations

import functools
import inspect
import itertools
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import Function, Variable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Have attributes of a class, a module or an object hold these values in the context."""
    before = {name: inspect.getattr_static(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


# -- modules, hooks, nested values

Slot = tuple[dict[str, Any], str]

NOTHING = nullcontext()
"""Context that does nothing."""


def _slots(slots: dict[str, Any]) -> list[Slot]:
    return [(slots, name) for name, value in slots.items() if value is not None]


def parameter_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of a module's own parameters: (its dictionary, the name)."""
    return _slots(module._parameters)


def buffer_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of a module's own buffers: (its dictionary, the name)."""
    return _slots(module._buffers)


def value_in(slot: Slot) -> Any:
    """Return what a slot holds, ``None`` if it is gone; the slots of a script have no ``get``."""
    slots, name = slot
    return slots[name] if name in slots else None  # noqa: SIM401


def reader(slots: Sequence[Slot]) -> Callable[[], Iterable[Any]]:
    """Return a function that returns what slots hold now, as `value_in` does."""
    if slots and all(isinstance(where, dict) for where, _ in slots):
        return functools.partial(map, dict.get, *map(list, zip(*slots, strict=True)))
    return functools.partial(map, value_in, slots)


def slots_of_module(module: nn.Module, *, with_parameters: bool = True) -> list[Any]:
    """Return the containers of a module's parameters, buffers, children, hooks and the like."""
    names = vars(nn.Module()).keys() - (() if with_parameters else {"_parameters"})
    return [value for name, value in vars(module).items() if name in names]


def child_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children by name, shared ones repeated (``named_children`` drops them)."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


child_slots: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Function that returns the dictionary in which a module keeps its children."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on the module itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def registries_of(module: nn.Module, *, with_parameters: bool) -> list[dict[str, Any]]:
    """Return the dictionaries of a module's parameters, buffers, children and hooks."""
    found = slots_of_module(module, with_parameters=with_parameters)
    return [slots for slots in found if isinstance(slots, dict)]


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions registered to run around the forward of the module itself."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


is_without_memory = torch.Tensor._is_zerotensor
"""Function that returns whether a tensor is zeros that PyTorch made no memory for."""


def hooks_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the dictionaries of hooks on these tensors, if any."""
    return [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]


def gradient_hooks_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the dictionaries of hooks on the gradients of leaves, made or accumulated, if any."""
    leaves = list(tensors)
    return hooks_of(leaves) + [h for leaf in leaves if (h := leaf._post_accumulate_grad_hooks)]


def has_accumulation_hooks(tensor: torch.Tensor, beside: int = 0) -> bool:
    """Return whether more hooks than `beside` run after a gradient of a tensor was accumulated."""
    return len(tensor._post_accumulate_grad_hooks or ()) > beside


@contextmanager
def without_hooks(hooked: list[Any]) -> Iterator[None]:
    """Keep these hooks from running: the outer backward runs them once."""
    kept = [(hooks, list(hooks.items())) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in kept:
            hooks.update(items)


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested tuples, lists and dictionaries, and their structure."""
    return _pytree.tree_flatten(value, _is_size)


def _is_size(value: Any) -> bool:
    # PyTorch would put a plain tuple together again.
    return type(value) is torch.Size


def tree_flatten_with_path(value: Any) -> tuple[list[Any], Any]:
    """Return (path, leaf) for each leaf of a nested value, and its structure."""
    return _pytree.tree_flatten_with_path(value, _is_size)


tree_unflatten = _pytree.tree_unflatten
"""Function that returns the nested value of a structure with these leaves."""


def parts_of(value: Any) -> tuple[list[Any], Any] | None:
    """Return the parts of a tuple, list, dictionary and the like, and its structure, if it is."""
    itself = id(value)  # Not `value`: PyTorch's function is in a cycle, which keeps `is_leaf`.
    leaves, spec = _pytree.tree_flatten(value, is_leaf=lambda one: id(one) != itself)
    return None if len(leaves) == 1 and leaves[0] is value else (leaves, spec)


_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)


def is_away(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor are in a second tier."""
    return bool(getattr(tensor, "is_away", False))


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense parts of a tensor: itself, or its parts if sparse, jagged or distributed.

    None if the memory cannot be read, as that of MKL-DNN's layout, or there is none, as of a tensor
    whose bytes are in a second tier.
    """
    if is_without_memory(tensor):
        return ()
    if tensor.layout == torch.strided:
        wrapper: Any = tensor
        if type(tensor) in _PLAIN_TYPES:
            return (tensor,)
        if not is_traceable_wrapper_subclass(wrapper):
            return () if is_away(tensor) else (tensor,)
        if hasattr(wrapper, "trigger_wait"):
            wrapper.trigger_wait()  # The result of a collective that may still be on its way.
        inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        tensors = [part for part in inner if isinstance(part, torch.Tensor)]
        return tuple(part for one in tensors for part in strided_parts(one))
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout == torch.jagged:
        jagged: Any = tensor
        lengths = jagged.lengths()
        made = (jagged.values(), jagged.offsets())
        return made if lengths is None else (*made, lengths)
    return ()


# -- autograd with less Python around it


def bare_apply(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for calls that are never under a functorch transform."""
    return super(Function, function).apply  # type: ignore[misc, no-any-return]


def run_backward(
    root: torch.Tensor, gradient: torch.Tensor | None, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `inputs`, ``None`` for independent ones; free the graph."""
    found: tuple[torch.Tensor | None, ...] = Variable._execution_engine.run_backward(
        (root,), (gradient,), False, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return found


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


# -- captured graphs


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, and of the parts of subclasses, by address."""
    storages = [part.untyped_storage() for t in tensors for part in strided_parts(t)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors on one storage share, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def places_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return plain tensors with aliases of their memory."""
    found = [t for t in tensors if type(t) in _PLAIN_TYPES and t.layout == torch.strided]
    return [] if in_functorch() else [(tensor, tensor.detach()) for tensor in found]


def put_places_back(places: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Put tensors back on the memory of their aliases; return those that had left it."""
    moved = [(t, alias) for t, alias in places if t.data_ptr() != alias.data_ptr()]
    for tensor, alias in moved:
        tensor.data = alias
    return [tensor for tensor, _ in moved]


def storage_reference(tensor: torch.Tensor) -> Any:
    """Return an object that reserves the identity of a tensor's storage, not its memory."""
    return StorageWeakRef(tensor.untyped_storage())


def saving_hooks() -> Any:
    """Return the functions with which autograd currently packs and unpacks saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def packs_with(pack: Callable[..., Any]) -> bool:
    """Return whether autograd currently packs saved tensors with `pack`."""
    hooks = saving_hooks()
    return hooks is not None and hooks[0] is pack


def callable_of(target: Any) -> Any:
    """Return the callable of an operator with the least overhead."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def updates_statistics(module: nn.Module) -> bool:
    """Return whether a module's forward changes buffers: running statistics, say."""
    from torch.nn.modules.batchnorm import _NormBase

    is_norm = isinstance(module, _NormBase)
    return is_norm and module.training and bool(getattr(module, "track_running_stats", False))


def is_operator(target: Any) -> bool:
    """Return True if the target of a node is an operator with one overload chosen."""
    return isinstance(target, torch._ops.OpOverload)


def schema_arguments(target: Any) -> list[Any]:
    """Return the arguments that an operator declares; none for other targets."""
    return list(target._schema.arguments) if is_operator(target) else []


def schema_return_names(target: Any) -> list[str]:
    """Return the names of an operator's results, empty for unnamed ones."""
    schema = getattr(target, "_schema", None)
    return [] if schema is None else [result.name or "" for result in schema.returns]


def attribute(module: nn.Module, target: str) -> Any:
    """Return the value that a node of a graph reads as an attribute."""
    return attrgetter(target)(module)


@functools.lru_cache(maxsize=4096)
def module_path(path: str) -> str:
    """Return a module's path as its model names it, from dynamo's source expression."""
    found = re.sub(r"L\['[^']*'\]|_modules|\['|'\]|\(\)", ".", path)
    return re.sub(r"\.+", ".", found).strip(".")


CAPTURE_ERRORS: tuple[type[BaseException], ...] = ()
"""Errors that ``torch.compile(fullgraph=True)`` raises if no single graph exists."""


def aot_backend(
    partition: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` with our partition of AOTAutograd's joint graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    global CAPTURE_ERRORS
    CAPTURE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
    )


def hands_gradients_over() -> bool:
    """Return whether the backward of a captured graph is handed the gradients of its outputs.

    PyTorch 2.11 holds them until that backward has returned.
    """
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def is_of_capture(error: BaseException) -> bool:
    """Return whether an error was raised while dynamo captured, before what it captured ran."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.endswith("/torch/_dynamo/convert_frame.py") for file in files)


HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
"""Names of the dictionaries of a module's hooks, which its call runs around its forward."""

COMPILED = "_compiled_call_impl"
"""Name of the call that a module's own ``compile()`` has made."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module, or its forward, is wrapped by ``torch.compile``."""
    compiled = hasattr(module.forward, "_torchdynamo_orig_callable")
    return compiled or getattr(module, COMPILED, None) is not None


def in_ddp() -> bool:
    """Return whether the forward of a DistributedDataParallel is running."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def one_graph() -> AbstractContextManager[object]:
    """Return a context in which dynamo cuts no graphs at DistributedDataParallel's buckets."""
    if not in_ddp():
        return NOTHING
    from torch._dynamo import config

    patch: AbstractContextManager[object] = config.patch(optimize_ddp=False)
    return patch


def fake_mode_of(nodes: Iterable[Any]) -> Any:
    """Return the fake mode in which the tensors of these nodes of a graph live."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    raise RuntimeError("the graph has no fake tensors")


real_tensors: Any = torch._subclasses.fake_tensor.unset_fake_temporarily
"""Context within a capture in which tensors are made with values."""

fake_mode: Any = torch._subclasses.FakeTensorMode
"""Mode in which tensors have every property except their values."""


def compiled_node(outputs: Iterable[torch.Tensor]) -> Any:
    """Return the node that runs a compiled call's backward, found from the call's outputs."""
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None][:_NODES_SEARCHED]
    # Outputs that are views are made from the call's results afterwards.
    following = (node for one in nodes for node, _ in one.next_functions if node is not None)
    known = itertools.chain(nodes, following)
    return next((node for node in known if node.name() == "CompiledFunctionBackward"), None)


_NODES_SEARCHED = 64


def output_number(tensor: torch.Tensor, node: Any) -> int | None:
    """Return the number of the node's output that a tensor is, or is a view of, if any."""
    following = () if tensor.grad_fn is None else tensor.grad_fn.next_functions
    edges = [(tensor.grad_fn, tensor.output_nr), *following]
    return next((number for one, number in edges if one is node), None)


keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Function that returns whether the running backward was asked to keep its graph."""


def splits_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the running backward leaves these parameters' gradients to another one.

    It does if the graph is kept and only gradients of other tensors were asked for.
    """
    if not keeps_graph():
        return False
    with torch.enable_grad():
        views = [p.view_as(p) for p in parameters if p.requires_grad and p.is_leaf]
    nodes: list[Any] = [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn]
    try:
        return bool(nodes) and not any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        # PyTorch does not expose the leaves that torch.autograd.grad was asked for.
        return False


def _history() -> Any:
    found = torch.accelerator.current_accelerator()
    memory = None if found is None else getattr(torch.get_device_module(found), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None


def has_history() -> bool:
    """Return whether the accelerator's allocator records its actions."""
    return torch.accelerator.is_available() and _history() is not None


def record_history(enabled: bool) -> None:
    """Start or stop recording the actions of the allocator, with stacks of Python."""
    _history()._record_memory_history("all" if enabled else None, stacks="python")


def dump_snapshot(path: Path) -> None:
    """Write the state of the allocator, and its recorded history, to a file."""
    _history()._dump_snapshot(str(path))


# -- required names

SUPPORTED = "PyTorch 2.11 to 2.14"

_REQUIRED = """
    Tensor._is_zerotensor _C._autograd._get_current_graph_task_keep_graph
    _C._autograd._profiler_enabled _C._autograd._top_saved_tensors_default_hooks
    _C._current_graph_task_id _C._dynamo.eval_frame.set_code_exec_strategy
    _C._functorch.peek_interpreter_stack _C._is_any_autocast_enabled _C._set_grad_enabled
    _C._will_engine_execute_node autograd.Variable._execution_engine.queue_callback
    autograd.Variable._execution_engine.run_backward autograd.forward_ad._current_level
    utils._python_dispatch.is_traceable_wrapper_subclass utils._pytree.tree_flatten
    utils._pytree.tree_flatten_with_path utils._pytree.tree_unflatten
"""


def check(required: str | Iterable[str] = _REQUIRED) -> None:
    """Raise ImportError if a private name that rotor needs is missing; a text has several."""
    missing = []
    for name in required.split() if isinstance(required, str) else required:
        try:
            pkgutil.resolve_name(f"torch.{name}")
        except AttributeError:
            missing.append(f"torch.{name}")
    if missing:
        raise ImportError(
            f"rotor does not work with PyTorch {torch.__version__}, which lacks "
            f"{', '.join(missing)}. It works with {SUPPORTED}: install one of these, or a rotor "
            "made for your PyTorch"
        )


@functools.cache
def attribute_reader() -> str:
    """Return the name of the method by which dynamo's variables read an attribute."""
    from torch._dynamo.variables.base import VariableTracker

    names = ("tp_getattro_impl", "var_getattr")  # The former since PyTorch 2.14.
    return next(name for name in names if hasattr(VariableTracker, name))


# -- functorch, and the end of a backward


def in_functorch() -> bool:
    """Return whether a ``torch.func`` transform (``grad``, ``vmap``, ...) is being applied."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_ad() -> bool:
    """Return whether a level of forward-mode differentiation is active."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


profiler_enabled_here = torch._C._autograd._profiler_enabled
"""Function that returns whether a profiler is recording in this thread."""


def in_checkpoint() -> bool:
    """Return whether a ``torch.utils.checkpoint`` that is not reentrant is running."""
    hooks = saving_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` runs as it is; dynamo is not imported."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    leave_untraced(call, reason)
    return call


def leave_untraced(function: Any, reason: str) -> None:
    """Have ``torch.compile`` run a function as it is."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    hide_from_dynamo(function)


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` leave the frames of a function, and those within, as they are."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def has_ranks() -> bool:
    """Return whether this process belongs to a group of processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return the number of this process among those that train together; 0 if it trains alone."""
    return torch.distributed.get_rank() if has_ranks() else 0


def default_store() -> Any:
    """Return the store through which all ranks of the default process group found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def whole_mesh(mesh: Any) -> Any:
    """Return the device mesh with all dimensions of which a mesh has some."""
    return mesh._get_root_mesh()


def is_distributed() -> bool:
    return has_ranks() and torch.distributed.get_world_size() > 1


check()
