"""Logs: the shipped ones, and where they are at hand those published with DTR, which are not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rotor import experiments

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
LOGS = DATA / "simrd_logs"
EXPECTED = DATA / "simrd_expected.csv"

needs_logs = pytest.mark.skipif(
    not LOGS.is_dir(),
    reason=f"needs the logs resnet32-*, unet-* and treelstm-*.log published with DTR, in {LOGS}",
)
needs_decisions = pytest.mark.skipif(
    not (EXPECTED.is_file() and LOGS.is_dir()),
    reason=f"needs the published logs in {LOGS}, and what the published simulator decided on them "
    f"as {EXPECTED}",
)


def shipped(name: str) -> bytes:
    """The log of a model that comes with the package."""
    return gzip.decompress((experiments.shipped_logs() / f"{name}.log.gz").read_bytes())


def path_of(name: str) -> Path:
    """The published log of a model."""
    (path,) = LOGS.glob(f"{name}-*.log")
    return path
