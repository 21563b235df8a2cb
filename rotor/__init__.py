"""rotor: train PyTorch models in a given number of bytes.

Names that need PyTorch are imported when they are first used, so that planning and simulating
work without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First: where it was not built, _core.py exchanges the folder of all that follows.
from rotor import _core  # noqa: F401
from rotor.chain import Chain
from rotor.errors import (
    CaptureError,
    InfeasibleError,
    InvalidSequenceError,
    MalformedLogError,
    MemoryLimitWarning,
    RecomputationError,
    refuse_former_modules,
)

if TYPE_CHECKING:
    from rotor.common.modes import RngState
    from rotor.engines.chain.run import CheckpointOptim
    from rotor.fit.decorator import fit_batch_size
    from rotor.fit.result import LargestBatch
    from rotor.fit.search import largest_batch
    from rotor.rockmate import Hiremate, Offmate, PureCheckmate, PureRockmate, PureRotor, Rockmate
    from rotor.tier.disk import DiskTier
    from rotor.tier.interface import Tier
    from rotor.wrapper.checkpointable import Checkpointable

__version__ = "2.0.0"

__all__ = [
    "CaptureError",
    "Chain",
    "CheckpointOptim",
    "Checkpointable",
    "DiskTier",
    "Hiremate",
    "InfeasibleError",
    "InvalidSequenceError",
    "LargestBatch",
    "MalformedLogError",
    "MemoryLimitWarning",
    "Offmate",
    "PureCheckmate",
    "PureRockmate",
    "PureRotor",
    "RecomputationError",
    "RngState",
    "Rockmate",
    "Tier",
    "__version__",
    "fit_batch_size",
    "largest_batch",
]

_LAZY = {
    "Checkpointable": "rotor.wrapper.checkpointable",
    "CheckpointOptim": "rotor.engines.chain.run",
    "DiskTier": "rotor.tier.disk",
    "LargestBatch": "rotor.fit.search",
    "Hiremate": "rotor.rockmate",
    "Offmate": "rotor.rockmate",
    "PureCheckmate": "rotor.rockmate",
    "PureRockmate": "rotor.rockmate",
    "PureRotor": "rotor.rockmate",
    "RngState": "rotor.common.modes",
    "Rockmate": "rotor.rockmate",
    "Tier": "rotor.tier.interface",
    "fit_batch_size": "rotor.fit.decorator",
    "largest_batch": "rotor.fit.search",
}
_MODEL_FAMILIES = ("densenet", "gpt", "inception", "resnet", "vgg")
_SUBMODULES = (
    "algorithms",
    "dtr",
    "experiments",
    "graph",
    "inspection",
    "memory",
    "models",
    "rkgb",
    "simrd",
    "tier",
    "timing",
    "units",
)

refuse_former_modules()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODEL_FAMILIES:
        return importlib.import_module(f"rotor.models.{name}")
    if name in _SUBMODULES:
        return importlib.import_module(f"rotor.{name}")
    raise AttributeError(f"module 'rotor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODEL_FAMILIES, *_SUBMODULES})
