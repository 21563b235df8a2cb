"""The private PyTorch names of the dynamic runtime: modes, and storages that lose their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import autograd, overrides
from torch.utils import _python_dispatch

from rotor import _torch


def has_storage_swap() -> bool:
    """Whether a storage can take over another's bytes without a copy (PyTorch 2.13)."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_bytes(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the bytes of two storages; tensors and graphs on them see nothing."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def empty_shell(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A storage that says it has `nbytes` and has none."""
    shell: Any = torch._C._construct_storage_from_data_pointer(0, device, nbytes)
    return shell  # type: ignore[no-any-return]


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has as long as this one lives."""
    return storage._cdata  # type: ignore[no-any-return]


def graph_task() -> int:
    """The number of the backward that runs in this thread, -1 for none."""
    return torch._C._current_graph_task_id()


class BelowAutograd:
    """Operators called in this context do not see autograd or autocast."""

    def __enter__(self) -> None:
        self._guards = (torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast())

    def __exit__(self, *_: object) -> None:
        del self._guards


def unconjugated(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """The tensor with these lazy bits set."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def dispatch_modes() -> int:
    """How many modes see the operators that this thread dispatches."""
    return torch._C._len_torch_dispatch_stack()


def without_modes() -> Any:
    """A context in which no mode or subclass sees operators."""
    return torch._C._DisableTorchDispatch()


FakeTensor = torch._subclasses.FakeTensor


def innermost_modes() -> tuple[Any, Any]:
    """What was entered last and is on, of the modes over operators and of those over functions."""
    functions = overrides._get_current_function_mode_stack()
    return _python_dispatch._get_current_dispatch_mode(), functions[-1] if functions else None


def in_function_modes() -> bool:
    """Whether a mode sees the functions of PyTorch that this thread calls."""
    return torch._C._is_torch_function_mode_enabled()


def without_functions() -> Any:
    """A context in which no mode or subclass sees functions of PyTorch."""
    return torch._C.DisableTorchFunction()


@contextmanager
def backwards_within(mode: Any) -> Iterator[None]:
    """Whatever backward this thread runs in the context runs within a mode too."""
    run = autograd._engine_run_backward  # type: ignore[attr-defined]
    owner = threading.get_ident()

    def run_within(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_within  # type: ignore[attr-defined]
    try:
        yield
    finally:
        autograd._engine_run_backward = run  # type: ignore[attr-defined]


@contextmanager
def dlpack_after(prepare: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """In the context `torch.to_dlpack`, which no mode sees, prepares its tensor."""
    homes: list[Any] = [torch, torch.utils.dlpack]
    export = torch.to_dlpack  # type: ignore[attr-defined]

    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As without a budget (`torch.to_dlpack`)."""
        prepare(tensor)
        return export(tensor, *args, **kwargs)

    for home in homes:
        home.to_dlpack = to_dlpack
    try:
        yield
    finally:
        for home in homes:
            home.to_dlpack = export


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """A mode whose handler is called without the wrapper that keeps dynamo out of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_FLAGS = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_deterministic_algorithms",
        "_get_deterministic_algorithms_warn_only",
        "_get_float32_matmul_precision",
        "_get_mkldnn_enabled",
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_cudnn_allow_tf32",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
    )
)


_CPU_FLAGS = 4


def backend_flags() -> tuple[Any, ...]:
    """The settings of PyTorch's backends that change what kernels compute."""
    return tuple([read() for read in _FLAGS])


def direct_call(function: Any) -> Any:
    """What an operator calls, without its wrapper in Python."""
    return getattr(function, "_op", function)


def handler_parts(device: torch.device) -> tuple[Any, ...]:
    """What PyTorch is to `rotor._core.Handler` (csrc/python/bind_dtr_handler.h)."""
    return (
        torch.Tensor,
        (torch.Tensor, torch.nn.Parameter),
        torch.strided,
        torch._C._is_torch_function_mode_enabled,
        torch._C.DisableTorchFunction,
        torch._C._current_graph_task_id,
        torch.is_grad_enabled,
        torch.device("cpu"),
        tuple(
            kind
            for kind in vars(torch).values()
            if isinstance(kind, torch.dtype) and kind.is_complex
        ),
        _FLAGS,
        "_cdata",
        _CPU_FLAGS,
        (torch.dtype, torch.layout, torch.device, torch.memory_format),
        None if device.type == "cpu" else torch.cuda.is_current_stream_capturing,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )


batch_norm_without_statistics = torch.ops.aten._native_batch_norm_legit.no_stats


def schema_of(function: Any) -> Any:
    """What an operator's arguments and results are."""
    return function._schema


in_functorch = _torch.in_functorch


_torch.check(
    (
        "_C._AutoDispatchBelowAutograd",
        "_C._DisableAutocast",
        "_C._DisableTorchDispatch",
        "_C._is_torch_function_mode_enabled",
        "_C.DisableTorchFunction",
        "autograd._engine_run_backward",
        "overrides._get_current_function_mode_stack",
        "utils._python_dispatch._get_current_dispatch_mode",
        "_C._construct_storage_from_data_pointer",
        "_C._len_torch_dispatch_stack",
        "_conj",
        "_neg_view",
        "ops.aten._native_batch_norm_legit.no_stats",
    )
)
