"""The runtimes of the simulator: what they do when a storage is not referenced any more."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Runtime", "get", "names"]


@dataclass(frozen=True)
class Runtime:
    """A runtime; `get` finds it by name.

    Attributes
    ----------
    name
        Such as "V2EagerOptimized".
    code
        Its number in the C core.
    ignores_releases
        True if releases are removed from the log before it is replayed.
    serves
        Structures that it keeps for heuristics: "classes" and "regions", or neither.
    description
        Sentence on the effect of a release.
    """

    name: str
    code: int
    ignores_releases: bool
    serves: frozenset[str]
    description: str


_BOTH = frozenset({"classes", "regions"})
_IGNORES = "a release does nothing; a storage leaves memory when it is evicted"
_EAGER = "a release evicts a storage that nothing refers to; it may be rematerialized"
_RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            "V1",
            0,
            False,
            frozenset(),
            "banishing: a release frees a storage for good once nothing evicted depends on it, and "
            "what was computed from it is pinned",
        ),
        Runtime("V2", 1, False, _BOTH, _IGNORES),
        Runtime("V2Eager", 2, False, _BOTH, _EAGER),
        Runtime("V2Optimized", 1, False, _BOTH, _IGNORES),
        Runtime("V2EagerOptimized", 2, False, _BOTH, _EAGER),
        Runtime("no_dealloc", 1, True, _BOTH, "V2Optimized on the log without its releases"),
    )
}
_ALIASES = {"NoDealloc": "no_dealloc"}


def names() -> list[str]:
    """Return the names of all runtimes, for `get`."""
    return list(_RUNTIMES)


def get(name: str) -> Runtime:
    """Return the runtime of a name.

    Parameters
    ----------
    name
        One of `names`; the published prefix ``Runtime`` is allowed before it, and "NoDealloc" is
        "no_dealloc".

    Returns
    -------
    Runtime
        The runtime.

    Raises
    ------
    ValueError
        No runtime has that name; the message lists all names.

    Notes
    -----
    The published ``V2Optimized`` and ``V2EagerOptimized`` keep neighbourhoods incrementally and
    decide as ``V2`` and ``V2Eager`` do; here all keep them incrementally.
    """
    short = name.removeprefix("Runtime") if isinstance(name, str) else ""
    found = _RUNTIMES.get(_ALIASES.get(short, short))
    if found is None:
        raise ValueError(f"no runtime is named {name!r}, expected one of {', '.join(_RUNTIMES)}")
    return found
