"""Programs that keep or repeat whole blocks: the chain's algorithm on a captured graph.

The forward is cut where a single storage leads from the operations before to the operations after.
The operations between two cuts are a block, and the blocks are a chain:
`rotor.algorithms.Persistent` schedules it, and the simulator prices the operations of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rotor.algorithms.persistent import Persistent
from rotor.algorithms.sequence import Sequence as Schedule
from rotor.chain import Chain
from rotor.errors import InfeasibleError
from rotor.graph.contraction import peak_of_group
from rotor.graph.graph import Graph
from rotor.graph.peaks import peak_of
from rotor.graph.program import Program
from rotor.units import exact_bytes, parse_bytes

_NS = 1e9


@dataclass(frozen=True)
class Blocks:
    """The operations of a graph as a chain of blocks.

    Attributes
    ----------
    forward, backward
        Operations of each block, in their order.
    loss
        The loss.
    passed
        The storages that each block passes on.
    """

    forward: list[list[int]]
    backward: list[list[int]]
    loss: int
    passed: list[set[int]]


def _readers(graph: Graph) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in graph.storages]
    for index, op in enumerate(graph.operations):
        for storage in op.inputs:
            found[storage].append(index)
    return found


def cut(graph: Graph) -> Blocks:
    """Cut the forward of a graph at the storages that all later operations depend on.

    Parameters
    ----------
    graph
        Forward, loss and backward of a step.

    Returns
    -------
    Blocks
        One block if no such storage exists.

    Raises
    ------
    ValueError
        The graph has no loss, or nothing before it.
    """
    graph.require_plain("cut()")
    ops = graph.operations
    forward = [k for k, op in enumerate(ops) if op.phase == "forward"]
    losses = [k for k, op in enumerate(ops) if op.phase == "loss"]
    if not (forward and losses):
        raise ValueError("the graph has no forward and no loss, so it has no blocks to cut")
    readers = _readers(graph)
    last = [max((k for k in reads if ops[k].phase == "forward"), default=-1) for reads in readers]
    groups: list[list[int]] = [[]]
    passed: list[set[int]] = []
    alive: set[int] = set()
    for index in forward:
        alive = {s for s in alive if last[s] >= index}
        if groups[-1] and len(alive) == 1:
            passed.append(set(alive))
            groups.append([])
        groups[-1].append(index)
        alive.update(s for s in ops[index].outputs if last[s] > index)
    passed.append(set(ops[losses[0]].inputs))
    block = {s: i for i, group in enumerate(groups) for k in group for s in ops[k].outputs}
    backward: list[list[int]] = [[] for _ in groups]
    current = len(groups) - 1
    for index, op in enumerate(ops):
        if op.phase == "backward":
            current = min([current, *(block[s] for s in op.inputs if s in block)])
            backward[current].append(index)
    return Blocks(groups, backward, losses[0], passed)


def _chain(graph: Graph, blocks: Blocks) -> Chain:
    """Return the blocks' cost model; the simulator counts later what it leaves out."""
    ops, storages = graph.operations, graph.storages

    def size(found: Iterable[int]) -> int:
        return sum(storages[s].bytes for s in found)

    def seconds(found: Sequence[int]) -> float:
        return sum(ops[k].cost_ns for k in found) / _NS

    n = len(blocks.forward)
    later = {s for k, op in enumerate(ops) if op.phase != "forward" for s in op.inputs}
    readers = _readers(graph)
    kept, first_tmp, plain_tmp = [], [], []
    for group, passed in zip(blocks.forward, blocks.passed, strict=True):
        made = {s for k in group for s in ops[k].outputs}
        stays = (made & later) | (made & passed)
        kept.append(size(stays))
        first_tmp.append(peak_of_group(graph, group, stays) - size(stays))
        plain_tmp.append(max(0, peak_of_group(graph, group, made & passed) - size(made & passed)))
    arriving = [0] * (n + 1)
    created, tmp = [0] * n, [0] * n
    alive = {s for s in ops[blocks.loss].outputs if readers[s]}
    arriving[n] = size(alive)
    for i in reversed(range(n)):
        group = blocks.backward[i]
        made = {s for k in group for s in ops[k].outputs}
        pinned = {s for s in made if storages[s].pinned}
        end = max(group, default=-1)
        alive = {s for s in alive | made if s not in pinned and max(readers[s], default=-1) > end}
        arriving[i], created[i] = size(alive), size(pinned)
        tmp[i] = peak_of_group(graph, group, alive | pinned) - arriving[i]
    return Chain(
        [seconds(group) for group in blocks.forward],
        [seconds(group) for group in blocks.backward],
        [0, *(size(passed) for passed in blocks.passed)],
        kept,
        first_tmp,
        tmp,
        forward_nograd_tmp_bytes=plain_tmp,
        grad_bytes=arriving,
        pgrad_bytes=created,
        loss_tmp_bytes=ops[blocks.loss].workspace_bytes,
        hold_output=any(storages[s].pinned for s in blocks.passed[-1]),
    )


def _program(graph: Graph, blocks: Blocks, schedule: Schedule) -> Program:
    """Return the operations that a schedule of blocks runs, without the ones that make nothing."""
    ops: list[int] = []
    seen: set[int] = set()
    for step in schedule:
        if step.kind == "L":
            group = [blocks.loss]
        else:
            group = (blocks.backward if step.kind == "B" else blocks.forward)[step.stage]
        ops += [k for k in group if not (k in seen and graph.operations[k].once)]
        seen.update(group)
    first = {k: place for place, k in reversed(list(enumerate(ops)))}
    wanted: set[int] = set()
    found = []
    for place in reversed(range(len(ops))):
        op = graph.operations[ops[place]]
        if first[ops[place]] == place or wanted & set(op.outputs):
            found.append(ops[place])
            wanted = (wanted - set(op.outputs)) | set(op.inputs)
    return Program(graph, found[::-1])


def plan_blocks(graph: Graph, budget_bytes: int | str) -> Program:
    """Find a program that keeps or repeats whole blocks.

    Parameters
    ----------
    graph
        Forward, loss and backward of a step.
    budget_bytes
        The most bytes that may be live at any moment, or text such as "700MiB".

    Returns
    -------
    Program
        The fastest one tried that fits.

    Raises
    ------
    InfeasibleError
        None fits; ``minimum_bytes`` is the need of the smallest one tried.
    ValueError
        The graph has no loss, or nothing before it.
    """
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    blocks = cut(graph)
    chain = _chain(graph, blocks)
    algorithm = Persistent()
    points = algorithm.curve(chain).bytes.tolist()

    def program_at(point: int) -> Program:
        return _program(graph, blocks, algorithm.solve(chain, max(int(point), 1)))

    least = best = program_at(points[0])
    low, high = 0, len(points) - 1
    while low <= high:
        middle = (low + high) // 2
        program = program_at(points[middle])
        least = min(least, program, key=lambda p: p.peak_bytes)
        if program.peak_bytes <= budget:
            if best.peak_bytes > budget or program.time_ns < best.time_ns:
                best = program
            low = middle + 1
        else:
            high = middle - 1
    if best.peak_bytes > budget:
        raise InfeasibleError(
            f"no program of whole blocks was found within {exact_bytes(budget)}; the smallest of "
            f"{len(blocks.forward)} blocks needs {exact_bytes(least.peak_bytes)}",
            least.peak_bytes,
            peak=peak_of(least),
        )
    return best
