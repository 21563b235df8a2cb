"""Models spread over processes by PyTorch: equal to plain, within a limit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from layouts import LAYOUTS
from two_processes import run_processes

WORKER = Path(__file__).with_name("layout_worker.py")
SECONDS = 500
QUICK = ["tp@0.5@added", "tp_chain@0.62", "experts@0.75", "fsdp_pairs@0.62", "tp_dynamic@0.62"]
LEAST = ["tp", "tp_chain", "sp", "gather", "experts"]
SLOW = [case for name in LAYOUTS if (case := f"{name}@0.62") not in QUICK]
SLOW += [f"{name}@least" for name in LEAST]
SLOW += [f"{name}@0.62@shapes" for name in ("tp", "tp_chain", "gather", "tp_dynamic")]
SLOW += [f"{name}@0.62@added" for name in ("sp", "tp_chain", "gather_sequential")]
GROUPS = {
    (is_slow, count): [c for c in cases if LAYOUTS[c.partition("@")[0]].processes == count]
    for is_slow, cases in ((False, QUICK), (True, SLOW))
    for count in (2, 4)
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    @cache
    def run(group):
        folder = tmp_path_factory.mktemp("layouts")
        names = GROUPS[group]
        return run_processes(str(WORKER), folder, SECONDS, names=names, count=group[1])

    return run


@pytest.mark.parametrize(
    ("group", "case"),
    [
        pytest.param(group, case, marks=[pytest.mark.slow] * group[0])
        for group, cases in GROUPS.items()
        for case in cases
    ],
)
def test_layout(found, group, case):
    assert [rank[case] for rank in found(group)] == [[]] * group[1]
