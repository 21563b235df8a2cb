"""Memory that shows what an operator leaves as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotor import _core

Needs = _core.Needs


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill what operators allocate: not a number, the largest integer, or true."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            yield
        finally:
            settings.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
