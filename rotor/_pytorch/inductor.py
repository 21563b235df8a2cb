"""Private names of Inductor that rotor uses, checked when Inductor is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core

_REQUIRED = """
    _guards.TracingContext.report_output_strides _guards.tracing
    _inductor.choices.InductorChoices.can_fuse_horizontal _inductor.compile_fx.compile_fx_inner
    _inductor.config.patch _inductor.cpp_builder.get_cpp_compiler
    _inductor.decomposition.select_decomp_table _inductor.exc.InvalidCxxCompiler
    _inductor.fx_passes.joint_graph.joint_graph_passes
    _inductor.virtualized.V.set_choices_handler _inductor.virtualized.V.set_fake_mode
    fx.passes.fake_tensor_prop.FakeTensorProp ops.prims.inductor_force_stride_order.default
    ops.prims.inductor_seeds.default
"""


_TRITON = frozenset({"cuda", "xpu"})
"""Types of devices for which Inductor writes Triton."""


def check(device_types: Iterable[str] = ()) -> None:
    """Raise if a name or a compiler that Inductor needs is missing.

    An ImportError lists the missing names, and the PyTorch versions that work. A RuntimeError says
    that there is no C++ compiler, or no Triton for a GPU among the types of the model's devices.
    """
    names = "choices", "compile_fx", "cpp_builder", "decomposition", "fx_passes.joint_graph"
    for name in names:
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
    if _TRITON & set(device_types) and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "Inductor writes Triton for a GPU, and Triton is missing here: install triton, or use "
            'backend="fx", which needs none'
        )


def decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def joint_passes(module: fx.GraphModule, placeholders: Iterable[Any]) -> None:
    """Apply Inductor's passes to a joint graph in place; renew all fake tensors of its nodes."""
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
    """Return Inductor's choices without fusing distant kernels for reading the same.

    After such a fusion the later kernel runs early and holds its result meanwhile: planned
    recomputations would move to the first of them.
    """
    from torch._inductor.choices import InductorChoices

    class NearChoices(InductorChoices):
        @staticmethod
        def uuid() -> str:
            return f"rotor fuses within {apart}"

        @staticmethod
        def can_fuse_horizontal(
            scheduler: Any, node1: Any, node2: Any, shared_data_score: int
        ) -> bool:
            between = max(node1.min_order - node2.max_order, node2.min_order - node1.max_order)
            if between > apart:
                return False
            return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    # PyTorch 2.11 pickles the class for its cache, by the name that it has in its module.
    NearChoices.__qualname__ = f"NearChoices{apart}"
    globals()[NearChoices.__qualname__] = NearChoices
    return NearChoices


def compile_graph(
    module: fx.GraphModule,
    values: list[Any],
    *,
    is_backward: bool,
    apart: int,
    options: dict[str, Any],
) -> tuple[Callable[[list[Any]], Any], list[tuple[int, ...] | None]]:
    """Compile a graph, which is changed; return its code and the strides of its results.

    `values` are the inputs as fake tensors of one mode, `apart` is the largest distance of kernels
    that are fused only because they read the same tensor, and `options` are settings of
    ``torch._inductor.config``. The code is a function of one list, which it empties; strides are
    ``None`` for results that are no tensors.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    choices = near_choices(apart)
    mode = next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))
    with (
        # The setting is part of the key of Inductor's cache, the handler decides.
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
