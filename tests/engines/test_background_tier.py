"""Plans with a second tier that get better while training runs, and that shapes share."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from background_models import Mixed, plain_losses, rows, stepped, train
from capture.test_shapes import Gpt, alike, gpt_batch, gpt_loss, plain_peak, step
from joint_programs import MemoryTier
from tiers.test_tier_plans import with_link

import rotor
from rotor.engines.graph import captured_step, improving
from rotor.engines.graph.captured_step import CapturedStep
from rotor.graph import planner
from rotor.meter import allocator as memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:this step's memory was not measured"),
    # The need of a loss outside is not known in the first step of a shape.
    pytest.mark.filterwarnings("ignore:the limit of .* in a first step"),
]

SPEED = 2e9


@pytest.fixture(scope="module")
def peak() -> int:
    chk = rotor.Checkpointable(Mixed(), rows(), "1 GB", engine="graph", verbosity=0)
    return chk.plan.predicted_bytes


@pytest.fixture
def disk(tmp_path):
    tier = rotor.DiskTier(tmp_path)
    tier.least_bytes = 1024
    yield tier
    tier.close()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Efforts and links of the searches."""
    found: list[tuple[Any, Any]] = []
    original = planner.plan

    def counted(graph: Any, budget: int, **options: Any) -> Any:
        found.append((options.get("effort", "default"), options.get("link")))
        return original(graph, budget, **options)

    monkeypatch.setattr(planner, "plan", counted)
    return found


def wrapped(limit: int, tier: Any, speed: float = SPEED, **options: Any) -> rotor.Checkpointable:
    torch.manual_seed(0)
    options.setdefault("effort", 1)
    chk = rotor.Checkpointable(
        Mixed(), mem_limit=limit, engine="graph", verbosity=0, offload=tier, **options
    )
    return with_link(chk, speed)


def test_the_first_step_waits_for_no_long_search(peak, disk, searches):
    # With a tier so slow, the quick plan leaves something to look for.
    chk = wrapped(int(0.6 * peak), disk, 1e7, effort="default")
    executor = stepped(chk)
    assert train(chk, rows(), 1) == plain_losses(1)
    assert searches
    assert {effort for effort, _ in searches} <= {"fast", 0}
    assert all(link is not None for _, link in searches)
    assert "estimated, a better one is looked for" in chk.report()
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes
    assert not executor.jobs


def test_programs_with_actions_are_exchanged_between_steps(peak, disk, monkeypatch):
    """The first program recomputes alone; the tier comes into use between steps."""

    def alone(options, _):
        return {**options, "effort": 0, "link": None}

    monkeypatch.setattr(improving, "quick_options", alone)
    limit = int(0.55 * peak)
    chk = wrapped(limit, disk, 1e12)
    chk.offload.learned = 3  # This disk's speed is not learnt.
    executor = stepped(chk)
    losses, programs, peaks, layouts = [], [], [], []
    for number in range(40):
        losses += train(chk, rows(), 1, begin=number)
        programs.append(chk.program.actions.tobytes())
        peaks.append(chk.plan.measured_bytes)
        layouts.append(chk.plan.layout)
        if number % 3 == 2:
            executor.run()
    assert losses == plain_losses(40)
    assert len(set(programs)) >= 2
    assert layouts[0] is None
    assert len(chk.program.actions) > len(chk.program.ops)
    assert max(peaks) <= limit
    assert chk.plan.planning.improved >= 1
    assert chk.plan.planning.is_final
    # The steps of a new plan use its own places.
    assert chk.plan.layout.waits.steps > 0
    assert len({id(one) for one in layouts}) > 1


def test_the_last_program_is_as_good_as_one_planned_before(peak):
    limit = int(0.55 * peak)
    chk = wrapped(limit, Tier(), 1e12)
    stepped(chk)
    train(chk, rows(), 2)
    assert chk.wait_for_planning()
    train(chk, rows(), 1, begin=2)
    before = wrapped(limit, Tier(), 1e12, planning="before")
    train(before, rows(), 2)
    assert chk.plan.planning.is_final
    assert chk.plan.program.slowdown <= before.plan.program.slowdown * 1.02


def test_programs_found_later_have_places_within_the_limit_of_the_tier(peak):
    limit = int(0.55 * peak)
    free = wrapped(limit, Tier(), 1e12, planning="before")
    train(free, rows(), 1)
    room = int(0.6 * free.plan.layout.nbytes)
    chk = wrapped(limit, Tier(), 1e12, offload_limit=room)
    stepped(chk)
    sizes = []
    losses = []
    for number in range(6):
        losses += train(chk, rows(), 1, begin=number)
        sizes.append(0 if chk.plan.layout is None else chk.plan.layout.nbytes)
        chk.wait_for_planning()
    assert losses == plain_losses(6)
    assert 0 < max(sizes) <= room


def test_the_next_run_begins_with_the_program_of_the_last(peak, searches):
    limit = int(0.55 * peak)
    first = wrapped(limit, Tier())
    stepped(first)
    train(first, rows(), 2)
    first.wait_for_planning()
    train(first, rows(), 1, begin=2)
    assert len(first.program.actions) > len(first.program.ops)
    searches.clear()
    again = wrapped(limit, Tier())
    stepped(again)
    train(again, rows(), 2)
    assert again.plan.planning.origin == "kept on disk"
    assert (again.program.actions == first.program.actions).all()
    assert again.plan.planning.is_final
    assert not searches
    # A model without a tier does not take it.
    torch.manual_seed(0)
    without = rotor.Checkpointable(Mixed(), mem_limit=limit, engine="graph", verbosity=0)
    train(without, rows(), 1)
    assert len(without.program.actions) == len(without.program.ops)


class Tier(MemoryTier):
    least_bytes = 1


LENGTHS = (30, 50, 90, 60, 40, 90, 50, 64, 70)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_shapes_share_a_capture_and_programs_with_actions(place, disk, searches):
    """Each length keeps the limit and has the gradients of plain PyTorch, bit for bit."""
    torch.manual_seed(0)
    model = Gpt()
    limit = int(0.5 * plain_peak(model, gpt_batch(4, 90), gpt_loss))
    tier = disk if place == "disk" else Tier()
    chk = rotor.Checkpointable(
        copy.deepcopy(model), mem_limit=limit, engine="graph", verbosity=0, offload=tier
    )
    with_link(chk, 1e12)
    stepped(chk)
    moved = set()
    for number, length in enumerate(LENGTHS * 2):
        batch = gpt_batch(4, length)
        expected = step(model, batch, gpt_loss)
        if number < len(LENGTHS):
            found = step(chk, batch, gpt_loss)
        else:
            with memory.meter("cpu") as meter:
                found = step(chk, batch, gpt_loss)
            assert meter.peak_bytes <= limit, length
        assert alike(found, expected), length
        plan = chk.graph_plan()
        assert plan.predicted_bytes <= limit
        if len(plan.program.actions) > len(plan.program.ops):
            moved.add(length)
    assert all(plan.step.shares_shapes for plan in chk.plans.values())
    assert len({id(plan.step.operations) for plan in chk.plans.values()}) == 1
    assert {90, 70, 64} <= moved
    # Some shapes take programs that others have left.
    assert len(searches) < 2 * len(set(LENGTHS))
    assert len({plan.layout.nbytes for plan in chk.plans.values() if plan.layout}) > 1


def test_a_better_program_with_actions_serves_other_shapes(monkeypatch):
    """The background search at the largest shape leaves a program that others take."""

    def plan(graph: Any, budget: int, **_: Any) -> Any:
        return planner.plan(graph, budget, effort=0)

    monkeypatch.setattr(captured_step, "planner", SimpleNamespace(plan=plan))
    torch.manual_seed(0)
    model = Gpt()
    limit = int(0.5 * plain_peak(model, gpt_batch(4, 90), gpt_loss))
    chk = rotor.Checkpointable(
        copy.deepcopy(model), mem_limit=limit, engine="graph", verbosity=0, offload=Tier(), effort=1
    )
    with_link(chk, 1e12)
    executor = stepped(chk)
    slowdowns: dict[int, list[float]] = {}
    for length in LENGTHS * 3:
        batch = gpt_batch(4, length)
        assert alike(step(chk, batch, gpt_loss), step(model, batch, gpt_loss)), length
        plan = chk.graph_plan()
        assert plan.predicted_bytes <= limit
        slowdowns.setdefault(length, []).append(plan.program.slowdown)
        executor.run()
    assert slowdowns[90][-1] < slowdowns[90][0]
    assert len(chk.plans) > 2
    assert any(
        len(plan.program.actions) > len(plan.program.ops) and plan.planning.improved
        for plan in chk.plans.values()
    )


def test_code_is_shared_and_places_are_not():
    """Two shapes that run one program have areas of their own sizes."""
    torch.manual_seed(0)
    model = Gpt()
    limit = int(0.5 * plain_peak(model, gpt_batch(4, 90), gpt_loss))
    chk = rotor.Checkpointable(
        copy.deepcopy(model), mem_limit=limit, engine="graph", verbosity=0, offload=Tier(),
        planning="before",
    )  # fmt: skip
    with_link(chk, 1e12)
    pairs = []
    for length in (30, 90, 88):
        step(chk, gpt_batch(4, length), gpt_loss)
        pairs.append(chk.graph_plan())
    large, near = pairs[1:]
    assert isinstance(large.step, CapturedStep)
    assert (large.program.actions == near.program.actions).all()
    assert large.emitted is near.emitted
    assert large.layout.nbytes > near.layout.nbytes
    # Another step of the larger shape, whose forward comes before the backward of the smaller.
    batches = [gpt_batch(4, 90), gpt_batch(4, 88)]
    chk.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    with pytest.warns(rotor.MemoryLimitWarning, match="a forward began"):
        losses = [gpt_loss(chk(**batch), batch) for batch in batches]
    for loss in losses:
        loss.backward()
    for batch in batches:
        gpt_loss(model(**batch), batch).backward()
    for ours, plain in zip(chk.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


def test_waits_are_learnt_where_the_tier_has_less_room(peak):
    """A link with less room than the tier's limit is the same link."""
    chk = wrapped(int(0.55 * peak), Slow(), 1e12, offload_limit="100 KB", planning="before")
    train(chk, rows(), 3)
    chk.plan.program.link = replace(chk.plan.program.link, host_bytes=99_000)
    assert chk.plan.layout is not None
    train(chk, rows(), 3)
    assert chk.offload.learned >= 1


class Slow(Tier):
    """Tier that is far slower than plans count on, by its own figures."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = rotor.tier.Traffic()

    def write(self, area, offset, source):
        self.traffic.add(len(source), 20 * len(source), is_write=True)
        return super().write(area, offset, source)

    def read(self, area, offset, target):
        self.traffic.add(len(target), 20 * len(target), is_write=False)
        return super().read(area, offset, target)

    def wait(self, ticket):
        time.sleep(0.002)
        super().wait(ticket)
