"""Costs of a model's stages, as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rotor.chain import Chain
from rotor.common.accounting import GENERATOR_BYTES
from rotor.common.tensor_trees import Flags
from rotor.engines.chain.stages import Stage
from rotor.engines.proofs import VARIED


@dataclass(frozen=True)
class StageMeasure:
    """Costs of one stage; times in ns, sizes in bytes.

    Attributes
    ----------
    name
        Names of its modules, joined by "+".
    forward_ns, record_ns, backward_ns
        Forward without a graph (Fn), forward that records one (Fe), backward (B).
    output_bytes
        Output of the stage.
    xbar_bytes
        Memory that Fe keeps, the output included.
    forward_tmp_bytes, forward_nograd_tmp_bytes
        Temporaries of Fe and of Fn.
    backward_peak_bytes
        Peak of B above the level at its start.
    grad_bytes
        Gradient of the stage's input.
    pgrad_bytes
        Gradient of each parameter, in the order of ``Stage.parameters``.
    flags
        Tensors of the output that require gradients, as flags.
    uses_rng
        True if a forward draws random numbers.
    buffer_bytes
        Copies that a rerun needs: of buffers and of other state that a forward writes to.
    left_bytes
        Tensors that a forward leaves in other state, and that no earlier stage has left there.
    varies
        True if two runs from the same state gave different bits.
    leaves
        True if values in the graph leave the stage, or enter it, beside its output and input;
        or the stage takes an output that others take too, whose gradients add up in their order.
    """

    name: str
    forward_ns: int
    record_ns: int
    backward_ns: int
    output_bytes: int
    xbar_bytes: int
    forward_tmp_bytes: int
    forward_nograd_tmp_bytes: int
    backward_peak_bytes: int
    grad_bytes: int
    pgrad_bytes: tuple[int, ...]
    flags: Flags
    uses_rng: bool
    buffer_bytes: int
    left_bytes: int
    varies: bool = False
    leaves: bool = False


@dataclass(frozen=True)
class Inspection:
    """Measures of all stages of a model, for one kind of input.

    Attributes
    ----------
    stages
        Stages in their measured form: in-place and viewing ones merged.
    measures
        One for each stage.
    input_bytes, output_grad_bytes
        Input of the model, and gradient of its output.
    input_flags
        Tensors of the input that require gradients, as flags.
    device
        Device of the model.
    reasons
        Reasons for which stages may run forward only once, by index.
    refuted
        Stages that gave other bits when they ran again in a step.
    loss_peak_bytes, loss_ns
        Peak of the captured loss, forward and backward, with the output that it consumes (which
        the last stage's `xbar_bytes` is then without), and its time; ``None`` without a loss.
    """

    stages: list[Stage] = field(repr=False)
    measures: list[StageMeasure]
    input_bytes: int
    output_grad_bytes: int
    input_flags: Flags
    device: torch.device
    loss_peak_bytes: int | None = None
    loss_ns: int | None = None
    reasons: dict[int, str] = field(default_factory=dict, repr=False)
    refuted: list[int] = field(default_factory=list, repr=False)

    @property
    def plain(self) -> tuple[int, int]:
        """Bounds (h, t) of the stages that run as in plain PyTorch: before h, and from t on.

        They include all stages whose values in the graph leave them otherwise than by their output,
        with the least kept memory.
        """
        return plain_regions(
            [m.leaves for m in self.measures], [m.xbar_bytes for m in self.measures]
        )

    @property
    def once(self) -> list[bool]:
        """Flags of the stages that may run forward only once."""
        head, tail = self.plain
        return [m.varies or not head <= i < tail for i, m in enumerate(self.measures)]

    def refute(self, stages: Iterable[int]) -> None:
        """Have stages run forward only once from now on, as they gave other bits."""
        for i in stages:
            self.refuted.append(i)
            self.measures[i] = replace(self.measures[i], varies=True)
            self.reasons[i] = VARIED

    @property
    def output_bytes(self) -> int:
        """Bytes of the model's output."""
        return self.measures[-1].output_bytes

    @property
    def flags(self) -> list[Flags]:
        """Flags of the tensors of each activation that require gradients, [n + 1]."""
        return [self.input_flags, *(m.flags for m in self.measures)]

    def chain(
        self,
        *,
        loss_tmp_bytes: int,
        hold_output: bool,
        missing: Sequence[Sequence[bool]],
        sums: Sequence[int],
        rng: bool = True,
        gradients: Sequence[int] | None = None,
    ) -> Chain:
        """Return the cost model of these stages.

        Parameters
        ----------
        loss_tmp_bytes
            Peak of the loss above the level at its start, less the output's gradient.
        hold_output
            True if the caller holds the output.
        missing
            For each stage, flags of the parameters that have no gradient yet.
        sums
            Bytes of the largest gradient that autograd adds to one of a later stage, by stage:
            both, and all gradients of the stage, exist until it has.
        rng
            True if random states are preserved: on the CPU one is held while a stage runs that
            will be recomputed, and two after its run.
        gradients
            Bytes of the gradients that each stage leaves, if they differ from `missing`.

        Returns
        -------
        Chain
            Times in seconds and sizes in bytes.
        """
        measures = self.measures
        state = GENERATOR_BYTES if rng and self.device.type == "cpu" else 0
        grads = [*(m.grad_bytes for m in measures), self.output_grad_bytes]
        return Chain(
            [m.forward_ns / 1e9 for m in measures],
            [(m.backward_ns + max(0, m.record_ns - m.forward_ns)) / 1e9 for m in measures],
            [self.input_bytes, *(m.output_bytes for m in measures)],
            [m.xbar_bytes for m in measures],
            [m.forward_tmp_bytes for m in measures],
            [
                max(m.backward_peak_bytes - m.grad_bytes, added and added + sum(m.pgrad_bytes))
                for m, added in zip(measures, sums, strict=True)
            ],
            forward_nograd_tmp_bytes=[
                state + max(state, m.forward_nograd_tmp_bytes) for m in measures
            ],
            grad_bytes=grads,
            pgrad_bytes=gradients
            or [
                sum(size for size, absent in zip(m.pgrad_bytes, absents, strict=True) if absent)
                for m, absents in zip(measures, missing, strict=True)
            ],
            loss_tmp_bytes=max(loss_tmp_bytes, -self.output_grad_bytes),
            hold_output=hold_output,
            names=[m.name for m in measures],
            once=self.once,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measures as plain data, for JSON."""
        return {
            "format": "rotor.inspection",
            "version": 1,
            "device": str(self.device),
            "input_bytes": self.input_bytes,
            "output_grad_bytes": self.output_grad_bytes,
            "loss_peak_bytes": self.loss_peak_bytes,
            "loss_ns": self.loss_ns,
            "stages": [dict(vars(m)) for m in self.measures],
        }


def plain_regions(leaves: Sequence[bool], sizes: Sequence[int]) -> tuple[int, int]:
    """Return (h, t): all stages marked in `leaves` are below h or from t on, with the least sum of
    sizes.

    These stages have to run as plain PyTorch does; `sizes` are the bytes that each stage keeps.
    """
    n = len(leaves)
    marked = [i for i, flag in enumerate(leaves) if flag]
    heads = [0, *(i + 1 for i in marked)]
    tails = [*marked, n]
    return min(
        zip(heads, tails, strict=True),
        key=lambda region: (sum(sizes[: region[0]]) + sum(sizes[region[1] :]), region),
    )
