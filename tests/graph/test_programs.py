"""Programs at random under every engine: equal and within, warned, or refused in words."""

from __future__ import annotations

import pytest
import torch
from zoo.cases import ZOO
from zoo.judge import judge, train_plain
from zoo.programs import HABITS, Program

FAILED = (0, 3, 25, 29, 41, 44, 73, 78, 79, 134, 280, 324, 365, 439, 485, 500, 653)
"""Seeds of programs that failed before."""
QUICK = {*FAILED, 1, 2, 4}


def test_there_are_forty_habits() -> None:
    assert len(HABITS) >= 40


def _marked(seed: int) -> object:
    return pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.slow])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", [*map(_marked, sorted({*range(500), *FAILED}))])
def test_a_program_is_equal_within_or_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    program = Program.of(seed)
    monkeypatch.setitem(ZOO, "program", program.case)
    cell = judge("program", program.engine, program.share, train_plain(program.case()))
    # Where the second of two backwards is refused, the first has added its gradients.
    is_second = program.loop == "retains" and cell.outcome == "refused after a change"
    assert cell.is_good or is_second, f"{program}: {cell.outcome}: {cell.detail}"
