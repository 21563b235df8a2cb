"""What a budget refuses or leaves alone: compiling, tensors of other layouts."""

from __future__ import annotations

import pytest
import torch

from rotor import dtr, memory
from rotor.errors import MemoryLimitWarning


def test_compiling_within_a_budget_leaves_functions_as_they_are_written():
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    compiling = torch.compile
    with dtr.budget("1MiB"):
        with pytest.warns(MemoryLimitWarning, match=r"torch\.compile within.*as it is written"):
            assert torch.compile(function, backend="eager") is function
        with pytest.warns(MemoryLimitWarning, match="as it is written"):
            assert torch.compile(dynamic=True)(function) is function
        x = torch.ones(10)
        assert torch.equal(function(x), (x * 2).sin())
    assert torch.compile is compiling


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_storages_are_refused():
    outside = [
        torch.ones(4, 4).to_mkldnn(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
    for make in (
        lambda: torch.ones(4, 4).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.relu(outside[0]),
        lambda: outside[1] * 2,
    ):
        for _ in range(2):
            with (
                pytest.raises(RuntimeError, match="cannot be counted or evicted"),
                dtr.budget(None),
            ):
                make()
    x = torch.ones(100)
    with dtr.budget(None):
        assert float((x * 2).sum()) == 200


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_and_jagged_tensors_pass():
    def program() -> torch.Tensor:
        kept = [torch.linspace(0, 1, 5000) + k for k in range(12)]
        index = torch.tensor([[0, 1, 2], [2, 0, 1]])
        coo = torch.sparse_coo_tensor(index, kept[0][:3] * 2, (3, 3))
        csr = torch.eye(50).mul(3).to_sparse_csr()
        jagged = torch.nested.nested_tensor([kept[0][:10], kept[1][:20]], layout=torch.jagged)
        found = [coo @ torch.ones(3, 2), csr @ torch.ones(50, 2), (jagged * 2).values()]
        return torch.stack([value.sum() for value in [*found, *kept]])

    expected = program()
    with dtr.budget(200_000) as session:
        found = program()
    assert torch.equal(found, expected)
    assert session.stats.evictions > 0


def test_the_peak_without_eviction_is_that_of_an_unlimited_run():
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8))
    )
    x = torch.linspace(-1, 1, 64 * 256).view(256, 64)
    found = []
    for limit in (None, 600_000):
        with dtr.budget(limit) as session:
            model(x).sum().backward()
        model.zero_grad()
        found.append(session.stats)
    free, limited = found
    assert limited.evictions > 0 == free.evictions
    assert limited.peak_bytes <= 600_000 < limited.held_peak_bytes
    assert limited.held_peak_bytes == free.held_peak_bytes == free.peak_bytes


def test_outputs_that_the_program_dropped_count_where_they_are_made_again():
    """An operator of two results, of which one is kept: run again, it makes both."""
    x = torch.linspace(1, 2, 262_144)

    def program() -> torch.Tensor:
        kept = [torch.frexp(x + k)[1] for k in range(12)]
        return torch.stack([exponents.sum() for exponents in kept * 3])

    expected = program()
    budget = 6 * x.nbytes
    with dtr.budget(budget):
        program()
    with memory.meter("cpu") as meter, dtr.budget(budget) as session:
        found = program()
    assert torch.equal(found, expected)
    assert session.stats.rematerializations > 20
    assert session.stats.peak_bytes - 4096 <= meter.peak_bytes <= budget


def test_a_workspace_is_gone_before_results_are_copied():
    """Without exchanged pointers a replay holds its results twice, not its workspace."""
    torch.manual_seed(0)
    x, weight = torch.randn(8, 1 << 17), torch.ones(1, 1, requires_grad=True)
    for _ in range(2):
        with dtr.budget(12_000 * 1024, storage_swap=False) as session:
            kept = [(torch.logsumexp(x * 1.0, 0) * weight).tanh() for _ in range(5)]
            loss = sum(value.square().mean() for value in reversed(kept))
            loss.backward()
    assert session.stats.evictions > 0
