"""Profiles recorded on one machine and used on another, and the choice between sources of costs.

A profile is the data that the module `profile` keeps on disk: for each distinct operation its time,
workspace and the sizes that it makes. Devices are no part of an operation's key, so that a capture
on a CPU, or without values, finds the records of a GPU.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from rotor._pytorch import devices
from rotor.chain import check_header, read_json, write_json
from rotor.common import cache
from rotor.engines.graph.costs.estimate import Machine, estimate, estimated, made_bytes
from rotor.engines.graph.costs.glance import profile
from rotor.engines.graph.costs.profile import Cost, cost_of_row, environment_of, keys_of
from rotor.engines.graph.costs.repeating import keep_unrepeatable
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.meter import allocator

FORMAT = "rotor.profile"
VERSION = 1
MEASURED: Literal["measured"] = "measured"


@dataclass(frozen=True)
class Profile:
    """Costs of operations on the machine on which they were measured.

    Parameters
    ----------
    environment
        Name of the machine: PyTorch's version, the device's name, the number of threads.
    entries
        By operation: nanoseconds, bytes of workspace, the bytes of each storage it makes, and
        the observations of two runs.
    machine
        Source of estimates for operations that the profile lacks; without one they are an error.
    free_bytes
        Free bytes of the device at the time of recording; ``None`` if not recorded.
    """

    environment: str
    entries: Mapping[str, list[int]] = field(repr=False)
    machine: Machine | None = None
    free_bytes: int | None = None

    @classmethod
    def recorded(
        cls, device: torch.device | str = "cpu", *, machine: Machine | None = None
    ) -> Self:
        """Return all measures of a device of this machine.

        Parameters
        ----------
        device
            The CPU or an accelerator.
        machine
            Speeds of the machine (`Machine.measure`), for unmeasured operations.

        Returns
        -------
        Profile
            Measures of this version of PyTorch on this device.
        """
        environment = environment_of(torch.device(device))
        entries = cache.load("profile", environment)
        return cls(environment, entries, machine, allocator.free_bytes(device))

    @property
    def device(self) -> str:
        """Type of the measured device: "cpu", or an accelerator's."""
        return "cpu" if self._described()[1] == "cpu" else devices.default_type()

    def _described(self) -> tuple[str, str, int]:
        version, name, threads, *_ = ast.literal_eval(self.environment)
        return str(version), str(name), int(threads)

    def __str__(self) -> str:
        version, name, threads = self._described()
        return f"{name}, PyTorch {version}, {threads} threads, {len(self.entries)} operations"

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "environment": self.environment,
            "entries": dict(self.entries),
            "machine": None if self.machine is None else self.machine.to_dict(),
            "free_bytes": self.free_bytes,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the profile that `to_dict` wrote.

        Raise ValueError for another format or version, or a field that is missing or wrong.
        """
        fields = check_header(data, FORMAT, VERSION)
        if "sha256" in fields and not cache.is_whole(data):
            raise ValueError(
                "malformed profile: it was changed after it was written, as its checksum shows: "
                "save it again, or remove its field sha256 if the change was meant"
            )
        entries, environment = fields.get("entries"), fields.get("environment")
        if not isinstance(entries, dict) or not all(_is_row(row) for row in entries.values()):
            raise ValueError(
                "malformed profile: entries must be lists of at least two whole numbers"
            )
        given = fields.get("machine")
        machine = None if given is None else Machine.from_dict(given)
        free = fields.get("free_bytes")
        if free is not None and (type(free) is not int or free < 0):
            raise ValueError(
                f"malformed profile: free_bytes is {free!r}, expected a whole number or null"
            )
        found = cls(str(environment), entries, machine, free)
        try:
            found._described()
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError(
                f"malformed profile: environment is {environment!r}, expected the text of "
                "(version, device, threads)"
            ) from error
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile to a JSON file; return the path."""
        write_json(cache.sealed(self.to_dict()), path)
        return Path(path)

    @classmethod
    def load(cls, source: str | os.PathLike[str], *, machine: Machine | None = None) -> Self:
        """Return a profile from JSON text, or from the file at a path.

        Parameters
        ----------
        source
            Output of `save`, or a table of the cache directory.
        machine
            Source of estimates for missing operations, instead of the machine saved with it.

        Returns
        -------
        Profile
            The saved measures.

        Raises
        ------
        ValueError
            Not JSON, another format or version, or a field missing or wrong.
        """
        found = cls.from_dict(read_json(source))
        return found if machine is None else replace(found, machine=machine)

    def costs(self, lowered: Lowered, device: torch.device) -> list[Cost]:
        """Return the recorded cost of every operation, captured on a device; the loss's is zero.

        Raise ValueError if operations are missing, and no machine was given to estimate them.
        """
        keys = keys_of(lowered, device)
        costs: list[Cost] = []
        missing: dict[str, str] = {}
        for key, task in zip(keys, lowered.tasks, strict=True):
            cost = cost_of_row(self.entries.get(key), len(task.made)) if key else None
            if task.node is None:
                cost = Cost(0, 0, made_bytes(lowered, task, self.device))
            elif cost is None and self.machine is not None:
                cost = estimated(lowered, task, self.machine)
            if cost is None:
                missing.setdefault(key, task.name)
                continue
            costs.append(cost)
        if missing:
            names = list(missing.values())
            distinct = len({key for key in keys if key})
            raise ValueError(
                f"the profile ({self}) lacks {len(missing)} of {distinct} distinct operations, "
                f"such as {', '.join(names[:3])}: measure this model on that machine, and save the "
                "profile again, or give Profile.load(path, machine=Machine(...)), which estimates "
                "what is missing"
            )
        return costs


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) >= 2
        and all(type(value) is int and value >= 0 for value in row)
    )


Source = Machine | Profile | Literal["measured"]
"""Source of costs."""


def save_profile(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    machine: Machine | None = None,
) -> Path:
    """Write all measures of a device of this machine, for plans made elsewhere.

    Parameters
    ----------
    path
        File to write, JSON; ``Checkpointable(..., profile=path)`` reads it.
    device
        The CPU or an accelerator.
    machine
        Speeds of the device, saved with it: `Machine.measure` (device) returns them.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        Nothing was measured on it.
    """
    found = Profile.recorded(device, machine=machine)
    if not found.entries:
        raise ValueError(
            f"nothing was measured on {device} yet ({found}), or the cache directory "
            f"({cache.directory()}) cannot be read: measure a model first"
        )
    return found.save(path)


def source_of(given: Any) -> Source:
    """Return the source of costs for "measured", a machine, a profile or the path of one.

    Raise TypeError for another value, and ValueError if the file holds no profile.
    """
    if isinstance(given, Machine | Profile) or given == MEASURED:
        return given  # type: ignore[no-any-return]
    if isinstance(given, str | os.PathLike):
        try:
            return Profile.load(given)
        except OSError as error:
            raise ValueError(
                f'profile={str(given)!r} names no file ({error.strerror}): expected "measured", a '
                "Machine, a Profile, or the path of a saved profile"
            ) from error
    raise TypeError(
        f'profile is {given!r}, expected "measured", a rotor.graph.Machine, a rotor.graph.Profile, '
        "or the path of a saved profile"
    )


def price(
    source: Source,
    lowered: Lowered,
    device: torch.device,
    primals: Sequence[Any] = (),
    *,
    progress: Callable[[int, int], object] | None = None,
) -> list[Cost]:
    """Return the cost of every operation, from any source; the loss's is zero.

    The source "measured" runs operations that are not in the cache; a machine or a profile runs
    none. Operations that do not repeat are marked, so that no plan computes them again. `primals`
    and `progress` are as of `profile`. Raise ValueError if a profile lacks operations.
    """
    if isinstance(source, Machine):
        costs = estimate(lowered, source)
    elif isinstance(source, Profile):
        costs = source.costs(lowered, device)
    else:
        costs = profile(lowered, device, primals, progress=progress)
    keep_unrepeatable(lowered, [cost.flags for cost in costs])
    return costs
