"""The largest batch under a limit: the answer by trial, nothing of the model changed."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re

import pytest
import torch
from torch import distributed, nn
from zoo.models import Row

import rotor
from rotor import memory, timing
from rotor.fit import batches, search, steps
from rotor.fit.advice import advise
from rotor.fit.lengths import cost_of_lengths
from rotor.fit.search import BatchFit, LargestBatch, largest_batch
from rotor.graph import Machine, simulate
from rotor.meter import allocator

cross_entropy = nn.functional.cross_entropy
CARD = Machine("card", 1e13, 1e12, 5e-6)


def mlp(depth: int = 8, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


class Gated(nn.Module):
    """No Sequential; two arguments, one of them optional; dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 4)

    def forward(self, x, *, gate=None):
        hidden = torch.tanh(self.first(x)) * torch.sigmoid(self.second(x if gate is None else gate))
        return self.last(nn.functional.dropout(self.norm(hidden), 0.1, self.training))


def labels(size: int) -> torch.Tensor:
    return torch.arange(size) % 4


def plain_peak(model: nn.Module, size: int) -> int:
    x, y = torch.randn(size, 32), labels(size)
    for _ in range(2):
        model.zero_grad()
        with memory.meter("cpu") as meter:
            cross_entropy(model(x), y).backward()
    return meter.peak_bytes


def fits_by_trial(model: nn.Module, size: int, limit: int) -> bool:
    """Plan a size and train with it; whether every step stays within the limit."""
    model.zero_grad()
    x, y = torch.randn(size, 32), labels(size)
    try:
        chk = rotor.Checkpointable(model, mem_limit=limit, loss_fn=cross_entropy)
        chk.measure(x, targets=(y,))
        chk.plan_step()
    except rotor.InfeasibleError:
        return False
    chk(x, targets=(y,)).backward()
    model.zero_grad()
    with memory.meter("cpu") as meter:
        chk(x, targets=(y,)).backward()
    return meter.peak_bytes <= limit


@pytest.fixture(scope="module")
def limit() -> int:
    return plain_peak(mlp(), 64)


@pytest.fixture(scope="module")
def found(limit) -> LargestBatch:
    return largest_batch(
        mlp(),
        torch.randn(4, 32),
        limit,
        loss_fn=cross_entropy,
        targets=(labels(4),),
        multiple_of=8,
        points=2,
    )


def test_it_is_the_largest_by_trial(found, limit):
    sizes = [s for s in range(8, 400, 8) if s > found.largest.batch - 16]
    true = next(s - 8 for s in sizes if not fits_by_trial(mlp(), s, limit))
    assert abs(found.largest.batch - true) <= 8
    assert found.largest.batch > 64


def test_the_answer_ran_within_the_limit_and_the_next_size_does_not_fit(found, limit):
    assert found.largest.measured_bytes <= limit
    assert found.refused is not None
    assert found.refused.batch == found.largest.batch + 8
    assert not found.refused.fits
    assert found.refused.least_bytes > limit


def test_plain_pytorch_is_the_largest_by_trial(found, limit):
    assert found.plain is not None
    assert found.plain.batch == 64
    assert found.plain.measured_bytes == limit
    assert plain_peak(mlp(), 72) > limit


def test_the_best_is_the_fastest_of_those_that_ran(found):
    rates = [t.batch / t.seconds for t in found.table if t.seconds is not None and t.fits]
    assert found.best.samples_per_second == max(rates)
    assert found.best_runs in ("rotor", "plain")
    assert sum(t.runs == "rotor" and t.seconds is not None for t in found.table) == 2


def test_few_sizes_are_looked_at_and_none_far_above(limit):
    sizes: list[int] = []

    def sample(size: int):
        sizes.append(size)
        return (torch.randn(size, 32),), {}, (labels(size),)

    got = largest_batch(mlp(), sample, limit, loss_fn=cross_entropy, multiple_of=16, points=1)
    assert len(set(sizes)) <= 10
    assert max(sizes) <= 8 * got.largest.batch
    assert all(size % 16 == 0 for size in sizes)


def test_as_text_and_as_data(found):
    text = str(found)
    assert "rotor, largest" in text
    assert f"batch {found.refused.batch} needs at least" in text
    assert text.splitlines()[-1] == found.sentence
    assert re.search(
        r"^batch \d+ -> \d+ at \d\.\d\d of the throughput; fastest is \d+ \(\w+\)$", text, re.M
    )
    alone = dataclasses.replace(found, plain=None).sentence
    assert alone.startswith(f"batch {found.largest.batch}, where plain PyTorch fits none; fastest")
    assert str(found.largest.batch) in found.display()
    data = json.loads(found.to_json())
    assert (data["format"], data["version"]) == ("rotor.fit", 1)
    assert data["largest"]["batch"] == found.largest.batch
    assert len(data["table"]) == len(found.table)
    assert [t.batch for t in found.table] == sorted(t.batch for t in found.table)


def test_any_module_and_nothing_of_it_changes():
    model = Gated().eval()
    model.first.train()
    model.last.weight.grad = torch.ones_like(model.last.weight)
    gradient = model.last.weight.grad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    flags = [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sample = {"x": torch.randn(4, 16), "gate": torch.randn(4, 16)}
    torch.set_rng_state(state)
    got = largest_batch(model, sample, "400 KB", multiple_of=32, points=1)
    assert got.engine == "graph"
    assert got.largest.measured_bytes <= 400_000
    assert got.refused is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert model.last.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model.first.weight.grad is None
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == identities[name]
        assert torch.equal(tensor, before[name]), name


def test_hooks_on_parameters_train_nothing():
    model, called = mlp(depth=2), list[torch.Tensor]()
    for parameter in model.parameters():
        parameter.register_hook(called.append)
        parameter.register_post_accumulate_grad_hook(called.append)
    largest_batch(model, torch.randn(4, 32), "200 KB", engine="chain", max_batch=32, points=1)
    assert called == []
    model(torch.randn(4, 32)).sum().backward()
    assert len(called) == 2 * len(list(model.parameters()))


def test_the_smallest_that_does_not_fit_says_what_would():
    with pytest.raises(rotor.InfeasibleError, match="Nothing is left for a step: 1 MiB = "):
        largest_batch(mlp(), torch.randn(4, 32), total_limit="1MiB", multiple_of=4)
    with pytest.raises(rotor.InfeasibleError, match="a batch of 4 does not fit in 20 KiB") as error:
        largest_batch(mlp(), torch.randn(4, 32), "20 KiB", multiple_of=4)
    least = error.value.minimum_bytes
    got = largest_batch(mlp(), torch.randn(4, 32), least, multiple_of=4, points=1)
    assert got.largest.batch == 4


def test_the_search_ends_where_it_is_told():
    got = largest_batch(mlp(2), torch.randn(4, 32), "10 MB", max_batch=20, points=1)
    assert got.largest.batch == 20
    assert got.refused is None
    assert "ended at batch 20" in str(got)
    assert got.plain is not None
    assert got.plain.batch == 20


class Decaying(nn.Module):
    """Every forward writes to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return torch.tanh(self.linear(x))


WRITING = {
    "decay": (lambda: nn.Sequential(Decaying(), Decaying()), lambda: torch.randn(4, 8, 32)),
    "max_norm": (
        # The table is renormalised where it is read.
        lambda: Row(nn.Embedding(16, 8, max_norm=0.1), nn.Tanh(), nn.Linear(8, 4)),
        lambda: torch.arange(32).reshape(4, 8) % 16,
    ),
}


@pytest.mark.parametrize("kind", WRITING)
@pytest.mark.parametrize("by", ["largest_batch", "cost_of_lengths", "advise"])
def test_weights_that_forwards_write_to_stay(kind, by):
    make, sample = WRITING[kind]
    model, batch = make(), sample()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if by == "largest_batch":
        largest_batch(model, batch, "200 KB", max_batch=64, points=1)
    elif by == "cost_of_lengths":
        cost_of_lengths(model, batch, {4: 1, 8: 1}, "1 MB", points=2)
    else:
        advise(model, (batch,), {})
    assert all(map(torch.equal, before, model.parameters()))


def test_without_timing_the_answer_is_the_same(monkeypatch):
    monkeypatch.setattr(steps, "STEP_SECONDS", 0.01)
    options = {"loss_fn": cross_entropy, "multiple_of": 16, "points": 1, "targets": (labels(8),)}
    usual = largest_batch(mlp(), torch.randn(8, 32), 60_000, **options)
    quick = largest_batch(mlp(), torch.randn(8, 32), 60_000, timed=False, **options)
    assert quick.largest.batch == usual.largest.batch
    assert quick.largest.measured_bytes <= 60_000 < quick.refused.least_bytes
    assert quick.largest.seconds > 0

    # Rough times of operations are not for later plans.
    kept = []
    monkeypatch.setattr("rotor.common.cache.store", lambda *row: kept.append(row))
    monkeypatch.setattr("rotor.common.cache.load", lambda *_: {})
    sample = {"x": torch.randn(8, 16)}
    quick = largest_batch(Gated(), sample, 80_000, timed=False, max_batch=16, **options)
    assert quick.engine == "graph"
    assert quick.largest.batch == 16
    assert not kept


def test_one_run_is_all_without_timing():
    calls = []
    with timing.single_runs():
        timing.measure_ns(lambda: calls.append(1), "cpu")
    assert len(calls) == 1
    timing.measure_ns(lambda: calls.append(1), "cpu")
    assert len(calls) > 5


def test_where_a_measured_peak_is_over_the_next_size_down_is_taken(limit, monkeypatch):
    true_peak = search.step_bytes
    calls = []

    def peak(step, device):
        calls.append(1)
        return limit + 1 if len(calls) == 1 else true_peak(step, device)

    monkeypatch.setattr(search, "step_bytes", peak)
    model = mlp(4)
    got = largest_batch(model, torch.randn(4, 32), limit, multiple_of=32, points=1)
    assert got.refused is not None
    assert got.refused.measured_bytes == limit + 1
    assert got.largest.measured_bytes <= limit


def test_nothing_is_run_for_a_machine_that_is_not_here(monkeypatch):
    monkeypatch.setattr(search, "step_bytes", None)
    monkeypatch.setattr(search, "seconds_of", None)
    model, limit = Gated(), 60_000

    def planned(size):
        chk = rotor.Checkpointable(model, mem_limit=limit, profile=CARD, loss_fn=cross_entropy)
        chk.measure(torch.randn(size, 16), targets=(labels(size),))
        return chk

    got = largest_batch(
        model, torch.randn(8, 16), limit, loss_fn=cross_entropy, targets=(labels(8),), profile=CARD
    )
    assert got.device == "card"
    assert (got.largest.measured_bytes, got.plain.measured_bytes) == (None, None)
    assert got.largest.predicted_bytes <= limit < got.refused.least_bytes
    chk = planned(got.largest.batch)
    assert chk.plan_step(limit, effort="fast").predicted_bytes == got.largest.predicted_bytes
    for size, fits in ((got.plain.batch, True), (got.plain.batch + 1, False)):
        graph = planned(size).cost_model()
        step = simulate(graph, range(len(graph)))
        assert (step.peak_bytes <= limit) is fits
        if fits:
            assert step.peak_bytes == got.plain.predicted_bytes
            assert step.time_ns == got.plain.seconds * 1e9
    assert got.plain.batch < got.largest.batch
    assert not any(p.grad is not None for p in model.parameters())


def test_out_of_memory_is_a_size_that_does_not_fit(monkeypatch):
    planned = search._Search._planned

    def fails(self, size):
        if size * self.unit > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return planned(self, size)

    monkeypatch.setattr(search._Search, "_planned", fails)
    got = largest_batch(mlp(2), torch.randn(4, 32), "10 MB", multiple_of=8, points=1)
    assert got.largest.batch == 24
    assert got.refused.least_bytes is None
    assert "batch 32 does not fit" in str(got)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": 3}, TypeError, "must be an nn.Module, got int"),
        ({"model": rotor.Checkpointable(nn.Linear(2, 2))}, TypeError, "wrapped already"),
        ({"multiple_of": 0}, ValueError, "multiple_of = 0"),
        ({"points": True}, ValueError, "points = True"),
        ({"profile": "there.json"}, ValueError, "names no file"),
        ({"profile": CARD, "mem_limit": None}, ValueError, "does not say what is free"),
        ({"profile": CARD, "total_limit": "1 MB"}, ValueError, "a total is of this machine"),
        ({"profile": CARD, "engine": "dynamic"}, ValueError, "profile"),
        ({"max_batch": 4, "multiple_of": 8}, ValueError, "below multiple_of"),
        ({"mem_limit": "900 TB"}, ValueError, "free: the answer is verified by a run"),
        ({"mem_limit": "1 XB"}, ValueError, "cannot be read"),
        ({"sample": "text"}, ValueError, "holds no tensor with a first dimension"),
        ({"sample": torch.tensor(1.0)}, ValueError, "holds no tensor with a first dimension"),
        ({"targets": (labels(4),)}, ValueError, "targets are for a loss"),
        ({"sample": lambda size: torch.randn(size, 32)}, TypeError, "gave Tensor, expected"),
        ({"sample": lambda size: ((), {}, ())}, ValueError, "holds no tensor"),
        ({"sample": lambda size: ((), {}, ()), "targets": (1,)}, ValueError, "leave targets="),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_wrong_arguments(changes, error, words):
    arguments = {"model": mlp(1), "sample": torch.randn(4, 32), "mem_limit": "1 MB"} | changes
    model, sample = arguments.pop("model"), arguments.pop("sample")
    with pytest.raises(error, match=words):
        largest_batch(model, sample, **arguments)


def test_losses_of_outputs():
    x = torch.ones(2, requires_grad=True)
    assert batches.sum_of(x) == 2
    assert batches.sum_of({"loss": 3 * x.sum(), "logits": x}) == 6
    assert batches.sum_of([x, (x, None), torch.ones(5)]) == 4
    with pytest.raises(ValueError, match="no tensor that needs a gradient"):
        batches.sum_of([torch.ones(3)])


def test_batches_repeat_rows_and_leave_the_rest():
    sample = (torch.arange(6).reshape(3, 2), torch.ones(7), 5)
    of_size = batches.batches_of(Gated(), sample, (), False, "auto")
    (rows, other, number), kwargs, targets = of_size(5)
    assert rows[:, 0].tolist() == [0, 2, 4, 0, 2]
    assert other is sample[1]
    assert (number, kwargs, targets) == (5, {}, ())


def test_throughput():
    assert BatchFit(10, 1, 1, 0.5).samples_per_second == 20


def test_the_examples_of_the_docstrings():
    results = doctest.testmod(search)
    assert (results.failed, results.attempted > 2) == (0, True)


def test_without_a_limit_the_processes_of_a_machine_share_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(allocator, "free_bytes", lambda _: 1_000_000)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    try:
        shared = largest_batch(mlp(2), torch.randn(4, 32), max_batch=4, points=1, timed=False)
    finally:
        distributed.destroy_process_group()
    alone = largest_batch(mlp(2), torch.randn(4, 32), max_batch=4, points=1, timed=False)
    adam = 2 * sum(parameter.nbytes for parameter in mlp(2).parameters())
    limits = (225_000 - adam, 900_000 - adam)
    assert (shared.limit_bytes, alone.limit_bytes) == limits
