"""Chains as graphs: each stage is a forward with a lazy tape, and a backward. Needs no PyTorch.

The forwards Fn, Fck and Fe of a sequence are runs of one operation: which of them a run is follows
from what is read later. The input of the chain exists before the step and is no storage: the peak
of a chain is that of its graph's program and ``x_bytes[0]``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.algorithms.sequence import BACKWARD, FCK, FE, FN, LOSS, Sequence
from rotor.chain import Chain
from rotor.graph.graph import FIRST, Graph, Operation, Pinned, Storage
from rotor.graph.program import Priced, Program

_NS = 1_000_000_000


def graph_of_chain(chain: Chain) -> Graph:
    """Return the graph of a chain of n stages, whose programs cost what its sequences cost.

    Operations 0 to n - 1 are the forwards, n is the loss, and 2 n - i is the backward of stage i. A
    forward makes the output and, lazily, the rest of what its backward keeps; the backward reads
    both, which then come from the same run. No storage can move to a second tier: autograd holds a
    tape and its inputs. Raises ValueError if ``xbar_bytes`` of a stage is below ``x_bytes`` of its
    output.
    """
    for i in range(len(chain)):
        if chain.xbar_bytes[i] < chain.x_bytes[i + 1]:
            raise ValueError(
                f"stage {i} keeps xbar_bytes = {chain.xbar_bytes[i]}, expected at least the "
                f"{chain.x_bytes[i + 1]} bytes of its output"
            )
    return _graph_of(chain)


def _graph_of(chain: Chain, loss_ns: int = 0) -> Graph:
    n, storages = len(chain), list[Storage]()
    names = chain.names or [f"stage {i}" for i in range(n)]

    def made(size: int, pinned: Pinned = False, *, lazy: bool = False) -> int:
        storages.append(Storage(size, pinned, movable=False, lazy=lazy))
        return len(storages) - 1

    x = [made(size) for size in chain.x_bytes[1:n]]
    x.append(made(chain.x_bytes[n], FIRST if chain.hold_output else False))
    kept = [chain.xbar_bytes[i] - chain.x_bytes[i + 1] for i in range(n)]
    rest = [made(max(size, 0), lazy=True) for size in kept]
    grad = [made(size) for size in chain.grad_bytes]
    pgrad = [made(size, pinned=True) for size in chain.pgrad_bytes]
    operations = [
        Operation(
            names[i],
            round(chain.forward_time[i] * _NS),
            tuple(x[i - 1 : i]) if i else (),
            (x[i], rest[i]),
            chain.forward_tmp_bytes[i],
            light_bytes=chain.forward_nograd_tmp_bytes[i],
            once=bool(chain.once[i]),
            module=names[i],
        )
        for i in range(n)
    ]
    operations.append(
        Operation("loss", loss_ns, (x[-1],), (grad[n],), chain.loss_tmp_bytes, "loss")
    )
    operations += [
        Operation(
            names[i],
            round(chain.backward_time[i] * _NS),
            (rest[i], *x[max(0, i - 1) : i + 1], grad[i + 1]),
            (grad[i], pgrad[i]),
            chain.backward_tmp_bytes[i] - chain.pgrad_bytes[i],
            "backward",
            once=True,
            module=names[i],
        )
        for i in reversed(range(n))
    ]
    return Graph(storages, None, operations, name="chain")


def program_of_sequence(sequence: Sequence, graph: Graph) -> Program:
    """Return the program of a chain's sequence on the graph that `graph_of_chain` returned.

    Raises InvalidSequenceError if a stage runs again while a later backward reads what its consumer
    keeps of an earlier run, which no algorithm asks for.
    """
    return Program(graph, _numbers(sequence, len(graph) // 2))


def _numbers(sequence: Sequence, n: int) -> npt.NDArray[np.int32]:
    numbers = [2 * n - i if kind == BACKWARD else i for kind, i in sequence.codes.tolist()]
    return np.array(numbers, dtype=np.int32)


class ChainProgram(Program):
    """Sequence as a program that its chain prices, with the loss's time: of every sequence.

    It equals `program_of_sequence`, which refuses a stage that keeps less than its output, as the
    last one does before a loss that consumes it, and a tape whose input is made again.
    """

    def __init__(self, sequence: Sequence, loss_ns: int = 0) -> None:
        assert sequence.chain is not None
        self.sequence, self.chain, self._loss_ns = sequence, sequence.chain, loss_ns
        super().__init__(_graph_of(self.chain, loss_ns), _numbers(sequence, len(self.chain)))

    def _priced(self) -> Priced:
        line, held = self.sequence.timeline, self.chain.x_bytes[0]
        time_ns = round(self.sequence.makespan * _NS) + self._loss_ns
        before = np.concatenate([[held], line.live_bytes[:-1]]) - held
        peaks = line.peak_bytes - held
        return time_ns, int(peaks.max()), before, peaks, time_ns, 0, 0

    @property
    def unplanned(self) -> Program:
        """Program that recomputes nothing."""
        (kept,) = NoCheckpoint().candidates(self.chain)
        return ChainProgram(kept, self._loss_ns)


def sequence_of_program(program: Program, chain: Chain) -> Sequence:
    """Return the sequence of a valid program of a chain's graph, priced by the chain.

    Fe is where the backward reads a run's tape, Fck where a later run reads its input, else Fn.
    """
    n, codes = len(chain), list[tuple[int, int]]()
    has_tape, is_kept = [False] * n, [False] * n
    for number in reversed(program.ops.tolist()):
        i = number if number <= n else 2 * n - number
        if number >= n:
            codes.append((LOSS if number == n else BACKWARD, i))
        else:
            codes.append((FE if has_tape[i] else FCK if is_kept[i] else FN, i))
            has_tape[i] = False
        if number < n and i + 1 < n:
            is_kept[i + 1] = False
        if number != n:
            is_kept[i] = True
            has_tape[i] |= number > n
            if number > n and i + 1 < n:
                is_kept[i + 1] = True
    return Sequence(np.array(codes[::-1], dtype=np.int32), chain)
