"""Environment of processes that tests start, in which the helpers of the tests are found."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings and the folder of the tests."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | settings
