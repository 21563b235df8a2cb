"""Fetches of parameters in a second tier as operators of a session.

A session counts what they make, and frees it: what is computed again fetches again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotor._core import PIECE_BYTES
from rotor._pytorch import dispatch
from rotor.dtr.operators import ODD_OPERATORS, Treatment
from rotor.tier import homes
from rotor.tier.homes import Home

_LIBRARY = torch.library.Library("rotor_tier", "FRAGMENT")
# What is known of an operator is kept by its numbers: versions, of which there is no end, are none.
_LIBRARY.define("fetch(int home, Tensor version) -> Tensor")
_FETCH = torch.ops.rotor_tier.fetch.default
_homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
_versions: weakref.WeakKeyDictionary[Home, tuple[int, torch.Tensor]] = weakref.WeakKeyDictionary()


@torch.library.impl(_LIBRARY, "fetch", "CompositeExplicitAutograd")
def _fetch(number: int, version: torch.Tensor) -> torch.Tensor:
    home = _homes[number]
    if home.version != int(version):
        raise RuntimeError(
            f"a parameter in a second tier, of shape {tuple(home.shape)}, was written to in place "
            "between its forward and its backward, which computes again what was computed from "
            "it: write to it, or step the optimizer, after the backward"
        )
    # What is computed again has to lie in its storage as before, which a tier may not read to.
    with dispatch.without_functions(), dispatch.without_modes(), torch.no_grad():
        made = torch.empty_strided(home.shape, home.stride, dtype=home.dtype, device=home.device)
        parts = made.as_strided((made.numel(),), (1,)).split(PIECE_BYTES // made.itemsize)
        for k, part in enumerate(parts):
            part.copy_(home.fetch_part(k))
    return made


def _needs(args: Any) -> tuple[int, int]:
    home = _homes[args[0]]
    return home.nbytes, min(home.nbytes, PIECE_BYTES) + home.tier.alignment_bytes


ODD_OPERATORS["rotor_tier::fetch"] = Treatment(needs=_needs)


def _by_operator(home: Home) -> torch.Tensor:
    if not dispatch.has_modes():
        # Another thread's, which no session sees.
        return home.fetch()
    _homes[id(home)] = home
    version, number = _versions.get(home, (None, None))
    if number is None or version != home.version:
        with dispatch.without_modes():
            number = torch.tensor(home.version)
        _versions[home] = home.version, number
    made: torch.Tensor = _FETCH(id(home), number)
    return made


@contextmanager
def as_operators() -> Iterator[None]:
    """Have tensors at home fetch their bytes by operators, which modes see, in the context.

    A session is entered before, which waits for those of other threads. What runs again raises
    RuntimeError if its home was written to since.
    """
    before, homes.fetch = homes.fetch, _by_operator
    try:
        yield
    finally:
        homes.fetch = before
