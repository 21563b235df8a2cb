"""The published simulator of dynamic rematerialization, as plainly as can be.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021. Programs come from `read_log`. Where
descriptions of the simulator leave a choice, the choice that agrees with its recorded decisions is
taken; the comments say "open" where those decisions agree with other choices too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from oracles.simrd_log import COMPUTE, GET, PIN, RELEASE, Operation, Program, read_log

__all__ = ["HEURISTICS", "Outcome", "Program", "baseline", "read_log", "simulate"]

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Outcome:
    """Figures of a run, at its end or where it failed."""

    status: str  # "ok", "oom", "thrash"
    clock: int
    model_compute: int
    remat_compute: int
    max_memory: int
    n_evict: int
    n_remat: int
    n_model_ops: int
    n_eval: int
    n_access: int
    const_memory: int
    bottleneck_memory: int
    trace_of_evictions: tuple[int, ...]  # root tensors, releases of the eager runtime included


class Storage:
    def __init__(self, root: int, size: int) -> None:
        self.root = root
        self.size = size
        self.compute = 0
        self.tensors: list[Tensor] = []
        self.is_material = False
        self.is_pinned = False
        self.is_banished = False
        self.locks = 0
        self.references = 0
        self.last_access = 0
        self.evicted_dependents: set[int] = set()  # tensors; V1


class Tensor:
    def __init__(self, number: int, storage: Storage, operation: Operation) -> None:
        self.number = number
        self.storage = storage
        self.operation = operation
        self.size = operation.sizes[number - operation.first]
        self.parents: list[Tensor] = []  # repeats are kept
        self.children: list[Tensor] = []
        self.siblings: list[Tensor] = []
        self.is_defined = False


class OutOfMemory(Exception):
    """The budget is too small for what is locked or pinned."""


class Thrashing(Exception):
    """Rematerializations took longer than they may."""


class Counter:
    def __init__(self) -> None:
        self.evaluations = 0
        self.accesses = 0

    def around(self, storage: Storage, way: int) -> Iterator[Storage]:
        """The storages next to one: an access per link of a tensor to a parent or child.

        What was banished is next to nothing (open: whether it is next to another banished one).
        """
        for tensor in storage.tensors:
            for other in tensor.parents if way == BACKWARD else tensor.children:
                if other.storage.is_banished:
                    continue
                self.accesses += 1
                if other.storage is not storage:
                    yield other.storage

    def walk(self, storage: Storage, way: int) -> tuple[set[Storage], set[Storage]]:
        """What is evicted and reachable through evicted storages, and what is in memory there."""
        interior: set[Storage] = set()
        frontier: set[Storage] = set()
        todo = [storage]
        while todo:
            for other in self.around(todo.pop(), way):
                if other.is_material:
                    frontier.add(other)
                elif other not in interior and other is not storage:
                    interior.add(other)
                    todo.append(other)
        return interior, frontier - {storage}  # open: whether it can be in its own frontier


class Surroundings(Protocol):
    """What is evicted around a storage, kept as storages come and go."""

    def evicted(self, storage: Storage) -> None: ...

    def arrived(self, storages: list[Storage]) -> None: ...

    def cost(self, storage: Storage) -> int: ...


class Nothing:
    """Only the storage counts."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def evicted(self, storage: Storage) -> None:
        return

    def arrived(self, storages: list[Storage]) -> None:
        return

    def cost(self, storage: Storage) -> int:
        return storage.compute


class Unity(Nothing):
    def cost(self, storage: Storage) -> int:
        return 1


class Node:
    def __init__(self, value: int) -> None:
        self.value = value
        self.above: Node | None = None


class Classes(Nothing):
    """Union-find over evicted storages: one that comes back leaves its class undivided."""

    def __init__(self, counter: Counter) -> None:
        super().__init__(counter)
        self.nodes: dict[Storage, Node] = {}

    def root(self, storage: Storage) -> Node:
        # A storage that was not computed yet is alone, and worth nothing.
        node = root = self.nodes.setdefault(storage, Node(0))
        self.counter.accesses += 1
        while root.above is not None:
            root = root.above
            self.counter.accesses += 1
        while node.above is not None:
            node.above, node = root, node.above
        return root

    def neighbours(self, storage: Storage) -> list[Storage]:
        both = [*self.counter.around(storage, BACKWARD), *self.counter.around(storage, FORWARD)]
        return [other for other in both if not other.is_material]

    def evicted(self, storage: Storage) -> None:
        self.nodes[storage] = Node(storage.compute)
        for other in self.neighbours(storage):
            left, right = self.root(other), self.root(storage)
            if left is not right:
                left.above = right
                right.value += left.value

    def arrived(self, storages: list[Storage]) -> None:
        for storage in storages:
            self.root(storage).value -= storage.compute
            del self.nodes[storage]

    def cost(self, storage: Storage) -> int:
        roots = {self.root(other) for other in self.neighbours(storage)}
        return storage.compute + sum(root.value for root in roots)


class Region:
    def __init__(self) -> None:
        self.interior: set[Storage] = set()
        self.frontier: set[Storage] = set()
        self.compute = 0


class Regions(Nothing):
    """Regions in both directions: rebuilt where something arrives, extended where it goes.

    Sums are those of the moment of rebuilding or absorbing (open: or of the moment of asking). An
    operation that is added is seen when a region is rebuilt.
    """

    ways: tuple[int, ...] = (FORWARD, BACKWARD)

    def __init__(self, counter: Counter) -> None:
        super().__init__(counter)
        self.regions: dict[tuple[Storage, int], Region] = {}

    def region(self, storage: Storage, way: int) -> Region:
        return self.regions.setdefault((storage, way), Region())

    def rebuild(self, storage: Storage, way: int) -> None:
        region = self.region(storage, way)
        region.interior, region.frontier = self.counter.walk(storage, way)
        region.compute = sum(other.compute for other in region.interior)

    def arrived(self, storages: list[Storage]) -> None:
        for storage in storages:
            self.rebuild(storage, FORWARD)
            self.rebuild(storage, BACKWARD)
        for storage in storages:
            for way in (FORWARD, BACKWARD):
                for other in self.region(storage, way).frontier:
                    self.rebuild(other, 1 - way)

    def evicted(self, storage: Storage) -> None:
        for way in (FORWARD, BACKWARD):
            for other in self.region(storage, 1 - way).frontier:
                self.absorb(other, storage, way)
        for way in (FORWARD, BACKWARD):
            del self.regions[storage, way]

    def absorb(self, other: Storage, storage: Storage, way: int) -> None:
        mine, its = self.region(other, way), self.region(storage, way)
        added = (its.interior | {storage}) - mine.interior
        self.counter.accesses += len(added)
        mine.interior |= added
        mine.compute += sum(one.compute for one in added)
        mine.frontier = (mine.frontier | its.frontier) - {storage, other}

    def cost(self, storage: Storage) -> int:
        return storage.compute + sum(self.region(storage, way).compute for way in self.ways)


class Ancestors(Regions):
    ways = (BACKWARD,)


class Union(Nothing):
    """DTRUnopt: walked at every evaluation, what is on both sides counting once."""

    def near(self, storage: Storage) -> set[Storage]:
        forward, backward = (self.counter.walk(storage, way)[0] for way in (FORWARD, BACKWARD))
        return forward | backward

    def unoptimized(self, storage: Storage, clock: int) -> float:
        near = self.near(storage)
        # Accesses of any kind (of the neighbours, open: or by the model only).
        last = max(one.last_access for one in near | {storage})
        compute = storage.compute + sum(one.compute for one in near)
        return divide(compute, storage.size * (clock - last))


# Name: what stands above the line, whether the size and the staleness stand below it.
HEURISTICS: dict[str, tuple[type[Nothing], bool, bool]] = {
    "DTR": (Regions, True, True),
    "DTREqClass": (Classes, True, True),
    "DTRLocal": (Nothing, True, True),
    "DTRUnopt": (Union, True, True),
    "MSPS": (Ancestors, True, False),
    "DTRAncestors": (Ancestors, True, True),
    "LRU": (Nothing, False, False),
    "LargestStorage": (Unity, True, False),
    "RandomStorage": (Nothing, False, False),
    **{
        f"Ab{name}{'Size' if size else ''}{'Stale' if stale else ''}": (above, size, stale)
        for name, above in [("E", Regions), ("Eq", Classes), ("Local", Nothing), ("", Unity)]
        for size in (True, False)
        for stale in (True, False)
        if name or size or stale
    },
    "AbRandom": (Nothing, False, False),
}


def divide(above: int, below: int) -> float:
    return above / below if below > 0 else math.inf


class Runtime:
    def __init__(
        self,
        program: Program,
        heuristic: str,
        runtime: str,
        budget: float,
        remat_limit: float,
        rng: random.Random,
    ) -> None:
        self.program = program
        self.heuristic = heuristic
        self.runtime = runtime
        self.budget = budget
        self.remat_limit = remat_limit
        self.rng = rng
        self.counter = Counter()
        above, self.by_size, self.by_staleness = HEURISTICS[heuristic]
        self.surroundings: Surroundings = above(self.counter)
        self.tensors: list[Tensor] = []
        self.pool: list[Storage] = []
        self.evictions: list[int] = []
        self.clock = 1
        self.memory = self.max_memory = 0
        self.const_memory = self.bottleneck_memory = 0
        self.model_compute = self.remat_compute = 0
        self.n_model_ops = self.n_remat = 0

    # The commands.

    def compute(self, operation: Operation) -> None:
        inputs = [self.tensors[number] for number in operation.inputs]
        outputs = []
        for k, (size, alias) in enumerate(zip(operation.sizes, operation.aliases, strict=True)):
            number = operation.first + k
            storage = Storage(number, size) if alias < 0 else inputs[alias].storage
            outputs.append(Tensor(number, storage, operation))
        for tensor in outputs:
            storage = tensor.storage
            # An operation counts once for a storage, however many views of it it makes.
            if all(other.operation is not operation for other in storage.tensors):
                storage.compute += operation.cost
            storage.tensors.append(tensor)
            storage.references += 1
            tensor.parents = list(inputs)
            tensor.siblings = [other for other in outputs if other is not tensor]
            for parent in inputs:
                parent.children.append(tensor)
            self.tensors.append(tensor)
            self.note_evicted(tensor)
        self.materialize(outputs[0], is_model=True)
        for tensor in outputs:
            tensor.storage.last_access = self.clock
        if not inputs and operation.cost == 0:
            self.const_memory += sum(operation.sizes)

    def pin_tensor(self, tensor: Tensor) -> None:
        if tensor.storage.is_banished:
            raise ValueError(f"tensor {tensor.number} was banished, and is pinned")
        if not tensor.is_defined:
            self.materialize(tensor, is_model=False)
        self.pin(tensor.storage)

    def release(self, storage: Storage) -> None:
        storage.references -= 1
        if storage.references != 0:
            return
        if self.runtime == "V1":
            self.try_to_banish(storage)
        elif self.runtime == "V2Eager" and storage.is_material and not storage.is_pinned:
            self.evict(storage)

    def run(self) -> str:
        try:
            for what, number in self.program.commands:
                if what == COMPUTE:
                    self.compute(self.program.operations[number])
                elif what == GET:
                    self.tensors[number].storage.references += 1
                elif what == PIN:
                    self.pin_tensor(self.tensors[number])
                elif what == RELEASE:
                    self.release(self.tensors[number].storage)
        except OutOfMemory:
            return "oom"
        except Thrashing:
            return "thrash"
        return "ok"

    # Executing.

    def materialize(self, tensor: Tensor, *, is_model: bool) -> None:
        """Executes, first what is needed: `execution` asks for tensors, answered in depth."""
        waiting = [self.execution(tensor, is_model)]
        while waiting:
            needed = next(waiting[-1], None)
            if needed is None:
                waiting.pop()
            else:
                waiting.append(self.execution(needed, False))

    def execution(self, tensor: Tensor, is_model: bool) -> Iterator[Tensor]:
        parents = list(tensor.parents)
        for parent in parents:
            if parent.storage.is_banished:
                raise ValueError(f"tensor {parent.number} was banished, and is read")
            if self.runtime != "V1" or parent.storage.references > 0:
                parent.storage.last_access = self.clock
        here = [parent for parent in parents if parent.is_defined]
        gone = [parent for parent in parents if not parent.is_defined]
        for parent in here:
            self.lock(parent.storage)
        for parent in gone:
            if not parent.is_defined:
                yield parent
            self.lock(parent.storage)
        size = sum(tensor.operation.sizes)
        while self.memory + size > self.budget:
            if not self.pool:
                raise OutOfMemory
            self.evict(self.choose())
        self.execute(tensor, is_model)
        for parent in parents:
            # Banishing drops all locks, also those of further arguments.
            if parent.storage.locks > 0:
                self.unlock(parent.storage)
            if self.runtime == "V1":
                self.try_to_banish(parent.storage)
        if self.remat_compute > self.remat_limit:
            raise Thrashing
        around = size + sum(parent.size for parent in parents)
        self.bottleneck_memory = max(self.bottleneck_memory, around)

    def execute(self, tensor: Tensor, is_model: bool) -> None:
        cost = tensor.operation.cost
        self.clock += cost
        if is_model:
            self.model_compute += cost
            self.n_model_ops += 1
        else:
            self.remat_compute += cost
            self.n_remat += 1
        # Outputs that are there already exist twice for a moment.
        self.memory += sum(tensor.operation.sizes)
        self.max_memory = max(self.max_memory, self.memory)
        arrived = []
        for output in [*tensor.siblings, tensor]:
            if output.is_defined:
                self.memory -= output.size
                continue
            output.is_defined = True
            for parent in output.parents:
                parent.storage.evicted_dependents.discard(output.number)
            if not output.storage.is_material:
                output.storage.is_material = True
                arrived.append(output.storage)
        self.pool += [one for one in arrived if one.locks == 0 and not one.is_pinned]
        self.surroundings.arrived(arrived)

    # Storages.

    def lock(self, storage: Storage) -> None:
        storage.locks += 1
        if storage in self.pool:
            self.pool.remove(storage)

    def unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0 and not storage.is_pinned:
            self.pool.append(storage)

    def pin(self, storage: Storage) -> None:
        storage.is_pinned = True
        if storage in self.pool:
            self.pool.remove(storage)

    def note_evicted(self, tensor: Tensor) -> None:
        for parent in tensor.parents:
            if parent.storage is not tensor.storage:
                parent.storage.evicted_dependents.add(tensor.number)

    def evict(self, storage: Storage) -> None:
        self.evictions.append(storage.root)
        self.memory -= storage.size
        storage.is_material = False
        if storage in self.pool:
            self.pool.remove(storage)
        for tensor in storage.tensors:
            tensor.is_defined = False
            self.note_evicted(tensor)
        self.surroundings.evicted(storage)

    def try_to_banish(self, storage: Storage) -> None:
        """Frees a storage for good; its children can then not be made again, and are pinned.

        A banished output comes back when another output of its operation is rematerialized, and
        can be evicted again.
        """
        if storage.is_banished or storage.references > 0 or storage.evicted_dependents:
            return
        storage.locks = 0
        if storage.is_material:
            self.evict(storage)
        storage.is_banished = True
        for tensor in storage.tensors:
            for parent in tensor.parents:
                parent.storage.evicted_dependents.discard(tensor.number)
                if tensor in parent.children:
                    parent.children.remove(tensor)
            for child in tensor.children:
                if child.storage is not storage:
                    child.parents = [one for one in child.parents if one is not tensor]
                    self.pin(child.storage)

    # Choosing.

    def choose(self) -> Storage:
        """The last of the cheapest in the order of the pool, or the first that costs nothing."""
        if self.heuristic in ("RandomStorage", "AbRandom"):
            self.counter.evaluations += 1
            self.counter.accesses += 1
            return self.pool[self.rng.randrange(len(self.pool))]
        best = math.inf
        chosen = self.pool[0]
        for storage in self.pool:
            cost = self.cost(storage)
            if cost <= best:
                best, chosen = cost, storage
            if cost == 0:
                break
        return chosen

    def cost(self, storage: Storage) -> float:
        self.counter.evaluations += 1
        self.counter.accesses += 1
        if self.heuristic == "LRU":
            return storage.last_access
        if isinstance(self.surroundings, Union):
            return self.surroundings.unoptimized(storage, self.clock)
        above = self.surroundings.cost(storage)
        if not self.by_size and not self.by_staleness:
            return above
        below = storage.size if self.by_size else 1
        if self.by_staleness:
            below *= self.clock - storage.last_access
        return divide(above, below)


def simulate(
    program: Program,
    heuristic: str = "DTREqClass",
    budget: float = math.inf,
    *,
    runtime: str = "V2EagerOptimized",
    remat_limit: float = math.inf,
    no_dealloc: bool = False,
    rng: random.Random | None = None,
) -> Outcome:
    """Runs a program within `budget` bytes, giving up after `remat_limit` ns of rematerialization.

    `runtime`: V1 (releases banish), V2 (releases do nothing), V2Eager (they evict), the last two
    also with "Optimized". `no_dealloc` takes the releases out. `rng` serves the heuristics that
    draw.
    """
    kind = runtime.removesuffix("Optimized")
    if kind not in ("V1", "V2", "V2Eager"):
        raise ValueError(f"unknown runtime {runtime!r}")
    if kind == "V1" and issubclass(HEURISTICS[heuristic][0], Classes | Regions):
        raise ValueError(f"{runtime} cannot serve {heuristic}")
    if no_dealloc:
        kept: Iterable[tuple[str, int]] = (c for c in program.commands if c[0] != RELEASE)
        program = Program(program.operations, list(kept), program.names)
    run = Runtime(program, heuristic, kind, budget, remat_limit, rng or random.Random(0))
    status = run.run()
    return Outcome(
        status=status,
        clock=run.clock,
        model_compute=run.model_compute,
        remat_compute=run.remat_compute,
        max_memory=run.max_memory,
        n_evict=len(run.evictions),
        n_remat=run.n_remat,
        n_model_ops=run.n_model_ops,
        n_eval=run.counter.evaluations,
        n_access=run.counter.accesses,
        const_memory=run.const_memory,
        bottleneck_memory=run.bottleneck_memory,
        trace_of_evictions=tuple(run.evictions),
    )


def baseline(program: Program) -> Outcome:
    """What ratios refer to: V1 without a budget."""
    return simulate(program, "LRU", runtime="V1")
