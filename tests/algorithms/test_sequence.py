"""Sequence: printing, JSON, prices; the C simulator against the plain-Python one."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.machine import Costs, Op, live_bytes, start, step
from random_chains import chains, random_chain

from rotor import Chain, InvalidSequenceError
from rotor.algorithms import Operation, Sequence

TEXT = "Fck_0 Fn_1 Fe_2 L B_2 Fe_0 Fe_1 B_1 B_0"


def three_stages() -> Chain:
    return Chain([1, 2, 4], [1, 1, 1], [1, 2, 3, 4], [3, 4, 5], [0, 0, 0], [0, 0, 0])


def test_prints_as_in_the_tutorial() -> None:
    sequence = Sequence.parse(TEXT)
    assert str(sequence) == TEXT
    assert [op.kind for op in sequence][:4] == ["Fck", "Fn", "Fe", "L"]
    assert [op.stage for op in sequence] == [0, 1, 2, 3, 2, 0, 1, 1, 0]
    assert sequence[3] == Operation("L", 3)
    assert sequence[-2:] == [Operation("B", 1), Operation("B", 0)]
    assert len(sequence) == 9


@pytest.mark.parametrize("text", ["CF_0 Fn_1", "Fc_0 Fn_1", "Fck_0 Fn_1"])
def test_reads_other_spellings(text: str) -> None:
    assert str(Sequence.parse(text)) == "Fck_0 Fn_1"


def test_the_stage_of_a_loss_may_be_written() -> None:
    assert Sequence.parse("Fe_0 L_1 B_0") == Sequence.parse("Fe_0 L B_0")


@pytest.mark.parametrize("text", ["Fx_0", "Fe", "Fe_0 B_", "Fe_-1", "B_1.5", "LL"])
def test_refuses_words_that_are_no_operations(text: str) -> None:
    with pytest.raises(ValueError, match="is no operation"):
        Sequence.parse(text)


def test_refuses_what_is_no_text() -> None:
    with pytest.raises(TypeError, match="expected the text of a sequence, got 5"):
        Sequence.parse(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected JSON text, or the path of a file, got 5"):
        Sequence.from_json(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stage 2147483648 is none"):
        Sequence.parse("Fe_2147483648")


def test_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown operation 'Fx'"):
        Sequence([("Fx", 0)])


def test_compares_and_hashes() -> None:
    one = Sequence.parse(TEXT)
    two = Sequence([(op.kind, op.stage) for op in one], three_stages())
    assert one == two == Sequence(list(one))
    assert hash(one) == hash(two)
    assert one != Sequence.parse("Fe_0 L B_0")
    assert one != TEXT


def test_is_priced_only_with_a_chain() -> None:
    sequence = Sequence.parse(TEXT)
    for name in ("makespan", "peak_bytes", "timeline"):
        with pytest.raises(ValueError, match="made without a chain"):
            getattr(sequence, name)
    assert "9 operations" in repr(sequence)


def test_prices_by_hand() -> None:
    sequence = Sequence.parse(TEXT, three_stages())
    assert sequence.makespan == 1 + 2 + 4 + 1 + 1 + 2 + 1 + 1
    assert sequence.peak_bytes == max(sequence.timeline.peak_bytes)
    # x0 and x2 live, Fe_2 with x3 inside, the gradient of x3, which is the output's.
    assert sequence.timeline.live_bytes[3] == 1 + 3 + 5 + 4
    assert sequence.timeline.live_bytes[4] == 1 + 3 + 4
    assert sequence.count_forwards() == {0: 2, 1: 2, 2: 1}
    assert "bytes>" in repr(sequence)


def test_refused_operations_are_named() -> None:
    with pytest.raises(InvalidSequenceError, match=r"Fe before its backward \(operation 2\)") as e:
        Sequence.parse("Fn_0 L B_0", Chain([1], [1], [1, 1], [1], [0], [0]))
    assert e.value.position == 2
    with pytest.raises(InvalidSequenceError, match="ends before") as e:
        Sequence.parse("Fe_0 L", Chain([1], [1], [1, 1], [1], [0], [0]))
    assert e.value.position == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["Fn", "Fck", "Fe", "B"]), st.integers(0, 999))))
def test_survives_text_json_pickle_and_copy(ops: list[tuple[str, int]]) -> None:
    sequence = Sequence(ops)
    assert Sequence.parse(str(sequence)) == sequence
    assert Sequence.from_json(sequence.to_json()) == sequence
    assert pickle.loads(pickle.dumps(sequence)) == sequence
    assert copy.deepcopy(sequence) == sequence


def test_json_keeps_the_chain(tmp_path: Any) -> None:
    sequence = Sequence.parse(TEXT, three_stages())
    sequence.to_json(tmp_path / "s.json")
    read = Sequence.from_json(tmp_path / "s.json")
    assert read == sequence
    assert read.chain == three_stages()
    assert read.makespan == sequence.makespan
    assert read.peak_bytes == sequence.peak_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "rotor.chain"}, "expected JSON of format 'rotor.sequence'"),
        ({"version": "1"}, "version '1' is unknown"),
        ({"operations": None}, "needs the field 'operations'"),
        ({"operations": [["Fe"]]}, "is no operation"),
        ({"operations": [["Fe", 10**20]]}, "stage 100000000000000000000 is none"),
        ({"operations": [["Fe", "0"]]}, "is no operation"),
        ({"operations": [["Fz", 0]]}, "unknown operation"),
        ({"operations": [["Fe", 0]], "chain": 5}, "malformed JSON"),
    ],
)
def test_refuses_wrong_json(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sequence.from_dict({**Sequence.parse(TEXT).to_dict(), **change})


# -- the two simulators

KINDS = ("Fn", "Fck", "Fe", "L", "B")


def compare(chain: Chain, rng: random.Random, length: int) -> None:
    """Random operations, those that can be done, priced one by one by both."""
    costs = Costs.of(chain)
    state, ops, peaks, lives, time = start(costs), [], [], [], 0
    while len(ops) < length and state.gradient != 0:
        able: list[tuple[Op, Any]] = []
        for kind in KINDS:
            for i in [costs.n] if kind == "L" else range(costs.n):
                done = step(costs, state, (kind, i))
                if done is not None:
                    able.append(((kind, i), done))
        able = [item for item in able if item[0][0] in ("L", "B")] * 3 + able
        op, (state, spent, peak) = rng.choice(able)
        ops.append(op)
        peaks.append(peak)
        lives.append(live_bytes(costs, state))
        time += spent
    if state.gradient != 0:
        with pytest.raises(InvalidSequenceError, match="ends before") as error:
            Sequence(ops, chain)
        assert error.value.position == len(ops)
        return
    sequence = Sequence(ops, chain)
    assert sequence.timeline.peak_bytes.tolist() == peaks
    assert sequence.timeline.live_bytes.tolist() == lives
    assert sequence.makespan == pytest.approx(time * 1e-9)
    assert sequence.peak_bytes == max([chain.x_bytes[0], *peaks])


@settings(max_examples=100, deadline=None)
@given(chains(1, 4), st.integers(0, 1 << 30))
def test_simulators_agree(chain: Chain, seed: int) -> None:
    compare(chain, random.Random(seed), 60)


def test_simulators_agree_on_many() -> None:
    rng = random.Random(5)
    for _ in range(400):
        compare(random_chain(rng, 1, 5), rng, 80)


@settings(max_examples=200, deadline=None)
@given(
    chains(1, 4),
    st.one_of(
        st.binary(max_size=64),
        st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=20).map(
            lambda values: np.array(values, dtype=np.int32)
        ),
        st.lists(st.integers(-1, 5), max_size=40).map(
            lambda values: np.array(values, dtype=np.int32)
        ),
        st.none(),
        st.integers(),
        st.text(),
    ),
)
def test_binding_survives_any_operations(chain: Chain, ops: Any) -> None:
    try:
        time_ns, peak, peaks, lives = chain.core.simulate(ops)
    except (ValueError, TypeError, BufferError):
        return
    assert time_ns >= 0
    assert peak >= chain.x_bytes[0]
    assert len(peaks) == len(lives) == memoryview(ops).nbytes


def test_simulate_takes_one_argument() -> None:
    chain = three_stages().core
    for arguments in ((), (b"", b"")):
        with pytest.raises(TypeError, match=r"one (positional )?argument"):
            chain.simulate(*arguments)
