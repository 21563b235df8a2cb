"""Logs of programs that are known in closed form, and of programs as long as one likes.

`linear` is the uniform network on which heuristics are compared as it grows, `adversarial` the
network that is built against a heuristic while it runs [1]_, `random_program` many training steps
of a small network.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021: theorem 3.1 (linear
   networks), theorem 3.2 (the adversary).
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass

from rotor.simrd.interactive import Interactive
from rotor.simrd.log_writer import LogWriter
from rotor.simrd.logs import Log, parse

__all__ = ["Adversarial", "adversarial", "linear", "linear_text", "random_program"]

_STEP = b"@"


def _call(
    writer: LogWriter, name: str, args: list[str], results: list[str], time_ns: int, size: int
) -> None:
    fresh = [-1] * len(results)
    writer.call(name, args, results, time_ns, bytes=[size] * len(results), aliases=fresh)


def linear_text(n: int) -> bytes:
    """Return the text of the log of `linear`.

    Parameters
    ----------
    n
        Operations in each direction, at least 1.

    Returns
    -------
    bytes
        The log.

    Raises
    ------
    ValueError
        `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"a linear network needs n >= 1 operations, got {n}")
    writer = LogWriter()
    writer.annotate("START")
    for i in range(n):
        _call(writer, "forward", [f"f{i - 1}"] if i else [], [f"f{i}"], 1, 1)
    writer.annotate("BACKWARD")
    writer.release(f"f{n - 1}")
    _call(writer, "backward", [], [f"b{n - 1}"], 1, 1)
    for i in reversed(range(n - 1)):
        writer.release(f"f{i}")
        args = [f"f{i - 1}"] if i else []
        _call(writer, "backward", [*args, f"b{i + 1}"], [f"b{i}"], 1, 1)
        writer.release(f"b{i + 1}")
    return writer.getvalue()


def linear(n: int) -> Log:
    """Return the uniform linear network: `n` operations forward, `n` backward, 1 ns, 1 byte each.

    Forward operation i reads the output of operation i - 1. Backward operation i reads the gradient
    of operation i + 1 and the output of forward operation i - 1; the first one to run, n - 1, reads
    nothing. The output of forward operation i is released before backward operation i runs, a
    gradient after the operation that reads it. Nothing is constant.

    Parameters
    ----------
    n
        Operations in each direction, at least 1.

    Returns
    -------
    Log
        Of 2 n operations.

    Raises
    ------
    ValueError
        `n` is below 1.
    """
    return parse(linear_text(n))


@dataclass(frozen=True)
class Adversarial:
    """Network that an adversary built against a heuristic.

    Attributes
    ----------
    heuristic, paths, nodes
        As asked for.
    budget_bytes
        The memory it ran in: `paths` storages of 1 byte, the root among them.
    computations
        Executions that the heuristic needed, each of 1 ns.
    static_computations
        Executions that the same graph needs when it is known beforehand: one for every node.
    lengths
        Nodes on each path.
    text
        The log of the program, in the order in which the adversary made it.
    static_text
        The log of the same operations path by path, each released once it is read: without a
        rematerialization in 3 bytes.
    """

    heuristic: str
    paths: int
    nodes: int
    budget_bytes: int
    computations: int
    static_computations: int
    lengths: tuple[int, ...]
    text: bytes
    static_text: bytes

    @property
    def log(self) -> Log:
        """The program, in the order of the adversary."""
        return parse(self.text)

    @property
    def static_log(self) -> Log:
        """The same operations in the order of a static plan."""
        return parse(self.static_text)


def adversarial(
    nodes: int,
    paths: int,
    heuristic: str = "DTR",
    *,
    runtime: str = "V2EagerOptimized",
    seed: int = 0,
) -> Adversarial:
    """Return the network that makes a heuristic recompute whole paths, over and over.

    `paths` paths leave one root, a constant. Memory holds `paths` storages, the root's among them,
    so that at any moment some path has nothing in memory: the adversary makes that path one node
    longer, the longest such path first, and the runtime has to compute all of it again. Every node
    takes 1 ns and 1 byte. Whichever path it takes, n nodes on B paths cost at least n^2 / (2 B)
    computations, where n do if the order is chosen beforehand [1]_.

    Parameters
    ----------
    nodes
        Number of nodes of all paths together, at least 1.
    paths
        Number of paths, at least 3.
    heuristic, runtime, seed
        Simulated program that it is built against, as in `rotor.simrd.simulate`.

    Returns
    -------
    Adversarial
        The program, and its cost for the heuristic.

    Raises
    ------
    ValueError
        `nodes` or `paths` is too small, or the heuristic or runtime is unknown.

    References
    ----------
    .. [1] M. Kirisame et al., ICLR 2021, theorem 3.2.
    """
    if nodes < 1:
        raise ValueError(f"an adversarial network needs at least 1 node, got {nodes}")
    if paths < 3:
        raise ValueError(
            f"an adversarial network needs at least 3 paths (the root, a node and its input have "
            f"to fit in memory), got {paths}"
        )
    runner = Interactive(heuristic, budget_bytes=paths, runtime=runtime, seed=seed)
    writer = LogWriter()
    writer.annotate("START")
    writer.constant("root", 1)
    root = runner.constant("root", 1)
    chains: list[list[str]] = [[] for _ in range(paths)]
    made: list[str] = []
    for node in range(nodes):
        empty = [j for j in range(paths) if not any(map(runner.is_defined, chains[j]))]
        chosen = max(empty, key=lambda j: (len(chains[j]), -j))
        source = chains[chosen][-1] if chains[chosen] else root
        name = f"p{chosen}_{len(chains[chosen])}"
        chains[chosen] += runner.op(f"node{node}", [source], bytes=[1], cost_ns=1)
        _call(writer, "node", [_log_name(chosen, len(chains[chosen]) - 2)], [name], 1, 1)
        made.append(name)
    for name in made:
        writer.release(name)
    return Adversarial(
        heuristic=heuristic,
        paths=paths,
        nodes=nodes,
        budget_bytes=paths,
        computations=runner.model_compute + runner.remat_compute,
        static_computations=nodes,
        lengths=tuple(len(chain) for chain in chains),
        text=writer.getvalue(),
        static_text=_path_by_path([len(chain) for chain in chains]),
    )


def _log_name(path: int, node: int) -> str:
    return "root" if node < 0 else f"p{path}_{node}"


def _path_by_path(lengths: list[int]) -> bytes:
    writer = LogWriter()
    writer.annotate("START")
    writer.constant("root", 1)
    for path, length in enumerate(lengths):
        for node in range(length):
            _call(writer, "node", [_log_name(path, node - 1)], [_log_name(path, node)], 1, 1)
            if node:
                writer.release(_log_name(path, node - 1))
        if length:
            writer.release(_log_name(path, length - 1))
    return writer.getvalue()


def random_program(
    commands: int, *, seed: int = 0, pool: int = 64, path: str | os.PathLike[str] | None = None
) -> Log:
    """Return training steps of a small random network, enough for a number of commands.

    Every layer reads the one before it, its weight, and at times an earlier layer; its backward
    reads what it read and makes two gradients. Activations are released by the backward, so that
    about `pool` of them are live at once however long the program is. Steps are independent of one
    another.

    Parameters
    ----------
    commands
        Commands that the log has at least (constants aside); the last step is complete.
    seed
        Of the sizes, times and skipping connections.
    pool
        Layers of the network, at least 2.
    path
        A file to write the log to, from which it is read then; without one, its text (some 170
        bytes a command) stays in memory with it.

    Returns
    -------
    Log
        The program.

    Raises
    ------
    ValueError
        `commands` is below 1 or `pool` below 2.
    """
    if commands < 1:
        raise ValueError(f"a program needs at least 1 command, got {commands}")
    if pool < 2:
        raise ValueError(f"a random program needs a pool of at least 2 storages, got {pool}")
    rng = random.Random(seed)
    head = LogWriter()
    head.annotate("START")
    for i in range(pool):
        head.constant(f"w{i}", rng.randint(1, 64) << 10)
    head.constant("x", 1 << 20)
    step, per_step = _training_step(rng, pool)
    count = -(-commands // per_step)
    steps = (step.replace(_STEP, b"_%d" % number) for number in range(count))
    pieces = itertools.chain([head.getvalue()], steps)
    if path is None:
        return parse(b"".join(pieces))
    with open(path, "wb") as file:
        file.writelines(pieces)
    return parse(path)


def _training_step(rng: random.Random, layers: int) -> tuple[bytes, int]:
    """Return the text of a step, with the marker of its number, and how many commands it has."""
    mark = _STEP.decode()
    writer = LogWriter()
    count = 0
    inputs: list[list[str]] = []
    sizes = [int(2 ** rng.uniform(14, 22)) for _ in range(layers)]
    times = [int(10 ** rng.uniform(3, 6)) for _ in range(layers)]

    def call(name: str, args: list[str], results: list[str], time_ns: int, *size: int) -> None:
        nonlocal count
        writer.call(name, args, results, time_ns, bytes=list(size), aliases=[-1] * len(size))
        count += 1

    def release(name: str) -> None:
        nonlocal count
        writer.release(name)
        count += 1

    for i in range(layers):
        reads = [f"h{i - 1}{mark}" if i else "x", f"w{i}"]
        if i > 1 and rng.random() < 0.25:
            reads.append(f"h{rng.randrange(max(0, i - 8), i - 1)}{mark}")
        inputs.append(reads)
        call("forward", reads, [f"h{i}{mark}"], times[i], sizes[i])
    call("loss", [f"h{layers - 1}{mark}"], [f"g{layers}{mark}"], 1000, sizes[-1])
    for i in reversed(range(layers)):
        made = [f"g{i}{mark}", f"d{i}{mark}"]
        call("backward", [f"g{i + 1}{mark}", *inputs[i]], made, 2 * times[i], sizes[i], 4096)
        release(f"g{i + 1}{mark}")
        release(f"d{i}{mark}")
        release(f"h{i}{mark}")
    release(f"g0{mark}")
    return writer.getvalue(), count
