"""Operations are run twice when they are measured; what does not repeat is never recomputed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from training import same
from unrepeatable import OPERATORS, Stack, operator, planned, runs_of, sample, step

import rotor
from rotor.common import cache
from rotor.engines.graph.costs.repeating import is_unspecified
from rotor.errors import MemoryLimitWarning
from rotor.graph import Machine

UNREPEATABLE = "operations that do not repeat bit for bit"


@pytest.fixture(autouse=True)
def _no_compiled_code_stays():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
@pytest.mark.parametrize("name", ["default", "own_generator", "python", "numpy"])
def test_operators_that_draw_equal_plain_training(name):
    model, x = Stack(name), sample()
    plain = step(model, x)
    chk, told = planned(model, x, engine="graph")
    found = step(chk, x)
    assert chk.program.slowdown > 1
    assert same(found, plain)
    runs = runs_of(chk, name)
    assert len(runs) == 5
    if name == "default":
        # The state of PyTorch's own generator is put back.
        assert max(runs) > 1
        assert told == []
    else:
        assert max(runs) == 1
        (text,) = told
        assert UNREPEATABLE in text
        assert f"rotor_tests.{name}.default in module 'blocks.0'" in text


def test_operators_that_repeat_are_recomputed_without_a_word():
    model, x = Stack("repeats"), sample()
    plain = step(model, x)
    chk, told = planned(model, x, engine="graph")
    assert told == []
    assert max(runs_of(chk, "repeats")) > 1
    assert same(step(chk, x), plain)


def test_what_is_known_of_an_operator_comes_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    x, calls = sample(), []

    def drawn(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + float(np.random.rand())  # noqa: NPY002

    OPERATORS["counted"] = operator("counted", drawn)
    planned(Stack("counted"), x, engine="graph")
    tested = len(calls)
    assert tested
    torch.compiler.reset()
    chk, told = planned(Stack("counted"), x, engine="graph")
    assert len(calls) == tested
    assert max(runs_of(chk, "counted")) == 1
    assert UNREPEATABLE in told[0]
    # A table that was written before operations were tested says nothing of that.
    (path,) = tmp_path.glob("profile-*.json")
    environment = rotor.engines.graph.costs.profile.environment_of(torch.device("cpu"))
    table = cache.load("profile", environment)
    path.unlink()
    cache.store("profile", environment, {key: row[:-1] for key, row in table.items()})
    torch.compiler.reset()
    planned(Stack("counted"), x, engine="graph")
    assert len(calls) > tested


def test_operators_that_were_never_run_count_as_not_repeatable():
    machine = Machine("some machine", 1e12, 1e11, 1e-6)
    with pytest.warns(MemoryLimitWarning, match="could not be tested"):
        chk = rotor.Checkpointable(
            Stack("repeats"), sample(), "1GB", engine="graph", profile=machine
        )
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(1)
    chk.compute_sequence(caught.value.minimum_bytes)
    assert chk.program.slowdown > 1
    assert max(runs_of(chk, "repeats")) == 1


def drawn_now():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_measuring_leaves_the_generators_of_python_and_numpy():
    for name in ("python", "numpy", "default"):
        model, x = Stack(name), sample()
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        expected = drawn_now()
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        planned(model, x, engine="graph")
        assert drawn_now() == expected


# The dynamic engine, which is tried where parts need more than the limit, says it too.
@pytest.mark.filterwarnings("ignore:rotor_tests..numpy does not repeat bit for bit")
@pytest.mark.filterwarnings("ignore:the limit of .* is less than the predicted need of a step")
def test_parts_of_a_model_keep_what_does_not_repeat():
    model, x = Stack("numpy", parts=True), sample()
    plain = step(model, x)
    chk, told = planned(model, x)
    found = step(chk, x)
    assert same(found, plain)
    assert sum(UNREPEATABLE in text for text in told) == 1


def test_memory_that_an_operation_never_writes_is_not_compared():
    graph = torch.fx.Graph()
    empty = graph.call_function(torch.ops.aten.empty.memory_format, ([2],))
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_efficient_attention.default)
    product = graph.call_function(torch.ops.aten.mm.default)
    custom = graph.call_function(torch.ops.rotor_tests.repeats.default)
    assert is_unspecified(empty, ())
    permuted = graph.call_function(torch.ops.aten.empty_permuted.default, ([2, 2], [1, 0]))
    assert is_unspecified(permuted, ())
    assert [is_unspecified(attention, (k,)) for k in range(4)] == [False, True, True, True]
    assert not is_unspecified(product, ())
    assert not is_unspecified(custom, ())


def test_dropout_is_still_recomputed():
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh()) for _ in range(5)]
    model, x = nn.Sequential(*layers), sample()
    plain = step(model, x)
    chk, told = planned(model, x, engine="graph")
    assert told == []
    assert chk.program.slowdown > 1
    assert same(step(chk, x), plain)
