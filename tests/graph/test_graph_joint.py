"""The planner with a second tier: budgets kept, optima reached, never slower than without."""

from __future__ import annotations

import json
import random
import signal
import threading
import time

import numpy as np
import pytest
from oracles import tier as oracle
from random_graphs import GRAPHS, training_graph

from rotor.errors import InfeasibleError
from rotor.graph import Graph, Link, Operation, Program, curve, plan, simulate, summarise
from rotor.graph.blocks import program_bytes, split_events

FACTS = {("unet", 0.4): 1.034, ("unet", 0.25): 1.103, ("gpt6", 0.4): 1.043, ("gpt6", 0.25): 1.093}
"""Slow-downs at which a search without incremental pricing arrives, by graph and budget."""


def tiny_chain(seed: int, stages: int) -> Graph:
    """A forward x0 -> x1 -> ... and its backward, with small whole sizes and times."""
    draw = random.Random(seed)
    sizes: list[int] = []
    operations: list[Operation] = []

    def add(cost: int, inputs: list[int], phase: str) -> int:
        sizes.append(draw.randint(1, 4))
        name = f"op{len(operations)}"
        operations.append(Operation(name, cost, tuple(inputs), (len(sizes) - 1,), 0, phase))
        return len(sizes) - 1

    made = []
    for _ in range(stages):
        made.append(add(draw.randint(1, 5), made[-1:], "forward"))
    gradient = made[-1]
    for k in reversed(range(stages)):
        inputs = [gradient, made[k - 1]] if k else [gradient]
        gradient = add(draw.randint(1, 6), sorted(set(inputs)), "backward")
    return Graph(sizes, None, operations)


def peak_of(graph: Graph) -> int:
    return simulate(graph, range(len(graph))).peak_bytes


def link_of(graph: Graph, bandwidth: float, **fields: object) -> Link:
    """The link that moves the activations once in 1 / bandwidth of a plain step."""
    base = simulate(graph, range(len(graph)))
    boundary = next(k for k, op in enumerate(graph.operations) if op.phase == "backward")
    rate = float(base.timeline().before_bytes[boundary]) * bandwidth / base.makespan
    return Link(rate, rate, **fields)


def test_tiny_graphs_against_every_program():
    """Never faster than the best of all programs, and as fast as it almost always."""
    equal = compared = missed = 0
    for seed in range(0, 60, 10):
        draw = random.Random(seed)
        graph = tiny_chain(seed, 3)
        link = Link(draw.choice([5e8, 1e9, 2e9]), draw.choice([5e8, 1e9]), 0.0, seed % 4 == 0)
        for budget in range(peak_of(graph) - 1, peak_of(graph) - 4, -1):
            optimum = oracle.best(graph, link, budget)
            try:
                program = plan(graph, budget, link=link, effort=1)
            except InfeasibleError:
                missed += optimum is not None
                continue
            assert optimum is not None
            assert program.time_ns >= optimum
            actions = oracle.actions_of(graph, program.actions.tolist())
            assert oracle.fault(graph, link, actions) is None
            compared += 1
            equal += program.time_ns == optimum
    assert compared > 3
    assert missed == 0
    assert equal >= 0.9 * compared


@pytest.mark.parametrize("duplex", [False, True])
def test_programs_are_never_slower_than_without_a_tier(duplex):
    faster = 0
    for seed in range(12):
        graph = training_graph(seed, 6 + seed, plain=seed % 3 > 0)
        peak = peak_of(graph)
        link = link_of(graph, [0.3, 1.0, 3.0][seed % 3], duplex=duplex, padding_bytes=seed % 2)
        try:
            without = plan(graph, peak * 2 // 3, effort="fast", seed=seed)
        except InfeasibleError:
            continue
        program = plan(graph, peak * 2 // 3, effort="fast", seed=seed, link=link)
        assert program.time_ns <= without.time_ns
        assert program.peak_bytes <= peak * 2 // 3
        assert program == plan(graph, peak * 2 // 3, effort="fast", seed=seed, link=link)
        actions = oracle.actions_of(graph, program.actions.tolist())
        assert oracle.fault(graph, link, actions) is None
        assert oracle.clocks(graph, link, actions)[0] == program.time_ns
        assert max(oracle.memory(graph, link, actions)[1]) == program.peak_bytes
        faster += program.time_ns < without.time_ns
    assert faster >= 5


@pytest.mark.parametrize(("name", "share"), FACTS)
def test_graphs_of_models(name, share):
    graph = Graph.load(GRAPHS / f"{name}.g")
    program = plan(graph, int(peak_of(graph) * share), effort=3, link=link_of(graph, 1.0))
    assert program.slowdown <= FACTS[name, share]
    assert program.waited >= 0
    assert program.offloaded_bytes > 0


@pytest.mark.parametrize(("name", "share"), [*FACTS, ("r50", 0.4), ("r50", 0.25)])
def test_walks_move_or_recompute_as_is_cheaper(name, share):
    """Halve the cost of recomputation before any search."""
    graph = Graph.load(GRAPHS / f"{name}.g")
    budget = int(peak_of(graph) * share)
    alone = plan(graph, budget, effort=0)
    joint = plan(graph, budget, effort=0, link=link_of(graph, 1.0))
    assert joint.slowdown - 1 < 0.6 * (alone.slowdown - 1)
    assert joint.offloaded_bytes > 0
    assert joint == plan(graph, budget, effort=0, link=link_of(graph, 1.0))


def test_what_the_tier_holds_is_limited():
    graph = Graph.load(GRAPHS / "unet.g")
    budget = int(peak_of(graph) * 0.4)
    free = plan(graph, budget, effort="fast", link=link_of(graph, 1.0))
    link = link_of(graph, 1.0, host_bytes=free.host_peak_bytes // 3)
    tight = plan(graph, budget, effort="fast", link=link)
    assert 0 < tight.host_peak_bytes <= free.host_peak_bytes // 3
    assert free.time_ns < tight.time_ns < plan(graph, budget, effort="fast").time_ns
    none = plan(graph, budget, effort="fast", link=link_of(graph, 1.0, host_bytes=0))
    assert none.actions.tolist() == plan(graph, budget, effort="fast").ops.tolist()


def test_a_tier_makes_budgets_feasible():
    """What runs once cannot be made again, but can be moved."""
    operations = [
        Operation("a", 5, (), (0,), once=True),
        Operation("b", 5, (0,), (1,)),
        Operation("c", 5, (1,), (2,)),
        Operation("d", 5, (2,), (3,), phase="backward"),
        Operation("e", 5, (3, 0), (4,), phase="backward"),
    ]
    graph = Graph([100, 60, 60, 60, 10], None, operations)
    with pytest.raises(InfeasibleError):
        plan(graph, 170)
    with pytest.raises(InfeasibleError, match="with the second tier or without"):
        plan(graph, 100, link=Link(1e10, 1e10))
    program = plan(graph, 170, link=Link(1e10, 1e10))
    assert program.peak_bytes <= 170
    assert program.offloaded_bytes == program.fetched_bytes == 100


def test_a_program_with_actions_is_a_start():
    graph = Graph.load(GRAPHS / "unet.g")
    budget = int(peak_of(graph) * 0.4)
    link = link_of(graph, 1.0)
    first = plan(graph, budget, effort="fast", link=link)
    assert plan(graph, budget, effort=0, link=link, start=first).time_ns <= first.time_ns
    lower = plan(graph, int(budget * 0.9), effort=0, link=link, start=first)
    assert lower.peak_bytes <= int(budget * 0.9)
    slower = link_of(graph, 0.5)
    other = plan(graph, budget, effort=0, link=slower, start=Program(graph, first.actions, slower))
    assert other.time_ns <= Program(graph, first.actions, slower).time_ns
    with pytest.raises(TypeError, match="link"):
        plan(graph, budget, link="disk")


def test_ctrl_c_ends_the_search():
    graph = Graph.load(GRAPHS / "gpt24.g")
    link = link_of(graph, 1.0)
    # A process that was started in the background may ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            plan(graph, int(peak_of(graph) * 0.5), effort=200, link=link)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 60


def test_reports_its_progress_and_keeps_a_time_limit():
    graph = Graph.load(GRAPHS / "gpt6.g")
    seen: list[tuple[int, int]] = []
    link = link_of(graph, 1.0)
    program = plan(
        graph,
        int(peak_of(graph) * 0.5),
        link=link,
        time_limit=0.5,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert program.peak_bytes <= int(peak_of(graph) * 0.5)
    assert seen
    assert all(0 <= done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_json_of_a_plan(tmp_path):
    graph = Graph.load(GRAPHS / "unet.g")
    link = link_of(graph, 1.0)
    program = plan(graph, int(peak_of(graph) * 0.5), effort="fast", link=link)
    again = Program.from_json(program.to_json(tmp_path / "joint.json"))
    assert again == program
    assert json.loads((tmp_path / "joint.json").read_text())["version"] == 2
    assert np.array_equal(again.timeline().peak_bytes, program.timeline().peak_bytes)


def test_the_curve_with_a_tier_lies_nowhere_above_the_one_without():
    graph = Graph.load(GRAPHS / "unet.g")
    link = link_of(graph, 1.0)
    seen: list[tuple[int, int]] = []
    alone = curve(graph, 8, effort="fast")
    joint = curve(
        graph, 8, effort="fast", link=link, progress=lambda done, total: seen.append((done, total))
    )
    assert joint.minimum_bytes <= alone.minimum_bytes
    faster = 0
    for program in alone.programs:
        at = joint.at(program.peak_bytes)
        assert at <= program.makespan
        faster += at < program.makespan * 0.99
    assert faster >= 3
    assert len(joint) <= 16
    assert any(program.offloaded_bytes for program in joint.programs)
    assert all(program.link == link for program in joint.programs)
    again = curve(graph, 8, effort="fast", link=link)
    assert [p.actions.tolist() for p in again.programs] == [
        p.actions.tolist() for p in joint.programs
    ]
    assert joint.lower_bound_bytes == 0
    assert alone.lower_bound_bytes > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(curve(graph, 1, effort="fast", link=link)) == 1
    with pytest.raises(TypeError, match="link"):
        curve(graph, 3, link="disk")


def test_summaries_and_allocations_know_what_moves():
    graph = Graph.load(GRAPHS / "unet.g")
    link = link_of(graph, 1.0, padding_bytes=512)
    program = plan(graph, int(peak_of(graph) * 0.4), effort="fast", link=link)
    summary = summarise(program)
    moved = [s for s, one in enumerate(summary.storages) if one.fate == "offloaded"]
    fetches = program.actions[program.actions >= len(graph) + len(graph.storages)]
    assert moved == sorted({k - len(graph) - len(graph.storages) for k in fetches.tolist()})
    assert summary.offloaded_bytes == program.offloaded_bytes
    makers = {graph.producers[s] for s in moved}
    shown = {k for k, kind in enumerate(summary.operations) if kind == "offloaded"}
    assert shown
    assert shown <= makers
    assert not any(program.runs[k] > 1 for k in shown)
    runs = program.timeline(runs_only=True)
    assert len(runs.peak_bytes) == len(program.ops) < len(program.timeline().peak_bytes)
    # The allocations of the program, frees at once: they are those of the simulator.
    sizes: list[int] = []
    live = most = 0
    for event in split_events(program, (), (), None, False).inside.tolist():
        if event >= 0:
            sizes.append(event)
            live += event
        else:
            live -= sizes[-1 - event]
        most = max(most, live)
    assert most == program.peak_bytes
    assert program_bytes(program).allocated_peak_bytes >= program.peak_bytes
