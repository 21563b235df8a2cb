"""Facts on this machine: devices, free memory, limits, versions, extras."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from importlib import metadata
from typing import Any

from rotor import _core
from rotor.common import cache

__all__ = ["EXTRAS", "describe"]

EXTRAS = {
    "progress": "rich",
    "plot": "matplotlib",
    "draw": "graphviz",
    "ilp": "scipy",
    "transformers": "transformers",
    "lightning": "lightning",
}
"""Extras of the package, and a module of each."""


def describe() -> dict[str, Any]:
    """Return the facts on this machine as plain data; bytes are ``None`` without a limit.

    Returns
    -------
    dict
        ``versions``, ``devices``, ``memory``, ``compiler``, ``storage_swap``, ``extras``,
        ``cache``. Without PyTorch, facts that need it are ``None``.
    """
    probe = {name: None if value < 0 else value for name, value in _core.probe_memory().items()}
    devices, torch_version, swap = _of_torch(probe["free_bytes"])
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch_version,
            "numpy": metadata.version("numpy"),
        },
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": devices,
        "memory": probe,
        "compiler": _compiler(),
        "storage_swap": swap,
        "extras": {
            name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()
        },
        "cache": str(cache.directory() or "none, since no home directory is set"),
    }


def _compiler() -> str | None:
    """Return the C compiler that `pip install` and Inductor would use."""
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    for name in (named.split()[0], "cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return found
    return None


def _of_torch(free_bytes: int | None) -> tuple[list[dict[str, Any]], str | None, bool | None]:
    cpu = {"name": "cpu", "model": platform.processor() or platform.machine()}
    try:
        import torch

        from rotor._pytorch import devices as places
        from rotor._pytorch.pointers import has_storage_swap
        from rotor.meter import allocator
    except ImportError:
        return [{**cpu, "free_bytes": free_bytes, "total_bytes": None}], None, None
    total = _core.probe_memory()["total_bytes"]
    sizes = {"free_bytes": allocator.free_bytes("cpu"), "total_bytes": None if total < 0 else total}
    devices: list[dict[str, Any]] = [{**cpu, **sizes, "threads": torch.get_num_threads()}]
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            device = torch.device(places.default_type(), index)
            # The driver knows of a device that is not in use without taking memory on it.
            free, total = allocator.driver_bytes(device)
            sizes = {"free_bytes": free, "total_bytes": total}
            devices.append({"name": str(device), "model": places.name_of(device), **sizes})
    return devices, str(torch.__version__), has_storage_swap()
