"""Proof of a step: what it computes again equals what it computed first, bit for bit.

A verified step makes a checksum, on the tensor's device, of each value that will be computed again,
compares it with that of the new value, and reads the results once. After a difference, what the
step has changed is put back, what made the value is computed once from then on, and the step
raises: nothing is handed on.

Where ranks run together, a difference on one must not end the backward of that rank alone: the
others would wait for its collectives. The ranks exchange the differences, and all raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from rotor._pytorch import ends, fsdp
from rotor.common.checksums import Mismatch, Proof, Proved, recomputation_error
from rotor.common.ranks import Ranks
from rotor.common.tensor_trees import output_tensors, tree_tensors
from rotor.meter.step_meter import cancel_running
from rotor.tier.homes import AwayTensor, Home

VARIED = "it gave other bits when it ran again in a backward"
"""Reason for which a part of a model is never computed again."""

PutBack = Callable[[], object]
"""Function that gives something the value back that it had when the function was made."""


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory that no allocator of a device counts."""
    if isinstance(tensor, AwayTensor):
        home = Home(tensor.home.tier, tensor)
        home.write(tensor.fetched())
        copy: torch.Tensor = AwayTensor.of(home)
        return copy
    size = tensor.numel() * tensor.element_size()
    if tensor.layout != torch.strided or not size:
        return tensor.detach().clone()
    if tensor.device.type == "cpu":
        copied = torch.frombuffer(bytearray(size), dtype=tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor.detach())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


def buffers_before(
    buffers: Iterable[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor] = host_copy
) -> PutBack:
    """Return the function that puts the values of buffers back."""
    with torch.no_grad():
        kept = [(buffer, copy(buffer)) for buffer in buffers]

    def put_back() -> None:
        for buffer, before in kept:
            buffer.copy_(before)

    return put_back


def gradients_before(
    plain: Iterable[torch.Tensor], sharded: Iterable[fsdp.ShardedParameter] = ()
) -> PutBack:
    """Return the function that puts gradients back; their copies are as of `host_copy`."""
    holders: list[tuple[Callable[[Any], None], tuple[Any, ...]]] = [
        *((p.put_gradients, p.gradients()) for p in sharded),
        *((partial(_put_gradient, tensor), (tensor.grad,)) for tensor in plain),
    ]
    with torch.no_grad():
        kept = [
            (put, given, [None if g is None else host_copy(fsdp.local(g)) for g in given])
            for put, given in holders
        ]

    def put_back() -> None:
        for put, given, copies in kept:
            for gradient, before in zip(given, copies, strict=True):
                if before is not None:
                    fsdp.local(gradient).copy_(before)
            put(given)

    return put_back


def _put_gradient(tensor: torch.Tensor, given: tuple[Any]) -> None:
    (tensor.grad,) = given


class Difference(NamedTuple):
    """Value that differed, with the words for what made it."""

    run: int
    """Number of the run."""
    operation: str
    module: str
    mismatch: Mismatch

    @property
    def site(self) -> int:
        """Stage, or storage, whose value it is."""
        return self.mismatch.site[0]  # type: ignore[index, no-any-return]


class Origins(ABC):
    """Makers of the values of a run: the stages of a chain, or the operations of a program."""

    cure: str
    """Advice to users on what does not repeat."""

    @abstractmethod
    def roots(self, sites: Collection[int]) -> list[int]:
        """Return the differing sites whose values were made from none of the others."""

    @abstractmethod
    def named(self, site: int) -> tuple[str, str]:
        """Return the name of what makes a value, and the path of its module."""

    @abstractmethod
    def keep(self, sites: Sequence[int]) -> None:
        """Have what makes these values run once from now on."""


class RunProof:
    """Comparisons in one run of stages or operations, which belongs to a verified step.

    The `number` is that of the run in the step, and `place` the path of the module that runs.
    """

    def __init__(self, step: StepProof, origins: Origins, number: int = 0, place: str = "") -> None:
        self._step, self._origins = step, origins
        self.number, self._place = number, place
        self._proof = Proof()
        self.is_equal = False
        """True once all values were compared and equal."""
        step.begin()

    def first(self, site: int, value: Any) -> None:
        """Note what a site gives when it is computed for the first time."""
        for k, tensor in enumerate(tree_tensors(value)):
            self._proof.first((site, k), tensor)

    def again(self, site: int, value: Any) -> None:
        """Compare what a site gives again."""
        for k, tensor in enumerate(tree_tensors(value)):
            self._proof.again((site, k), tensor)

    @property
    def compared(self) -> int:
        """Number of values that were compared."""
        return self._proof.compared

    def settle(self) -> None:
        """Read all comparisons, at the end of the run's backward, or have them read."""
        self._step.settle(self)

    def differences(self) -> list[Difference]:
        """Read all comparisons; return the differences, those where they begin at the front."""
        found: list[Difference] = []
        for mismatch in self._proof.finish():
            operation, module = self._origins.named(mismatch.site[0])  # type: ignore[index]
            path = ".".join(part for part in (self._place, module) if part)
            found.append(Difference(self.number, operation, path, mismatch))
        roots = self._origins.roots(dict.fromkeys(one.site for one in found))
        return sorted(found, key=lambda one: one.site not in roots)

    def refused(self, found: Sequence[Difference], where: str) -> Exception:
        """Return the error for differences; keep what made them from recomputation.

        `where` is a sentence on the ranks that found them.
        """
        roots = self._origins.roots(dict.fromkeys(one.site for one in found))
        self._origins.keep(roots)
        root = next(one for one in found if one.site == roots[0])
        cure = (f"{where}. " if where else "") + self._origins.cure
        others = len(found) - 1
        return recomputation_error(root.operation, root.module, root.mismatch, cure, others)


class StepProof:
    """Verified step, which `proved` counts once all of its runs were compared and equal.

    Each run is read at the end of its own backward, before its gradients leave. After a difference
    the functions of `undo` are called. With `ranks`, all of them read together.
    """

    has_state: ClassVar[bool] = False
    """True if it puts the state of the whole model back, so that no run has to."""
    _is_sealed = True

    def __init__(
        self, proved: Proved, undo: Iterable[PutBack] = (), ranks: Ranks | None = None
    ) -> None:
        self._proved = proved
        self.undo = list(undo)
        self._ranks = ranks
        self._waiting: list[RunProof] = []
        self._open = self._values = 0
        self._has_begun = self._is_over = False

    def begin(self) -> None:
        """Note that a run begins."""
        self._has_begun = True
        self._open += 1

    def begin_with(self, output: Any) -> None:
        """Have `begin_backward` called when the backward of the step's output begins."""
        for tensor in output_tensors(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.register_prehook(self.begin_backward)

    def begin_backward(self, gradients: Any) -> None:
        """Note that the backward begins, with these gradients of an output."""

    def settle(self, run: RunProof) -> None:
        """Read a run; raise RecomputationError after a difference."""
        self._waiting.append(run)
        self._read()

    def _read(self) -> None:
        runs, self._waiting = self._waiting, []
        found, where = [one for run in runs for one in run.differences()], ""
        if self._ranks is not None:
            found, where = _found_together(self._ranks, found)
        if not found:
            self._passed(runs)
            return
        cancel_running()
        with torch.no_grad():
            self.restore()
        raise self.refused(runs, found, where)

    def restore(self) -> None:
        """Put back what the step has changed."""
        for put_back in self.undo:
            put_back()

    def forget(self) -> None:
        """Drop what would be put back."""
        self.undo.clear()

    def refused(
        self, runs: Sequence[RunProof], found: Sequence[Difference], where: str
    ) -> Exception:
        """Return the error, and have what differed kept."""
        once: dict[Any, Difference] = {}
        for one in found:
            once.setdefault((one.run, one.mismatch.site), one)
        by_run = [[one for one in once.values() if one.run == run.number] for run in runs]
        errors = [run.refused(own, where) for run, own in zip(runs, by_run, strict=True) if own]
        return errors[0]

    def _passed(self, runs: Sequence[RunProof]) -> None:
        """Note that runs were equal; a graph that is kept may be read again."""
        for run in runs:
            self._open -= not run.is_equal
            self._values += 0 if run.is_equal else run.compared
            run.is_equal = True
        self._count()

    def _count(self) -> None:
        if self._is_sealed and self._has_begun and not (self._open or self._is_over):
            self._is_over = True
            self.forget()
            self._proved.add(self._values)


class WholeProof(StepProof):
    """Verified step of a model that runs in parts, read at the end of the whole backward.

    The gradients of one part leave before another's backward begins. Runs may begin until `seal`.
    """

    has_state = True
    _is_sealed = False

    def seal(self) -> None:
        """Note that no further run begins."""
        self._is_sealed = True
        self._count()

    def settle(self, run: RunProof) -> None:
        """Have a run read at the end of the backward."""
        if not self._waiting:
            ends.check_after_backward(self._read)
        self._waiting.append(run)


class ShardedProof(WholeProof):
    """Verified step of a sharded model, read by all ranks after FSDP2's last part of the backward.

    `gradients` makes the function that puts the existing gradients back, when the backward begins.
    """

    def __init__(
        self,
        proved: Proved,
        undo: Iterable[PutBack],
        ranks: Ranks,
        gradients: Callable[[], PutBack],
    ) -> None:
        super().__init__(proved, undo, ranks)
        self._gradients = gradients
        self._is_armed = False

    def begin_backward(self, gradients: Any) -> None:
        """Copy the existing gradients; have the runs read at the end."""
        if self._is_armed:
            return
        self._is_armed = True
        self.undo.append(self._gradients())
        # Registered in the backward's end, this comes after FSDP2's callbacks.
        ends.check_after_backward(lambda: ends.check_after_backward(self._read))

    def settle(self, run: RunProof) -> None:
        """Have a run read at the end of the backward."""
        self._waiting.append(run)

    def _read(self) -> None:
        self._is_armed = False
        super()._read()

    def _passed(self, runs: Sequence[RunProof]) -> None:
        # A block outside of this backward does not keep the step from being proved.
        if runs:
            self.forget()
            self._proved.add(sum(run.compared for run in runs))


def _found_together(ranks: Ranks, own: Sequence[Difference]) -> tuple[list[Difference], str]:
    """Return the differences of all ranks, in their order, and a sentence that names these ranks.

    This is a collective operation; differences are sent only if some exist.
    """
    counts = [count for (count,) in ranks.exchange_ints(len(own))]
    if not any(counts):
        return [], ""
    found = [one for items in ranks.exchange(list(own)) for one in items]
    where = ", ".join(str(rank) for rank, count in enumerate(counts) if count)
    return found, f"Found on rank {where} of {ranks.size}; every rank stops the step"
