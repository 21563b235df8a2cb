"""Random graphs for the tests of programs and the planner."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from rotor.graph import Graph, Operation, Storage

GRAPHS = Path(__file__).parent / "data" / "graphs"
SHARED = ("gpt6", "gpt24", "r50", "unet", "dn121")


def training_graph(seed: int, layers: int, *, plain: bool = True) -> Graph:
    """A forward with a few skips, and its backward; `plain`: one output each, no flags."""
    draw = random.Random(seed)
    sizes: list[int] = []
    pinned: list[bool] = []
    operations: list[Operation] = []

    def storage(is_pinned: bool = False) -> int:
        sizes.append(1000 * draw.randint(1, 5))
        pinned.append(is_pinned)
        return len(sizes) - 1

    def add(phase: str, inputs: list[int], outputs: list[int], **flags: bool) -> None:
        operations.append(
            Operation(
                f"op{len(operations)}",
                1000 * draw.randint(1, 20),
                tuple(dict.fromkeys(inputs)),
                tuple(outputs),
                0 if plain else draw.choice([0, 0, 1500]),
                phase,
                **flags,
            )
        )

    kept = []
    for k in range(layers):
        inputs = [] if k == 0 else [kept[-1]]
        if k >= 2 and draw.random() < 0.3:
            inputs.append(draw.choice(kept[:-1]))
        outputs = [storage()]
        flags = {}
        if not plain:
            if draw.random() < 0.2:
                outputs.append(storage())
            flags = {"random": draw.random() < 0.15, "once": draw.random() < 0.1}
        add("forward", inputs, outputs, **flags)
        kept.append(outputs[0])
    gradient = kept[-1]
    if not plain:
        gradient = storage()
        add("loss", [kept[-1]], [gradient])
    for k in reversed(range(layers)):
        inputs = [gradient, kept[k]] if k else [gradient]
        if k and draw.random() < 0.4:
            inputs.append(kept[k - 1])
        if not plain and draw.random() < 0.5:
            add("backward", inputs, [storage(True)])
        gradient = storage(k == 0)
        add("backward", inputs, [gradient])
    return Graph(sizes, pinned, operations)


@st.composite
def graphs(draw: st.DrawFn, most: int = 8, *, plain: bool = True, homes: bool = False) -> Graph:
    """Any small graph, all phases and flags; tapes and negative workspaces unless it is `plain`.

    With `homes`, some operations read from a second tier, or write to it.
    """
    count = draw(st.integers(1, most))
    storages: list[Storage] = []
    operations = []
    kinds = [False, False, False, True] + ([] if plain else ["first", "lazy", "lazy"])
    phases = sorted(
        draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 2]), min_size=count, max_size=count))
    )
    for k, phase in enumerate(phases):
        numbers = list(range(len(storages)))
        inputs = draw(st.lists(st.sampled_from(numbers), max_size=3)) if numbers else []
        outputs = []
        has_tape = False
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            outputs.append(len(storages))
            size, kind = draw(st.integers(0, 9)), draw(st.sampled_from(kinds))
            is_lazy = kind == "lazy" and not has_tape
            has_tape = has_tape or is_lazy
            pinned = kind if kind != "lazy" else False
            storages.append(Storage(size, pinned, movable=not is_lazy, lazy=is_lazy))
        made = sum(storages[s].bytes for s in outputs)
        least = made - sum(storages[s].bytes for s in outputs if storages[s].lazy)
        operations.append(
            Operation(
                f"op{k}",
                draw(st.integers(0, 9)),
                tuple(inputs),
                tuple(outputs),
                draw(st.sampled_from([0, 0, 3] if plain else [0, 3, -made])),
                ("forward", "loss", "backward")[phase],
                random=draw(st.sampled_from([False, False, True])),
                once=draw(st.sampled_from([False, False, False, True])),
                light_bytes=draw(st.sampled_from([0, 2, -least])) if has_tape else None,
            )
        )
    if homes:
        operations = [_with_clock(draw, op, storages) for op in operations]
    return Graph(storages, None, operations)


def _with_clock(draw: st.DrawFn, op: Operation, storages: list[Storage]) -> Operation:
    if op.phase == "loss" or draw(st.booleans()):
        return op
    if not op.outputs:
        return replace(op, clock="write", once=True)
    if len(op.outputs) > 1:
        return op
    storages[op.outputs[0]] = replace(storages[op.outputs[0]], pinned=False)
    return replace(op, clock="read", inputs=(), once=False, random=False)
