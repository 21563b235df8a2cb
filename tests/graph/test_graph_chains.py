"""Chains as graphs: programs cost what sequences cost, and are turned into each other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_chains import random_chain, realistic_chain

from rotor import algorithms
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain
from rotor.errors import InfeasibleError, InvalidSequenceError
from rotor.graph import (
    Graph,
    Link,
    Operation,
    Storage,
    checkmate,
    curve,
    lower_bound,
    offload_bound,
    plan,
    simulate,
)
from rotor.graph.chains import (
    ChainProgram,
    graph_of_chain,
    program_of_sequence,
    sequence_of_program,
)


def schedules(rng, chain):
    """Sequences of every algorithm: at two budgets, and at the least one."""
    most = next(algorithms.NoCheckpoint().candidates(chain)).peak_bytes
    for name in algorithms.names():
        budgets = [rng.randint(most // 4, most + 1), most]
        for budget in budgets:
            try:
                yield algorithms.get(name)().solve(chain, max(1, budget))
            except InfeasibleError as error:
                if error.minimum_bytes and error.minimum_bytes not in budgets:
                    budgets.append(error.minimum_bytes)
            except ValueError:
                break  # It would run a stage twice that may run once.


def assert_same(chain, sequence):
    graph = graph_of_chain(chain)
    program = program_of_sequence(sequence, graph)
    held = chain.x_bytes[0]
    assert program.time_ns == round(sequence.makespan * 1e9)
    assert program.peak_bytes + held == sequence.peak_bytes
    assert (program.timeline().peak_bytes + held).tolist() == sequence.timeline.peak_bytes.tolist()
    assert program.peak_bytes >= lower_bound(graph)
    assert sequence_of_program(program, chain) == sequence
    priced = ChainProgram(sequence)
    for one, other in ((program, priced), (program.unplanned, priced.unplanned)):
        assert (one, one.graph, one.time_ns, one.peak_bytes) == (
            *(other, other.graph, other.time_ns, other.peak_bytes),
        )
        lines = [vars(found.timeline()) for found in (one, other)]
        assert all((line == lines[1][name]).all() for name, line in lines[0].items())


@pytest.mark.parametrize("seed", range(8))
def test_programs_cost_what_sequences_cost(seed):
    rng = random.Random(seed)
    count = 0
    for _ in range(20):
        chain = random_chain(rng, 1, 9)
        for sequence in schedules(rng, chain):
            assert_same(chain, sequence)
            count += 1
    assert count > 100


def test_programs_of_long_chains_cost_what_sequences_cost():
    rng = random.Random(0)
    chain = realistic_chain(rng, 40)
    for sequence in schedules(rng, chain):
        assert_same(chain, sequence)


def shares(chain):
    """Budgets from the least of persistent schedules to no recomputation, and their sequences."""
    solver = algorithms.Persistent()
    most = next(algorithms.NoCheckpoint().candidates(chain)).peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        solver.solve(chain, 1)
    least = caught.value.minimum_bytes
    for share in (0.0, 0.15, 0.4, 0.7):
        budget = int(least + share * (most - least))
        yield budget - chain.x_bytes[0], solver.solve(chain, budget)


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_chains(seed):
    rng = random.Random(seed)
    for chain in [random_chain(rng, 5, 12) for _ in range(4)] + [realistic_chain(rng, 16)]:
        if any(chain.once):
            continue
        graph = graph_of_chain(chain)
        for budget, sequence in shares(chain):
            start = program_of_sequence(sequence, graph)
            found = plan(graph, budget, effort="fast", start=start)
            assert found.peak_bytes <= budget
            assert found.time_ns <= start.time_ns
            again = sequence_of_program(found, chain)
            assert again.peak_bytes == found.peak_bytes + chain.x_bytes[0]


def test_plans_without_a_start():
    chain = realistic_chain(random.Random(0), 16)
    graph = graph_of_chain(chain)
    for most, (budget, sequence) in zip((1.2, 1.02, 1.02, 1.02), shares(chain), strict=True):
        found = plan(graph, budget, effort="fast")
        assert found.peak_bytes <= budget
        assert found.makespan <= most * sequence.makespan
        sequence_of_program(found, chain)


def test_curves_of_chains():
    chain = realistic_chain(random.Random(0), 12)
    found = curve(graph_of_chain(chain), 8, effort="fast")
    assert len(found.programs) > 4
    for program in found.programs:
        sequence_of_program(program, chain)


def small(**fields):
    """Three stages of equal sizes."""
    kept = fields.pop("xbar_bytes", [20] * 3)
    return Chain([1e-9] * 3, [2e-9] * 3, [10] * 4, kept, [1] * 3, [2] * 3, **fields)


def test_names_and_sizes():
    graph = graph_of_chain(small(names=["a", "b", "c"], pgrad_bytes=[3, 4, 5]))
    assert [op.name for op in graph.operations] == ["a", "b", "c", "loss", "c", "b", "a"]
    assert [op.phase for op in graph.operations].count("backward") == 3
    assert graph.operations[4].workspace_bytes == 2 - 5
    assert not graph.is_plain
    assert Graph.from_json(graph.to_json()) == graph
    assert graph.to_dict()["version"] == 2


def test_a_stage_that_keeps_less_than_its_output_is_refused():
    with pytest.raises(ValueError, match="stage 1 keeps xbar_bytes = 9, expected at least the 10"):
        graph_of_chain(small(xbar_bytes=[20, 9, 20]))
    sequence = Sequence.parse("Fe_0 Fe_1 Fe_2 L B_2 B_1 B_0", small(xbar_bytes=[20, 9, 20]))
    program = ChainProgram(sequence, 5)
    assert program.peak_bytes == sequence.peak_bytes - 10
    assert (program.time_ns, program.unplanned) == (14, program)


def test_a_tape_holds_its_input():
    graph = graph_of_chain(small())
    simulate(graph, [0, 0, 1, 2, 3, 4, 5, 6])
    with pytest.raises(InvalidSequenceError, match="made again: storage 4 of") as caught:
        simulate(graph, [0, 1, 0, 2, 3, 4, 5, 6])
    assert caught.value.position == 6
    # A stage that its consumer's tape outlives: no algorithm makes it.
    sequence = Sequence.parse("Fck_0 Fe_1 Fe_2 L B_2 Fe_0 B_1 B_0", small())
    with pytest.raises(InvalidSequenceError, match="a tape is read after"):
        program_of_sequence(sequence, graph)
    assert ChainProgram(sequence).runs.tolist() == [2, 1, 1, 1, 1, 1, 1]


def test_a_run_without_its_tape_has_its_own_workspace():
    graph = Graph(
        [Storage(10), Storage(30, lazy=True, movable=False), Storage(1)],
        None,
        [
            Operation("a", 1, (), (0, 1), 4, light_bytes=7),
            Operation("b", 1, (0, 1), (2,), -1, "backward"),
        ],
    )
    program = simulate(graph, [0, 0, 1])
    assert program.timeline().peak_bytes.tolist() == [17, 44, 40]
    assert program.timeline().before_bytes.tolist() == [0, 0, 40]


def test_later_copies_of_a_held_output_go_with_their_last_use():
    operations = [
        Operation("a", 1, (), (0,)),
        Operation("b", 1, (0,), (1,)),
        Operation("c", 1, (0,), (2,)),
    ]
    for pinned, peaks in ((True, [10, 11, 20, 11]), ("first", [10, 11, 20, 21])):
        graph = Graph([Storage(10, pinned), Storage(1), Storage(1)], None, operations)
        assert simulate(graph, [0, 1, 0, 2]).timeline().peak_bytes.tolist() == peaks


@pytest.mark.parametrize(
    "storages, fields, message",
    [
        ([Storage(5), Storage(6)], {"workspace_bytes": -12}, "workspace_bytes of .* expected -11"),
        ([Storage(5), Storage(6, lazy=True)], {"light_bytes": -6}, "light_bytes of .* expected -5"),
        ([Storage(5, lazy=True), Storage(6, lazy=True)], {}, "makes 2 lazy storages"),
        ([Storage(5), Storage(6, pinned=True, lazy=True)], {}, "storage 1 is lazy and pinned"),
    ],
)
def test_impossible_tapes(storages, fields, message):
    with pytest.raises(ValueError, match=message):
        Graph(storages, None, [Operation("a", 1, (), (0, 1), **fields)])


def test_what_takes_plain_graphs_alone_says_so():
    graph, link = graph_of_chain(small()), Link(1e9, 1e9)
    calls = [
        lambda: plan(graph, 100, link=link),
        lambda: curve(graph, link=link),
        lambda: checkmate(graph, 100),
        lambda: offload_bound(graph, 100, link),
        graph.to_g,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="takes no graph with lazy storages"):
            call()


def test_malformed_tapes_in_files():
    data = graph_of_chain(small()).to_dict()
    data["storages"][0]["pinned"] = "last"
    with pytest.raises(ValueError, match="'pinned' is 'last', expected true, false or 'first'"):
        Graph.from_dict(data)


def test_a_program_without_repeats_is_a_sequence():
    chain = small()
    program = simulate(graph_of_chain(chain), np.arange(7))
    assert str(sequence_of_program(program, chain)) == "Fe_0 Fe_1 Fe_2 L B_2 B_1 B_0"
