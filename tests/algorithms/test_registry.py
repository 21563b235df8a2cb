"""The registry of algorithms, and what all of them have in common."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
from random_chains import budgets, random_chain, realistic_chain

from rotor import Chain, InfeasibleError, algorithms
from rotor.algorithms import Curve, DynamicAlgorithm, Sequence

NAMES = algorithms.names()


def solve(algorithm: DynamicAlgorithm, chain: Chain, budget: int) -> Sequence | InfeasibleError:
    try:
        return algorithm.solve(chain, budget)
    except InfeasibleError as error:
        return error


def test_all_names() -> None:
    assert NAMES == [
        "persistent",
        "floating",
        "griewank",
        "griewank_heterogeneous",
        "chen_sqrt",
        "no_checkpoint",
        "recompute_all",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_get(name: str) -> None:
    cls = algorithms.get(name)
    assert issubclass(cls, DynamicAlgorithm)
    assert cls.name == name
    assert getattr(algorithms, cls.__name__) is cls
    assert cls.__name__ in algorithms.__all__
    assert cls.__doc__
    assert repr(cls()).startswith(cls.__name__)


@pytest.mark.parametrize("name", ["", "Persistent", "best", 3, None, ["persistent"]])
def test_unknown_names_list_the_valid_ones(name: object) -> None:
    with pytest.raises(ValueError, match="expected one of persistent, floating, griewank"):
        algorithms.get(name)  # type: ignore[arg-type]


def test_module_attributes() -> None:
    assert algorithms.persistent.Persistent is algorithms.Persistent
    assert algorithms.sequence.Sequence is Sequence
    assert {"Persistent", "get", "floating"} <= {*dir(algorithms)}
    with pytest.raises(AttributeError, match="no attribute 'Optimal'"):
        _ = algorithms.Optimal


def test_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        DynamicAlgorithm()  # type: ignore[abstract]


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(algorithms.get(name).solve).parameters
    expected = inspect.signature(DynamicAlgorithm.solve).parameters
    assert [*parameters][: len(expected)] == [*expected]
    assert "progress" in inspect.signature(algorithms.get(name).curve).parameters


@pytest.mark.parametrize("name", NAMES)
def test_schedules_keep_the_budget_or_name_the_least(name: str) -> None:
    rng = random.Random(name)
    algorithm = algorithms.get(name)()
    for _ in range(25):
        chain = random_chain(rng, 1, 6)
        for budget in budgets(rng, chain):
            found = solve(algorithm, chain, budget)
            if isinstance(found, Sequence):
                assert found.chain is chain
                assert found.peak_bytes <= budget
                assert found.makespan >= chain.ideal_time * (1 - 1e-12)
            else:
                assert found.minimum_bytes > budget
                assert str(budget) in str(found)
                assert str(found.minimum_bytes) in str(found)
                least = algorithm.solve(chain, found.minimum_bytes)
                assert least.peak_bytes <= found.minimum_bytes


@pytest.mark.parametrize("name", NAMES)
def test_curves_begin_where_solving_does(name: str) -> None:
    rng = random.Random(name)
    algorithm = algorithms.get(name)()
    for _ in range(8):
        chain = random_chain(rng, 1, 5, scale=1000)
        curve = algorithm.curve(chain)
        assert isinstance(curve, Curve)
        least = max(1, curve.minimum_bytes)
        assert algorithm.solve(chain, least).peak_bytes <= least
        if least > 1:
            with pytest.raises(InfeasibleError) as error:
                algorithm.solve(chain, least - 1)
            assert error.value.minimum_bytes == curve.minimum_bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, -5, float("nan"), "", "7 parsecs", "-1MB"])
def test_budgets_must_be_positive(name: str, budget: object) -> None:
    chain = random_chain(random.Random(1))
    with pytest.raises(ValueError, match="budget_bytes"):
        algorithms.get(name)().solve(chain, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [True, None, [1], b"1"])
def test_budgets_must_be_numbers(name: str, budget: object) -> None:
    chain = random_chain(random.Random(1))
    with pytest.raises(TypeError, match="budget_bytes"):
        algorithms.get(name)().solve(chain, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_budgets_may_be_text(name: str) -> None:
    chain = realistic_chain(random.Random(2), 5)
    algorithm = algorithms.get(name)()
    assert algorithm.solve(chain, "8 GiB") == algorithm.solve(chain, 8 << 30)


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles(name: str) -> None:
    chain = realistic_chain(random.Random(2), 5)
    algorithm = algorithms.get(name)()
    expected = algorithm.solve(chain, 8 << 30)
    for other in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert type(other) is type(algorithm)
        assert other.solve(chain, 8 << 30) == expected


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rotor import Chain, algorithms\n"
        "chain = Chain([1, 1], [1, 1], [1, 1, 1], [2, 2], [0, 0], [0, 0])\n"
        "for name in algorithms.names(): algorithms.get(name)().solve(chain, 100)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_chain_is_refused_in_words(name: str) -> None:
    found: Any = "x"
    with pytest.raises(TypeError, match=r"expected a rotor\.Chain to schedule, not 'x'"):
        algorithms.get(name)().solve(found, 1000)
