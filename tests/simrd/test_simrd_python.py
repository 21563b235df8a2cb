"""The simulator called from Python: heuristics, threads, signals, programs run step by step."""

from __future__ import annotations

import gc
import math
import operator
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from simrd_programs import diamond, evictions, program, programs

from rotor import _core, simrd

NO_BUDGET = (1 << 63) - 1


def new_replay(log: _core.Log, heuristic: Any = "LRU", budget: int = NO_BUDGET) -> _core.Replay:
    flags = (False,) * 5
    return _core.Replay(log, 2, False, budget, math.inf, heuristic, 0, 0, *flags, 1000, -1)


@pytest.fixture(scope="module")
def logs() -> list[simrd.Log]:
    return programs(8)


@pytest.fixture(scope="module")
def plain_logs() -> list[simrd.Log]:
    return programs(8, aliases=False)


# -- Python heuristics decide as the built-in ones


def by_size_and_time(numerator: int, candidate: _core.Candidate) -> float:
    denominator = candidate.bytes * candidate.staleness
    return float(Fraction(numerator, denominator)) if denominator > 0 else math.inf


def lru(candidate: _core.Candidate) -> float:
    return candidate.last_access


def local(candidate: _core.Candidate) -> float:
    return by_size_and_time(candidate.compute_ns, candidate)


def classes(candidate: _core.Candidate) -> float:
    return by_size_and_time(candidate.compute_ns + candidate.class_ns, candidate)


def full(candidate: _core.Candidate) -> float:
    around = candidate.evicted_after_ns + candidate.evicted_before_ns
    return by_size_and_time(candidate.compute_ns + around, candidate)


def ancestors(candidate: _core.Candidate) -> float:
    return (candidate.compute_ns + candidate.evicted_before_ns) / candidate.bytes


def largest(candidate: _core.Candidate) -> float:
    return 1 / candidate.bytes


@pytest.mark.parametrize("runtime", ["V1", "V2", "V2EagerOptimized"])
@pytest.mark.parametrize(
    ("function", "name"), [(lru, "LRU"), (local, "DTRLocal"), (largest, "LargestStorage")]
)
def test_functions_decide_as_their_namesakes(logs, function, name, runtime):
    number = 0
    for log in logs:
        one, two = (
            simrd.simulate(log, heuristic, ratio=0.6, runtime=runtime, trace=True)
            for heuristic in (function, name)
        )
        assert evictions(one) == evictions(two)
        assert one == replace(two, heuristic=function.__name__, memory_bytes=one.memory_bytes)
        number += two.n_eval
    assert number > 200


@pytest.mark.parametrize(
    ("function", "name"), [(classes, "DTREqClass"), (full, "DTR"), (ancestors, "MSPS")]
)
def test_functions_see_what_is_evicted_around(plain_logs, function, name):
    for log in plain_logs:
        one, two = (
            simrd.simulate(log, heuristic, ratio=0.6, trace=True) for heuristic in (function, name)
        )
        assert evictions(one) == evictions(two)


def test_candidates():
    seen = []

    def heuristic(candidate: _core.Candidate) -> float:
        names = [name for name in dir(candidate) if not name.startswith("_")]
        seen.append({name: getattr(candidate, name) for name in names})
        return 0

    assert simrd.simulate(diamond(), heuristic, budget_bytes=16).status == "ok"
    z, w, y = seen
    assert z == {
        "storage": 2,
        "bytes": 4,
        "compute_ns": 20,
        "last_access": 31,
        "now": 61,
        "staleness": 30,
        "evicted_after_ns": 0,
        "evicted_before_ns": 0,
        "class_ns": 0,
    }
    assert (w["storage"], w["now"], w["staleness"], w["compute_ns"]) == (3, 66, 5, 30)
    assert (w["evicted_after_ns"], w["evicted_before_ns"], w["class_ns"]) == (0, 20, 20)
    assert (y["storage"], y["last_access"]) == (1, 66)


def test_v1_keeps_no_classes():
    with pytest.raises(ValueError, match="class_ns needs classes"):
        simrd.simulate(diamond(), lambda s: s.class_ns, budget_bytes=16, runtime="V1")


def test_a_candidate_is_good_during_the_call_only():
    kept = []
    simrd.simulate(diamond(), lambda s: kept.append(s) or 1.0, budget_bytes=16)
    assert len(kept) == 3
    for candidate in kept:
        with pytest.raises(RuntimeError, match="only while the heuristic is being called"):
            _ = candidate.bytes


@pytest.mark.parametrize(
    "cost", [1, 1.5, True, np.float32(2), np.int64(3), Fraction(1, 3), math.inf, -1, np.array(2.0)]
)
def test_costs_are_real_numbers(cost):
    assert simrd.simulate(diamond(), lambda _: cost, budget_bytes=16).status == "ok"


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        (math.nan, ValueError, "heuristic 'odd' returned NaN"),
        (np.float64("nan"), ValueError, "heuristic 'odd' returned NaN"),
        ("1", TypeError, "heuristic 'odd' returned '1', expected a real number"),
        (None, TypeError, "heuristic 'odd' returned None"),
        ([1], TypeError, r"heuristic 'odd' returned \[1\]"),
        (1j, TypeError, "heuristic 'odd' returned 1j"),
        (10**400, ValueError, "heuristic 'odd' returned an integer that is too large"),
    ],
)
def test_other_costs_are_errors(cost, error, message):
    def odd(_: _core.Candidate) -> Any:
        return cost

    with pytest.raises(error, match=message):
        simrd.simulate(diamond(), odd, budget_bytes=16)


@pytest.mark.parametrize("error", [ZeroDivisionError("0"), KeyboardInterrupt(), SystemExit(3)])
def test_exceptions_of_a_heuristic_come_through(error):
    def raising(_: _core.Candidate) -> float:
        raise error

    with pytest.raises(type(error)) as caught:
        simrd.simulate(diamond(), raising, budget_bytes=16)
    assert caught.value is error


def test_exceptions_of_a_number_come_through():
    error = LookupError("no number")

    class Number:
        def __float__(self) -> float:
            raise error

    with pytest.raises(LookupError) as caught:
        simrd.simulate(diamond(), lambda _: Number(), budget_bytes=16)
    assert caught.value is error


def test_exceptions_of_progress_come_through():
    error = OSError("no terminal")

    def progress(done: int, total: int) -> None:
        raise error

    log = simrd.parse(program(1, operations=5000))
    with pytest.raises(OSError) as caught:
        simrd.simulate(log, lru, progress=progress)
    assert caught.value is error


def test_callable_objects_are_named_after_their_class():
    class Newest:
        def __call__(self, candidate: _core.Candidate) -> float:
            return -candidate.last_access

    assert simrd.simulate(diamond(), Newest(), budget_bytes=20).heuristic == "Newest"


def test_nothing_leaks():
    class Heuristic:
        def __init__(self) -> None:
            self.replay: _core.Replay | None = None

        def __call__(self, candidate: _core.Candidate) -> float:
            return candidate.last_access

    log = diamond().core
    heuristic = Heuristic()
    heuristic.replay = new_replay(log, heuristic, 16)
    heuristic.replay.run()
    gone = weakref.ref(heuristic)
    del heuristic
    gc.collect()
    assert gone() is None


# -- the binding


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, None, TypeError, "Log"),
        (1, 3, ValueError, "runtime must be 0, 1 or 2"),
        (3, 0, ValueError, "budget"),
        (4, math.nan, ValueError, "remat_limit_ns"),
        (4, -1.0, ValueError, "remat_limit_ns"),
        (5, "none", ValueError, "no heuristic is named 'none'"),
        (5, 5, TypeError, "name or a callable"),
        (6, -1, OverflowError, "negative|convert"),
        (6, "1", TypeError, "int"),
        (7, -1, ValueError, "rebuild_every"),
        (13, 0, ValueError, "max_events"),
    ],
)
def test_arguments(position, value, error, message):
    arguments = [diamond().core, 2, False, 16, math.inf, "LRU", 0, 0, *[False] * 5, 1000, -1]
    assert _core.Replay(*arguments).outcome == 0
    arguments[position] = value
    with pytest.raises(error, match=message):
        _core.Replay(*arguments)
    with pytest.raises(TypeError):
        _core.Replay(*arguments[:-1])


def test_v1_serves_no_classes():
    arguments = [diamond().core, 0, False, 16, math.inf, "DTR", 0, 0, *[False] * 5, 1000, -1]
    with pytest.raises(ValueError, match="'DTR'"):
        _core.Replay(*arguments)


def test_a_new_replay_is_at_the_beginning():
    replay = new_replay(diamond().core)
    assert (replay.clock, replay.next_command, replay.memory) == (1, 0, 0)
    assert (replay.events(), replay.storage_stats(), replay.operation_stats()) == (None,) * 3
    assert [replay.is_defined(i) for i in (-1, 0, 1 << 40)] == [False] * 3
    with pytest.raises(TypeError):
        replay.is_defined("x")
    with pytest.raises(TypeError):
        replay.run(None, None)
    replay.run()
    assert [replay.is_defined(i) for i in (-1, 0, 1, 5, 6)] == [False, True, False, True, False]
    assert np.frombuffer(replay.locked(), np.int64).tolist() == [0, 5]
    assert (replay.locked_bytes, replay.pool_count, replay.storage_count) == (8, 0, 6)
    before = replay.clock
    replay.run()
    assert replay.clock == before


def test_a_replay_that_ended_is_not_run_again():
    out_of_memory = new_replay(diamond().core, "LRU", 12)
    out_of_memory.run()
    assert out_of_memory.outcome == 1
    raising = new_replay(diamond().core, lambda _: 1 / 0, 16)
    with pytest.raises(ZeroDivisionError):
        raising.run()
    for replay in (out_of_memory, raising):
        before = (replay.clock, replay.next_command, replay.memory)
        with pytest.raises(RuntimeError, match="has ended"):
            replay.run()
        assert (replay.clock, replay.next_command, replay.memory) == before


# -- threads


def in_a_thread(call: Any) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_one_replay_is_run_by_one_thread():
    log = diamond().core
    replay: list[_core.Replay] = []
    errors: list[BaseException | None] = []
    calls = [
        lambda: replay[0].run(),
        lambda: replay[0].clock,
        lambda: replay[0].footprint_bytes,
        lambda: replay[0].locked(),
        lambda: replay[0].events(),
        lambda: replay[0].is_defined(0),
    ]

    def heuristic(candidate: _core.Candidate) -> float:
        errors.extend(in_a_thread(call) for call in calls)
        for call in calls:
            with pytest.raises(RuntimeError, match="being run"):
                call()
        return 0

    replay.append(new_replay(log, heuristic, 16))
    replay[0].run()
    assert len(errors) == 3 * len(calls)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert replay[0].remats == 1


def test_a_log_is_not_fed_while_it_is_replayed():
    log = _core.Log(False)
    writer = _core.LogWriter()
    for i in range(4):
        writer.call("f", [], [f"t{i}"], 1)
        writer.memory(f"t{i}", 4)
        writer.alias(f"t{i}", -1)
    log.feed(writer.take())
    errors = []

    def heuristic(candidate: _core.Candidate) -> float:
        errors.append(in_a_thread(lambda: log.feed(b"")))
        return 0

    new_replay(log, heuristic, 8).run()
    assert errors
    assert all(isinstance(error, RuntimeError) for error in errors)
    log.feed(b"")


def test_a_log_is_not_replayed_while_it_is_fed():
    log = _core.Log(False)
    first = (
        b'{"INSTRUCTION":"CONSTANT","NAME":"x"}\n{"INSTRUCTION":"MEMORY","MEMORY":"4","NAME":"x"}\n'
    )
    log.feed(first)
    replay = new_replay(log)
    errors: list[BaseException | None] = []

    def progress(done: int, total: int) -> None:
        errors.append(in_a_thread(replay.run))
        errors.append(in_a_thread(lambda: new_replay(log)))
        raise StopIteration

    filler = b'{"ANNOTATION":"nothing","INSTRUCTION":"ANNOTATE"}\n' * 4_000_000
    with pytest.raises(StopIteration):
        log.feed(filler, progress)
    assert len(errors) == 2
    assert all(isinstance(error, RuntimeError) for error in errors)


def test_threads_share_a_log(logs):
    log = logs[0]
    settings = [(name, ratio) for name in ("DTR", "LRU", "MSPS") for ratio in (0.5, 0.7, 0.9)]
    expected = [simrd.simulate(log, name, ratio=ratio) for name, ratio in settings]
    with ThreadPoolExecutor(4) as pool:
        got = list(
            pool.map(lambda setting: simrd.simulate(log, setting[0], ratio=setting[1]), settings)
        )
    assert got == expected


# -- Ctrl-C


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def endless() -> simrd.Log:
    """A chain whose backward pass, with three bytes and LRU, takes some n^2 / 2 executions."""
    n = 40_000
    writer = simrd.LogWriter()
    for i in range(n):
        writer.call("f", [f"f{i - 1}"] if i else [], [f"f{i}"], 1, bytes=[1], aliases=[-1])
    for i in reversed(range(n)):
        writer.call("b", [f"f{i}"], [f"b{i}"], 1, bytes=[1], aliases=[-1])
        writer.release(f"b{i}")
    return simrd.parse(writer.getvalue(), output_condition="leave")


@pytest.mark.parametrize(
    "heuristic", ["LRU", lru, operator.attrgetter("last_access")], ids=["built in", "Python", "C"]
)
def test_simulations_are_interrupted(heuristic):
    log = endless()
    with interrupted_after(0.3), pytest.raises(KeyboardInterrupt):
        simrd.simulate(log, heuristic, budget_bytes=4, overhead_limit=math.inf)


# -- programs that are run step by step


def steps(run: simrd.Interactive) -> list[str]:
    """A program that depends on what is in memory; gives what it did."""
    done = []
    made = [run.constant("x", 4)]
    for i in range(40):
        gone = [name for name in made if not run.is_defined(name)]
        inputs = [gone[-1] if gone else made[-1], made[-1]]
        made += run.op("f", inputs, bytes=[4, 2], cost_ns=3 + i % 5, aliases=[-1, 0])
        done.append(inputs)
        if i % 3 == 0:
            done.append(made.pop(1))
            run.release(done[-1])
    return done


@pytest.mark.parametrize("heuristic", ["DTR", "DTREqClass", "LRU", lru])
def test_a_program_run_by_steps_is_the_program(heuristic):
    run = simrd.Interactive(heuristic, budget_bytes="60 B", seed=1)
    done = steps(run)
    writer = simrd.LogWriter()
    writer.constant("x", 4)
    i = 0
    for step in done:
        if isinstance(step, str):
            writer.release(step)
            continue
        results = [f"t{1 + 2 * i}", f"t{2 + 2 * i}"]
        writer.call("f", step, results, 3 + i % 5, bytes=[4, 2], aliases=[-1, 0])
        i += 1
    log = simrd.parse(writer.getvalue(), output_condition="leave")
    result = simrd.simulate(log, heuristic, budget_bytes=60, overhead_limit=math.inf, seed=1)
    assert run.status == result.status == "ok"
    assert run.n_remat == result.n_remat > 0
    figures = ["clock", "max_memory", "model_compute", "remat_compute", "n_evict", "n_model_ops"]
    for name in [*figures, "n_eval"]:
        assert getattr(run, name) == getattr(result, name), name
    assert run.failure is None
    assert run.memory <= 60
    assert run.locked.bytes == 4


def test_steps_end_with_a_failure():
    run = simrd.Interactive("DTR", budget_bytes=8)
    run.constant("x", 4)
    (y,) = run.op("f", ["x"], bytes=[4], cost_ns=10)
    run.op("g", [y], bytes=[4], cost_ns=10)
    assert run.status == "oom"
    assert run.failure.kind == "oom"
    assert (run.failure.needed_bytes, run.failure.memory_bytes, run.locked.bytes) == (4, 8, 8)
    for step in (
        lambda: run.op("g", [y], bytes=[4], cost_ns=10),
        lambda: run.constant("c", 4),
        lambda: run.release(y),
    ):
        with pytest.raises(RuntimeError, match="has ended, its status is 'oom'"):
            step()


def test_steps_thrash():
    run = simrd.Interactive("LRU", budget_bytes=13, remat_limit_ns=5)
    run.constant("x", 4)
    (y,) = run.op("f", ["x"], bytes=[4], cost_ns=10)
    (z,) = run.op("g", ["x"], bytes=[4], cost_ns=10)
    run.op("h", [z], bytes=[4], cost_ns=10)
    run.op("h", [y], bytes=[1], cost_ns=10)
    assert (run.status, run.remat_compute) == ("thrash", 10)


def test_wrong_steps_change_nothing():
    run = simrd.Interactive("DTR", budget_bytes=None)
    run.constant("x", 4)
    for error, message, step in [
        (KeyError, "y", lambda: run.op("f", ["y"], bytes=[4], cost_ns=1)),
        (KeyError, "y", lambda: run.release("y")),
        (KeyError, "y", lambda: run.is_defined("y")),
        (ValueError, r"bytes\[0\] = -4", lambda: run.op("f", ["x"], bytes=[-4], cost_ns=1)),
        (ValueError, "cost_ns = -1", lambda: run.op("f", ["x"], bytes=[4], cost_ns=-1)),
        (TypeError, "cost_ns must be", lambda: run.op("f", ["x"], bytes=[4], cost_ns=1.5)),
        (
            ValueError,
            r"aliases\[0\] = 1",
            lambda: run.op("f", ["x"], bytes=[4], cost_ns=1, aliases=[1]),
        ),
        (
            ValueError,
            "aliases has 2 entries, expected 1",
            lambda: run.op("f", ["x"], bytes=[4], cost_ns=1, aliases=[-1, -1]),
        ),
        (ValueError, "tensor named 'x' exists already", lambda: run.constant("x", 4)),
        (ValueError, "bytes = -1", lambda: run.constant("c", -1)),
    ]:
        with pytest.raises(error, match=message):
            step()
    run.release("x")
    with pytest.raises(ValueError, match="'x' was released before"):
        run.release("x")
    assert (run.n_model_ops, run.memory, run.status) == (1, 4, "ok")
    assert run.op("f", ["x"], bytes=[4, 4], cost_ns=1) == ["t1", "t2"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes = 0"),
        ({"budget_bytes": 9, "remat_limit_ns": -1}, "remat_limit_ns = -1"),
        ({"budget_bytes": 9, "remat_limit_ns": math.nan}, "remat_limit_ns = nan"),
        ({"budget_bytes": 9, "heuristic": "none"}, "no heuristic is named"),
        ({"budget_bytes": 9, "runtime": "V1"}, "'DTREqClass' needs classes"),
    ],
)
def test_steps_check_their_setting(setting, message):
    with pytest.raises(ValueError, match=message):
        simrd.Interactive(**setting)
