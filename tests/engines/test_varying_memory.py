"""Memory that depends on data: every step is watched, an excess is told, and the plan learns it."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from rotor.models.gpt import gpt as build_gpt
from torch import nn
from training import gradients_of, same
from zoo.models import Branching, Residual, Row

import rotor
from rotor import memory
from rotor._pytorch import devices
from rotor.algorithms import RecomputeAll
from rotor.common import accounting
from rotor.engines.chain import engine, growth
from rotor.engines.chain.stages import find_stages
from rotor.engines.parts.plan import PartsPlan
from rotor.inspection import measure
from rotor.meter import watch as watching

WIDTH, INNER, ROWS = 64, 256, 1024
FEW, MANY = 64, 800
NOT_CAPTURED = "ignore:no single graph of the model"


class Selected(nn.Module):
    """Works on the rows whose first column is positive."""

    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(WIDTH, INNER)
        self.fall = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.fall(torch.tanh(self.rise(x[rows]))))


class Between(nn.Module):
    """Two parts that are captured, and eager code between them that works on selected rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Residual(WIDTH, 2 * WIDTH), Residual(WIDTH, 2 * WIDTH)
        self.rise = nn.Parameter(torch.randn(WIDTH, 4 * INNER) * 0.01)
        self.fall = nn.Parameter(torch.randn(4 * INNER, WIDTH) * 0.01)

    def forward(self, x):
        rows = torch.tensor([k for k, value in enumerate(x[:, 0].tolist()) if value > 0])
        x = self.first(x)
        return self.last(x.index_add(0, rows, torch.tanh(x[rows] @ self.rise) @ self.fall))


def chain():
    """The first column passes through it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Selected(), nn.Linear(WIDTH, WIDTH), Selected())
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.copy_(torch.eye(WIDTH))
            layer.bias.zero_()
    return model


def batch(selected):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(selected))
    x[:, 0] = -1e6
    x[:selected, 0] = 1e6
    return x


def step(model, selected):
    model.zero_grad()
    model(batch(selected)).mul(1e-9).sum().backward()


def peak_of(model, selected):
    with memory.meter("cpu") as meter:
        step(model, selected)
    return meter.peak_bytes


def told_bytes(caught):
    """The bytes that warnings of an excess named."""
    found = [re.search(r"a step needed .*?\((\d+) bytes\)", str(w.message)) for w in caught]
    return [int(match.group(1)) for match in found if match]


def trained(model, limit, **options):
    """A wrapped model after the steps that are metered anyway."""
    chk = rotor.Checkpointable(model, mem_limit=limit, **options)
    for _ in range(4):
        step(chk, FEW)
    return chk


def limit_between(model):
    """A limit that a batch with few rows keeps without a plan, and one with many does not."""
    few, many = peak_of(model, FEW), peak_of(model, MANY)
    assert many > 1.5 * few
    return (few + 4 * many) // 5


class Caches(nn.Module):
    """Keeps bytes that no tensor holds, as a kernel does that prepares itself once."""

    def __init__(self):
        super().__init__()
        self.sizes, self.caches = [0] * 100, []

    def forward(self, x):
        self.caches.append(bytes(self.sizes[0]))
        return torch.tanh(x)


def test_bytes_that_no_tensor_holds_are_metered_and_not_taken_for_growth():
    model = chain()
    model.insert(2, caches := Caches())
    chk = trained(model, limit_between(chain()))
    steps = chk.plan.meterings
    caches.sizes[0] = 4 << 20
    step(chk, FEW)
    caches.sizes[0] = 0
    assert chk.plan.differs
    step(chk, FEW)
    assert not chk.plan.differs
    assert chk.plan.most_bytes_seen <= chk.plan.limit_bytes
    assert chk.plan.meterings == steps


def test_a_chain_learns_what_its_stages_keep_of_another_batch():
    plain = chain()
    limit = limit_between(plain)
    chk = trained(chain(), limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(chk, MANY)
        step(chk, FEW)
    (told,) = told_bytes(caught)
    needed = peak_of(plain, MANY)
    assert limit < needed <= told <= 1.25 * needed
    assert "by 1, 3" in str(caught[0].message)
    # The plan knows now: the same batch is within the limit, and nothing more is said.
    assert peak_of(chk, MANY) <= limit
    assert chk.get_expected_memory() <= limit
    assert "peaks seen" in chk.report()
    step(plain, MANY)
    step(chk, MANY)
    assert same(gradients_of(chk), gradients_of(plain))


def test_a_stage_that_is_recomputed_is_seen_in_the_backward():
    model = chain()
    chk = rotor.Checkpointable(model, batch(FEW))
    chk.compute_sequence("100MB", algo=RecomputeAll())
    for _ in range(3):
        step(chk, FEW)
    plan = chk.plan
    assert "Fn_1" in str(plan.sequence)
    plan.limit_bytes = plan.measured_bytes
    with pytest.warns(rotor.MemoryLimitWarning, match="was needed by .*3"):
        step(chk, MANY)


def test_each_new_maximum_is_told_once():
    chk = trained(chain(), limit_between(chain()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for selected in (MANY, MANY, FEW, MANY):
            step(chk, selected)
    assert len(told_bytes(caught)) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chk.plan.limit_bytes = chk.plan.warned_bytes = chk.get_expected_memory()
        for selected in (ROWS, ROWS, MANY, ROWS):
            step(chk, selected)
    assert len(told_bytes(caught)) == 1


def test_batches_alike_change_nothing(monkeypatch):
    watches = []
    look = growth.stage_watch
    monkeypatch.setattr(engine, "stage_watch", lambda *a: watches.append(look(*a)) or watches[-1])
    chk = trained(chain(), limit_between(chain()))
    plan = chk.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(chk, FEW)
    assert chk.plan is plan
    assert watches[-1].growth == {}
    copied = pickle.loads(pickle.dumps(copy.deepcopy(chk)))
    step(copied, FEW)


def test_layers_of_pytorch_are_not_watched():
    x = torch.randn(4, WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
    assert growth.StageWatch.of(measure(find_stages(plain), x)) is None
    mixed = measure(find_stages(nn.Sequential(nn.Linear(WIDTH, WIDTH), Selected())), x)
    watched = growth.StageWatch.of(mixed)
    assert watched.stages[0] is mixed.stages[0]
    assert watched.stages[1] is not mixed.stages[1]
    hooked = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    hooked[0].register_forward_hook(lambda *_: None)
    assert growth.can_vary(find_stages(hooked)[0])


@pytest.mark.filterwarnings(NOT_CAPTURED)
def test_parts_learn_what_the_code_between_them_keeps():
    torch.manual_seed(0)
    plain = Between()
    limit = limit_between(plain)
    chk = trained(copy.deepcopy(plain), limit, effort="fast")
    assert isinstance(chk.plan, PartsPlan)
    assert chk.plan.choice == [0, 0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(chk, MANY)
        step(chk, FEW)
    told = told_bytes(caught)
    needed = peak_of(plain, MANY)
    assert 0.9 * needed <= told[0] <= 1.25 * needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step(chk, MANY)
    # The least that the parts can do beside what the code between them needs.
    assert chk.plan.predicted_bytes >= 0.9 * needed
    assert peak_of(chk, MANY) <= needed
    assert "peaks seen" in chk.report()
    step(plain, MANY)
    step(chk, MANY)
    assert same(gradients_of(chk), gradients_of(plain))


class Routed(nn.Module):
    """Parts that are called with other numbers of rows in each step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Residual(WIDTH, 2 * WIDTH), Residual(WIDTH, 2 * WIDTH)

    def forward(self, x):
        rows = torch.tensor([k for k, value in enumerate(x[:, 0].tolist()) if value > 0])
        x = x.index_add(0, rows, self.first(x[rows]))
        return x.index_add(0, rows, self.last(x[rows])).square()


def test_excesses_are_told_while_parts_are_looked_for_and_that_ends():
    torch.manual_seed(0)
    plain = Routed()
    limit = int(peak_of(plain, 500) * 0.9)
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=limit, effort="fast")
    told, searches = [], []
    for selected in (500, 540, 580, 560, 520, 600):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(chk, selected)
        told.append(
            bool(told_bytes(caught)) or any("was not kept" in str(w.message) for w in caught)
        )
        searches.append(getattr(getattr(chk.plan, "parts", None), "searches", 0))
    assert told[1]
    assert 1 <= max(searches) <= 2


def test_a_graph_is_metered_now_and_then(monkeypatch):
    """A loss outside it may depend on data, though the graph does not."""
    monkeypatch.setattr(accounting, "METERED_EARLY", (3,))
    torch.manual_seed(0)
    chk = rotor.Checkpointable(
        Residual(WIDTH, 2 * WIDTH), mem_limit="8MB", engine="graph", effort="fast"
    )
    x = torch.randn(ROWS, WIDTH)

    def run(copies):
        y = chk(x)
        sum((y * k).tanh().sum() for k in range(1, copies + 1)).backward()

    while chk.plan is None or chk.plan.outdated or chk.plan.measured_bytes is None:
        run(1)
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            run(40)
    assert told_bytes(caught)
    assert told_bytes(caught)[0] > 40 * x.nbytes
    assert chk.plan.most_bytes_seen == max(told_bytes(caught))


def test_watching_stops_for_a_meter_of_the_callers(monkeypatch):
    monkeypatch.setattr(accounting, "METERED_EARLY", (1, 2, 3))
    chk = trained(chain(), "100MB")
    with warnings.catch_warnings(), memory.meter("cpu"):
        warnings.simplefilter("error")
        step(chk, FEW)


def test_the_peak_of_cuda_is_read_without_setting_it_back(monkeypatch):
    counters = iter([(100, 500), (120, 500), (100, 500), (110, 900), (100, 900), (100, 5000)])
    monkeypatch.setattr(devices, "counters", lambda _: next(counters))
    seen = []

    class Engine:
        def learn_peak(self, plan, peak_bytes):
            seen.append((plan.device, peak_bytes))

    class Plan:
        device = "cuda:0"
        reserving = None

    engine = Engine()
    for _ in range(3):
        watch = watching.PeakWatch(engine, Plan())
        y = torch.ones(2, requires_grad=True) * 2
        watch.forward_done(y)
        y.sum().backward()
    # The first step stayed below an older peak.
    assert seen == [("cuda:0", 800), ("cuda:0", 4900)]


def test_the_peak_of_cuda_is_read_after_the_last_backward_of_a_step(monkeypatch):
    counters = iter([(100, 500), (120, 900)])
    monkeypatch.setattr(devices, "counters", lambda _: next(counters))

    class Engine:
        context = SimpleNamespace(rerun_bytes=0)

    class Plan:
        device, reserving, limit_bytes = "cuda:0", None, 700
        meterings = 0

    engine = Engine()
    watch = watching.PeakWatch(engine, Plan())
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    watch.forward_done(y)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.warns(rotor.MemoryLimitWarning, match="differentiated.* 800 bytes, .* 700 bytes"):
        slope.sum().backward()
    assert engine.context.rerun_bytes == 800


@pytest.mark.filterwarnings(NOT_CAPTURED)
def test_code_of_parts_and_objects_of_autograd_are_no_growth():
    torch.manual_seed(0)
    layers = build_gpt(
        "gpt2", layers=6, width=32, heads=2, vocab_size=64, context_length=16, dropout=0.0
    )
    model, tokens = Branching(Row(*layers)), torch.randint(64, (2, 16))
    options = {"engine": "auto", "effort": "fast", "verbosity": -1}
    chk = rotor.Checkpointable(model, mem_limit="1GiB", **options)
    chk(tokens).square().sum().backward()
    chk = rotor.Checkpointable(model, mem_limit=chk.plan.unlimited_bytes * 3 // 4, **options)
    metered = []
    for _ in range(10):
        chk(tokens).square().sum().backward()
        assert isinstance(chk.plan, PartsPlan)
        assert chk.plan.measured_bytes == chk.plan.predicted_bytes <= chk.plan.limit_bytes
        assert chk.plan.reserve_bytes == 0
        metered.append(chk.plan.unmetered)
    assert metered[-4:] == list(range(metered[-4], metered[-4] + 4)), metered


def test_steps_that_are_due(monkeypatch):
    monkeypatch.setattr(accounting, "METERED_EVERY", 100)
    plan = trained(chain(), "100MB").plan
    plan.unmetered = 0
    due = [k for k in range(1, 301) if watching.is_due(plan)]
    assert due == [16, 64, 100, 200, 300]
    plan.differs = True
    assert watching.is_due(plan)
    assert not watching.is_due(plan)
