"""Models whose inputs, results or gradients are sparse, under a limit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import check_equal, trained
from versions import needs_swaps
from zoo.judge import covers
from zoo.models import Function, Row

import rotor
from rotor import dtr, memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def _embedded(layer: nn.Module) -> nn.Module:
    return Row(layer, nn.Linear(16, 32))


def _propagated() -> nn.Module:
    def forward(self: Any, adjacent: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.second(adjacent @ self.first(adjacent @ x).relu())

    return Function(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))


def _adjacent() -> torch.Tensor:
    weights = torch.rand(40, 40, generator=torch.Generator().manual_seed(3))
    return weights * (weights > 0.9)


def _index(*shape: int) -> torch.Tensor:
    return torch.randint(200, shape, generator=torch.Generator().manual_seed(4))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "embedding": (lambda: _embedded(nn.Embedding(200, 16, sparse=True)), lambda: (_index(64),)),
    "bag": (
        lambda: _embedded(nn.EmbeddingBag(200, 16, mode="sum", sparse=True)),
        lambda: (_index(32, 4),),
    ),
    "csr": (_propagated, lambda: (_adjacent().to_sparse_csr(), torch.ones(40, 8))),
    "coo": (_propagated, lambda: (_adjacent().to_sparse(), torch.ones(40, 8))),
}


def _train(net: nn.Module, model: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(*inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("engine", ["dynamic", "auto"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_sparse_models_train(case: str, engine: str):
    make, inputs = CASES[case]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    net = make()
    limited = rotor.Checkpointable(net, mem_limit="4MiB", engine=engine)
    expected = _train(plain, plain, inputs())
    found = _train(net, limited, inputs())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x.to_sparse() * 2,
        lambda x: x.to_sparse_csr(),
        lambda x: torch.sparse.mm(x.to_sparse(), x.to_sparse()),
        lambda x: torch.sparse_coo_tensor(torch.arange(30)[None].repeat(2, 1), x[0], (30, 30)),
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged).sin(),
    ],
    ids=["times", "csr", "product", "coo", "jagged"],
)
def test_operators_with_sparse_results_run_more_than_once(operator: Callable[..., Any]):
    x = torch.linspace(-1, 1, 900).reshape(30, 30).relu()
    expected = operator(x)
    with dtr.budget("1MiB"):
        for _ in range(3):
            found = operator(x)
    if found.layout is not torch.jagged:
        found, expected = found.to_dense(), expected.to_dense()
    else:
        found, expected = found.values(), expected.values()
    assert torch.equal(found, expected)


WIDTH = 64
ROWS = 512


class Layered(nn.Module):
    """A sparse embedding, layers that are captured as a part, and an end that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, WIDTH, sparse=True)
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        self.last = nn.Linear(WIDTH, 32)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(self.embedding(index)))
        return found


def _chain() -> nn.Module:
    net = Layered()
    return nn.Sequential(net.embedding, *net.layers)


@pytest.mark.parametrize("engine", [pytest.param("parts", marks=needs_swaps), "chain"])
def test_sparse_gradients_that_grow_are_planned_for_and_never_exceed_in_silence(engine: str):
    # Parts are taken where their prediction is within the limit.
    limit, count = (1_900_000, 24) if engine == "parts" else (1_200_000, 14)
    make, name = (Layered, "auto") if engine == "parts" else (_chain, "chain")
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    net = make()
    chk = rotor.Checkpointable(net, mem_limit=limit, engine=name)
    batches = torch.randint(5000, (count, ROWS), generator=torch.Generator().manual_seed(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in batches[:-1]:
            chk(index).square().mean().backward()
            plan = chk.plan
            if plan.measured_bytes is not None and plan.measured_bytes > limit:
                assert covers([str(w.message) for w in caught], plan.measured_bytes)
        planned_bytes = plan.predicted_bytes
        with memory.meter("cpu") as meter:
            chk(batches[-1]).square().mean().backward()
    assert meter.peak_bytes > 1.3 * limit
    if engine == "parts":
        assert type(plan).__name__ == "PartsPlan"
        assert any("of sparse gradients existed" in str(w.message) for w in caught)
        # One addition more: the indices and values of a batch.
        assert planned_bytes == pytest.approx(meter.peak_bytes - ROWS * (4 * WIDTH + 8), rel=0.02)
        assert chk.plan.predicted_bytes == pytest.approx(meter.peak_bytes, rel=0.02)
    for index in batches:
        plain(index).square().mean().backward()
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad.to_dense(), b.grad.to_dense())


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_sizes_known_only_in_a_step_run_or_are_refused_in_words(engine: str):
    def gradients(model: Any, net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor | None]:
        output = model(batch)
        (output.values() if output.is_nested else output).square().mean().backward()
        return [p.grad for p in net.parameters()]

    parts = [torch.ones(rows, WIDTH) for rows in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    marked = torch.ones(8, WIDTH)
    torch._dynamo.mark_dynamic(marked, 0)
    for batch in (jagged, marked):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        net = copy.deepcopy(plain)
        model = rotor.Checkpointable(net, mem_limit="4MiB", engine=engine)
        if engine == "graph" or (engine == "chain" and batch is jagged):
            with pytest.raises((TypeError, rotor.CaptureError), match="known only in a step"):
                model(batch)
        else:
            found, expected = gradients(model, net, batch), gradients(plain, plain, batch)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert not any("please report" in reason for reason in model.plan.why.values())


class Rows(nn.Module):
    """Layers for rows of jagged sequences, whose values the model may put into `seen` too."""

    def __init__(self, seen: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )
        self.seen = seen

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
            if self.seen is not None:
                self.seen.append(rows)
        return rows


def _loss_of_sequences(model: Any, _: int) -> torch.Tensor:
    ends = torch.tensor([0, 20, 50, 90, 256])
    rows = torch.nested.nested_tensor_from_jagged(torch.randn(256, WIDTH), ends)
    values: torch.Tensor = model(rows).values()
    return values.square().mean()


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_jagged_models_train_in_the_memory_of_dense_ones(engine: str):
    with memory.meter("cpu") as meter:
        trained(Rows, _loss_of_sequences)
    limit = int(0.55 * meter.peak_bytes)
    model = check_equal(Rows, _loss_of_sequences, mem_limit=limit, engine=engine)
    assert model.plan.last.stats.evictions > 0
    assert model.plan.measured_bytes <= limit


def test_jagged_results_that_python_holds_are_there_after_the_forward():
    def loss_of(model: Any, _: int) -> Any:
        loss, seen = _loss_of_sequences(model, 0), model.seen
        return loss, *(torch.from_numpy(rows.detach().values().numpy()) for rows in seen)

    check_equal(lambda: Rows([]), loss_of, 1, mem_limit="2 MB", engine="dynamic")
