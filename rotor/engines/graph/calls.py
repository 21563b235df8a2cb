"""Calls of a wrapped model: checks of their arguments, their keys, and their other branches.

Code may ask whether it is being compiled. A capture answers no, as in plain execution. Where that
branch cannot be captured the other one is, and is used if both give the same bits.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import core, devices
from rotor.common.calls import (
    PlainValues,
    flattened_call,
    is_plain_value,
    leaf_signature,
    mode_signature,
)
from rotor.common.checksums import checksum
from rotor.common.modes import autocast_off
from rotor.common.ranks import NeedsPeers
from rotor.common.tensor_trees import device_of, output_tensors
from rotor.common.undisturbed import (
    Trial,
    generators_kept,
    random_states,
    random_states_kept,
    trial,
)
from rotor.engines.contract import Call, Context, Key
from rotor.engines.graph.capture import Unplanned
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.engines.peers import ALONE, Peers

logger = logging.getLogger("rotor")

COUNTS = ("allocated", "reserved")
"""Accepted values of ``counts=``."""


def checked_counts(counts: str, engine: str) -> str:
    """Return the bytes that a limit counts; raise ValueError if an option does not suit them."""
    if counts not in COUNTS:
        raise ValueError(f"unknown counts {counts!r}, expected one of {', '.join(COUNTS)}")
    if counts == "reserved" and engine not in ("auto", "graph"):
        raise ValueError(
            'counts="reserved" needs the order of all allocations before a step runs, which '
            f'engine="{engine}" does not have: use engine="graph", or leave counts at "allocated"'
        )
    return counts


def check_counts(counts: str, device: torch.device) -> None:
    """Raise ValueError if the allocator of a device reserves nothing that could be counted."""
    if counts == "reserved" and device.type == "cpu":
        raise ValueError(
            'counts="reserved" is for accelerators, and this step runs on the CPU, whose allocator '
            'reserves no memory: leave counts at "allocated"'
        )


def captured_key(context: Context, call: Call, *, takes_numbers: bool = False) -> Key:
    """Return the kind of a captured step: its arguments, modes, and flags."""
    leaves, structure = flattened_call(call.args, call.kwargs, call.targets)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    device = context.device_of(call) if first is None else first.device
    kind = devices.type_of(device)
    if kind == "meta":
        raise ValueError(
            "the arguments are meta tensors, which nothing can be trained on: "
            "rotor.graph.build(model, ..., profile=Machine(...)) and rotor.graph.plan plan "
            "without values"
        )
    check_counts(context.settings.counts, device)
    required, absent = context.structure.parameter_flags()
    context.structure.watch({type(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)})
    described, values = [], {}
    for number, leaf in enumerate(leaves):
        if is_plain_value(leaf):
            values[number] = leaf_signature(leaf)
            described.append(type(leaf))
        else:
            described.append(leaf_signature(leaf))
    plain: Any = tuple(values.items())
    if values and context.peers.ranks is None:
        plain = PlainValues(values, context.reads[structure])
        if takes_numbers:
            plain.reads.see(plain, leaves)
    measured = (
        structure,
        tuple(described),
        plain,
        mode_signature(kind),
        context.structure.training_flags(),
        required,
    )
    return Key(measured, absent)


def gives_plain_outputs(context: Context, found: Unplanned, call: Call) -> bool:
    """Return whether a captured call gives the outputs of plain execution, bit for bit."""
    module, device = context.module, context.device_of(call)
    given = (*call.arguments, call.targets)
    with torch.no_grad(), trial(module, given, device, peers=context.peers.members) as run:
        if not context.peers.all_are_at("comparing"):
            return False
        with random_states_kept(device), autocast_off(device.type):  # The graph has the casts.
            made = _outputs(found.captured.lowered, found.primals)
        plain = context.plain(*run.arguments)
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


def takes_targets(module: nn.Module) -> bool:
    """Return whether a model's own forward has an argument called ``targets``."""
    parameters = inspect.signature(module.forward).parameters
    return "targets" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def check_arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if the model cannot be called with these arguments, or is on several devices."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__} cannot be called with this sample: {error}; give a tuple of "
            "its positional arguments, or a dictionary of keyword arguments"
        ) from None
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}), and one "
            "limit is for one device: wrap the parts, one on each device"
        )


def run_once(module: nn.Module, args: Any, kwargs: dict[str, Any], peers: Peers = ALONE) -> bool:
    """Have a model prepare itself as in its first forward; return whether one completed.

    The forward runs twice without gradients, which fails for a forward that computes some itself.
    Changes that the second run does not make again stay; all others are undone. A model that draws
    random numbers to prepare itself, or whose first forward gives other outputs, has to do so in a
    step. Of `peers` all do this, or none.
    """
    device = device_of((args, kwargs), module)
    runs: list[Trial] = []
    ends: list[Any] = []
    try:
        for _ in range(2):
            runs.append(Trial(module, (args, kwargs), device, peers=peers.members))
            given, named = runs[-1].arguments
            draws = random_states_kept(device), generators_kept(module.modules())
            if not peers.all_are_at("preparing"):
                break
            with runs[-1].guarded(), torch.no_grad(), draws[0], draws[1]:
                output = module.forward(*given, **named)
                sums = [int(checksum(tensor)) for tensor in output_tensors(output)]
                ends.append((random_states(module.modules(), device), sums))
                del output
    except NeedsPeers:
        raise
    except Exception as error:
        logger.info("a forward without gradients failed: %s", error)
    finally:
        is_prepared = len(ends) == 2 and ends[0] == ends[1]
        if is_prepared:
            runs[0].end(runs[1])
        else:
            for run in reversed(runs):
                run.end()
    return is_prepared
