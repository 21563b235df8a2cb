"""Programs under `rotor.dtr.budget`: peak and time against the plain program, bit for bit.

For each program and shares of its plain peak: the allocator's peak as a share of the budget, the
CPU time as a multiple of the plain one (medians of runs in turn, one thread), and operators run
again. "least" is the smallest share, in steps of 5 %, at which the program finishes. The programs
are those of the tests at the sizes below, at which an operator takes tens of microseconds or more;
name some of them to see only those.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from dynamic_cases import CASES, Case, Plain, gpt, lstm_cell, resnet, step, treelstm

from rotor import dtr
from rotor.errors import BudgetError

SHARES = (0.8, 0.6, 0.4)
ROUNDS = 5
LARGER = {
    "resnet": ("batch 16, 64 x 64", lambda: resnet(batch=16, size=64)),
    "gpt": ("width 256, 2 x 256 tokens", lambda: gpt(batch=2, length=256, width=256)),
    "lstm_cell": ("width 512, batch 64, 20 steps", lambda: lstm_cell(20, 64, 512)),
    "treelstm": ("width 256, batch 64, 40 nodes", lambda: treelstm(40, 64, 256)),
}


def seconds(plain: Plain, limits: list[int | None]) -> list[float]:
    """Medians of a plain step (first) and of one under each limit, run in turn."""
    times: list[list[float]] = [[] for _ in range(len(limits) + 1)]
    for _ in range(ROUNDS):
        model = copy.deepcopy(plain.model)
        start = time.process_time()
        step(model, plain.loss)
        times[0].append(time.process_time() - start)
        for k, limit in enumerate(limits):
            model = copy.deepcopy(plain.model)
            start = time.process_time()
            try:
                with dtr.budget(limit):
                    step(model, plain.loss)
            except BudgetError:
                times[k + 1].append(math.inf)
                continue
            times[k + 1].append(time.process_time() - start)
    return [statistics.median(row) for row in times]


def runs(plain: Plain, share: float) -> bool:
    """Whether a step finishes in this share of the plain peak."""
    try:
        plain.under(int(plain.peak_bytes * share))
    except BudgetError:
        return False
    return True


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"{'program':12}{'share':>7}{'budget kB':>11}{'peak/budget':>13}{'time':>7}{'again':>7}"
        f"{'equal':>7}"
    )
    for name in sys.argv[1:] or CASES:
        size, make = LARGER.get(name, ("as in the tests", CASES[name].make))
        print(f"{name}: {size}", flush=True)
        plain = Plain(Case(name, make))
        least = next(k / 20 for k in range(1, 21) if runs(plain, k / 20))
        # What is evicted depends on measured times: near the least, a share may fail now and then.
        shares = [1.0, *(s for s in SHARES if s > least and runs(plain, s)), least]
        limits = [int(plain.peak_bytes * share) for share in shares]
        base, *times = seconds(plain, [*limits])
        for share, limit, took in zip(shares, limits, times, strict=True):
            label = "least" if share == least else ""
            try:
                equal, peak, stats = plain.under(limit)
            except BudgetError:
                print(f"{name:12}{share:7.2f}{limit / 1e3:11.0f}  does not finish every time")
                continue
            print(
                f"{name:12}{share:7.2f}{limit / 1e3:11.0f}{peak / limit:13.3f}{took / base:7.2f}"
                f"{stats.rematerializations:7}{'yes' if equal else 'NO':>7} {label}",
                flush=True,
            )


if __name__ == "__main__":
    main()
