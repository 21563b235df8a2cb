"""Published names of ``rotor.meter``: free memory, meters of allocated memory, CUDA's history."""

from rotor.meter import allocator, history
from rotor.meter.allocator import *  # noqa: F403
from rotor.meter.history import *  # noqa: F403

__all__ = [*allocator.__all__, *history.__all__]
