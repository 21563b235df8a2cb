"""Random small programs in the format of logs, which differ widely from one another.

`random_log(seed)` makes the text of one. What is drawn once per program: sizes (with or without
zeros, equal or over many orders of magnitude), times, how far back arguments reach (chains, wide
fans, both), how many results and arguments, how often there are views, mutations, copies, releases.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

Draw = Callable[[], int]


def _draws(rng: random.Random, largest: int) -> Draw:
    """Numbers of one character: equal, few, uniform, over orders of magnitude; some with zeros."""
    few = [rng.randint(1, largest) for _ in range(rng.randint(1, 4))]
    zeros = rng.choice([0, 0, 0.05, 0.3])
    draw: Draw = rng.choice(
        [
            lambda: few[0],
            lambda: rng.choice(few),
            lambda: rng.randint(1, largest),
            lambda: int(largest ** rng.random()),
        ]
    )
    return lambda: 0 if rng.random() < zeros else draw()


@dataclass
class _Writer:
    rng: random.Random
    lines: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)  # names with a reference
    count: int = 0

    def write(self, instruction: str, **fields: object) -> None:
        self.lines.append(json.dumps({"INSTRUCTION": instruction, **fields}, sort_keys=True))

    def name(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def constant(self, size: int) -> None:
        self.live.append(self.name())
        self.write("CONSTANT", NAME=self.live[-1])
        self.write("MEMORY", NAME=self.live[-1], MEMORY=str(size))

    def call(self, args: list[str], results: list[tuple[int, int]], time: int) -> None:
        names = [self.name() for _ in results]
        self.write("CALL", NAME="op", ARGS=args, RESULT=names, TIME=str(time))
        for name, (size, alias) in zip(names, results, strict=True):
            self.write("MEMORY", NAME=name, MEMORY=str(size))
            self.write("ALIAS", NAME=name, ALIAS=str(alias))
        self.live += names

    def release(self, index: int) -> None:
        self.write("RELEASE", NAME=self.live.pop(index))

    def copy(self) -> None:
        if self.rng.random() < 0.5 and len(self.live) > 1:
            destination, source = self.rng.sample(self.live, 2)
            self.write("COPY_FROM", DST=destination, SRC=source)
        else:
            source = self.rng.choice(self.live)
            self.live.append(self.name())
            self.write("COPY", DST=self.live[-1], SRC=source)


def random_log(seed: int, calls: int = 60) -> str:
    """The text of a random program of about so many calls."""
    rng = random.Random(seed)
    writer = _Writer(rng)
    size = _draws(rng, rng.choice([1, 3, 100, 10**6, 10**12]))
    time = _draws(rng, rng.choice([1, 5, 1000, 10**9]))
    reach = rng.choice([1, 2, 4, 12, 1000])
    far = rng.choice([0, 0.1, 0.4])
    most_args, most_results = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 4])
    views, mutations, copies = (rng.choice([0, 0, 0.1, 0.3]) for _ in range(3))
    keeps = rng.choice([2, 4, 10, 40])
    releases = rng.choice([0, 0.5, 0.9, 1])
    constants = rng.choice([1, 1, 3, 8])

    def args(least: int) -> list[str]:
        """Recent ones or any, repeats included."""
        found = []
        for _ in range(rng.randint(least, most_args)):
            within = len(writer.live) if rng.random() < far else min(reach, len(writer.live))
            found.append(writer.live[-rng.randint(1, within)])
        return found

    if rng.random() < 0.2:
        writer.constant(size())
        writer.write("ANNOTATE", ANNOTATION="START")
        writer.live.clear()
    for _ in range(constants):
        writer.constant(size())
    for step in range(calls):
        if step == calls // 2:
            writer.write("ANNOTATE", ANNOTATION="BACKWARD")
        kind = rng.random()
        if kind < mutations:
            names = list(dict.fromkeys(args(1)))
            indices = rng.sample(range(len(names)), rng.randint(1, len(names)))
            writer.write("MUTATE", NAME="op_", ARGS=names, MUTATE=indices, TIME=str(time()))
        elif kind < mutations + copies / 2:
            writer.copy()
        else:
            names = args(0 if rng.random() < 0.1 else 1)
            results = [
                (size(), rng.randrange(len(names)) if names and rng.random() < views else -1)
                for _ in range(rng.randint(1, most_results))
            ]
            writer.call(names, results, time())
        while len(writer.live) > max(keeps, 2) and rng.random() < releases:
            writer.release(rng.randrange(len(writer.live) - 1))
        if rng.random() < 0.02:
            writer.constant(size())
        if rng.random() < 0.01:
            writer.write("PIN", NAME=rng.choice(writer.live))
        if rng.random() < 0.02:
            writer.write("RELEASE", NAME="unknown")
    for _ in range(rng.choice([0, len(writer.live) // 2, len(writer.live) - 1])):
        writer.release(rng.randrange(len(writer.live)))
    return "\n".join(writer.lines) + "\n"
