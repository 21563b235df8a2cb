"""Operations of a step in groups: one group for each computation, and graphs made of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from rotor.graph.contraction import contract
from rotor.graph.graph import Graph, Operation, Storage
from rotor.rkgb.grouping import Grouped
from rotor.rkgb.source import Trace


@dataclass
class Unit:
    """Operations of one computation."""

    phase: str
    """"forward", "loss" or "backward"."""
    owner: int
    """Number of the S node; -1 for the inputs' node and the loss."""
    operations: list[int]
    """Numbers of its operations in the graph of the step, in order."""
    part: int = 0
    """0, 1, ... where the backward of a node runs in several parts."""


def units_of(trace: Trace, grouped: Grouped) -> list[Unit]:
    """Return the computations of a step, in an order in which they can run."""
    tasks = trace.lowered.tasks
    units = []
    for number, members in enumerate([grouped.init, *grouped.members]):
        operations = sorted(trace.task_of[node] for node in members if trace.is_operation(node))
        if operations:
            units.append(Unit("forward", number - 1, operations))
    units.append(Unit("loss", -1, [trace.lowered.loss]))
    owners = _owners(trace, grouped)
    late: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        if task.phase == "backward":
            late.setdefault(owners[index], []).append(index)
    return units + _ordered(trace, late)


def _owners(trace: Trace, grouped: Grouped) -> dict[int, int]:
    """Return, for each operation of the backward, the S node that it is the backward of.

    Autograd numbers the operations of the forward, and the operations that it runs for each in the
    backward have its number. Sums of gradients have no number: they come out of order.
    """
    first: dict[int, int] = {}
    for node in trace.forward:
        sequence = node.meta.get("seq_nr")
        if sequence is not None and grouped.home[node] >= 0 and node not in grouped.effects:
            first.setdefault(sequence, grouped.home[node])
    tasks = trace.lowered.tasks
    lowest: dict[fx.Node, int] = {}
    found: dict[int, int] = {}
    for node in trace.backward:
        reads = [lowest[read] for read in node.all_input_nodes if read in lowest]
        sequence = node.meta.get("seq_nr")
        is_late = sequence is None or any(sequence > number for number in reads)
        if not is_late:
            reads.append(sequence)
        if reads:
            lowest[node] = min(reads)
        if trace.is_operation(node) and not is_late and sequence in first:
            found[trace.task_of[node]] = first[sequence]
    makers = {s: k for k, task in enumerate(tasks) for s in task.made.values()}
    backward = [k for k, task in enumerate(tasks) if task.phase == "backward"]
    for index in backward:
        made = [makers[s] for s in tasks[index].inputs]
        known = [k for k in made if k in found]
        if index not in found and known:
            found[index] = found[max(known)]
    for index in reversed(backward):
        if index not in found:
            read = set(tasks[index].made.values())
            users = [k for k in backward if k in found and read.intersection(tasks[k].inputs)]
            found[index] = found[users[0]] if users else len(grouped.members) - 1
    return found


def _ordered(trace: Trace, late: dict[int, list[int]]) -> list[Unit]:
    """Sort the backward so that each node runs at a stretch, or in parts where others intervene."""
    tasks = trace.lowered.tasks
    makers = {s: k for k, task in enumerate(tasks) for s in task.made.values()}
    backward = {index for indices in late.values() for index in indices}
    needs = {k: {makers[s] for s in tasks[k].inputs} & backward for k in backward}
    fixed = [k for k in sorted(backward) if tasks[k].random or tasks[k].once]
    for first, second in itertools.pairwise(fixed):
        needs[second].add(first)
    done: set[int] = set()
    waiting = {owner: list(indices) for owner, indices in late.items()}
    parts: dict[int, int] = {}
    units = []

    def runnable(owner: int) -> list[int]:
        ran: list[int] = []
        for index in waiting[owner]:
            if needs[index] <= done.union(ran):
                ran.append(index)
        return ran

    while waiting:
        options = {owner: runnable(owner) for owner in waiting}
        whole = [owner for owner, ran in options.items() if len(ran) == len(waiting[owner])]
        chosen = min(
            whole or [owner for owner, ran in options.items() if ran],
            key=lambda owner: waiting[owner][0],
        )
        ran = options[chosen]
        units.append(Unit("backward", chosen, ran, parts.get(chosen, 0)))
        parts[chosen] = parts.get(chosen, 0) + 1
        done.update(ran)
        waiting[chosen] = [index for index in waiting[chosen] if index not in ran]
        if not waiting[chosen]:
            del waiting[chosen]
    return units


def contracted(
    step: Graph,
    units: Sequence[Sequence[Unit]],
    labels: Sequence[str],
    modules: Sequence[str] | None = None,
) -> Graph:
    """Return the graph in which each group of computations is one operation.

    The groups hold all computations in order; `modules` are by default common parts of paths.
    """
    order = [index for some in units for unit in some for index in unit.operations]
    groups, begin = [], 0
    for some in units:
        end = begin + sum(len(unit.operations) for unit in some)
        groups.append(list(range(begin, end)))
        begin = end
    ordered = Graph(step.storages, None, [step.operations[k] for k in order], name=step.name)
    small = contract(ordered, groups, labels)
    paths = [op.module for op in small.operations] if modules is None else modules
    members = [[order[k] for k in op.extra["operations"]] for op in small.operations]
    # Groups with operations that run once, or are random, first run in the order of the step.
    operations = [
        replace(
            op,
            module=path,
            once=not is_repeatable(step, own),
            random=op.random or any(step.operations[k].once for k in own),
            extra={"operations": own},
        )
        for op, path, own in zip(small.operations, paths, members, strict=True)
    ]
    return Graph(small.storages, None, operations, name=step.name)


def is_repeatable(step: Graph, members: Sequence[int]) -> bool:
    """Return True if these operations of a step can run again, except the ones that run once."""
    once = [step.operations[k] for k in members if step.operations[k].once]
    again = [step.operations[k] for k in members if not step.operations[k].once]
    made = {s for op in once for s in op.outputs}
    return bool(again) and all(made.isdisjoint(op.inputs) for op in again)


@dataclass
class Part:
    """Some operations of a graph as a graph of their own."""

    graph: Graph
    operations: dict[int, int]
    """Their numbers in the part, by their numbers in the whole."""
    storages: dict[int, int]
    """The same of their storages."""


def part_of(graph: Graph, chosen: Iterable[int], *, loss: bool) -> Part:
    """Return some operations of a graph; the results of all others exist from the start.

    `chosen` are numbers of operations, the loss not among them. With `loss`, the operations between
    forward and backward are replaced by one that makes, at no cost, the values that these read.
    """
    picked = sorted(chosen)
    operations = [graph.operations[k] for k in picked]
    made = {s for op in operations for s in op.outputs}
    others = set(range(len(graph))) - set(picked)
    leaving = made & {s for k in others for s in graph.operations[k].inputs}
    phase = {s: graph.operations[k].phase for s, k in enumerate(graph.producers)}
    arriving = {
        s for op in operations for s in op.inputs if s not in made and phase[s] != "forward"
    }
    kept = sorted(made | arriving) if loss else sorted(made)
    number = {s: k for k, s in enumerate(kept)}
    forward = [k for k in picked if graph.operations[k].phase == "forward"]
    backward = [k for k in picked if graph.operations[k].phase == "backward"]
    found = [_renumbered(graph.operations[k], number) for k in forward]
    if loss:
        read = tuple(number[s] for s in sorted(leaving) if phase[s] == "forward")
        given = tuple(number[s] for s in sorted(arriving))
        found.append(Operation("loss", 0, read, given, phase="loss"))
    found += [_renumbered(graph.operations[k], number) for k in backward]
    places = {k: i for i, k in enumerate(forward)}
    places |= {k: i for i, k in enumerate(backward, len(forward) + loss)}
    storages = [
        Storage(graph.storages[s].bytes, graph.storages[s].pinned or s in leaving) for s in kept
    ]
    return Part(Graph(storages, None, found, name=graph.name), places, number)


def _renumbered(op: Operation, number: Mapping[int, int]) -> Operation:
    inputs = tuple(number[s] for s in op.inputs if s in number)
    return replace(op, inputs=inputs, outputs=tuple(number[s] for s in op.outputs))
