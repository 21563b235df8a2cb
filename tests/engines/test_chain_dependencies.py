"""State that changes between a chain's forward and its backward, and modes around the backward."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registry
from training import same

import rotor
from rotor.algorithms import RecomputeAll

SAMPLE = torch.ones(256, 32)
SCALE = 1.0
GAIN, UNSET = ContextVar("gain", default=1.0), ContextVar[float]("unset")
OPTIONS: dict[str, Any] = {"gain": 1.0}


class Settings:
    rate = 1.0

    def __init__(self) -> None:
        self.bias = 0.0


def scaled(x):
    scale = SCALE * GAIN.get() * UNSET.get(1.0)
    return x * scale * OPTIONS["gain"]


class Stage(nn.Module):
    kind = 1.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(32, 96), nn.Linear(96, 32), nn.Dropout(0.3)
        self.settings, self.table, self.items, self.factor = settings, {"k": 1.0}, [1.0], 1.0
        self.act, self.weights = torch.tanh, torch.ones(32)
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x):
        tenth = torch.full((1,), 0.1)
        y = scaled(x) * self.kind * self.settings.rate * self.factor + self.settings.bias
        y = y * self.table["k"] * self.items[0] + self.weights * 0.5 + tenth.to(y.dtype)
        return x + self.dropout(self.b(self.act(self.a(y + self.shift))))


def closing(held: list[float]) -> nn.Module:
    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x) * held[0]

    return Closing()


class Run:
    """A few steps of a model, the last with a change between forward and backward."""

    def __init__(self, change, engine: str | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.settings, self.held = Settings(), [1.0]
        self.stages = [Stage(self.settings) for _ in range(5)]
        self.net = nn.Sequential(*self.stages, closing(self.held), Stage(self.settings))
        self.model: Any = self.net
        if engine:
            self.model = rotor.Checkpointable(self.net, SAMPLE, "1 GiB", engine=engine, **options)
            self.model.compute_sequence(algo=RecomputeAll)
        self.hooks = [s.register_forward_hook(lambda *a: a[2] * 1.5) for s in self.stages]
        self.parameters = list(self.net.parameters())
        for step in range(2):
            self.net.zero_grad()
            loss = self.model(torch.randn(256, 32)).square().mean()
            if step:
                change(self)
            loss.backward()
        self.gradients = [p.grad for p in self.parameters]
        if engine:
            assert len(self.model.plan.schedule.recomputed) > 2


def each(change):
    return lambda run: [change(stage) for stage in run.stages]


def set_global(run, name="SCALE", value=3.0):
    globals()[name] = value


CHANGES = {
    "nothing": lambda run: None,
    "attribute": each(lambda s: setattr(s, "factor", 2.0)),
    "new attribute over a class's": each(lambda s: setattr(s, "kind", 2.0)),
    "class attribute": lambda run: setattr(Stage, "kind", 2.0),
    "method": lambda run: setattr(Stage, "forward", lambda self, x: x),
    "global": set_global,
    "global function": functools.partial(set_global, name="scaled", value=lambda x: x * 7),
    "global dictionary": lambda run: OPTIONS.update(gain=2.0, new=1),
    "context": lambda run: GAIN.set(2.0),
    "closure": lambda run: run.held.__setitem__(0, 3.0),
    "object": lambda run: setattr(run.settings, "bias", 3.0),
    "object's class": lambda run: setattr(Settings, "rate", 2.0),
    "other object": each(lambda s: setattr(s, "settings", Settings())),
    "dictionary": each(lambda s: s.table.update(k=2.0)),
    "other dictionary": each(lambda s: setattr(s, "table", {"k": 2.0})),
    "list": each(lambda s: s.items.insert(0, 2.0)),
    "function": each(lambda s: setattr(s, "act", torch.sin)),
    "tensor": each(lambda s: setattr(s, "weights", torch.zeros(32))),
    "dropout": each(lambda s: setattr(s.dropout, "p", 0.6)),
    "no dropout": each(lambda s: setattr(s.dropout, "p", 0.0)),
    "eval": lambda run: run.model.eval(),
    "hook removed": lambda run: [hook.remove() for hook in run.hooks],
    "hooks in another order": each(
        lambda s: s.register_forward_hook(lambda *a: a[2] + 1, prepend=True)
    ),
    "hook before": each(lambda s: s.a.register_forward_pre_hook(lambda m, a: (a[0] * 2,))),
    "hook of all modules": lambda run: registry.register_module_forward_hook(lambda m, a, y: y * 2),
    "buffer": each(lambda s: setattr(s, "shift", s.shift + 0.5)),
    "new buffer": each(lambda s: s.register_buffer("other", torch.ones(1))),
    "parameter": each(lambda s: setattr(s.a, "weight", nn.Parameter(torch.zeros(96, 32)))),
    "child": each(lambda s: setattr(s, "b", nn.Linear(96, 32))),
    "frozen": each(lambda s: s.requires_grad_(False)),
    "default dtype": lambda run: torch.set_default_dtype(torch.float64),
    "deterministic": lambda run: torch.use_deterministic_algorithms(True),
    "precision": lambda run: torch.set_float32_matmul_precision("medium"),
}


_SCALED, _FORWARD = scaled, Stage.forward


def reset():
    """Undo what a change did outside of its model."""
    globals().update(SCALE=1.0, scaled=_SCALED)
    GAIN.set(1.0)
    OPTIONS.clear()
    OPTIONS["gain"] = 1.0
    Stage.kind, Stage.forward, Settings.rate = 1.0, _FORWARD, 1.0
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    registry._global_forward_hooks.clear()


@pytest.fixture(autouse=True)
def _reset():
    yield
    reset()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_before_the_backward_leaves_its_gradients(name):
    plain = Run(CHANGES[name], None)
    reset()
    limited = Run(CHANGES[name], "chain", verify="off")
    assert all(map(same, plain.gradients, limited.gradients))


def test_a_context_variable_without_a_value_has_none_after_the_backward():
    found = []
    for engine, options in ((None, {}), ("chain", {"verify": "off"})):
        token = UNSET.set(2.0)
        found.append(Run(lambda _, token=token: UNSET.reset(token), engine, **options).gradients)
        assert UNSET.get(None) is None
    assert all(map(same, *found))


def test_a_change_holds_after_the_backward():
    run = Run(
        lambda run: [CHANGES[name](run) for name in ("hook removed", "buffer", "closure")],
        "chain",
        verify="off",
    )
    assert run.held == [3.0]
    for stage in run.stages:
        assert not stage._forward_hooks
        assert torch.equal(stage.shift, torch.full((32,), 0.5))


WRITES = {
    "0.weights": lambda run: run.stages[0].weights.copy_(torch.zeros(32)),
    "2.shift": lambda run: run.stages[2].shift.add_(1),
    "1.a.weight": lambda run: run.stages[1].a.weight.mul_(0.5),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_that_was_written_to_is_named_before_any_gradient(name):
    seen = []

    def change(run):
        seen.append(run)
        with torch.no_grad():
            WRITES[name](run)

    with pytest.raises(rotor.RecomputationError, match=rf"^{name} was changed or replaced between"):
        Run(change, "chain", verify="off")
    assert all(p.grad is None for p in seen[0].parameters)


def test_a_write_without_a_version_is_seen_by_verified_steps():
    with pytest.raises(rotor.RecomputationError, match="again"):
        Run(each(lambda s: s.shift.data.add_(1)), "chain", verify="always")


MODES = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("meta"),
    "no attention kernel but one": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ),
}


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.mix(x).view(4, 64, 3, 32).transpose(1, 2).unbind(1)
        y = nn.functional.scaled_dot_product_attention(q, k, v).reshape(256, 32)
        return x + self.out(y) * torch.tensor(2.0) + torch.zeros(32)


def attending(engine: str | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*[Attending() for _ in range(6)])
    if not engine:
        return net, net
    model = rotor.Checkpointable(net, SAMPLE, "1 GiB", engine=engine, verify="off")
    model.compute_sequence(algo=RecomputeAll)
    return net, model


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_either_half_is_as_in_plain_training(name, around):
    if around == "forward" and name in ("inference", "device"):
        pytest.skip("nothing is trained so")
    found = []
    for engine in (None, "chain"):
        net, model = attending(engine)
        for _ in range(2):
            net.zero_grad()
            x = torch.randn(256, 32)
            if around == "forward":
                with MODES[name]():
                    y = model(x)
                y.float().square().mean().backward()
            else:
                loss = model(x).square().mean()
                with MODES[name]():
                    loss.backward()
        found.append([p.grad for p in net.parameters()])
        if engine:
            assert model.plan.schedule.recomputed
    assert all(map(same, *found))


def test_hooks_on_saved_tensors_pack_what_is_recomputed_too():
    def half(t):
        return t.to(torch.bfloat16) if t.dtype == torch.float32 else t

    found = []
    for engine in (None, "chain"):
        net, model = attending(engine)
        x = torch.randn(256, 32)
        model(x).square().mean().backward()
        net.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(half, lambda t: t.float()):
            y = model(x)
        y.square().mean().backward()
        found.append([p.grad for p in net.parameters()])
        if engine:
            assert model.plan.schedule.recomputed
    assert all(map(same, *found))
