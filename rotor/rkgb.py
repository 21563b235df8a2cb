"""rk-GB's published names; see `rotor.graph.rkgb`."""

from rotor.graph.rkgb import *  # noqa: F403
from rotor.graph.rkgb import __all__ as __all__
