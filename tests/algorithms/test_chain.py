"""Chain: what it takes, what it refuses, JSON, and the binding under any input."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_chains import chains, random_chain

from rotor import Chain, _core


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "forward_time": [1.0, 2.0],
        "backward_time": [2.0, 3.0],
        "x_bytes": [10, 20, 30],
        "xbar_bytes": [25, 35],
        "forward_tmp_bytes": [1, 2],
        "backward_tmp_bytes": [3, 4],
        **changes,
    }


def test_defaults() -> None:
    chain = Chain(**fields())
    assert len(chain) == 2
    assert chain.forward_nograd_tmp_bytes == [1, 2]
    assert chain.grad_bytes == [10, 20, 30]
    assert chain.pgrad_bytes == [0, 0]
    assert chain.loss_tmp_bytes == 0
    assert chain.hold_output is True
    assert chain.ideal_time == 8.0
    assert "2 stages" in repr(chain)


def test_takes_numpy_and_whole_floats() -> None:
    chain = Chain(**fields(x_bytes=np.array([10, 20, 30]), xbar_bytes=[25.0, np.float64(35)]))
    assert chain == Chain(**fields())
    assert all(type(size) is int for size in chain.x_bytes + chain.xbar_bytes)


@pytest.mark.parametrize("name", [*fields(), "forward_nograd_tmp_bytes", "grad_bytes"])
def test_refuses_a_wrong_length(name: str) -> None:
    with pytest.raises(ValueError, match="entries, expected"):
        Chain(**fields(**{name: [1.0] * 7}))


def test_refuses_no_stages() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        Chain([], [], [1], [], [], [])


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("x_bytes", [10, -1, 30], ValueError, r"x_bytes\[1\] = -1 is negative"),
        ("x_bytes", [10, float("nan"), 30], ValueError, r"x_bytes\[1\] is NaN"),
        ("x_bytes", [10, True, 30], TypeError, r"x_bytes\[1\] must be a number"),
        ("x_bytes", [10, "20", 30], TypeError, r"x_bytes\[1\] must be a number"),
        ("x_bytes", [10, 1.5, 30], ValueError, "not a whole number"),
        ("x_bytes", [10, 1 << 80, 30], ValueError, "too large"),
        ("x_bytes", [10, float("inf"), 30], ValueError, "too large"),
        ("xbar_bytes", [25, -35], ValueError, r"xbar_bytes\[1\] = -35 is negative"),
        ("forward_tmp_bytes", [-1, 0], ValueError, "negative"),
        ("pgrad_bytes", [0, -1], ValueError, "negative"),
        ("grad_bytes", [0, -1, 0], ValueError, "negative"),
        ("forward_time", [1.0, float("nan")], ValueError, r"forward_time\[1\] is NaN"),
        ("forward_time", [1.0, -0.5], ValueError, r"forward_time\[1\] = -0.5"),
        ("backward_time", [1.0, 1e9], ValueError, r"backward_time\[1\]"),
        ("backward_time", [1.0, None], TypeError, r"backward_time\[1\] must be a number"),
        ("backward_tmp_bytes", [-11, 0], ValueError, r"backward_tmp_bytes\[0\] = -11 is below"),
    ],
)
def test_refuses_wrong_values(
    name: str, values: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Chain(**fields(**{name: values}))


def test_backward_temporaries_may_be_negative() -> None:
    chain = Chain(**fields(backward_tmp_bytes=[-10, -20], loss_tmp_bytes=-30))
    assert chain.backward_tmp_bytes == [-10, -20]
    with pytest.raises(ValueError, match="loss_tmp_bytes = -31 is below"):
        Chain(**fields(loss_tmp_bytes=-31))


def test_refuses_other_wrong_things() -> None:
    with pytest.raises(TypeError, match="hold_output"):
        Chain(**fields(hold_output=1))
    with pytest.raises(ValueError, match="names has 1"):
        Chain(**fields(names=["one"]))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Chain(**fields()))


@settings(max_examples=60, deadline=None)
@given(chains(1, 6))
def test_survives_json_pickle_and_copy(chain: Chain) -> None:
    assert Chain.from_json(chain.to_json()) == chain
    assert pickle.loads(pickle.dumps(chain)) == chain
    assert copy.deepcopy(chain) == chain
    assert chain != Chain(**fields(names=["a", "b"]))
    assert chain != 3


def test_a_link_stays_and_its_file_is_written(tmp_path: Any) -> None:
    chain = random_chain(random.Random(1), 4)
    link, missing = tmp_path / "link.json", tmp_path / "missing.json"
    (tmp_path / "kept.json").write_text("kept", encoding="utf-8")
    link.symlink_to("kept.json")
    missing.symlink_to("made.json")
    for path, target in ((link, "kept.json"), (missing, "made.json")):
        chain.to_json(path)
        assert path.is_symlink()
        assert Chain.from_json(tmp_path / target) == chain
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_no_file_is_written_to(tmp_path: Any) -> None:
    chain = random_chain(random.Random(1), 4)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    text = chain.to_json(path)
    assert os.read(reader, 1 << 16).decode() == text
    os.close(reader)
    assert path.is_fifo()
    with pytest.raises(IsADirectoryError):
        chain.to_json(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_json_in_a_file(tmp_path: Any) -> None:
    chain = Chain(**fields(names=["a", "b"]))
    text = chain.to_json(tmp_path / "chain.json")
    assert json.loads(text)["format"] == "rotor.chain"
    assert Chain.from_json(tmp_path / "chain.json") == chain
    assert [path.name for path in tmp_path.iterdir()] == ["chain.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "rotor.curve"}, "expected JSON of format 'rotor.chain'"),
        ({"version": 2}, "version 2 is unknown"),
        ({"colour": 1}, "no field 'colour'"),
        ({"x_bytes": 3}, "malformed chain"),
        ({"x_bytes": None}, "malformed chain"),
        ({"hold_output": "yes"}, "malformed chain"),
        ({"x_bytes": [1, 2]}, "x_bytes has 2 entries"),
    ],
)
def test_refuses_wrong_json(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chain.from_dict({**Chain(**fields()).to_dict(), **change})


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"format": "rotor.chain", "version": 1}'])
def test_refuses_malformed_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"malformed|needs the field"):
        Chain.from_json(text)


# -- the binding

OBJECTS = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=24),
    st.lists(st.integers(), max_size=3),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4).map(
        lambda values: np.array(values, dtype=np.int64)
    ),
    st.lists(st.integers(-5, 5), max_size=4).map(lambda values: np.array(values, dtype=np.int32)),
    st.just(np.zeros((2, 2), dtype=np.int64)),
    st.just(np.zeros(8, dtype=np.int64)[::2]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OBJECTS, max_size=14), st.booleans())
def test_binding_refuses_anything(arguments: list[Any], pad: bool) -> None:
    if pad:
        good = [np.ones(1 + (k in (2, 7)), dtype=np.int64) for k in range(10)]
        arguments = (arguments[:10] + good[len(arguments[:10]) :]) + [0, False]
    try:
        chain = _core.Chain(*arguments)
    except (TypeError, ValueError, OverflowError, BufferError):
        return
    assert chain.ideal_ns >= 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 8), st.integers(0, 3), st.integers(-(1 << 63), (1 << 63) - 1))
def test_binding_checks_every_entry(which: int, length: int, value: int) -> None:
    good = [np.ones(2 + (k in (2, 7)), dtype=np.int64) for k in range(10)]
    good[which] = np.full(length, value, dtype=np.int64)
    right = length == 2 + (which in (2, 7)) and -(which == 6) <= value <= 1 << 42
    if right:
        _core.Chain(*good, 0, False)
    else:
        with pytest.raises(ValueError, match="entr"):
            _core.Chain(*good, 0, False)


def test_binding_takes_no_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        _core.Chain(n=1)  # type: ignore[call-arg]


def test_chains_do_not_leak() -> None:
    chain = random_chain(random.Random(1), 3, 3).core
    arrays = [np.ones(2 + (k in (2, 7)), dtype=np.int64) for k in range(10)]
    wrong = [*arrays[:8], np.ones(7, dtype=np.int64), arrays[9]]
    for _ in range(50):
        _core.Chain(*arrays, 0, False)
        with pytest.raises(ValueError, match="pgrad"):
            _core.Chain(*wrong, 0, False)
    before = _blocks()
    for _ in range(500):
        _core.Chain(*arrays, 0, False)
        with pytest.raises(ValueError, match="pgrad"):
            _core.Chain(*wrong, 0, False)
    assert _blocks() <= before + 5
    assert chain.ideal_ns >= 0


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()
