"""Small models, steps of models, and what it means that two ways of training them are equal."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import rotor
from rotor.algorithms.sequence import Sequence


class Habits(dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]):
    """Functions by name, each with one that makes its arguments; called, it takes another in."""

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        super().__init__()
        self._make = make

    def __call__(self, make: Callable[[], tuple[Any, ...]] | None = None) -> Any:
        def taken_in(function: Callable[..., Any]) -> Callable[..., Any]:
            self[function.__name__] = function, make or self._make
            return function

        return taken_in


def schedules(n: int) -> dict[str, Sequence]:
    """Valid sequences of several shapes for n stages, n >= 2."""
    last = n - 1
    kept = [("Fe", i) for i in range(n)] + [("L", n)] + [("B", i) for i in range(last, -1, -1)]
    everything: list[tuple[str, int]] = [("Fck", 0), *(("Fn", i) for i in range(1, n)), ("L", n)]
    for i in range(last, -1, -1):
        everything += [("Fck", 0)] if i else []
        everything += [("Fn", k) for k in range(1, i)]
        everything += [("Fe", i), ("B", i)]
    half = n // 2
    halves: list[tuple[str, int]] = [("Fck", 0), *(("Fn", i) for i in range(1, half))]
    halves += [("Fe", i) for i in range(half, n)] + [("L", n)]
    halves += [("B", i) for i in range(last, half - 1, -1)]
    halves += [("Fe", i) for i in range(half)] + [("B", i) for i in range(half - 1, -1, -1)]
    segments: list[tuple[str, int]] = [("Fck", i) for i in range(n)] + [("L", n)]
    for i in range(last, -1, -1):
        segments += [("Fe", i), ("B", i)]
    mixed: list[tuple[str, int]] = [("Fe", 0), *(("Fck", i) for i in range(1, n)), ("L", n)]
    for i in range(last, 0, -1):
        mixed += [("Fe", i), ("B", i)]
    mixed += [("B", 0)]
    return {
        "kept": Sequence(kept),
        "recompute_all": Sequence(everything),
        "halves": Sequence(halves),
        "each": Sequence(segments),
        "mixed": Sequence(mixed),
    }


class Result:
    """Everything a step leaves behind, for comparison bit by bit."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Any], Any],
        x: Any,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        seed: int = 0,
        steps: int = 1,
    ) -> None:
        tensors = x if isinstance(x, tuple) else (x,)
        model.zero_grad()
        for tensor in tensors:
            tensor.grad = None
        torch.manual_seed(seed)
        self.outputs = []
        for _ in range(steps):
            y = call(x)
            value = loss(y) if loss is not None else default_loss(y)
            value.backward()
            self.outputs.append(value.detach().clone())
        self.gradients = [_copy(p.grad) for p in model.parameters()]
        self.inputs = [_copy(t.grad) for t in tensors]
        self.buffers = [b.clone() for b in model.buffers()]
        self.rng = torch.get_rng_state()

    def differences(self, other: Result) -> list[str]:
        """The names of what is not equal."""
        return [
            name
            for name in ("outputs", "gradients", "inputs", "buffers")
            if not same(getattr(self, name), getattr(other, name))
        ] + ([] if torch.equal(self.rng, other.rng) else ["rng"])


def weighted_loss(y: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient has the dimensions of the tensor in the opposite order."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float32).to(y.dtype)
    order = tuple(range(y.dim()))[::-1]
    return (y * weights.reshape(y.shape[::-1]).permute(order)).sum()


def default_loss(y: Any) -> torch.Tensor:
    """A scalar that depends on every floating-point tensor of an output."""
    tensors = y if isinstance(y, tuple | list) else (y,)
    total = torch.zeros(())
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            total = total + (tensor * tensor.detach().cos()).sum().float()
    return total


def conv_net(inplace: bool = True, dropout: bool = True) -> nn.Sequential:
    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=inplace)
        )

    return nn.Sequential(
        block(3, 16),
        block(16, 16),
        *([nn.Dropout(0.1)] if dropout else []),
        nn.Sequential(block(16, 16), block(16, 16)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def images(batch: int = 8, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(batch, 3, 24, 24, requires_grad=requires_grad)


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and a deep copy of it."""
    return model, copy.deepcopy(model)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors in lists, tuples and dictionaries bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)


def gradients_of(*models: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients of models."""
    return [_copy(parameter.grad) for model in models for parameter in model.parameters()]


def trained(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, int], Any],
    steps: int = 3,
    *,
    state: Callable[[Any], Any] = lambda model: None,
    accumulates: bool = False,
    rate: float = 0.0,
    **limits: Any,
) -> tuple[list[Any], Any]:
    """What steps from a seed leave, plain or within limits, and the model.

    `loss_of` is called with the model and the number of the step, and returns a loss, or a tuple of
    one and of other tensors to compare. After each step there are these, gradients, buffers and a
    `state`, at the end the parameters and the generators' states.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    net = make()
    model = rotor.Checkpointable(net, **{"verbosity": 0} | limits) if limits else net
    optimizer = torch.optim.SGD(net.parameters(), rate)
    found: list[Any] = []
    for number in range(steps):
        if not accumulates:
            net.zero_grad()
        made = loss_of(model, number)
        loss, *others = made if isinstance(made, tuple) else (made,)
        loss.backward()
        found.append([*map(_copy, (loss, *others, *net.buffers())), gradients_of(net)])
        found.append(copy.deepcopy(state(model)))
        if rate:
            optimizer.step()
    return [*found, [*net.parameters()], torch.get_rng_state(), random.getstate()], model


def check_equal(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, int], Any],
    steps: int = 3,
    **options: Any,
) -> Any:
    """Check that steps within limits leave what plain ones leave; return the limited model."""
    common = {k: v for k, v in options.items() if k in ("state", "accumulates", "rate")}
    expected, _ = trained(make, loss_of, steps, **common)
    found, model = trained(make, loss_of, steps, **options)
    assert same(found, expected)
    return model
