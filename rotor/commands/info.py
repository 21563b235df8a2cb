"""``rotor info``: facts on this machine."""

from __future__ import annotations

import argparse
from typing import Any

import rotor
from rotor.commands import add_output, columns, environment, give
from rotor.units import format_bytes

_LIMITS = {
    "cgroup_limit_bytes": "control group",
    "address_space_limit_bytes": "address space (ulimit -v)",
    "data_limit_bytes": "data (ulimit -d)",
}


def add(commands: Any) -> None:
    """Add ``info`` to the commands of a parser."""
    sub = commands.add_parser(
        "info",
        help="devices, free memory, limits, versions",
        description="Facts on this machine: devices, free memory and its limits, versions, the "
        "compiler, the installed extras.",
    )
    add_output(sub)
    sub.set_defaults(command=_run)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _run(arguments: argparse.Namespace) -> int:
    found = environment.describe()
    found["versions"] = {"rotor": rotor.__version__, **found["versions"]}
    rows = [[name, version or "not installed"] for name, version in found["versions"].items()]
    rows.append(["platform", found["platform"]])
    rows.append(["CPUs", str(found["cpus"])])
    for device in found["devices"]:
        free, total = _size(device["free_bytes"]), _size(device["total_bytes"])
        rows.append([device["name"], f"{device['model']}, {free} free of {total}"])
    memory = found["memory"]
    for key, name in _LIMITS.items():
        limit = memory[key]
        rows.append([f"limit of {name}", "none" if limit is None else format_bytes(limit)])
    if memory["cgroup_usage_bytes"] is not None:
        rows.append(["used in the control group", format_bytes(memory["cgroup_usage_bytes"])])
    rows.append(["C compiler", found["compiler"] or "none found"])
    swap = found["storage_swap"]
    shown = "unknown" if swap is None else "yes" if swap else "no"
    rows.append(["dynamic engine swaps storages", shown])
    for name, installed in found["extras"].items():
        rows.append([f"extra {name}", "installed" if installed else "not installed"])
    rows.append(["cache", found["cache"]])
    give(arguments, found, columns(rows))
    return 0
