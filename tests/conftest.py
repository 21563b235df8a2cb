"""One thread: results are the same on every machine, and busy ones do not spin."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def plans_stay(request, monkeypatch):
    """Let no search end while a test runs, and keep no programs for other tests.

    A test that wants better plans runs the searches itself (background_models.py).
    """
    if request.module.__name__.rpartition(".")[2].startswith("test_background"):
        return
    try:
        import torch  # noqa: F401
    except ImportError:
        return
    from background_models import Stepped

    from rotor.engines.graph import improving, known

    monkeypatch.setattr(improving, "Threads", Stepped)
    monkeypatch.setattr(known.Known, "keep", lambda *_: None)
