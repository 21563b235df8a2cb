"""Parts that experiments share: the output directory, the input logs, tables."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rotor.chain import write_text
from rotor.experiments.cells import Store
from rotor.experiments.simrd_manifest import entries
from rotor.simrd.logs import Log, parse

__all__ = ["LogFile", "Output", "find_logs", "open_log"]

VERSION = 1


@dataclass
class Output:
    """Output of an experiment: ``data/``, ``summary/``, ``graph/`` under one directory.

    Parameters
    ----------
    directory
        Made when something is written.
    name
        Of the experiment.
    formats
        Of figures: "pdf", "png", "svg"; none for no figures.
    files
        Files written so far.
    text
        The summary.
    """

    directory: Path
    name: str
    formats: tuple[str, ...] = ("pdf",)
    files: list[Path] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        if self.formats:
            from rotor.report.figures import check_formats

            check_formats(self.formats)

    def store(self, *, fresh: bool) -> Store:
        """Return the store of this experiment's cells; emptied if `fresh`."""
        found = Store(self.directory / "data" / "cells" / self.name)
        if fresh:
            found.clear()
        return found

    def json(self, config: dict[str, Any], results: Any, suffix: str = "") -> None:
        """Write ``data/<name><suffix>.json``: what was asked, `config`, and what came, `results`.

        `suffix` tells files of one experiment apart.
        """
        data = {
            "format": f"rotor.experiment.{self.name}",
            "version": VERSION,
            "config": config,
            "results": results,
        }
        text = json.dumps(data, allow_nan=False, indent=1)
        self._write(Path("data", f"{self.name}{suffix}.json"), text + "\n")

    def csv(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], suffix: str = "") -> None:
        """Write ``data/<name><suffix>.csv``: `columns`, then `rows`; None is an empty field.

        `suffix` tells files of one experiment apart.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        self._write(Path("data", f"{self.name}{suffix}.csv"), buffer.getvalue())

    def rows(self, config: Any, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        """Write `rows` as JSON, after the settings in `config`, and their `columns` as CSV."""
        self.json(dataclasses.asdict(config), rows)
        self.csv(columns, [[row[name] for name in columns] for row in rows])

    def summary(self, text: str) -> None:
        """Write ``summary/<name>.txt``, and keep the text."""
        self.text = text
        self._write(Path("summary", f"{self.name}.txt"), text + "\n")

    def figure_stem(self, suffix: str = "") -> Path:
        """Return ``graph/<name><suffix>``, without the ending that names the format."""
        path = self.directory / "graph" / f"{self.name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _write(self, path: Path, text: str) -> None:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(text, target)
        self.files.append(target)


@dataclass(frozen=True)
class LogFile:
    """A log with what figures call it, and a digest of its bytes."""

    path: Path
    title: str
    digest: str


def find_logs(sources: Iterable[str | os.PathLike[str]]) -> list[LogFile]:
    """Find logs given one by one, as a directory, or as a list.

    From a directory: the files that end in ``.log`` or ``.log.gz``, by name, with the titles of its
    ``manifest.json`` if it has one (`rotor.experiments.simrd_manifest`). A file that ends in
    ``.json`` is a list, with logs beside it or at the paths it gives. Other titles are the part of
    the file's name before the first ``-``, if that is unique.

    Raises
    ------
    FileNotFoundError
        A path does not exist, or a directory or list has no logs.
    ValueError
        A manifest cannot be read.
    """
    paths: list[tuple[Path, str | None]] = []
    for source in map(Path, sources):
        if not source.exists():
            raise FileNotFoundError(f"no log {source}: expected a file or a directory")
        if source.suffix == ".json":
            paths += _listed(source)
            continue
        if not source.is_dir():
            paths.append((source, None))
            continue
        titles = _manifest(source)
        found = sorted(p for p in source.iterdir() if p.name.endswith((".log", ".log.gz")))
        if not found:
            raise FileNotFoundError(f"{source} has no logs: expected files *.log or *.log.gz")
        paths += [(path, titles.get(path.name)) for path in found]
    if not paths:
        raise FileNotFoundError("no logs were given: expected files, or a directory of logs")
    short = [path.name.split("-")[0].split(".")[0] for path, _ in paths]
    logs = []
    for (path, title), name in zip(paths, short, strict=True):
        own = title or (name if short.count(name) == 1 else path.name.removesuffix(".gz"))
        logs.append(LogFile(path, own, _digest(path)))
    return logs


def _manifest(directory: Path) -> dict[str, str]:
    path = directory / "manifest.json"
    if not path.exists():
        return {}
    listed = [entry for entry in entries(path) if "title" in entry]
    return {Path(str(entry["log"])).name: str(entry["title"]) for entry in listed}


def _listed(path: Path) -> list[tuple[Path, str | None]]:
    """Return the logs of a list with their titles; published lists were moved with their logs."""
    found: list[tuple[Path, str | None]] = []
    for entry in entries(path):
        places = [path.parent / str(entry["log"]), path.parent / Path(str(entry["log"])).name]
        log = next((place for place in places if place.is_file()), None)
        if log is None:
            raise FileNotFoundError(f"no log {places[0]}, which {path} lists")
        found.append((log, str(entry["title"]) if "title" in entry else None))
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=2)
def open_log(path: str, digest: str) -> Log:
    """Return the log at a path; the last two are kept by this process.

    The digest of its bytes makes a changed file be read again.
    """
    del digest
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # Ignored releases are counted in the results; every process would say so again.
        return parse(path)
