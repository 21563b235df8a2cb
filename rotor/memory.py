"""Published names of ``rotor.meter``: free memory, meters of allocated memory, CUDA's history."""

from rotor.meter import allocator, history, published
from rotor.meter.allocator import *  # noqa: F403
from rotor.meter.history import *  # noqa: F403
from rotor.meter.published import *  # noqa: F403

__all__ = [*allocator.__all__, *history.__all__, *published.__all__]
