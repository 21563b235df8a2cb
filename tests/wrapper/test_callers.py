"""Warnings at the line of the caller's code, and tracebacks without our frames."""

from __future__ import annotations

import ast
import inspect
import pydoc
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo.models import Branching

import rotor
from rotor.integrations.planned import PlannedForward

HERE = Path(__file__)
ROTOR = HERE.parents[2] / "rotor"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, fails=False):
        y = torch.tanh(self.layer(x))
        if fails:
            raise ArithmeticError("of the model")
        return y


def folder_frames(error):
    frames = traceback.extract_tb(error.__traceback__)
    return [Path(frame.filename) for frame in frames if Path(frame.filename).is_relative_to(ROTOR)]


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.parametrize("is_training", [True, False])
def test_an_error_of_the_model_shows_the_model(engine, is_training):
    model = rotor.Checkpointable(Model().train(is_training), mem_limit="1 GB", engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArithmeticError) as caught:
            model(torch.randn(2, 8), fails=True)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len(folder_frames(caught.value)) == 1
    assert any("ROTOR_FULL_TRACEBACK=1" in frame.line for frame in frames)
    assert (frames[-1].filename, frames[-1].name) == (str(HERE), "forward")


@pytest.mark.parametrize(
    "measured",
    [
        lambda x: rotor.Checkpointable(Model(), x, "1 MB"),
        lambda x: rotor.Checkpointable(Model(), x, "1 MB", engine="graph"),
        lambda x: rotor.Checkpointable(Model(), mem_limit="1 MB").measure(x),
        lambda x: rotor.Rockmate(Model(), [x], 1_000_000),
        lambda x: rotor.graph.build(Model(), x),
    ],
)
def test_a_sample_on_which_the_model_does_not_run_raises_its_error(measured):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measured(torch.randn(2, 9))


def test_a_wrong_sample_leaves_the_engine_to_the_right_ones():
    model = rotor.Checkpointable(Model(), mem_limit="1 MB")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.measure(torch.randn(2, 9))
    model(torch.randn(2, 8)).sum().backward()
    assert model.plan.engine == "graph"


def test_an_error_in_a_stage_shows_the_stage():
    model = rotor.Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8)), mem_limit="1 GB")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.randn(2, 8))
    assert len(folder_frames(caught.value)) == 1
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename.endswith("linear.py")


def test_a_limit_that_is_too_low_shows_where_it_was_found():
    model = rotor.Checkpointable(Model(), mem_limit=64)
    with pytest.raises(rotor.InfeasibleError) as caught:
        model(torch.randn(2, 8))
    assert len(folder_frames(caught.value)) == 2


def test_a_planned_forward_shows_the_model():
    plain = Model()
    planned = PlannedForward(plain, mem_limit="1 GB")
    planned.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArithmeticError) as caught:
            plain(torch.randn(2, 8), fails=True)
    planned.remove()
    assert len(folder_frames(caught.value)) == 1


def test_an_environment_variable_shows_all_frames(monkeypatch):
    monkeypatch.setenv("ROTOR_FULL_TRACEBACK", "1")
    model = rotor.Checkpointable(Model().eval(), mem_limit="1 GB")
    with pytest.raises(ArithmeticError) as caught:
        model(torch.randn(2, 8), fails=True)
    assert len(folder_frames(caught.value)) > 2


def test_errors_of_our_own_and_interruptions_keep_all_frames():
    model = rotor.Checkpointable(Model(), mem_limit="1 GB")
    with pytest.raises(ValueError, match="loss_fn") as caught:
        model(torch.randn(2, 8), targets=(1,))
    assert len(folder_frames(caught.value)) > 2

    class Interrupted(Model):
        def forward(self, x):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        rotor.Checkpointable(Interrupted().eval(), mem_limit="1 GB")(torch.randn(2, 8))
    assert len(folder_frames(stopped.value)) > 2


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    ours = [w for w in caught if issubclass(w.category, rotor.MemoryLimitWarning)]
    assert ours
    return ours


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_an_error_that_the_caller_handles_keeps_its_traceback():
    chk = rotor.Checkpointable(Branching(nn.Linear(4, 4)), mem_limit="1 MB")
    handled = KeyError("of the caller")
    try:
        raise handled
    except KeyError:
        chk(torch.randn(2, 4)).sum().backward()
    assert handled.__traceback__ is not None


def test_warnings_of_a_forward_point_at_the_call():
    class Checkpointing(Model):
        gradient_checkpointing = True

    x = torch.randn(2, 8)
    for engine in ("auto", "graph"):
        model = rotor.Checkpointable(Checkpointing(), mem_limit="1 GB", engine=engine)
        line = inspect.currentframe().f_lineno + 1
        caught = warned(lambda model=model: model(x).sum().backward())
        assert {(w.filename, w.lineno) for w in caught} == {(str(HERE), line)}


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_is_turned_off_by_the_name_that_the_model_has(name):
    class Checkpointing(Model):
        gradient_checkpointing = True

    setattr(Checkpointing, f"{name}_disable", lambda self: None)
    Checkpointing.gradient_checkpointing_disable = lambda self: None  # Deprecated, where both are.
    model = rotor.Checkpointable(Checkpointing(), mem_limit="1 GB")
    with pytest.warns(
        rotor.MemoryLimitWarning, match=rf"Call model\.{name}_disable\(\), or leave {name}=True"
    ):
        model(torch.randn(2, 8)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*was not kept before a first step")
def test_warnings_of_a_backward_point_at_the_backward():
    model = rotor.Checkpointable(Model(), mem_limit=10_000, loss_tmp_memory_usage=1)
    output = model(torch.randn(64, 8))
    loss = (output * torch.randn(40, 64, 8)).square().sum()
    line = inspect.currentframe().f_lineno + 1
    caught = warned(lambda: loss.backward())
    assert {(w.filename, w.lineno) for w in caught} == {(str(HERE), line)}


def test_warnings_of_a_budget_point_at_the_line_in_it():
    def exceed():
        with rotor.dtr.budget(1_000, strict=False):
            x = torch.randn(1000)
            return x * 2

    first = inspect.getsourcelines(exceed)[1]
    caught = warned(exceed)
    assert all(w.filename == str(HERE) for w in caught)
    assert all(first <= w.lineno < first + 5 for w in caught)


def test_no_warning_of_a_step_counts_frames_by_hand():
    """Engines, wrapper, meter, runtime and callbacks find the caller's line in one place."""
    found = []
    for folder in ("engines", "wrapper", "meter", "dtr", "integrations", "common"):
        for path in (ROTOR / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if is_call and ast.unparse(node.func) == "warnings.warn":
                    found.append(path.relative_to(ROTOR).as_posix())
    assert found == ["common/frames.py"]


def test_the_class_shows_its_arguments():
    names = list(inspect.signature(rotor.Checkpointable).parameters)
    assert names[:3] == ["model", "custom_input", "mem_limit"]
    assert {"engine", "loss_fn", "verify", "planning", "backend", "profile"} <= set(names)
    shown = pydoc.render_doc(rotor.Checkpointable, renderer=pydoc.plaintext)
    for name in names[:-1]:
        assert f"{name}: " in shown
    with pytest.raises(TypeError, match="did you mean mem_limit"):
        rotor.Checkpointable(Model(), mem_limt="1 GB")
