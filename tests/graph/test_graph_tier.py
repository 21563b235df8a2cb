"""Programs with a second tier: validity, memory, clocks, host bytes, against plain Python."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tier as oracle
from random_graphs import graphs, training_graph

from rotor.errors import InfeasibleError, InvalidSequenceError
from rotor.graph import Graph, Link, Operation, Program, Storage, plan, simulate
from rotor.graph.peaks import peak_of

FAULTS = {
    "number": "no operation of this number",
    "only": "may run once only",
    "phase": "after one of a later phase",
    "order": "in the order of the graph",
    "input": "was not made before it",
    "every": "before every operation of the graph has run",
    "fixed": "does not move",
    "not made": "finished before it is made",
    "written": "finished a second time",
    "not written": "fetched before its offload is finished",
    "unused": "nothing reads it",
    "host": "more than the host_bytes",
}


def three(movable: bool = True) -> Graph:
    """a (100 bytes, 7 ns) -> b (50 bytes, 5 ns) -> c, which reads both (3 ns, backward)."""
    return Graph(
        [Storage(100, movable=movable), Storage(50), Storage(10, True)],
        None,
        [
            Operation("a", 7, (), (0,)),
            Operation("b", 5, (0,), (1,), workspace_bytes=30),
            Operation("c", 3, (0, 1), (2,), phase="backward"),
        ],
    )


LINK = Link(1e10, 5e9)
"""10 and 20 ns for storage 0 of `three`."""


def links() -> st.SearchStrategy[Link]:
    return st.builds(
        Link,
        st.sampled_from([1e9, 3e8, 7e9]),
        st.sampled_from([1e9, 5e8]),
        st.sampled_from([0.0, 2e-9]),
        st.booleans(),
        st.sampled_from([None, None, 0, 9, 20]),
        st.sampled_from([0, 1, 4]),
        st.sampled_from([0, 3]),
    )


def check(graph: Graph, link: Link, actions: list[oracle.Action]) -> bool:
    """Compare with plain Python; True if the program is valid."""
    numbers = oracle.numbers_of(graph, actions)
    wrong = oracle.fault(graph, link, actions)
    if wrong is not None:
        with pytest.raises(InvalidSequenceError, match=FAULTS[wrong[0]]) as caught:
            simulate(graph, numbers, link)
        assert caught.value.position == wrong[1]
        return False
    program = simulate(graph, numbers, link)
    before, peaks = oracle.memory(graph, link, actions)
    time_ns, compute_ns, link_ns = oracle.clocks(graph, link, actions)
    assert program.timeline().before_bytes.tolist() == before
    assert program.timeline().peak_bytes.tolist() == peaks
    assert program.peak_bytes == max(peaks) == sum(peak_of(program).parts.values())
    assert program.time_ns == time_ns
    assert program.waited == pytest.approx((time_ns - compute_ns) / 1e9)
    assert program.link_time == pytest.approx(link_ns / 1e9)
    assert program.host_peak_bytes == max(oracle.host_levels(graph, actions))
    assert program.ops.tolist() == [k for kind, k in actions if kind == "run"]
    return True


@settings(max_examples=400, deadline=None)
@given(st.one_of(graphs(), graphs(homes=True)), links(), st.data())
def test_any_sequence_is_judged_as_by_the_oracle(graph, link, data):
    """Also those that a search would exploit: fetches before writes, writes of nothing."""
    actions: list[oracle.Action] = [("run", k) for k in range(len(graph))]
    kinds = [("run", k) for k in range(len(graph))]
    kinds += [(kind, s) for s in range(len(graph.storages)) for kind in ("finish", "fetch")]
    for _ in range(data.draw(st.integers(0, 6))):
        kind = data.draw(st.sampled_from(["insert", "insert", "remove", "swap"]))
        at = data.draw(st.integers(0, max(len(actions) - 1, 0)))
        if kind == "insert":
            actions.insert(at, data.draw(st.sampled_from(kinds)))
        elif actions and kind == "remove":
            del actions[at]
        elif actions:
            actions[at - 1], actions[at] = actions[at], actions[at - 1]
    check(graph, link, actions)


def random_program(graph: Graph, draw: random.Random) -> list[oracle.Action]:
    """A mostly valid program: runs again, and gaps that are bridged by the tier."""
    actions: list[oracle.Action] = [("run", k) for k in range(len(graph))]
    for _ in range(draw.randint(1, 8)):
        storage = draw.randrange(len(graph.storages))
        used = [k for k, a in enumerate(actions) if oracle.uses(graph, a, storage)]
        made = [k for k, a in enumerate(actions) if oracle.makes(graph, a, storage)]
        if not used or not made or draw.random() < 0.1:
            continue
        use = draw.choice(used)
        earlier = [k for k in made if k < use]
        if not earlier:
            continue
        first = max(earlier) + 1
        if draw.random() < 0.3:
            actions.insert(use, ("run", graph.producers[storage]))
            continue
        fetch = draw.randint(first, use)
        actions.insert(fetch, ("fetch", storage))
        if ("finish", storage) not in actions:
            actions.insert(draw.randint(first, fetch), ("finish", storage))
    return actions


def test_random_programs_are_priced_as_by_the_oracle():
    valid = moved = 0
    for seed in range(300):
        draw = random.Random(seed)
        graph = training_graph(seed, draw.randint(3, 7), plain=seed % 2 == 0)
        host = draw.choice([None, None, 4000, 9000])
        rates = (draw.choice([1e9, 3e8, 1e10]), draw.choice([1e9, 2e9]))
        link = Link(*rates, draw.choice([0, 1e-6]), draw.random() < 0.5, host, 1, 512)
        actions = random_program(graph, draw)
        if check(graph, link, actions):
            valid += 1
            moved += any(kind == "fetch" for kind, _ in actions)
    assert valid > 60
    assert moved > 30


def with_homes(graph: Graph, draw: random.Random) -> Graph:
    """The same graph with parameters that operations of both phases read, and gradients that go."""
    storages, firsts, rest = list(graph.storages), [], []
    for k, op in enumerate(graph.operations):
        inputs = op.inputs
        if op.phase == "forward" and draw.random() < 0.7:
            storages.append(Storage(1000 * draw.randint(1, 5)))
            home = len(storages) - 1
            cost = 1000 * draw.randint(1, 9)
            firsts.append(Operation(f"get{home}", cost, (), (home,), clock="read"))
            inputs = (*inputs, home)
        elif op.phase == "backward" and firsts and draw.random() < 0.7:
            inputs = (*inputs, draw.choice(firsts).outputs[0])
        rest.append(replace(op, inputs=inputs))
        made = [s for s in op.outputs if storages[s].pinned]
        if op.phase == "backward" and made and k + 1 < len(graph.operations):
            storages[made[0]] = replace(storages[made[0]], pinned=False)
            cost = 1000 * draw.randint(0, 9)
            put = Operation(f"put{k}", cost, (made[0],), (), phase="backward", once=True)
            rest.append(replace(put, clock="write"))
    return Graph(storages, None, [*firsts, *rest])


def test_plans_with_homes_are_priced_as_by_the_oracle():
    """The search drops homes and reads them again, as early as they fit."""
    repeated = early = 0
    for seed in range(60):
        draw = random.Random(seed)
        graph = with_homes(training_graph(seed, draw.randint(3, 8), plain=seed % 2 == 0), draw)
        link = Link(1e9, 1e9, duplex=draw.random() < 0.5)
        least = plan(graph, 1 << 40, link=link, effort=0).peak_bytes
        for share in (1.0, 0.7, 0.5):
            try:
                program = plan(graph, int(share * least), link=link, effort=1, seed=seed)
            except InfeasibleError:
                continue
            assert check(graph, link, oracle.actions_of(graph, program.actions.tolist()))
            assert program.peak_bytes <= share * least
            reads = [op.clock == "read" for op in graph.operations]
            repeated += bool((program.runs[reads] > 1).any())
            early += any(
                graph.operations[int(k)].clock == "read"
                and not set(graph.operations[int(k)].outputs) & set(graph.operations[int(j)].inputs)
                for k, j in zip(program.ops, program.ops[1:], strict=False)
            )
    assert repeated > 20
    assert early > 20


def test_a_home_by_hand():
    """A read goes on beside the runs, and the run that needs it waits."""
    graph = Graph(
        [Storage(100), Storage(50), Storage(10, True)],
        None,
        [
            Operation("get", 20, (), (0,), clock="read"),
            Operation("a", 7, (), (1,)),
            Operation("b", 3, (0, 1), (2,), phase="backward"),
            Operation("put", 30, (2,), (), phase="backward", once=True, clock="write"),
            Operation("end", 0, (), (), phase="backward", once=True, clock="write"),
        ],
    )
    early, late = (simulate(graph, order, LINK) for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4]))
    assert early.time_ns == 20 + 3 + 30
    assert late.time_ns == 7 + 20 + 3 + 30
    assert early.link_time == pytest.approx(50e-9)
    assert early.waited == pytest.approx((13 + 30) * 1e-9)
    again = simulate(graph, [0, 1, 0, 2, 3, 4], LINK)
    assert again.link_time == pytest.approx(70e-9)
    assert simulate(graph, [0, 1, 2, 3, 4]).time_ns == 60
    assert Graph.from_dict(graph.to_dict()) == graph


def test_a_program_by_hand():
    program = simulate(three(), [0, 1, 3, 6, 2], LINK)
    # The write of storage 0 lasts from 7 to 17, its finish waits 5 ns after b, the fetch 20 ns.
    assert program.time_ns == 7 + 5 + 5 + 20 + 3
    assert program.waited == pytest.approx(25e-9)
    assert program.link_time == pytest.approx(30e-9)
    assert program.timeline().before_bytes.tolist() == [0, 100, 150, 50, 150]
    assert program.timeline().peak_bytes.tolist() == [100, 180, 150, 150, 160]
    assert program.host_peak_bytes == 100
    assert program.offloaded_bytes == program.fetched_bytes == 100
    assert program.ops.tolist() == [0, 1, 2]
    assert program.actions.tolist() == [0, 1, 3, 6, 2]
    assert len(program) == 3
    assert "2 actions of a second tier" in repr(program)
    assert program != simulate(three(), [0, 1, 2], LINK)
    assert simulate(three(), [0, 1, 2], LINK) != simulate(three(), [0, 1, 2])


def test_a_write_begins_at_the_last_making_before_its_finish():
    """Never at an earlier one: the storage would go while it is being written."""
    early = simulate(three(), [0, 1, 3, 6, 2], LINK)
    late = simulate(three(), [0, 1, 0, 3, 6, 2], LINK)
    assert early.time_ns - early.waited * 1e9 == 15
    # a ends again at 19, its write at 29, the fetch at 49.
    assert late.time_ns == 52
    assert late.timeline().before_bytes.tolist()[:3] == [0, 100, 50]


def test_duplex_queues_and_padding():
    graph = Graph(
        [100, 100, 10],
        None,
        [
            Operation("a", 10, (), (0,)),
            Operation("b", 10, (), (1,)),
            Operation("c", 1, (0, 1), (2,), phase="backward"),
        ],
    )
    # finish 0, fetch 0 while 1 is written
    actions = [0, 3, 1, 6, 4, 7, 2]
    half = simulate(graph, actions, Link(1e10, 1e10))
    full = simulate(graph, actions, Link(1e10, 1e10, duplex=True))
    assert half.time_ns > full.time_ns
    assert half.link_time == full.link_time
    padded = simulate(graph, actions, Link(1e10, 1e10, padding_bytes=512))
    assert padded.peak_bytes == half.peak_bytes + 2 * 512
    slow = simulate(graph, actions, Link(1e10, 1e10, latency_s=1e-6))
    assert slow.link_time == pytest.approx(half.link_time + 4e-6)


@pytest.mark.parametrize(
    ("actions", "text", "position"),
    [
        ([0, 6, 1, 3, 2], "fetched before its offload is finished: storage 0 of operation 0", 1),
        ([0, 1, 3, 2], None, 0),
        ([3, 0, 1, 2], "finished before it is made: storage 0 of operation 0", 0),
        ([0, 1, 3, 6, 3, 2], "finished a second time", 4),
        ([0, 1, 5, 2], "does not move", 2),
        ([0, 1, 3, 6, 0, 2], "nothing reads it before it is made again", 3),
        ([0, 1, 3, 6, 6, 2], "nothing reads it before it is made again", 3),
        ([0, 1, 3, 2, 6], "nothing reads it before it is made again", 4),
        ([0, 1, 9, 2], "no operation of this number", 2),
    ],
)
def test_every_impossible_order_is_refused(actions, text, position):
    if text is None:
        assert simulate(three(), actions, LINK).time_ns == 20
        return
    with pytest.raises(InvalidSequenceError, match=text) as caught:
        simulate(three(), actions, LINK)
    assert caught.value.position == position


def test_what_does_not_move():
    actions = [0, 1, 3, 6, 2]
    with pytest.raises(InvalidSequenceError, match="does not move"):
        simulate(three(movable=False), actions, LINK)
    with pytest.raises(InvalidSequenceError, match="does not move"):
        simulate(three(), actions, Link(1e9, 1e9, least_bytes=101))
    with pytest.raises(InvalidSequenceError, match="no link was given"):
        simulate(three(), actions)
    with pytest.raises(InvalidSequenceError, match="host_bytes of the link: storage 0") as caught:
        simulate(three(), actions, Link(1e9, 1e9, host_bytes=99))
    assert caught.value.position == 0
    assert simulate(three(), actions, Link(1e9, 1e9, host_bytes=100)).host_peak_bytes == 100


def test_storages_of_the_loss_do_not_move():
    graph = Graph(
        [10, 10, 10],
        None,
        [
            Operation("a", 1, (), (0,)),
            Operation("l", 1, (0,), (1,), phase="loss"),
            Operation("b", 1, (1,), (2,), phase="backward"),
        ],
    )
    with pytest.raises(InvalidSequenceError, match="made by the loss: storage 1 of operation 1"):
        simulate(graph, [0, 1, 4, 7, 2], LINK)


def test_json(tmp_path):
    program = simulate(three(), [0, 1, 3, 6, 2], Link(1e9, 2e9, 1e-6, True, 4000, 10, 512))
    data = json.loads(program.to_json(tmp_path / "program.json"))
    assert data["version"] == 2
    assert data["actions"] == [0, 1, 3, 6, 2]
    again = Program.from_json(tmp_path / "program.json")
    assert again == program
    assert again.link == program.link
    assert again.time_ns == program.time_ns
    # Older readers take programs without actions.
    plain = simulate(three(), [0, 1, 2], LINK).to_dict()
    assert plain["version"] == 1
    assert plain["ops"] == [0, 1, 2]
    assert Program.from_dict(plain).link == LINK
    assert simulate(three(), [0, 1, 2]).to_dict().keys() == {"format", "version", "ops", "graph"}
    for change in ({"link": None}, {"link": 3}, {"link": {"speed": 1}}, {"actions": "abc"}):
        with pytest.raises(ValueError):
            Program.from_dict({**program.to_dict(), **change})
    with pytest.raises(ValueError, match="version 3"):
        Program.from_dict({**program.to_dict(), "version": 3})
    graph = three(movable=False)
    assert graph.to_dict()["storages"][0] == {"bytes": 100, "pinned": False, "movable": False}
    assert Graph.from_json(graph.to_json()) == graph
    assert "movable" not in three().to_dict()["storages"][0]


def test_links_are_checked():
    assert Link(1, 2).core == (1.0, 2.0, 0, False, -1, 1, 0)
    assert Link(1e9, 1e9, 1e-4, True, "1KiB").core == (1e9, 1e9, 100_000, True, 1024, 1, 0)
    assert Link(1e9, 2e9, 1e-4).write_seconds(10**9) == pytest.approx(1.0001)
    assert Link(1e9, 2e9, 1e-4).read_seconds(10**9) == pytest.approx(0.5001)
    assert Link(1e9, 1e9, host_bytes=0).host_bytes == 0
    assert Link.from_dict(LINK.to_dict()) == LINK
    for arguments in [(0, 1), (1, float("nan")), (1, float("inf")), (1, 1, -1), (1, 1, 1e9)]:
        with pytest.raises(ValueError, match="expected"):
            Link(*arguments)
    for arguments in [("1", 1), (True, 1), (1, 1, None), (1, 1, 0.0, 1), (1, 1, 0.0, False, [])]:
        with pytest.raises(TypeError):
            Link(*arguments)
    with pytest.raises(ValueError, match="least_bytes"):
        Link(1, 1, least_bytes=1 << 50)
    with pytest.raises(TypeError, match="Link"):
        simulate(three(), [0, 1, 2], "disk")


def test_clocks_that_leave_int64_are_refused():
    sizes = [1 << 41] * 3
    operations = [Operation(f"op{k}", 1 << 41, (k - 1,) if k else (), (k,)) for k in range(3)]
    graph = Graph(sizes, None, operations)
    program = simulate(graph, [0, 3, 6, 1, 2], Link(1e-9, 1e-9))
    assert program.link_time > 2e6
    core = graph.core
    with pytest.raises(TypeError, match="tuple"):
        core.simulate(np.array([0, 1, 2], np.int32), [1])
    with pytest.raises(ValueError, match="negative"):
        core.simulate(np.array([0, 1, 2], np.int32), (1.0, -1.0, 0, False, -1, 0, 0))
