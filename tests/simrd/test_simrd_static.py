"""Static planners and Checkmate: prices against replays, plans against exhaustive search."""

from __future__ import annotations

import heapq
import random
import sys
from itertools import combinations

import pytest
from published_logs import needs_logs, path_of, shipped

from rotor.errors import InfeasibleError
from rotor.simrd import LogWriter, networks, parse, simulate
from rotor.simrd.checkmate import checkmate
from rotor.simrd.program import Program, price
from rotor.simrd.static import PLANNERS, Cuts, plan, segments, solve


def random_log(seed: int, layers: int, *, wide: bool = True) -> bytes:
    """A small network: multi-output operations, views, skips, a backward that reads it all."""
    rng = random.Random(seed)
    writer = LogWriter()
    writer.constant("w", rng.randint(0, 9))
    made = ["w"]
    saved: list[list[str]] = []
    for i in range(layers):
        args = [made[-1]]
        if rng.random() < 0.4:
            args.append(rng.choice(made))
        kind = rng.random()
        if wide and kind < 0.25 and i:
            writer.call("view", args[:1], [f"v{i}"], rng.randint(0, 3), bytes=[0], aliases=[0])
            made.append(f"v{i}")
        elif wide and kind < 0.5:
            names = [f"m{i}", f"n{i}"]
            sizes = [rng.randint(1, 9), rng.randint(0, 9)]
            writer.call("pair", args, names, rng.randint(1, 9), bytes=sizes, aliases=[-1, -1])
            # Views are of single outputs only, so that a storage has one execution at a time.
            writer.call("add", names, [f"h{i}"], rng.randint(1, 9), bytes=[sizes[0]], aliases=[-1])
            saved.append(names)
            made.append(f"h{i}")
        else:
            size, cost = rng.randint(1, 9), rng.randint(1, 9)
            writer.call("op", args, [f"h{i}"], cost, bytes=[size], aliases=[-1])
            made.append(f"h{i}")
        saved.append([*args, made[-1]])
    writer.annotate("BACKWARD")
    gradient = made[-1]
    for k, reads in enumerate(reversed(saved)):
        size = rng.randint(1, 9)
        writer.call("back", [gradient, *reads], [f"g{k}"], 2, bytes=[size], aliases=[-1])
        gradient = f"g{k}"
    for name in made[1:]:
        writer.release(name)
    return writer.getvalue()


def rewritten(program: Program, steps: list[int]) -> bytes:
    """A log that executes the steps: a new name for each execution, released when it is done."""
    last: dict[str, int] = {}
    name: dict[int, str] = {}
    calls: list[tuple[int, list[str], list[str]]] = []
    kept: set[str] = set()
    for position, step in enumerate(steps):
        if step < 0:
            kept.add(name[~step])
            calls.append((step, [], []))
            continue
        args = [name[t] for t in program.inputs[step]]
        results = [f"t{t}_{position}" for t in program.outputs[step]]
        for used in (*args, *results):
            last[used] = position
        name.update(zip(program.outputs[step], results, strict=True))
        calls.append((step, args, results))
    writer = LogWriter()
    for position, (step, args, results) in enumerate(calls):
        if step < 0:
            continue
        outputs = program.outputs[step]
        if program.is_constant(step):
            writer.constant(results[0], program.storage_bytes[program.storage[outputs[0]]])
        else:
            sources = [program.storage[t] for t in program.inputs[step]]
            aliases = [
                sources.index(program.storage[t]) if program.is_alias[t] else -1 for t in outputs
            ]
            sizes = [program.storage_bytes[program.storage[t]] for t in outputs]
            cost = program.cost_ns[step]
            writer.call("op", args, results, cost, bytes=sizes, aliases=aliases)
        done = {used for used in (*args, *results) if last[used] == position} - kept
        for used in sorted(done):
            writer.release(used)
    return writer.getvalue()


def optimum(program: Program, budget: int) -> int | None:
    """The least time of any sequence of executions within a budget: search over all states."""
    n = len(program.cost_ns)
    assert all(len(outputs) == 1 for outputs in program.outputs)
    end = {program.operation[~step] for step in program.steps if step < 0}
    queue = [(0, 0, frozenset[int]())]
    best = {(0, frozenset[int]()): 0}
    while queue:
        cost, done, live = heapq.heappop(queue)
        if best[done, live] < cost:
            continue
        if done == n and end <= live:
            return cost
        memory = sum(program.storage_bytes[i] for i in live)
        for i in range(min(done + 1, n)):
            if i in live or not {program.operation[t] for t in program.inputs[i]} <= live:
                continue
            if memory + program.storage_bytes[i] > budget:
                continue
            after = max(done, i + 1)
            for count in range(len(live) + 2):
                for keep in combinations(sorted({*live, i}), count):
                    state = (after, frozenset(keep))
                    if cost + program.cost_ns[i] < best.get(state, 1 << 60):
                        best[state] = cost + program.cost_ns[i]
                        heapq.heappush(queue, (best[state], *state))
    return None


@pytest.mark.parametrize("seed", range(12))
def test_prices_are_what_a_replay_of_the_schedule_takes(seed):
    program = Program.from_log(parse(random_log(seed, 12)))
    cuts = Cuts(program)
    checked = 0
    for planner in PLANNERS.values():
        for _, steps in planner(cuts):
            priced = price(program, steps)
            replayed = simulate(parse(rewritten(program, steps)), "LRU", runtime="V2Eager")
            assert replayed.max_memory == priced.peak_bytes
            assert replayed.clock - 1 == priced.compute_ns
            assert replayed.n_model_ops == len(program.cost_ns) + priced.n_remat
            checked += priced.n_remat > 0
    assert checked > 3


@pytest.mark.parametrize("seed", range(6))
def test_keeping_everything_takes_what_a_run_without_a_budget_takes_at_most(seed):
    log = parse(random_log(seed, 20))
    (point,) = plan(log, ["checkpoint_all"])
    free = simulate(log, "DTR")
    assert point.compute_ns == free.model_compute
    assert (point.slowdown, point.n_remat) == (1.0, 0)
    assert point.peak_bytes <= free.max_memory


@pytest.mark.parametrize("read", [shipped, pytest.param(path_of, marks=needs_logs)])
@pytest.mark.parametrize("model", ["resnet32", "unet"])
def test_plans_of_logs(model, read):
    log = parse(read(model))
    points = plan(log)
    assert {point.planner for point in points} == set(PLANNERS)
    everything = points[0]
    assert everything.peak_bytes <= simulate(log, "DTR").max_memory
    assert everything.compute_ns == log.baseline.compute_ns
    forward = sum(Program.from_log(log).cost_ns[o] for o in Cuts(Program.from_log(log)).forward)
    for point in points:
        if point.planner.startswith("chen"):
            assert point.compute_ns - everything.compute_ns <= forward
    best = solve(points, int(0.6 * log.baseline.max_memory))
    assert best is not None
    assert best.slowdown < 1.3


def test_the_backward_begins_at_its_annotation():
    writer = LogWriter()
    writer.call("max_pool_backward", [], ["a"], 1, bytes=[1], aliases=[-1])
    writer.call("relu", ["a"], ["b"], 1, bytes=[1], aliases=[-1])
    writer.annotate("BACKWARD")
    writer.call("relu_backward", ["b"], ["c"], 1, bytes=[1], aliases=[-1])
    assert parse(writer.getvalue()).backward_command == 2


@pytest.mark.parametrize("n", [9, 16, 25])
def test_square_roots_of_the_linear_network(n):
    points = [p for p in plan(networks.linear(n), ["chen_sqrt"]) if p.n_remat]
    least = min(point.peak_bytes for point in points)
    assert least <= 2 * n**0.5 + 1
    assert all(point.n_remat <= n for point in points)


def test_revolve_on_the_linear_network_falls_with_memory():
    points = plan(networks.linear(12), ["griewank"])
    by_peak: dict[int, int] = {}
    for point in points:
        by_peak[point.peak_bytes] = min(point.n_remat, by_peak.get(point.peak_bytes, 1 << 30))
    peaks = sorted(by_peak)
    assert peaks[0] == 3
    assert [by_peak[p] for p in peaks] == sorted(by_peak.values(), reverse=True)
    assert by_peak[peaks[-1]] == 0


@pytest.mark.parametrize("n", [2, 3, 4])
def test_no_plan_of_a_chain_beats_exhaustive_search(n):
    program = Program.from_log(networks.linear(n))
    points = plan(program)
    for budget in range(1, 2 * n + 1):
        least = optimum(program, budget)
        fitting = [p.compute_ns for p in points if p.peak_bytes <= budget]
        if least is None:
            assert fitting == []
        elif fitting:
            assert min(fitting) >= least
    assert min(p.compute_ns for p in points) == optimum(program, 2 * n)


def test_cuts_keep_what_crosses_them():
    cuts = Cuts(Program.from_log(networks.linear(6)))
    assert cuts.articulations() == [1, 2, 3, 4, 5]
    assert cuts.crossing(3) == {2}
    steps = segments(cuts, [3])
    assert steps[:6] == [0, 1, 2, 3, 4, 5]
    assert [step for step in steps[6:] if 0 <= step < 6] == [0, 1]


def test_a_second_output_is_allocated_again_and_freed():
    writer = LogWriter()
    writer.call("pair", [], ["a", "b"], 5, bytes=[10, 100], aliases=[-1, -1])
    writer.call("use", ["a"], ["c"], 1, bytes=[1], aliases=[-1])
    writer.call("use", ["b", "a", "c"], ["d"], 1, bytes=[1], aliases=[-1])
    for name in "abc":
        writer.release(name)
    program = Program.from_log(parse(writer.getvalue()))
    pins = [step for step in program.steps if step < 0]
    plain = price(program, program.steps)
    assert (plain.peak_bytes, plain.compute_ns, plain.n_remat) == (112, 7, 0)
    again = price(program, [0, 1, 0, 2, *pins])
    assert (again.peak_bytes, again.compute_ns, again.n_remat) == (112, 12, 1)
    assert again.memory_bytes.tolist() == [10, 1, 111, 1, 1]


def test_a_pinned_output_stays_while_its_operation_runs_again():
    writer = LogWriter()
    writer.call("pair", [], ["a", "b"], 5, bytes=[10, 100], aliases=[-1, -1])
    writer.pin("a")
    writer.call("use", ["b"], ["c"], 1, bytes=[1], aliases=[-1])
    writer.release("b")
    writer.release("c")
    program = Program.from_log(parse(writer.getvalue()))
    a = program.outputs[0][0]
    priced = price(program, [0, ~a, 0, 1, ~a])
    assert priced.peak_bytes == 120
    assert priced.memory_bytes.tolist() == [10, 10, 110, 10, 10]


def test_prices_refuse_what_cannot_be_run():
    program = Program.from_log(networks.linear(3))
    with pytest.raises(ValueError, match="operation 5 is never executed"):
        price(program, program.steps[:5])
    with pytest.raises(ValueError, match="step 0 needs tensor 0"):
        price(program, [1, *program.steps])


def test_planners_are_known_by_name():
    with pytest.raises(ValueError, match="no planner is named 'x', expected one of checkpoint_all"):
        plan(networks.linear(3), ["x"])


def test_a_log_without_a_backward_is_forward_throughout():
    writer = LogWriter()
    for i in range(5):
        args = [f"a{i - 1}"] if i else []
        writer.call("op", args, [f"a{i}"], 1, bytes=[1], aliases=[-1])
    for point in plan(parse(writer.getvalue()), ["checkpoint_all"]):
        assert (point.n_remat, point.peak_bytes) == (0, 5)


# -- Checkmate


def chain_program(n: int, seed: int) -> Program:
    """A chain and its backward, with sizes and times of their own."""
    rng = random.Random(seed)
    writer = LogWriter()
    for i in range(n):
        args = [f"f{i - 1}"] if i else []
        sizes = [rng.randint(1, 9)]
        writer.call("op", args, [f"f{i}"], rng.randint(1, 9), bytes=sizes, aliases=[-1])
    writer.annotate("BACKWARD")
    gradient = f"f{n - 1}"
    for i in reversed(range(n - 1)):
        sizes = [rng.randint(1, 9)]
        cost = rng.randint(1, 9)
        writer.call("back", [f"f{i}", gradient], [f"g{i}"], cost, bytes=sizes, aliases=[-1])
        gradient = f"g{i}"
    for i in range(n):
        writer.release(f"f{i}")
    for i in range(1, n - 1):
        writer.release(f"g{i}")
    return Program.from_log(parse(writer.getvalue()))


def everything(program: Program) -> int:
    return price(program, program.steps).peak_bytes


@pytest.mark.parametrize(("n", "seed"), [(4, 0), (4, 1), (4, 3), (5, 0)])
def test_checkmate_is_optimal_on_chains(n, seed):
    pytest.importorskip("scipy")
    program = chain_program(n, seed)
    found = 0
    for budget in range(1, everything(program) + 1):
        least = optimum(program, budget)
        if least is None:
            with pytest.raises(InfeasibleError) as caught:
                checkmate(program, budget)
            assert caught.value.minimum_bytes >= 1
            continue
        answer = checkmate(program, budget)
        assert (answer.status, answer.gap) == ("optimal", 0.0)
        assert answer.price.peak_bytes <= budget
        assert answer.price.compute_ns == least == round(answer.bound_ns)
        found += least > program.base_compute_ns
    assert found > 0


def test_checkmate_on_graphs_with_views_and_pairs():
    pytest.importorskip("scipy")
    recomputed = 0
    for seed in range(6):
        program = Program.from_log(parse(random_log(seed, 4)))
        most = everything(program)
        assert checkmate(program, most).price.n_remat == 0
        points = plan(program)
        for share in (0.9, 0.8, 0.7):
            try:
                answer = checkmate(program, int(most * share))
            except InfeasibleError as error:
                assert error.minimum_bytes <= most  # noqa: PT017
                continue
            assert answer.price.peak_bytes <= int(most * share)
            best = solve(points, int(most * share))
            assert best is None or answer.price.compute_ns <= best.compute_ns
            recomputed += answer.price.n_remat > 0
    assert recomputed > 2


def test_checkmate_beats_every_planner_on_the_linear_network():
    pytest.importorskip("scipy")
    program = Program.from_log(networks.linear(6))
    points = plan(program)
    for budget in (3, 4, 5, 6):
        answer = checkmate(program, budget)
        best = solve(points, budget)
        assert best is None or answer.price.slowdown <= best.slowdown
        assert answer.price.peak_bytes <= budget


def test_checkmate_counts_constants():
    pytest.importorskip("scipy")
    writer = LogWriter()
    writer.constant("w", 100)
    writer.call("op", ["w"], ["a"], 3, bytes=[10], aliases=[-1])
    program = Program.from_log(parse(writer.getvalue()))
    assert checkmate(program, 110).price.peak_bytes == 110
    with pytest.raises(InfeasibleError, match="110 bytes") as caught:
        checkmate(program, 109)
    assert caught.value.minimum_bytes == 110


def test_checkmate_says_when_it_had_no_time():
    pytest.importorskip("scipy")
    program = Program.from_log(networks.linear(20))
    try:
        answer = checkmate(program, 4, time_limit=0.2)
    except RuntimeError as error:
        assert "more time" in str(error)  # noqa: PT017
    else:
        assert answer.status in ("optimal", "time limit")
        assert answer.gap >= 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"time_limit": 0}, "time_limit"),
        ({"gap": -1}, "gap"),
        ({"most_operations": 5}, "12 operations .* at most 5"),
    ],
)
def test_checkmate_checks_its_arguments(settings, words):
    with pytest.raises(ValueError, match=words):
        checkmate(networks.linear(6), 10, **settings)


def test_checkmate_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="install scipy"):
        checkmate(networks.linear(3), 10)
