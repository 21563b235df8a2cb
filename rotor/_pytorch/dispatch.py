"""Private PyTorch names of the dynamic runtime: modes, and storages that lose their bytes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import autograd, overrides
from torch.utils import _device, _python_dispatch

from rotor._pytorch import core, devices, pointers

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Function that returns a number that no other storage has while this one lives."""


graph_task = torch._C._current_graph_task_id
"""Function that returns the number of the backward that runs in this thread, -1 for none."""

current_node = torch._C._current_autograd_node
"""Function that returns the node of autograd that runs in this thread."""

without_modes: Any = torch._C._DisableTorchDispatch
"""Context in which no mode or subclass sees operators."""

modes_left: Any = _python_dispatch._disable_current_modes
"""Function that returns a context in which subclasses see operators, and no mode does."""

without_functions: Any = torch._C.DisableTorchFunction
"""Context in which no mode or subclass sees functions of PyTorch."""


def keys_kept() -> AbstractContextManager[object]:
    """Return a context after which this thread dispatches operators as before.

    A capture that fails within a transform of ``torch.func`` leaves keys excluded: no later
    operator of the thread would be seen by autograd.
    """
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, torch._C._dispatch_tls_local_exclude_set())


def hidden_from_hooks(is_hidden: Callable[[torch.Tensor], bool]) -> AbstractContextManager[object]:
    """Return a context in which the caller's saved-tensor hooks do not see some tensors."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return core.NOTHING
    pack, unpack = hooks

    def pack_others(tensor: torch.Tensor) -> tuple[bool, Any]:
        hides = is_hidden(tensor)
        return hides, tensor if hides else pack(tensor)

    def unpack_others(packed: tuple[bool, Any]) -> Any:
        return packed[1] if packed[0] else unpack(packed[1])

    return torch.autograd.graph.saved_tensors_hooks(pack_others, unpack_others)


def in_batched_backward() -> bool:
    """Return whether several backwards run as one (``is_grads_batched``)."""
    # One line: an interrupt between two would leave the level raised.
    return max(torch._C._vmapmode_increment_nesting(), torch._C._vmapmode_decrement_nesting()) > 1


def below_autograd() -> Any:
    """Return an object during whose life operators do not see autograd or autocast."""
    return (torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast())


def unconjugated(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """Return the tensor with these lazy bits set."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def has_modes() -> bool:
    """Return whether a mode sees the operators of this thread."""
    return bool(torch._C._len_torch_dispatch_stack())


def _kinds_of_modes() -> list[type[_python_dispatch.TorchDispatchMode]]:
    """Return the types of the active modes, the innermost first."""
    if not has_modes():
        return []
    return [type(mode) for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack())]


_TRACING = ("FakeTensorMode", "ProxyTorchDispatchMode")


def callers_tracer() -> str:
    """Return the name of what traces operators or has them return no numbers; empty if nothing."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    for kind in _kinds_of_modes():
        if kind.__name__ in _TRACING:
            return kind.__name__
    return "compiled autograd" if _compiles_backwards() else ""


def _compiles_backwards() -> bool:
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return autograd is not None and autograd.compiled_autograd_enabled


def callers_mode() -> str:
    """Return the name of a mode of the caller's that sees operators; empty without one.

    Those of PyTorch's own are none by which it runs or traces: captures go through these.
    """
    for kind in _kinds_of_modes():
        if kind.__module__.partition(".")[0] != "rotor" and not kind.is_infra_mode():
            return kind.__name__.lstrip("_")
    return ""


FakeTensor = torch._subclasses.FakeTensor


def innermost_modes() -> tuple[Any, Any]:
    """Return the innermost active modes, of operators and of functions."""
    functions = overrides._get_current_function_mode_stack()
    return _python_dispatch._get_current_dispatch_mode(), functions[-1] if functions else None


def backwards_within(
    mode: Any, joins: Callable[[Any], AbstractContextManager[object]]
) -> pointers.Place:
    """Return what runs every backward of this thread within a mode.

    A backward of another thread runs in the context that `joins` returns for its first tensors.
    """
    run = autograd._engine_run_backward  # type: ignore[attr-defined]
    owner = threading.get_ident()

    def run_within(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with mode if threading.get_ident() == owner else joins(outputs):
            return run(outputs, *args, **kwargs)

    return autograd, "_engine_run_backward", run_within


class Backward(NamedTuple):
    roots: tuple[Any, ...]
    """Nodes at which it began."""
    accumulates: bool
    """True if gradients are added to ``.grad``."""
    is_partial: bool
    """True if only some tensors' gradients were asked for."""


_backwards: list[Backward] = []


def running_backwards() -> list[Backward]:
    """Return the backwards that run, as far as they are watched."""
    return list(_backwards)


def in_nested_backward(earlier: Sequence[Backward]) -> bool:
    """Return whether a backward may run within the one that began after these."""
    return sum(all(this is not other for other in earlier) for this in _backwards) > 1


_waiting: dict[tuple[int, str], Callable[[], object]] = {}


def after_last_backward(thread: int, name: str, function: Callable[[], object]) -> None:
    """Have a function called once a thread's next backward has ended that makes no graph itself.

    It takes the place of an earlier one of this name.
    """
    _waiting[thread, name] = function


def forget_backwards(thread: int, name: str) -> None:
    """Call such a function no more."""
    _waiting.pop((thread, name), None)


def _end_backwards() -> None:
    me = threading.get_ident()
    for key in [key for key in _waiting if key[0] == me]:
        _waiting.pop(key)()


def watch_backwards() -> None:
    """Make every later backward known to `edges_of_leaves` and `after_last_backward`."""
    run = autograd._engine_run_backward  # type: ignore[attr-defined]
    if getattr(run, "is_watched", False):
        return

    def run_watched(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[2] if len(args) > 2 else kwargs.get("inputs", ())
        nodes = tuple([o.node if hasattr(o, "node") else o.grad_fn for o in outputs])
        if _compiles_backwards():
            _edges(nodes, None, _check_unplanned)
        this = Backward(nodes, bool(kwargs.get("accumulate_grad", False)), bool(inputs))
        makes_graph = args[1] if len(args) > 1 else kwargs.get("create_graph", False)
        is_last = not makes_graph and graph_task() < 0
        _backwards.append(this)
        try:
            return run(outputs, gradients, *args, **kwargs)
        finally:
            _backwards[:] = [other for other in _backwards if other is not this]
            if is_last and _waiting:
                _end_backwards()

    run_watched.is_watched = True  # type: ignore[attr-defined]
    autograd._engine_run_backward = run_watched  # type: ignore[attr-defined, assignment]


def edges_of_leaves(
    node: Any, is_idle: Callable[[Any], bool], *, may_return: bool = False
) -> dict[int, int] | None:
    """Return the number of edges to each leaf, by its ``id``, of the backward that runs a node.

    Edges from nodes that are idle have no gradients, and do not count. ``None`` if this backward
    was not seen, or does not add to ``.grad`` of every leaf; with `may_return`, it may return the
    gradients instead.
    """
    found = None
    for backward in list(_backwards):
        counts, is_through = _edges(backward.roots, node, is_idle)
        if not is_through:
            continue
        is_whole = may_return or (backward.accumulates and not backward.is_partial)
        if found is not None or not is_whole:
            return None
        found = counts
    return found


def _check_unplanned(node: Any) -> bool:
    """Return that a node's edges count; raise RuntimeError if its backward runs by a plan."""
    if getattr(getattr(type(node), "_forward_cls", None), "__module__", "").startswith("rotor."):
        raise RuntimeError(
            "compiled autograd sees each operator of this step, whose forward ran under a plan "
            "before it was on: put it around both, or leave it out"
        )
    return False


def _edges(
    roots: tuple[Any, ...], node: Any, is_idle: Callable[[Any], bool]
) -> tuple[dict[int, int], bool]:
    counts: dict[int, int] = {}
    seen: set[Any] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        this = waiting.pop()
        variable = getattr(this, "variable", None)
        if variable is not None:
            counts[id(variable)] = counts.get(id(variable), 0) + 1
        elif this not in seen:
            seen.add(this)
            following = [each for each, _ in this.next_functions if each]
            if is_idle(this):
                following = [each for each in following if not hasattr(each, "variable")]
            waiting.extend(following)
    return counts, node in seen


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """Mode whose handler is called without the wrapper that keeps dynamo out of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Parents first: a flag that is not set below follows its parent.
_CPU_PRECISIONS = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
_CUDA_PRECISIONS = (("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
_BLAS = torch.backends.cuda


def _precision_readers(names: tuple[tuple[str, str], ...]) -> tuple[Callable[[], str], ...]:
    # The older flags cannot be read once one of these was set; setting them sets these.
    return tuple(partial(torch._C._get_fp32_precision_getter, *name) for name in names)


_FLAGS: tuple[Callable[[], Any], ...] = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_mkldnn_enabled,
    *_precision_readers(_CPU_PRECISIONS),
    *_precision_readers(_CUDA_PRECISIONS),
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
)
_PLAIN_FLAGS = 3
_CPU_FLAGS = _PLAIN_FLAGS + len(_CPU_PRECISIONS)


def backend_flags() -> tuple[Any, ...]:
    """Return the settings of PyTorch's backends that change what kernels compute."""
    return tuple([read() for read in _FLAGS])


def write_flags(flags: tuple[Any, ...]) -> None:
    """Set the values that `backend_flags` returned."""
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch._C._set_mkldnn_enabled(flags[2])
    precisions, others = flags[_PLAIN_FLAGS:], flags[_CPU_FLAGS + len(_CUDA_PRECISIONS) :]
    for name, precision in zip((*_CPU_PRECISIONS, *_CUDA_PRECISIONS), precisions, strict=False):
        if torch._C._get_fp32_precision_getter(*name) != precision:
            torch._C._set_fp32_precision_setter(*name, precision)
    cudnn, benchmark, deterministic, half, bfloat16 = others
    torch._C._set_cudnn_enabled(cudnn)
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)
    _BLAS.matmul.allow_fp16_reduced_precision_reduction = half
    _BLAS.matmul.allow_bf16_reduced_precision_reduction = bfloat16


def default_device() -> torch.device | None:
    """Return the device of new tensors; ``None`` if none was set."""
    return _device.CURRENT_DEVICE


_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_ATTENTION_GETTERS = [getattr(torch._C, f"_get_{name}_enabled") for name in _ATTENTION]


def attention_kernels() -> list[bool]:
    """Return which kinds of kernels attention may take."""
    return [read() for read in _ATTENTION_GETTERS]


def set_attention_kernels(enabled: list[bool]) -> None:
    """Set what `attention_kernels` returned."""
    for name, flag in zip(_ATTENTION, enabled, strict=True):
        getattr(_BLAS, f"enable_{name}")(flag)


# Nodes of autograd that run no sum. A sum that is seen while one of them runs is the engine's,
# which adds up the gradients that reach a tensor from several sides.
_NODES = """
    Add Addbmm Addmm Addmv AdaptiveAvgPool2D Alias AsStrided AvgPool2D Baddbmm Bmm Cat Clone
    ConstantPadNd Convolution Cos Div Dot Embedding Exp Expand Gather Gelu Index IndexSelect
    LeakyRelu LogSoftmax MaskedFill MaxPool2DWithIndices Mean Mm Mul Mv NativeBatchNorm
    NativeDropout NativeLayerNorm Neg NllLoss Permute Relu Repeat ReshapeAlias Select Sigmoid
    Silu Sin Slice Softmax Split SplitWithSizes Squeeze Stack Sub Sum T Tanh ToCopy Transpose
    Unbind UnsafeSplit UnsafeView Unsqueeze View
"""
_WITHOUT_SUMS = frozenset(f"{name}Backward{k}" for name in _NODES.split() for k in (0, 1))


class _Owners(DispatchMode):
    """Recorder of the owners of the first argument of each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            # One reference belongs to the call itself.
            self.seen.append((sys.getrefcount(args[0]) - 1, *_owners(args[0])))
        return func(*args, **(kwargs or {}))


def _owners(tensor: Any) -> tuple[int, int]:
    """Return the numbers of owners of a tensor and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor.untyped_storage()))


@cache
def _sole_owners() -> tuple[int, int, int] | None:
    """Return the numbers of references to the first term of a sum that only the engine owns.

    They are those in Python, to the tensor, and to its storage; ``None`` if they cannot be counted.
    """
    if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    kept: list[Any] = []
    with torch.inference_mode(False), torch.enable_grad(), _Owners() as alone:
        x = torch.ones(4, requires_grad=True)
        torch.stack([x * 1, x * 2, x * 3, x * 4]).sum().backward()
    with torch.inference_mode(False), torch.enable_grad(), _Owners() as shared:
        x = torch.ones(4, requires_grad=True)
        parts: list[Any] = [x * 1, x * 2]
        for part in parts:
            part.grad_fn.register_hook(lambda made, _: kept.append(made))
        torch.stack(parts).sum().backward()
    if len(alone.seen) != 3 or len(set(alone.seen)) != 1 or len(shared.seen) != 1:
        return None
    return alone.seen[0] if shared.seen[0] > alone.seen[0] else None


def sole_owners() -> tuple[int, int, int] | None:
    """Return `_sole_owners` outside of modes, transforms and backwards; ``None`` within."""
    is_seen = has_modes() or graph_task() >= 0 or core.in_functorch()
    return None if is_seen else _sole_owners()


def is_engines(tensor: torch.Tensor) -> bool:
    """Return whether only autograd's engine holds the first term of a sum in a backward.

    Without a mode the engine adds to such a term in place; with one it makes a new tensor.
    """
    owners = _sole_owners()
    node: Any = current_node()
    return (
        owners is not None
        and node is not None
        and node.name() in _WITHOUT_SUMS
        and _owners(tensor) == owners[1:]
    )


@cache
def _integer_types() -> tuple[torch.dtype, ...]:
    kinds = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    plain = (t for t in kinds if not t.is_floating_point and not t.is_complex)
    return tuple(t for t in plain if t is not torch.bool)


_DLPACK_CODES = {
    0: (torch.int8, torch.int16, torch.int32, torch.int64),
    1: (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    2: (torch.float16, torch.float32, torch.float64),
    4: (torch.bfloat16,),
    5: (torch.complex32, torch.complex64, torch.complex128),
    6: (torch.bool,),
}


@cache
def _dlpack_types() -> dict[torch.dtype, int]:
    """Return DLPack's code, bits and lanes of data types, as one number each."""
    return {
        kind: code | 8 * kind.itemsize << 8 | 1 << 16
        for code, kinds in _DLPACK_CODES.items()
        for kind in kinds
    }


def handler_parts(device: torch.device) -> tuple[Any, ...]:
    """Return the parts of PyTorch that `rotor._core.Handler` needs (bind_dtr_private.h)."""
    return (
        torch.Tensor,
        (torch.Tensor, torch.nn.Parameter),
        torch.strided,
        torch._C._is_torch_function_mode_enabled,
        torch._C.DisableTorchFunction,
        torch._C._current_graph_task_id,
        torch.is_grad_enabled,
        torch.device("cpu"),
        _dlpack_types(),
        _FLAGS,
        write_flags,
        _PLAIN_FLAGS,
        _CPU_FLAGS,
        (torch.dtype, torch.layout, torch.device, torch.memory_format),
        torch.empty,
        core.set_grad_enabled,
        below_autograd,
        unconjugated,
        torch.UntypedStorage.clone,
        is_engines,
        -1 if (owners := sole_owners()) is None else owners[0],
        _integer_types(),
        devices.departure(device),
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )


batch_norm_without_statistics = torch.ops.aten._native_batch_norm_legit.no_stats


schema_of = attrgetter("_schema")
"""Function that returns the declared arguments and results of an operator."""


def owners_of(tensor: torch.Tensor) -> int:
    """Return the number of owners of a tensor; all variables of Python are one."""
    held: Any = tensor
    return int(held._use_count())


# -- collective operations, and tensors with parts on several processes


@cache
def _propagator() -> Any:
    name = "distributed.tensor._sharding_prop.ShardingPropagator"
    core.check([f"{name}._propagate_tensor_meta_non_cached"])
    return attrgetter(name)(torch)


@contextmanager
def layouts_unseen() -> Iterator[None]:
    """Hide from modes how DTensor finds the layouts of results, by operators on fake tensors."""
    if "torch.distributed.tensor" not in sys.modules:
        yield
        return
    propagator = _propagator()
    find = propagator._propagate_tensor_meta_non_cached

    def find_unseen(self: Any, schema: Any) -> Any:
        with modes_left():
            return find(self, schema)

    with core.replaced(propagator, _propagate_tensor_meta_non_cached=find_unseen):
        yield


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_COLLECTIVES = (*_FUNCTIONAL, "c10d")
"""Namespaces of operators in which several processes take part."""
_OF_RESULTS = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
"""Operators there in which only this process takes part."""


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", "")).split(".")[0]


def is_wait(target: Any) -> bool:
    """Return whether an operator waits for a collective."""
    return getattr(target, "namespace", "") in _COLLECTIVES and _name(target) == "wait_tensor"


def is_collective(target: Any, *, names: Sequence[str] = _COLLECTIVES) -> bool:
    """Return whether other processes take part in an operator."""
    return getattr(target, "namespace", "") in names and _name(target) not in _OF_RESULTS


def is_functional_collective(target: Any) -> bool:
    """Return whether an operator is a collective whose results are to be waited for."""
    return is_collective(target, names=_FUNCTIONAL)


@cache
def collective_names() -> frozenset[str]:
    """Return the names of all operators in which several processes take part, and of waits."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name for name in names if name.partition("::")[0] in _COLLECTIVES)


@cache
def _registry() -> Any:
    name = "distributed.distributed_c10d"
    core.check([f"{name}._resolve_process_group", f"{name}._world", "ScriptObject._type"])
    return attrgetter(name)(torch)


def _group_of(value: Any) -> Any:
    """Return the process group that an argument of a collective is or names; ``None`` for others.

    Groups of fake processes, and those that have ended, are none.
    """
    module = _registry()
    kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
    if kind is not None and kind.name() == "ProcessGroup":
        value = module.ProcessGroup.unbox(value)
    elif isinstance(value, str) and value in module._world.pg_names.values():
        value = module._resolve_process_group(value)
    is_real = value in module._world.pg_names if isinstance(value, module.ProcessGroup) else False
    return value if is_real and module.get_backend(value) != "fake" else None


def every_rank() -> range:
    """Return the numbers of all processes that train together; none without a group of them."""
    return range(torch.distributed.get_world_size() if core.has_ranks() else 0)


def known_groups() -> list[Any]:
    """Return the process groups of this process, in the order in which they were made."""
    return list(_registry()._world.pg_names)


def groups_among(values: Iterable[Any]) -> list[Any]:
    """Return the process groups that arguments of collectives are or name."""
    found = map(_group_of, values if core.has_ranks() else ())
    return list(dict.fromkeys(group for group in found if group is not None))


core.check(
    """
    Tensor._use_count _C.DisableTorchFunction _C._AutoDispatchBelowAutograd _C._DisableAutocast
    _C._DisableTorchDispatch _C._ForceDispatchKeyGuard
    _C._autograd._top_saved_tensors_default_hooks _C._current_autograd_node
    _C._dispatch_get_all_op_names autograd.Function._backward_cls._forward_cls
    _C._dispatch_tls_local_exclude_set _C._dispatch_tls_local_include_set
    _C._get_fp32_precision_getter _C._is_torch_function_mode_enabled
    _C._len_torch_dispatch_stack _C._set_fp32_precision_setter _C._vmapmode_decrement_nesting
    _C._vmapmode_increment_nesting _conj _neg_view autograd._engine_run_backward
    ops.aten._native_batch_norm_legit.no_stats overrides._get_current_function_mode_stack
    utils._device.CURRENT_DEVICE utils._python_dispatch._disable_current_modes
    utils._python_dispatch._get_current_dispatch_mode
    utils._python_dispatch._get_current_dispatch_mode_stack
    """
)
