"""``torch.compile`` and ``torch.utils.checkpoint`` around models with a limit, and inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotor

_GRADS_READ = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""Mark of tests in which PyTorch's compiler reads gradients of values between its functions."""
WIDTH = 32
LIMIT = 500_000


class Block(nn.Module):
    """A residual block, under a checkpoint of its own where `reentrant` is given."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def make(reentrant: bool | None = None, compiled: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[Any] = [Block(reentrant) for _ in range(3)]
    if compiled:
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    return nn.Sequential(nn.Linear(16, WIDTH), *blocks, nn.Linear(WIDTH, 10))


def batch() -> torch.Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


def train(call: Any, model: nn.Module) -> tuple[list[float], list[torch.Tensor | None]]:
    losses = []
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(step)
        loss = call(batch()).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    # What one test had dynamo leave alone, another one would not be told of.
    torch.compiler.reset()


@pytest.fixture(scope="module")
def expected():
    model = make()
    return train(model, model)


def check(found: Any, expected: Any, model: rotor.Checkpointable) -> None:
    assert found[0] == expected[0]
    for got, wanted in zip(found[1], expected[1], strict=True):
        assert torch.equal(got, wanted)
    assert model.plan.measured_bytes <= model.mem_limit


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_compiled_before(engine, expected):
    """The plan is made of what the compiled model computes."""
    model = rotor.Checkpointable(
        torch.compile(make(), backend="aot_eager"), mem_limit=LIMIT, engine=engine
    )
    check(train(model, model), expected, model)


@_GRADS_READ
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_stages_stay_compiled_once_they_were_measured(backend):
    compiled = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return torch._dynamo.backends.registry.lookup_backend(backend)(graph, inputs)

    class Stage(Block):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(WIDTH)
            self.drop = nn.Identity()
            self.mean = torch.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            return self.statistics(self.inner(x)) + self.mean

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, WIDTH), *[Stage() for _ in range(2)])
    net = copy.deepcopy(plain)
    for stage in (*plain[1:], *net[1:]):
        stage.compile(backend=count)
    model = rotor.Checkpointable(net, mem_limit=LIMIT, engine="chain")
    found = train(model, net)
    assert compiled
    expected = train(plain, plain)
    check(found, expected, model)
    assert [b.tolist() for b in net.buffers()] == [b.tolist() for b in plain.buffers()]
    assert [s.mean.tolist() for s in net[1:]] == [s.mean.tolist() for s in plain[1:]]


class Chooses(nn.Module):
    """A stage with a branch on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


class Loops(nn.Module):
    """A stage with a loop, which no gradient goes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            _, doubled = torch._higher_order_ops.while_loop(
                lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (torch.zeros(()), x.detach())
            )
        return x * doubled.sigmoid()


class Maps(nn.Module):
    """A stage that maps a function over the rows of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._higher_order_ops.map(lambda row: row.tanh() * row, x)


class Scans(nn.Module):
    """A stage with a running sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def add(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = carried + row
            return total, total.clone()

        total = torch._higher_order_ops.scan(add, torch.zeros_like(x[0]), x)[1]
        return x + total.sin()


class Breaks(nn.Module):
    """A model of which no single graph can be captured."""

    def __init__(self, layers: nn.Module, end: nn.Module) -> None:
        super().__init__()
        self.layers, self.end = layers, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.layers(x if x.sum().item() < 1e9 else x * 2))


@_GRADS_READ
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", [Chooses, Loops, Maps, Scans])
@pytest.mark.parametrize("is_chain", [True, False])
def test_operators_that_compile_functions_work_after_measuring_too(
    kind: Callable[[], nn.Module], is_chain: bool
) -> None:
    layers = make()
    plain = layers.insert(2, kind()) if is_chain else Breaks(layers, kind())
    net = copy.deepcopy(plain)
    model = rotor.Checkpointable(net, mem_limit=2 * LIMIT, engine="chain" if is_chain else "auto")
    found = train(model, net)
    expected = train(plain, plain)
    check(found, expected, model)


@_GRADS_READ
@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_compiled_stages(engine, expected):
    model = rotor.Checkpointable(make(compiled=True), mem_limit=LIMIT, engine=engine)
    check(train(model, model), expected, model)


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_compiled_after(engine, expected):
    """The plan runs as it is, and no limit is lost."""
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    check(train(torch.compile(model, backend="aot_eager"), model), expected, model)


def compiled_autograd() -> Any:
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(torch.compile(backend="eager"))


@pytest.mark.parametrize("engine", ["auto", "chain", "dynamic"])
def test_a_step_in_compiled_autograd_is_plain_and_later_ones_are_planned(engine):
    plain = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh())
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=LIMIT, engine=engine, verbosity=0)
    with (
        compiled_autograd(),
        pytest.warns(rotor.MemoryLimitWarning, match="compiled autograd sees"),
    ):
        model(batch()).square().sum().backward()
    model(batch()).square().sum().backward()
    assert model.plan.measured_bytes <= LIMIT
    for _ in range(2):
        plain(batch()).square().sum().backward()
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_a_graph_of_a_step_in_compiled_autograd_is_refused():
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine="graph")
    with compiled_autograd(), pytest.raises(rotor.CaptureError, match="compiled autograd sees"):
        model(batch())


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_compiled_autograd_around_the_backward_alone_is_refused(engine):
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    loss = model(batch()).square().sum()
    with compiled_autograd(), pytest.raises(RuntimeError, match="compiled autograd sees"):
        loss.backward()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_one_graph_of_a_model_with_a_limit_is_refused():
    model = rotor.Checkpointable(make(), mem_limit=LIMIT)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs its own plan"):
        compiled(batch())


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_checkpoints_inside(engine, expected):
    model = rotor.Checkpointable(make(reentrant=False), mem_limit=LIMIT, engine=engine)
    check(train(model, model), expected, model)


def test_reentrant_checkpoints_inside_of_a_graph(expected):
    model = rotor.Checkpointable(make(reentrant=True), mem_limit=LIMIT, engine="graph")
    check(train(model, model), expected, model)


@pytest.mark.parametrize("engine", ["chain", "dynamic"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_inside_are_refused_elsewhere(engine):
    model = rotor.Checkpointable(make(reentrant=True), mem_limit=LIMIT, engine=engine)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(model, model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_checkpoints_outside_are_refused(engine, reentrant):
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match=r"within torch\.utils\.checkpoint"):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()


def test_symbolic_tracing_of_a_model_with_a_limit_is_refused():
    model = rotor.Checkpointable(make(), mem_limit=LIMIT)
    with pytest.raises(RuntimeError, match=r"graph would be one without.*chk\.module"):
        torch.fx.symbolic_trace(model)
    assert torch.fx.symbolic_trace(model.module).graph.find_nodes(op="call_module", target="0")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripts_of_a_model_with_a_limit_are_refused():
    model = rotor.Checkpointable(make(), mem_limit=LIMIT).eval()
    outer = nn.Sequential(model)
    for kind in (model, outer):
        with pytest.raises(RuntimeError, match=r"compiles a model with a limit.*chk\.module"):
            torch.jit.script(kind)
    assert outer[0] is model
    x = batch()
    assert torch.equal(torch.jit.script(model.module)(x), model(x))


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_a_model_that_was_traced_is_limited(engine, expected):
    model = rotor.Checkpointable(torch.fx.symbolic_trace(make()), mem_limit=LIMIT, engine=engine)
    check(train(model, model), expected, model)


class Doubled(nn.Module):
    """A model around another one, which takes its argument by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(input=x).relu() * 2


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_symbolic_tracing_leaves_limited_parts_whole(engine):
    plain = Doubled(make())
    inner = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    traced = torch.fx.symbolic_trace(Doubled(inner))
    (node,) = traced.graph.find_nodes(op="call_module", target="inner")
    assert len(node.kwargs) == 1
    assert traced.inner is inner
    check(train(traced, traced), train(plain, plain), inner)
