"""States in a record of a finished step beside those of a model and its optimizer.

Schedulers, scalers and the random number generators are in it as they were when `optimizer.step()`
returned.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rotor._pytorch import optimizers

RESERVED = ("step", "model", "optimizer", "random")
"""Names in the result of `rotor.tier.recover` that further objects cannot have."""


def check(objects: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for objects that have no state, or a name that is taken."""
    for name, value in objects.items():
        if name in RESERVED:
            raise ValueError(f"{name} is in every record already: give the object another name")
        if not isinstance(value, torch.Generator) and not callable(
            getattr(value, "state_dict", None)
        ):
            raise TypeError(
                f"{name} is a {type(value).__name__}, expected an object with state_dict(), such "
                "as a scheduler, or a torch.Generator"
            )


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of objects by name, and those of the generators of the process."""
    found = {name: _state_of(value) for name, value in objects.items()}
    return found | {"random": _random_states()}


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.amp.GradScaler):
        return optimizers.updated_state(value)
    return value.state_dict()


def _random_states() -> dict[str, Any]:
    state: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest),
    }


def set_random(found: Mapping[str, Any]) -> None:
    """Set the random number generators of the process: PyTorch's, Python's and NumPy's.

    Parameters
    ----------
    found
        ``recover(...)["random"]``.
    """
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "numpy" in found:
        name, keys, *rest = found["numpy"]
        state = (name, keys.numpy().astype("uint32"), *rest)
        np.random.set_state(state)  # noqa: NPY002
