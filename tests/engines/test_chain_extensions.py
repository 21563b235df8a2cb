"""What stages may contain beside layers: hooks, parametrizations, custom Functions, functorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_blocks import BATCH, INNER, WIDTH, Block, check_planned, planned, seeded
from torch import nn
from torch.autograd import Function
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint
from training import same

import rotor

Made = Callable[[], nn.Module]


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = 2.0
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * (1 + x.sign() * 1e-3)


class Masked(Function):
    """Keeps a random mask in its context, not among saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mask = torch.rand_like(x) > 0.3
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.mask


class WithFunction(Block):
    function: Any = Doubled

    def scale(self, h: torch.Tensor) -> Any:
        return self.function.apply(h).mean(1, keepdim=True)


class WithMask(WithFunction):
    function = Masked


def doubled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class TensorHooks(Block):
    def begin(self) -> None:
        self.first.weight.register_hook(lambda g: g * 0.5)
        self.second.weight.register_post_accumulate_grad_hook(doubled)

    def scale(self, h: torch.Tensor) -> Any:
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return 1.0


class ModuleHooks(Block):
    def begin(self) -> None:
        self.first.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        self.first.register_forward_hook(lambda m, args, y: y + 1)
        self.second.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        self.second.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(Block):
    def begin(self) -> None:
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.second)
        self.square = nn.Linear(INNER, INNER, bias=False)
        parametrize.register_parametrization(self.square, "weight", Symmetric())

    def scale(self, h: torch.Tensor) -> Any:
        return self.square(h).mean(1, keepdim=True)


class CachedParametrization(Parametrized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(x)


class Mapped(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return torch.vmap(lambda row: torch.outer(row[:4], row[:4]).logsumexp((0, 1)))(h)[:, None]


class InnerGradient(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return torch.func.grad(lambda z: z.sin().sum())(h).mean(1, keepdim=True)


class SecondOrder(Block):
    def scale(self, h: torch.Tensor) -> Any:
        with torch.enable_grad():
            z = h.detach().requires_grad_()
            (g,) = torch.autograd.grad(z.tanh().sum(), z, create_graph=True)
        return g.detach().mean(1, keepdim=True)


def averaged(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h).mean(1, keepdim=True)


class InnerCheckpoint(Block):
    def scale(self, h: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return averaged(h)
        return checkpoint.checkpoint(
            lambda z: F.gelu(z).mean(1, keepdim=True), h, use_reentrant=False
        )


class SavedHooks(Block):
    def scale(self, h: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return h.exp().mean(1, keepdim=True)


KINDS: list[type[Block]] = [
    WithFunction,
    WithMask,
    TensorHooks,
    ModuleHooks,
    Parametrized,
    CachedParametrization,
    Mapped,
    InnerGradient,
    SecondOrder,
    InnerCheckpoint,
    SavedHooks,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_equal_within_the_limit(kind: type[Block], share: float) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(4)))

    chk = check_planned(make, share)
    assert chk.plan.measured_bytes <= chk.mem_limit


def test_hooks_on_the_stages_themselves() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(*(Block() for _ in range(5)))
        net[1].register_forward_hook(lambda m, args, y: y * 0.9)
        net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        net[3].register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
        return net

    check_planned(make, 0.0)


def test_functorch_around_a_plan_is_refused() -> None:
    net = seeded(lambda: nn.Sequential(*(Block() for _ in range(3))))
    chk = planned(net, 0.0)
    before = [p.clone() for p in net.parameters()]
    x = torch.randn(2, BATCH, WIDTH)
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.vmap(chk)(x)
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.func.grad(lambda z: chk(z).sum())(x[0])
    assert same(before, list(net.parameters()))
    assert isinstance(chk, rotor.Checkpointable)


def test_gradients_within_a_forward_are_refused_in_words() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, INNER)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.up(y).tanh().sum(), y, create_graph=True)
            return x - slope

    net = seeded(lambda: nn.Sequential(Block(), Force(), Block()))
    chk = rotor.Checkpointable(net, mem_limit="1GB", engine="chain")
    with pytest.raises(ValueError, match="stage 1 runs only where gradients are enabled"):
        chk(torch.randn(BATCH, WIDTH))
