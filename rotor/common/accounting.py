"""Constants, reserves and rounding rules of the memory model (docs/memory-model.md)."""

from __future__ import annotations

BLOCK_BYTES = 512
"""Unit in which the caching allocators of accelerators give out memory."""

FREE_PERCENT = 90
"""Percentage of the free memory that is the limit where none is given."""

SLACK_SHARE = 16
"""Part of a device's room that the allocator's slack is taken to be before it is known."""

SLACK_BYTES = 40 << 20
"""Least slack of an accelerator's allocator: two segments, of which large blocks are cut."""

ROOM_GROWTH = 1.05
"""Factor by which room has to grow for another plan."""

SCALARS = 8
"""Numbers, such as the loss itself, that the caller holds while the backward runs."""

SCALAR_BYTES = 8
"""Size of the largest such number."""

GENERATOR_BYTES = 5056
"""State of PyTorch's random generator on the CPU."""

LOSS_FACTOR = 4
"""Bytes assumed of an unknown loss per byte of the output, its gradient included."""

METERED_STEPS = 3
"""Steps of a plan that are metered at most before its reserve is final."""

METERED_EARLY = (16, 64)
"""Later steps that are metered once each, though nothing was seen to differ."""

METERED_EVERY = 256
"""Period of later steps that are metered, though nothing was seen to differ."""

NOISE_BYTES = 1 << 17
"""Difference from an expected level that is noise at any size of the level."""

NOISE_SHARE = 50
"""Part of an expected level up to which a difference is noise."""

NEW_MAXIMUM = 1.05
"""Factor by which an excess grows before a further warning."""

PROOF_SHARE = 50
"""Part of the limit that the checksums of a verified step may take."""

HANDOVERS = 64
"""Part of the bytes of existing gradients that are handed over together."""

CODE_FACTOR = 2
"""Bytes that code between captured pieces makes per byte that it keeps, gradients included."""

DYNAMIC_LOSS_FACTOR = 64
"""Bytes per byte of the output that the dynamic engine evicts before an unknown loss."""

DYNAMIC_NOISE_BYTES = 1 << 16
"""`NOISE_BYTES` of the dynamic engine."""

AHEAD = {"forward": 4, "loss": 1, "backward": 2}
"""Needs of a failed operation that its later steps add to the minimum, by phase of the failure."""

LOSS_GRADIENTS = 3
"""Times the gradient of the output that a loss, such as a cross-entropy, holds and computes."""

ESTIMATE_MARGIN = {"forward": 8, "loss": 8, "backward": 2}
"""Part of an estimated minimum that is added to it, by phase of the failure.

In a backward that recomputes values, each recomputation waits for others and holds its values."""

HELD_MARGIN = 8
"""Part of the peak without any eviction that is added to it where it is the estimate."""

SCRAPS_BYTES = 4096
"""Most room of the dynamic engine for numbers that PyTorch turns into tensors and keeps."""

SCRAPS_SHARE = 256
"""Part of the limit that this room takes at most."""


def rounded_bytes(nbytes: int, device_type: str) -> int:
    """Return the bytes that the allocator of a type of device counts for a block."""
    if device_type == "cpu":
        return nbytes
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def scalar_bytes(device_type: str) -> int:
    """Return the room that every plan has for the caller's scalars."""
    return SCALARS * rounded_bytes(SCALAR_BYTES, device_type)


def generator_bytes(device_type: str, replayed: int) -> int:
    """Return the bytes of random states: one per replayed draw, and the current one.

    The states of other generators lie in the host's memory too, which the limit does not count.
    """
    return GENERATOR_BYTES * (replayed + 1) if device_type == "cpu" and replayed else 0


def assumed_loss_bytes(output_bytes: int) -> int:
    """Return what a loss is assumed to need, with the gradient of the output."""
    return LOSS_FACTOR * output_bytes


def is_metered_again(number: int) -> bool:
    """Return whether a step is metered, by its number among the steps since the last metered."""
    return number in METERED_EARLY or number % METERED_EVERY == 0


def noise_bytes(expected_bytes: int, least_bytes: int | None = None) -> int:
    """Return the difference from an expected level that is noise."""
    least = NOISE_BYTES if least_bytes is None else least_bytes
    return max(least, expected_bytes // NOISE_SHARE)


def is_new_maximum(peak_bytes: int, limit_bytes: int, warned_bytes: int) -> bool:
    """Return whether a peak is over the limit, and by enough over the last one warned of."""
    return peak_bytes > max(limit_bytes, warned_bytes * NEW_MAXIMUM)


def has_room_for_proofs(proof_bytes: int, limit_bytes: int) -> bool:
    """Return whether a limit has room for the checksums of a verified step."""
    return proof_bytes * PROOF_SHARE <= limit_bytes


def scrap_bytes(limit_bytes: int) -> int:
    """Return the room for what no operator and no graph makes, such as numbers made tensors."""
    return min(SCRAPS_BYTES, limit_bytes // SCRAPS_SHARE)
