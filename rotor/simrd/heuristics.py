"""The heuristics of the simulator: which storage is evicted next.

The storage of the least cost goes. In the formulas, c is the time of the computation of a storage,
e_after and e_before the times of what is evicted after and before it, reached through evicted
storages only, size its bytes, and stale the time since its last access.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 2 and appendix D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rotor import _core

__all__ = ["WRITTEN", "Heuristic", "HeuristicLike", "check", "get", "names", "resolve"]

HeuristicLike = str | Callable[[_core.Candidate], float]
"""A name, or a function of a candidate that returns its cost."""

WRITTEN: dict[str, Callable[[_core.Candidate], float]] = {}
"""Heuristics that are Python functions, by name; the first line of its docstring describes one."""

_FORMULAS = {
    "DTR": "(c + e_after + e_before) / (size * stale)",
    "DTREqClass": "(c + sums of the classes of its evicted neighbours) / (size * stale)",
    "DTRLocal": "c / (size * stale)",
    "DTRUnopt": "(c + what is evicted around it, each storage once) / (size * time since the last "
    "access to it or to any of these)",
    "MSPS": "(c + e_before) / size",
    "DTRAncestors": "(c + e_before) / (size * stale)",
    "LRU": "time of its last access",
    "LargestStorage": "1 / size",
    "RandomStorage": "any storage, all alike",
    "AbRandom": "any storage, all alike",
}
_NUMERATORS = {
    "E": "(c + e_after + e_before)",
    "Eq": "(c + sums of the classes of its evicted neighbours)",
    "Local": "c",
    "": "1",
}


@dataclass(frozen=True)
class Heuristic:
    """A heuristic; `get` finds it by name. All but "DTRAncestors", rotor's own, are published.

    Attributes
    ----------
    name
        Such as "DTREqClass".
    needs
        Structure that a runtime keeps for it: "classes", "regions", or neither.
    is_random
        True if it draws random numbers, so that the seed matters.
    description
        Its cost, as a formula.
    """

    name: str
    needs: frozenset[str]
    is_random: bool
    description: str


def _formula(name: str) -> str:
    if name in _FORMULAS:
        return _FORMULAS[name]
    rest = name.removeprefix("Ab")
    stale, rest = rest.endswith("Stale"), rest.removesuffix("Stale")
    size, rest = rest.endswith("Size"), rest.removesuffix("Size")
    divisor = " * ".join([*(["size"] if size else []), *(["stale"] if stale else [])])
    return f"{_NUMERATORS[rest]} / ({divisor})" if divisor else _NUMERATORS[rest]


@cache
def _of_the_core() -> dict[str, Heuristic]:
    found = {}
    for name, needs in _core.heuristics():
        kept = frozenset(needs) - {"chance"}
        found[name] = Heuristic(name, kept, "chance" in needs, _formula(name))
    return found


def _registry() -> dict[str, Heuristic]:
    found = dict(_of_the_core())
    for name, function in WRITTEN.items():
        description = (function.__doc__ or "").partition("\n")[0]
        found[name] = Heuristic(name, frozenset(), is_random=False, description=description)
    return found


def resolve(heuristic: HeuristicLike) -> HeuristicLike:
    """Return the function of a name in `WRITTEN`, and anything else as it is."""
    return WRITTEN.get(heuristic, heuristic) if isinstance(heuristic, str) else heuristic


def names() -> list[str]:
    """Return the names of all heuristics: the published ones, then the ablation's."""
    return list(_registry())


def get(name: str) -> Heuristic:
    """Return the heuristic of a name.

    Raises
    ------
    ValueError
        No heuristic has that name; the message lists all names.
    """
    found = _registry().get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"no heuristic is named {name!r}, expected one of {', '.join(names())}")
    return found


def check(heuristic: HeuristicLike, serves: frozenset[str], runtime: str) -> str:
    """Return the name of a heuristic, which the runtime of name `runtime` has to serve.

    `serves` are the structures that the runtime keeps: "classes", "regions". Raises ValueError if
    no heuristic has the name or the runtime cannot serve it, TypeError if `heuristic` is neither a
    name nor callable.
    """
    if callable(heuristic):
        return str(getattr(heuristic, "__name__", type(heuristic).__name__))
    if not isinstance(heuristic, str):
        raise TypeError(f"heuristic must be a name or a function, got {heuristic!r}")
    found = get(heuristic)
    if missing := sorted(found.needs - serves):
        possible = [h.name for h in _registry().values() if h.needs <= serves]
        raise ValueError(
            f"heuristic {heuristic!r} needs {missing[0]} of evicted storages, which runtime "
            f"{runtime!r} does not keep; it serves {', '.join(possible)}"
        )
    return heuristic
