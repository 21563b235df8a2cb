"""BatchNorm by cuDNN, as eager PyTorch runs it, in operators that change nothing in place.

PyTorch traces ``cudnn_batch_norm`` as its own kernel, whose bits and speed are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rotor._pytorch import core, symbols

NATIVE = torch.ops.aten._native_batch_norm_legit_functional.default
NATIVE_WITHOUT_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
NATIVE_BACKWARD = torch.ops.aten.native_batch_norm_backward.default

_LIBRARY = torch.library.Library("rotor_cudnn", "FRAGMENT")
_LIBRARY.define(
    "cudnn_batch_norm(Tensor input, Tensor weight, Tensor bias, Tensor? mean, Tensor? variance, "
    "bool training, float momentum, float epsilon)"
    " -> (Tensor output, Tensor kept_mean, Tensor kept_scale, Tensor new_mean, "
    "Tensor new_variance, Tensor reserve)"
)
_LIBRARY.define(
    "cudnn_batch_norm_backward(Tensor gradient, Tensor input, Tensor weight, Tensor? mean, "
    "Tensor? variance, Tensor kept_mean, Tensor kept_scale, float epsilon, Tensor reserve)"
    " -> (Tensor, Tensor, Tensor)"
)
FORWARD = torch.ops.rotor_cudnn.cudnn_batch_norm.default
"""Results: as of ``_native_batch_norm_legit_functional``, and cuDNN's reserve for the backward."""

BACKWARD = torch.ops.rotor_cudnn.cudnn_batch_norm_backward.default


@torch.library.impl(_LIBRARY, "cudnn_batch_norm", "CUDA")
def _forward(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any) -> Any:
    statistics = (None, None) if mean is None else (mean.clone(), variance.clone())
    run = torch.ops.aten.cudnn_batch_norm.default
    output, *kept, reserve = run(x, weight, bias, *statistics, *settings)
    made = [weight.new_empty(0) if value is None else value for value in statistics]
    return output, *kept, *made, reserve


@torch.library.impl(_LIBRARY, "cudnn_batch_norm_backward", "CUDA")
def _backward(gradient: Any, x: Any, weight: Any, mean: Any, variance: Any, *others: Any) -> Any:
    *kept, epsilon, reserve = others
    run = torch.ops.aten.cudnn_batch_norm_backward.default
    # cuDNN may write to the reserve, which a repeated backward reads again.
    return run(x, gradient, weight, mean, variance, *kept, epsilon, reserve.clone())


def normalises(x: Any, tensors: Sequence[Any], epsilon: float) -> bool:
    """Return whether eager PyTorch gives a training BatchNorm of `x` to cuDNN.

    `tensors` are the weight, the bias, and the running statistics or ``None``.
    """
    if x.device.type != "cuda" or tensors[0] is None or symbols.has_symbols(x):
        return False
    private: Any = torch._C
    chosen = private._select_batch_norm_backend(x, *tensors, True, epsilon)
    return bool(chosen == private._BatchNormBackend.Cudnn)


def reserve_like(x: Any) -> Any:
    """Return a tensor of the size and type of cuDNN's reserve for a training BatchNorm."""
    private: Any = torch._C
    size = private._get_cudnn_batch_norm_reserve_space_size(x, True)
    return x.new_empty((size,), dtype=torch.uint8)


core.check(
    """
    _C._BatchNormBackend _C._get_cudnn_batch_norm_reserve_space_size
    _C._select_batch_norm_backend
    """
)
