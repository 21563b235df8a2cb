"""Programs for the tests of the simulator: one to follow by hand, and random ones."""

from __future__ import annotations

import random

from rotor import simrd
from rotor.simrd.results import EVENT_KINDS


def diamond(*, releases: bool = True) -> simrd.Log:
    """x -> y -> z -> w, then v of y and w, then u of z and v; 4 bytes each."""
    writer = simrd.LogWriter()
    writer.constant("x", 4)
    for name, args, result, ns in [
        ("f", ["x"], "y", 10),
        ("g", ["y"], "z", 20),
        ("h", ["z"], "w", 30),
        ("k", ["y", "w"], "v", 5),
        ("m", ["z", "v"], "u", 7),
    ]:
        writer.call(name, args, [result], ns, bytes=[4], aliases=[-1])
    for name in "yzwv" if releases else "":
        writer.release(name)
    return simrd.parse(writer.getvalue())


def program(seed: int, *, operations: int = 60, aliases: bool = True) -> bytes:
    """A random program: several outputs, views, mutations, copies, pins, releases, constants."""
    rng = random.Random(seed)
    writer = simrd.LogWriter()
    views = rng.choice([0.1, 0.3]) if aliases else 0
    mutations, copies, pins = rng.choice([0, 0.1]), rng.choice([0, 0.1]), rng.choice([0, 0.02])
    releases = rng.choice([0.3, 0.7])
    sizes = rng.choice([[4], [1, 7, 50, 64, 300], [1, 1000]])
    costs = rng.choice([[1], [1, 5, 20, 100], [3, 1000]])
    live = [f"c{i}" for i in range(rng.randint(1, 4))]
    for name in live:
        writer.constant(name, rng.choice(sizes))
    for i in range(operations):
        recent = live[-rng.choice([2, 4, 30]) :]
        kind = rng.random()
        if kind < mutations:
            args = rng.sample(recent, rng.randint(1, min(3, len(recent))))
            mutated = sorted(rng.sample(range(len(args)), rng.randint(1, len(args))))
            writer.mutate(f"mutate{i}", args, mutated, rng.choice(costs))
        elif kind < mutations + copies:
            live.append(f"k{i}")
            writer.copy(live[-1], rng.choice(recent))
        elif kind < mutations + copies * 1.5 and len(live) > 1:
            writer.copy_from(*rng.sample(live, 2))
        elif kind < mutations + copies * 1.5 + pins:
            writer.pin(rng.choice(recent))
        else:
            args = [rng.choice(recent) for _ in range(rng.choice([0, *[1, 2, 3] * 5]))]
            results = [f"t{i}_{k}" for k in range(rng.choice([1, 1, 1, 2, 3]))]
            made = [rng.choice(sizes) for _ in results]
            of = [rng.randrange(len(args)) if args and rng.random() < views else -1 for _ in made]
            writer.call(f"op{i % 5}", args, results, rng.choice(costs), bytes=made, aliases=of)
            live += results
        while len(live) > 4 and rng.random() < releases:
            writer.release(live.pop(rng.randrange(len(live))))
    for name in live[: len(live) // 2]:
        writer.release(name)
    return writer.getvalue()


def programs(count: int, *, aliases: bool = True) -> list[simrd.Log]:
    """Random programs, read."""
    return [simrd.parse(program(seed, aliases=aliases)) for seed in range(count)]


def evictions(result: simrd.Result) -> list[tuple[int, int]]:
    """(clock, storage) of every eviction in the trace of a result, in order."""
    assert result.events is not None
    gone = result.events[result.events["kind"] == EVENT_KINDS.index("evict")]
    return list(zip(gone["clock"].tolist(), gone["index"].tolist(), strict=True))
