"""Imports, once for all processes of ``coverage.py``, the packages that are there."""

from __future__ import annotations

from contextlib import suppress

import coverage_models

for _package in ("torchvision", "timm", "transformers.modeling_utils"):
    with suppress(ImportError):
        coverage_models.prepare(_package)
