"""Private names of PyTorch for what a capture has among its nodes, and leaves behind.

Some gradients PyTorch computes by a loop of small operators: traced, thousands of operations.
The loop runs within one operation here, from the same inputs, by PyTorch's own code: with the same
bits.

Dynamo makes tensors without dimensions of numbers that a forward draws, of NumPy's scalars, and of
results of NumPy's functions. Types of results depend on them as on tensors: beside a tensor without
dimensions, a number of Python's would count for less.

Captured graphs leave ``requires_grad_`` out: gradients of parameters do not depend on it. A graph
that returns such a value is refused: its gradients are the caller's.
"""

from __future__ import annotations

import importlib
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.utils import _pytree

from rotor._pytorch import core, patches
from rotor._pytorch.casts import autocast_dtypes, cast_once
from rotor.errors import CaptureError

_LIBRARY = torch.library.Library("rotor_looped", "FRAGMENT")
_LIBRARY.define("householder_product(Tensor input, Tensor tau) -> Tensor")
_LIBRARY.define(
    "householder_product_backward(Tensor gradient, Tensor input, Tensor tau) -> (Tensor, Tensor)"
)
_PRODUCT = torch.ops.rotor_looped.householder_product.default
_GRADIENTS = torch.ops.rotor_looped.householder_product_backward.default
_TARGETS = (torch.linalg.householder_product, torch.orgqr)


@torch.library.impl(_LIBRARY, "householder_product", "CompositeExplicitAutograd")
def _product(x: torch.Tensor, tau: torch.Tensor) -> Any:
    return torch.linalg.householder_product(x, tau)


@torch.library.impl(_LIBRARY, "householder_product_backward", "CompositeExplicitAutograd")
def _gradients(gradient: torch.Tensor, x: torch.Tensor, tau: torch.Tensor) -> Any:
    inputs = [tensor.detach().requires_grad_() for tensor in (x, tau)]
    with torch.enable_grad():
        made = torch.linalg.householder_product(*inputs)
    return tuple(torch.autograd.grad(made, inputs, gradient))


torch.library.register_fake("rotor_looped::householder_product", _product, lib=_LIBRARY)
torch.library.register_fake(
    "rotor_looped::householder_product_backward",
    lambda gradient, *inputs: tuple(map(torch.empty_like, inputs)),
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "rotor_looped::householder_product",
    lambda ctx, gradient: _GRADIENTS(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)


def keep_whole(module: fx.GraphModule) -> None:
    """Replace such operators in a graph of dynamo's; not in autocast, which knows none of ours."""
    found = [
        node
        for node in module.graph.nodes
        if (node.op, node.target) == ("call_method", "orgqr") or node.target in _TARGETS
        # Of no elements, PyTorch makes no gradients.
        if all(_has_elements(given) for given in node.all_input_nodes)
    ]
    for node in found:
        node.op, node.target = "call_function", _PRODUCT
    if found:
        module.recompile()


def _gru_cell(
    x: torch.Tensor,
    hidden: torch.Tensor,
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    *biases: torch.Tensor | None,
) -> torch.Tensor:
    """Return the next state of a GRU, with gates that are not contiguous.

    PyTorch computes them in place, in parts of a tensor. A kernel takes the last numbers of each
    row by other instructions there, and with other bits, than those of a contiguous tensor.
    """
    size = hidden.shape[-1]
    first, second = biases or (None, None)
    given = functional.linear(x, of_input, first).split((2 * size, size), 1)
    kept = functional.linear(hidden, of_hidden, second).split((2 * size, size), 1)
    reset, update = (kept[0] + given[0]).chunk(2, 1)
    new = torch.tanh(given[1] + kept[1] * torch.sigmoid(reset))
    return (hidden - new) * torch.sigmoid(update) + new


def keep_rows_apart(module: fx.GraphModule) -> None:
    """Replace cells of a GRU on the CPU in a graph of dynamo's."""
    found = [n for n in module.graph.nodes if n.target is torch.gru_cell and not n.kwargs]
    for node in found:
        if node.meta["example_value"].device.type == "cpu":
            node.target = _gru_cell
    if found:
        module.recompile()


def _has_elements(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or 0 not in value.shape


_OF_PYTHON = torch.float64, torch.int64, torch.bool


def check_numbers(graph: fx.Graph, given_numbers: Iterable[fx.Node] = ()) -> None:
    """Raise CaptureError if an operation gives other types, or bits, than with such numbers.

    `given_numbers` are inputs that are numbers by themselves, as those of an inner graph are.
    """
    from torch._dynamo import utils

    numpys = (
        utils.numpy_to_tensor_wrapper,
        utils.numpy_method_wrapper,
        utils.numpy_operator_wrapper,
    )
    numbers: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        is_scalar = isinstance(value, torch.Tensor) and not value.ndim
        is_numpys = isinstance(node.target, numpys)
        if node.op == "output":
            are_inner = bool(given_numbers)
            _check_results(
                node, [one for one in numbers if are_inner or isinstance(one.target, numpys)]
            )
        elif is_numpys and _rounds(node, value, numbers):
            raise _of_numbers(node.target)
        if is_scalar and (_is_input(node) or is_numpys or node in given_numbers):
            numbers[node] = value
            continue
        given = [numbers[one] for one in node.all_input_nodes if one in numbers]
        is_symbol = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        if not given or node.op == "output" or is_symbol or is_numpys:
            continue
        others = [n.meta.get("example_value") for n in node.all_input_nodes if n not in numbers]
        tensors = [one for one in others if isinstance(one, torch.Tensor)]
        is_alone = not tensors
        if is_alone and is_scalar and value.dtype in (*_OF_PYTHON, *(n.dtype for n in given)):
            numbers[node] = value
            continue
        if getattr(node.target, "__name__", "") == "autograd_function_apply":
            name, _, *operands = node.args
            inner = getattr(graph.owning_module, str(name))
            inputs = [one for one in inner.graph.nodes if one.op == "placeholder"]
            pairs = zip(inputs, operands, strict=True)
            check_numbers(inner.graph, [one for one, operand in pairs if operand in numbers])
            continue
        holds_code = isinstance(node.target, torch._ops.HigherOrderOperator)
        weighs = any(_weighs(number, other) for number in given for other in tensors)
        if is_alone or holds_code or weighs:
            raise _of_numbers(node.target)


def _of_numbers(target: Any) -> CaptureError:
    return CaptureError(
        f"the forward draws a number, or has one of NumPy's, for {target}, which gives another "
        "type, or other bits, with a tensor in its place, as captured graphs have one"
    )


_EXACT = {
    "add", "sub", "mul", "truediv", "neg", "abs", "getitem", "lt", "le", "gt", "ge", "eq",
    "ne", "and_", "or_", "invert", "array", "asarray", "arange", "zeros", "ones", "full",
    "empty", "zeros_like", "ones_like", "full_like", "eye", "astype", "copy", "reshape",
    "ravel", "flatten", "transpose", "swapaxes", "item", "squeeze", "expand_dims",
    "concatenate", "stack", "where", "argmax", "argmin",
}  # fmt: skip
"""NumPy's functions that give the same bits of arrays as PyTorch's of tensors."""


def _rounds(node: fx.Node, value: Any, numbers: Container[fx.Node]) -> bool:
    """Return whether a function of NumPy's gives other bits of arrays than PyTorch's."""
    is_of_arrays = bool(getattr(value, "ndim", 0)) or any(
        one not in numbers for one in node.all_input_nodes
    )
    target: Any = node.target
    return is_of_arrays and target.__name__.removeprefix("wrapped_") not in _EXACT


def _check_results(output: fx.Node, numbers: Sequence[fx.Node]) -> None:
    """Raise CaptureError if a graph returns a number of NumPy's: it would be an array."""
    for one in output.all_input_nodes:
        if one in numbers:
            raise _of_numbers("a result")


def _is_input(node: fx.Node) -> bool:
    """Return whether a node is an input that is no tensor of the caller's."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    return argument is not None and bool(argument.pass_arg_as_tensor)


def _weighs(number: torch.Tensor, other: Any) -> bool:
    """Return whether a tensor in the place of a number changes the type of an operation."""
    like = torch.empty([1] * other.ndim, dtype=other.dtype, device="meta")
    alone = torch.empty([], dtype=number.dtype, device="meta")
    python = 1.0 if number.dtype.is_floating_point else 1
    return torch.result_type(like, alone) != torch.result_type(like, python)


_ASKED = "rotor_asked"


def _note(variable: Any) -> None:
    """Have a computed value require gradients in what dynamo knows of it, not in its graph."""
    node = variable.as_proxy().node
    node.meta["example_value"].requires_grad_()
    node.meta[_ASKED] = variable.requires_grad = True


def _may_be_noted(variable: Any) -> bool:
    from torch._dynamo.variables.tensor import TensorVariable

    # What the caller, or a module, has would require gradients after the call too.
    return (
        isinstance(variable, TensorVariable) and not variable.source and not variable.requires_grad
    )


@contextmanager
def noted() -> Iterator[None]:
    """Have dynamo note in the context which computed values are to require gradients."""
    from torch._dynamo.variables import builtin
    from torch._dynamo.variables.tensor import TensorVariable

    # The class and the name of its method differ between versions.
    owner = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    name = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    set_attribute: Any = getattr(owner, name)
    call_method: Any = TensorVariable.call_method

    def is_true(value: Any) -> bool:
        return bool(value.is_python_constant() and value.as_python_constant() is True)

    def noting_set(self: Any, tx: Any, obj: Any, attribute: Any, value: Any) -> Any:
        is_asked = attribute.is_python_constant() and (
            attribute.as_python_constant() == "requires_grad"
        )
        if is_asked and is_true(value) and _may_be_noted(obj):
            _note(obj)
            return value
        return set_attribute(self, tx, obj, attribute, value)

    def noting_call(self: Any, tx: Any, method: str, args: Any, kwargs: Any) -> Any:
        asked = [*args, *kwargs.values()]
        if method == "requires_grad_" and all(map(is_true, asked)) and _may_be_noted(self):
            _note(self)
            return self
        return call_method(self, tx, method, args, kwargs)

    with (
        core.replaced(owner, **{name: noting_set}),
        core.replaced(TensorVariable, call_method=noting_call),
    ):
        yield


def _with_gradients(node: fx.Node) -> set[int]:
    """Return the ids of a node's values that require gradients."""
    values = _pytree.tree_leaves(node.meta.get("example_value"))
    return {id(v) for v in values if isinstance(v, torch.Tensor) and v.requires_grad}


def check_outputs(graph: fx.Graph) -> None:
    """Raise CaptureError if a graph returns a value that requires gradients as asked alone."""
    asked: set[int] = set()
    known: set[int] = set()
    for node in graph.nodes:
        values = _with_gradients(node)
        inputs = {value for given in node.all_input_nodes for value in _with_gradients(given)}
        if node.op == "output" and inputs & asked - known:
            raise CaptureError(
                "the forward has a value that it computed require gradients, and returns or keeps "
                "it, or what it computed of it alone: captured graphs have no gradients of it"
            )
        if _ASKED in node.meta:
            asked |= values
        elif node.op == "placeholder" or inputs & known:
            known |= values
        elif inputs & asked:
            asked |= values


_REQUIRED = """
    _C._ForceDispatchKeyGuard _C._create_function_from_graph
    _C._dispatch_has_kernel_for_dispatch_key
    _dynamo.callback.callback_handler.register_end_callback
    _dynamo.callback.callback_handler.register_start_callback
    _dynamo.config.reorderable_logging_functions _dynamo.convert_frame.compile_lock
    _dynamo.eval_frame.cached_backends _dynamo.eval_frame.remove_from_cache
    _dynamo.guards.CheckFunctionManager.id_ref
    _dynamo.guards.CheckFunctionManager.invalidate
    _dynamo.guards.GuardBuilder.ID_MATCH _dynamo.guards.install_guard
    _dynamo.source.GlobalSource _dynamo.source.RandomValueSource
    _dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table
    _dynamo.symbolic_convert.InstructionTranslatorBase.push _dynamo.symbolic_convert.is_stdlib
    _dynamo.utils.numpy_method_wrapper _dynamo.utils.numpy_operator_wrapper
    _dynamo.utils.numpy_to_tensor_wrapper _dynamo.variables.ConstantVariable.create
    _dynamo.variables.SkipFunctionVariable.call_function
    _dynamo.variables.TensorVariable._method_register_hook
    _dynamo.variables.TensorVariable.as_proxy _dynamo.variables.base.VariableTracker.visit
    _dynamo.variables.builder.GraphArg.__post_init__ _dynamo.variables.builder.GraphArg.erase
    _dynamo.variables.builder.VariableBuilder._type_dispatch
    _dynamo.variables.UserFunctionVariable
    _dynamo.variables.builder.VariableBuilder._wrap _dynamo.variables.builtin.BuiltinVariable
    _dynamo.variables.dicts.ConstDictVariable.getitem_const_raise_exception_if_absent
    _dynamo.variables.dicts.ConstDictVariable.install_dict_contains_guard
    _dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable.trace_backward_graph
    _dynamo.variables.misc.DebuggingVariable.call_function
    _dynamo.variables.misc.LoggingLoggerVariable.call_method
    _dynamo.variables.tensor.TensorVariable.call_method
    _dynamo.variables.torch.TorchInGraphFunctionVariable.call_function
    _dynamo.variables.torch.tracing_state_functions
    _functorch._aot_autograd.descriptors.BackwardTokenAOTInput
    _functorch._aot_autograd.descriptors.ForwardTokenAOTInput
    _functorch.config.backward_pass_autocast _guards.TracingContext.__init__
    _guards.TracingContext.try_get
    _guards.detect_fake_mode _higher_order_ops.effects._EffectType.ORDERED
    _higher_order_ops.effects._get_effect _higher_order_ops.effects._register_effectful_op
    _higher_order_ops.effects.with_effects _subclasses.meta_utils.MetaTensorDescriber.__init__
    _prims_common.suggest_memory_format
"""

LINALG_CHECK = torch.ops.aten._linalg_check_errors.default
"""Operator that raises the errors of others, which are among their results."""


def check() -> None:
    """Raise ImportError if a private name that every capture needs is missing."""
    importlib.import_module("torch._dynamo.convert_frame")
    core.check(_REQUIRED)


def as_eager(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of dynamo's graphs that has them compute as eager PyTorch does."""

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        check_outputs(module.graph)
        check_numbers(module.graph)
        in_autocast = bool(autocast_dtypes())
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                if not in_autocast:
                    keep_whole(part)
                cast_once(part)
                keep_rows_apart(part)
        with patches.replacements_refused():
            return compiler(module, inputs)

    return compiled


class _AnyExtents:
    """Sizes or strides that equal all others."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def for_emitted(compiler: Callable[..., Any], *, keeps_layouts: bool) -> Callable[..., Any]:
    """Return a compiler of forwards whose backwards take modes and gradients as they come.

    PyTorch refuses a backward where the deterministic mode was switched on after the forward, and
    copies gradients of outputs into the layout of the outputs. Without a capture they have the
    layout that the loss gives them, and sums over them are rounded by it. With `keeps_layouts` they
    come in that layout; kernels that were compiled for the outputs' layout need the copies.
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
    from torch._guards import TracingContext

    extents: Any = _AnyExtents()
    as_it_comes = MemoryFormatMeta(size=extents, stride=extents)

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.deterministic = None
            for given in context.fw_metadata.subclass_tangent_meta:
                if keeps_layouts and isinstance(given, PlainTensorMeta):
                    given.memory_format = as_it_comes
        return compiler(module, inputs)

    return compiled


@contextmanager
def checks_kept() -> Iterator[None]:
    """Have captures keep `LINALG_CHECK`, which returns nothing: PyTorch 2.11 would drop it."""
    from torch._higher_order_ops import effects

    kept = None
    if effects._get_effect(LINALG_CHECK) is None:
        kept = effects._register_effectful_op(LINALG_CHECK, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        if kept is not None:
            kept.destroy()


def is_effect(node: Any) -> bool:
    """Return whether a node of a joint graph is an operation that takes a token first."""
    return node.target is torch._higher_order_ops.effects.with_effects


def is_token(node: Any, *, of_backward: bool = False) -> bool:
    """Return whether an input of a joint graph is a token of its forward, or of its backward."""
    from torch._functorch._aot_autograd import descriptors

    kinds = descriptors.ForwardTokenAOTInput, descriptors.BackwardTokenAOTInput
    return isinstance(node.meta.get("desc"), kinds[of_backward])


def is_accumulation(node: Any) -> bool:
    """Return whether a node of a joint graph adds up gradients of one tensor, as autograd does."""
    is_sum = getattr(node, "target", None) is torch.ops.aten.add.Tensor
    return is_sum and bool(node.meta.get("is_gradient_acc"))


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that PyTorch reads from a tensor's strides."""
    found: torch.memory_format = torch._prims_common.suggest_memory_format(tensor)
    return found


def _forget_tensors(context: Any) -> None:
    context.tensor_to_context.clear()
    region = torch._higher_order_ops.invoke_subgraph
    kept = context.hop_dispatch_set_cache.get_cache(region)
    # Guards of regions have the tensors that they are about.
    getattr(kept, "subgraph_reuse_cache", {}).clear()


@contextmanager
def examples_forgotten() -> Iterator[None]:
    """Have captures in the context refer to no tensor of the caller's after its end.

    ``torch.utils.swap_tensors`` refuses tensors to which there are weak references, and what is
    kept of a graph would keep those.
    """
    from torch._dynamo.variables.builder import GraphArg
    from torch._guards import TracingContext
    from torch._subclasses.meta_utils import MetaTensorDescriber

    thread = threading.get_ident()
    forget: list[Callable[[], None]] = []

    def noting(owner: Any, name: str, forgetting: Callable[[Any], Callable[[], None]]) -> Any:
        begin = getattr(owner, name)

        def begun(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            if threading.get_ident() == thread:
                forget.append(forgetting(self))

        return core.replaced(owner, **{name: begun})

    with (
        noting(MetaTensorDescriber, "__init__", lambda made: made.lookup_tensor.clear),
        noting(TracingContext, "__init__", lambda made: partial(_forget_tensors, made)),
        noting(GraphArg, "__post_init__", lambda made: made.erase),
    ):
        try:
            yield
        finally:
            for function in forget:
                function()


@contextmanager
def guards_freed() -> Iterator[None]:
    """Have guards of captures in the context freed with their code.

    Dynamo keeps them, and what they compare, as long as any class, function or module among that.
    """
    from torch._dynamo.guards import CheckFunctionManager

    met: dict[Any, list[tuple[weakref.ref[Any], str]]] = {}
    begin: Any = CheckFunctionManager.__init__

    def refer(self: Any, obj: Any, obj_str: str) -> int:
        if id(obj) not in self._weakrefs:
            with suppress(TypeError):
                self._weakrefs[id(obj)] = reference = weakref.ref(obj)
                met.setdefault(self, []).append((reference, obj_str))
        return id(obj)

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            begin(self, *args, **kwargs)
        finally:
            found = met.pop(self, ())
        # The compiled code keeps this one, which now keeps the checks.
        self.guard_manager.checks = self
        held, ends = weakref.ref(self), []
        for reference, text in found:
            if (obj := reference()) is not None:
                end = weakref.finalize(obj, _invalidate, held, text)
                end.atexit = False
                ends.append(end)
        weakref.finalize(self, _detach, ends).atexit = False

    with core.replaced(CheckFunctionManager, __init__=begun, id_ref=refer):
        yield


def _invalidate(held: weakref.ref[Any], text: str) -> None:
    checks = held()
    if checks is not None:
        checks.invalidate(text)


def _detach(ends: Sequence[Any]) -> None:
    for end in ends:
        end.detach()


def forget_compiled(code: Any, backend: int, modes: list[Any]) -> None:
    """Drop what dynamo keeps of a function's compiled code, and of a backend, by its ``id``.

    Dynamo keeps a function's compiled code as long as the function's own code, and this as long as
    the compiled code. Fake tensors with gradients are in cycles, through their modes, that no
    collector sees.
    """
    from torch._dynamo import eval_frame

    for mode in modes:
        mode.shape_env.tracked_fakes = []

    eval_frame.remove_from_cache(code)
    known = eval_frame.cached_backends
    for key in [k for k, one in known.items() if id(getattr(one, "compiler_fn", one)) == backend]:
        del known[key]


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object of its own, and so with its own dynamo cache."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
