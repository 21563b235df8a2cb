"""The dynamic runtime beside the simulator, on the logs that it wrote.

Random programs that hold what they make, every operator of the same cost: evictions, one by one.
Steps of the programs of the tests, forward and backward, in shares of their modelled peak: peak,
operators run again and their time, as they were and as simrd predicts them from the log, with the
costs that were measured. "forward" is the same without the backward, values held.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from dynamic_cases import CASES, Plain, step
from test_dtr_log import HEURISTICS, program, run_both

from rotor import dtr, simrd
from rotor.dtr import recall
from rotor.errors import MemoryLimitWarning

SHARES = (0.8, 0.6)
SEEDS = 30


def exact() -> None:
    """Evictions of random programs, compared in order."""
    print("heuristic         programs   evictions   in the same order   run again: real, predicted")
    for heuristic in [*HEURISTICS, "DTREqClass"]:
        total = equal = real = predicted = 0
        for seed in range(SEEDS):
            clock = itertools.count(0, 1000).__next__
            with mock.patch.object(recall, "CLOCK", clock):
                stats, gone, _, result, names = run_both(program(seed), heuristic, 0.4)
            total += len(gone)
            equal += next((k for k, pair in enumerate(zip(gone, names, strict=False))
                           if pair[0] != pair[1]), len(gone))  # fmt: skip
            real += stats.rematerializations
            predicted += result.n_remat
        print(f"{heuristic:16} {SEEDS:9} {total:11} {equal / total:19.1%}   {real}, {predicted}")


def beside(run: Callable[[], Any], share: float) -> tuple[Any, Any, int]:
    """The figures of a run in a share of its peak, the simulator's, and its constants' bytes."""
    with dtr.budget(None) as session:
        held = run()
        limit = int(session.stats.peak_bytes * share)
        del held
    file = io.BytesIO()
    with dtr.budget(limit, heuristic="DTREqClass", strict=False) as session:
        log = dtr.ProgramLog(simrd.LogWriter(file), session.bytes_of)
        session.observer = log
        held = run()
        stats = session.stats
        del held
        session.observer = None
    log.close()
    parsed = simrd.parse(file.getvalue())
    constants = parsed.baseline.const_memory
    result = simrd.simulate(
        parsed, "DTREqClass", budget_bytes=limit + constants, overhead_limit=math.inf,
        rebuild_classes_every=16,
    )  # fmt: skip
    return stats, result, constants


def main() -> None:
    """Print both tables."""
    warnings.simplefilter("ignore", MemoryLimitWarning)
    exact()
    print()
    print("program            share   peak: real, predicted, bytes   run again   slow-down")
    for name, case in CASES.items():
        plain = Plain(case)

        def whole(plain: Plain = plain) -> Any:
            return step(copy.deepcopy(plain.model), plain.loss)

        def forward(plain: Plain = plain) -> Any:
            return plain.loss(plain.model)

        for label, run in ((name, whole), (f"{name} forward", forward)):
            for share in SHARES:
                stats, result, constants = beside(run, share)
                status = "" if result.status == "ok" else f"  ({result.status})"
                print(
                    f"{label:18} {share:5.0%} {stats.peak_bytes:13} "
                    f"{result.max_memory - constants:13}   "
                    f"{stats.rematerializations:4} {result.n_remat:5}   "
                    f"{1 + stats.remat_ns / stats.base_ns:.3f} {result.slowdown:.3f}{status}"
                )


if __name__ == "__main__":
    main()
