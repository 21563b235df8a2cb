"""A training in a process that the system limits, which plain PyTorch cannot do; one in a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import children
import pytest
import torch
from torch import nn

import rotor

SCRIPT = children.TESTS / "limited_process.py"
MARGIN_MIB = 300
# A large block goes back to the system when it is freed, in every process.
HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def run(kind: str, margin: int, folder: Path, steps: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(margin), str(folder), str(steps)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, **HEAP},
    )


@pytest.mark.slow
def test_fifty_steps_within_a_limit_of_the_system(tmp_path):
    """Losses equal to those of an unlimited process; the plain training ends at its first step."""
    plain = run("plain", MARGIN_MIB, tmp_path, 1)
    assert plain.returncode != 0
    assert "memory" in plain.stderr
    unlimited = run("plain", 0, tmp_path, 50)
    assert unlimited.returncode == 0, unlimited.stderr
    limited = run("tier", MARGIN_MIB, tmp_path, 50)
    assert limited.returncode == 0, limited.stderr
    assert json.loads(limited.stdout) == json.loads(unlimited.stdout)
    assert list(tmp_path.iterdir()) == []


def test_measuring_the_speed_of_the_tier_keeps_the_limit(monkeypatch):
    sizes, write = [], rotor.DiskTier.write

    def noted(tier, area, offset, source):
        sizes.append(len(source))
        return write(tier, area, offset, source)

    monkeypatch.setattr(rotor.DiskTier, "write", noted)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    limit = 1 << 20
    chk = rotor.Checkpointable(model, mem_limit=limit, engine="graph", offload="disk")
    chk(torch.randn(32, 64)).sum().backward()
    assert 0 < max(sizes) <= limit // 16
