"""Programs under `rotor.dtr.budget`: peak and time against the plain program, bit for bit.

For each program and shares of its plain peak: the allocator's peak as a share of the budget, the
CPU time as a multiple of the plain one (medians of runs in turn, one thread), and operators run
again. On CUDA sizes are larger, and times are wall time of a step that is waited for at its end
only, in a stream of its own. "least" is the smallest share, in steps of 5 %, at which the program
finishes five times in a row. Below, where a model has blocks: `torch.utils.checkpoint` on them, and
the runtime in a budget of the peak that this has. What checkpointing leaves is compared too: its
recomputation updates the statistics of batch normalisations once more.

`--ablation`: what each mechanism of the runtime is worth (`dtr_ablation.py`). Name some programs to
see only those; `--tiny` tries the tables out on small sizes.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from contextlib import nullcontext
from functools import partial

import torch
from common import open_device
from dtr_ablation import ABLATED, MOST_TIMES, ablation
from dtr_ablation import ROUNDS as ABLATION_ROUNDS
from dtr_cases import PROGRAMS, Plain, Program, budget, medians, metered, parse_names, timed

from rotor.errors import BudgetError

SHARES = (0.8, 0.6, 0.4)
ROUNDS = 5
TIMES = 4


def runs(plain: Plain, share: float, times: int = 1) -> bool:
    """Whether a step finishes in this share of the plain peak, every time."""
    try:
        for _ in range(times):
            plain.under(int(plain.peak_bytes * share))
    except BudgetError:
        return False
    return True


def least_share(plain: Plain) -> float | None:
    """The least share in steps of 5 %, from the plain peak down, before one fails or crawls."""
    most = 2 * MOST_TIMES * timed(plain)
    least = None
    for k in range(20, 0, -1):
        start = time.perf_counter()
        if not runs(plain, k / 20):
            break
        least = k / 20
        if time.perf_counter() - start > most:
            return least
    # What is evicted depends on measured times: near the least, a share may fail now and then.
    while least is not None and not runs(plain, least, TIMES):
        least = round(least + 0.05, 2) if least < 1 else None
    return least


def row(label: str, share: float, plain: Plain, limit: int, slowdown: float) -> str:
    """A step under a limit once more, as a row."""
    start = f"{label:26}{share:6.2f}{limit / 1e3:11.0f}"
    try:
        equal, peak, stats = plain.under(limit)
    except BudgetError:
        slowdown = math.inf
    if math.isinf(slowdown):
        return f"{start}  does not finish every time"
    return (
        f"{start}{peak / limit:13.3f}{slowdown:7.2f}{stats.rematerializations:7}"
        f"  {'yes' if equal else 'NO'}"
    )


def by_shares(plain: Plain, rounds: int) -> None:
    """Rows for shares of the plain peak."""
    least = least_share(plain)
    if least is None:
        print("  does not finish in its plain peak", flush=True)
        return
    shares = [1.0, *(s for s in SHARES if s > least and runs(plain, s)), least]
    limits = [int(plain.peak_bytes * share) for share in shares]
    steps = [partial(timed, plain, partial(budget, plain, limit)) for limit in limits]
    base, *times = medians([partial(timed, plain), *steps], rounds)
    for share, limit, took in zip(shares, limits, times, strict=True):
        label = "budget, least" if share == least else "budget"
        print(row(label, share, plain, limit, took / base), flush=True)


def beside_checkpoint(program: Program, plain: Plain, rounds: int) -> None:
    """Rows for `torch.utils.checkpoint`, and for the runtime at the same peaks."""
    for contender in program.contenders:
        limit, equal = metered(plain, contender.wrap)
        share = limit / plain.peak_bytes
        base, theirs, ours = medians(
            [
                partial(timed, plain),
                partial(timed, plain, wrap=contender.wrap),
                partial(timed, plain, partial(budget, plain, limit)),
            ],
            rounds,
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
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, of the ablation {ABLATION_ROUNDS}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = open_device(arguments.device)
    on_cuda = device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        show(arguments, device)


def show(arguments: argparse.Namespace, device: torch.device) -> None:
    """The table of the programs, or those of the ablation."""
    if arguments.ablation:
        for program in parse_names(arguments.programs, ABLATED):
            plain = program.plain(arguments.tiny, device)
            ablation(program, plain, arguments.rounds or ABLATION_ROUNDS)
        return
    rounds = arguments.rounds or ROUNDS
    print(
        f"{'':26}{'share':>6}{'budget kB':>11}{'peak/budget':>13}{'time':>7}{'again':>7}  equal",
        flush=True,
    )
    for program in parse_names(arguments.programs, list(PROGRAMS)):
        print(f"{program.name}: {program.size_on(arguments.tiny, device)}", flush=True)
        plain = program.plain(arguments.tiny, device)
        by_shares(plain, rounds)
        beside_checkpoint(program, plain, rounds)


if __name__ == "__main__":
    main()
