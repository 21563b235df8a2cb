"""Programs under `rotor.dtr.budget`: peak and time against the plain program, bit for bit.

For each program of the tests and shares of its plain peak: the allocator's peak as a share of the
budget, the time as a multiple of the plain one (medians of runs in turn), and operators run again.
"least" is the smallest share, in steps of 5 %, at which the program finishes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from dynamic_cases import CASES, Case, Plain, gpt, resnet, step

from rotor import dtr
from rotor.errors import BudgetError

SHARES = (0.8, 0.6, 0.4)
ROUNDS = 5
LARGER = {
    "resnet": Case("resnet", lambda: resnet(batch=16, size=64)),
    "gpt": Case("gpt", lambda: gpt(batch=8, length=48)),
}


def seconds(plain: Plain, limits: list[int | None]) -> list[float]:
    """Medians of a plain step (first) and of one under each limit, run in turn."""
    times: list[list[float]] = [[] for _ in range(len(limits) + 1)]
    for _ in range(ROUNDS):
        model = copy.deepcopy(plain.model)
        start = time.perf_counter()
        step(model, plain.loss)
        times[0].append(time.perf_counter() - start)
        for k, limit in enumerate(limits):
            model = copy.deepcopy(plain.model)
            start = time.perf_counter()
            with dtr.budget(limit):
                step(model, plain.loss)
            times[k + 1].append(time.perf_counter() - start)
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
    for name, small in CASES.items():
        plain = Plain(LARGER.get(name, small))
        least = next(k / 20 for k in range(1, 21) if runs(plain, k / 20))
        shares = [1.0, *(s for s in SHARES if s > least), least]
        limits = [int(plain.peak_bytes * share) for share in shares]
        found = [plain.under(limit) for limit in limits]
        base, *times = seconds(plain, [*limits])
        for share, limit, (equal, peak, stats), took in zip(
            shares, limits, found, times, strict=True
        ):
            label = "least" if share == least else ""
            print(
                f"{name:12}{share:7.2f}{limit / 1e3:11.0f}{peak / limit:13.3f}{took / base:7.2f}"
                f"{stats.rematerializations:7}{'yes' if equal else 'NO':>7} {label}",
                flush=True,
            )


if __name__ == "__main__":
    main()
