"""How to run an operation again: its operator and arguments, without any tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor import _dispatch, _torch
from rotor.dtr.operators import Operator

Flags = tuple[Any, ...]


class Spec:
    """A tensor argument: which node it lies on, and how.

    It keeps neither tensor nor storage.
    """

    __slots__ = ("bits", "device", "dtype", "node", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor, node: int) -> None:
        self.node = node
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.device = tensor.device
        conjugate, negative = tensor.is_conj(), tensor.is_neg()
        self.bits = (conjugate, negative) if conjugate or negative else None

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        if self.bits is not None:
            tensor = _dispatch.unconjugated(tensor, *self.bits)
        return tensor


def pattern(value: Any, nodes: dict[int, int]) -> Any:
    """An argument with a `Spec` in the place of each tensor; nodes by the tensor's ``id``."""
    if isinstance(value, torch.Tensor):
        return Spec(value, nodes[id(value)])
    if isinstance(value, list | tuple):
        return [pattern(item, nodes) for item in value]
    return value


def filled(value: Any, tensor_of: Callable[[Spec], torch.Tensor]) -> Any:
    """The argument with tensors again."""
    if isinstance(value, Spec):
        return tensor_of(value)
    if isinstance(value, list):
        return [filled(item, tensor_of) for item in value]
    return value


class Record:
    """An operation that may run again.

    Attributes
    ----------
    operator
        What ran.
    args, kwargs
        Its arguments, with `Spec` for tensors.
    outputs
        Of each output node: the index of the result that lies on it, or -1 where the operation
        writes to its origin.
    origins
        The nodes that it writes to, parallel to `outputs`; -1 for none.
    grad_enabled, flags
        The settings that it ran under.
    generator, state
        The random number generator, and its state before.
    needs, counted_bytes
        What it takes, which may become known later; the part of its workspace that the book
        knows.
    """

    __slots__ = (
        "args",
        "counted_bytes",
        "flags",
        "generator",
        "grad_enabled",
        "kwargs",
        "needs",
        "operator",
        "origins",
        "outputs",
        "state",
    )

    def __init__(
        self,
        operator: Operator,
        args: list[Any],
        kwargs: dict[str, Any],
        outputs: list[int],
        origins: list[int],
        grad_enabled: bool,
        flags: Flags,
        generator: torch.Generator | None,
        state: torch.Tensor | None,
        needs: Needs,
        counted_bytes: int,
    ) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.origins = origins
        self.grad_enabled = grad_enabled
        self.flags = flags
        self.generator = generator
        self.state = state
        self.needs = needs
        self.counted_bytes = counted_bytes

    def run(self, storage_of: Callable[[int], torch.UntypedStorage]) -> list[torch.Tensor]:
        """Run it on these storages of its nodes, as it ran first.

        Returns
        -------
        list
            Its results in order.
        """

        def tensor_of(spec: Spec) -> torch.Tensor:
            return spec.on(storage_of(spec.node))

        now = torch.is_grad_enabled()
        flags = _dispatch.backend_flags() if self.flags is not None else None
        state = None
        try:
            _torch.set_grad_enabled(self.grad_enabled)
            if flags != self.flags:
                write_flags(self.flags)
            if self.generator is not None:
                state = self.generator.get_state()
                assert self.state is not None
                self.generator.set_state(self.state)
            with _dispatch.BelowAutograd():
                results = self.operator.replay(
                    *filled(self.args, tensor_of),
                    **{name: filled(value, tensor_of) for name, value in self.kwargs.items()},
                )
        finally:
            if state is not None and self.generator is not None:
                self.generator.set_state(state)
            if flags != self.flags and flags is not None:
                write_flags(flags)
            _torch.set_grad_enabled(now)
        return tensors_of(results)


class Needs:
    """What an operator takes on arguments of one layout.

    Attributes
    ----------
    made_bytes
        The storages that it makes.
    workspace_bytes
        The most that it has in use beside them.
    is_measured
        False while these are guesses.
    """

    __slots__ = ("is_measured", "made_bytes", "workspace_bytes")

    def __init__(self, made_bytes: int, workspace_bytes: int, is_measured: bool) -> None:
        self.made_bytes = made_bytes
        self.workspace_bytes = workspace_bytes
        self.is_measured = is_measured


def tensors_of(results: Any) -> list[torch.Tensor]:
    """The tensors among an operator's results, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, list | tuple):
        return [tensor for item in results for tensor in tensors_of(item)]
    return []


def write_flags(flags: Flags) -> None:
    """Set what `backend_flags` read."""
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch.set_float32_matmul_precision(flags[2])
    torch.backends.mkldnn.enabled = flags[3]
    torch.backends.cudnn.enabled = flags[4]
    torch.backends.cudnn.benchmark = flags[5]
    torch.backends.cudnn.deterministic = flags[6]
    torch.backends.cudnn.allow_tf32 = flags[7]
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = flags[8]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = flags[9]
