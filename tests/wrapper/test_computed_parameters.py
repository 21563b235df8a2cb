"""Parameters and attributes that are results of operations, of earlier forwards say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import check_equal
from zoo.models import Tanhs

import rotor


def loss_of(model: Any, _: int) -> tuple[torch.Tensor, ...]:
    computed = {name: p * 1.5 for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, computed, (torch.randn(64, 32),))
    return output.square().mean(), output


def layers() -> nn.Module:
    return Tanhs(32, 5)


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
def test_parameters_that_are_results_are_read_without_a_warning(engine):
    check_equal(layers, loss_of, accumulates=True, mem_limit="1MiB", engine=engine)


def chain() -> nn.Module:
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(32, 32), nn.Tanh())])


def test_a_chain_reads_results_without_a_warning():
    check_equal(chain, loss_of, accumulates=True, mem_limit="1MiB")


# -- gradients that pass through the computed values to what they were computed of

Values = dict[str, torch.Tensor]
Forward = Callable[[Values, torch.Tensor], torch.Tensor]


def adapted(forward: Forward, values: Values, x: torch.Tensor) -> Values:
    loss = forward(values, x).square().mean()
    made = torch.autograd.grad(loss, list(values.values()), create_graph=True)
    pairs = zip(values.items(), made, strict=True)
    return {name: value - 0.1 * gradient for (name, value), gradient in pairs}


def adapted_once(forward: Forward, values: Values, x: torch.Tensor) -> torch.Tensor:
    return forward(adapted(forward, values, x), x).square().mean()


def adapted_twice(forward: Forward, values: Values, x: torch.Tensor) -> torch.Tensor:
    first = adapted(forward, values, x)
    return forward(adapted(forward, first, x * 2), x).square().mean()


def computed_of_one_another(forward: Forward, values: Values, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: value * 1.5 for name, value in values.items()}
    first, *_, last = (name for name in scaled if scaled[name].dim() == 2)
    scaled[last] = scaled[first].sin()
    penalty = sum(value.square().sum() for value in scaled.values())
    return forward(scaled, x).square().mean() + penalty


def penalised_of_one_another(forward: Forward, values: Values, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: value * 1.5 for name, value in values.items()}
    first, *_, last = (name for name in scaled if scaled[name].dim() == 2)
    scaled[last] = scaled[first].sin()
    return forward(adapted(forward, scaled, x), x).square().mean()


def read_by_two_forwards(forward: Forward, values: Values, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: value * 1.5 for name, value in values.items()}
    return forward(scaled, x).square().mean() + forward(scaled, x * 2).square().mean()


EXACT = [computed_of_one_another, read_by_two_forwards]
ADAPTED = [adapted_once, adapted_twice, penalised_of_one_another]
"""Sums of second derivatives are made in another order where a forward runs again."""


def gradients(model: Any, net: nn.Module, loop: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    def forward(values: Values, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,))

    torch.manual_seed(1)
    found = []
    for _ in range(2):
        net.zero_grad()
        loop(forward, dict(model.named_parameters()), torch.randn(64, 32)).backward()
        found += [torch.zeros(()) if p.grad is None else p.grad for p in net.parameters()]
    return found


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("loop", EXACT + ADAPTED, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize(
    ("build", "engine", "limit"),
    [
        (chain, "chain", "1MiB"),
        (layers, "graph", "1MiB"),
        (layers, "dynamic", "1MiB"),
        (layers, "dynamic", "120KiB"),
    ],
)
def test_gradients_pass_through_computed_parameters(build, engine, limit, loop):
    torch.manual_seed(0)
    plain = build()
    limited = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, engine=engine)
    got = gradients(limited, limited.module, loop)
    for one, expected in zip(got, gradients(plain, plain, loop), strict=True):
        if loop in EXACT:
            assert torch.equal(one, expected)
        else:
            assert torch.allclose(one, expected, rtol=1e-4, atol=1e-6)


class Recurrent(Tanhs):
    """A model whose forward reads the result of the one before."""

    def __init__(self, keeps: str) -> None:
        super().__init__(32, 5)
        self.keeps = keeps
        self.reset()

    def reset(self) -> None:
        self.state: Any = None
        self.memory: list[Any] = [None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.state if self.keeps == "attribute" else self.memory[-1]
        result = super().forward(x if before is None else x + before)
        if self.keeps == "attribute":
            self.state = result
        else:
            self.memory.append(result)
        return result * 1


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("keeps", ["attribute", "list"])
@pytest.mark.parametrize("limit", ["1MiB", "120KiB"])
def test_gradients_pass_through_results_that_a_model_keeps(keeps, limit):
    def trained(model: Any, net: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net.reset()
        sum(model(torch.randn(64, 32)).square().mean() for _ in range(3)).backward()
        return [p.grad for p in net.parameters()]

    torch.manual_seed(0)
    plain = Recurrent(keeps)
    limited = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, engine="dynamic")
    got = trained(limited, limited.module)
    assert all(map(torch.equal, got, trained(plain, plain)))
    assert (len(limited.module.memory) == 4) == (keeps == "list")


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_results_that_a_forward_reads_from_a_closure_are_refused_in_words():
    kept: list[torch.Tensor] = []

    class Closure(Tanhs):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(super().forward(x + kept[-1] if kept else x))
            return kept[-1] * 1

    model = rotor.Checkpointable(Closure(32, 5), mem_limit="1MiB", engine="dynamic")
    total = model(torch.randn(64, 32)).sum() + model(torch.randn(64, 32)).sum()
    with pytest.raises(RuntimeError, match="keep it in an attribute of the model"):
        total.backward()
