"""Stages of a chain that branch on what autograd says, or write to weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import check_equal

import rotor
from rotor.algorithms import RecomputeAll

WIDTH = 32

QUESTIONS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "leaf": lambda stage, x: x.is_leaf,
    "node": lambda stage, x: x.grad_fn is None,
    "next nodes": lambda stage, x: x.grad_fn is not None and len(x.grad_fn.next_functions) > 0,
    "gradient": lambda stage, x: x.requires_grad,
    "gradient of a value": lambda stage, x: (x * 2).requires_grad,
    "node of a value": lambda stage, x: stage.a(x).grad_fn is None,
    "mode": lambda stage, x: torch.is_grad_enabled(),
    "view": lambda stage, x: x._is_view(),
    "leaf in a hook": lambda stage, x: stage.was_leaf,
    "leaf or none": lambda stage, x: stage.was_leaf if x.is_leaf else not x.requires_grad,
    "never": lambda stage, x: (x * 2) is None,
}


class Stage(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.drop, self.question, self.was_leaf = nn.Dropout(0.2), question, False
        if question is not QUESTIONS["never"]:
            self.register_forward_pre_hook(Stage.note)

    @staticmethod
    def note(stage, args):
        stage.was_leaf = args[0].is_leaf

    def forward(self, x):
        y = self.drop(self.b(torch.tanh(self.a(x))))
        return x + y if self.question(self, x) else x - 2 * y


class Pair(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.stage = Stage(question)

    def forward(self, pair):
        x, mask = pair
        sign = 1 if mask.is_leaf and not mask.requires_grad else -1
        return self.stage(x) * mask * sign, mask


class Ends(nn.Module):
    def forward(self, pair):
        return pair[0]


def _outcome(make: Callable[[], nn.Module], batch: Callable[[], Any], **options: Any) -> Any:
    torch.manual_seed(0)
    net = make()
    model: Any = net
    if options:
        algorithm = options.pop("algorithm", None)
        model = rotor.Checkpointable(net, batch(), **options)
        if algorithm is not None:
            model.compute_sequence(algo=algorithm)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        arg = batch()
        loss = model(arg).square().mean()
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in net.parameters()]]
        given = arg[0] if isinstance(arg, tuple) else arg
        if given.is_leaf and given.requires_grad:
            found.append(given.grad)
        net.zero_grad()
    if options:
        assert algorithm is None or len(model.plan.schedule.recomputed) > 2
    return found


def _same(make: Callable[[], nn.Module], batch: Callable[[], Any], **options: Any) -> bool:
    plain, ours = _outcome(make, batch), _outcome(make, batch, **options)
    return all(map(torch.equal, plain, ours))


def _everything(**options: Any) -> dict[str, Any]:
    return {"mem_limit": "1 GB", "engine": "chain", "algorithm": RecomputeAll, **options}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_recomputed_stage_takes_the_branches_of_the_plain_model(question, requires_grad):
    def make() -> nn.Module:
        stages = [Stage(QUESTIONS[question]) for _ in range(4)]
        return nn.Sequential(stages[0], nn.Linear(WIDTH, WIDTH), *stages[1:])

    def batch() -> torch.Tensor:
        return torch.randn(64, WIDTH, requires_grad=requires_grad)

    assert _same(make, batch, **_everything())


@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_kept_stage_takes_the_branches_of_the_plain_model(engine):
    def make() -> nn.Module:
        asking = [Stage(QUESTIONS[name]) for name in ("leaf", "gradient of a value", "mode")]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *asking, nn.Linear(WIDTH, WIDTH))

    def batch() -> torch.Tensor:
        return torch.randn(64, WIDTH)

    assert _same(make, batch, mem_limit="1 GB", engine=engine)
    assert _same(make, batch, mem_limit="200 KB", engine=engine)


@pytest.mark.parametrize("question", ["leaf", "gradient", "node of a value"])
def test_stages_that_pass_several_tensors_take_the_branches_of_the_plain_model(question):
    def make() -> nn.Module:
        return nn.Sequential(*[Pair(QUESTIONS[question]) for _ in range(5)], Ends())

    def batch() -> Any:
        return torch.randn(64, WIDTH), torch.rand(64, 1)

    assert _same(make, batch, **_everything())


@pytest.mark.parametrize("question", ["leaf", "node", "gradient"])
def test_an_input_that_was_computed_is_no_leaf(question):
    weight = torch.ones(WIDTH, requires_grad=True)

    def make() -> nn.Module:
        return nn.Sequential(*[Stage(QUESTIONS[question]) for _ in range(4)])

    def batch() -> torch.Tensor:
        return torch.randn(64, WIDTH) * weight

    assert _same(make, batch, **_everything())


def test_stages_without_gradients_before_them_take_the_branches_of_the_plain_model():
    def make() -> nn.Module:
        net = nn.Sequential(*[Stage(QUESTIONS["gradient of a value"]) for _ in range(5)])
        net[0].requires_grad_(False)
        net[1].requires_grad_(False)
        return net

    def loss_of(model: Any, _: int) -> torch.Tensor:
        return model(torch.randn(64, WIDTH)).square().mean()

    check_equal(make, loss_of, 1, mem_limit="200 KB", engine="chain")


def test_attention_that_is_faster_without_gradients_is_recomputed_with_equal_bits():
    def make() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(4)]
        return nn.Sequential(*layers).eval()

    def batch() -> torch.Tensor:
        return torch.randn(4, 8, WIDTH)

    assert _same(make, batch, **_everything())


def test_a_run_that_records_a_graph_for_a_question_keeps_nothing_of_it():
    def temporaries(question: str) -> list[int]:
        torch.manual_seed(0)
        net = nn.Sequential(*[Stage(QUESTIONS[question]) for _ in range(3)])
        model = rotor.Checkpointable(net, torch.randn(64, WIDTH), "1 GB", engine="chain")
        assert any(stage.asks for stage in model.inspection_values.stages) == (question != "never")
        return [measure.forward_nograd_tmp_bytes for measure in model.inspection_values.measures]

    assert temporaries("gradient of a value") == temporaries("never")


class Changing(nn.Module):
    """Stage that changes its input in place later than it was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.changes = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        if self.changes and x.requires_grad:
            x += 1
        return torch.tanh(self.a(x))


def test_an_input_changed_in_place_later_than_measured_is_an_error():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Changing() for _ in range(4)])
    model = rotor.Checkpointable(net, torch.randn(64, WIDTH), "1 GB", engine="chain")
    model.compute_sequence(algo=RecomputeAll)
    for stage in net[1:]:
        stage.changes = 1  # No flag, which would be seen before the step.
    with pytest.raises(RuntimeError, match="changed its input in place, which it did not"):
        model(torch.randn(64, WIDTH)).square().mean().backward()
    assert net[0].weight.grad is None


class Writing(nn.Module):
    """Stage that writes to weights of its own in a way, or to another's."""

    def __init__(self, way, other=None):
        super().__init__()
        self.a, self.b, self.way, self.other = (
            nn.Linear(WIDTH, 96),
            nn.Linear(96, WIDTH),
            way,
            [other],
        )
        self.table = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            if self.way == "other memory":
                self.a.weight.set_((self.a.weight * 0.9).clone())
            elif self.way == "data":
                self.a.weight.data = self.a.weight * 0.9
            elif self.way == "in place":
                self.a.weight.mul_(0.9)
            elif self.other[0] is not None:
                self.other[0].table.mul_(0.9)
        return x + self.b(torch.tanh(self.a(x))) + self.table


@pytest.mark.parametrize("way", ["other memory", "data", "in place", "another's"])
def test_measuring_leaves_weights_that_any_stage_writes_to(way):
    def make() -> nn.Module:
        stages = [Writing(way)]
        for _ in range(3):
            stages.append(Writing(way, stages[-1]))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *stages)

    def batch() -> torch.Tensor:
        return torch.randn(64, WIDTH)

    assert _same(make, batch, mem_limit="1 GB", engine="chain")


class Counting(nn.Module):
    """Stage whose output depends on what earlier forwards kept, where gradients were recorded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.steps = nn.Linear(WIDTH, WIDTH), kind, 0
        self.history: list[float] = []
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        y = self.linear(x) * float(self.scale) * (1 + 0.1 * self.steps + sum(self.history))
        is_noted = y.requires_grad if self.kind == "of a value" else torch.is_grad_enabled()
        if is_noted and self.kind == "buffer":
            self.scale.mul_(0.9).add_(y.detach().abs().mean(), alpha=0.1)
        elif is_noted and self.kind == "weight":
            self.linear.weight.data.mul_(0.99)
        elif is_noted and self.kind == "list":
            self.history.append(y.detach().mean().item())
        else:
            self.steps += 1 if is_noted else 2
        return torch.tanh(y)


@pytest.mark.parametrize("kind", ["attribute", "of a value", "buffer", "list", "weight"])
@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_stage_keeps_what_it_keeps_where_gradients_are_recorded(kind, engine):
    def make() -> nn.Module:
        pairs = [(Counting(kind), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        return nn.Sequential(*[stage for pair in pairs for stage in pair])

    options = _everything() if engine == "chain" else {"mem_limit": 400 * WIDTH * 4 * 8}
    assert _same(make, lambda: torch.randn(400, WIDTH), **options)
