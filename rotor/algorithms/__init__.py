"""Algorithms that schedule a chain, by class and by name.

``algorithms.Persistent().solve(chain, budget_bytes)`` gives a `Sequence` or raises
`InfeasibleError`; ``algorithms.get("persistent")`` is the class of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Operation, Sequence, Timeline
from rotor.algorithms.utils import DynamicAlgorithm

if TYPE_CHECKING:
    from rotor.algorithms.chen_sqrt import ChenSqrt
    from rotor.algorithms.floating import Floating
    from rotor.algorithms.griewank import Griewank
    from rotor.algorithms.griewank_heterogeneous import GriewankHeterogeneous
    from rotor.algorithms.no_checkpoint import NoCheckpoint
    from rotor.algorithms.persistent import Persistent
    from rotor.algorithms.recompute_all import RecomputeAll

__all__ = [
    "ChenSqrt",
    "Curve",
    "DynamicAlgorithm",
    "Floating",
    "Griewank",
    "GriewankHeterogeneous",
    "NoCheckpoint",
    "Operation",
    "Persistent",
    "RecomputeAll",
    "Sequence",
    "Timeline",
    "get",
    "names",
]

# One line per algorithm; its module is rotor.algorithms.<name>.
_REGISTRY = {
    "persistent": "Persistent",
    "floating": "Floating",
    "griewank": "Griewank",
    "griewank_heterogeneous": "GriewankHeterogeneous",
    "chen_sqrt": "ChenSqrt",
    "no_checkpoint": "NoCheckpoint",
    "recompute_all": "RecomputeAll",
}
_MODULES = {class_name: name for name, class_name in _REGISTRY.items()}


def names() -> list[str]:
    """Return the names of all algorithms, for `get`."""
    return list(_REGISTRY)


def get(name: str) -> type[DynamicAlgorithm]:
    """Return the class of an algorithm.

    Parameters
    ----------
    name
        Name such as "persistent"; `names` has them all.

    Returns
    -------
    type
        A subclass of `DynamicAlgorithm`.

    Raises
    ------
    ValueError
        No algorithm has that name; the message lists all names.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"no algorithm is named {name!r}, expected one of {', '.join(_REGISTRY)}")
    found: type[DynamicAlgorithm] = getattr(
        importlib.import_module(f"rotor.algorithms.{name}"), _REGISTRY[name]
    )
    return found


def chosen(algo: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return an algorithm given by name, class or object, and the options of its ``solve``.

    Raise ValueError if no algorithm has that name, TypeError if it has no ``solve``.
    """
    if isinstance(algo, str):
        algo = get(algo)
    if isinstance(algo, type):
        algo, options = algo(**options), {}
    if algo is not None and not callable(getattr(algo, "solve", None)):
        raise TypeError(
            f"algo = {algo!r}, expected the name of an algorithm, one of {', '.join(names())}, or "
            "an object with a method solve(chain, budget) that returns a Sequence"
        )
    return algo, options


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return get(_MODULES[name])
    if name in (*_REGISTRY, "curve", "sequence", "utils"):
        return importlib.import_module(f"rotor.algorithms.{name}")
    raise AttributeError(f"module 'rotor.algorithms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_REGISTRY})
