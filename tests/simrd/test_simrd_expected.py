"""The published simulator's decisions on three logs, setting by setting."""

from __future__ import annotations

import csv
from collections import defaultdict

import pytest
from published_logs import EXPECTED, needs_decisions, path_of

from rotor import simrd

pytestmark = needs_decisions

COMPARED = [
    "clock",
    "remat_compute",
    "max_memory",
    "n_evict",
    "n_remat",
    "model_compute",
    "n_model_ops",
]
PUBLISHED = {  # operations, tensors, baseline compute ns, peak, constants, bottleneck
    "resnet32": (509, 696, 291905487, 10061179152, 35584920, 539510784),
    "unet": (399, 512, 435278292, 8415764640, 93386276, 1943076864),
    "treelstm": (6959, 7213, 120490892, 170173608, 2000800, 2160000),
}


def rows():
    if not EXPECTED.is_file():
        return []
    with EXPECTED.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["heuristic"] != "RandomStorage"]


def groups():
    found = defaultdict(list)
    for row in rows():
        found[row["log"], row["heuristic"], row["runtime"]].append(row)
    return found


GROUPS = groups()


@pytest.fixture(scope="module")
def logs():
    found = {}
    for name in PUBLISHED:
        found[name] = simrd.parse(path_of(name))
    return found


def test_all_settings_are_there():
    assert sum(len(group) for group in GROUPS.values()) == 697


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_baselines(logs, name):
    operations, tensors, compute_ns, peak, constants, bottleneck = PUBLISHED[name]
    found = simrd.baseline(logs[name])
    assert found == simrd.Baseline(compute_ns, peak, constants, bottleneck, operations)
    assert logs[name].core.tensor_count == tensors


@pytest.mark.parametrize("group", sorted(GROUPS), ids="-".join)
def test_decisions(logs, group):
    log, heuristic, runtime = group
    different = []
    for row in GROUPS[group]:
        result = simrd.simulate(
            logs[log],
            heuristic,
            ratio=float(row["ratio"]),
            runtime=runtime,
            overhead_limit=float(row["overhead_limit"]),
            no_dealloc=row["no_dealloc"] == "True",
        )
        expected = {name: int(row[name]) for name in COMPARED if row[name]}
        got = {name: getattr(result, name) for name in expected}
        assert result.budget == int(row["budget"])
        if (result.status, got) != (row["status"], expected):
            different.append((row["ratio"], row["status"], expected, result.status, got))
    assert different == []
