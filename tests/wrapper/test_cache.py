"""The tables on disk: any damage means "not there", and never more than that."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from zoo.models import Gated

import rotor
from rotor.common import cache

ENVIRONMENT = "here"
ROWS = {"add": [10, 0, 64], "mul": [20, 8]}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The file of a good table."""
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    cache.store("profile", ENVIRONMENT, ROWS)
    assert cache.load("profile", ENVIRONMENT) == ROWS
    (path,) = tmp_path.glob("profile-*.json")
    return path


@pytest.fixture
def in_time():
    """Fail instead of waiting for ever."""

    def late(*_):
        raise TimeoutError("reading the cache hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def with_rows(path, change):
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"entries": {k: change(v) for k, v in ROWS.items()}}))


def with_valid_checksum(path, change):
    good = json.loads(path.read_text())
    rows = {k: change(v) for k, v in ROWS.items()}
    path.write_text(json.dumps(cache.sealed(good | {"entries": rows})))


DAMAGES = {
    "deep nesting": lambda path: path.write_text("[" * 200_000),
    "deep nesting of objects": lambda path: path.write_text('{"a":' * 200_000),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 100),
    "another thing": lambda path: path.write_text("[1, 2]"),
    "an infinite number": lambda path: path.write_text(path.read_text().replace("10", "1e999")),
    "ten thousand digits": lambda path: path.write_text(
        path.read_text().replace("[10,", f"[{'9' * 10_000},")
    ),
    "a number out of range": lambda path: with_valid_checksum(
        path, lambda row: [10**13] * len(row)
    ),
    "a negative number": lambda path: with_valid_checksum(path, lambda row: [-1] * len(row)),
    "a truth value": lambda path: with_valid_checksum(path, lambda row: [True] * len(row)),
    "an absurd workspace": lambda path: with_rows(path, lambda row: [row[0], 2**40, *row[2:]]),
    "absurd storages": lambda path: with_rows(
        path, lambda row: [*row[:2], *[2**40] * len(row[2:])]
    ),
    "one bit": lambda path: path.write_text(path.read_text().replace("64]", "65]")),
    "no checksum": lambda path: path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"})
    ),
}


def _of_another_kind(path):
    cache.store("glances", ENVIRONMENT, {"add": [10, 0, 64]})
    (other,) = path.parent.glob("glances-*.json")
    path.write_bytes(other.read_bytes())


def _of_another_environment(path):
    cache.store("profile", "there", ROWS)
    (other,) = set(path.parent.glob("profile-*.json")) - {path}
    path.write_bytes(other.read_bytes())


DAMAGES |= {
    "another kind's": _of_another_kind,
    "another environment's": _of_another_environment,
    "another version": lambda path: path.write_text(
        json.dumps(cache.sealed(json.loads(path.read_text()) | {"version": 1000}))
    ),
    "no version": lambda path: path.write_text(
        json.dumps(
            cache.sealed({k: v for k, v in json.loads(path.read_text()).items() if k != "version"})
        )
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_not_there_and_is_written_again(table, damage):
    before = table.read_bytes()
    DAMAGES[damage](table)
    assert table.read_bytes() != before
    assert cache.load("profile", ENVIRONMENT) == {}
    cache.store("profile", ENVIRONMENT, ROWS)
    assert cache.load("profile", ENVIRONMENT) == ROWS


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_table_that_others_may_write_to_is_not_read(table, mode, caplog):
    table.chmod(mode)
    with caplog.at_level(logging.INFO, "rotor"):
        assert cache.load("profile", ENVIRONMENT) == {}
    assert "may write to it" in caplog.text
    table.chmod(0o644)
    assert cache.load("profile", ENVIRONMENT) == ROWS


def test_a_table_of_another_user_is_not_read(table, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert cache.load("profile", ENVIRONMENT) == {}


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def too_large(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("replacement", [pipe, endless, too_large, os.mkdir])
def test_what_is_no_sensible_file_is_not_there(table, in_time, replacement):
    table.unlink()
    replacement(table)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cache.load("profile", ENVIRONMENT) == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18
    cache.store("profile", ENVIRONMENT, ROWS)
    if replacement is not os.mkdir:
        assert cache.load("profile", ENVIRONMENT) == ROWS


def test_a_row_out_of_range_is_not_written(table):
    cache.store("profile", ENVIRONMENT, {"huge": [1 << 50, 0]})
    assert cache.load("profile", ENVIRONMENT) == ROWS


NOBODY = """
import pwd
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from rotor.common import cache
assert cache.directory() is None
cache.store("profile", "here", {"a": [1]})
assert cache.load("profile", "here") == {}
from rotor.commands.environment import describe
print(describe()["cache"])
"""


def test_without_a_home_directory_nothing_is_kept():
    names = ("HOME", "XDG_CACHE_HOME", "ROTOR_CACHE_DIR")
    bare = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", NOBODY], env=bare, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "no home directory" in run.stdout


def test_training_goes_on_with_a_damaged_table(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))

    def peak():
        wrapped = rotor.Checkpointable(
            Gated(16, 2, 0.0), mem_limit="1MiB", engine="graph", effort="fast", planning="before"
        )
        wrapped(torch.ones(8, 16)).sum().backward()
        return wrapped.get_expected_memory()

    good = peak()
    (path,) = tmp_path.glob("profile-*.json")
    content = json.loads(path.read_text())
    entries = {key: [row[0], 2**40, *row[2:]] for key, row in content["entries"].items()}
    path.write_text(json.dumps(content | {"entries": entries}))
    assert peak() == good
    path.write_text("[" * 200_000)
    assert peak() == good
