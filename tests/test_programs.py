"""Programs at random under every engine: equal and within, warned, or refused in words."""

from __future__ import annotations

import pytest
import torch
from zoo.cases import ZOO
from zoo.judge import judge, train_plain
from zoo.programs import HABITS, Program

FAILED: tuple[int, ...] = ()
"""Seeds of programs that failed before."""
QUICK = {*FAILED, *range(6)}


def test_there_are_forty_habits() -> None:
    assert len(HABITS) >= 40


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "seed",
    [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in range(500)],
)
def test_a_program_is_equal_within_or_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    program = Program.of(seed)
    monkeypatch.setitem(ZOO, "program", program.case)
    cell = judge("program", program.engine, program.share, train_plain(program.case()))
    assert cell.is_good, f"{program}: {cell.outcome}: {cell.detail}"
