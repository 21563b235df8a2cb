"""Every private name of Inductor that rotor uses; looked for when Inductor is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core

_REQUIRED = (
    "_guards.TracingContext.report_output_strides",
    "_guards.tracing",
    "_inductor.choices.InductorChoices.can_fuse_horizontal",
    "_inductor.compile_fx.compile_fx_inner",
    "_inductor.config.patch",
    "_inductor.cpp_builder.get_cpp_compiler",
    "_inductor.decomposition.select_decomp_table",
    "_inductor.exc.InvalidCxxCompiler",
    "_inductor.fx_passes.joint_graph.joint_graph_passes",
    "_inductor.virtualized.V.set_choices_handler",
    "_inductor.virtualized.V.set_fake_mode",
    "fx.passes.fake_tensor_prop.FakeTensorProp",
    "ops.prims.inductor_force_stride_order.default",
    "ops.prims.inductor_seeds.default",
)


def check() -> None:
    """Look for what Inductor needs here.

    Raises
    ------
    ImportError
        Private names are missing; the message says which, and which PyTorch versions work.
    RuntimeError
        There is no C++ compiler.
    """
    for name in (
        "choices",
        "compile_fx",
        "cpp_builder",
        "decomposition",
        "fx_passes.joint_graph",
    ):
        importlib.import_module(f"torch._inductor.{name}")
    importlib.import_module("torch.fx.passes.fake_tensor_prop")
    core.check(_REQUIRED)
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "Inductor compiles C++ and finds no compiler here: install g++ or clang++, or name one "
            f'in the environment as CXX; backend="fx" needs none ({error})'
        ) from None


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor takes operators apart into."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def with_strides() -> Any:
    """The operator that gives a tensor strides in a given order."""
    return torch.ops.prims.inductor_force_stride_order.default


def joint_passes(module: fx.GraphModule, placeholders: Iterable[Any]) -> None:
    """Inductor's changes to a joint graph, in place; every node's fake tensors are made anew."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    nodes = list(placeholders)
    mode = core.fake_mode_of(nodes)
    values = [node.meta.get("val") for node in nodes]
    device = next(value.device for value in values if isinstance(value, torch.Tensor))
    given = {}
    if "input_device" in inspect.signature(joint_graph_passes).parameters:
        given["input_device"] = device
    with mode, V.set_fake_mode(mode), torch.no_grad():
        changed = joint_graph_passes(module, **given)
        if changed is not module:
            module.graph = changed.graph
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)


@cache
def near_choices(apart: int) -> Any:
    """Inductor's choices, but far kernels are not fused for reading the same.

    Fused, the later one would run early, and hold what it makes all the time between: planned
    recomputations would move to where the first of them is.
    """
    from torch._inductor.choices import InductorChoices

    class NearChoices(InductorChoices):
        """Fuses neighbours only."""

        @staticmethod
        def uuid() -> str:
            """What Inductor's cache tells its code apart by."""
            return f"rotor fuses within {apart}"

        @staticmethod
        def can_fuse_horizontal(
            scheduler: Any, node1: Any, node2: Any, shared_data_score: int
        ) -> bool:
            """Whether two kernels, neither of which needs the other, may become one."""
            between = max(node1.min_order - node2.max_order, node2.min_order - node1.max_order)
            if between > apart:
                return False
            return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    return NearChoices


def compile_graph(
    module: fx.GraphModule,
    values: list[Any],
    *,
    is_backward: bool,
    apart: int,
    options: dict[str, Any],
) -> tuple[Callable[[list[Any]], Any], list[tuple[int, ...] | None]]:
    """Compiled code of a graph, and the strides of what it returns.

    Parameters
    ----------
    module
        The graph; it is changed.
    values
        What its inputs are, as fake tensors of one mode.
    is_backward
        Whether it is a backward.
    apart
        Kernels that only read the same are fused where at most so many others stand between.
    options
        Settings of ``torch._inductor.config``.

    Returns
    -------
    tuple
        A function of one list, which it empties, and the strides by output, ``None`` for one that
        is no tensor.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    choices = near_choices(apart)
    mode = next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))
    with (
        # The setting is part of the key of Inductor's cache, the handler is what decides.
        config.patch(options | {"inductor_choices_class": choices}),
        V.set_choices_handler(choices()),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        TracingContext.report_output_strides() as strides,
        torch.no_grad(),
    ):
        compiled: Any = compile_fx_inner(module, values, is_backward=is_backward)
        found = list(strides or ())
    return compiled, found
