"""Equal bits need algorithms that give them: cuBLAS reads its setting when it is first used."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

if os.environ.get("ROTOR_GPU_TESTS") == "sim":
    # A dry run of these tests, on a device with room for them.
    import accelerator

    accelerator.load().set_capacity(8 << 30)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
