"""Tensors of a budget that other threads read: right numbers or an error, never freed memory."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rotor
from rotor import dtr
from rotor._pytorch import pointers

SWAPS = [False, *([True] if pointers.has_storage_swap() else [])]
WIDTH = 1000
BYTES = 4 * WIDTH
BUDGET = 4 * BYTES + 200
GONE = "data pointer|torage|was evicted by a memory budget"
"""Texts of PyTorch's builds for the CPU, and ours in the others."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def values() -> list[torch.Tensor]:
    x = torch.linspace(0.1, 2.0, WIDTH)
    return [x.exp(), x.log(), x.sqrt(), x.sin(), x.cos(), x.tanh()]


def elsewhere(read: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read, tensor).result()


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "array": lambda t: np.asarray(t[5:]),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[7].item(),
    "float": lambda t: float(t[7]),
    "bool": lambda t: bool(t[7]),
    "print": repr,
    "address": lambda t: t.data_ptr(),
    "address_of_storage": lambda t: t.untyped_storage().data_ptr(),
    "storage": lambda t: t.untyped_storage()[16],
    "typed_storage": lambda t: t.storage()[16],
    "sum": lambda t: t.sum(),
    "sum_of_a_view": lambda t: t.view(10, -1).t()[3].sum(),
    "norm": lambda t: t.detach().norm(),
    "clone": lambda t: t.clone(),
    "product": lambda t: t @ t,
    "write": lambda t: t.add_(1),
    "random": lambda t: t.normal_(),
    "cast": lambda t: t.double(),
    "stack": lambda t: torch.stack([t, t]),
    "tensor_of_elements": lambda t: torch.tensor([t[0]]),
    "share_memory": lambda t: t.share_memory_(),
    "apply": lambda t: t.apply_(lambda v: v),
    "from_dlpack": torch.from_dlpack,
}


def test_pytorch_can_forbid_access() -> None:
    assert pointers.FLAGS


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", READS)
def test_an_evicted_tensor_that_another_thread_reads_raises(name: str, swap: bool) -> None:
    with dtr.budget(BUDGET, heuristic="LRU", storage_swap=swap, strict=False):
        found = values()
        with pytest.raises((RuntimeError, IndexError), match=GONE):
            elsewhere(READS[name], found[0])
        again = [tensor + 0 for tensor in found]
    assert all(map(torch.equal, again, values()))


@pytest.mark.parametrize("swap", SWAPS)
def test_it_raises_without_the_guard_too(swap: bool) -> None:
    with dtr.budget(BUDGET, heuristic="LRU", storage_swap=swap, strict=False, guard=False):
        found = values()
        with pytest.raises(RuntimeError, match=GONE):
            found[0].data_ptr()
        assert found[0].sum() == values()[0].sum()


EXPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": np.from_dlpack,
    "function": lambda t: torch.from_dlpack(torch.to_dlpack(t)),
    "capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "method": lambda t: torch.from_dlpack(t.__dlpack__()),
}
LOANS = EXPORTS | {"numpy": lambda t: t.numpy(), "part": lambda t: t[5:].numpy()}
LOANS |= {"from_dlpack": torch.from_dlpack}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", EXPORTS)
def test_what_another_thread_exports_comes_back_and_stays(name: str, swap: bool) -> None:
    with dtr.budget(BUDGET, heuristic="LRU", storage_swap=swap, strict=False):
        found = values()
        shared = elsewhere(EXPORTS[name], found[0])
        more = [torch.full((WIDTH,), 7.0) * 2 for _ in range(5)]
        np.testing.assert_array_equal(np.asarray(shared), values()[0].numpy())
        assert len(more) == 5


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", LOANS)
def test_what_another_thread_shares_outlives_evictions(name: str, swap: bool) -> None:
    x = torch.linspace(0.1, 2.0, WIDTH)
    with dtr.budget(7 * BYTES + 200, heuristic="LRU", storage_swap=swap) as session:
        first = x.exp()
        shared = elsewhere(LOANS[name], first)
        more = [x.sin() + k for k in range(8)]
        assert session.stats.evictions > 0
        wanted = x.exp()[WIDTH - len(shared) :].clone()
        np.testing.assert_array_equal(np.asarray(shared), wanted.numpy())
        assert torch.equal(first + 0, x.exp())
        # What is shared counts.
        current = session.counters()["current_bytes"]
        del first, shared
        assert session.counters()["current_bytes"] < current
    assert len(more) == 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.shown: queue.Queue[Any] = queue.Queue()
        self.told: queue.Queue[Any] = queue.Queue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = None
        for layer in self.layers:
            x = torch.tanh(layer(x))
            kept = x.detach() if kept is None else kept
        if self.training:
            self.shown.put(kept)
            self.told.get(timeout=60)
        return x


@pytest.mark.parametrize("read", [torch.norm, lambda t: t.numpy().sum(), lambda t: t.tolist()[0]])
def test_a_thread_that_logs_an_activation_spoils_no_step(read: Callable[..., Any]) -> None:
    def trained(**limits: Any) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        net, logged = Net(), []
        model = rotor.Checkpointable(net, verbosity=0, **limits) if limits else net

        def log() -> None:
            while (tensor := net.shown.get(timeout=60)) is not None:
                try:
                    logged.append(read(tensor))
                except RuntimeError as error:
                    logged.append(error)
                finally:
                    net.told.put(None)

        thread = threading.Thread(target=log)
        thread.start()
        try:
            for _ in range(3):
                net.zero_grad()
                model(torch.randn(256, 64)).square().mean().backward()
        finally:
            net.shown.put(None)
            thread.join()
        return [p.grad for p in net.parameters() if p.grad is not None], logged

    expected, right = trained()
    found, seen = trained(mem_limit="600 kB", engine="dynamic")
    assert all(map(torch.equal, expected, found))
    for value, wanted in zip(seen, right, strict=True):
        assert isinstance(value, RuntimeError) or np.array_equal(value, wanted)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_an_operator_on_an_evicted_tensor_is_known_by_the_same_layout(kind: torch.dtype) -> None:
    with dtr.budget(40 * BYTES, heuristic="LRU", strict=False) as session:
        first = torch.ones(4 * WIDTH, dtype=kind) * 3
        _ = first.view(4, -1).t() + 1
        more = [torch.ones(4 * WIDTH) * 2 for _ in range(12)]
        before, evictions = len(session._needs), session.stats.evictions
        assert evictions > 0
        _ = first.view(4, -1).t() + 1
        assert session.stats.rematerializations > 0
        assert len(session._needs) == before
        assert len(more) == 12


def test_a_profiler_sees_the_shapes_of_what_is_evicted() -> None:
    with (
        torch.profiler.profile(record_shapes=True) as profiler,
        dtr.budget(BUDGET, heuristic="LRU", strict=False) as session,
    ):
        found = values()
        assert session.stats.evictions > 0
        views = [tensor.view(10, -1) for tensor in found]
    shapes = [e.input_shapes for e in profiler.events() if e.name == "aten::view"]
    assert len(shapes) >= len(views)
    assert all(shape == [[WIDTH], []] for shape in shapes)


def test_arguments_of_other_layouts_are_let_go() -> None:
    sparse = torch.eye(4).to_sparse()
    count = sys.getrefcount(sparse)
    with dtr.budget("1 MB"):
        for _ in range(5):
            torch.sparse.mm(sparse, torch.ones(4, 4))
    assert sys.getrefcount(sparse) == count
