"""Private names of Inductor that rotor uses, checked when Inductor is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, dispatch, draws, symbols
from rotor.errors import CaptureError

_REQUIRED = """
    _functorch.config.patch _functorch.partitioners.min_cut_rematerialization_partition
    _guards.TracingContext _guards.tracing
    _inductor.compile_fx.compile_fx_inner _inductor.fx_passes.post_grad.view_to_reshape
    _inductor.config.patch _inductor.cpp_builder.get_cpp_compiler
    _inductor.debug.DebugContext
    _inductor.decomposition.select_decomp_table _inductor.exc.InvalidCxxCompiler
    _inductor.fx_passes.joint_graph.joint_graph_passes
    _inductor.fx_passes.post_grad.post_grad_passes
    _inductor.fx_passes.post_grad.reinplace_inplaceable_ops
    _inductor.graph.GraphLowering.init_wrapper_code _inductor.graph.GraphLowering._update_scheduler
    _inductor.ir.Buffer.get_name _inductor.ir.NonOwningLayout
    _inductor.ir.StorageBox _inductor.ir.TensorBox
    _inductor.scheduler.BaseSchedulerNode.get_nodes
    _inductor.scheduler.BaseSchedulerNode.get_outputs
    _inductor.scheduler.ExternKernelSchedulerNode
    _inductor.virtualized.V.set_debug_handler _inductor.virtualized.V.set_extern_kernel_nodes
    _inductor.virtualized.V.set_fake_mode _inductor.virtualized.V.set_graph_handler
    fx.passes.fake_tensor_prop.FakeTensorProp
    ops.prims.inductor_lookup_seed.default ops.prims.inductor_random.default
    ops.prims.inductor_seeds.default
"""

_MODULES = """
    _functorch.config _functorch.partitioners _inductor.compile_fx _inductor.cpp_builder
    _inductor.debug _inductor.decomposition _inductor.fx_passes.joint_graph
    _inductor.fx_passes.post_grad _inductor.graph _inductor.ir _inductor.scheduler
    fx.passes.fake_tensor_prop
"""

_TRITON, _GRAPHS = frozenset({"cuda", "xpu"}), "triton.cudagraphs"
"""Types of devices for which Inductor writes Triton, and a setting of its kernels."""

_LIBRARY = re.compile(
    r"aten\.(mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|convolution|convolution_backward|"
    r"_scaled_dot_product_\w+|_fft_\w+|_\w*embedding_bag\w*)\.|prims\.inductor_seeds?\."
)
"""Operators that a library runs, or that draw from the generator: never part of a kernel."""

_AS_CAPTURED = {"layout_optimization": False, _GRAPHS: False}
"""Settings that keep the strides of the capture, and all memory in the common allocator."""


def check(device_types: Iterable[str] = ()) -> None:
    """Raise if a name or a compiler that Inductor needs is missing.

    An ImportError lists the missing names, and the PyTorch versions that work. A RuntimeError says
    that there is no C++ compiler, or no Triton for a GPU among the types of the model's devices.
    """
    for name in _MODULES.split():
        importlib.import_module(f"torch.{name}")
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


def draws_seeds(node: fx.Node) -> bool:
    """Return whether a node draws the seeds of a step, a few bytes from which all noise follows."""
    return str(node.target).startswith("prims.inductor_seed")


def takes_seed(node: fx.Node) -> bool:
    """Return whether a node takes one of the seeds of a step, by a constant index."""
    return node.target is torch.ops.prims.inductor_lookup_seed.default


def draws_numbers(node: fx.Node) -> bool:
    """Return whether a node makes random numbers, which eager makes without regard to the seed."""
    tags = getattr(node.target, "tags", ())
    return "inductor_rand" in str(node.target) or torch.Tag.nondeterministic_seeded in tags


def propagate(module: fx.GraphModule, mode: Any) -> None:
    """Renew the fake tensors of a graph's nodes, from those of its inputs."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)


def joint_passes(module: fx.GraphModule) -> None:
    """Apply Inductor's passes to a joint graph in place; renew all fake tensors of its nodes."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    nodes = module.graph.find_nodes(op="placeholder")
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
        _draw_masks(module.graph)
        propagate(module, mode)


def _draw_masks(graph: fx.Graph) -> None:
    """Have an operator of ours draw the masks of dropout on the CPU.

    There Inductor draws number by number, which takes longer than all else of a step.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar):
        drawn, share = node.args
        is_drawn = getattr(drawn, "target", None) is torch.ops.prims.inductor_random.default
        if not is_drawn or len(drawn.users) > 1 or drawn.args[2] != "rand":
            continue
        if drawn.meta["val"].device.type == "cpu":
            size, seed, _ = drawn.args
            node.target, node.args = draws.KEPT, (size, seed, float(share))
            graph.erase_node(drawn)


def halves(module: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward of a joint graph, as ``torch.compile`` cuts and simplifies them.

    Inputs of the forward cost nothing to keep. The forward returns what the backward reads after
    its `num_outputs` results, under names that the backward's inputs have.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.virtualized import V

    nodes = module.graph.find_nodes(op="placeholder")
    mode = core.fake_mode_of(nodes)
    resident = [k for k, node in enumerate(nodes) if "tangent" not in node.name]
    with V.set_fake_mode(mode), config.patch(activation_memory_budget=1.0):
        return min_cut_rematerialization_partition(
            module,
            [node.meta.get("val") for node in nodes],
            num_fwd_outputs=num_outputs,
            static_lifetime_input_indices=resident,
        )


def simplify(half: fx.GraphModule, mode: Any) -> None:
    """Apply Inductor's later passes to a forward or a backward; none that writes in place."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V

    post_grad.view_to_reshape(half)
    propagate(half, mode)
    functional = core.replaced(post_grad, reinplace_inplaceable_ops=lambda *_: None)
    with V.set_fake_mode(mode), functional, torch.no_grad():
        post_grad.post_grad_passes(half, False)
    propagate(half, mode)


def _is_library(target: Any) -> bool:
    is_shared = dispatch.is_collective(target) or dispatch.is_wait(target)
    return is_shared or bool(_LIBRARY.match(str(target)))


def kernels_of(half: fx.GraphModule, mode: Any) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Return the number of the kernel that stores each stored result, and the nodes of libraries.

    Kernels are as Inductor would fuse them. Results that it computes where they are read have none.
    """
    graph = _scheduled(half, mode)
    kernels: dict[str, int] = {}
    libraries = {node for node in half.graph.nodes if _is_library(node.target)}
    into: dict[str, str] = {}
    for number, scheduled in enumerate(graph.scheduler.nodes):
        for inner in scheduled.get_nodes():
            if _is_extern(inner):
                libraries.update(_origins(inner.node, half))
                continue
            for output in inner.get_outputs():
                kernels[output.get_name()] = number
                into.update(_parts_of(output.node))
    for part, whole in into.items():
        kernels[part] = kernels.get(whole, kernels[part])
    found: dict[fx.Node, int] = {}
    for node in half.graph.nodes:
        name = _stored(graph.env.get(node))
        if name in kernels:
            found[node] = kernels.pop(name)
    return found, libraries


def _scheduled(half: fx.GraphModule, mode: Any) -> Any:
    """Return Inductor's graph of a half, with its kernels in a scheduler."""
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in half.graph.find_nodes(op="placeholder")]
    half.graph.output_node().meta["user_visible_output_idxs"] = []
    with _compiling(mode), config.patch(_AS_CAPTURED):
        graph = GraphLowering(half, example_inputs=values, shape_env=mode.shape_env)
        graph.garbage_collect_values = False
        with (
            V.set_graph_handler(graph),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            graph.run(*values)
            graph.init_wrapper_code()
            graph._update_scheduler()
    return graph


@contextmanager
def explained() -> Iterator[None]:
    """Have an error of Inductor's say what to do."""
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f'Inductor could not compile the planned step; backend="fx" needs no compiler. '
            f"Its reason:\n{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _compiling(mode: Any) -> Iterator[None]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode), tracing(TracingContext(mode)), torch.no_grad():
        yield


def _is_extern(scheduled: Any) -> bool:
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    return isinstance(scheduled, ExternKernelSchedulerNode)


def _origins(kernel: Any, half: fx.GraphModule) -> list[fx.Node]:
    """Return the node of a graph from which a library's kernel comes."""
    origin = kernel.get_origin_node()
    found = [node for node in kernel.origins if node.graph is half.graph]
    if origin is None and found:
        order = {node: number for number, node in enumerate(half.graph.nodes)}
        origin = max(found, key=order.__getitem__)
    return [] if origin is None else [origin]


def _parts_of(buffer: Any) -> dict[str, str]:
    """Return the buffer into which another one is written, by the name of the other."""
    from torch._inductor.ir import NonOwningLayout

    layout = getattr(buffer, "layout", None)
    if not isinstance(layout, NonOwningLayout):
        return {}
    return {buffer.get_name(): layout.view.get_name()}


def _stored(value: Any) -> str:
    """Return the name of the buffer that holds all of a value of Inductor's graph; empty if none.

    Views of buffers, and values that are computed where they are read, have none.
    """
    from torch._inductor.ir import Buffer, StorageBox, TensorBox

    box = value.data if isinstance(value, TensorBox) else None
    buffer = box.data if isinstance(box, StorageBox) else None
    return str(buffer.get_name()) if isinstance(buffer, Buffer) else ""


def _conditions(environment: Any, known: int, names: Set[str]) -> tuple[str, ...]:
    """Return conditions on symbols, on which kernels of these may rely, as Python's expressions.

    `known` is the number of symbols that had been replaced by numbers before. A ValueError says if
    a kernel has replaced one.
    """
    constants = [s for s, value in environment.replacements.items() if value.is_number]
    if len(constants) > known:
        named = ", ".join(f"{s} = {environment.replacements[s]}" for s in constants[known:])
        raise ValueError(f"a kernel holds only where {named}")
    found = [environment.replace(guard.expr) for guard in environment.guards]
    # A kernel relies on nothing but its own arguments.
    own = [one for one in found if one.free_symbols and names >= set(map(str, one.free_symbols))]
    return tuple(dict.fromkeys(map(symbols.text_of_expression, own)))


@contextmanager
def _open(environment: Any) -> Iterator[None]:
    """Have conditions on symbols noted, although the guards of the capture are made."""
    before = environment.frozen
    environment.frozen = False
    try:
        yield
    finally:
        environment.frozen = before


def compile_graph(
    module: fx.GraphModule, values: Sequence[Any], mode: Any
) -> tuple[Callable[[list[Any]], Any], tuple[str, ...]]:
    """Compile a graph, whose results get the strides of their fake tensors.

    `values` are the inputs as fake tensors of the mode, and sizes that are symbols. The code is a
    function of one list, which it empties. It relies on the conditions that come with it.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    returned: Any = module.graph.output_node()
    returned.meta["user_visible_output_idxs"] = list(range(len(returned.args[0])))
    environment = mode.shape_env if any(map(symbols.is_symbol, values)) else None
    is_open = core.NOTHING if environment is None else _open(environment)
    known = [] if environment is None else [*environment.replacements.values()]
    with _compiling(mode), config.patch(_AS_CAPTURED), is_open:
        compiled: Any = compile_fx_inner(module, list(values), is_backward=False)
    # Without the wrapper for profilers and traces, which takes longer than a small kernel.
    run: Callable[[list[Any]], Any] = getattr(compiled, "current_callable", None) or compiled
    if environment is None:
        return run, ()
    names = {name for value in values for name in symbols.symbols_in(value)}
    return run, _conditions(environment, sum(value.is_number for value in known), names)
