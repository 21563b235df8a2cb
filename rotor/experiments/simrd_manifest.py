"""Lists of logs, as the prototype writes them for its simulator and as the simulator reads them.

The key ``simrd_config`` of a configuration names a file that lists the logs that were saved: of
each model, the name, title, description and file of each log. The simulator's own list has all of
them under ``models``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rotor.chain import read_json, write_json
from rotor.experiments.configuration import Trial

__all__ = ["entries", "write"]


def write(path: Path, logs: Iterable[tuple[Trial, Path]]) -> None:
    """Write a list of logs, if any exist.

    Parameters
    ----------
    path
        Of the list.
    logs
        Runs, with the places of their logs.
    """
    models: dict[str, list[dict[str, Any]]] = {}
    for trial, log in logs:
        batch = "" if trial.batch_size is None else f" ({trial.batch_size})"
        title = f"{trial.model}{batch}"
        sizes = ", ".join(f"{key} {value}" for key, value in trial.params.items())
        entry = {"name": title, "title": title, "desc": sizes, "log": _name(log, path)}
        models.setdefault(trial.model, []).append({**entry, "has_start": True})
    if models:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(models, path)


def _name(log: Path, beside: Path) -> str:
    folder = beside.parent.absolute()
    return log.relative_to(folder).as_posix() if log.is_relative_to(folder) else str(log)


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the logs of a list, ``{"log": .., "title": ..}`` at least.

    Raises
    ------
    ValueError
        It is neither of the two kinds of list.
    """
    try:
        data = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    found = None
    if isinstance(data, dict):
        lists = [data["models"]] if "models" in data else list(data.values())
        if all(isinstance(listed, list) for listed in lists):
            found = [entry for listed in lists for entry in listed]
    if found is None or not all(isinstance(entry, dict) and "log" in entry for entry in found):
        raise ValueError(
            f'{path} is malformed: expected {{"models": [{{"log": .., "title": ..}}]}}, or such '
            "lists by the names of models"
        )
    return found
