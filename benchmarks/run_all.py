"""Every benchmark, one after the other; what they print is what the documentation quotes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = (
    "overhead.py",
    "planning.py",
    "planner.py",
    "truth.py",
    "against_segments.py",
    "graph_truth.py",
    "graph_curve.py",
    "graph_overhead.py",
    "inductor.py",
    "largest_batch.py",
    "simulator.py",
    "dtr_table.py",
    "dtr_overhead.py",
    "dtr_simulator.py",
    "demo.py",
)


def main() -> None:
    """Run them; fails when one fails."""
    failed = []
    for script in SCRIPTS:
        print(f"\n== {script}", flush=True)
        command = [sys.executable, str(Path(__file__).with_name(script))]
        if subprocess.run(command, check=False).returncode:
            failed.append(script)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
