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
