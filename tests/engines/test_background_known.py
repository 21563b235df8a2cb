"""What earlier runs have learnt, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from background_models import Mixed, engine_of, limits, plain_losses, rows, stepped, train, wrapped

from rotor.common import cache
from rotor.engines.graph.costs import glance as glances
from rotor.engines.graph.searching import Known


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def limit():
    torch.manual_seed(0)
    return limits(Mixed(), rows())


def learnt(limit, **options):
    """The program of a model that has been trained until nothing better was looked for."""
    chk = wrapped(limit, **options)
    stepped(chk)
    train(chk, rows(), 2)
    assert chk.wait_for_planning()
    train(chk, rows(), 1, begin=2)
    assert chk.plan.planning.is_final
    return chk.program


def programs(directory: Path) -> list[Path]:
    return sorted(directory.glob("programs-*.json"))


def test_a_second_run_begins_with_the_best_program(limit, directory, monkeypatch):
    best = learnt(limit)
    assert len(programs(directory)) == 1
    monkeypatch.setattr(glances.Arguments, "of", lambda *_: pytest.fail("an operation ran"))
    chk = wrapped(limit)
    executor = stepped(chk)
    losses = plain_losses(4)
    assert train(chk, rows(), 1) == losses[:1]
    assert chk.program == best
    assert chk.plan.measured_bytes <= limit
    assert "kept on disk, final" in chk.report()
    # The reserve for the loss is the learnt one: the first metered step changes nothing.
    plan = chk.plan
    assert not plan.outdated
    assert train(chk, rows(), 3, begin=1) == losses[1:]
    assert chk.plan is plan
    assert not executor.jobs


def test_a_damaged_table_counts_as_missing(limit, directory):
    learnt(limit)
    (path,) = programs(directory)
    whole = path.read_text()
    for damage in ("", "{", whole[: len(whole) // 2], whole.replace("1", "2", 5)):
        path.write_text(damage)
        chk = wrapped(limit)
        stepped(chk)
        train(chk, rows(), 1)
        assert "estimated" in chk.report()


def test_a_program_that_is_none_is_not_run(limit, monkeypatch):
    learnt(limit)
    losses = plain_losses(1)
    load = cache.load

    def wrong(kind, environment):
        found = load(kind, environment)
        return {k: [*row[:-1], 10**6] if len(row) > 9 else row for k, row in found.items()}

    monkeypatch.setattr(cache, "load", wrong)
    chk = wrapped(limit)
    stepped(chk)
    assert train(chk, rows(), 1) == losses
    assert "estimated" in chk.report()


def test_another_model_is_another_entry(limit, directory):
    learnt(limit)
    for other in (Mixed(width=34), Mixed(blocks=6)):
        chk = wrapped(2 * limit, other)
        stepped(chk)
        train(chk, rows(), 3)
        assert "estimated" in chk.report()
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 1)
    assert "kept on disk" in chk.report()
    assert len(programs(directory)) == 3


def test_under_another_limit_a_program_is_a_beginning(limit):
    best = learnt(limit)
    lower = int(best.peak_bytes * 0.97)
    chk = wrapped(lower)
    stepped(chk)
    train(chk, rows(), 2)
    assert "repaired, a better one" in chk.report()
    assert chk.plan.measured_bytes <= lower
    higher = wrapped(int(limit * 1.02))
    stepped(higher)
    train(higher, rows(), 1)
    assert "kept on disk, a better one" in higher.report()
    assert higher.program == best


def test_under_a_limit_above_plain_pytorch_no_program_of_another_limit_runs(limit):
    learnt(limit)
    chk = wrapped(10 * limit)
    executor = stepped(chk)
    train(chk, rows(), 1)
    assert chk.plan.recomputation == 0
    assert chk.plan.planning.is_final
    assert not executor.jobs


def test_other_options_are_searched_for_again(limit):
    learnt(limit)
    chk = wrapped(limit, effort=40)
    stepped(chk)
    train(chk, rows(), 1)
    assert "kept on disk, a better one" in chk.report()


def test_a_kept_loss_never_refuses_a_plan(limit):
    learnt(limit)
    chk = wrapped(limit)
    stepped(chk)
    train(chk, rows(), 1)
    (step,) = engine_of(chk).steps.values()
    kept = Known(step.lowered, step.device)
    kept.keep(kept.programs()[0], 1 << 40)
    again = wrapped(limit)
    stepped(again)
    train(again, rows(), 2)
    assert again.plan.measured_bytes <= limit


def test_a_second_run_needs_no_glance_although_nothing_was_measured(limit, monkeypatch):
    chk = wrapped("1GiB")
    stepped(chk)
    train(chk, rows(), 3)
    monkeypatch.setattr(glances.Arguments, "of", lambda *_: pytest.fail("an operation ran"))
    chk = wrapped("1GiB")
    stepped(chk)
    train(chk, rows(), 3)
    assert "final" in chk.report()


def test_planning_before_reads_no_programs(limit, monkeypatch):
    learnt(limit)
    monkeypatch.setattr(Known, "programs", lambda _: pytest.fail("programs were read"))
    chk = wrapped(limit, planning="before")
    train(chk, rows(), 1)
    assert "searched before the step" in chk.report()
