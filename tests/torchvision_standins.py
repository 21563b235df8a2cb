"""Imports torchvision where its compiled operators cannot be loaded.

Installed without its dependencies, torchvision may be built for another kind of PyTorch (CUDA
beside a CPU build); its Python part then stops at operators that do not exist. None of the models
compared here uses them, so empty definitions will do.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType

import pytest
import torch

_DEFINITIONS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import torchvision, with stand-ins where needed; ModuleNotFoundError where it is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision.models")
            return
        except RuntimeError as error:
            if "torchvision::" not in str(error) or _libraries:
                raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for definition in _DEFINITIONS:
            library.define(definition)
        importlib.import_module("torchvision.models")


def import_torchvision_models() -> ModuleType:
    """Return ``torchvision.models``; skip the calling module where torchvision is absent."""
    try:
        import_torchvision()
    except ModuleNotFoundError as error:
        pytest.skip(f"comparison with torchvision: {error}", allow_module_level=True)
    return sys.modules["torchvision.models"]
