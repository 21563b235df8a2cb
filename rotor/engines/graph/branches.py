"""Proof that code which is written for compilation gives the same outputs as plain execution.

Code may ask whether it is being compiled. A capture answers no, as in plain execution. Where that
branch cannot be captured, the other branch is captured, and used if both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rotor._pytorch import core
from rotor.common.generators import autocast_off
from rotor.common.tensor_trees import output_tensors
from rotor.common.undisturbed import random_states_kept, trial
from rotor.engines.contract import Call, Context
from rotor.engines.graph.capture import Unplanned
from rotor.engines.graph.lowering import Lowered

__all__ = ["gives_plain_outputs"]


def gives_plain_outputs(context: Context, found: Unplanned, call: Call) -> bool:
    """Return whether a captured call gives the outputs of plain execution, bit for bit."""
    module, device = context.module, context.device_of(call)
    given = (*call.arguments, call.targets)
    with torch.no_grad(), trial(module, given, device) as run:
        with random_states_kept(device), autocast_off(device.type):  # The graph has the casts.
            made = _outputs(found.captured.lowered, found.primals)
        args, kwargs, targets = run.arguments
        plain = context.with_loss(module.forward(*args, **kwargs), targets)
    others = output_tensors(plain)
    return bool(made) and all(any(_same(one, other) for other in others) for one in made)


def _outputs(lowered: Lowered, primals: list[Any]) -> list[torch.Tensor]:
    """Return the outputs of a joint graph, whose operations run once and in order."""
    outputs = [n for n in lowered.outputs[len(lowered.mutated) :] if isinstance(n, fx.Node)]
    needed, waiting = dict.fromkeys(lowered.primals), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed[node] = None
            waiting.extend(node.all_input_nodes)
    known: dict[fx.Node, Any] = dict(zip(lowered.primals, primals, strict=True))
    left = {node: sum(user in needed for user in node.users) for node in needed}
    for node in lowered.module.graph.nodes:
        if node in known or node not in needed:
            continue
        if node.op == "get_attr":
            known[node] = core.attribute(lowered.module, str(node.target))
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*arguments[0], **arguments[1])
        for used in node.all_input_nodes:
            left[used] -= 1
            if not left[used] and used not in outputs:
                del known[used]
    return [known[node] for node in outputs]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(
        torch.nan_to_num(one, nan=0.5), torch.nan_to_num(other, nan=0.5)
    )
