"""Decisions that several processes make together: the same plan on every rank.

Plans rest on measured times, and times differ between processes. Where a schedule holds collective
operations (parameters gathered by FSDP2), different plans would deadlock; where it holds none, as
under DistributedDataParallel, different plans are only hard to follow. Here ranks exchange their
measures, and one of them decides.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import distributed

from rotor._pytorch import core, devices, dispatch
from rotor.common.tensor_trees import tree_tensors
from rotor.units import format_bytes

logger = logging.getLogger("rotor")

T = TypeVar("T")

_PATIENCE_SECONDS = 0.05
"""Longest wait for a thread that has finished a collective to drop its tensors."""


class RankError(RuntimeError):
    """Failure of another rank, or ranks that do not fit together; raised on all of them."""


_hosts: dict[int, Any] = {}
"""Host group by the identity of the original group."""


def _host_group(group: Any) -> Any:
    """Return a group of the same ranks whose collectives take tensors of the CPU."""
    if "cpu:gloo" in str(distributed.get_backend_config(group)):
        return group
    if id(group) not in _hosts:
        _hosts[id(group)] = distributed.new_group(
            distributed.get_process_group_ranks(group),
            backend="gloo",
            use_local_synchronization=True,
        )
        weakref.finalize(group, _hosts.pop, id(group), None)
    return _hosts[id(group)]


def _group_of(members: frozenset[int]) -> Any:
    """Return the known group of these processes, or one that all of them make here."""
    for group in (distributed.group.WORLD, *dispatch.known_groups()):
        if members == set(distributed.get_process_group_ranks(group)):
            return group
    return distributed.new_group(sorted(members), backend="gloo", use_local_synchronization=True)


class Ranks:
    """Processes of a group, the default one if ``None``, that decide together.

    Every method is a collective operation: each rank of the group has to call it, in the same order
    as the others. They work on the host, with gloo, under any backend of the group. `rank` is the
    number of this process in the group, `size` the number of processes, `members` are theirs among
    all. Raises RuntimeError if no process group was initialised, or this process does not belong to
    the group.
    """

    def __init__(self, group: Any = None) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "ranks can only agree in a process group: call "
                "torch.distributed.init_process_group() first"
            )
        group = distributed.group.WORLD if group is None else group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError("this process does not belong to the process group")
        self.members = frozenset(distributed.get_process_group_ranks(group))
        self._group = _host_group(group)
        self._first = distributed.get_global_rank(self._group, 0)

    @classmethod
    def of(cls, members: frozenset[int]) -> Ranks:
        """Return these processes, all of which have to call it."""
        return cls(_group_of(members))

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, pickled, in the order of ranks."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def exchange_ints(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return the int64 numbers of all ranks, in their order: cheaper than `exchange`."""
        given = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(given) for _ in range(self.size)]
        distributed.all_gather(found, given, group=self._group)
        return [tuple(numbers.tolist()) for numbers in found]

    def broadcast(self, value: T | None) -> T:
        """Return the value of the first rank."""
        cell: list[Any] = [value]
        distributed.broadcast_object_list(
            cell, src=self._first, group=self._group, device=torch.device("cpu")
        )
        found: T = cell[0]
        return found

    def decide(self, decision: Callable[[], T]) -> T:
        """Return the result of `decision` on the first rank, which alone calls it.

        An exception that it raises there is raised on every rank.
        """
        outcome: tuple[T | None, Exception | None] | None = None
        if self.rank == 0:
            try:
                outcome = decision(), None
            except Exception as error:
                outcome = None, error
        value, failure = self.broadcast(outcome)
        try:
            if failure is not None:
                raise failure
            return value  # type: ignore[return-value]
        finally:
            del outcome, failure  # Its traceback holds this frame, and all frames around it.

    def all_well(self, error: Exception | None) -> None:
        """Raise `error` on a rank that has one, and a RankError that names it on all others."""
        failures = [] if error is None else [error]
        del error  # No frame of the traceback may hold it.

        def own() -> None:
            if failures:
                raise failures.pop()

        self.together(own)

    def together(self, own: Callable[[], T]) -> list[T]:
        """Return what a function returns on each rank, in their order.

        A rank where it raises an exception raises that one; the others raise a RankError with it.
        The function may ask `all_are_at`, on some of them only.
        """
        value, problem = None, None
        try:
            value = own()
        except Exception as error:
            problem = error
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        found: list[Any] = [""]
        while any(isinstance(other, str) for other in found):  # A rank asks where all are.
            found = self.exchange((value, text))
        try:
            if problem is not None:
                raise problem
        finally:
            del problem
        for rank, (_, message) in enumerate(found):
            if message is not None:
                raise RankError(f"rank {rank} of {self.size} cannot go on: {message}")
        return [value for value, _ in found]

    def jointly(self, own: Callable[[], T]) -> T:
        """Return what a function returns on this rank, once it has returned on every rank.

        The result stays here; exceptions are those of `together`.
        """
        found: list[T] = []
        self.together(lambda: found.append(own()))
        return found[0]

    def all_are_at(self, place: str) -> bool:
        """Return whether all ranks have come to a place in the function of `together`."""
        return all(other == place for other in self.exchange(place))

    def joint_limit(self, limit_bytes: int, reserve_bytes: int) -> tuple[int, int]:
        """Return the least limit and the largest reserve of any rank, valid for all."""
        given = self.exchange_ints(limit_bytes, reserve_bytes)
        limit = min(limit for limit, _ in given)
        if any(other != limit for other, _ in given):
            logger.info(
                "the limits differ between ranks (%s): the least holds for all, %s",
                ", ".join(str(other) for other, _ in given),
                format_bytes(limit),
            )
        return limit, max(reserve for _, reserve in given)

    def __reduce__(self) -> Any:
        raise TypeError(
            "process groups cannot be pickled or copied: make the model again in the other process"
        )


@contextmanager
def entered(ranks: Ranks | None, context: AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context on all ranks or on none."""
    with ExitStack() as stack:

        def enter() -> T:
            return stack.enter_context(context)

        yield enter() if ranks is None else ranks.jointly(enter)


def each(ranks: Ranks | None, own: Callable[[], T]) -> list[T]:
    """Return what a function returns on each rank, in their order; on this one if it is alone."""
    return [own()] if ranks is None else ranks.together(own)


class NeedsPeers(Exception):
    """Discovery of operations of several processes in a step, which have to plan it together.

    Parameters
    ----------
    members
        All these processes.
    """

    def __init__(self, members: Iterable[int]) -> None:
        super().__init__("the step has collective operations")
        self.members = frozenset(members)

    @classmethod
    def check(cls, groups: Iterable[Any], known: Iterable[int] = ()) -> None:
        """Raise at the first group with processes other than the known ones."""
        for group in groups:
            members = distributed.get_process_group_ranks(group)
            if not set(members) <= set(known):
                raise cls([*known, *members])


def members_of(meshes: Iterable[Any]) -> frozenset[int]:
    """Return this process and those along the dimensions that these device meshes have.

    All of them find the same. Of meshes that were made apart one may have them all; otherwise it is
    all processes.
    """
    spans = []
    in_order = sorted(meshes, key=lambda mesh: id(core.whole_mesh(mesh)))
    for whole, parts in groupby(in_order, core.whole_mesh):
        own = whole.get_coordinate()
        others = torch.cat([part.mesh.flatten() for part in parts])
        places = torch.isin(whole.mesh, others).nonzero()
        is_used = (places != torch.tensor(own)).any(0).tolist()
        index = [slice(None) if used else k for used, k in zip(is_used, own, strict=True)]
        spans.append(frozenset(whole.mesh[tuple(index)].flatten().tolist()))
    most = max(spans, key=len)
    return most if all(map(most.issuperset, spans)) else frozenset(dispatch.every_rank())


def run_and_wait(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the finished result of a functional collective.

    On the CPU a thread of gloo drops the tensors of a finished operation a moment later, in a third
    of all calls after the wait for it. Their memory counts, so they are waited for as well.
    """
    given = tree_tensors((args, kwargs))
    owners = [dispatch.owners_of(tensor) for tensor in given]
    made = function(*args, **kwargs)
    is_single = isinstance(made, torch.Tensor)
    wait = torch.ops._c10d_functional.wait_tensor.default
    found = [wait(made)] if is_single else [wait(one) for one in made]
    del made
    most = [*owners, *(1 for _ in found)]
    held = [*given, *found]
    if any(t.device.type == "cpu" for t in found):
        stays_held(
            lambda: any(dispatch.owners_of(t) > n for t, n in zip(held, most, strict=True)),
            _PATIENCE_SECONDS,
        )
    return found[0] if is_single else found


def wait_for(tensors: Iterable[torch.Tensor | None]) -> None:
    """Wait for those tensors that a collective still makes.

    PyTorch holds the result of a collective for good if nothing reads it.
    """
    for tensor in tensors:
        if tensor is not None:
            core.strided_parts(tensor)


def stays_held(is_held: Callable[[], bool], seconds: float) -> bool:
    """Return whether something is held for longer than a thread of gloo may take to drop it."""
    end = time.monotonic() + seconds
    while is_held() and time.monotonic() < end:
        time.sleep(0)
    return is_held()


def digest(value: Any) -> int:
    """Return a number, equal in every process, for a value with a faithful ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "little")


def sharers(device: torch.device) -> int:
    """Return the number of training processes that share this memory; 1 if it is not declared.

    All processes on this machine share the CPU's memory, and all on one device its memory;
    ``torchrun`` declares their number in ``LOCAL_WORLD_SIZE``. Where this process sees fewer
    devices than there are processes, each may have been given one of its own: each rank then tells
    the others its device through the store of the group, in no collective operation.
    """
    declared = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not declared.isdecimal() or not (
        distributed.is_available() and distributed.is_initialized()
    ):
        return 1
    here = max(int(declared), 1)
    if device.type == "cpu":
        return here
    divided = -(-here // max(devices.count(device.type), 1))
    if divided > 1 and device not in _sharers:
        _sharers[device] = _found_sharers(device, divided)
    return _sharers[device] if divided > 1 else 1


_sharers: dict[torch.device, int] = {}
_PATIENCE = timedelta(seconds=20)


def _found_sharers(device: torch.device, divided: int) -> int:
    """Return the number of ranks on the same physical device; `divided` if one does not answer."""
    store = core.default_store()
    mine = f"{socket.gethostname()} {devices.identity(device)}"
    store.set(f"rotor/device/{distributed.get_rank()}", mine)
    names = [f"rotor/device/{rank}" for rank in range(distributed.get_world_size())]
    try:
        store.wait(names, _PATIENCE)
    except RuntimeError:
        logger.info(
            "%d processes are taken to share %s: not all say which is theirs", divided, device
        )
        return divided
    return sum(store.get(name).decode() == mine for name in names)
