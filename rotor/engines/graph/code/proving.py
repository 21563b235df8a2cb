"""Proof that values which a program computes again equal the first ones, bit for bit.

Verified steps run another version of a program's code. It makes a checksum of every value that will
be computed again, compares it on the device with that of the new value, and reads the results once
at the end of its backward, before any gradient leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.checksums import Mismatch, Proof, Proved, proof_bytes, recomputation_error
from rotor.engines.chain.proofs import host_copy
from rotor.engines.graph.tracing.lowering import Lowered, Task

_CURE = "Its value is kept from now on: run the step again"


def proving_bytes(lowered: Lowered, device: torch.device, comparisons: int) -> int:
    """Return the bytes that a verified step needs beside the storages of its program.

    They hold the checksums of its `comparisons`, and copies of buffers that its operations change.
    The result is 0 without comparisons, as nothing is recomputed then.
    """
    if not comparisons:
        return 0
    sizes = [lowered.input_bytes(node) for node in lowered.mutated]
    return proof_bytes(device, comparisons) + sum(sizes)


class Tally:
    """Verified step of a plan, whose parts are proved one by one.

    The step is noted in `proved` once all of its parts were compared and equal.
    """

    def __init__(self, proved: Proved) -> None:
        self._proved = proved
        self._open = 0
        self._values = 0
        self._is_sealed = False
        self._has_begun = False
        self.is_over = False

    def begin(self) -> None:
        """Note that a part has begun."""
        self._open += 1
        self._has_begun = True

    def end(self, values: int) -> None:
        """Note that `values` values of a part were equal."""
        self._open -= 1
        self._values += values
        self._add()

    def differing(self, own: list[Mismatch]) -> tuple[list[Mismatch], str]:
        """Return the differences that refuse the step, and a sentence on their origin.

        `own` are those of this process.
        """
        return own, ""

    def seal(self) -> None:
        """Note that no further part begins."""
        self._is_sealed = True
        self._add()

    def _add(self) -> None:
        if self.is_over:
            return
        if self._is_sealed and self._has_begun and not self._open:
            self.is_over = True
            self._proved.add(self._values)


class _State:
    """Buffers and gradients of a model before a step, stored outside of its device's memory."""

    def __init__(self, model: nn.Module) -> None:
        with torch.no_grad():
            self._buffers = [(buffer, host_copy(buffer)) for buffer in model.buffers()]
            self._gradients = [
                (p, p.grad, None if p.grad is None else host_copy(p.grad))
                for p in model.parameters()
            ]

    def restore(self) -> None:
        """Restore the buffers and gradients."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
            for parameter, gradient, copied in self._gradients:
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
                parameter.grad = gradient


class PartsTally(Tally):
    """Verified step of a model that runs in parts; it is made before the model's forward.

    The gradients of one part leave before another's backward begins, so that all parts are read at
    the end of the whole backward; after a difference, the model's state is restored.
    """

    def __init__(self, proved: Proved, model: nn.Module) -> None:
        super().__init__(proved)
        self._state: _State | None = _State(model)
        self._waiting: list[tuple[Proof, Callable[[list[Mismatch]], Exception]]] = []

    def defer(self, prover: Prover, running: Running) -> None:
        """Have a part read at the end of the backward."""
        self.defer_proof(running.proof, lambda found: prover.error(running, found))

    def defer_proof(self, proof: Proof, error: Callable[[list[Mismatch]], Exception]) -> None:
        """Have the comparisons of a part read at the end of the backward.

        `error` returns the error for their differences.
        """
        if not self._waiting:
            core.check_after_backward(self._finish)
        self._waiting.append((proof, error))

    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        found = [(proof, error, proof.finish()) for proof, error in waiting]
        errors = [error(differing) for _, error, differing in found if differing]
        if errors:
            if self._state is not None:
                self._state.restore()
            raise errors[0]
        for proof, _, _ in found:
            self.end(proof.compared)

    def _add(self) -> None:
        super()._add()
        if self.is_over:
            self._state = None


class Running:
    """Checksums of one run of a program, and the buffers that its forward changes."""

    def __init__(self, prover: Prover, buffers: Sequence[torch.Tensor]) -> None:
        proof = Proof()
        self.first = proof.first
        self.again = proof.again
        self.proof = proof
        self.tally = prover.tally
        self.place = prover.place
        copied = () if isinstance(prover.tally, PartsTally) else buffers
        with torch.no_grad():
            self.buffers = [(buffer, buffer.clone()) for buffer in copied]

    def restore(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)


class Prover:
    """Prover of the runs of one program.

    `failed` is called with the operations that gave other bits: no plan may compute them again.
    """

    def __init__(self, lowered: Lowered, failed: Callable[[list[Task]], None]) -> None:
        self._lowered = lowered
        self._failed = failed
        self.tally: Tally | None = None
        """Tally of the running step; set before its forward."""
        self.place = ""
        """Path of the module of the next run."""

    def begin(self, *buffers: torch.Tensor) -> Running:
        """Return the object in which the code of a run notes its values."""
        if self.tally is not None:
            self.tally.begin()
        return Running(self, buffers)

    def settle(self, running: Running) -> None:
        """Read the checksums of a run; raise RecomputationError after a difference."""
        if isinstance(running.tally, PartsTally):
            running.tally.defer(self, running)
            return
        found, where = running.proof.finish(), ""
        if running.tally is not None:
            found, where = running.tally.differing(found)
        if found:
            raise self.error(running, found, where)
        if running.tally is not None:
            running.tally.end(running.proof.compared)
            running.tally = None
            running.buffers = []

    def error(self, running: Running, found: list[Mismatch], where: str = "") -> Exception:
        """Return the error for values that differ; bar their operations from recomputation."""
        tasks, operation, mismatch = self.roots(found)
        running.restore()
        self._failed(tasks)
        module = ".".join(part for part in (running.place, tasks[0].module) if part)
        cure = f"{where}. {_CURE}" if where else _CURE
        return recomputation_error(operation, module, mismatch, cure, others=len(found) - 1)

    def roots(self, found: list[Mismatch]) -> tuple[list[Task], str, Mismatch]:
        """Return the first operations that differed, and a name and a value of one of them."""
        producer = {s: task for task in self._lowered.tasks for s in task.made.values()}
        differing: dict[Any, Mismatch] = {mismatch.site: mismatch for mismatch in found}
        roots = [s for s in differing if not set(producer[s].inputs) & set(differing)]
        tasks = list({id(producer[s]): producer[s] for s in roots}.values())
        node = tasks[0].node
        assert node is not None
        return tasks, str(node.target), differing[roots[0]]
