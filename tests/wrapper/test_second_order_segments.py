"""Chains whose gradients are differentiated: segment by segment, in little memory."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import skip_third_derivatives_of_batch_norms

import rotor
from rotor import memory, timing
from rotor.common.accounting import NOISE_BYTES
from rotor.engines.chain.segments import bounds_of_segments
from rotor.units import exact_bytes

WIDTH, BATCH, BLOCKS = 32, 192, 8

Loop = Callable[[Any, nn.Module, torch.Tensor], None]


class Block(nn.Module):
    """Residual block; its parts are chosen by keywords."""

    def __init__(
        self, activation: Callable[[], nn.Module] = nn.GELU, norm: type[nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 3 * WIDTH), activation(), nn.Linear(3 * WIDTH, WIDTH)
        self.body = nn.Sequential(*layers, norm(WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


class Pairs(nn.Module):
    """Block of two tensors, one of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, total = (value, value * 0.5) if isinstance(value, torch.Tensor) else value
        x = torch.tanh(self.inner(x))
        return x, total + torch.tanh(x * total)


class Product(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] * pair[1]


class Named(nn.Module):
    """Block of a dictionary with a number and integers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = {"x": value, "factor": 0.5, "order": torch.arange(WIDTH).flip(0)}
        return value | {"x": self.inner(value["x"][:, value["order"]]) * value["factor"]}


class Chosen(nn.Module):
    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        return value["x"]


class Counting(nn.Module):
    """Block that depends on how often it ran, by an attribute and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.steps = self.steps + 1
        return torch.tanh(self.inner(x)) * (1 + 0.1 * self.runs) + x / self.steps


def flat() -> nn.Sequential:
    blocks = [
        (nn.Linear(WIDTH, 96), nn.SiLU(inplace=True), nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*(module for block in blocks for module in block))


def frozen() -> nn.Sequential:
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in [*net[:3], net[5]]:
        block.requires_grad_(False)
    return net


def hooked() -> nn.Sequential:
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in net:
        block.body.register_forward_hook(lambda *values: values[2] * 1.1)
        block.body[0].register_forward_pre_hook(lambda _, values: (values[0] * 0.9,))
    return net


def shared() -> nn.Sequential:
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in net[1:4]:
        block.body[0].weight = net[0].body[0].weight
    return net


def tied() -> nn.Sequential:
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    net[6].body[2].weight = net[5].body[2].weight
    return net


def repeated() -> nn.Sequential:
    ends = Block(), Block()
    return nn.Sequential(*ends, *(Block() for _ in range(BLOCKS - 3)), ends[1])


KINDS: dict[str, Callable[[], nn.Sequential]] = {
    "blocks": lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))),
    "SiLU": lambda: nn.Sequential(*(Block(nn.SiLU) for _ in range(BLOCKS))),
    "BatchNorm": lambda: nn.Sequential(*(Block(norm=nn.BatchNorm1d) for _ in range(BLOCKS))),
    "in place": flat,
    "frozen": frozen,
    "hooked": hooked,
    "shared": shared,
    "tied": tied,
    "repeated": repeated,
    "checkpointed": lambda: nn.Sequential(*(Checkpointed() for _ in range(BLOCKS))),
    "pairs": lambda: nn.Sequential(*(Pairs() for _ in range(BLOCKS)), Product()),
    "dictionaries": lambda: nn.Sequential(*(Named() for _ in range(BLOCKS)), Chosen()),
    "counting": lambda: nn.Sequential(*(Counting() for _ in range(BLOCKS))),
}


def slope_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def usual(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    call(x).square().mean().backward()


def penalty(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    slope = slope_of(y, x)
    (y.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()


def penalty_under_autocast(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(x)
    slope = slope_of(y.float(), x)
    (y.float().square().mean() + slope.square().mean()).backward()


def of_some(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    slope = slope_of(y, x)
    wanted = [p for p in net.parameters() if p.requires_grad][1:4]
    (y.mean() + slope.square().sum()).backward(inputs=[*wanted, x])


def of_an_input(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    (x.grad,) = torch.autograd.grad(slope_of(y, x).square().sum() + y.square().sum(), x)


def two_slopes(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    (slope_of(y[:, 0], x) * slope_of(y[:, 1], x)).sum().backward()


def twice(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    loss = slope_of(y, x).square().sum() + y.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def forward_product(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    """Differentiate by the given gradient alone, then by all else."""
    y = call(x)
    given = torch.ones_like(y, requires_grad=True)
    (slope,) = torch.autograd.grad(y, x, given, create_graph=True)
    (made,) = torch.autograd.grad(slope, given, torch.ones_like(slope), retain_graph=True)
    slope.square().sum().backward()
    assert x.grad is not None
    x.grad.add_(made.sum())


def second_backward(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    loss = call(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def of_an_equation(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    slope = slope_of(y, x)
    curve = slope_of(slope[:, 0], x)
    (y.square().mean() + slope.square().mean() + curve.square().mean()).backward()


LOOPS = [penalty, of_some, of_an_input, two_slopes, twice, forward_product, second_backward]


def peak_of(loop: Loop, call: Any, net: nn.Module) -> int:
    net.zero_grad()
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with memory.meter("cpu") as meter:
        loop(call, net, x)
    return meter.peak_bytes


def limited(make: Callable[[], nn.Sequential], share: float) -> tuple[nn.Sequential, Any]:
    """Return a chain, and a copy of it that has a share of what a usual step needs."""
    torch.manual_seed(0)
    net = make()
    limit = int(share * peak_of(usual, *[copy.deepcopy(net)] * 2))
    return net, rotor.Checkpointable(copy.deepcopy(net), mem_limit=limit, engine="chain")


def results(call: Any, net: nn.Module, loop: Loop) -> list[Any]:
    """Return gradients of the loop, of a usual step and of the loop, and all state afterwards."""
    torch.manual_seed(1)
    found: list[Any] = []
    for step in (loop, usual, loop):
        net.zero_grad()
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        step(call, net, x)
        found += [None if t.grad is None else t.grad.clone() for t in (x, *net.parameters())]
    runs = [torch.tensor(m.runs) for m in net.modules() if isinstance(m, Counting)]
    return [*found, *net.buffers(), *runs, torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_state_are_those_of_the_plain_chain(kind: str, loop: Loop) -> None:
    if kind in ("shared", "tied", "repeated") and loop is second_backward:
        pytest.skip("a schedule adds up what the stages of plain autograd give apart")
    # A checkpoint keeps little by itself.
    net, model = limited(KINDS[kind], 2.2 if kind == "checkpointed" else 0.7)
    expected = results(net, net, loop)
    for got, wanted in zip(results(model, model.module, loop), expected, strict=True):
        assert (got is None) == (wanted is None)
        assert wanted is None or torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", ["blocks", "BatchNorm", "pairs"])
def test_a_forward_under_autocast_runs_again_under_it(kind: str) -> None:
    net, model = limited(KINDS[kind], 0.8)
    expected = results(net, net, penalty_under_autocast)
    found = results(model, model.module, penalty_under_autocast)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", ["blocks", "BatchNorm", "pairs", "counting", "in place"])
def test_third_derivatives_are_right_too(kind: str) -> None:
    if kind == "BatchNorm":
        skip_third_derivatives_of_batch_norms()
    net, model = limited(KINDS[kind], 0.7)
    expected = results(net, net, of_an_equation)
    for got, wanted in zip(results(model, model.module, of_an_equation), expected, strict=True):
        assert torch.allclose(got.double(), wanted.double(), rtol=1e-4, atol=1e-5)


def batches_of(y: torch.Tensor) -> torch.Tensor:
    return torch.eye(WIDTH)[:3].view(3, *[1] * (y.ndim - 1), WIDTH).expand(3, *y.shape)


def batched(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    (rows,) = torch.autograd.grad(y, x, batches_of(y), create_graph=True, is_grads_batched=True)
    (y.square().mean() + rows.square().mean()).backward()


def vmapped(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    rows = torch.func.vmap(lambda given: torch.autograd.grad(y, x, given, create_graph=True)[0])
    (y.square().mean() + rows(batches_of(y)).square().mean()).backward()


def vmapped_and_kept(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    rows = torch.func.vmap(lambda given: torch.autograd.grad(y, x, given, retain_graph=True)[0])
    found = rows(batches_of(y))
    y.square().mean().backward()
    x.grad = found.sum(0)


def curves_of(y: torch.Tensor, x: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    """Return a slope, and rows of its derivative."""
    slope = slope_of(y, x).sum(0)
    return [
        slope,
        *torch.autograd.grad(slope, x, batches_of(slope), is_grads_batched=True, **options),
    ]


def curves(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    _, rows = curves_of(y, x, retain_graph=True)
    y.square().mean().backward()
    x.grad = rows.sum(0)


def curves_differentiated(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    slope, rows = curves_of(y, x, create_graph=True)
    (rows.square().mean() + slope.square().mean() + y.square().mean()).backward()


def curves_vmapped(call: Any, net: nn.Module, x: torch.Tensor) -> None:
    y = call(x)
    slope = slope_of(y, x).sum(0)
    rows = torch.func.vmap(lambda given: torch.autograd.grad(slope, x, given, create_graph=True)[0])
    (rows(batches_of(slope)).square().mean() + y.square().mean()).backward()


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(
    "loop",
    [batched, vmapped, vmapped_and_kept, curves, curves_differentiated, curves_vmapped],
    ids=lambda loop: loop.__name__,
)
@pytest.mark.parametrize("kind", ["blocks", "shared", "BatchNorm", "pairs", "hooked"])
def test_batches_of_gradients_are_right(kind: str, loop: Loop) -> None:
    if kind == "BatchNorm" and loop in (curves_differentiated, curves_vmapped):
        skip_third_derivatives_of_batch_norms()

    def without_dropout() -> nn.Sequential:
        net = KINDS[kind]()  # Whose draws of a batch PyTorch refuses.
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return net

    net, model = limited(without_dropout, 0.7)
    expected = results(net, net, loop)
    for got, wanted in zip(results(model, model.module, loop), expected, strict=True):
        assert torch.allclose(got.double(), wanted.double(), rtol=1e-4, atol=1e-5)


def told(model: Any, loop: Loop, steps: int) -> list[str]:
    """Return what warnings of some steps say of their memory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            loop(model, model.module, torch.randn(BATCH, WIDTH, requires_grad=True))
    return [str(w.message) for w in caught if "create_graph=True" in str(w.message)]


SHARES = {penalty: 0.6, of_some: 0.6, two_slopes: 0.7, of_an_equation: 0.5, second_backward: 0.98}
"""Most that a loop may need, as shares of what it needs in plain PyTorch."""


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("loop", SHARES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["blocks", "in place", "hooked", "dictionaries"])
def test_a_chain_takes_less_than_in_plain_pytorch(kind: str, loop: Loop) -> None:
    net, model = limited(KINDS[kind], 0.7)
    told(model, loop, 4)
    peak = peak_of(loop, model, model.module)
    assert peak < SHARES[loop] * peak_of(loop, net, net)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("kind", "share"), [("shared", 0.85), ("tied", 0.6)])
def test_a_chain_with_shared_parameters_takes_less_where_few_stages_share(
    kind: str, share: float
) -> None:
    net, model = limited(KINDS[kind], 0.7)
    told(model, penalty, 4)
    assert peak_of(penalty, model, model.module) < share * peak_of(penalty, net, net)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", ["shared", "tied", "repeated"])
@pytest.mark.parametrize("loop", [penalty, batched], ids=lambda f: f.__name__)
def test_the_need_of_shared_parameters_and_of_batches_is_told(kind: str, loop: Loop) -> None:
    _, model = limited(KINDS[kind], 0.7)
    text = told(model, loop, 3)[-1]
    (needed,) = re.findall(r"needed .*?\((\d+) bytes\).*the limit is", text)
    peak = peak_of(loop, model, model.module)
    assert 0.75 * peak < int(needed) < 1.1 * peak + NOISE_BYTES


@pytest.mark.filterwarnings("ignore:this step's memory was not measured")
@pytest.mark.parametrize("share", [0.6, 0.95])
@pytest.mark.parametrize("loop", [penalty, of_an_input], ids=lambda f: f.__name__)
def test_a_warning_comes_where_the_limit_was_passed_and_nowhere_else(
    loop: Loop, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The schedule, and with it the peak, depends on measured times, which are to be equal here.
    monkeypatch.setattr(timing.Clock, "stop", lambda _: 100_000)
    _, model = limited(KINDS["blocks"], share)
    texts = told(model, usual, 4) + told(model, loop, 6)
    peak = peak_of(loop, model, model.module)
    if peak > model.mem_limit + 2 * NOISE_BYTES:
        assert texts
    if peak <= model.mem_limit:
        assert texts == []
    for text in texts:
        (needed,) = re.findall(r"needed .*?\((\d+) bytes\).*the limit is", text)
        assert 0.75 * peak < int(needed) < 1.1 * peak + NOISE_BYTES


@pytest.mark.filterwarnings("ignore:this step's memory was not measured")
def test_a_metered_step_is_told_with_its_exact_need() -> None:
    _, model = limited(KINDS["blocks"], 0.55)
    text = told(model, penalty, 4)[0]
    assert f"needed {exact_bytes(model.plan.measured_bytes)}, and the limit is" in text
    assert model.plan.measured_bytes == peak_of(penalty, model, model.module)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_nothing_of_a_step_lives_on() -> None:
    _, model = limited(KINDS["blocks"], 0.9)
    kept = weakref.WeakSet[Any]()
    for _ in range(3):
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        y = model(x)
        slope = slope_of(y, x)
        kept |= {y.grad_fn, slope.grad_fn}
        (y.square().mean() + slope.square().sum()).backward()
        del x, y, slope
    gc.collect()
    assert len(kept) == 0


class Costs:
    """Costs of a stage as far as segments depend on them."""

    def __init__(self, kept: int, handed: int) -> None:
        self.xbar_bytes, self.output_bytes = kept, handed


def test_segments_begin_where_little_is_handed_on() -> None:
    costs: list[Any] = [Costs(100, 100), Costs(100, 10)] * 8
    bounds = bounds_of_segments(costs)
    assert all(begin % 2 == 0 for begin in bounds)
    assert len(bounds) > 3
    assert bounds_of_segments([Costs(10, 1000)] * 5) == [0, 5]
