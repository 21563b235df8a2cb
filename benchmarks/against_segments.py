"""rotor against ``torch.utils.checkpoint.checkpoint_sequential`` at equal peak.

For each number of segments: its peak becomes rotor's limit, and both are timed in turn beside the
plain model. Prints the times over plain's; the last column is rotor's time over the segments'.
"""

from __future__ import annotations

import argparse
import copy

import torch
from cases import Case, chosen
from common import (
    Contender,
    interleaved_times,
    open_device,
    segment_table,
    step_peak_bytes,
    train_step,
)

import rotor
from rotor.report.text import table

SEGMENTS = [2, 4, 8]


def run(case: Case, device: torch.device, rounds: int, segments: list[int]) -> list[float]:
    """Compare on one model; prints a table, returns the ratios."""
    torch.manual_seed(0)
    batch = case.batch(device)
    model = case.make().to(device)
    plain = copy.deepcopy(model)
    plain_peak = step_peak_bytes(plain, batch)
    chk = rotor.Checkpointable(model)
    chk.measure(batch[0])
    rows = [
        [
            "segments",
            "peak / plain",
            "segments / plain",
            "rotor / plain",
            "predicted",
            "rotor / segments",
        ]
    ]
    ratios = []
    entries = [e for e in segment_table(chk, batch, segments) if e.peak_bytes < plain_peak]
    entries.sort(key=lambda entry: -entry.peak_bytes)
    for entry in entries:
        limited = copy.deepcopy(chk)
        try:
            sequence = limited.compute_sequence(entry.peak_bytes)
        except rotor.InfeasibleError as error:
            rows.append(
                [
                    str(entry.segments),
                    f"{entry.peak_bytes / plain_peak:.3f}",
                    "-",
                    "-",
                    "-",
                    f"least is {error.minimum_bytes / plain_peak:.3f}",
                ]
            )
            continue
        for _ in range(3):
            train_step(limited, batch)
        contenders = [
            Contender("plain", plain),
            Contender("segments", entry.module),
            Contender("rotor", limited),
        ]
        base, segmented, mine = interleaved_times(contenders, batch, rounds, warm_ups=1)
        ratios.append(mine / segmented)
        rows.append(
            [
                str(entry.segments),
                f"{entry.peak_bytes / plain_peak:.3f}",
                f"{segmented / base:.3f}",
                f"{mine / base:.3f}",
                f"{sequence.makespan / limited.build_chain().ideal_time:.3f}",
                f"{mine / segmented:.3f}",
            ]
        )
    print(f"\n{case.name}: plain peak {plain_peak / 1e6:.1f} MB, medians of {rounds} rounds")
    print(table(rows), flush=True)
    return ratios


def main() -> None:
    """All models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--segments", type=int, nargs="+", default=SEGMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    for case in chosen(device, arguments.models):
        run(case, device, arguments.rounds, arguments.segments)


if __name__ == "__main__":
    main()
