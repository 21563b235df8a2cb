"""Models with parts made by torch.jit.script or torch.jit.trace, in captured graphs."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import same

import rotor
from rotor.errors import CaptureError, InfeasibleError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(single graph|captured).*"),
]


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * torch.sigmoid(self.up(x)).pow(2))


def made(how: str, module: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "script":
            return torch.jit.script(module)
        return torch.jit.trace(module, args or torch.randn(4, 32), check_trace=False)


class Plain(nn.Module):
    """No nn.Sequential, which would be a chain."""

    def __init__(self, *parts: nn.Module, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.order = order or tuple(range(len(parts)))

    def forward(self, x: torch.Tensor) -> Any:
        for number in self.order:
            x = self.parts[number](x)
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor, k: int = 1):
        return self.one(x) * self.scale + y, self.two(y) * k + self.shift, x.argmax(1)


class TakesPair(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        pair = Pair()
        self.first = Block()
        self.pair = made(how, pair, torch.randn(4, 32), torch.randn(4, 32))
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        named = {"k": 3} if self.how == "script" else {}
        a, b, indices = self.pair(h, x, **named)
        return a + b.relu() + indices.unsqueeze(1)


class Shares(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        block = Block()
        self.script = made(how, block)
        self.up = nn.Linear(32, 64)
        self.up.weight = self.script.up.weight
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.script(x) + self.down(self.up(x)) + self.script.down.weight.sum()


def activation(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x).pow(2) + torch.tanh(x)


class Uses(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(32, 64), nn.Linear(64, 32), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.function(self.up(x)))


def frozen(net: Plain) -> Plain:
    net.parts[1].down.weight.requires_grad_(False)
    net.parts[0].requires_grad_(False)
    return net


def hooked(net: Plain) -> Plain:
    net.parts[0].register_forward_hook(lambda module, args, output: output * 1.5)
    net.parts[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    net.parts[2].up.weight.register_hook(lambda gradient: gradient * 2)
    return net


def with_function(how: str) -> Plain:
    function = made(how, activation)
    return Plain(Uses(function), Uses(function))


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "inside": lambda how: Plain(Block(), made(how, Block()), Block()),
    "twice": lambda how: Plain(Block(), made(how, Block()), order=(0, 1, 1, 0)),
    "two of a class": lambda how: Plain(made(how, Block()), made(how, Block()), Block()),
    "alike": lambda how: Plain(*[Plain(Block(), made(how, Block())) for _ in range(4)]),
    "first and last": lambda how: Plain(made(how, Block())),
    "pair": TakesPair,
    "shared weight": Shares,
    "function": with_function,
    "frozen": lambda how: frozen(Plain(Block(), made(how, Block()), Block())),
    "frozen script": lambda how: Plain(Block(), made(how, Block().requires_grad_(False))),
    "evaluated": lambda how: Plain(Block(), made(how, Block()).eval()),
    "hooks": lambda how: hooked(Plain(Block(), made(how, Block()), Block())),
    "normalised": lambda how: Plain(
        Block(), made(how, nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.1)).eval())
    ),
}


def trained(
    net: nn.Module, model: Any, steps: int, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator, requires_grad=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = model(x)
        y.float().square().mean().backward()
        seen += [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]
        net.zero_grad()
    return seen


def warmed(net: nn.Module, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """A script is optimised in its first runs."""
    trained(net, net, 3, dtype)
    return trained(net, net, 2, dtype)


def state_of(net: nn.Module) -> list[Any]:
    parts = [(name, id(part), part.training, set(vars(part))) for name, part in net.named_modules()]
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [*parts, *[(name, id(t), t.detach().clone().tolist()) for name, t in tensors]]


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_with_scripts_trains_as_in_plain_pytorch(kind: str, how: str) -> None:
    torch.manual_seed(0)
    net = MODELS[kind](how)
    expected = warmed(net)
    before = state_of(net)
    for limit in ("1 MB", "280 KB"):
        model = rotor.Checkpointable(net, mem_limit=limit, engine="graph", verbosity=-1)
        assert same(expected, trained(net, model, 2))
        assert model.plan.measured_bytes <= model.mem_limit
    assert state_of(net) == before


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.parametrize("kind", ["inside", "pair", "function"])
def test_other_engines_train_the_same_models(kind: str, engine: str) -> None:
    net = MODELS[kind]("script")
    expected = warmed(net)
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine, verbosity=-1)
    assert same(expected, trained(net, model, 2))
    assert model.plan.engine == ("graph" if engine == "auto" else "dynamic")


@pytest.mark.parametrize("kind", ["inside", "twice", "pair", "function", "shared weight"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripts_in_autocast_train_as_in_plain_pytorch(kind: str, how: str) -> None:
    torch.manual_seed(0)
    net = MODELS[kind](how)
    expected = warmed(net, torch.bfloat16)
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph", verbosity=-1)
    assert same(expected, trained(net, model, 2, torch.bfloat16))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 2048), nn.Linear(2048, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(torch.sigmoid(h * h) * h)


def test_what_a_script_needs_within_is_counted() -> None:
    net = Plain(Block(), made("script", Large()), Block())
    expected = warmed(net)
    generous = rotor.Checkpointable(net, mem_limit="16 MB", engine="graph", verbosity=-1)
    assert same(expected, trained(net, generous, 2))
    with pytest.raises(InfeasibleError) as refused:
        # The activations of a call of the script alone have more: 64 x 2048 floats each.
        trained(net, rotor.Checkpointable(net, mem_limit="1.5 MB", engine="graph", verbosity=-1), 1)
    limit = int(refused.value.minimum_bytes * 1.01)
    assert limit > 4 * 64 * 2048 * 4
    model = rotor.Checkpointable(net, mem_limit=limit, engine="graph", verbosity=-1)
    assert same(expected, trained(net, model, 2))
    assert model.plan.measured_bytes <= limit


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) * x


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 32)


class Lists(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x * 3


class Detaches(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, (x * 3).detach()


class First(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        return found if isinstance(found, torch.Tensor) else found[0]


REFUSED = {
    "draws random numbers": Drops,
    "prim::SetAttr": Counts,
    "writes to its arguments": Writes,
    r"writes to its tensors or arguments.*(batch_norm|add_)": lambda: nn.BatchNorm1d(32),
    "views of them": Views,
    "other than tensors": Lists,
    "depends on the values of tensors": Branches,
    "without a gradient": Detaches,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_graph_engine_refuses_scripts_of_which_it_knows_no_plan(reason: str) -> None:
    def steps(engine: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Plain(Block(), First(torch.jit.script(REFUSED[reason]())), Block())
        if not engine:
            return trained(net, net, 4)[-8:]
        model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine, verbosity=-1)
        return trained(net, model, 4)[-8:]

    with pytest.raises(CaptureError, match=f"^\\w+ is a script of torch.jit that .*{reason}"):
        steps("graph")
    assert same(steps(""), steps("auto"))


def test_attributes_of_a_script_may_change_between_steps() -> None:
    net = TakesPair("script")
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph", verbosity=-1)
    for scale in (2.0, 0.5):
        net.pair.scale = scale
        assert same(warmed(net), trained(net, model, 2))


def test_a_call_that_fails_leaves_the_scripts_in_the_model() -> None:
    net = Plain(Block(), made("script", Block()))
    script = net.parts[1]
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph", verbosity=-1)
    for x in (torch.randn(4, 32), torch.randn(4, 3), torch.randn(4, 32)):
        if x.shape[1] == 3:
            with pytest.raises(RuntimeError):
                model(x)
        else:
            model(x).sum().backward()
        assert net.parts[1] is script


def test_a_model_with_scripts_is_freed_and_its_backward_still_runs() -> None:
    net = Plain(Block(), made("script", Block()))
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine="graph", verbosity=-1)
    model(torch.randn(4, 32)).sum().backward()
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x)
    gone = weakref.ref(net.parts[1])
    del net, model
    gc.collect()
    y.sum().backward()
    assert x.grad is not None
    del y
    gc.collect()
    assert gone() is None
