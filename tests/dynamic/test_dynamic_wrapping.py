"""`Checkpointable(engine="dynamic")`: what models take and return, and what the wrapper tells."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from limited_models import Perceptron, both, limited, same, small_pair
from rotor.models import treelstm
from torch import nn
from torch.nn.utils import parametrizations, prune
from training import check_equal
from zoo.models import Function

import rotor
from rotor import dtr, memory
from rotor.errors import MemoryLimitWarning


@pytest.fixture
def pair() -> tuple[Perceptron, Any, torch.Tensor, int]:
    """A model, a copy under a limit that makes it evict, an input, and that limit."""
    return small_pair()


# -- what a model may take and return


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "kept"


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.body = Perceptron()
        self.side: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, *, options: dict[str, Any], kind: str) -> Any:
        y = self.embed(tokens) + options["bias"]
        h = self.body(y)
        self.side = h.square().mean()
        self.losses = [h.abs().mean()]
        if kind == "dict":
            return {"logits": h, "again": h, "part": h[:4], "tokens": tokens, "count": 3}
        if kind == "object":
            return Answer(h * 2, (h, y), "seen")
        if kind == "identity":
            return h, options["bias"], self.body.norm.weight, h.detach(), h.argmax(1)
        return h.sum(), None


@pytest.mark.parametrize("kind", ["dict", "object", "identity", "tuple"])
def test_arguments_and_outputs_of_many_kinds(kind):
    torch.manual_seed(0)
    model = Many()
    chk = limited(copy.deepcopy(model), 200_000)
    tokens = torch.randint(0, 20, (64,))

    def act(m: nn.Module) -> list[torch.Tensor]:
        bias = torch.zeros(32, requires_grad=True)
        out = m(tokens, options={"bias": bias}, kind=kind)
        if kind == "dict":
            assert out["logits"] is out["again"]
            assert out["tokens"] is tokens
            assert out["count"] == 3
            loss = out["logits"].sum() + out["part"].square().sum()
        elif kind == "object":
            assert type(out) is Answer
            assert out.note == "seen"
            loss = out.logits.square().sum() + out.hidden[1].sum()
        elif kind == "identity":
            assert out[1] is bias
            assert out[2] is m.body.norm.weight
            assert not out[3].requires_grad
            loss = out[0].sum() + out[1].sum() + out[2].square().sum() + out[3][0, 0] + out[4][0]
        else:
            assert out[1] is None
            loss = out[0]
        loss = loss + m.side * 2 + m.losses[0]
        loss.backward()
        return [loss.detach(), bias.grad]

    for seed in range(2):
        both(model, chk, act, seed)
    assert chk.plan.last.stats.evictions > 0


def test_outputs_may_be_unused_or_dropped():
    both_of = lambda self, x: (self.first(x), self.second(x))  # noqa: E731
    model = Function(both_of, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    chk = limited(copy.deepcopy(model))
    x = torch.randn(4, 8)
    both(model, chk, lambda m: [m(x)[0].sum().backward() or x])
    assert chk.second.weight.grad is None


def test_outputs_may_be_written_to_where_the_plain_model_allows_it(pair):
    model, chk, x, _ = pair

    def act(m: nn.Module) -> list[torch.Tensor]:
        y = m(x)
        y.mul_(2).add_(1)
        y.square().sum().backward()
        return [y.detach()]

    both(model, chk, act)


def test_state_carried_from_step_to_step():
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(32, 32)
            self.state: torch.Tensor | None = None
            self.register_buffer("average", torch.zeros(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros_like(x[0]) if self.state is None else self.state
            outputs = []
            for step in x:
                h = self.cell(step, h)
                outputs.append(h)
            self.state = h.detach()
            self.average = self.average * 0.9 + h.detach().mean(0)
            return torch.stack(outputs)

    torch.manual_seed(0)
    model = Stateful()
    chk = limited(copy.deepcopy(model), 200_000)
    x = torch.randn(12, 16, 32)

    def act(m: nn.Module) -> list[torch.Tensor]:
        for _ in range(3):
            m(x).square().mean().backward()
        return [m.state, m.average]

    both(model, chk, act)
    assert chk.plan.last.stats.evictions > 0


def test_under_autocast(pair):
    model, chk, x, _ = pair

    def act(m: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            losses = [m(x + k).float().square().mean() for k in range(2)]
        for loss in losses:
            loss.backward()
        return losses

    with pytest.warns(MemoryLimitWarning, match="each keeps its own limit"):
        both(model, chk, act)


def test_without_training_or_gradients_the_plain_model_runs(pair):
    model, chk, x, _ = pair
    model.eval()
    chk.eval()
    both(model, chk, lambda m: [m(x).detach()])
    chk.train()
    model.train()
    with torch.no_grad():
        both(model, chk, lambda m: [m(x)])
    assert chk.plan is None
    for m in (model, chk):
        m.requires_grad_(False)
    both(model, chk, lambda m: [m(x)])
    assert not chk(x).requires_grad


# -- the wrapper


def test_samples_are_measured_without_a_trace():
    torch.manual_seed(0)
    model = Perceptron()
    x = torch.randn(64, 32)
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    chk = rotor.Checkpointable(model, x, "200 KB", engine="dynamic")
    assert same(before, list(model.buffers()))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert 0 < chk.get_expected_memory() <= 200_000
    assert chk.get_expected_makespan() > 0
    with pytest.raises(rotor.InfeasibleError):
        rotor.Checkpointable(model, x, "40 KB", engine="dynamic")
    carrying = Many()
    chk = limited(carrying)
    options = {"bias": torch.zeros(32)}
    chk.measure(torch.randint(0, 20, (8,)), options=options, kind="dict")
    assert carrying.side is None
    assert carrying.losses == []


def test_limits_reports_and_what_is_not_known(pair):
    _, chk, x, _ = pair
    with pytest.raises(ValueError, match="no plan was made"):
        chk.report()
    chk.compute_sequence("1 MB")
    chk(x).sum().backward()
    chk(x).sum().backward()
    text = chk.report()
    assert "976.6 KiB" in text
    assert "evictions" in text
    assert len(chk.display().splitlines()) == 4
    with pytest.raises(ValueError, match="what a limit costs is not known"):
        chk.curve()
    with pytest.raises(ValueError, match="give the limit once"):
        chk.compute_sequence(1000, mem_limit=1000)
    with pytest.raises(TypeError, match="unknown option 'effort'"):
        chk.compute_sequence(effort="fast")


def test_wrong_settings_are_refused():
    model = Perceptron()
    with pytest.raises(TypeError, match="unknown option 'effort'"):
        rotor.Checkpointable(model, engine="dynamic", effort="fast")
    with pytest.raises(ValueError, match="preserve_rng_state"):
        rotor.Checkpointable(model, engine="dynamic", preserve_rng_state=False)
    with pytest.raises(ValueError, match="profile= is for graphs"):
        rotor.Checkpointable(model, engine="dynamic", profile="somewhere.json")
    with pytest.raises(ValueError, match='engine="graph"'):
        rotor.Checkpointable(model, engine="dynamic", backend="inductor")


def test_budgets_do_not_nest(pair):
    _, chk, x, _ = pair
    with dtr.budget(None), pytest.raises(RuntimeError, match="wrap the outermost model only"):
        chk(x)
    outer = limited(nn.Sequential(chk))
    with pytest.raises(RuntimeError, match="wrap the outermost model only"):
        outer(x)
    assert dtr.current() is None


def test_copies_and_pickles(pair):
    model, chk, x, limit = pair
    chk(x).sum().backward()
    chk.zero_grad()
    model.load_state_dict(chk.state_dict())
    y = chk(x)
    for twin in (copy.deepcopy(chk), pickle.loads(pickle.dumps(chk))):
        assert twin.mem_limit == limit
        assert type(twin) is type(chk)
        reference = copy.deepcopy(model)
        reference.load_state_dict(twin.state_dict())
        both(reference, twin, lambda m: [m(x).sum().backward() or x])
    del y


def test_many_steps_leave_nothing_behind(pair):
    _, chk, x, _ = pair
    optimizer = torch.optim.SGD(chk.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        chk(x).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        step()
    gc.collect()
    objects = len(gc.get_objects())
    with memory.meter("cpu", existing=[p.grad for p in chk.parameters()]) as meter:
        for _ in range(20):
            step()
    gc.collect()
    assert meter.end_bytes < 2000
    assert len(gc.get_objects()) < objects + 200


def test_trees_of_every_shape_share_a_limit():
    torch.manual_seed(0)
    model = treelstm.TreeLSTM(treelstm.ChildSumCell(32, 32))
    chk = limited(copy.deepcopy(model), "600 KB")
    draw = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(6):
            tree = treelstm.random_parse_tree(draw.randint(4, 24), seed)
            x = torch.randn(len(tree), 8, 32)
            both(model, chk, lambda m, x=x, tree=tree: [m(x, tree).sum().backward() or x], seed)
    assert chk.plan.steps == 6


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        x, sizes = x if isinstance(x, tuple) else (x, {"before": x.shape})
        y = torch.tanh(self.linear(x))
        return y / sizes["before"].numel(), {"before": sizes["before"], "after": [y.shape]}


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_sizes_among_outputs_stay_sizes(engine: str) -> None:
    model = rotor.Checkpointable(
        nn.Sequential(Sized(), Sized()), mem_limit="2 MB", engine=engine, verbosity=0
    )
    for _ in range(2):
        y, sizes = model(torch.randn(64, 32))
        y.square().sum().backward()
        assert [type(s) for s in (sizes["before"], *sizes["after"])] == [torch.Size, torch.Size]
        assert sizes["before"].numel() == 2048


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


def _without_bias(layer: nn.Module) -> None:
    layer.bias = None


@pytest.mark.parametrize(
    "change", [_pruned, _without_bias, parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_parameters_may_be_others_in_the_next_step(change: Callable[[nn.Module], Any]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(48, 48), nn.Tanh())])

    def loss_of(model: Any, number: int) -> torch.Tensor:
        if number == 2:
            change(model[4])
        return model(torch.randn(256, 48)).square().mean()

    check_equal(make, loss_of, 4, mem_limit="2 MB", engine="dynamic")


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_several_backwards_run_as_one() -> None:
    def gradients(**limits: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(48, 48), nn.Tanh())])
        model: Any = rotor.Checkpointable(net, verbosity=0, **limits) if limits else net
        y = model(torch.randn(256, 48))[:3].sum(1)
        found = torch.autograd.grad(y, list(net.parameters()), torch.eye(3), is_grads_batched=True)
        return found, model

    found, model = gradients(mem_limit="800 KB", engine="dynamic")
    assert all(map(torch.equal, gradients()[0], found))
    assert model.plan.last.stats.evictions > 0


FIRST_OF_A_PROCESS = """
import gc, weakref, torch, rotor
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
model = rotor.Checkpointable(net, mem_limit="5 MB", engine="dynamic", verbosity=0)
model(torch.randn(4, 8)).sum().backward()
import torch._dynamo
model(torch.randn(4, 8)).sum().backward()
watched = weakref.ref(net)
del net, model
gc.collect()
assert watched() is None
"""


def test_the_first_model_of_a_process_is_freed() -> None:
    subprocess.run([sys.executable, "-c", FIRST_OF_A_PROCESS], check=True, timeout=300)


class Penalised(torch.autograd.Function):
    """Identity whose backward differentiates a function of a weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            total = (ctx.x @ ctx.weight.t()).tanh().sum()
        (own,) = torch.autograd.grad(total, ctx.weight)
        return gradient + own.sum() / 1000, None


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Penalised.apply(torch.tanh(self.first(x)), self.last.weight))


def check_accumulated(net: nn.Module, **options: Any) -> None:
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, **{"mem_limit": "1MB", "engine": "dynamic"} | options)
    for k in range(4):
        x = torch.randn(40, 32)
        for other in (plain, model):
            if k == 2:
                other.zero_grad()
            loss = other(x).square().mean()
            loss.backward(retain_graph=k == 3)
            if k == 3:
                loss.backward()
        for mine, expected in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, expected.grad)


@pytest.mark.parametrize("verify", ["off", "always"])
def test_gradients_that_code_of_a_backward_asks_for_are_added_to_none(verify: str) -> None:
    torch.manual_seed(0)
    check_accumulated(WithPenalty(), verify=verify)


class Equilibrium(nn.Module):
    """Fixed point of a layer, whose hook solves for the gradient with a graph of the forward."""

    def __init__(self, solve: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.given, self.last = nn.Linear(48, 48), nn.Linear(32, 48), nn.Linear(48, 8)
        self.solve = solve
        self.graph: list[torch.Tensor] = []

    def layer(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(z) + self.given(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros(x.shape[0], 48)
            for _ in range(4):
                z = self.layer(z, x)
        z = self.layer(z, x)
        start = z.detach().clone().requires_grad_()
        after = self.layer(start, x)
        self.graph = [after, start]
        z.register_hook(lambda gradient: self.solve(self, after, start, gradient))
        return self.last(z)


def series(
    net: Equilibrium, after: torch.Tensor, start: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    total = given
    for _ in range(4):
        total = torch.autograd.grad(after, start, total, retain_graph=True)[0] + given
    return total


def of_attributes(net: Equilibrium, _: Any, __: Any, given: torch.Tensor) -> torch.Tensor:
    return series(net, *net.graph, given)


def with_a_weight(
    net: Equilibrium, after: torch.Tensor, start: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    wanted = (start, net.inner.weight)
    own, weight = torch.autograd.grad(after, wanted, given, retain_graph=True)
    return own + given + weight.sum() / 1000


@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("solve", [series, of_attributes, with_a_weight])
def test_a_hook_differentiates_a_graph_of_the_forward(solve: Any, verify: str) -> None:
    torch.manual_seed(0)
    check_accumulated(Equilibrium(solve), verify=verify)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_the_automatic_engine_trains_an_equilibrium() -> None:
    torch.manual_seed(0)
    check_accumulated(Equilibrium(series), engine="auto")
