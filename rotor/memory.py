"""Published names of `rotor.meter.allocator`: what is free, and meters of what is allocated."""

from rotor.meter.allocator import *  # noqa: F403
from rotor.meter.allocator import __all__ as __all__
