"""The simulator against the published one in plain Python, on random programs."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from oracles import simrd as oracle
from simrd_programs import evictions, program

from rotor import simrd
from rotor.simrd import heuristics

PROGRAMS = 240
RUNTIMES = ["V1", "V2", "V2Eager", "V2Optimized", "V2EagerOptimized"]
PUBLISHED = [name for name in heuristics.names() if not heuristics.get(name).is_random]
FIGURES = [
    "status",
    "clock",
    "model_compute",
    "remat_compute",
    "max_memory",
    "n_evict",
    "n_remat",
    "n_model_ops",
    "n_eval",
    "const_memory",
    "bottleneck_memory",
]


@cache
def programs(aliases: bool) -> list[tuple[simrd.Log, oracle.Program]]:
    texts = [program(seed, aliases=aliases) for seed in range(PROGRAMS)]
    return [(simrd.parse(text), oracle.read_log(text)) for text in texts]


def random_setting(rng: random.Random, heuristic: str) -> dict[str, Any]:
    return {
        "runtime": rng.choice(RUNTIMES if not heuristics.get(heuristic).needs else RUNTIMES[1:]),
        "no_dealloc": rng.random() < 0.1,
        "ratio": rng.choice([0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        "overhead_limit": rng.choice([1.2, 2, 5]),
    }


def settings(heuristic: str, aliases: bool, every: int) -> list[tuple[int, dict[str, Any]]]:
    """(number of a program, a setting for both) for one program in `every`."""
    rng = random.Random(f"{heuristic} {aliases}")
    first = rng.randrange(every)
    return [(number, random_setting(rng, heuristic)) for number in range(first, PROGRAMS, every)]


def both(
    log: simrd.Log, plain: oracle.Program, heuristic: str, setting: dict[str, Any], **options: Any
) -> tuple[simrd.Result, oracle.Outcome]:
    result = simrd.simulate(log, heuristic, **setting, **options)
    expected = oracle.simulate(
        plain,
        heuristic,
        result.budget,
        runtime=setting["runtime"],
        remat_limit=log.baseline.compute_ns * (setting["overhead_limit"] - 1),
        no_dealloc=setting["no_dealloc"],
    )
    return result, expected


def differences(log: simrd.Log, result: simrd.Result, expected: oracle.Outcome) -> dict[str, Any]:
    found = {name: (getattr(result, name), getattr(expected, name)) for name in FIGURES}
    roots = log.storages["root"]
    gone = [int(roots[storage]) for _, storage in evictions(result)]
    both = zip(gone, expected.trace_of_evictions, strict=False)
    first = [(i, *pair) for i, pair in enumerate(both) if pair[0] != pair[1]][:1]
    changed: dict[str, Any] = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    return changed | ({"first eviction": first[0]} if first else {})


def test_baselines():
    for aliases in (False, True):
        for log, plain in programs(aliases):
            expected = oracle.baseline(plain)
            assert log.baseline == simrd.Baseline(
                compute_ns=expected.model_compute,
                max_memory=expected.max_memory,
                const_memory=expected.const_memory,
                bottleneck_memory=expected.bottleneck_memory,
                n_ops=expected.n_model_ops,
            )


@pytest.mark.parametrize("aliases", [False, True], ids=["plain", "aliases"])
@pytest.mark.parametrize("heuristic", PUBLISHED)
def test_decisions(heuristic, aliases):
    seen = set()
    for number, setting in settings(heuristic, aliases, 3 if aliases else 6):
        log, plain = programs(aliases)[number]
        result, expected = both(log, plain, heuristic, setting, trace=True)
        assert differences(log, result, expected) == {}, (number, setting)
        seen.add(result.status)
    assert seen == {"ok", "oom", "thrash"}


@pytest.mark.slow
def test_many_decisions():
    wrong = []
    for seed in range(1000, 2000):
        rng = random.Random(seed)
        text = program(seed, operations=rng.choice([20, 60, 150]), aliases=rng.random() < 0.8)
        log, plain = simrd.parse(text), oracle.read_log(text)
        for _ in range(5):
            heuristic = rng.choice(PUBLISHED)
            setting = random_setting(rng, heuristic)
            result, expected = both(log, plain, heuristic, setting, trace=True)
            if found := differences(log, result, expected):
                wrong.append((seed, heuristic, setting, found))
    assert wrong == []


@pytest.mark.parametrize("heuristic", ["DTR", "DTREqClass", "DTRLocal", "LRU", "LargestStorage"])
def test_accesses(heuristic):
    for number, setting in settings(heuristic, True, 8):
        log, plain = programs(True)[number]
        result, expected = both(log, plain, heuristic, setting, count_accesses=True)
        assert result.clock == expected.clock
        assert result.n_eval == expected.n_eval
        assert result.n_access == expected.n_access, (number, setting)
