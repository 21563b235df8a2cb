"""Networks as logs: the linear one and its published table, the adversary's, random programs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rotor.experiments.linear import BOUNDS
from rotor.simrd import networks, simulate

# Rematerializations of the uniform linear network under the published simulator, by n.
SIZES = (16, 32, 64, 128, 256, 512)
MOST_EXTRA = 60
DTR = {
    "2 sqrt(n)": (8, 20, 49, 105, 230, 485),
    "log2(n)": (57, 83, 196, 485, 1107, 2255),
    "3 log2(n)": (4, 17, 46, 107, 295, 736),
}
PUBLISHED = {
    **{(bound, "DTR"): row for bound, row in DTR.items()},
    **{(bound, "DTREqClass"): row for bound, row in DTR.items()},
    ("2 sqrt(n)", "AbESize"): (13, 23, 74, 132, 373, 751),
    ("2 sqrt(n)", "DTRLocal"): (11, 39, 161, 594, 1982, 6825),
    ("2 sqrt(n)", "LRU"): (11, 39, 161, 594, 1982, 6825),
    ("log2(n)", "LRU"): (67, 225, 889, 3609, 14881, "thrash"),
}
ENTRIES = [
    pytest.param(
        bound,
        heuristic,
        n,
        expected,
        id=f"{bound}-{heuristic}-{n}".replace(" ", ""),
        marks=[pytest.mark.slow] if n > 128 else [],
    )
    for (bound, heuristic), row in PUBLISHED.items()
    for n, expected in zip(SIZES, row, strict=True)
]


@pytest.mark.parametrize(("bound", "heuristic", "n", "expected"), ENTRIES)
def test_the_published_table_of_the_linear_network(bound, heuristic, n, expected):
    found = simulate(
        networks.linear(n),
        heuristic,
        budget_bytes=math.ceil(BOUNDS[bound](n)),
        overhead_limit=1 + MOST_EXTRA / 2,
    )
    if expected == "thrash":
        assert found.status == "thrash"
    else:
        assert (found.status, found.n_remat) == ("ok", expected)
    assert found.remat_compute == found.n_remat


def test_the_linear_network_instruction_by_instruction():
    lines = [json.loads(line) for line in networks.linear_text(3).splitlines()]
    short = []
    for line in lines:
        if line["INSTRUCTION"] == "CALL":
            assert line["TIME"] == "1"
            short.append((*line["ARGS"], "->", *line["RESULT"]))
        elif line["INSTRUCTION"] == "RELEASE":
            short.append(("release", line["NAME"]))
        elif line["INSTRUCTION"] == "ANNOTATE":
            short.append((line["ANNOTATION"],))
        else:
            assert line.get("MEMORY", "1") == "1"
            assert line.get("ALIAS", "-1") == "-1"
    assert short == [
        ("START",),
        ("->", "f0"),
        ("f0", "->", "f1"),
        ("f1", "->", "f2"),
        ("BACKWARD",),
        ("release", "f2"),
        ("->", "b2"),
        ("release", "f1"),
        ("f0", "b2", "->", "b1"),
        ("release", "b2"),
        ("release", "f0"),
        ("b1", "->", "b0"),
        ("release", "b1"),
    ]


@pytest.mark.parametrize("n", [1, 2, 17])
def test_the_linear_network_needs_what_it_should(n):
    log = networks.linear(n)
    assert log.operation_count == log.storage_count == 2 * n
    assert log.backward_command == n
    assert log.ignored_releases == 0
    assert log.baseline.compute_ns == 2 * n
    assert log.baseline.const_memory == 0
    free = simulate(log, "DTR")
    assert (free.n_remat, free.clock) == (0, 2 * n + 1)


def test_linear_networks_have_operations():
    with pytest.raises(ValueError, match="n >= 1"):
        networks.linear(0)


@pytest.mark.parametrize("heuristic", ["DTR", "DTREqClass", "DTRLocal", "LRU", "MSPS"])
@pytest.mark.parametrize(("nodes", "paths"), [(5, 3), (60, 3), (100, 5), (128, 8)])
def test_the_adversary_makes_a_heuristic_pay(heuristic, nodes, paths):
    found = networks.adversarial(nodes, paths, heuristic)
    assert sum(found.lengths) == nodes
    assert found.static_computations == nodes
    assert found.computations >= nodes * nodes / (2 * paths)
    replayed = simulate(
        found.log, heuristic, budget_bytes=found.budget_bytes, overhead_limit=math.inf
    )
    assert replayed.status == "ok"
    assert replayed.model_compute + replayed.remat_compute == found.computations
    assert replayed.model_compute == nodes
    static = simulate(found.static_log, heuristic, budget_bytes=3, overhead_limit=math.inf)
    assert (static.status, static.n_remat, static.model_compute) == ("ok", 0, nodes)


def test_both_orders_of_the_adversary_have_the_same_operations():
    found = networks.adversarial(40, 4, "DTR")

    def edges(text: bytes) -> set[tuple[str, ...]]:
        lines = map(json.loads, text.splitlines())
        return {(*x["ARGS"], *x["RESULT"]) for x in lines if x["INSTRUCTION"] == "CALL"}

    assert edges(found.text) == edges(found.static_text)
    assert len(edges(found.text)) == 40


def test_adversarial_costs_grow_with_the_square():
    small = networks.adversarial(64, 4, "DTR").computations
    large = networks.adversarial(256, 4, "DTR").computations
    assert 14 < large / small < 18


@pytest.mark.parametrize(
    ("nodes", "paths", "heuristic", "words"),
    [(0, 4, "DTR", "at least 1 node"), (5, 2, "DTR", "at least 3 paths"), (5, 4, "x", "no heur")],
)
def test_adversarial_says_what_is_wrong(nodes, paths, heuristic, words):
    with pytest.raises(ValueError, match=words):
        networks.adversarial(nodes, paths, heuristic)


def test_random_programs_are_as_long_as_asked_for_in_a_fixed_pool():
    short = networks.random_program(2_000, seed=3, pool=16)
    long = networks.random_program(20_000, seed=3, pool=16)
    for log, wanted in ((short, 2_000), (long, 20_000)):
        assert wanted <= log.command_count < wanted + 400
        assert log.ignored_releases == 0
    assert short.baseline.max_memory == long.baseline.max_memory
    few = simulate(short, "DTREqClass", ratio=0.6, overhead_limit=math.inf)
    many = simulate(long, "DTREqClass", ratio=0.6, overhead_limit=math.inf)
    assert few.n_remat > 0
    assert many.n_remat > 5 * few.n_remat


def test_random_programs_repeat_by_seed_and_may_be_written(tmp_path):
    first = networks.random_program(500, seed=1, pool=8)
    again = networks.random_program(500, seed=1, pool=8, path=tmp_path / "program.log")
    other = networks.random_program(500, seed=2, pool=8)
    assert np.array_equal(first.operations, again.operations)
    assert np.array_equal(first.commands, again.commands)
    assert not np.array_equal(first.operations["cost_ns"], other.operations["cost_ns"])
    assert (tmp_path / "program.log").stat().st_size > 0
    assert again.path == tmp_path / "program.log"


@pytest.mark.parametrize(("commands", "pool"), [(0, 8), (10, 1)])
def test_random_programs_need_commands_and_a_pool(commands, pool):
    with pytest.raises(ValueError, match="at least"):
        networks.random_program(commands, pool=pool)
