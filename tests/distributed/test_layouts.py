"""Models spread over processes by PyTorch: equal to plain, within a limit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from layouts import LAYOUTS
from two_processes import run_processes

WORKER = Path(__file__).with_name("layout_worker.py")
SECONDS = 500
TOGETHER = 6
"""Cases of one start of the processes."""
QUICK = ["tp@0.5@added", "tp_chain@0.62", "experts@0.75", "fsdp_pairs@0.62", "tp_dynamic@0.62"]
FRAMEWORKS = [name for name in ("tp_transformers", "fsdp_accelerate") if name in LAYOUTS]
QUICK += [f"{name}@0.62" for name in ("tp_aside", "tp_flat", "tp_flat_dynamic", "sp_sequential")]
QUICK += [f"{name}@0.62" for name in FRAMEWORKS]
QUICK += [f"{name}@0.62" for name in ("own_rows", "summed_by_some", "summed_gradients")]
QUICK += [
    f"{name}@0.62" for name in ("tp_broken_by_one", "summed_broken_by_one", "tp_hooked_on_one")
]
LEAST = ["tp", "tp_chain", "sp", "gather", "experts"]
SLOW = [case for name in LAYOUTS if (case := f"{name}@0.62") not in QUICK]
SLOW += [f"{name}@least" for name in LEAST]
SLOW += [f"{name}@0.62@shapes" for name in ("tp", "tp_chain", "gather", "tp_dynamic")]
SLOW += [f"{name}@0.62@second" for name in ("tp_chain", "tp_dynamic")]
SLOW += [f"{name}@0.62@added" for name in ("sp", "tp_chain", "gather_sequential")]


def groups(cases):
    """The cases by the number of their processes, a few each."""
    for count in (2, 3, 4):
        found = [c for c in cases if LAYOUTS[c.partition("@")[0]].processes == count]
        for begin in range(0, len(found), TOGETHER):
            yield count, tuple(found[begin : begin + TOGETHER])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    @cache
    def run(count, cases):
        folder = tmp_path_factory.mktemp("layouts")
        try:
            return run_processes(str(WORKER), folder, SECONDS, names=cases, count=count)
        except pytest.fail.Exception as failure:
            # Each of the cases fails by it, and none starts the processes again.
            return str(failure)

    return run


@pytest.mark.parametrize(
    ("count", "cases", "case"),
    [
        pytest.param(*group, case, marks=marks, id=case)
        for part, marks in ((QUICK, []), (SLOW, [pytest.mark.slow]))
        for group in groups(part)
        for case in group[1]
    ],
)
def test_layout(found, count, cases, case):
    ranks = found(count, cases)
    assert not isinstance(ranks, str), ranks
    assert [rank[case] for rank in ranks] == [[]] * count
