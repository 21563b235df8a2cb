"""One choice of engine auto: training, `plan`, `curve`, advice and `fit` name the same plan."""

import json
from pathlib import Path

import children
import choice_models
import pytest
import torch
from command_line import data_of, run

import rotor
from rotor.fit.advice import advise

pytestmark = pytest.mark.filterwarnings("ignore:no single graph")

SHORT = {"mixed", "mixed_ends", "loop", "tanhs"}
PLANNED = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.slow)
    for name in [make.__name__ for make in choice_models.PLANNED]
]
FILE = Path(choice_models.__file__).name
SHARES = {"convolutions": 0.8, "parts": 0.95}


@pytest.fixture(autouse=True)
def modelled(sim, monkeypatch):
    """Costs on the clock of the device, which follow from the bytes that kernels touch."""
    sim.set_capacity(1 << 30)
    sim.set_clock("model")
    sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    monkeypatch.chdir(children.TESTS)
    yield
    torch._dynamo.reset()


def made(name):
    torch.manual_seed(0)
    model, x = getattr(choice_models, name)()
    return model.to("sim").train(), x.to("sim")


def total(output):
    return output.sum()


def limit_of(name):
    model, x = made(name)
    wrapped = rotor.Checkpointable(model, mem_limit=1 << 29, loss_fn=total, verbosity=-1)
    wrapped(x, targets=()).backward()
    return int(SHARES.get(name, 0.55) * wrapped.plan.unlimited_bytes)


def trained(name, limit, **options):
    """The plan of a first step."""
    model, x = made(name)
    wrapped = rotor.Checkpointable(
        model, mem_limit=limit, planning="before", verbosity=-1, effort="fast", **options
    )
    output = wrapped(x, targets=()) if "loss_fn" in options else wrapped(x)
    plan = wrapped.plan
    found = plan.engine, plan.predicted_bytes
    output.sum().backward()
    return found


def named(data):
    return data["engine"], data["predicted_bytes"]


@pytest.mark.parametrize("name", PLANNED)
def test_everyone_names_the_plan_of_training(capsys, name):
    limit = limit_of(name)
    given = (f"{FILE}:{name}", "--limit", limit, "--device", "sim", "--effort", "fast")
    lossy = (*given, "--loss", "sum")
    plan = data_of(capsys, "plan", *lossy)["plan"]
    curve = data_of(capsys, "curve", *lossy, "--points", 3, "--no-plain")
    ours = trained(name, limit, loss_fn=total)
    assert ours == named(curve)
    # Parts are run before they are shown, which tells what the code between them keeps.
    assert ours[0] == plan["engine"] if ours[0] == "parts" else ours == named(plan)
    model, x = made(name)
    size = len(x)
    fit = rotor.largest_batch(
        model, x, limit, loss_fn=total, multiple_of=size, max_batch=size, points=1, effort="fast"
    )
    assert fit.engine == ours[0]
    assert ours[0] == "parts" or fit.largest.predicted_bytes == ours[1]


@pytest.mark.parametrize("name", PLANNED)
def test_advice_names_the_plan_of_training(name):
    model, x = made(name)
    advice = advise(model, (x,), {})
    assert advice.limit_bytes < advice.plain_bytes
    found = trained(name, advice.limit_bytes)
    assert found == (advice.engine, advice.predicted_bytes)


@pytest.mark.slow
def test_everyone_names_parts_of_a_model_without_a_chain(capsys):
    """What has no plan before a step runs is run by all that show it."""
    limit = limit_of("parts")
    given = (f"{FILE}:parts", "--limit", limit, "--device", "sim", "--loss", "sum")
    code, out, _ = run(capsys, "plan", *given, "--json", "--quiet")
    assert code == 0
    plan = json.loads(out)["plan"]
    model, x = made("parts")
    size = len(x)
    fit = rotor.largest_batch(
        model, x, limit, loss_fn=total, multiple_of=size, max_batch=size, points=1
    )
    assert trained("parts", limit, loss_fn=total)[0] == plan["engine"] == fit.engine == "parts"
    assert plan["measured_bytes"] <= limit
