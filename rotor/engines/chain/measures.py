"""Costs of a model's stages, as they were measured, and bounds of them at sizes in between.

Bytes and times of a stage grow with a size of its input about as a polynomial with positive
coefficients, so that the straight line between two measured sizes lies above them in between.
Temporaries get some room in addition, since kernels need more at some sizes than at others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

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


_LEAST_SHARE = Fraction(1, 2)
"""Smallest share of a measured size at which the figures measured there are taken as bounds."""

_TIMES = ("forward_ns", "record_ns", "backward_ns")
_BYTES = (
    "output_bytes",
    "xbar_bytes",
    "grad_bytes",
    "buffer_bytes",
    "left_bytes",
)
_TEMPORARY = ("forward_tmp_bytes", "forward_nograd_tmp_bytes", "backward_peak_bytes")

_SCRATCH_BYTES, _SCRATCH_SHARE = 1 << 14, 50
"""Room for kernels of some sizes that need more than those of others, in temporaries."""


class Measured(NamedTuple):
    """Sizes of an input and of the targets, in one order, and the stages measured on it."""

    sizes: tuple[int, ...]
    inspection: Inspection
    loss_bytes: int | None = None


def _sizes_of(measured: Any) -> tuple[int, ...]:
    """Return the sizes in a chain's `Key.measured`, of the input and the targets."""
    inputs, *_, targets = measured
    return tuple([size for shape, *_ in (*inputs, *(targets or ())) for size in shape])


def _kind_of(measured: Any) -> Any:
    """Return a chain's `Key.measured` with ranks of tensors in the place of their shapes."""
    inputs, *rest, targets = measured
    ranked = tuple([(len(shape), *facts) for shape, *facts in inputs])
    if targets is None:
        return ranked, *rest, None
    return ranked, *rest, tuple([(len(shape), *facts) for shape, *facts in targets])


def inferred(
    inspections: Mapping[Any, Inspection],
    fitted: set[Any],
    learned_loss: MutableMapping[Any, int],
    measured: Any,
    input_bytes: int,
) -> Inspection | None:
    """Return bounds of measures for a kind of step; ``None`` if its stages have to be measured.

    The kinds in `fitted` have bounds instead of measures, and are not used. If bounds are found,
    the kind `measured` is added to `fitted`, and a bound of the loss's bytes to `learned_loss`.
    """
    known = [
        Measured(_sizes_of(other), inspection, learned_loss.get(other))
        for other, inspection in inspections.items()
        if other not in fitted and _kind_of(other) == _kind_of(measured)
    ]
    found = between(known, _sizes_of(measured), input_bytes)
    if found is None:
        return None
    fitted.add(measured)
    if found.loss_bytes is not None:
        learned_loss.setdefault(measured, found.loss_bytes)
    return found.inspection


def between(known: Sequence[Measured], sizes: tuple[int, ...], input_bytes: int) -> Measured | None:
    """Return bounds of measures for an input; ``None`` if its stages have to be measured.

    The known inputs differ in sizes only. Fewer than two of them give no bounds.
    """
    if len(known) < 2:
        return None
    pairs = [
        (small, large, share)
        for small in known
        for large in known
        if small is not large
        and _alike(small.inspection, large.inspection)
        and (share := _share(small.sizes, large.sizes, sizes)) is not None
    ]
    if pairs:
        small, large, share = min(
            pairs, key=lambda pair: abs(sum(pair[1].sizes) - sum(pair[0].sizes))
        )
        return _mixed(small, large, share, sizes, input_bytes)
    covering = [
        one
        for one in known
        if all(
            _LEAST_SHARE * there <= here <= there
            for here, there in zip(sizes, one.sizes, strict=True)
        )
    ]
    if not covering:
        return None
    least = min(covering, key=lambda one: sum(one.sizes))
    return _mixed(least, least, Fraction(0), sizes, input_bytes)


def _share(
    small: tuple[int, ...], large: tuple[int, ...], sizes: tuple[int, ...]
) -> Fraction | None:
    """Return the place of sizes on the line between others, from 0 to 1; ``None`` beside it."""
    shares = {
        Fraction(here - a, b - a) for a, b, here in zip(small, large, sizes, strict=True) if a != b
    }
    is_on = all(here == a for a, b, here in zip(small, large, sizes, strict=True) if a == b)
    if not is_on or len(shares) != 1:
        return None
    (share,) = shares
    return share if 0 <= share <= 1 else None


def _alike(one: Inspection, other: Inspection) -> bool:
    """Return whether two measures are of the same stages, with the same properties."""
    facts = [
        (
            found.flags,
            found.device,
            sorted(found.reasons),
            found.loss_peak_bytes is None,
            [(m.name, m.uses_rng, m.varies, m.leaves, m.pgrad_bytes) for m in found.measures],
        )
        for found in (one, other)
    ]
    return facts[0] == facts[1]


def _line(a: int, b: int, share: Fraction) -> int:
    return -(-(a + (b - a) * share) // 1)


def _mixed(
    small: Measured, large: Measured, share: Fraction, sizes: tuple[int, ...], input_bytes: int
) -> Measured:
    one, other = small.inspection, large.inspection

    def line(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None else _line(a, b, share)

    def stage(a: StageMeasure, b: StageMeasure) -> StageMeasure:
        mixed = {name: _line(getattr(a, name), getattr(b, name), share) for name in _TIMES + _BYTES}
        for name in _TEMPORARY:
            size = _line(getattr(a, name), getattr(b, name), share)
            mixed[name] = size + _SCRATCH_BYTES + size // _SCRATCH_SHARE
        return replace(a, **mixed)  # type: ignore[arg-type]

    inspection = replace(
        one,
        measures=[stage(a, b) for a, b in zip(one.measures, other.measures, strict=True)],
        input_bytes=input_bytes,
        output_grad_bytes=_line(one.output_grad_bytes, other.output_grad_bytes, share),
        loss_peak_bytes=line(one.loss_peak_bytes, other.loss_peak_bytes),
        loss_ns=line(one.loss_ns, other.loss_ns),
        reasons=dict(one.reasons),
    )
    return Measured(sizes, inspection, line(small.loss_bytes, large.loss_bytes))
