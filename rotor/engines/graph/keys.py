"""Keys of captured steps: the properties of a call on which a capture depends."""

from __future__ import annotations

from typing import Any

import torch

from rotor._pytorch import devices
from rotor.common.calls import (
    PlainValues,
    flattened_call,
    is_plain_value,
    leaf_signature,
    mode_signature,
)
from rotor.engines.contract import Call, Context, Key
from rotor.engines.graph.counting import check_counts

__all__ = ["captured_key"]


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
