"""A captured graph follows changes of the model between steps, as plain PyTorch does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrizations, prune
from training import check_equal
from zoo.models import Row

import rotor


class Layer(nn.Module):
    """Layer with a helper, a dropout and, unless alike layers are to be copied, statistics."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.a, self.b = norm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.3)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.b(torch.tanh(self.mixed(self.a(self.norm(x))))))


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    return output * 2 if isinstance(module, nn.Linear) else None


def doubled_inputs(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] * 2,) if isinstance(module, nn.Linear) else None


def doubled_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple([g * 2 for g in inputs]) if isinstance(module, nn.Linear) else None


Change = Callable[[Any, Any], object]


CHANGES: dict[str, Change] = {
    "hook": lambda net, patch: net[2].a.register_forward_hook(doubled),
    "pre-hook": lambda net, patch: net[2].a.register_forward_pre_hook(doubled_inputs),
    "hook of all": lambda net, patch: register_module_forward_hook(doubled),
    "pre-hook of all": lambda net, patch: register_module_forward_pre_hook(doubled_inputs),
    "hook of the root": lambda net, patch: net.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 2,)
    ),
    "forward of a class": lambda net, patch: patch.setattr(
        Layer, "forward", lambda self, x: x - self.b(self.a(x))
    ),
    "forward of an inner class": lambda net, patch: patch.setattr(
        nn.Linear, "forward", lambda self, x: x @ self.weight.t()
    ),
    "method of a class": lambda net, patch: patch.setattr(Layer, "mixed", lambda self, x: x * 3),
    "call of a class": lambda net, patch: patch.setattr(
        Layer, "__call__", lambda self, x: self.forward(x) * 2, raising=False
    ),
    "forward of an instance": lambda net, patch: setattr(
        net[2].a, "forward", types.MethodType(lambda self, x: x @ self.weight.t(), net[2].a)
    ),
    "method of an instance": lambda net, patch: setattr(net[2], "mixed", lambda x: x * 3),
    "parametrization": lambda net, patch: parametrizations.weight_norm(net[2].a),
    "pruning": lambda net, patch: prune.l1_unstructured(net[2].a, "weight", 0.5),
    "dropout of nothing": lambda net, patch: setattr(net[2].drop, "p", 0.0),
    "dropout of everything": lambda net, patch: setattr(net[2].drop, "p", 1.0),
}


def trained(
    change: Change, norm: type[nn.Module], engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(*[Layer(norm) for _ in range(4)])
    limit = {"mem_limit": "1 MB", "engine": engine, "verbosity": 0}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    x, seen = torch.randn(32, 16), []
    with monkeypatch.context() as patch:
        made = None
        for step in range(4):
            if step == 2:
                made = change(net, patch)
            net.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            grads = [p.grad.sum().item() for p in net.parameters() if p.grad is not None]
            seen += [loss.item(), *grads, torch.rand(()).item()]
        if hasattr(made, "remove"):
            made.remove()
    return seen


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_follows_a_change(
    change: str, norm: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(CHANGES[change], norm, None, monkeypatch)
    assert trained(CHANGES[change], norm, "graph", monkeypatch) == plain


def test_a_graph_follows_a_hook_that_is_removed() -> None:
    handles = []

    def make() -> nn.Module:
        net = nn.Sequential(*[Layer(nn.BatchNorm1d) for _ in range(3)])
        handles.append(net[1].b.register_forward_hook(doubled))
        return net

    def loss_of(model: Any, number: int) -> torch.Tensor:
        if number == 2:
            handles[-1].remove()
        return model(torch.randn(32, 16)).square().mean()

    check_equal(make, loss_of, 4, accumulates=True, mem_limit="1 MB", engine="graph")


@pytest.mark.parametrize(
    "register",
    [
        lambda net: net[0][2].a.register_full_backward_hook(doubled_gradients),
        lambda net: register_module_full_backward_hook(doubled_gradients),
    ],
    ids=["of one module", "of all"],
)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_backward_hook_between_steps_is_called(register: Any, norm: type[nn.Module]) -> None:
    def gradients(engine: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.ModuleList([Row(*(Layer(norm) for _ in range(4)))])
        model: Any = net[0]
        if engine is not None:
            model = rotor.Checkpointable(net[0], mem_limit="1 MB", engine=engine, verbosity=0)
        x, handle = torch.randn(32, 16, requires_grad=True), None
        for step in range(4):
            if step == 2:
                handle = register(net)
            net.zero_grad()
            model(x).square().mean().backward()
        assert handle is not None
        handle.remove()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    with pytest.warns(rotor.MemoryLimitWarning):
        limited = gradients("auto")
    assert all(map(torch.equal, gradients(None), limited))


def test_what_libraries_note_in_classes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = rotor.Checkpointable(Layer(nn.LayerNorm), mem_limit="1 MB", engine="graph")
    x = torch.randn(32, 16)
    model(x).square().mean().backward()
    step = model.plan.step
    monkeypatch.setattr(Layer, "note", {}, raising=False)
    monkeypatch.setattr(nn.Module, "note", {}, raising=False)
    model.zero_grad()
    model(x).square().mean().backward()
    assert model.plan.step.captured is step.captured


class Attention(nn.Module):
    """Layers of attention; they break their graph if asked for."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            parts = layer(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = y.transpose(1, 2).flatten(2)
        if self.breaks and x.sum() > 1e9:
            return x * 2
        return x


@pytest.mark.parametrize(("engine", "breaks"), [("graph", False), ("auto", False), ("auto", True)])
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_graph_follows_the_choice_of_kernels(engine: str, breaks: bool) -> None:
    def seen(engine: str | None) -> list[float]:
        torch.manual_seed(0)
        net = Attention(breaks=breaks)
        limit = {"mem_limit": "2 MB", "engine": engine, "verbosity": 0}
        model = net if engine is None else rotor.Checkpointable(net, **limit)
        x, found = torch.randn(2, 70, 32), []
        for step in range(4):
            chosen = SDPBackend.MATH if step >= 2 else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel(chosen):
                loss = model(x).square().mean()
                loss.backward()
            found.append(loss.item())
            found += [p.grad.sum().item() for p in net.parameters() if p.grad is not None]
        return found

    assert seen(engine) == seen(None)


class Counted(type):
    """Metaclass that counts."""

    seen = 0

    def __call__(cls, *args: Any) -> Any:
        Counted.seen += 1
        return super().__call__(*args)


class Note(metaclass=Counted):
    """Object whose making is counted."""


def by_default(net: nn.Module) -> None:
    net.__dict__["seen"] = net.__dict__.get("seen", 0) + 1


def in_place(net: nn.Module) -> None:
    vars(net).setdefault("seen", 0)
    vars(net)["seen"] += 1


def at_once(net: nn.Module) -> None:
    net.__dict__.update(seen=net.seen + 1 if "seen" in net.__dict__ else 1)


def of_metaclass(net: nn.Module) -> None:
    type(Note).seen += 1
    net.seen = Note.seen


def by_call(net: nn.Module) -> None:
    Note()
    net.seen = Counted.seen


class Counting(nn.Sequential):
    """A model that counts its calls in some way, and computes with their number."""

    def __init__(self, count: Callable[[nn.Module], None]) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count(self)
        return super().forward(x) * self.seen


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
@pytest.mark.parametrize("count", [by_default, in_place, at_once, of_metaclass, by_call])
def test_calls_are_counted_wherever_the_number_is_kept(count, monkeypatch):
    found = []
    for is_limited in (False, True):
        monkeypatch.setattr(Counted, "seen", 0)
        torch.manual_seed(0)
        net = Row(Counting(count))
        model = rotor.Checkpointable(net, mem_limit="1 MB") if is_limited else net
        found.append([model(torch.ones(2, 4)).sum() for _ in range(5)] + [net[0].seen])
        found[-1][0].backward()
    assert found[0] == found[1]
