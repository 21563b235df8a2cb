"""Operations that stand for calls of modules while AOTAutograd traces a model.

A call of a module is one operation, and its backward another one. Both can only be traced: their
results have layouts, which come from the joint graph of the module's own forward, and no values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, regions
from rotor.common.tensor_trees import extent_of

FAMILIES: dict[int, Family] = {}
"""Families of the calls that are being traced, by number."""

DOUBTS: dict[int, str] = {}
"""Reasons why calls that are being traced are unlike their region, by number."""

NUMBERS = itertools.count()
"""Numbers of calls."""

_LIBRARY = torch.library.Library("rotor_capture", "FRAGMENT")
_LIBRARY.define("call(Tensor[] inputs, int number) -> Tensor[]")
_LIBRARY.define("laid_out(Tensor input, int[] strides) -> Tensor")
_LIBRARY.define("backward(Tensor[] tangents, int number) -> Tensor[]")
FORWARD = torch.ops.rotor_capture.call.default
_LAID_OUT = torch.ops.rotor_capture.laid_out.default
BACKWARD = torch.ops.rotor_capture.backward.default


class Uncertain(Exception):
    """Signal that calls have to be traced with the rest."""


@dataclass
class Region:
    """Joint graph of a region."""

    primals: list[fx.Node]
    tangents: list[fx.Node]
    differentiable: list[int]
    """Numbers of the outputs to which the tangents belong."""
    before: list[fx.Node]
    """Nodes of the forward."""
    after: list[fx.Node]
    """Nodes of the backward."""
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]
    """Gradient of each primal; None for one without."""

    @property
    def wanted(self) -> list[int]:
        """Numbers of the inputs that have a gradient."""
        return [k for k, gradient in enumerate(self.gradients) if gradient is not None]


_Layouts = tuple[tuple[int, ...], ...]
"""Strides of the gradients of a module's outputs."""


@dataclass
class Family:
    """Regions of one module for several layouts of the gradients of its outputs."""

    template: regions.Template
    values: list[Any]
    first: Region
    """Region for gradients that are laid out as the outputs."""
    regions: dict[_Layouts, Region]
    wanted: set[_Layouts] = field(default_factory=set)
    """Layouts that occurred in a trace and have no region yet."""

    def learn(self, decompositions: Any) -> bool:
        """Trace the module for the layouts that lack a region; return whether there were any."""
        body, wanted = self.template.body, list(self.wanted)
        self.wanted.clear()
        for layouts in wanted:
            pairs = zip(self.first.differentiable, map(list, layouts), strict=True)
            changed = _with_layouts(body, dict(pairs))
            self.regions[layouts] = _traced(changed, body, self.values, decompositions)
        return bool(wanted)

    def chosen(self, number: int) -> Region:
        """Return the region of a call."""
        return self.regions.get(CHOSEN.get(number, ()), self.first)


CHOSEN: dict[int, _Layouts] = {}
"""Layouts of the gradients in calls that are being traced, by number."""


def _fake_call(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return _without_values(FAMILIES[number].first.outputs)


def _fake_laid_out(given: torch.Tensor, strides: list[int]) -> torch.Tensor:
    return given.new_empty_strided(given.shape, strides)


def _fake_backward(tangents: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    gradients = FAMILIES[number].chosen(number).gradients
    return _without_values([node for node in gradients if node is not None])


def _without_values(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    """Return new fake tensors of the layouts of nodes, each on a storage of its own."""
    with core.real_tensors():
        return [regions.alike(node.meta["val"]) for node in nodes]


torch.library.register_fake("rotor_capture::call", _fake_call, lib=_LIBRARY)
torch.library.register_fake("rotor_capture::laid_out", _fake_laid_out, lib=_LIBRARY)
torch.library.register_fake("rotor_capture::backward", _fake_backward, lib=_LIBRARY)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *inputs: torch.Tensor) -> Any:
        ctx.number = number
        ctx.set_materialize_grads(False)
        made = torch.ops.rotor_capture.call(list(inputs), number)
        known = FAMILIES[number].first.differentiable
        ctx.mark_non_differentiable(*[t for k, t in enumerate(made) if k not in known])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # PyTorch also warns of exceptions in a backward: doubts are noted instead.
        number = ctx.number
        family = FAMILIES[number]
        region = family.first
        given = [gradients[k] for k in region.differentiable]
        wanted = set(region.wanted)
        count = len(region.primals)
        if any(gradient is None for gradient in given):
            DOUBTS[number] = "an output of a module has no gradient"
            return (None,) * (1 + count)
        if any(ctx.needs_input_grad[k + 1] != (k in wanted) for k in range(count)):
            DOUBTS[number] = "other inputs of a module need gradients"
        layouts = CHOSEN[number] = tuple(tuple(gradient.stride()) for gradient in given)
        if layouts not in family.regions:
            family.wanted.add(layouts)
            DOUBTS[number] = "the gradient of a module's output has another layout"
        made = iter(torch.ops.rotor_capture.backward(given, number))
        return (None, *[next(made) if k in wanted else None for k in range(count)])


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, strides: list[int]) -> torch.Tensor:
        return torch.ops.rotor_capture.laid_out(given, strides)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


def _laid_out(given: torch.Tensor, strides: list[int]) -> Any:
    return _LaidOut.apply(given, strides)


def call_of(number: int, *inputs: torch.Tensor) -> Any:
    """Return the results of a call of a module, as one operation."""
    return _Call.apply(number, *inputs)


def storage_of(node: fx.Node) -> int:
    """Return the identity of the storage of a node's tensor."""
    return core.storage_identity(node.meta["val"])


def _with_layouts(body: fx.GraphModule, layouts: dict[int, list[int]]) -> fx.GraphModule:
    """Return a body whose outputs, and so the gradients of these, have other strides."""
    graph = fx.Graph()
    returned: Any = graph.graph_copy(body.graph, {})
    outputs = list(returned)
    for k, strides in layouts.items():
        outputs[k] = graph.call_function(_laid_out, (outputs[k], strides))
    graph.output(tuple(outputs))
    return fx.GraphModule(body, graph)


def family_of(template: regions.Template, values: list[Any], decompositions: Any) -> Family:
    """Return the family of a template for inputs of these layouts."""
    first = _traced(template.body, template.body, values, decompositions)
    layouts = tuple(tuple(node.meta["val"].stride()) for node in first.tangents)
    family = Family(template, values, first, {layouts: first})
    if not all(node.meta["val"].is_contiguous() for node in first.tangents):
        # Gradients are mostly contiguous, also where the outputs are not.
        shapes = [node.meta["val"].shape for node in first.tangents]
        family.wanted.add(tuple(torch.empty(shape, device="meta").stride() for shape in shapes))
        family.learn(decompositions)
    return family


def _traced(
    body: fx.GraphModule, original: fx.GraphModule, values: Sequence[Any], decompositions: Any
) -> Region:
    """Return the joint graph of a template's body for inputs of these layouts."""
    if regions.holds_graphs(original):
        raise Uncertain("a module holds a graph or a constant")
    found = regions.joint_graph(body, [regions.stand_in(v) for v in values], decompositions)
    if found is None:
        raise Uncertain("a module has no backward")
    joint, count = found
    nodes = list(joint.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    returned = list(nodes[-1].args[0])
    primals, tangents = placeholders[: len(values)], placeholders[len(values) :]
    outputs, gradients = returned[:count], returned[count:]
    inner = [node for node in nodes if node.op == "call_function"]
    is_complete = len(inner) + len(placeholders) + 1 == len(nodes)
    for k, node in enumerate(outputs):
        if isinstance(node, fx.Node) and node.target is _LAID_OUT:
            outputs[k] = node.args[0]
    inner = [node for node in inner if node.target is not _LAID_OUT]
    made = [n for n in (*outputs, *gradients) if isinstance(n, fx.Node)]
    differentiable = regions.differentiable_outputs(original)
    if (
        not all(map(regions.is_plain, [*placeholders, nodes[-1]]))
        or not is_complete
        or len(gradients) != len(primals)
        or len(tangents) != len(differentiable)
        or not all(isinstance(node, fx.Node) for node in outputs)
        or any(node.op == "placeholder" for node in made)
        or len({*map(storage_of, made), *map(storage_of, placeholders)})
        != len(made) + len(placeholders)
        or any(n.meta["val"].untyped_storage().nbytes() != _bytes(n) for n in made)
    ):
        raise Uncertain("results of a module share memory, or it changes its inputs")
    return Region(
        primals,
        tangents,
        differentiable,
        [node for node in inner if not regions.is_backward(node)],
        [node for node in inner if regions.is_backward(node)],
        outputs,
        gradients,
    )


def _bytes(node: fx.Node) -> int:
    """Return the bytes of a storage that has the elements of a node's tensor only."""
    value = node.meta["val"]
    return int(extent_of(value.shape, value.stride()) * value.dtype.itemsize)
