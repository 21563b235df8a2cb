"""Cases: custom Functions and operators, outputs of odd shapes, sizes that depend on data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from zoo.cases import BATCH, HIDDEN, WIDTH, Case, Loop, Residual, blocks, case, cases, rows
from zoo.models import Function


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient * ctx.scale, None


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_non_differentiable()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def _reverse(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _Reversed.apply(x)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


@torch.library.custom_op("rotor_zoo::scaled", mutates_args=())
def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


_scaled.register_fake(lambda x, factor: torch.empty_like(x))
_scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("rotor_zoo::noisy", mutates_args=())
def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


_noisy.register_fake(torch.empty_like)
_noisy.register_autograd(lambda ctx, gradient: gradient)


@case
def checkpoint_inside() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return Case(lambda: Function(forward, body=blocks()))


@case
def checkpoint_in_stage() -> Case:
    class Checked(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return Case(lambda: blocks(Checked))


@case
def gradients_detached() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.body(x) - target

    return Case(lambda: Function(forward, body=blocks(depth=3), teacher=blocks(depth=2)))


@dataclass
class _Output:
    last: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


def _output(forward: Any, depth: int = 4) -> Case:
    return Case(lambda: Function(forward, body=blocks(depth=depth)))


@case
def dataclass_output() -> Case:
    def forward(self: Any, x: torch.Tensor) -> _Output:
        hidden = []
        for block in self.body:
            x = block(x)
            hidden.append(x)
        return _Output(x, hidden[1:3])

    return _output(forward)


@case
def dictionary_output() -> Case:
    def forward(self: Any, x: torch.Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"logits": y, "nothing": None, "size": x.shape[0], "inner": {"mean": y.mean()}}

    return _output(forward)


@case
def aliasing_outputs() -> Case:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.body(x)
        return y, y.view(-1), y[: BATCH // 2], y.T

    return _output(forward)


@case
def same_output_twice() -> Case:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return y, y

    return _output(forward)


@case
def integer_output() -> Case:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return y, y.argmax(1)

    return _output(forward)


@case
def tuples_between_stages() -> Case:
    class Pair(Residual):
        def forward(self, xs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x, skip = xs
            return super().forward(x + skip), x

    def make() -> nn.Module:
        return nn.Sequential(Function(lambda _, x: (x, x * 0.5)), *blocks(Pair, 4))

    return Case(make)


@case
def no_sequential_inside_function_with_keywords() -> Case:
    def forward(self: Any, x: torch.Tensor, *, scale: float, bias: Any = None) -> torch.Tensor:
        y = self.body(x) * scale
        return y if bias is None else y + bias

    return Case(
        lambda: Function(forward, body=blocks(depth=4)),
        keywords=lambda k: {"scale": 0.5, "bias": torch.ones(WIDTH) if k % 2 else None},
    )


@case
def text_argument() -> Case:
    def forward(self: Any, x: torch.Tensor, mode: str) -> torch.Tensor:
        return self.body(x).relu() if mode == "relu" else self.body(x).tanh()

    return Case(
        lambda: Function(forward, body=blocks(depth=4)),
        lambda k: (rows(k)[0], "relu" if k % 2 else "tanh"),
    )


@case
def input_written_to() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.body(x)

    return _output(forward)


@case
def early_exit() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x)
            if x.abs().mean().item() > 0.9:
                break
        return x

    return replace(_output(forward, 6), varies=True)


@case
def selected_rows() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            chosen = (x[:, 0] > 0).nonzero().squeeze(1)
            x = x.index_add(0, chosen, block(x[chosen]))
        return x

    return replace(_output(forward), varies=True, steps=10)


@case
def unique_values() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        values, inverse = torch.unique((x[:, 0] * 3).round(), return_inverse=True)
        return self.body(x) * values[inverse][:, None]

    return replace(_output(forward), varies=True)


@case
def repeated_rows() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).repeat_interleave((x[:, 0] > 0).long() + 1, 0)

    return replace(_output(forward), varies=True)


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero().squeeze(1)
            y = y.index_add(0, index, expert(x[index]) * weight[index, None])
        return x + y


@case
def experts_dense() -> Case:
    class Dense(_Routed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.gate(x).softmax(1)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return x + (outputs * weight[:, :, None]).sum(1)

    return Case(lambda: Loop(Dense, 3))


@case
def list_of_inputs() -> Case:
    def forward(self: Any, xs: list[torch.Tensor]) -> torch.Tensor:
        return sum(self.body(x) for x in xs)

    return Case(
        lambda: Function(forward, body=blocks(depth=3)),
        lambda k: ([torch.randn(32, WIDTH) for _ in range(3)],),
    )


@case
def ragged_loss() -> Case:
    def loss(_: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, torch.arange(output.shape[0]) % WIDTH)

    return Case(Loop, loss=loss)


cases(
    custom_function=lambda: Case(lambda: blocks(lambda: Residual(lambda h: _Cube.apply(h, 0.01)))),
    reversed_gradient=lambda: Case(
        lambda: nn.Sequential(*blocks(depth=3), Function(_reverse), *blocks(depth=2))
    ),
    custom_function_in_place=lambda: Case(
        lambda: blocks(lambda: Residual(lambda h: _InPlace.apply(h + 1)))
    ),
    custom_operator=lambda: Case(lambda: Loop(lambda: Residual(lambda h: _scaled(h, 0.5).tanh()))),
    custom_operator_chain=lambda: Case(
        lambda: blocks(lambda: Residual(lambda h: _scaled(h, 0.5).tanh()))
    ),
    random_operator=lambda: Case(lambda: Loop(lambda: Residual(lambda h: _noisy(h).tanh()))),
    random_operator_chain=lambda: Case(
        lambda: blocks(lambda: Residual(lambda h: _noisy(h).tanh()))
    ),
    named_tuple_output=lambda: _output(lambda self, x: _Pair(self.body(x), None)),
    none_in_output=lambda: _output(lambda self, x: (None, self.body(x), None)),
    input_as_output=lambda: _output(lambda self, x: (self.body(x), x)),
    loss_as_output=lambda: _output(lambda self, x: self.body(x).square().mean()),
    masked_loss=lambda: replace(_output(lambda self, x: self.body(x)[x[:, 0] > 0]), varies=True),
    experts_loop=lambda: Case(lambda: Loop(_Routed, 3), varies=True),
    experts_chain=lambda: Case(lambda: blocks(_Routed, 3), varies=True),
)
