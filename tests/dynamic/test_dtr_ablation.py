"""Every way in which the tables of the dynamic runtime run a program, on a tiny one."""

from __future__ import annotations

import copy
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from dynamic_cases import Plain, step

from rotor import dtr
from rotor.errors import MemoryLimitWarning

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dtr_ablation
import dtr_cases
import dtr_table


@cache
def plain(name: str) -> Plain:
    found = dtr_cases.PROGRAMS[name].plain(True)
    # What operators take is known afterwards.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryLimitWarning)
        found.under(int(found.peak_bytes * 0.7), strict=False)
    return found


@pytest.mark.parametrize("variant", dtr_ablation.VARIANTS, ids=lambda variant: variant.label)
def test_a_program_without_a_mechanism_leaves_the_same(variant):
    program = plain("gpt")
    limit = int(program.peak_bytes * 0.7)
    ran = dtr_ablation.run(program, limit, variant, 60.0, is_metered=True)
    assert ran.is_equal
    assert ran.stats.evictions > 0
    assert ran.peak_bytes > 0
    assert 0 < ran.seconds < 60


def test_what_is_not_made_room_for_beforehand_goes_beyond_the_budget():
    """Which is what shows that the switches do something."""
    program = plain("resnet")
    limit = int(program.peak_bytes * 0.6)
    variants = {variant.label: variant for variant in dtr_ablation.VARIANTS}

    def peak(label: str) -> int:
        return dtr_ablation.run(program, limit, variants[label], 60.0, is_metered=True).peak_bytes

    assert peak("everything") <= limit
    assert peak("no room for workspaces") > limit
    assert peak("room made afterwards") > limit


def test_kept_values_are_evicted_instead_of_freed():
    program = plain("gpt")
    limit = int(program.peak_bytes * 0.7)
    variants = {variant.label: variant for variant in dtr_ablation.VARIANTS}
    dropped, kept = (
        dtr_ablation.run(program, limit, variants[label], 60.0).stats
        for label in ("operators handled in Python", "the same, dropped values kept")
    )
    assert kept.evictions > 2 * dropped.evictions


def test_a_step_that_takes_too_long_is_ended():
    program = plain("gpt")
    with pytest.raises(dtr_ablation.TooSlow):
        dtr_ablation.run(program, 10**9, dtr_ablation.VARIANTS[0], 0.001)


def test_on_cuda_wall_time_ends_a_step():
    program = plain("gpt")
    model = copy.deepcopy(program.model)

    def steps() -> None:
        with dtr_ablation._at_most(0.001, torch.device("cuda")), dtr.budget(10**9):
            step(model, program.loss)

    with pytest.raises(dtr_ablation.TooSlow):
        steps()


@pytest.mark.parametrize("name", [n for n, p in dtr_cases.PROGRAMS.items() if p.contenders])
def test_checkpoints_by_hand_need_less_memory(name):
    program = plain(name)
    peaks = []
    for contender in dtr_cases.PROGRAMS[name].contenders:
        peak, equal = dtr_cases.metered(program, contender.wrap)
        peaks.append(peak)
        # The statistics of batch normalisations are updated once more.
        assert equal == ("buffers NO" if list(program.model.buffers()) else "yes")
    assert peaks[0] < program.peak_bytes


def test_a_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(dtr_table, "ROUNDS", 1)
    monkeypatch.setattr(dtr_table, "SHARES", (0.8,))
    monkeypatch.setattr(dtr_table, "runs", lambda plain, share, times=1: share >= 0.7)
    monkeypatch.setattr(sys, "argv", ["dtr_table.py", "--tiny", "gpt"])
    dtr_table.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["share", "budget", "kB", "peak/budget", "time", "again", "equal"]
    labels = [line[:26].strip() for line in lines[2:]]
    shares = ["budget", "budget", "budget, least"]
    assert labels == [*shares, *["every block", "budget of this peak"],
                      *["every other block", "budget of this peak"]]  # fmt: skip
    assert all(float(line.split()[-4]) <= 1 for line in lines[2:5])
    with pytest.raises(SystemExit, match="no program is named 'x': resnet, gpt"):
        dtr_cases.parse_names(["x"], [])
