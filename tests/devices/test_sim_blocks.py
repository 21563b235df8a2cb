"""The model of the caching allocator against the simulated accelerator's, byte for byte."""

import numpy as np
import pytest

from rotor import _core

MIB = 1 << 20


def drawn_events(rng, length, live, scales):
    """Return random allocations and frees: `live` blocks at most, of sizes up to each scale."""
    events, alive, made = [], [], 0
    choices = rng.integers(0, 1 << 62, size=(length, 3))
    for kind, one, other in choices.tolist():
        if kind % 5000 == 0:
            events.append(_core.BLOCKS_RELEASE)
        elif len(alive) < live and (not alive or kind % 100 < 55):
            scale = scales[one % len(scales)]
            unit = 512 if other % 3 else 1
            events.append((1 + other % scale) // unit * unit)
            alive.append(made)
            made += 1
        else:
            index = one % len(alive)
            alive[index], alive[-1] = alive[-1], alive[index]
            events.append(-1 - alive.pop())
    return np.array(events, dtype=np.int64)


SCALES = {
    "small": (512, 4096, 1 << 17, MIB),
    "mixed": (4096, MIB, 2 * MIB, 9 * MIB, 24 * MIB),
    "few sizes": (MIB,),
    "large": (8 * MIB, 12 * MIB, 60 * MIB),
}


def compare(sim, name, length, live, capacity, is_expandable, seed):
    rng = np.random.default_rng(seed)
    events = drawn_events(rng, length, live, SCALES[name])
    if name == "few sizes":  # Many blocks of one size: ties are broken by address.
        sizes = np.array([512, 3 * MIB, 5 * MIB])
        events = np.where(events > 0, sizes[events // 512 % 3], events)
    sim.set_poison(0)
    sim.set_capacity(capacity or (1 << 40))
    sim.set_expandable(is_expandable)
    expected = sim.replay(events)
    figures, levels = _core.replay_blocks(events, is_expandable, capacity, True)
    found = np.frombuffer(levels, dtype=np.int64).reshape(-1, 2)
    different = np.flatnonzero((found != expected).any(axis=1))
    assert not len(different), (different[0], found[different[0]], expected[different[0]])
    assert figures["reserved_peak_bytes"] == expected[:, 1].max()
    assert figures["allocated_peak_bytes"] == expected[:, 0].max()
    if capacity:
        assert figures["retries"] > 0
        assert figures["refused"] > 0
    sim.empty_cache()


CASES = [
    (name, capacity, is_expandable)
    for name in SCALES
    for capacity in (0, 192 * MIB)
    for is_expandable in (False, True)
    if not (name == "small" and capacity)
]


@pytest.mark.parametrize(("name", "capacity", "is_expandable"), CASES)
def test_random_allocations(sim, name, capacity, is_expandable):
    compare(sim, name, 7_000, 80, capacity, is_expandable, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity", "is_expandable"), CASES)
def test_a_million_random_allocations(sim, name, capacity, is_expandable):
    """Compare 14 sequences of 75,000 events each, with up to 500 live blocks."""
    compare(sim, name, 75_000, 500 if not capacity else 80, capacity, is_expandable, 2)


def test_figures_of_an_empty_sequence():
    figures, levels = _core.replay_blocks(np.empty(0, dtype=np.int64), False, 0, False)
    assert levels is None
    assert set(figures.values()) == {0}


def test_a_free_of_nothing_is_refused():
    with pytest.raises(ValueError, match="freed"):
        _core.replay_blocks(np.array([512, -1, -1]), False, 0, False)


def with_piece(piece, events):
    return np.concatenate([[piece, -1], np.where(events < 0, events - 1, events)])


@pytest.mark.parametrize("scale", ["mixed", "large"])
def test_the_best_piece_by_trying_all(sim, scale):
    """Find the piece with which events reserve least, and have the device confirm it."""
    sim.set_poison(0)
    sim.set_capacity(1 << 40)
    gains = []
    for seed in range(6):
        events = drawn_events(np.random.default_rng(seed), 300, 8, SCALES[scale])
        events = events[events != _core.BLOCKS_RELEASE]
        figures, _ = _core.replay_blocks(events, False, 0, False)
        tried = {0: figures["reserved_peak_bytes"]}
        small = figures["reserved_small_bytes"]
        low = max((figures["allocated_peak_bytes"] - small + 2 * MIB - 1) // (2 * MIB), 5)
        for piece in range(low * 2 * MIB, figures["reserved_peak_bytes"] - small + 1, 2 * MIB):
            sim.empty_cache()
            tried[piece] = int(sim.replay(with_piece(piece, events))[:, 1].max())
        found = _core.fit_piece(events)
        least = min(tried.values())
        assert found["without_bytes"] == tried[0]
        assert tried[found["bytes"]] == found["reserved_peak_bytes"]
        if len(tried) <= 96:
            assert found["reserved_peak_bytes"] == least
            equal = [piece for piece, nbytes in tried.items() if nbytes == least]
            assert found["bytes"] == (0 if tried[0] == least else max(equal))
        assert found["reserved_peak_bytes"] <= tried[0]
        gains.append(1 - found["reserved_peak_bytes"] / tried[0])
    sim.empty_cache()
    assert max(gains) > 0.05


def test_the_order_of_frees_beside_one_another_makes_no_difference():
    """Leave the same free blocks, whatever the order in which neighbours are freed."""
    rng = np.random.default_rng(1)
    for is_expandable in (False, True):
        for seed in range(20):
            events = drawn_events(np.random.default_rng(seed), 400, 30, SCALES["mixed"])
            events = events[events != _core.BLOCKS_RELEASE]
            runs = np.split(events, np.flatnonzero(np.diff(np.sign(events + 0.5))) + 1)
            assert any(len(run) > 2 and run[0] < 0 for run in runs)
            other = np.concatenate([rng.permutation(r) if r[0] < 0 else r for r in runs])
            ends = np.cumsum([len(run) for run in runs]) - 1
            levels = [
                np.frombuffer(
                    _core.replay_blocks(given, is_expandable, 0, True)[1], dtype=np.int64
                ).reshape(-1, 2)[ends]
                for given in (events, other)
            ]
            assert (levels[0] == levels[1]).all()
