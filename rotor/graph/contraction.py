"""Smaller graphs from large ones: consecutive operations, merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, takewhile

from rotor.graph.graph import Graph, Operation


def block_of(module: str) -> str:
    """Return the block that a module belongs to, by its path; an empty path is the model itself.

    The result ends with the first number in the path, as members of lists and sequences have one
    ("layers.3" for "layers.3.attention.query"); without a number, with the second last name.
    """
    parts = module.split(".")
    for length, part in enumerate(parts, 1):
        if part.isdigit():
            return ".".join(parts[:length])
    return ".".join(parts[:-1]) or module


def places(graph: Graph) -> list[str]:
    """Return the module that each operation is shown in.

    An operation without a module, such as a sum of gradients, is shown in the common part of the
    modules before and after it.
    """
    after = ["" for _ in graph.operations]
    following, phase = "", ""
    for index in reversed(range(len(graph))):
        op = graph.operations[index]
        following = op.module or (following if op.phase == phase else "")
        after[index], phase = following, op.phase
    found = []
    before, phase = "", ""
    for index, op in enumerate(graph.operations):
        before = op.module or (before if op.phase == phase else "")
        phase = op.phase
        between = common_path([before, after[index]]) if before and after[index] else ""
        found.append(op.module or between)
    return found


def blocks(graph: Graph) -> list[list[int]]:
    """Return the operations in consecutive groups, each of one block and one phase.

    Operations without a module join the group before them if it goes on after them.
    """
    operations, names = graph.operations, [block_of(place) for place in places(graph)]
    grouped = groupby(range(len(graph)), lambda k: (operations[k].phase, names[k]))
    return [list(group) for _, group in grouped]


def contract(
    graph: Graph, groups: Sequence[Sequence[int]], names: Iterable[str] | None = None
) -> Graph:
    """Return the graph in which each group is one operation.

    Storages that are made and used up inside a group are part of its workspace, so that programs
    of the smaller graph never need less than the programs of the larger graph they represent.

    Parameters
    ----------
    graph
        The graph to make smaller.
    groups
        All operations in order, cut into groups of one phase each.
    names
        Names of the groups; by default of the first operation, with the number of merged ones.

    Returns
    -------
    Graph
        Operations have the numbers of the operations they represent in ``extra["operations"]``,
        storages their old number in ``extra["storage"]``.

    Raises
    ------
    ValueError
        The groups are not all operations in order, one has several phases, or the graph is not
        plain.
    """
    graph.require_plain("contract()")
    if [index for group in groups for index in group] != list(range(len(graph))):
        raise ValueError("the groups must be all operations of the graph, in order")
    home = {index: number for number, group in enumerate(groups) for index in group}
    exported: set[int] = {s for s, storage in enumerate(graph.storages) if storage.pinned}
    for index, op in enumerate(graph.operations):
        exported.update(s for s in op.inputs if home[graph.producers[s]] != home[index])
    read = {s for op in graph.operations for s in op.inputs}
    # The unread outputs of a group's last operation stay outputs.
    ends = [graph.operations[group[-1]] for group in groups]
    exported.update(s for op in ends for s in op.outputs if s not in read)
    kept = sorted(exported)
    renamed = {s: number for number, s in enumerate(kept)}
    labels = [None] * len(groups) if names is None else list(names)
    operations = [
        _merged(graph, group, label, exported, renamed)
        for group, label in zip(groups, labels, strict=True)
    ]
    storages = [replace(graph.storages[s], extra={"storage": s}) for s in kept]
    return Graph(storages, None, operations, name=graph.name)


def _merged(
    graph: Graph,
    group: Sequence[int],
    label: str | None,
    exported: set[int],
    renamed: dict[int, int],
) -> Operation:
    members = [graph.operations[index] for index in group]
    first = members[0]
    if any(op.phase != first.phase for op in members):
        raise ValueError(f"a group has operations of several phases: {first.name} and after it")
    made = {s for op in members for s in op.outputs}
    inputs = dict.fromkeys(renamed[s] for op in members for s in op.inputs if s not in made)
    outputs = [s for op in members for s in op.outputs if s in exported]
    left = sum(graph.storages[s].bytes for s in outputs)
    own = f"{first.name} +{len(members) - 1}" if len(members) > 1 else first.name
    return Operation(
        name=own if label is None else label,
        cost_ns=sum(op.cost_ns for op in members),
        inputs=tuple(inputs),
        outputs=tuple(renamed[s] for s in outputs),
        # Results are live at the end of the group.
        workspace_bytes=max(0, peak_of_group(graph, group, exported) - left),
        phase=first.phase,
        random=any(op.random for op in members),
        once=any(op.once for op in members),
        module=common_path(op.module for op in members if op.module),
        extra={"operations": list(group)},
    )


def peak_of_group(graph: Graph, group: Iterable[int], kept: set[int]) -> int:
    """Return the peak of operations that run one after another and leave the storages of `kept`."""
    members = [graph.operations[index] for index in group]
    last = {s: k for k, op in enumerate(members) for s in (*op.outputs, *op.inputs)}
    sizes: dict[int, int] = {}
    live = peak = 0
    for k, op in enumerate(members):
        sizes |= {s: graph.storages[s].bytes for s in op.outputs}
        live += sum(sizes[s] for s in op.outputs)
        peak = max(peak, live + op.workspace_bytes)
        gone = [s for s in {*op.inputs, *op.outputs} if last[s] == k and s not in kept]
        live -= sum(sizes.get(s, 0) for s in gone)
    return peak


def common_path(paths: Iterable[str]) -> str:
    """Return the common beginning of the paths of some modules."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))


def forward_part(graph: Graph) -> Graph:
    """Return the operations of the forward, and their storages; ValueError if there are none."""
    chosen = [op for op in graph.operations if op.phase == "forward"]
    kept = sorted(s for op in chosen for s in op.outputs)
    renamed = {s: number for number, s in enumerate(kept)}
    return Graph(
        [graph.storages[s] for s in kept],
        None,
        [
            replace(
                op,
                inputs=tuple(renamed[s] for s in op.inputs),
                outputs=tuple(renamed[s] for s in op.outputs),
                light_bytes=None,
            )
            for op in chosen
        ],
        name=graph.name,
    )
