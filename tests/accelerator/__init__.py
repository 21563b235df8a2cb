"""A simulated accelerator for tests, the device "sim": built with g++ alone, and kept.

``load()`` gives PyTorch the device. It has to be called before the first backward of a process,
which starts the threads of all devices: tests on the device have a process of their own
(processes.py).
"""

from __future__ import annotations

from types import ModuleType

from accelerator.build import NotBuilt, library

__all__ = ["NotBuilt", "library", "load"]


def load() -> ModuleType:
    """Return the module ``torch.sim``, with the settings of the simulation."""
    from accelerator import device

    return device.register()
