"""Published names of ``rotor.engines.chain.measure``: the measures of a chain."""

from rotor.engines.chain.measure import *  # noqa: F403
from rotor.engines.chain.measure import __all__ as __all__
