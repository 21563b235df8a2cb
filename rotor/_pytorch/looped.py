"""Operators whose gradients PyTorch computes by a loop of small operators, as one of our own each.

Traced, such a loop is thousands of operations, and takes minutes. It runs within one operation
here, from the same inputs, by PyTorch's own code: with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["keep_whole"]

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
    ]
    for node in found:
        node.op, node.target = "call_function", _PRODUCT
    if found:
        module.recompile()
