"""Plans that get better while training runs: first steps, exchanges, threads, failures."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from background_models import Mixed, engine_of, limits, plain_losses, rows, stepped, train, wrapped

import rotor
from rotor import memory
from rotor.common.background import Stopped, ThreadJob
from rotor.engines.contract import Call
from rotor.engines.graph import improving
from rotor.engines.graph.costs import glance as glances
from rotor.engines.graph.costs.repeating import DIFFERS, UNTESTED
from rotor.errors import MemoryLimitWarning


@pytest.fixture(scope="module")
def limit():
    torch.manual_seed(0)
    return limits(Mixed(), rows())


def legacy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.fixture
def poor_start(monkeypatch):
    """A first program for which products are as cheap as anything; they are measured as dear."""
    original = improving.glance

    def distorted(*args, **kwargs):
        costs, rough = original(*args, **kwargs)
        return [replace(cost, ns=1000 if cost.ns else 0) for cost in costs], rough

    monkeypatch.setattr(improving, "glance", distorted)
    monkeypatch.setattr(
        glances, "timed", lambda task, *_: 100_000 if "mm" in str(task.node.target) else 1000
    )


def test_the_first_step_takes_no_measurement_and_no_long_search(limit, monkeypatch):
    timed, efforts = [], []
    original, plan = glances.timed, improving.planner.plan
    monkeypatch.setattr(glances, "timed", lambda *a: timed.append(1) or original(*a))

    def counted(graph, budget, **options):
        efforts.append(options["effort"])
        return plan(graph, budget, **options)

    monkeypatch.setattr(improving.planner, "plan", counted)
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 1)
    assert set(efforts) <= {"fast", 0}
    assert efforts
    assert not timed
    assert chk.plan.measured_bytes <= limit
    assert chk.plan.recomputed
    assert chk.report().count("planning") == 1
    assert "estimated, a better one is looked for" in chk.report()
    searches = len(efforts)
    train(chk, rows(), 1, begin=1)
    # The loss is known now, and the program is the same: nothing is searched.
    assert len(efforts) == searches


def test_programs_are_exchanged_between_steps_and_nothing_else_changes(limit, poor_start):
    chk = wrapped(limit)
    executor = stepped(chk)
    losses, programs, peaks = [], [], []
    for step in range(45):
        losses += train(chk, rows(), 1, begin=step)
        programs.append(chk.program.ops.tobytes())
        peaks.append(chk.plan.measured_bytes)
        if step % 3 == 2:
            executor.run()
    plain = plain_losses(45)
    assert losses[:20] == plain[:20]
    assert losses == plain
    assert len(set(programs)) >= 2
    assert max(peaks) <= limit
    record = chk.plan.planning
    assert record.improved >= 1
    assert record.is_final
    assert "improved" in chk.report()
    assert "final" in chk.report()


@pytest.mark.slow
def test_the_last_program_is_as_good_as_one_planned_before(limit):
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 2)
    assert chk.wait_for_planning()
    train(chk, rows(), 1, begin=2)
    assert chk.plan.planning.is_final
    before = wrapped(limit, planning="before")
    train(before, rows(), 2)
    # Both have the costs that the first one has kept on disk.
    assert chk.plan.makespan <= before.plan.makespan * 1.003


@pytest.mark.slow
def test_waiting_has_an_end(limit, poor_start):
    chk = wrapped(limit)
    assert chk.wait_for_planning()
    stepped(chk)
    train(chk, rows(), 1)
    assert not chk.wait_for_planning(timeout=0)
    assert not chk.plan.planning.is_final
    assert chk.wait_for_planning()
    assert chk.plan.planning.is_final
    assert train(chk, rows(), 3, begin=1) == plain_losses(4)[1:]


def test_measuring_between_steps_leaves_no_trace(limit):
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 2)
    engine, call = engine_of(chk), Call((rows(),))
    (rough,) = engine.improver.rough.values()
    left = rough.refinement.left
    states = [torch.get_rng_state(), random.getstate(), legacy_state()]
    values = [value.clone() for value in chk.module.state_dict().values()]
    with memory.meter("cpu") as meter:
        assert engine.searches.improved(chk.plan, call) is chk.plan
    assert 0 < rough.refinement.left < left
    assert 0 < meter.peak_bytes <= limit
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == [random.getstate(), legacy_state()]
    now = chk.module.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(values, now, strict=True))


def test_nothing_is_measured_that_needs_more_than_the_limit(limit, monkeypatch):
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 1)
    (rough,) = engine_of(chk).improver.rough.values()
    monkeypatch.setattr(glances, "timed", lambda *_: pytest.fail("it was measured"))
    rough.refinement.advance(1000, rough.primals(None), 0)
    assert not rough.refinement.left


def test_waiting_measures_nothing_while_a_backward_is_to_come(limit):
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 2)
    (rough,) = engine_of(chk).improver.rough.values()
    left = rough.refinement.left
    loss = chk(rows()).square().mean()
    assert not chk.wait_for_planning()
    assert rough.refinement.left == left
    loss.backward()
    assert chk.plan.measured_bytes <= limit
    assert chk.wait_for_planning()
    assert not rough.refinement.left


def test_no_search_while_a_backward_is_to_come(limit):
    chk = wrapped(limit)
    executor = stepped(chk)
    train(chk, rows(), 2)
    (rough,) = engine_of(chk).improver.rough.values()
    first = chk(rows()).square().mean()
    left = rough.refinement.left
    with pytest.warns(MemoryLimitWarning, match="a forward began while"):
        second = chk(rows()).square().mean()
    assert rough.refinement.left == left
    assert not executor.jobs
    (first + second).backward()


def test_a_thread_searches_and_ends_with_the_model(limit, monkeypatch):
    begun = threading.Event()

    def endless(*args, progress, **options):
        begun.set()
        while True:
            progress(0, 1)
            time.sleep(0.001)

    chk = wrapped(limit)
    assert engine_of(chk).improver.executor is ThreadJob
    train(chk, rows(), 2)
    engine_of(chk).improver.rough.clear()
    monkeypatch.setattr(improving.planner, "plan", endless)
    train(chk, rows(), 1, begin=2)
    assert begun.wait(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "rotor-planning"]
    assert thread.is_alive()
    assert thread.daemon
    assert train(chk, rows(), 1, begin=3) == plain_losses(4)[3:]
    del chk
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_failed_search_is_told_and_the_program_stays(limit, monkeypatch):
    chk = wrapped(limit)
    executor = stepped(chk)
    losses = train(chk, rows(), 2)
    engine_of(chk).improver.rough.clear()

    def broken(*args, **options):
        raise ZeroDivisionError("no planner")

    monkeypatch.setattr(improving.planner, "plan", broken)
    losses += train(chk, rows(), 1, begin=2)
    executor.run()
    program = chk.program
    with pytest.warns(MemoryLimitWarning, match="ZeroDivisionError: no planner"):
        losses += train(chk, rows(), 1, begin=3)
    losses += train(chk, rows(), 2, begin=4)
    assert chk.program == program
    assert losses == plain_losses(6)
    assert chk.plan.planning.is_final
    assert len(executor.jobs) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_while_a_search_runs_plans_for_itself(copied, limit):
    chk = wrapped(limit)
    executor = stepped(chk)
    train(chk, rows(), 2)
    engine_of(chk).improver.rough.clear()
    train(chk, rows(), 1, begin=2)
    assert len(executor.jobs) == 1
    other = copied(chk)
    assert other.planning == "background"
    assert train(other, rows(), 2, begin=3) == train(chk, rows(), 2, begin=3)
    assert other.plan is not chk.plan


def test_work_of_another_process_has_no_result(monkeypatch):
    go = threading.Event()
    job = ThreadJob(lambda stops: go.wait(60))
    assert not job.is_done()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert job.is_done()
    assert job.result() is None
    monkeypatch.undo()
    go.set()
    assert job.wait(60)
    assert job.result() is True


def test_stopped_work_has_no_result_and_an_error_comes_out():
    def waits(stops):
        while not stops():
            time.sleep(0.001)
        raise Stopped

    job = ThreadJob(waits)
    assert not job.wait(0.01)
    job.stop()
    assert job.wait(60)
    assert job.result() is None
    failing = ThreadJob(lambda stops: 1 // 0)
    failing.wait()
    with pytest.raises(ZeroDivisionError):
        failing.result()


@pytest.mark.slow
def test_planning_before_is_searched_at_once_and_repeats(limit, monkeypatch):
    def programs():
        chk = wrapped(limit, planning="before", seed=3)
        executor = stepped(chk)
        found = []
        for step in range(4):
            train(chk, rows(), 1, begin=step)
            found.append(chk.program.ops.tolist())
        assert not executor.jobs
        assert "searched before the step, final" in chk.report()
        return found

    assert programs() == programs()
    with pytest.raises(ValueError, match="expected one of background, before"):
        wrapped(limit, planning="later")


@pytest.mark.slow
def test_explicit_planning_is_searched_at_once(limit):
    torch.manual_seed(0)
    chk = rotor.Checkpointable(Mixed(), rows(), limit, engine="graph")
    assert "searched before the step" in chk.report()
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 2)
    chk.compute_sequence(limit)
    assert "searched before the step" in chk.report()
    # What was left to measure is measured.
    assert not engine_of(chk).improver.rough
    assert train(chk, rows(), 1, begin=2) == plain_losses(3)[2:]


def test_ranks_plan_before_the_step(limit, monkeypatch):
    monkeypatch.setattr(improving.core, "is_distributed", lambda: True)
    chk = wrapped(limit)
    executor = stepped(chk)
    train(chk, rows(), 3)
    assert "searched before the step" in chk.report()
    assert not executor.jobs


@pytest.mark.parametrize("verify", ["first", "off"])
def test_a_glance_is_exact_but_for_times(limit, verify):
    chk = wrapped(limit, verify=verify)
    stepped(chk)
    train(chk, rows(), 1)
    (step,) = engine_of(chk).steps.values()
    known = [(c.workspace_bytes, c.made_bytes) for c in step.costs]
    untested = [c for c in step.costs if c.flags == UNTESTED]
    # What no verified step proves has run twice; the loss is no operation.
    assert len(untested) > 10 if verify == "first" else len(untested) == 1
    chk.wait_for_planning()
    flags = [c.flags for c in step.costs]
    before = wrapped(limit, planning="before")
    train(before, rows(), 1)
    (other,) = engine_of(before).steps.values()
    assert known == [(c.workspace_bytes, c.made_bytes) for c in other.costs]
    assert flags == [c.flags for c in other.costs]


def test_an_operation_that_does_not_repeat_after_all_is_kept(limit, monkeypatch):
    chk = wrapped(limit)
    stepped(chk)
    losses = train(chk, rows(), 2)
    runs = dict(zip([op.name for op in chk.graph.operations], chk.program.runs, strict=True))
    tested = glances.tested_alone

    def differs(task, *given):
        return tested(task, *given) | (DIFFERS if runs[task.name] > 1 else 0)

    monkeypatch.setattr(glances, "tested_alone", differs)
    refuted = [name for name, count in runs.items() if count > 1]
    (captured,) = engine_of(chk).steps.values()
    for step in range(2, 40):
        losses += train(chk, rows(), 1, begin=step)
        kept = {task.name for task in captured.captured.lowered.unrepeatable}
        runs = dict(zip([op.name for op in chk.graph.operations], chk.program.runs, strict=True))
        assert all(runs[name] == 1 for name in kept)
    assert losses == plain_losses(40)
    assert kept
    assert kept <= set(refuted)
    assert chk.plan.measured_bytes <= limit


def test_gradients_that_exist_have_a_search_of_their_own(limit, poor_start):
    chk = wrapped(limit + 100_000)
    executor = stepped(chk)
    torch.manual_seed(0)
    plain = Mixed()
    for model in (plain, chk):
        for step in range(40):
            torch.manual_seed(step)
            model(rows()).square().mean().backward()
            executor.run()
    for a, b in zip(plain.parameters(), chk.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert len(chk.plans) == 2
    assert chk.plan.planning.is_final
    assert chk.plan.measured_bytes <= chk.mem_limit


def test_a_plan_that_recomputes_nothing_is_final():
    chk = wrapped("1GiB")
    executor = stepped(chk)
    train(chk, rows(), 4)
    assert "estimated, final" in chk.report()
    assert not executor.jobs


def test_a_limit_that_cannot_be_kept_is_refused_before_anything_runs(limit):
    chk = wrapped(1000)
    with pytest.raises(rotor.InfeasibleError) as caught:
        train(chk, rows(), 1)
    least = caught.value.minimum_bytes
    again = wrapped(least)
    train(again, rows(), 1)
    assert again.plan.predicted_bytes <= least
