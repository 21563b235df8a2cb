"""Private names of PyTorch that leave out of a capture what only other users of the graph read.

A graph that is neither run as Python nor given to Inductor needs no code, no names of the functions
that its operators came from, and no second description of the layouts of its tensors. Where
PyTorch has not all of the names, captures trace as they do without this file.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "alone",
    "graph_module",
    "laid_out_as",
    "lean_traces",
    "missing_name",
    "new_call",
    "relaid",
]

logger = logging.getLogger("rotor")

_NAMES = {
    "torch.fx._lazy_graph_module": ("_LazyGraphModule", "_use_lazy_graph_module"),
    "torch.fx.experimental.proxy_tensor": (
        "ProxyTorchDispatchMode",
        "TorchFunctionMetadataMode",
        "_extract_tensor_metadata",
        "fast_detach",
    ),
    "torch._C": (
        "_set_throw_on_mutable_data_ptr",
        "_set_warn_deprecated_on_mutable_data_ptr",
    ),
    "torch._dispatch.python": ("no_python_dispatcher",),
    "torch._functorch._aot_autograd.graph_compile": (),
    "torch._logging._internal": ("trace_log",),
    "torch._subclasses.fake_tensor": ("in_kernel_invocation_manager",),
    "torch._subclasses.functional_tensor": ("FunctionalTensorMode",),
}
"""Names that this file uses, by module."""


_NUMBER = re.compile(r"_\d+$")


@functools.cache
def missing_name() -> str | None:
    """Return the first of the private names that this PyTorch lacks, ``None`` if it has all."""
    for place, names in _NAMES.items():
        try:
            module = importlib.import_module(place)
        except ImportError:
            return place
        for name in names:
            if not hasattr(module, name):
                return f"{place}.{name}"
    return None


@contextmanager
def lean_traces(layouts: Mapping[Any, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Have graphs that are traced in the context hold their operators and tensors only.

    Where PyTorch lacks a name, tracing is left as it is.

    Parameters
    ----------
    layouts
        Operators whose results, fake tensors, a function of the arguments returns: PyTorch looks
        for them in no table.
    """
    missing = missing_name()
    if missing is not None:
        logger.debug(
            "captures trace all that PyTorch traces by itself, which takes longer: PyTorch %s has "
            "no %s",
            torch.__version__,
            missing,
        )
        yield
        return
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx import _lazy_graph_module as lazy
    from torch.fx.experimental import proxy_tensor

    def no_mode(tracer: Any) -> Any:
        return nullcontext()

    def no_description(tensor: Any, *_: Any, **__: Any) -> None:
        return None

    replaced: list[tuple[Any, str, Any]] = [
        (proxy_tensor, "TorchFunctionMetadataMode", no_mode),
        (proxy_tensor, "_extract_tensor_metadata", no_description),
        (proxy_tensor, "fast_detach", _detached),
    ]
    known: dict[Any, Callable[..., Any]] = {torch.ops.prim.device.default: _device_of}
    modes: list[Any] = [FunctionalTensorMode, proxy_tensor.ProxyTorchDispatchMode]
    replaced += [(mode, "__torch_dispatch__", _answering(mode, known)) for mode in modes]
    known = {**known, torch.ops.aten.detach.default: _detached_if_unknown}
    for operator, layout in (layouts or {}).items():
        known[operator] = functools.partial(_laid_out, layout)
    replaced.append((FakeTensorMode, "__torch_dispatch__", _answering(FakeTensorMode, known)))
    write = fx.GraphModule.print_readable

    def write_to_logs(module: Any, *args: Any, **kwargs: Any) -> str:
        return write(module, *args, **kwargs) if _are_logged() else ""

    replaced.append((fx.GraphModule, "print_readable", write_to_logs))
    with ExitStack() as undone:
        undone.enter_context(lazy._use_lazy_graph_module(True))
        for owner, name, other in replaced:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        yield


def _answering(mode: Any, known: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a mode's handler of operators that answers some calls by itself.

    Parameters
    ----------
    mode
        Class of the mode.
    known
        Functions of the mode and the arguments; ``NotImplemented`` leaves the call to the mode.
    """
    handle = mode.__torch_dispatch__

    def dispatch(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = known.get(function)
        if answer is not None and not kwargs:
            found = answer(self, *args)
            if found is not NotImplemented:
                return found
        return handle(self, function, types, args, kwargs)

    return dispatch


def _device_of(mode: Any, tensor: Any) -> Any:
    return tensor.device if type(tensor) is FakeTensor else NotImplemented


def _detached_if_unknown(mode: Any, tensor: Any) -> Any:
    """Return a detached fake tensor; PyTorch has more to do if the tensor's values are known."""
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode:
        return NotImplemented
    return NotImplemented if tensor.constant is not None else _detached(mode, tensor)


def _laid_out(layout: Callable[..., Any], mode: Any, *args: Any) -> Any:
    return layout(*args)


def _are_logged() -> bool:
    """Return whether PyTorch writes graphs of captures to a log."""
    from torch._functorch._aot_autograd import graph_compile
    from torch._logging import _internal

    names = "aot_joint_log", "aot_graphs_log"
    logs = [getattr(graph_compile, name, None) for name in names]
    return bool(_internal.trace_log.handlers) or any(
        log is None or log.isEnabledFor(logging.INFO) for log in logs
    )


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph, whose code is written when it is called, if PyTorch can."""
    if missing_name() is not None:
        return fx.GraphModule(root, graph)
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def alone(tensor: Any) -> torch.Tensor:
    """Return a fake tensor of a fake tensor's layout on a storage that just holds it."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _faked(made, tensor)


def laid_out_as(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return a new fake tensor of a mode in the layout of a tensor, with its need of a gradient."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        made = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )
        return FakeTensor(mode, made, tensor.device)


def relaid(tensor: Any, storage: torch.UntypedStorage, offset: Any) -> torch.Tensor:
    """Return a fake tensor of a fake tensor's layout on another storage.

    Parameters
    ----------
    tensor
        Fake tensor without a constant.
    storage
        The other storage, without memory.
    offset
        Elements from the storage's begin.
    """
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    made.set_(storage, offset, tensor.shape, tensor.stride())
    return _faked(made, tensor)


def _faked(made: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return a fake tensor of a tensor without memory, for the device of another fake one."""
    if missing_name() is not None:
        return FakeTensor(tensor.fake_mode, made, tensor.fake_device)
    found: Any = torch.Tensor._make_subclass(
        FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=tensor.fake_device
    )
    if tensor.fake_mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
    else:
        torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(vars(tensor))
    found.constant = None
    return found  # type: ignore[no-any-return]


def _detached(mode: Any, tensor: Any, include_real: bool = False) -> Any:
    """Return a fake tensor without a gradient on the same storage."""
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    with no_python_dispatcher(), in_kernel_invocation_manager(mode):
        made = torch.ops.aten.detach.default(tensor)
    return _faked(made, tensor)


def new_call(
    graph: fx.Graph, like: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Return a new call of a node's function, where nodes of a graph are being inserted.

    Parameters
    ----------
    graph
        The graph.
    like
        Node of any graph; the new name is its name, but for a number at the end.
    args, kwargs
        Arguments, which hold no symbol: nothing is searched for any.
    """
    name = _NUMBER.sub("", like.name)
    node = graph.create_node("call_function", like.target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
