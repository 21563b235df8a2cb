"""Cases: randomness, state in Python, and values that leave a module beside its output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from zoo.cases import WIDTH, Case, Loop, Residual, blocks, case, cases, rows, scalar
from zoo.models import AddSaved, Function, Save


def _noisy(noise: Any) -> Any:
    class Noisy(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * noise(self, x)

    return Noisy


@case
def gumbel_routing() -> Case:
    def gate(_: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.gumbel_softmax(x, hard=True) + 0.5

    return Case(lambda: blocks(_noisy(gate)))


@case
def sampled_choice() -> Case:
    def chosen(_: Any, x: torch.Tensor) -> torch.Tensor:
        index = torch.multinomial(x.detach().tanh().softmax(1), 1)
        return 1 + x.gather(1, index).tanh()

    return Case(
        lambda: blocks(_noisy(chosen)),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=1e-6),
    )


@case
def stochastic_depth() -> Case:
    class Skipped(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if random.random() < 0.3 else super().forward(x)

    return Case(lambda: blocks(Skipped), varies=True)


@case
def numpy_random_chain() -> Case:
    def factor(*_: Any) -> float:
        return float(np.random.uniform(0.5, 1.5))  # noqa: NPY002

    return Case(lambda: blocks(_noisy(factor)))


@case
def numpy_generator_of_model() -> Case:
    class Noisy(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(self.generator.uniform(0.5, 1.5))

    return Case(lambda: blocks(Noisy))


@case
def torch_generator_of_model() -> Case:
    class Noisy(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(x.shape, generator=self.generator)
            return super().forward(x) * (0.5 + noise)

    return Case(lambda: blocks(Noisy))


class _Annealed(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tau = max(0.1, self.tau * 0.9)
        return x + self.down(functional.gelu(self.up(x) / self.tau))


def _taus(net: nn.Module) -> list[float]:
    return [m.tau for m in net.modules() if isinstance(m, _Annealed)]


@case
def tensor_attribute_reassigned() -> Case:
    class Averaged(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    return Case(lambda: blocks(Averaged), state=lambda net: [b.mean.tolist() for b in net])


@case
def tensor_attribute_in_place() -> Case:
    class Averaged(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(x - self.mean.clone())

    return Case(lambda: blocks(Averaged), state=lambda net: [b.mean.tolist() for b in net])


@case
def buffer_average() -> Case:
    class Averaged(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    return Case(lambda: Loop(Averaged))


@case
def codebook() -> Case:
    class Quantized(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(16, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            nearest = torch.cdist(y.detach(), self.codes).argmin(1)
            hits = functional.one_hot(nearest, 16).float()
            means = hits.T @ y.detach() / hits.sum(0).clamp(min=1)[:, None]
            quantized = self.codes[nearest]
            self.codes.lerp_(means, 0.1)
            return y + (quantized - y).detach()

    return Case(lambda: blocks(Quantized, 4))


@case
def counted_calls_list() -> Case:
    class Counting(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(float(len(self.seen)))
            return super().forward(x) / (1 + self.seen[-1])

    return Case(lambda: blocks(Counting), state=lambda net: [list(b.seen) for b in net])


class _Auxiliary(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.up(x))
        self.aux = h.square().mean()
        return x + self.down(h)


def _with_aux(net: nn.Module, output: Any) -> torch.Tensor:
    return scalar(output) + sum(m.aux for m in net.modules() if isinstance(m, _Auxiliary))


def _hooked(net: nn.Module) -> nn.Module:
    # Only the plain module is kept by the hook, as scripts do it.
    net.features = {}
    for k in (1, 3):
        net.body[k].register_forward_hook(
            lambda m, i, o, k=k, features=net.features: features.__setitem__(k, o)
        )
    return net


def _features(net: nn.Module, output: Any) -> torch.Tensor:
    return scalar(output) + sum(f.abs().mean() for f in net.features.values())


@case
def hooked_features_module() -> Case:
    def make() -> nn.Module:
        return _hooked(Function(lambda self, x: self.body(x), body=blocks()))

    return Case(make, loss=_features)


@case
def hooked_features_chain() -> Case:
    features: dict[int, torch.Tensor] = {}

    def make() -> nn.Module:
        net = blocks()
        for k in (1, 3):
            net[k].register_forward_hook(lambda m, i, o, k=k: features.__setitem__(k, o))
        return net

    return Case(
        make, loss=lambda net, y: scalar(y) + sum(f.abs().mean() for f in features.values())
    )


@case
def skip_by_attribute() -> Case:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            save = Save()
            layers += [save, nn.Linear(WIDTH, WIDTH), nn.GELU(), AddSaved(save)]
        return nn.Sequential(*layers)

    return Case(make)


@case
def input_hook() -> Case:
    def make() -> nn.Module:
        net = blocks()
        net[2].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        net[3].register_forward_hook(lambda m, args, y: y * 2)
        return net

    return Case(make)


@case
def backward_hook() -> Case:
    def make() -> nn.Module:
        net = blocks()
        net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        return net

    return Case(make)


@case
def tensor_hook() -> Case:
    class Scaled(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: g * 0.5)
            return y

    return Case(lambda: blocks(Scaled))


@case
def parameter_hook() -> Case:
    def make() -> nn.Module:
        net = blocks()
        net[1].up.weight.register_hook(lambda g: g * 0.5)
        return net

    return Case(make)


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


@case
def accumulated_gradient_hook() -> Case:
    def make() -> nn.Module:
        net = blocks()
        net[1].up.weight.register_post_accumulate_grad_hook(_halve)
        return net

    return Case(make)


@case
def gradient_clipped_loop() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(net, model(*rows(k)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return Case(Loop, step=step)


cases(
    dropout=lambda: Case(
        lambda: blocks(_noisy(lambda _, x: functional.dropout(torch.ones_like(x), 0.2)))
    ),
    dropout_loop=lambda: Case(
        lambda: Loop(_noisy(lambda _, x: functional.dropout(torch.ones_like(x), 0.2)))
    ),
    random_leaky_relu=lambda: Case(lambda: blocks(lambda: Residual(nn.RReLU()))),
    alpha_dropout=lambda: Case(lambda: blocks(lambda: Residual(nn.AlphaDropout(0.1)))),
    python_random_chain=lambda: Case(lambda: blocks(_noisy(lambda *_: random.uniform(0.5, 1.5)))),
    python_random_loop=lambda: Case(lambda: Loop(_noisy(lambda *_: random.uniform(0.5, 1.5)))),
    annealed_attribute_chain=lambda: Case(lambda: blocks(_Annealed), state=_taus),
    annealed_attribute_loop=lambda: Case(lambda: Loop(_Annealed), state=_taus),
    auxiliary_loss_chain=lambda: Case(lambda: blocks(_Auxiliary), loss=_with_aux),
    auxiliary_loss_loop=lambda: Case(lambda: Loop(_Auxiliary), loss=_with_aux),
)
