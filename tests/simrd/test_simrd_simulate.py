"""simulate(): settings, figures by hand, failures, telemetry, JSON, CSV."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from simrd_programs import diamond, evictions, program, programs

from rotor import _core, simrd
from rotor.simrd import heuristics, runtimes
from rotor.simrd.results import EVENT_KINDS

PUBLISHED = ["DTR", "DTREqClass", "DTRLocal", "DTRUnopt", "MSPS", "LRU", "LargestStorage"]
INCREMENTAL = ["V2", "V2Eager", "V2Optimized", "V2EagerOptimized", "no_dealloc"]


@pytest.fixture(scope="module")
def logs() -> list[simrd.Log]:
    return programs(12)


@pytest.fixture(scope="module")
def plain_logs() -> list[simrd.Log]:
    return programs(12, aliases=False)


@pytest.fixture(scope="module")
def many() -> list[simrd.Log]:
    return programs(150)


# -- figures


def test_baseline_by_hand():
    found = simrd.baseline(diamond(releases=False))
    assert found == simrd.Baseline(
        compute_ns=72, max_memory=24, const_memory=4, bottleneck_memory=12, n_ops=6
    )


def test_figures_by_hand():
    result = simrd.simulate(diamond(), "LRU", budget_bytes=16, overhead_limit=2)
    assert result.status == "ok"
    assert result.failure is None
    assert (result.clock, result.model_compute, result.remat_compute) == (93, 72, 20)
    assert (result.base_compute, result.slowdown, result.overhead) == (72, 92 / 72, 93 / 72)
    assert (result.n_evict, result.n_remat, result.n_model_ops, result.n_eval) == (5, 1, 6, 3)
    assert (result.max_memory, result.const_memory, result.bottleneck_memory) == (16, 4, 12)
    assert (result.budget, result.ratio, result.n_access) == (16, None, None)
    assert (result.heuristic, result.runtime, result.no_dealloc) == (
        "LRU",
        "V2EagerOptimized",
        False,
    )
    assert result.memory_bytes > 0
    assert (result.storages, result.operations, result.events) == (None, None, None)


def test_without_a_budget_nothing_is_rematerialized(logs):
    for log in logs:
        result = simrd.simulate(log, runtime="V1", heuristic="LRU")
        assert (result.status, result.n_remat, result.budget) == ("ok", 0, None)
        assert result.slowdown == 1
        assert result.clock == 1 + log.baseline.compute_ns
        assert result.max_memory == log.baseline.max_memory


def test_ratio_and_budgets_in_words():
    log = diamond()
    most = log.baseline.max_memory
    by_ratio = simrd.simulate(log, "DTR", ratio=0.75)
    assert (by_ratio.ratio, by_ratio.budget) == (0.75, int(most * 0.75))
    by_bytes = simrd.simulate(log, "DTR", budget_bytes=f"{by_ratio.budget} B")
    assert replace(by_bytes, ratio=0.75) == by_ratio


def test_what_parse_takes_is_taken(tmp_path):
    text = program(3)
    path = tmp_path / "program.log"
    path.write_bytes(text)
    log = simrd.parse(text)
    for source in (text, path, str(path)):
        assert simrd.simulate(source, ratio=0.7).clock == simrd.simulate(log, ratio=0.7).clock
        assert simrd.baseline(source) == log.baseline


def test_releases_may_be_ignored(logs):
    different = 0
    for log in logs:
        plain, named, flag = (
            simrd.simulate(log, "DTRLocal", ratio=0.8, **setting)
            for setting in (
                {"runtime": "V2Optimized"},
                {"runtime": "NoDealloc"},
                {"runtime": "V2Optimized", "no_dealloc": True},
            )
        )
        assert (named.runtime, named.no_dealloc, plain.no_dealloc) == ("no_dealloc", True, False)
        assert replace(named, runtime="V2Optimized", memory_bytes=0) == replace(
            flag, memory_bytes=0
        )
        eager = simrd.simulate(log, "DTRLocal", ratio=0.8, no_dealloc=True)
        different += eager.clock != simrd.simulate(log, "DTRLocal", ratio=0.8).clock
    assert different > 0


@pytest.mark.parametrize(
    ("optimized", "plain"), [("V2Optimized", "V2"), ("RuntimeV2EagerOptimized", "V2Eager")]
)
def test_optimized_runtimes_decide_as_the_plain_ones(logs, optimized, plain):
    for log in logs:
        one, two = (
            simrd.simulate(log, "DTR", ratio=0.7, runtime=name) for name in (optimized, plain)
        )
        assert one == replace(two, runtime=optimized.removeprefix("Runtime"))


# -- settings


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"ratio": 0.5, "budget_bytes": 10}, ValueError, "give one of them"),
        ({"ratio": 0}, ValueError, "ratio = 0; expected a number above 0"),
        ({"ratio": -0.5}, ValueError, "ratio = -0.5"),
        ({"ratio": math.nan}, ValueError, "ratio is NaN"),
        ({"ratio": math.inf}, ValueError, "ratio = inf"),
        ({"ratio": True}, TypeError, "ratio must be a number, got True"),
        ({"ratio": "0.5"}, TypeError, "ratio must be a number, got '0.5'"),
        ({"ratio": 0.01}, ValueError, "leaves no byte"),
        ({"ratio": 1e30}, ValueError, "is more than"),
        ({"budget_bytes": 0}, ValueError, "budget_bytes = 0"),
        ({"budget_bytes": -1}, ValueError, "budget_bytes = -1"),
        ({"budget_bytes": True}, TypeError, "budget_bytes must be a number or text"),
        ({"budget_bytes": math.nan}, ValueError, "budget_bytes = nan"),
        ({"budget_bytes": "9 bananas"}, ValueError, "cannot be read"),
        ({"overhead_limit": 1}, ValueError, "overhead_limit = 1; expected a number above 1"),
        ({"overhead_limit": 0.5}, ValueError, "overhead_limit = 0.5"),
        ({"overhead_limit": math.nan}, ValueError, "overhead_limit is NaN"),
        ({"overhead_limit": "2"}, TypeError, "overhead_limit must be a number"),
        ({"overhead_limit": True}, TypeError, "overhead_limit must be a number"),
        ({"heuristic": "dtr"}, ValueError, "no heuristic is named 'dtr', expected one of DTR, "),
        ({"heuristic": 7}, TypeError, "heuristic must be a name or a function"),
        ({"runtime": "V3"}, ValueError, "no runtime is named 'V3', expected one of V1, V2, "),
        ({"runtime": None}, ValueError, "no runtime is named None"),
        ({"runtime": "V1"}, ValueError, "'DTREqClass' needs classes .* 'V1' .* serves DTRLocal"),
        ({"runtime": "V1", "heuristic": "DTR"}, ValueError, "'DTR' needs regions"),
        ({"runtime": "V1", "heuristic": "MSPS"}, ValueError, "'MSPS' needs regions"),
        ({"runtime": "V1", "heuristic": "AbEqSize"}, ValueError, "needs classes"),
        ({"seed": -1}, ValueError, "seed = -1"),
        ({"seed": 1 << 64}, ValueError, "seed = "),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"rebuild_classes_every": -1}, ValueError, "rebuild_classes_every = -1"),
        ({"rebuild_classes_every": True}, TypeError, "rebuild_classes_every must be a whole"),
        ({"sample": 1}, TypeError, "sample must be True or False"),
        ({"trace": "yes"}, TypeError, "trace must be True or False"),
        ({"progress": "yes"}, TypeError, "progress must be True or False"),
        ({"max_events": 0}, ValueError, "max_events = 0"),
    ],
)
def test_settings_out_of_range(setting, error, message):
    with pytest.raises(error, match=message):
        simrd.simulate(diamond(), **setting)


def test_a_log_without_memory_has_no_ratio():
    writer = simrd.LogWriter()
    writer.call("f", [], ["y"], 5, bytes=[0], aliases=[-1])
    log = simrd.parse(writer.getvalue())
    assert simrd.simulate(log, "DTR").slowdown == 1
    with pytest.raises(ValueError, match="leaves no byte"):
        simrd.simulate(log, "DTR", ratio=1.0)


def test_tensors_are_not_read_after_they_are_freed_for_good():
    writer = simrd.LogWriter()
    writer.call("f", [], ["y"], 5, bytes=[4], aliases=[-1])
    writer.release("y")
    writer.call("g", ["y"], ["z"], 5, bytes=[4], aliases=[-1])
    log = simrd.parse(writer.getvalue())
    with pytest.raises(ValueError, match="freed for good: command 2, of g"):
        simrd.baseline(log)
    with pytest.raises(ValueError, match="freed for good: command 2, of g"):
        simrd.simulate(log, "DTR")


def test_a_log_has_to_be_finished():
    core = _core.Log(True)
    core.feed(program(1))
    options = {"name": "half", "cut_at_start": True, "output_condition": "leave"}
    with pytest.raises(ValueError, match="the log 'half' was not read to its end"):
        simrd.simulate(simrd.Log(core, b"", 0, **options))


def test_traces_are_bounded():
    with pytest.raises(MemoryError, match=r"max_events = 3 events, at command .* of .*; raise"):
        simrd.simulate(diamond(), trace=True, max_events=3)


def test_registries():
    assert heuristics.names()[:2] == ["DTR", "DTREqClass"]
    assert set(PUBLISHED) | {"RandomStorage"} <= set(heuristics.names())
    ablation = {
        f"Ab{numerator}{size}{stale}"
        for numerator in ("E", "Eq", "Local", "")
        for size in ("Size", "")
        for stale in ("Stale", "")
    }
    ablation = ablation - {"Ab"} | {"AbRandom"}
    assert ablation <= set(heuristics.names())
    assert len(heuristics.names()) == 25
    assert heuristics.get("DTREqClass").needs == {"classes"}
    assert heuristics.get("MSPS").needs == heuristics.get("AbESize").needs == {"regions"}
    assert heuristics.get("DTRUnopt").needs == frozenset()
    assert [n for n in heuristics.names() if heuristics.get(n).is_random] == [
        "RandomStorage",
        "AbRandom",
    ]
    assert heuristics.get("AbLocalSize").description == "c / (size)"
    assert heuristics.get("AbSizeStale").description == "1 / (size * stale)"
    assert all(heuristics.get(name).description for name in heuristics.names())
    assert runtimes.get("RuntimeV2").name == "V2"
    assert [runtimes.get(name).name for name in runtimes.names()] == runtimes.names()
    with pytest.raises(ValueError, match="no heuristic is named"):
        heuristics.get("nothing")


@pytest.mark.parametrize("name", [n for n in heuristics.names() if n not in PUBLISHED])
def test_every_heuristic_runs(logs, name):
    for log in logs[:3]:
        assert simrd.simulate(log, name, ratio=0.9, overhead_limit=math.inf).n_evict > 0


def test_combinations_are_their_published_namesakes(logs):
    pairs = {"AbESizeStale": "DTR", "AbEqSizeStale": "DTREqClass", "AbLocalSizeStale": "DTRLocal"}
    for log in logs:
        for one, two in pairs.items():
            results = [simrd.simulate(log, name, ratio=0.7, trace=True) for name in (one, two)]
            assert evictions(results[0]) == evictions(results[1])
            assert results[0] == replace(results[1], heuristic=one)


def test_seeds(logs):
    clocks = []
    for seed in (0, 1, 2, (1 << 64) - 1):
        one, two = (simrd.simulate(logs[0], "RandomStorage", ratio=0.7, seed=seed) for _ in "ab")
        assert one == two
        clocks.append((one.clock, one.n_evict))
    assert len(set(clocks)) > 1
    sampled = [simrd.simulate(logs[1], "DTR", ratio=0.7, seed=3, sample=True) for _ in "ab"]
    assert sampled[0] == sampled[1]


def test_sampling_looks_at_fewer(logs):
    for log in logs[:4]:
        full = simrd.simulate(log, "LargestStorage", ratio=0.9, overhead_limit=math.inf)
        few = simrd.simulate(log, "LargestStorage", ratio=0.9, sample=True, overhead_limit=math.inf)
        assert few.n_eval / few.n_evict < full.n_eval / full.n_evict


def test_small_storages_may_be_left_alone():
    writer = simrd.LogWriter()
    for i in range(20):
        size = 1 if i % 2 else 1000
        writer.call("f", [], [f"t{i}"], 5, bytes=[size], aliases=[-1])
    log = simrd.parse(writer.getvalue(), output_condition="leave")
    sizes = np.array([1000, 1] * 10)
    plain, ignoring = (
        simrd.simulate(log, "LRU", budget_bytes=3100, ignore_small=flag, trace=True)
        for flag in (False, True)
    )
    assert {sizes[i] for _, i in evictions(plain)} == {1, 1000}
    assert {sizes[i] for _, i in evictions(ignoring)} == {1000}


def test_exact_classes(plain_logs):
    different = 0
    for log in plain_logs:
        exact = simrd.simulate(log, "DTREqClass", ratio=0.6, rebuild_classes_every=1, trace=True)
        phantom = simrd.simulate(log, "DTREqClass", ratio=0.6, trace=True)
        assert exact.rebuild_classes_every == 1
        different += evictions(exact) != evictions(phantom)
    assert different > 0


def test_accesses_are_counted_on_request(logs):
    for name in ("DTR", "DTREqClass", "DTRLocal"):
        counted = simrd.simulate(logs[0], name, ratio=0.7, count_accesses=True)
        assert counted.n_access >= counted.n_eval > 0
        assert simrd.simulate(logs[0], name, ratio=0.7).n_access is None


@pytest.mark.parametrize("name", ["DTR", "AbE", "MSPS", "DTREqClass", "AbEq"])
def test_counting_accesses_changes_no_decision(many, name):
    for log in many:
        for ratio in (0.5, 0.8):
            counted, plain = (
                simrd.simulate(log, name, ratio=ratio, trace=True, count_accesses=counts)
                for counts in (True, False)
            )
            assert evictions(counted) == evictions(plain)


# -- failures


def test_out_of_memory_by_hand():
    result = simrd.simulate(diamond(), "LRU", budget_bytes=12)
    failure = result.failure
    assert result.status == failure.kind == "oom"
    assert failure.operation.startswith("k")
    assert (failure.tensor, failure.needed_bytes, failure.memory_bytes) == ("v", 4, 12)
    assert (failure.command, failure.clock) == (failure.locked.command, 71)
    assert failure.locked.bytes == 12
    assert sorted(s.name for s in failure.locked.storages) == ["w", "x", "y"]
    assert result.largest_locked().bytes == result.max_locked_bytes == 12
    text = result.describe()
    assert "out of memory at command" in text
    assert "(making v) needs 4 B beside 12 B" in text
    assert "3 storages of 12 B in all" in text


def test_thrash_by_hand():
    result = simrd.simulate(diamond(), "LRU", budget_bytes=16, overhead_limit=1.2)
    assert (result.status, result.clock, result.remat_compute) == ("thrash", 86, 20)
    assert result.failure.kind == "thrash"
    assert result.failure.tensor == "z"
    assert "rematerializations passed their limit" in result.describe()
    assert simrd.simulate(diamond(), "LRU", budget_bytes=16, overhead_limit=1.3).status == "ok"


@pytest.mark.parametrize("runtime", ["V1", *INCREMENTAL])
def test_the_largest_locked_set_is_as_large_as_the_run_says(logs, runtime):
    seen = set()
    for log in logs:
        for ratio in (0.3, 0.5, 0.9):
            result = simrd.simulate(log, "DTRLocal", ratio=ratio, runtime=runtime)
            found = result.largest_locked()
            sizes = [storage.bytes for storage in found.storages]
            assert sizes == sorted(sizes, reverse=True)
            assert found.bytes == sum(sizes) == result.max_locked_bytes
            assert found.count == len(sizes)
            assert found.execution == result.max_locked_execution
            seen.add(result.status)
            if result.failure is not None:
                assert result.failure.locked.bytes <= result.budget
                assert result.failure.describe() in result.describe()
    assert seen == {"ok", "oom", "thrash"} or runtime == "V1"


def test_descriptions(logs):
    text = simrd.simulate(logs[0], "DTR", ratio=0.9, no_dealloc=True).describe()
    assert "DTR on V2EagerOptimized, releases ignored, budget" in text
    assert "(0.9 of the baseline)" in text
    assert "no budget: ok" in simrd.simulate(logs[0], "DTR").describe()


# -- telemetry


@pytest.mark.parametrize("runtime", ["V1", *INCREMENTAL])
def test_telemetry_adds_up(logs, runtime):
    for log in logs:
        for ratio in (None, 0.8, 0.4):
            result = simrd.simulate(
                log, "DTRLocal", ratio=ratio, runtime=runtime, stats=True, trace=True
            )
            plain = simrd.simulate(log, "DTRLocal", ratio=ratio, runtime=runtime)
            assert replace(result, memory_bytes=0) == replace(plain, memory_bytes=0)
            check_stats(result)
            check_events(log, result)


def check_stats(result: simrd.Result) -> None:
    storages, operations = result.storages, result.operations
    assert operations["executions"].sum() == result.n_remat + result.n_model_ops
    assert operations["executions_by_model"].sum() == result.n_model_ops
    assert set(operations["executions_by_model"].tolist()) <= {0, 1}
    assert storages["evicted"].sum() == result.n_evict
    present = storages["materialized"] - storages["evicted"]
    assert set(present.tolist()) <= {0, 1}
    never = storages["materialized"] == 0
    assert (storages["first_clock"][never] == -1).all()
    assert (storages["first_clock"][~never] >= 1).all()
    assert (storages["last_clock"] <= result.clock).all()
    assert (storages["resident_ns"] >= 0).all()
    assert (storages["resident_ns"] <= result.clock).all()


def check_events(log: simrd.Log, result: simrd.Result) -> None:
    events = result.events
    kinds = {name: events[events["kind"] == i] for i, name in enumerate(EVENT_KINDS)}
    assert (np.diff(events["clock"]) >= 0).all()
    assert len(kinds["compute"]) == result.n_remat + result.n_model_ops
    assert len(kinds["evict"]) == result.n_evict
    assert len(kinds["pending"]) >= len(kinds["compute"])
    if result.runtime == "V1":
        assert len(kinds["lock"]) >= len(kinds["unlock"])
    elif result.status == "ok":
        assert len(kinds["lock"]) == len(kinds["unlock"])
        assert len(kinds["banish"]) == 0
    clock, memory = result.timeline()
    assert (np.diff(clock) >= 0).all()
    assert memory.max() == result.max_memory
    assert (memory >= 0).all()
    if result.budget is not None:
        assert memory.max() <= result.budget
        assert all(kinds["pressure"]["bytes"] > 0)
    else:
        assert len(kinds["pressure"]) == 0
    gone = np.bincount(kinds["evict"]["index"], minlength=len(result.storages))
    assert gone.tolist() == result.storages["evicted"].tolist()


def test_resident_time_by_hand():
    result = simrd.simulate(diamond(), "LRU", budget_bytes=16, stats=True, trace=True)
    assert result.storages["materialized"].tolist() == [1, 1, 2, 1, 1, 1]
    assert result.storages["evicted"].tolist() == [0, 1, 2, 1, 1, 0]
    assert result.storages["first_clock"].tolist() == [1, 11, 31, 61, 66, 93]
    assert result.operations["executions"].tolist() == [1, 1, 2, 1, 1, 1]
    assert result.storages["resident_ns"][1:5].tolist() == [75, 37, 5, 27]


def test_a_recomputed_sibling_counts_in_the_peak():
    writer = simrd.LogWriter()
    writer.call("split", [], ["a", "b"], 5, bytes=[10, 20], aliases=[-1, -1])
    writer.call("f", ["b"], ["c"], 5, bytes=[25], aliases=[-1])
    writer.release("c")
    writer.call("g", ["a"], ["d"], 5, bytes=[1], aliases=[-1])
    log = simrd.parse(writer.getvalue(), output_condition="leave")
    result = simrd.simulate(log, "LRU", budget_bytes=50, trace=True)
    assert (result.status, result.n_remat, result.max_memory) == ("ok", 1, 50)
    clock, memory = result.timeline()
    assert memory.tolist() == [30, 20, 45, 20, 50, 30, 31]
    assert clock.tolist() == [6, 6, 11, 11, 16, 16, 21]


def test_the_timeline_needs_a_trace():
    with pytest.raises(ValueError, match="trace=True"):
        simrd.simulate(diamond()).timeline()


def test_progress_is_told():
    log = simrd.parse(program(1, operations=5000))
    told = []
    result = simrd.simulate(
        log, lambda storage: storage.last_access, progress=lambda *pair: told.append(pair)
    )
    assert told
    assert all(0 <= done <= total == log.command_count for done, total in told)
    with_a_bar = simrd.simulate(log, "LRU", progress=True)
    figures = replace(with_a_bar, heuristic="<lambda>", memory_bytes=result.memory_bytes)
    assert figures == result


# -- JSON, CSV, pickles


@pytest.mark.parametrize(
    "setting",
    [
        {"budget_bytes": 16},
        {"budget_bytes": 12},
        {"ratio": 0.8, "overhead_limit": math.inf, "count_accesses": True},
        {"budget_bytes": 16, "overhead_limit": 1.2},
        {"trace": True, "stats": True},
    ],
)
def test_json(tmp_path, setting):
    result = simrd.simulate(diamond(), "LRU", **setting)
    path = tmp_path / "result.json"
    text = result.to_json(path)
    for loaded in (simrd.Result.from_json(path), simrd.Result.from_json(text)):
        assert loaded == result
        assert loaded.slowdown == result.slowdown
        assert loaded.events is None
        assert loaded.describe() == result.describe()
        with pytest.raises(ValueError, match="without its log"):
            loaded.largest_locked()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "rotor.chain"}, "expected JSON of format 'rotor.simulation'"),
        ({"version": 2}, "version 2 is unknown"),
        ({"clock": None}, "clock of a simulation is None, expected int"),
        ({"clock": True}, "clock of a simulation is True, expected int"),
        ({"status": "fine"}, "status is 'fine'"),
        ({"status": "oom"}, "a failure goes with a status other than ok"),
        ({"speed": 1}, "has no field 'speed'"),
        ({"failure": {"kind": "oom"}, "status": "oom"}, "a failure needs the field 'operation'"),
        ({"sample": 1}, "sample of a simulation is 1, expected bool"),
    ],
)
def test_json_is_read_strictly(change, message):
    data = simrd.simulate(diamond(), "LRU", budget_bytes=16).to_dict()
    with pytest.raises(ValueError, match=message):
        simrd.Result.from_dict({**data, **change})
    if set(change) <= set(data):
        for name in change:
            data.pop(name)
        with pytest.raises(ValueError, match=r"missing|got None|None is unknown"):
            simrd.Result.from_dict(data)


def test_json_of_failures_is_read_strictly():
    data = simrd.simulate(diamond(), "LRU", budget_bytes=12).to_dict()
    storages = data["failure"]["locked"]["storages"]
    for wrong in ([*storages, 7], [{**storages[0], "bytes": "4"}], [{"name": "x"}]):
        locked = {**data["failure"]["locked"], "storages": wrong}
        with pytest.raises(ValueError, match="a locked storage"):
            simrd.Result.from_dict({**data, "failure": {**data["failure"], "locked": locked}})


def test_csv(tmp_path):
    results = [
        simrd.simulate(diamond(), name, budget_bytes=budget)
        for name in ("LRU", "DTR")
        for budget in (12, 16)
    ]
    path = tmp_path / "results.csv"
    simrd.results_to_csv(results, path)
    rows = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert rows["heuristic"].tolist() == ["LRU", "LRU", "DTR", "DTR"]
    assert rows["clock"].tolist() == [result.clock for result in results]
    assert rows["status"].tolist() == [result.status for result in results]
    assert rows["slowdown"].tolist() == [result.slowdown for result in results]
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_results_travel_between_processes():
    result = simrd.simulate(diamond(), "LRU", budget_bytes=12, trace=True)
    there = pickle.loads(pickle.dumps(result))
    assert there == result
    assert (there.events == result.events).all()
    with pytest.raises(ValueError, match="without its log"):
        there.largest_locked()
