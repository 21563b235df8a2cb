"""Second tiers of memory: places outside of a device's memory for values of a step.

A plan with a tier keeps a value, computes it again, or moves it to the tier and back.
"""

from __future__ import annotations

from rotor.tier.disk import DiskTier
from rotor.tier.host import HostTier
from rotor.tier.interface import Tier, Traffic
from rotor.tier.kept import set_random
from rotor.tier.layered import LayeredTier
from rotor.tier.offload import measure_link
from rotor.tier.recovery import keep, recover
from rotor.tier.store import TierStore
from rotor.tier.weights import save_weights

__all__ = [
    "DiskTier",
    "HostTier",
    "LayeredTier",
    "Tier",
    "TierStore",
    "Traffic",
    "keep",
    "measure_link",
    "recover",
    "save_weights",
    "set_random",
]
