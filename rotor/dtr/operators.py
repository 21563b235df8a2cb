"""Properties of operators that the runtime needs before it runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import dispatch

aten = torch.ops.aten

# Their outputs share storages with inputs although their schemas do not say so.
_HIDDEN_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias"}

# Position of `training`; positions 3 and 4 are running statistics, which are written to in training
# though not all schemas say so, and which the outputs do not depend on then.
_BATCH_NORMS = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
}

# Position of the dropout, followed by that of the flag for training. Masks come from a state beside
# the generators, so a second run would make other results.
_OWN_STATES = {"aten::_cudnn_rnn": 11, "aten::miopen_rnn": 9}

# Operators of PyTorch and its libraries repeat, unless they say that they draw random numbers.
_OWN_NAMESPACES = {
    *("aten", "prims", "prim", "mkldnn", "mkl", "onednn", "quantized", "_quantized", "sparse"),
    *("torchvision", "inductor", "_c10d_functional", "c10d", "c10d_functional", "profiler"),
}

# They change the size of a storage, or what a tensor lies on.
_RESHAPING = {
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::_resize_output_",
    "aten::resize_as_sparse_",
}


# Floating-point arguments say how many elements they make.
_SIZED_BY_FLOATS = {"aten::arange", "aten::range", "aten::linspace", "aten::logspace"}


class Operator:
    """Properties of one overload: how it uses its arguments.

    Attributes
    ----------
    call
        The overload.
    name
        As in ``aten::add``.
    is_view
        Reads no elements: every result lies on the storage of an argument.
    is_fresh
        Its argument is a tensor that was just made and that no other code holds (``lift_fresh``).
    written
        Positions and names of the arguments that it writes to.
    is_random
        Draws random numbers.
    is_custom
        Not one of PyTorch's own: what it depends on is unknown.
    dropout
        Position of a dropout that no generator decides on, and before that of ``train``; -1 for
        other operators.
    training
        Position of the flag that a batch normalisation takes, -1 for other operators.
    is_reshaping
        Replaces or resizes storages.
    varies
        The sizes of its results depend on the elements that it reads.
    kernel
        All this for the handler in C.

    Parameters
    ----------
    call
        The overload.
    is_watched
        Python runs it, though nothing about it is unusual.
    """

    __slots__ = (
        "call",
        "dropout",
        "is_custom",
        "is_fresh",
        "is_random",
        "is_reshaping",
        "is_view",
        "kernel",
        "name",
        "replay",
        "training",
        "varies",
        "written",
    )

    def __init__(self, call: Any, *, is_watched: bool = False) -> None:
        schema = dispatch.schema_of(call)
        self.call: Callable[..., Any] = call
        self.name: str = schema.name
        self.written: list[int | str] = [
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_view = self.name in _HIDDEN_VIEWS or (
            len(schema.returns) > 0
            and not self.written
            and all(result.alias_info is not None for result in schema.returns)
        )
        self.is_fresh = call is aten.lift_fresh.default
        tags = call.tags
        self.is_custom = self.name.partition("::")[0] not in _OWN_NAMESPACES
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.dropout = _OWN_STATES.get(self.name, -1)
        self.varies = torch.Tag.dynamic_output_shape in tags
        self.training = _BATCH_NORMS.get(self.name, -1)
        if len(schema.arguments) <= self.training:
            self.training = -1
        self.is_reshaping = self.name in _RESHAPING
        self.replay: Callable[..., Any] = call
        if self.training >= 0 and self.written:
            self.replay = _without_statistics
        is_plain = not (
            self.is_random
            or self.is_custom
            or self.is_view
            or self.varies
            or self.is_reshaping
            or self.training >= 0
            or is_watched
        )
        self.kernel = _core.Kernel(
            self,
            dispatch.direct_call(call),
            dispatch.direct_call(aten.add_.Tensor) if call is aten.add.Tensor else None,
            tuple(where for where in self.written if isinstance(where, int)),
            is_view=self.is_view and not self.is_fresh,
            is_simple=is_plain and all(isinstance(where, int) for where in self.written),
            sizes_by_value=self.name in _SIZED_BY_FLOATS
            or any("scale_factors" in argument.name for argument in schema.arguments),
        )


def _without_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _mean: None,
    _variance: None,
    *settings: Any,
) -> Any:
    return dispatch.batch_norm_without_statistics(x, weight, bias, *settings)
