"""Published names of ``rotor.meter.allocator``: free memory, and meters of allocated memory."""

from rotor.meter.allocator import *  # noqa: F403
from rotor.meter.allocator import __all__ as __all__
