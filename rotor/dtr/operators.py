"""Properties of operators that the runtime needs before it runs them.

Most are read from an operator's schema and tags. `ODD_OPERATORS` has what they do not say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from rotor import _core
from rotor._pytorch import core, dispatch
from rotor.common.ranks import run_and_wait

aten = torch.ops.aten

# Operators of PyTorch and its libraries repeat, unless they say that they draw random numbers.
_OWN_NAMESPACES = {
    *("aten", "prims", "prim", "mkldnn", "mkl", "onednn", "quantized", "_quantized", "sparse"),
    *("torchvision", "inductor", "_c10d_functional", "c10d", "c10d_functional", "profiler"),
    "rotor_tier",
}


class Treatment(NamedTuple):
    """Deviation of an operator from its schema and tags."""

    is_view: bool = False
    """Every result shares a storage with an argument."""
    is_fresh: bool = False
    """Its argument is a tensor that was just made and that no other code holds."""
    hidden: tuple[int, ...] = ()
    """Positions of arguments that it writes to where the argument at `hidden_if` is true; the
    results do not depend on them then.
    """
    hidden_if: int = -1
    replay: Callable[..., Any] | None = None
    """Function that runs instead when it is computed again; where the operator has hidden
    arguments, only if its schema says that it writes to arguments.
    """
    kept_if: int = -1
    """Position of two arguments; where both are true, a second run would make other results."""
    reshapes: bool = False
    """It changes the size of a storage, or the storage of a tensor."""
    sizes_by_value: bool = False
    """Floating-point arguments say how many elements it makes."""
    varies_if: Callable[[Any], bool] | None = None
    """Function of the positional arguments that returns whether the sizes of results depend on
    elements; ``None``: they do if a tag says so.
    """
    result_bytes: Callable[[Any, bool], int] | None = None
    """Function of the positional arguments and of a flag that returns the bytes of such results:
    exactly, or the most that it could be.
    """
    scales_workspace: bool = False
    """Its workspace grows with such results."""
    in_place: Any = None
    """Operator that writes the sum of two tensors into the first."""
    needs: Callable[[Any], tuple[int, int]] | None = None
    """Function of the positional arguments that returns the bytes that it makes, and those that it
    takes beside them, where these are known before it runs.
    """


def on_meta(value: Any) -> Any:
    """Return arguments with tensors on the meta device; NotImplementedError unless strided."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)([on_meta(item) for item in value])
    if isinstance(value, dict):
        return {name: on_meta(item) for name, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _without_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _mean: None,
    _variance: None,
    *settings: Any,
) -> Any:
    return dispatch.batch_norm_without_statistics(x, weight, bias, *settings)


def _true(mask: torch.Tensor, exactly: bool) -> int:
    return int(torch.count_nonzero(mask)) if exactly else mask.numel()


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _masked_bytes(args: Any, exactly: bool) -> int:
    x: torch.Tensor = args[0]
    mask: torch.Tensor = args[1]
    numel: int = torch.broadcast_shapes(x.shape, mask.shape).numel()
    return _true(mask, exactly) * (numel // max(mask.numel(), 1)) * x.element_size()


def _indexed_bytes(args: Any, exactly: bool) -> int:
    indices: list[Any] = []
    for index in args[1]:
        if _is_mask(index):
            place = torch.empty(_true(index, exactly), dtype=torch.int64, device="meta")
            indices.extend([place] * index.dim())
        else:
            indices.append(on_meta(index))
    result: torch.Tensor = aten.index.Tensor(on_meta(args[0]), indices)
    x: torch.Tensor = args[0]
    return result.numel() * x.element_size()


def _counted_bytes(args: Any, _: bool) -> int:
    x: torch.Tensor = args[0]
    return (int(x.max()) + 1 if x.numel() else 0) * 8


# Positions of running statistics, and of `training`: not all schemas say that they are written to.
_BATCH_NORM = Treatment(hidden=(3, 4), hidden_if=5, replay=_without_statistics)


def _alike(names: str, treatment: Treatment) -> dict[str, Treatment]:
    return dict.fromkeys([f"aten::{name}" for name in names.split()], treatment)


ODD_OPERATORS: dict[str, Treatment] = {
    **_alike("_unsafe_view _reshape_alias", Treatment(is_view=True)),
    "aten::lift_fresh": Treatment(is_fresh=True),
    "aten::add.Tensor": Treatment(in_place=aten.add_.Tensor),
    "aten::native_batch_norm": _BATCH_NORM,
    "aten::cudnn_batch_norm": _BATCH_NORM._replace(replay=aten.cudnn_batch_norm.default),
    "aten::miopen_batch_norm": _BATCH_NORM._replace(replay=aten.miopen_batch_norm.default),
    "aten::_native_batch_norm_legit": _BATCH_NORM,
    # Followed by the flag for training. Masks come from a state beside the generators.
    "aten::_cudnn_rnn": Treatment(kept_if=11),
    "aten::miopen_rnn": Treatment(kept_if=9),
    # The result is a wrapper of the argument, without memory of its own.
    "_c10d_functional::_wrap_tensor_autograd": Treatment(is_view=True),
    **_alike("resize_ resize_as_ set_ _resize_output_ resize_as_sparse_", Treatment(reshapes=True)),
    **_alike("arange range linspace logspace", Treatment(sizes_by_value=True)),
    "aten::nonzero": Treatment(
        result_bytes=lambda args, exactly: _true(args[0], exactly) * int(args[0].dim()) * 8
    ),
    "aten::masked_select": Treatment(result_bytes=_masked_bytes),
    # The positions of masks are its workspace.
    "aten::index": Treatment(
        varies_if=lambda args: any(map(_is_mask, args[1])),
        result_bytes=_indexed_bytes,
        scales_workspace=True,
    ),
    **_alike(
        "unique_consecutive _unique _unique2 unique_dim",
        Treatment(result_bytes=lambda args, _: args[0].numel() * (args[0].element_size() + 16)),
    ),
    "aten::bincount": Treatment(result_bytes=_counted_bytes),
    "aten::repeat_interleave.Tensor": Treatment(
        result_bytes=lambda args, _: int(args[0].sum()) * 8
    ),
}
"""Facts beyond schemas and tags, by the name of an operator or of one of its overloads."""

_ORDINARY = Treatment()


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class Operator:
    """One overload, and how it uses its arguments.

    `name` is as in ``aten::add``; `written` has the positions and names of the arguments that it
    writes to. With `is_custom` it is not one of PyTorch's own: its dependences are unknown. With
    `varies` the sizes of its results may depend on the elements that it reads. `kernel` tells the
    handler in C all of this.
    """

    __slots__ = ("call", "is_custom", "kernel", "name", "treatment", "varies", "written")

    def __init__(self, call: Any) -> None:
        schema = dispatch.schema_of(call)
        self.call: Callable[..., Any] = call
        self.name: str = schema.name
        overload = f"{schema.name}.{schema.overload_name or 'default'}"
        odd = ODD_OPERATORS.get(overload, ODD_OPERATORS.get(schema.name, _ORDINARY))
        self.treatment = odd
        # Their schemas do not say to which of their tensors they write.
        is_raw = self.name.startswith("c10d::")
        self.written: list[int | str] = [
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if _is_written(argument) or (is_raw and "Tensor" in str(argument.type))
        ]
        self.is_custom = self.name.partition("::")[0] not in _OWN_NAMESPACES
        self.varies = torch.Tag.dynamic_output_shape in call.tags
        has_flag = odd.hidden_if < len(schema.arguments)
        function = replay = core.callable_of(call)
        if dispatch.is_functional_collective(call):
            # While it runs, none of its tensors may be evicted.
            function = partial(run_and_wait, call)
        if odd.replay is not None and (not odd.hidden or (has_flag and self.written)):
            replay = odd.replay
        self.kernel = _core.Kernel(
            self,
            self.name,
            function,
            replay,
            None if odd.in_place is None else core.callable_of(odd.in_place),
            tuple(where for where in self.written if isinstance(where, int)),
            tuple(where for where in self.written if isinstance(where, str)),
            odd.hidden if has_flag else (),
            odd.hidden_if if has_flag else -1,
            odd.kept_if,
            self._traits(schema),
        )

    def _traits(self, schema: Any) -> int:
        """Return the sum of the traits that C knows."""
        odd, tags = self.treatment, self.call.tags  # type: ignore[attr-defined]
        shares = all(result.alias_info is not None for result in schema.returns)
        is_scaled = any("scale_factors" in argument.name for argument in schema.arguments)
        is_view = odd.is_view or (len(schema.returns) > 0 and not self.written and shares)
        traits = {
            _core.TRAIT_VIEW: is_view,
            _core.TRAIT_FRESH: odd.is_fresh,
            _core.TRAIT_RANDOM: torch.Tag.nondeterministic_seeded in tags,
            _core.TRAIT_CUSTOM: self.is_custom,
            _core.TRAIT_VARIES: self.varies,
            _core.TRAIT_RESHAPES: odd.reshapes,
            _core.TRAIT_SIZES_BY_VALUE: odd.sizes_by_value or is_scaled,
            _core.TRAIT_POINTWISE: torch.Tag.pointwise in tags and not self.is_custom,
        }
        return sum(trait for trait, has in traits.items() if has)


KERNELS: dict[Any, _core.Kernel] = {}
"""The kernels of all operators that ran under a budget in this process."""


def kernel_of(call: Any) -> _core.Kernel:
    """Return the kernel of an operator, which is made once."""
    kernel = KERNELS.get(call)
    if kernel is None:
        kernel = KERNELS[call] = Operator(call).kernel
    return kernel
