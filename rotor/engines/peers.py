"""Ranks that share plans, or a process alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from rotor.common.ranks import RankError, Ranks, digest
from rotor.meter import allocator

_FAILED = 2


class Peers:
    """Ranks that measure, plan and train in step; by itself, a process alone."""

    ranks: Ranks | None = None
    """Processes that decide together; ``None`` for a single one."""
    members: Collection[int] = ()
    """Numbers of these processes among all; empty for a single one."""
    has_collectives = False
    """True if the model itself has operations in which all of them take part."""

    def agree(self, own_key: Callable[[], tuple[Any, Any]], is_behind: bool) -> tuple[Any, bool]:
        """Return the key of a step of all ranks, and whether one of them has something to learn.

        `own_key` returns this rank's key: the measured part, and the missing gradients.
        """
        del is_behind
        return own_key(), False

    def settle(
        self, is_one_behind: bool, wants_measure: bool, wants_plan: bool, lacks_plan: bool
    ) -> tuple[bool, bool, bool]:
        """Return whether all ranks measure, and plan, now, and whether from the beginning."""
        del is_one_behind
        return wants_measure, wants_plan, lacks_plan

    def all_well(self, problem: Exception | None) -> None:
        """Raise a problem, on every rank; alone, a running meter only leaves figures out."""
        if problem is not None and not isinstance(problem, allocator.MeterBusyError):
            raise problem

    def all_are_at(self, place: str) -> bool:
        """Return whether all ranks have come to a place, within `Ranks.together`."""
        del place
        return True


ALONE = Peers()


class SharingRanks(Peers):
    """Ranks of a group that run each step together; every method is a collective operation.

    The model itself `has_collectives`, or the ranks share plans on request only.
    """

    def __init__(self, ranks: Ranks, *, has_collectives: bool = False) -> None:
        self.ranks: Ranks = ranks
        self.members: Collection[int] = ranks.members
        self.has_collectives = has_collectives
        self._digests: dict[Any, tuple[int, int]] = {}

    def agree(self, own_key: Callable[[], tuple[Any, Any]], is_behind: bool) -> tuple[Any, bool]:
        """Return the key of a step of all ranks, and whether one of them has something to learn.

        Raises RankError if another rank has no valid input, or the ranks differ in the parameters
        without gradients.
        """
        try:
            key = own_key()
        except Exception:
            self.ranks.exchange_ints(0, 0, _FAILED)
            raise
        if key not in self._digests:
            self._digests[key] = (key_digest(key[0]), key_digest(key[1]))
        mine = self._digests[key]
        found = self.ranks.exchange_ints(*mine, is_behind)
        for rank, other in enumerate(found):
            if other[2] == _FAILED:
                raise RankError(f"rank {rank} cannot go on: the error that it raised says why")
        if any(other[1] != mine[1] for other in found):
            raise RankError(
                "which parameters have gradients, or are reduced, differs between ranks: set "
                "gradients to None, and set_requires_gradient_sync(), on all of them alike"
            )
        return ((key[0], tuple(other[0] for other in found)), key[1]), any(o[2] for o in found)

    def settle(
        self, is_one_behind: bool, wants_measure: bool, wants_plan: bool, lacks_plan: bool
    ) -> tuple[bool, bool, bool]:
        """Return whether any rank wants to measure, to plan, and has lost measures or its plan."""
        if not (is_one_behind or wants_plan):
            return wants_measure, wants_plan, lacks_plan
        wanted = self.ranks.exchange_ints(wants_measure, wants_plan, lacks_plan)
        measures, plans, is_lost = (any(column) for column in zip(*wanted, strict=True))
        return measures, plans, measures or is_lost

    def all_well(self, problem: Exception | None) -> None:
        """Raise on every rank if one of them has a problem."""
        self.ranks.all_well(problem)

    def all_are_at(self, place: str) -> bool:
        """Return whether all ranks have come to a place, within `Ranks.together`."""
        return self.ranks.all_are_at(place)


def key_digest(value: Any) -> int:
    """Return a number for a part of a key, the same on ranks with devices of other numbers."""

    def plain(item: Any) -> Any:
        if isinstance(item, torch.device):
            return item.type
        if isinstance(item, tuple | list):
            return tuple(plain(part) for part in item)
        return item

    return digest(plain(value))
