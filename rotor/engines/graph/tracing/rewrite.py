"""Changes to a joint graph, and to its tracing, for the results of eager PyTorch.

BatchNorm that eager PyTorch gives to cuDNN is traced as PyTorch's own kernel, and is given back.

A convolution's backward gives the gradients of its input and of its weight in one operation, though
the kernels compute them separately. Split here, each can run at the best moment for memory:
the input's activation is freed before the gradient of the input comes, and large gradients of
weights, which stay, may come late.

Autograd adds the gradients of one tensor to each other in the order in which they arrive. Those
that a part of a model makes for an argument are results of their own, not their sum: code after the
part may have used the argument too, and its gradient comes first.

``torch.linalg.inv`` and its like check their results by an operation that returns nothing. It is
traced with a token, an empty tensor: each such operation takes the one of the operation before, the
first one an argument of the graph, and the last one's is returned. PyTorch gives the graph no
tensors for these arguments. A check needs no place but one behind the values that it reads.

A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` marks operators:

- MUST_SAVE: the operation runs once;
- PREFER_SAVE: it runs once as long as a plan fits so;
- MUST_RECOMPUTE: a copy of the operation in the backward makes the values that the backward
  reads, unless it draws random numbers;
- MUST_CPU_OFFLOAD, PREFER_CPU_OFFLOAD: as MUST_SAVE and PREFER_SAVE, since a second tier first
  takes values that are never computed again;
- PREFER_RECOMPUTE, which ``checkpoint()`` without a policy means too: the plan decides.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from rotor._pytorch import captures, core, cudnn
from rotor.errors import CaptureError


def drop_tokens(module: fx.GraphModule) -> list[fx.Node]:
    """Make checks in a joint graph plain operations; return the tokens that the backward is given.

    Tokens of the forward stay among the inputs, unused; None is returned for them. Raise
    CaptureError if another operation has effects that come in order.
    """
    graph = module.graph
    effects = [node for node in graph.nodes if captures.is_effect(node)]
    for node in effects:
        token, operation, *arguments = node.args
        if operation is not captures.LINALG_CHECK:
            raise CaptureError(
                f"{operation} has effects that come in order, and a plan may change the order of "
                'operations: leave the engine at "auto", or call it outside of the model'
            )
        with graph.inserting_before(node):
            check = graph.call_function(operation, tuple(arguments), node.kwargs)
        check.meta = {**node.meta, "val": None}
        for user in list(node.users):
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    inputs = graph.find_nodes(op="placeholder")
    late = [node for node in inputs if captures.is_token(node, of_backward=True)]
    kept = {node for node in inputs if captures.is_token(node)}
    output = graph.output_node()
    returned: list[fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    output.args = ([None if one in kept else one for one in returned if one not in late],)
    for node in late:
        graph.erase_node(node)
    return late


_MOST_TERMS = 8
"""Terms of a gradient beyond which their sum is one result: all are in memory at the end."""


def split_sums(module: fx.GraphModule, outputs: int, are_arguments: Sequence[bool]) -> list[int]:
    """Make terms of gradients that autograd adds up results of a joint graph.

    The first `outputs` results are the forward's, and the others the gradients of the inputs, of
    which `are_arguments` names those whose sums are split. The first term of a sum takes its place,
    and the others follow all results; return the number of the input of each of these.
    """
    node = module.graph.output_node()
    returned: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    further: list[tuple[int, fx.Node]] = []
    for number, is_argument in enumerate(are_arguments):
        total = returned[outputs + number]
        terms = _terms(total) if is_argument and returned.count(total) == 1 else []
        if 1 < len(terms) <= _MOST_TERMS:
            returned[outputs + number] = terms[0]
            further += [(number, term) for term in terms[1:]]
    if further:
        node.args = ((*returned, *[term for _, term in further]),)
        for sum_ in reversed(module.graph.nodes):
            if captures.is_accumulation(sum_) and not sum_.users:
                module.graph.erase_node(sum_)
    return [number for number, _ in further]


def _terms(total: Any) -> list[Any]:
    """Return the gradients that autograd has added up, in its order."""
    terms: list[Any] = []
    while captures.is_accumulation(total) and len(total.users) == 1:
        total, term = total.args
        terms.insert(0, term)
    return [total, *terms]


_BACKWARD = torch.ops.aten.convolution_backward.default
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_STEPS = 1 << 49
"""Steps to which a reciprocal of a reciprocal is rounded, so that it equals the first number."""


def as_in_eager() -> dict[Any, Callable[..., Any]]:
    """Return decompositions that keep the operators that eager PyTorch runs.

    Dropout on a CPU multiplies by a mask that is divided in the type of its input. Traced, it is
    ``native_dropout``, which multiplies by the reciprocal: in float32, many rates give other bits,
    and in types below its backward does. Where everything is dropped, eager PyTorch draws no
    random numbers.
    """
    aten = torch.ops.aten
    return {
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: _dropout_backward,
    }


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if p == 1 and train:
        mask = torch.ones_like(x, dtype=torch.bool)
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device)), mask
    if not train or x.device.type != "cpu" or x.dtype != torch.float32 or _is_exact(1 - p):
        return NotImplemented
    mask = torch.ops.aten.bernoulli.p(torch.zeros_like(x, dtype=torch.bool), 1 - p)
    return x.mul(mask).mul(_quotient(1 - p)), mask


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    if gradient.device.type != "cpu" or not scale:
        return NotImplemented
    fraction, exponent = math.frexp(1 / scale)
    kept = math.ldexp(round(fraction * _STEPS) / _STEPS, exponent)
    if gradient.dtype in _LOW_PRECISION:
        return gradient * mask.to(gradient.dtype).mul(_quotient(kept))
    if gradient.dtype != torch.float32 or _is_exact(kept):
        return NotImplemented
    return gradient.mul(mask).mul(_quotient(kept))


def _single(number: float) -> float:
    """Return a number as float32 holds it."""
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


def _quotient(kept: float) -> float:
    """Return the reciprocal of a share, as it is computed in float32."""
    return _single(1 / _single(kept))


def _is_exact(kept: float) -> bool:
    """Return whether the reciprocal, rounded to float32, is the same."""
    return _quotient(kept) == _single(1 / kept)


def split_convolutions(module: fx.GraphModule) -> int:
    """Split convolutions' backwards that give both kinds of gradients in two; return how many."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is _BACKWARD and _is_splittable(node):
            _split(module.graph, node)
            count += 1
    return count


def _is_splittable(node: fx.Node) -> bool:
    mask = node.args[-1]
    return (
        isinstance(mask, list | tuple)
        and len(node.args) == 11
        and bool(mask[0])
        and any(mask[1:])
        and all(user.target is getitem for user in node.users)
    )


def _split(graph: fx.Graph, node: fx.Node) -> None:
    mask = [bool(flag) for flag in node.args[-1]]  # type: ignore[union-attr]
    made = {}
    with graph.inserting_before(node):
        for part in ([False, *mask[1:]], [True, False, False]):
            made[part[0]] = graph.call_function(_BACKWARD, (*node.args[:-1], part), node.kwargs)
            values = [v if flag else None for v, flag in zip(node.meta["val"], part, strict=True)]
            made[part[0]].meta.update(node.meta)
            made[part[0]].meta["val"] = tuple(values)
    for user in list(node.users):
        user.args = (made[bool(user.args[1] == 0)], user.args[1])
    graph.erase_node(node)


def normalise_as_in_eager(module: fx.GraphModule) -> int:
    """Give every training BatchNorm that eager PyTorch gives to cuDNN to cuDNN.

    Return the number of such operations in the forward of the joint graph, which is changed in
    place.
    """
    graph, reserves = module.graph, dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        if node.target in (cudnn.NATIVE, cudnn.NATIVE_WITHOUT_STATISTICS):
            given = list(node.args)
            if node.target is cudnn.NATIVE_WITHOUT_STATISTICS:
                given[3:3] = [None, None]
            known = [part.meta["val"] if isinstance(part, fx.Node) else part for part in given]
            if given[5] and cudnn.normalises(known[0], known[1:5], known[7]):
                replacement = _replaced(node, cudnn.FORWARD, given)
                reserves[replacement] = _reserve_of(replacement, known[0])
        elif node.target is cudnn.NATIVE_BACKWARD:
            args: Any = node.args
            gradient, x, weight, mean, variance, *kept, training, epsilon, _ = args
            reserve = next((reserves[n] for n in kept[0].all_input_nodes if n in reserves), None)
            if training and reserve is not None:
                given = [gradient, x, weight, mean, variance, *kept, epsilon, reserve]
                _replaced(node, cudnn.BACKWARD, given)
    return len(reserves)


def _replaced(node: fx.Node, target: Any, args: list[Any]) -> fx.Node:
    """Return a new node that has taken the place of a node."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, tuple(args))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _reserve_of(forward: fx.Node, x: torch.Tensor) -> fx.Node:
    """Return a new node for cuDNN's reserve, a further result of a forward."""
    made = forward.meta["val"]
    with core.fake_mode_of([forward.args[0]]):
        made = [*made, *[torch.empty(0) for _ in range(5 - len(made))], cudnn.reserve_like(x)]
    forward.meta["val"] = tuple(made)
    with forward.graph.inserting_after(forward):
        reserve = forward.graph.call_function(getitem, (forward, 5))
    reserve.meta.update(forward.meta)
    reserve.meta["val"] = made[5]
    return reserve


_SAVED = ("MUST_SAVE", "MUST_CPU_OFFLOAD")
_PREFERRED = ("PREFER_SAVE", "PREFER_CPU_OFFLOAD")
_RECOMPUTED = "MUST_RECOMPUTE"


def _mark(node: fx.Node) -> str:
    mark = node.meta.get("recompute")
    return "" if mark is None else str(getattr(mark, "name", ""))


def is_saved(node: fx.Node) -> bool:
    """Return whether an operation must not run again."""
    return _mark(node) in _SAVED


def prefers_saving(node: fx.Node) -> bool:
    """Return whether an operation runs again only where no plan fits otherwise."""
    return _mark(node) in _PREFERRED


def described_marks(nodes: Iterable[fx.Node]) -> str:
    """Return a text on the marks of a graph; empty where a plan decides about all operations."""
    count: dict[str, int] = {}
    for node in nodes:
        mark = _mark(node)
        if mark in (*_SAVED, *_PREFERRED, _RECOMPUTED):
            count[mark] = count.get(mark, 0) + 1
    return ", ".join(f"{number} {mark}" for mark, number in count.items())


def recompute_marked(
    module: fx.GraphModule,
    forward: set[fx.Node],
    is_view: Callable[[fx.Node], bool],
    is_fixed: Callable[[fx.Node], bool],
) -> int:
    """Copy operations marked MUST_RECOMPUTE to the backward, for its reads; return their number.

    `module` is the joint graph, and `forward` its nodes before the loss. `is_view` tells whether a
    node is a view or an item of another, and `is_fixed` whether an operation must not run a second
    time.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    if not any(_mark(node) == _RECOMPUTED for node in nodes):
        return 0
    again: set[fx.Node] = set()
    for node in nodes:
        if node not in forward:
            continue
        is_marked = _mark(node) == _RECOMPUTED and not is_fixed(node)
        if is_marked or (is_view(node) and again.intersection(node.all_input_nodes)):
            again.add(node)
    # A copy stands before the first node that reads it; places are found from the last copy on.
    places: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in forward:
            for read in again.intersection(node.all_input_nodes):
                places.setdefault(read, node)
    order = {node: number for number, node in enumerate(nodes)}
    for node in reversed([node for node in nodes if node in again]):
        if node in places:
            for read in again.intersection(node.all_input_nodes):
                here = places.get(read, places[node])
                places[read] = min(here, places[node], key=order.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in places:
            continue
        with module.graph.inserting_before(places[node]):
            copy = module.graph.node_copy(node, lambda read: copies.get(read, read))
        copy.meta["partitioner_tag"] = "is_backward"
        copy.meta["val"] = _made(copy)
        copy.meta.pop("recompute", None)
        copies[node] = copy
    for node in nodes:
        if node not in forward:
            for read in copies.keys() & set(node.all_input_nodes):
                node.replace_input_with(read, copies[read])
    return sum(not is_view(node) for node in copies)


def _made(node: fx.Node) -> Any:
    def value(read: fx.Node) -> Any:
        return read.meta["val"]

    with core.fake_mode_of([node, *node.all_input_nodes]):
        return node.target(  # type: ignore[operator]
            *fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value)
        )
