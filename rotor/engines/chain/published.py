"""Published names for chains, and saved plans of chains."""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from typing import Any, ClassVar

from torch import nn

from rotor.algorithms.chen_sqrt import ChenSqrt
from rotor.algorithms.curve import Curve
from rotor.algorithms.griewank import Griewank
from rotor.algorithms.griewank_heterogeneous import GriewankHeterogeneous
from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.algorithms.recompute_all import RecomputeAll
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import DynamicAlgorithm, ProgressCallback, parse_budget, solved
from rotor.chain import Chain
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.stages import Stage
from rotor.errors import InfeasibleError
from rotor.meter.room import step_limit
from rotor.units import exact_bytes

Values = tuple[list[float], list[float], list[int], list[int], list[int], list[int]]


def modules_of(stages: Items[Stage]) -> list[nn.Module]:
    """Return one module for each stage: its own, or a Sequential of several."""
    found = []
    for stage in stages:
        modules = [function for function in stage.functions if isinstance(function, nn.Module)]
        found.append(modules[0] if len(modules) == 1 else nn.Sequential(*modules))
    return found


class LoadedSequence(DynamicAlgorithm):
    """Saved sequence if it fits; else an algorithm's solution, or InfeasibleError without one."""

    name: ClassVar[str] = "loaded"

    def __init__(self, sequence: Sequence, otherwise: DynamicAlgorithm | None = None) -> None:
        self.sequence = sequence
        self.otherwise = otherwise

    def solve(
        self,
        chain: Chain,
        budget_bytes: int | str,
        *,
        mem_slots: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sequence:
        """Return the sequence, priced on `chain`, or the algorithm's solution."""
        sequence = Sequence(self.sequence.codes, chain)
        if sequence.peak_bytes <= parse_budget(budget_bytes):
            return sequence
        if self.otherwise is None:
            raise InfeasibleError(
                f"the plan needs {exact_bytes(sequence.peak_bytes)}", sequence.peak_bytes
            )
        budget = parse_budget(budget_bytes)
        return solved(self.otherwise, chain, budget, mem_slots=mem_slots, progress=progress)

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return the single point of the sequence."""
        del progress
        sequence = Sequence(self.sequence.codes, chain)
        return Curve([sequence.peak_bytes], [sequence.makespan])


class PublishedChain:
    """Published attributes of a model that is planned as a chain."""

    context: Any
    device_of: Any
    inspection_values: Inspection | None

    @property
    def chain(self) -> Chain | None:
        """Cost model of the latest plan, ``None`` without a plan."""
        plan = self.context.latest
        return None if plan is None else plan.chain

    @property
    def sequence(self) -> Sequence | None:
        """Schedule of the latest plan, ``None`` without a plan."""
        plan = self.context.latest
        return None if plan is None else plan.sequence

    @property
    def all_values(self) -> Values | None:
        """Latest measure in its published form, ``None`` before one.

        Six lists, times in seconds, as of `get_expected_makespan`, and sizes in bytes: forward
        times, backward times, kept memory of each forward (the input first), activations (the
        input first), temporaries of the forwards, temporaries of the backwards.
        """
        found = self.inspection_values
        if found is None:
            return None
        measures = found.measures
        return (
            [m.forward_ns / 1e9 for m in measures],
            [m.backward_ns / 1e9 for m in measures],
            [found.input_bytes, *(m.xbar_bytes for m in measures)],
            [found.input_bytes, *(m.output_bytes for m in measures)],
            [m.forward_tmp_bytes for m in measures],
            [m.backward_peak_bytes - m.grad_bytes for m in measures],
        )

    # -- schedules by their published names

    def compute_min_sequence(self) -> Sequence:
        """Run every stage again from the input on: `RecomputeAll`, in the device's free memory."""
        return self._within_free_memory(RecomputeAll())

    def compute_pytorch_sequence(self) -> Sequence:
        """Run nothing again: `NoCheckpoint`, in the device's free memory."""
        return self._within_free_memory(NoCheckpoint())

    def compute_seq_sequence(self, segments: int | None = None) -> Sequence:
        """Run equal segments again, by default the root of their number: `ChenSqrt`."""
        return self._within_free_memory(ChenSqrt("sqrt" if segments is None else segments))

    def compute_homogeneous_sequence(
        self, mem_limit: int | str, mem_slots: int | None = None, useXbar: bool = False
    ) -> Sequence:
        """Plan as `compute_sequence` by `Griewank`; sizes are exact, with `useXbar` or without."""
        return self._planned(mem_limit, mem_slots, Griewank())

    def compute_heterogeneous_sequence(
        self, mem_limit: int | str, mem_slots: int | None = None, useXbar: bool = False
    ) -> Sequence:
        """Plan by `GriewankHeterogeneous`, with arguments as of `compute_homogeneous_sequence`."""
        return self._planned(mem_limit, mem_slots, GriewankHeterogeneous())

    def _within_free_memory(self, algorithm: DynamicAlgorithm) -> Sequence:
        key = self.context.measured_key()
        return self._planned(step_limit(self.device_of(key)), None, algorithm)

    def _planned(
        self, limit: int | str, slots: int | None, algorithm: DynamicAlgorithm
    ) -> Sequence:
        found: Sequence = self.context.wrapper().compute_sequence(limit, slots, algorithm)
        return found


def checked_sequence(source: Sequence | str | os.PathLike[str], chain: Chain) -> Sequence:
    """Return a saved sequence of a chain, or of a file.

    Raises ValueError if the file holds no schedule, or one of another chain; the message has the
    first difference.
    """
    saved = source if isinstance(source, Sequence) else Sequence.from_json(source)
    difference = _difference(saved, chain)
    if difference:
        raise ValueError(
            f"the plan is one of another chain: {difference}. A plan fits the model that it "
            "was made with, measured on an input of the same kind"
        )
    return saved


def _difference(saved: Sequence, chain: Chain) -> str:
    """Return the first difference of the stages; empty for equal ones."""
    if saved.chain is not None:
        there, here = saved.chain.names or [], chain.names or []
        if len(there) != len(here):
            return f"it has {len(there)} stages, the model has {len(here)}"
        for index, (one, other) in enumerate(zip(there, here, strict=True)):
            if one != other:
                return f"stage {index} is {one} in it, {other} in the model"
    backwards = {op.stage for op in saved if op.kind == "B"}
    if backwards != set(range(len(chain))):
        return f"it has {len(backwards)} backwards, the model has {len(chain)} stages"
    return ""
