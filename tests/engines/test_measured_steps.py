"""Models without a single plan: figures come from steps that are run, within the limit."""

from __future__ import annotations

import pytest
import run_models
import torch

import rotor
from rotor.fit import batches, steps
from rotor.fit.search import largest_batch
from rotor.wrapper import metering

KINDS = [
    ("recurrent", "auto"),
    pytest.param("skipping", "auto", marks=pytest.mark.slow),
    ("loose", "auto"),
    ("skipping", "dynamic"),
]


@pytest.fixture
def metered(monkeypatch):
    """Peaks of all metered steps."""
    peaks: list[int] = []
    plain = metering.StepMeter

    def start(device, done, *others):
        def noted(step):
            peaks.append(step.peak_bytes)
            done(step)

        return plain(device, noted, *others)

    monkeypatch.setattr(metering, "StepMeter", start)
    return peaks


def step_of(model, sample, module):
    def step():
        batches.sum_of(model(sample)).backward()
        module.zero_grad()

    return step


def limited(kind: str, engine: str):
    torch.manual_seed(0)
    module, sample = getattr(run_models, kind)()
    model = rotor.Checkpointable(module, engine=engine)
    model.measure(sample)
    found = steps.LimitedSteps(
        model,
        lambda wrapped: step_of(wrapped, sample, module),
        torch.device("cpu"),
        lambda: rotor.Checkpointable(module, engine="dynamic"),
    )
    return module, sample, found


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("kind", "engine"), KINDS)
def test_curves_are_those_of_steps(kind, engine):
    module, sample, found = limited(kind, engine)
    assert not steps.has_single_plan(found.model)
    device = torch.device("cpu")
    with batches.unchanged(module, device):
        plain = batches.step_bytes(step_of(module, sample, module), device)
        ran: list[steps.RanStep] = []
        curve = steps.measured_curve(found, 1 << 28, 4, ran.append)
        # The least time of a step is that of all of it, not of the parts that are planned.
        compute = steps.seconds_of(step_of(module, sample, module), device)
        assert curve.seconds[-1] > 0.3 * compute
    assert len(ran) <= 1 + 8 + 4
    assert curve.minimum_bytes < 0.9 * plain
    assert curve.bytes[-1] <= 1.2 * plain
    assert sum(one.fits for one in ran) >= 5
    for one in ran:
        assert one.fits == (
            one.measured_bytes is not None and one.measured_bytes <= one.limit_bytes
        )


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize(("kind", "engine"), KINDS)
def test_the_largest_batch_is_found_within_the_limit(kind, engine, metered):
    torch.manual_seed(0)
    module, sample = getattr(run_models, kind)()
    limit = {"recurrent": 700_000, "skipping": 400_000, "loose": 200_000}[kind]
    found = largest_batch(module, sample, limit, engine=engine, points=1, max_batch=512)
    assert found.engine in ("parts", "dynamic")
    assert found.largest.batch >= found.plain.batch
    assert found.largest.measured_bytes <= limit
    assert metered
    # The first step of a size shows the memory of the code between the parts. An LSTM's backward
    # is one operator, whose workspace the dynamic engine does not know before it has run.
    assert kind == "recurrent" or max(metered) <= 1.05 * limit
    tried = [row.batch for row in found.table if row.runs == "rotor"]
    # 9 doublings, 9 halvings, and at most 9 more below a size that a run refuted.
    assert len(tried) <= 28
    assert found.refused is None or not found.refused.fits


def test_has_single_plan():
    model = rotor.Checkpointable(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    model.measure(torch.randn(2, 4))
    assert steps.has_single_plan(model)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_limit_below_any_step_is_refused():
    module, _, found = limited("loose", "auto")
    with (
        batches.unchanged(module, torch.device("cpu")),
        pytest.raises(
            rotor.InfeasibleError, match=r"a step does not fit in 19.5 KiB \(20000 bytes\)"
        ),
    ):
        steps.measured_curve(found, 20_000, 3)
    found.run = lambda limit, timed=True: steps.RanStep(limit, False)
    with pytest.raises(rotor.InfeasibleError, match=r"bytes\): it runs out of memory"):
        steps.measured_curve(found, 20_000, 3)
    with pytest.raises(rotor.InfeasibleError, match="a batch of 64 does not fit in"):
        largest_batch(module, torch.randn(64, 32), 20_000, multiple_of=64, points=1)
