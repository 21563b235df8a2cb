"""What a limit in reserved bytes costs, against allocated-bytes plans that reserve as much.

    python benchmarks/reserved.py [--quick]

On the simulated accelerator of the tests: 7 models, one of them an `nn.Sequential`, 4 limits
each, parts of what the graph reserves without a limit. For each limit, the step that
was planned for reserved bytes is compared with the fastest of the plans for allocated bytes that
happen to reserve no more, of 12 limits. All programs are priced as the engine does, in a private
pool where that is less. Reserved bytes of steps are the device's own counters.
Times are of a device that needs a launch and its bytes' time for each operation, so that they
repeat. A second table has the bytes of each graph without a limit, in common segments, the lesser
of these and of a pool, and the pool, if it is less, without a hole between large blocks.
The exit code is 1 if a limit is passed, or a plan is more than 3 % slower.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "devices")]

import accelerator  # noqa: E402

sim: Any = accelerator.load()

from limited_on_sim import distance, one_step  # noqa: E402
from test_sim_reserved import MODELS as EVEN_MODELS  # noqa: E402

import rotor  # noqa: E402

WIDTHS_OF_UNEVEN, ROWS_OF_UNEVEN = (150, 470, 470, 150, 220, 470, 330, 640, 470), 1500


class Uneven(nn.Module):
    """Layers of many widths, whose values are all needed at the end."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the means of all values."""
        made = []
        for layer in self.layers:
            value = torch.tanh(layer(value))
            made.append(value.mean(1, keepdim=True))
        return torch.cat(made, 1)


MODELS = EVEN_MODELS | {
    "uneven": (partial(Uneven, WIDTHS_OF_UNEVEN), (ROWS_OF_UNEVEN, WIDTHS_OF_UNEVEN[0])),
}
NAMES = ("skips", "odd sizes", "dropout", "images", "attention", "chain", "uneven")
SHARES = (0.9, 0.8, 0.7, 0.6)
CANDIDATES = 12
MOST_SLOWER = 0.03
SEGMENT = 2 << 20


def reserved_of_step(model: Any, batch: torch.Tensor, steps: int) -> int:
    """Return the most bytes that some steps take from the device, above what was there."""
    model.zero_grad()
    sim.empty_cache()
    level = sim.memory_reserved()
    sim.reset_peak_memory_stats()
    for _ in range(steps):
        model.zero_grad()
        one_step(model, batch, True)
    model.zero_grad()
    return int(sim.max_memory_reserved() - level)


def planned(model: Any, batch: torch.Tensor, limit: int, counts: str) -> Any:
    """Return a wrapped copy of a model with its plan; ``None`` if no plan fits."""
    wrapped = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="graph",
        counts=counts,
        loss_fn=distance,
        verbosity=-1,
        planning="before",
    )
    try:
        wrapped.measure(batch, targets=(torch.tensor(0.5, device="sim"),))
        wrapped.compute_sequence()
    except rotor.InfeasibleError:
        return None
    return wrapped


def priced(step: Any, program: Any) -> int:
    """Return the bytes that a program reserves, as the engine prices it."""
    return int(program.peak_bytes + step.bytes_beside(program, 1 << 40))


def rows_of(name: str, shares: tuple[float, ...], graphs: list[str]) -> list[dict[str, Any]]:
    """Return the comparisons of one model; add a line about its graph."""
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model = make().to("sim")
    batch = torch.randn(*shape, device="sim")
    unlimited = planned(model, batch, 1 << 40, "reserved").plan
    reserves = partial(priced, unlimited.step)
    plain = reserves(unlimited.program)
    own = unlimited.step.executor_bytes_of(unlimited.program.actions.tolist(), 1 << 40)
    common, pool = unlimited.step._blocks_of(unlimited.program, own)
    least = None
    if pool is not None:
        segments = pool.small_segments + -(-pool.large_bytes // SEGMENT)
        least = pool.outside_bytes + SEGMENT * segments
    figures = (common.allocated_peak_bytes, common.reserved_peak_bytes, plain, least)
    cells = [f"{nbytes / (1 << 20):10.1f}" if nbytes else f"{'-':>10}" for nbytes in figures]
    graphs.append(f"{name:10} " + " ".join(cells))
    others = []
    for number in range(CANDIDATES):
        limit = int(plain * (0.45 + 0.55 * number / (CANDIDATES - 1)))
        wrapped = planned(model, batch, limit, "allocated")
        if wrapped is not None:
            program = wrapped.plan.program
            others.append((reserves(program), program.makespan))
    rows = []
    for share in shares:
        limit = int(plain * share)
        row: dict[str, Any] = {"model": name, "unlimited_bytes": plain, "limit_bytes": limit}
        wrapped = planned(model, batch, limit, "reserved")
        known = [time for nbytes, time in others if nbytes <= limit]
        row["allocated_seconds"] = min(known, default=None)
        if wrapped is not None:
            row["seconds"] = wrapped.plan.program.makespan
            row["predicted_bytes"] = wrapped.plan.predicted_bytes
            row["measured_bytes"] = reserved_of_step(wrapped, batch, 3)
        rows.append(row)
    return rows


def is_good(row: dict[str, Any]) -> bool:
    """Return whether a limit was held, by a plan that is as fast as the others."""
    if "seconds" not in row:
        return row["allocated_seconds"] is None
    if row["measured_bytes"] > row["limit_bytes"]:
        return False
    other = row["allocated_seconds"]
    return other is None or row["seconds"] <= (1 + MOST_SLOWER) * other


def main() -> int:
    """Print a table, and write it with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two models, two limits")
    parser.add_argument("--json", type=Path, help="file of the rows")
    given = parser.parse_args()
    sim.set_poison(0)
    sim.set_clock("model")
    sim.set_capacity(4 << 30)
    warnings.simplefilter("ignore")
    names, shares = (NAMES[:2], SHARES[::2]) if given.quick else (NAMES, SHARES)
    rows = []
    graphs: list[str] = []
    print("model        limit unlimited predicted  measured   step ms  allocated's   slower")
    for name in names:
        for row in rows_of(name, shares, graphs):
            rows.append(row)
            mib = 1 << 20
            cells = [f"{row[key] / mib:8.1f}" for key in ("limit_bytes", "unlimited_bytes")]
            for key in ("predicted_bytes", "measured_bytes"):
                cells.append(f"{row[key] / mib:9.1f}" if key in row else "     none")
            found, other = row.get("seconds"), row["allocated_seconds"]
            cells += [f"{1e3 * time:9.2f}" if time else "     none" for time in (found, other)]
            slower = f"{found / other - 1:+8.1%}" if found and other else "       -"
            good = "" if is_good(row) else "  !"
            print(f"{name:10}", *cells, slower, good, flush=True)
    print("\nmodel       allocated  in common      least   no holes", *graphs, sep="\n")
    held = sum(row.get("measured_bytes", 0) <= row["limit_bytes"] for row in rows)
    plans = sum("seconds" in row for row in rows)
    compared = [row for row in rows if "seconds" in row and row["allocated_seconds"]]
    slower = max(row["seconds"] / row["allocated_seconds"] - 1 for row in compared)
    missed = len(rows) - held
    print(f"\n{plans} plans of {len(rows)} limits; {missed} passed their limits.")
    print(f"The slowest beside another is {slower:+.1%} of it.")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
