"""Models in parts whose programs offload: bit-equal, as large as predicted, in one area a step."""

from __future__ import annotations

import copy
import errno
import gc
import json
import re

import pytest
import torch
from limited_models import UNLIMITED
from torch import nn
from training import same
from unrepeatable import Stack, sample
from unrepeatable import step as seeded_step

import rotor
from rotor.engines.parts.plan import PartsPlan, fastest
from rotor.errors import InfeasibleError
from rotor.graph.assembly import choose, least_bytes, simulate
from rotor.graph.link import Link
from rotor.units import format_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:no single graph"),
    pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step"),
]
WIDTH, ROWS, SECTOR, NO_MORE = 64, 256, 512, 1 << 30
FAST = Link(1e12, 1e12, padding_bytes=SECTOR)
PLACES = [f"rotor.engines.parts.{module}.choose_within" for module in ("engine", "plan")]


class Part(nn.Module):
    """Dropout, BatchNorm, a multi-output operation, an in-place one, views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu_()
        y = nn.functional.dropout(y, 0.2)
        a, b = y.chunk(2, dim=1)
        top = torch.topk(y, 3, dim=1).values.sum(1, keepdim=True)
        return x + self.last(torch.cat([b, a.sigmoid()], 1) + top)


class InParts(nn.Module):
    """Parts between which Python decides by a value."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(count))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            assert x.sum().item() < 1e30
        return self.last(x)


@pytest.fixture(scope="module", autouse=True)
def _no_compiled_code_stays():
    yield
    torch._dynamo.reset()


def step(model: nn.Module, call, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def trained(model: nn.Module, call, x: torch.Tensor, steps: int = 4) -> list[torch.Tensor]:
    found = [tensor for k in range(steps) for tensor in step(model, call, x, k)]
    return [*found, *(b.clone() for b in model.buffers())]


def offloading(model: nn.Module, tier, x: torch.Tensor, link: Link = FAST, **settings):
    """A wrapped model whose link is given, not corrected by steps, after a metered step."""
    chk = rotor.Checkpointable(model, mem_limit=UNLIMITED, offload=tier, verbosity=0, **settings)
    chk.offload.link, chk.offload.learned = link, NO_MORE
    chk.measure(x)
    step(model, chk, x)
    return chk


def measured(disk):
    """A model in parts that was measured once, and its input."""
    model, x = InParts(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return offloading(model, disk, x), x


wrapped = pytest.fixture(measured, scope="module", name="wrapped")
odd = pytest.fixture(measured, scope="module", name="odd")  # For steps of other needs: it learns.


def in_the_beginning(chk, x):
    """A measured model, as it was in the beginning; a plain one; their input."""
    plain = InParts()
    chk.module.load_state_dict(plain.state_dict())
    chk.module.zero_grad()
    return chk, plain, x


@pytest.fixture
def ready(wrapped):
    return in_the_beginning(*wrapped)


def alone(plan) -> list:
    """The options of a plan's parts without the tier."""
    return [[o for o in site if not o.tier_bytes] for site in plan.parts.options()]


def squeeze(chk, share: float) -> None:
    """A limit between what recomputation alone can keep, and what no recomputation needs."""
    options, bases = alone(chk.plan), chk.plan.parts.bases
    least = least_bytes(options, bases)
    most = simulate(options, bases, fastest(options)).peak_bytes
    chk.compute_sequence(mem_limit=int(least + share * (most - least)))


@pytest.mark.parametrize("seed", range(6))
def test_any_programs_are_equal_and_as_large_as_predicted(seed, ready, disk, monkeypatch):
    chk, plain, x = ready
    draw = torch.Generator().manual_seed(seed)

    def any_choice(options, *_):
        found = [int(torch.randint(len(o), (), generator=draw)) for o in options]
        return [max(range(len(options[0])), key=lambda k: options[0][k].tier_bytes), *found[1:]]

    for place in PLACES:
        monkeypatch.setattr(place, any_choice)
    chk.compute_sequence(mem_limit=UNLIMITED)
    plan, predicted = chk.plan, chk.plan.predicted_bytes
    begun = disk.traffic.copy()
    assert same(step(chk.module, chk, x), step(plain, plain, x))
    assert same(list(chk.module.buffers()), list(plain.buffers()))
    assert chk.plan is plan
    moved = disk.traffic.since(begun)
    assert moved.written_bytes == plan.tier.offloaded_bytes > 0
    assert moved.read_bytes == plan.tier.fetched_bytes > 0
    assert 0.98 * predicted <= plan.measured_bytes <= predicted
    assert disk.reserved_bytes >= plan.tier.whole.nbytes


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_a_tier_is_faster_than_recomputing(share, ready):
    chk, plain, x = ready
    squeeze(chk, share)
    plan = chk.plan
    room = plan.limit_bytes - plan.reserve_bytes
    options, bases = alone(plan), plan.parts.bases
    recomputing = simulate(options, bases, choose(options, bases, room))
    assert plan.makespan < recomputing.time_ns / 1e9
    assert same(trained(chk.module, chk, x), trained(plain, plain, x))
    assert isinstance(chk.plan, PartsPlan)
    assert chk.plan.tier.offloaded_bytes > 0
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes


def test_what_is_made_once_need_not_stay(disk):
    """Without a tier no plan has these limits: results of an operator that never repeats."""
    model, twin = Stack("own_generator", parts=True), Stack("own_generator", parts=True)
    x = sample(1024)
    with pytest.warns(UserWarning, match="own_generator"):
        chk = offloading(model, disk, x)
    options, bases = alone(chk.plan), chk.plan.parts.bases
    limit = least_bytes(options, bases) - 2 * x.nbytes
    chk.compute_sequence(mem_limit=limit)
    for _ in range(2):
        assert same(seeded_step(chk, x), seeded_step(twin, x))
    assert chk.plan.measured_bytes <= limit
    with pytest.raises(InfeasibleError):
        choose(options, bases, limit)


def test_places_of_all_parts_are_limited_together(ready):
    chk, plain, x = ready
    squeeze(chk, 0.1)
    free = chk.plan
    offload = chk.offload
    try:
        offload.limit_bytes = free.tier.whole.nbytes // 2
        squeeze(chk, 0.1)
        assert 0 < chk.plan.tier.whole.nbytes <= offload.limit_bytes
        assert chk.plan.makespan > free.makespan
        assert same(trained(chk.module, chk, x), trained(plain, plain, x))
        assert chk.plan.measured_bytes <= chk.plan.limit_bytes
        assert chk.plan.tier.whole.nbytes <= offload.limit_bytes
        offload.limit_bytes = 0
        squeeze(chk, 0.1)
        assert chk.plan.tier.whole is None
        assert "nothing: keeping and recomputing is faster" in chk.report()
    finally:
        offload.limit_bytes = None


@pytest.fixture
def ran(ready):
    """The model after steps that offload."""
    chk, _, x = ready
    squeeze(chk, 0.1)
    trained(chk.module, chk, x)
    assert chk.plan.tier.offloaded_bytes > 0
    return chk


def test_reports_count_all_parts(ran, tmp_path):
    tier, text = ran.plan.tier, ran.report()
    assert re.search(rf"written in a step +{format_bytes(tier.offloaded_bytes)}\n", text)
    assert re.search(rf"fetched in a step +{format_bytes(tier.fetched_bytes)}\n", text)
    assert re.search(rf"most on the tier +{format_bytes(tier.whole.nbytes)}\n", text)
    assert "disks wear out" in text
    assert "not yet" not in text.split("waits for the tier, measured")[1].splitlines()[0]
    rows = [tier.moved_bytes(k) for k in range(len(ran.plan.choice))]
    assert sum(written for written, _ in rows) == tier.offloaded_bytes
    assert re.search(r"slower +written +fetched", ran.display())
    page = tmp_path / "plan.html"
    ran.report(page)
    assert "waits for the tier, predicted" in page.read_text()


def test_traces_have_tracks_of_all_parts(ran, tmp_path):
    tier, trace = ran.plan.tier, tmp_path / "plan.json"
    ran.report(trace)
    data = json.loads(trace.read_text())
    events = data["traceEvents"]
    moved = {kind: [e for e in events if e.get("cat") == kind] for kind in ("written", "fetched")}
    assert sum(e["args"]["bytes"] for e in moved["written"]) == tier.offloaded_bytes
    assert sum(e["args"]["bytes"] for e in moved["fetched"]) == tier.fetched_bytes
    assert max(e["ts"] for e in moved["written"]) < max(e["ts"] for e in moved["fetched"])
    waited = sum(e["dur"] for e in events if e.get("cat") == "waited")
    assert waited == pytest.approx(1e6 * tier.waited, rel=0.01, abs=0.01)
    assert data["otherData"]["written_bytes"] == tier.offloaded_bytes
    assert data["otherData"]["waited_measured_ns"] > 0


# -- steps that are kept, dropped, interrupted, or fail


class Watch:
    """Areas of a tier in use, transfers in flight, and the kind of transfers that fail."""

    def __init__(self, tier, monkeypatch) -> None:
        self.areas: list[object] = []
        self.moving = 0
        self.failing = ""
        allocate, begin, wait, release = tier.allocate, tier.write, tier.wait, tier.release

        def allocated(nbytes):
            self.areas.append(allocate(nbytes))
            return self.areas[-1]

        def released(area):
            self.areas = [other for other in self.areas if other is not area]
            release(area)

        def written(*given):
            self.moving += 1
            return begin(*given)

        def waited(ticket):
            wait(ticket)
            kind = "write" if ticket.is_write else "read"
            self.moving -= ticket.is_write
            if kind == self.failing:
                raise OSError(errno.EIO, f"a {kind} failed")

        for name, method in (
            ("allocate", allocated),
            ("release", released),
            ("write", written),
            ("wait", waited),
        ):
            monkeypatch.setattr(tier, name, method)


@pytest.fixture
def watched(odd, disk, monkeypatch):
    """A model under a tight limit, a plain one, their input, and a watch of the tier."""
    chk, plain, x = in_the_beginning(*odd)
    squeeze(chk, 0.1)
    assert chk.plan.tier.whole is not None
    return chk, plain, x, Watch(disk, monkeypatch)


@pytest.mark.filterwarnings("ignore:a forward began while the backward")
def test_two_steps_may_be_pending(watched):
    chk, plain, x, watch = watched
    for model in (chk, plain):
        torch.manual_seed(0)
        model.zero_grad()
        first, second = model(x), model(2 * x)
        if model is chk:
            assert len(watch.areas) == 2
        second.sum().backward()
        first.sum().backward()
    del first, second
    assert same([p.grad for p in chk.module.parameters()], [p.grad for p in plain.parameters()])
    gc.collect()
    assert watch.areas == []


def test_a_kept_graph_fetches_again(watched):
    chk, plain, x, watch = watched
    for model in (chk, plain):
        torch.manual_seed(0)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    del loss
    assert same([p.grad for p in chk.module.parameters()], [p.grad for p in plain.parameters()])
    gc.collect()
    assert watch.areas == []


def test_a_dropped_step_gives_its_area_back(watched):
    chk, _, x, watch = watched
    y = chk(x)
    assert len(watch.areas) == 1
    del y
    gc.collect()
    assert watch.areas == []
    assert watch.moving == 0


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_failed_transfer_fails_the_step_and_no_other(kind, watched):
    chk, plain, x, watch = watched
    watch.failing = kind
    with pytest.raises(OSError, match=rf"a {kind} failed") as caught:
        step(chk.module, chk, x)
    del caught
    # Errors that are raised again hold the frames of the first time.
    gc.collect()
    gc.collect()
    assert watch.areas == []
    watch.failing = ""
    chk.module.load_state_dict(plain.state_dict())
    assert same(step(chk.module, chk, x), step(plain, plain, x))


def test_a_tier_without_room_is_named_when_the_plan_is_made(ready, monkeypatch):
    chk, _, _ = ready

    def full(nbytes):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(chk.offload.tier, "allocate", full)
    with pytest.raises(OSError, match="no room"):
        squeeze(chk, 0.1)


def test_another_speed_is_learned(ready):
    """Steps that wait longer than planned for: programs for the real speed are searched for."""
    chk, _, x = ready
    squeeze(chk, 0.1)
    plan, kinds = chk.plan, {site.kind for site in chk.plan.parts.sites}
    before = {kind: [p.actions.tolist() for p in kind.programs] for kind in kinds}
    offload, fast = chk.offload, chk.offload.link
    plan.tier.whole.waits.steps, plan.tier.whole.waits.host_ns = 3, 3 * 10**9
    offload.learned = 0
    try:
        step(chk.module, chk, x)
        assert offload.learned == 1
        assert not chk.plan.tier.is_outdated
        assert offload.link.write_bytes_per_s < fast.write_bytes_per_s / 2
        assert chk.plan is not plan
        for kind in kinds:
            found = [program.actions.tolist() for program in kind.programs]
            assert found[: len(before[kind])] == before[kind]
            assert all(p.link is None or p.link.write_bytes_per_s < 1e12 for p in kind.programs)
    finally:
        offload.link, offload.learned = fast, NO_MORE


def test_a_tier_that_does_not_reach_the_device():
    model, x = InParts(1), torch.randn(ROWS, WIDTH)
    chk = rotor.Checkpointable(model, mem_limit=UNLIMITED, offload="host", verbosity=0)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="does not reach the memory of cpu"):
        chk(x)
    assert same(list(state.values()), list(model.state_dict().values()))
