"""rk-GB's published names; see `rotor.graph.rkgb`."""

from rotor.graph.rkgb import Result, make_all_graphs, print_all_graphs, test_rkgb

__all__ = ["Result", "make_all_graphs", "print_all_graphs", "test_rkgb"]
