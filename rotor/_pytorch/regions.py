"""Private names of PyTorch for calls of alike modules in a capture, of which one is traced.

Dynamo traces the first of them as a region of its own, and keeps what the trace depended on: its
guards. A call of another module for which these hold becomes one node, without a trace. The node
has neither parameters nor buffers of the module; the owner of the capture adds them to the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from rotor._pytorch import backwards, captures, core
from rotor._pytorch import region_guards as guards

MARK = "rotor_call"
"""Key of the identifier of a call in the data of its node."""

PATH = "rotor_path"
"""Key of dynamo's expression of a traced module in the data of its node."""

_MOST_TEMPLATES = 3


@dataclass
class Template:
    """Traced call of a module, which stands for calls of alike ones."""

    module: nn.Module
    signature: tuple[Any, ...]
    source: Any
    """Source of the module, whose name is dynamo's expression of it."""
    entry: Any
    condition: Any
    inputs: list[int | Any]
    """For each input of the body: the number of a tensor among the arguments, or the expression
    of a tensor that the module holds.
    """
    captured: dict[int, torch.Tensor]
    """Tensors that the module holds, by the number of the body's input."""

    @property
    def body(self) -> fx.GraphModule:
        found: fx.GraphModule = self.entry.body_gmod
        return found

    @property
    def name(self) -> str:
        """Name of the body in its graph."""
        return str(self.entry.body_name)


@dataclass
class Call:
    """Call of a module that was not traced."""

    identifier: str
    """Text by which the data of its node names the call."""
    template: Template
    module: nn.Module
    path: str
    before: list[str]
    """Names of the inputs that the graph had before the call."""
    captured: dict[int, torch.Tensor]
    """Tensors that the module holds, by the number of the body's input, without those that it
    shares with the template.
    """


@dataclass
class Tracing:
    """State of the traces of one capture."""

    modules: dict[int, nn.Module]
    slots_of: Callable[[nn.Module], Any]
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls that were not traced, by identifier."""
    templates: dict[Any, list[Template]] = field(default_factory=dict)
    """Traced calls, by the code of their function."""
    refused: set[Any] = field(default_factory=set)
    is_inside: bool = False
    traced: bool = False
    reasons: list[str] = field(default_factory=list)
    """Reasons for which calls were traced one by one."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def note(self, reason: str) -> None:
        """Note a reason for which a call is traced, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def refuse(self, code: Any, reason: str) -> None:
        """Note a reason for which calls of a function are traced one by one from now on."""
        self.refused.add(code)
        self.note(reason)


def is_available() -> bool:
    """Return whether this PyTorch keeps the guards of a region."""
    try:
        from torch._dynamo.variables import invoke_subgraph
        from torch._guards import InvokeSubgraphReuseCondition, InvokeSubgraphReuseEntry
    except ImportError:
        return False
    names = ("guards", "traced_sources"), ("body_gmod", "subgraph_input_mapping", "output_metadata")
    classes = InvokeSubgraphReuseCondition, InvokeSubgraphReuseEntry
    return hasattr(invoke_subgraph, "LiftedCapturedSource") and all(
        name in getattr(cls, "__dataclass_fields__", ())
        for cls, wanted in zip(classes, names, strict=True)
        for name in wanted
    )


def _match(tx: Any, tracing: Tracing, template: Template, variable: Any) -> dict[int, Any] | None:
    """Return the tensors of a module for which a template stands; None if it does not."""
    module, source = variable.value, variable.source
    parts = list(module.modules())
    if not all(map(guards.is_plain_module, (*parts, *template.module.modules()))):
        tracing.note("one has a hook, or a forward of its own")
        return None
    difference = guards.difference(module, template.module)
    if difference:
        tracing.note(f"they differ in {difference}")
        return None
    own = tracing.slots_of(module)
    kept = {id(value) for part in parts for value in (vars(part), *vars(part).values())}
    mutated = tx.output.side_effects.mutated_sources
    if mutated and (
        mutated & template.condition.traced_sources
        or any(one.name.startswith(source.name) for one in mutated)
    ):
        tracing.note("the forward changes attributes")
        return None
    scope, cache = guards.scope(tx), {template.source: module}
    unguarded = guards.unguarded_difference(scope, template, cache)
    if unguarded:
        tracing.note(f"they differ in {unguarded}")
        return None
    for guarded, handler, expected, _ in template.condition.guards:
        if template.source.name not in guarded.name:
            continue
        try:
            value = guarded.get_value(scope, {}, cache)
            holds = handler.eval_fn(value, expected)
        except (AttributeError, LookupError, NameError, TypeError):
            holds = False
        if not holds:
            tracing.note(f"they differ in {guards.within(guarded.name, template.source.name)}")
            return None
    if not all(guards.is_watched(tx, source, cache, kept) for source in cache):
        tracing.note("the forward depends on an object that may change within")
        return None
    found = {}
    for number, origin in enumerate(template.inputs):
        if not isinstance(origin, int):
            known = template.captured[number]
            value = origin.get_value(scope, {}, cache)
            if value is known:
                continue
            if id(value) not in own or type(value) is not type(known):
                tracing.note("one uses a tensor of another module")
                return None
            if guards.layout(value) != guards.layout(known):
                place = guards.within(origin.name, template.source.name)
                tracing.note(f"they differ in the layout of {place}")
                return None
            found[number] = value
    return found


def _emit(tx: Any, tracing: Tracing, template: Template, variable: Any, given: Any) -> Any:
    signature, tensors = given
    if signature != template.signature:
        tracing.note("they are called with arguments that are not alike")
        return None
    captured = _match(tx, tracing, template, variable)
    if captured is None:
        return None
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.higher_order_ops import add_call_function, make_attr

    identifier = f"rotor_call_{next(tracing.numbers)}"
    tracing.calls[identifier] = Call(
        identifier,
        template,
        variable.value,
        variable.source.name,
        [node.name for node in tx.output.graph.find_nodes(op="placeholder")],
        captured,
    )
    with tx.fake_mode:
        made = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device=device, requires_grad=grad)
            for shape, strides, dtype, device, grad in template.entry.output_metadata
        )
    region = torch._higher_order_ops.invoke_subgraph
    proxies = [fx.Proxy(node, tx.output.current_tracer) for node in tensors]
    arguments = (make_attr(tx, template.name), template.name, *proxies)
    results: Any = add_call_function(tx, region, arguments, {}, made)
    results.items[0].as_proxy().node.args[0].meta[MARK] = identifier
    if template.entry.single_tensor_output:
        return results.items[0]
    items = results.items[: template.entry.num_user_outputs]
    return SourcelessBuilder.create(tx, tuple(items))


def _trace(tx: Any, tracing: Tracing, function: Any, args: list[Any], kwargs: Any) -> Any:
    """Return the result of a call that is traced as a region, and keep it as a template."""
    from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
    from torch._dynamo.variables.invoke_subgraph import LiftedCapturedSource, LiftedUserArg

    region = torch._higher_order_ops.invoke_subgraph
    variable, code = args[0], function.fn.__code__
    signature, tensors = guards.signature(args[1:], kwargs)
    traced: Any = TorchHigherOrderOperatorVariable.make(region)
    tracing.is_inside = tracing.traced = True
    said = tx.output.root_tx.debug_locals
    saying = len(said)
    # Dynamo would take an earlier trace by its guards, which leave out the classes of modules.
    kept = tx.output.tracing_context.hop_dispatch_set_cache.get_cache(region)
    kept.subgraph_reuse_cache.pop(code, None)
    try:
        result = traced._call_function(tx, [function, *args], kwargs)
    finally:
        tracing.is_inside = False
    call = next(filter(is_region, reversed(tx.output.graph.nodes)))
    call.meta[PATH] = variable.source.name
    fresh = kept.subgraph_reuse_cache.get(code, [])
    if len(fresh) != 1:
        tracing.refuse(code, "dynamo keeps no trace of them that could stand for another")
        return result
    if len(said) != saying:
        tracing.refuse(code, "the forward prints or logs")
        return result
    ((condition, entry),) = fresh
    if backwards.noted_reads():
        tracing.refuse(code, "a backward or a hook of theirs reads values")
        return result
    if guards.reads_gradients(guarded.name for guarded, *_ in condition.guards):
        tracing.refuse(code, "the forward reads gradients")
        return result
    inputs: list[Any] = []
    captured = {}
    for origin in entry.subgraph_input_mapping:
        if isinstance(origin, LiftedUserArg) and origin.index < len(tensors):
            inputs.append(origin.index)
        elif isinstance(origin, LiftedCapturedSource):
            value = origin.source.get_value(guards.scope(tx), {}, {})
            if not isinstance(value, torch.Tensor):
                tracing.refuse(code, "the forward reads a number that is none of theirs")
                return result
            captured[len(inputs)] = value
            inputs.append(origin.source)
        else:
            reason = "the forward reads a value that is neither an argument nor theirs"
            tracing.refuse(code, reason)
            return result
    module, source = variable.value, variable.source
    template = Template(module, signature, source, entry, condition, inputs, captured)
    tracing.templates.setdefault(code, []).append(template)
    return result


@contextmanager
def regions(
    modules: Iterable[nn.Module], slots_of: Callable[[nn.Module], Any]
) -> Iterator[Tracing]:
    """Have captures in the context trace one of alike modules; yield what is found.

    `slots_of` returns a dictionary of a module by the identities of its own tensors.
    """
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.nn_module import (
        UnspecializedBuiltinNNModuleVariable,
        UnspecializedNNModuleVariable,
    )

    kinds = UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable
    tracing = Tracing({id(module): module for module in modules}, slots_of)
    in_same_mode = guards.mode_check()
    call_function = UserFunctionVariable.call_function
    call_module = UnspecializedNNModuleVariable.call_function

    def is_ours(variable: Any) -> bool:
        return (
            type(variable) in kinds
            and not tracing.is_inside
            and in_same_mode()
            and variable.source is not None
            and id(variable.value) in tracing.modules
        )

    def of_module(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_ours(self) and tx.output.current_tracer is tx.output.root_tracer:
            code = type(self.value).forward.__code__
            templates = tracing.templates.get(code, [])
            if templates and templates[0].entry.body_name not in tx.output.nn_modules:
                # Dynamo has begun once more.
                templates = tracing.templates[code] = []
                tracing.refused.discard(code)
            try:
                given = guards.signature(args, kwargs) if templates else None
                for template in templates:
                    result = _emit(tx, tracing, template, self, given)
                    if result is not None:
                        return result
            except guards.Refused as refused:
                tracing.note(str(refused))
        elif is_ours(self):
            tracing.note("they are called within torch.utils.checkpoint, or a graph of their own")
        return call_module(self, tx, args, kwargs)

    def of_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if (
            args
            and is_ours(args[0])
            and tx.output.current_tracer is tx.output.root_tracer
            and self.fn is type(args[0].value).forward
            and self.fn.__code__ not in tracing.refused
            and len(tracing.templates.get(self.fn.__code__, ())) < _MOST_TEMPLATES
        ):
            try:
                guards.signature(args[1:], kwargs)
            except guards.Refused as refused:
                tracing.refuse(self.fn.__code__, str(refused))
            else:
                return _trace(tx, tracing, self, args, kwargs)
        return call_function(self, tx, args, kwargs)

    with (
        core.replaced(UnspecializedNNModuleVariable, call_function=of_module),
        core.replaced(UserFunctionVariable, call_function=of_function),
    ):
        yield tracing


# -- graphs of regions


class _Traced(Exception):
    def __init__(self, module: fx.GraphModule, outputs: int) -> None:
        super().__init__("traced")
        self.module, self.outputs = module, outputs


def joint_graph(
    body: fx.GraphModule, inputs: Sequence[Any], decompositions: Any
) -> tuple[fx.GraphModule, int] | None:
    """Return the joint graph of a region, and its number of outputs; None if it has no backward.

    `body` is the forward of the region, and `inputs` are fake tensors.
    """
    from torch._guards import TracingContext, tracing

    def partition(module: Any, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        raise _Traced(module, num_fwd_outputs)

    def no_backward(*_: Any) -> Any:
        raise _Traced(body, -1)

    compiler = core.aot_backend(partition, no_backward, no_backward, no_backward, decompositions)
    try:
        with tracing(TracingContext(_mode())):
            captures.as_eager(compiler)(body, list(inputs))
    except _Traced as traced:
        return None if traced.outputs < 0 else (traced.module, traced.outputs)
    return None


def is_region(node: fx.Node) -> bool:
    return node.target is torch._higher_order_ops.invoke_subgraph


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of dynamo's graph, which dynamo reads again when it is compiled."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, known))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    sources: Any = getattr(module, "_param_name_to_source", {})
    made._param_name_to_source = sources
    for node in module.graph.find_nodes(op="placeholder"):
        known[node]._dynamo_source = node._dynamo_source
    return made


def holds_graphs(body: fx.GraphModule) -> bool:
    """Return whether a graph has nodes with graphs of their own, or attributes."""
    return any(
        node.op in ("get_attr", "call_module")
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in body.graph.nodes
    )


def differentiable_outputs(body: fx.GraphModule) -> list[int]:
    """Return the numbers of the outputs of dynamo's graph that may have gradients."""
    returned: Any = body.graph.output_node().args[0]
    return [k for k, node in enumerate(returned) if node.meta["example_value"].requires_grad]


def inputs_by_tensor(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the inputs of dynamo's graph by the identities of the tensors that they stand for."""
    nodes = graph.find_nodes(op="placeholder")
    return {id(found.example): n for n in nodes if (found := n.meta.get("grapharg")) is not None}


SLOT = "rotor_slot"
"""Place, among what is known of an added input, of the slot of a module that holds its tensor."""


def tensors_of_inputs(graph: fx.Graph) -> list[Any]:
    """Return the tensors for which the inputs of dynamo's graph stand; ``None`` if unknown."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        slot, given = node.meta.get(SLOT), node.meta.get("grapharg")
        known = None if given is None else given.example
        found.append(known if slot is None else core.value_in(slot))
    return found


def add_input(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    """Return a new input of dynamo's graph, where nodes are being inserted."""
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    node._dynamo_source = None
    return node


def is_backward(node: fx.Node) -> bool:
    """Return whether a node of a joint graph was traced in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_plain(node: fx.Node) -> bool:
    """Return whether the inputs or results of a joint graph are nothing but those of its call."""
    from torch._functorch._aot_autograd import descriptors

    kinds = descriptors.PlainAOTInput, descriptors.TangentAOTInput
    if node.op == "placeholder":
        return isinstance(node.meta.get("desc"), kinds)
    results = descriptors.PlainAOTOutput, descriptors.GradAOTOutput, type(None)
    return all(isinstance(one, results) for one in node.meta.get("desc") or [object()])


def stand_in(tensor: Any) -> Any:
    """Return a new fake tensor of a tensor's layout, in the mode of the running capture."""
    with unset_fake_temporarily():
        made = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )
        return FakeTensor(_mode(), made, tensor.device)


def _mode() -> Any:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    assert context is not None
    return context.fake_mode


def alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of a fake tensor's layout on a storage of its own, of the same size."""
    nbytes = tensor.untyped_storage().nbytes()
    return on_storage(tensor, torch.UntypedStorage(nbytes, device="meta"))


def on_storage(tensor: Any, storage: torch.UntypedStorage, shift: int = 0) -> torch.Tensor:
    """Return a fake tensor of a fake tensor's layout on another storage, which has no memory.

    `shift` is the number of elements between the places of the two tensors in their storages.
    """
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    made.set_(storage, tensor.storage_offset() + shift, tensor.shape, tensor.stride())
    return FakeTensor(tensor.fake_mode, made, tensor.fake_device)
