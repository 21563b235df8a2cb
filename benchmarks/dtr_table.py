"""Programs under `rotor.dtr.budget`: peak and time against the plain program, bit for bit.

For each program and shares of its plain peak: the allocator's peak as a share of the budget, the
CPU time as a multiple of the plain one (medians of runs in turn, one thread), and operators run
again. "least" is the smallest share, in steps of 5 %, at which the program finishes. Below, where a
model has blocks: `torch.utils.checkpoint` on them, and the runtime in a budget of the peak that
this has. What checkpointing leaves is compared too: its recomputation updates the statistics of
batch normalisations once more.

`--ablation`: what each mechanism of the runtime is worth (`dtr_ablation.py`). Name some programs to
see only those; `--tiny` tries the tables out on small sizes.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import torch
from dtr_ablation import ABLATED, ablation
from dtr_cases import PROGRAMS, Plain, Program, medians, metered, parse_names, timed

from rotor import dtr
from rotor.errors import BudgetError

SHARES = (0.8, 0.6, 0.4)
ROUNDS = 5


def runs(plain: Plain, share: float) -> bool:
    """Whether a step finishes in this share of the plain peak."""
    try:
        plain.under(int(plain.peak_bytes * share))
    except BudgetError:
        return False
    return True


def row(label: str, share: float, plain: Plain, limit: int, slowdown: float) -> str:
    """A step under a limit once more, as a row."""
    start = f"{label:26}{share:6.2f}{limit / 1e3:11.0f}"
    try:
        equal, peak, stats = plain.under(limit)
    except BudgetError:
        return f"{start}  does not finish every time"
    return (
        f"{start}{peak / limit:13.3f}{slowdown:7.2f}{stats.rematerializations:7}"
        f"  {'yes' if equal else 'NO'}"
    )


def by_shares(plain: Plain) -> None:
    """Rows for shares of the plain peak."""
    least = next(k / 20 for k in range(1, 21) if runs(plain, k / 20))
    # What is evicted depends on measured times: near the least, a share may fail now and then.
    shares = [1.0, *(s for s in SHARES if s > least and runs(plain, s)), least]
    limits = [int(plain.peak_bytes * share) for share in shares]
    steps = [partial(timed, plain, partial(dtr.budget, limit)) for limit in limits]
    base, *times = medians([partial(timed, plain), *steps], ROUNDS)
    for share, limit, took in zip(shares, limits, times, strict=True):
        label = "budget, least" if share == least else "budget"
        print(row(label, share, plain, limit, took / base), flush=True)


def beside_checkpoint(program: Program, plain: Plain) -> None:
    """Rows for `torch.utils.checkpoint`, and for the runtime at the same peaks."""
    for contender in program.contenders:
        limit, equal = metered(plain, contender.wrap)
        share = limit / plain.peak_bytes
        base, theirs, ours = medians(
            [
                partial(timed, plain),
                partial(timed, plain, wrap=contender.wrap),
                partial(timed, plain, partial(dtr.budget, limit)),
            ],
            ROUNDS,
        )
        print(f"{contender.label:26}{share:6.2f}{limit / 1e3:11.0f}{'':13}{theirs / base:7.2f}"
              f"{'':7}  {equal}")  # fmt: skip
        print(row("budget of this peak", share, plain, limit, ours / base), flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--ablation", action="store_true", help="leave out mechanisms in turn")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.ablation:
        for program in parse_names(arguments.programs, ABLATED):
            ablation(program, program.plain(arguments.tiny))
        return
    print(
        f"{'':26}{'share':>6}{'budget kB':>11}{'peak/budget':>13}{'time':>7}{'again':>7}  equal",
        flush=True,
    )
    for program in parse_names(arguments.programs, list(PROGRAMS)):
        print(f"{program.name}: {'tiny' if arguments.tiny else program.size}", flush=True)
        plain = program.plain(arguments.tiny)
        by_shares(plain)
        beside_checkpoint(program, plain)


if __name__ == "__main__":
    main()
