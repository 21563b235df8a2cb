"""Plans of fixed models on the simulated device are those of the golden file, or better."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import library

GOLDEN = Path(__file__).parents[2] / "benchmarks" / "golden.py"


def compared(*words):
    """Return the last line that the comparison prints, and all of it."""
    library()
    paths = [str(GOLDEN.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(GOLDEN), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return (done.stdout.splitlines() or [""])[-1], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "count"),
    [(["loop", "mixed at"], 5), pytest.param([], 45, marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_plans_are_no_worse(words, count):
    import torch

    known = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
    if known["torch"] != ".".join(torch.__version__.split(".")[:2]):
        pytest.skip(f"the golden file is of PyTorch {known['torch']}")
    last, text = compared(*words)
    assert last == f"{count} plans, 0 different, 0 worse", text
