"""Loops as people write them: one or two lines more, equal losses, and a peak within the limit."""

from __future__ import annotations

import importlib.util

import framework_loops
import pytest
import torch
from loops import CASES, Case, Loop

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:UserWarning"),
    # PyTorch's capture of a block asks an inner result for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor.*:UserWarning"),
    # The first step of a model with an unknown loss, or of two at a time, may say so.
    pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning"),
]


def marked(one: Case):
    marks = [pytest.mark.slow] if one.is_slow else []
    return pytest.param(one, id=one.function.__name__, marks=marks)


@pytest.mark.parametrize("one", [marked(one) for one in CASES])
def test_a_loop_trains_the_same_within_a_limit(one: Case):
    missing = [name for name in one.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    plain = one.run()
    limit = int(one.share * max(plain.peaks))
    ours = one.run(limit)

    assert 1 <= one.lines <= 2
    assert len(ours.losses) == len(plain.losses) >= 3
    assert ours.losses == pytest.approx(plain.losses, rel=one.tolerance, abs=0)
    if not one.tolerance:
        pairs = zip(ours.parameters, plain.parameters, strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
    peaks = [p.measured_bytes for p in ours.plans if p.measured_bytes is not None]
    assert peaks + ours.peaks
    assert max(peaks + ours.peaks) <= limit < max(plain.peaks)


def test_there_are_loops_of_all_kinds():
    assert len(CASES) >= 20
    assert framework_loops.lightning in [one.function for one in CASES]
    assert len({one.name for one in CASES}) == len(CASES)


def test_a_run_records_its_steps():
    loop = Loop()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    loop.train(model, optimizer, lambda number: (torch.ones(2, 4),), lambda x: model(x).sum())
    assert len(loop.losses) == len(loop.seconds) == len(loop.peaks) == loop.steps
