"""Measures of stages on inputs of a size between measured ones.

Bytes and times of a stage grow with a size of its input about as a polynomial with positive
coefficients, so that the straight line between two measured sizes lies above them in between.
Temporaries get some room in addition, since kernels need more at some sizes than at others.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from rotor.engines.chain.measures import Inspection, StageMeasure
from rotor.report.text import Text

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


def described(fitted: int, kinds: int) -> list[Any]:
    """Return a note on inputs whose measures follow from others', for reports."""
    text = f"inputs of {kinds} kinds: {kinds - fitted} measured, {fitted} between"
    return [Text(text)] if fitted else []


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
