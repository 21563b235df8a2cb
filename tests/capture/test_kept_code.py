"""Compiled sources on disk: read by the user who wrote them, compiled again where in doubt."""

from __future__ import annotations

import builtins
import logging
import os

import pytest

from rotor.common import cache
from rotor.common import cache as kept_code
from rotor.common.cache import compiled

SOURCE = "def double(x):\n    return x + x\n" + "# a line\n" * 2_000


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """The files of an empty cache, and the compiled sources."""
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    sources = []
    original = builtins.compile

    def compile_(source, *rest):
        sources.append(source)
        return original(source, *rest)

    monkeypatch.setattr(kept_code, "compile", compile_, raising=False)
    return tmp_path, sources


def doubled(source):
    namespace = {}
    exec(compiled(source), namespace)
    return namespace["double"](21)


def test_a_source_is_compiled_once(counted):
    folder, sources = counted
    assert doubled(SOURCE) == doubled(SOURCE) == 42
    assert sources == [SOURCE]
    assert compiled(SOURCE).co_filename.startswith("<rotor program ")
    (path,) = folder.iterdir()
    assert path.name.startswith("code-")
    assert doubled(SOURCE.replace("x + x", "3 * x")) == 63


def test_small_sources_leave_no_file(counted):
    folder, sources = counted
    small = SOURCE[:100]
    assert doubled(small) == doubled(small) == 42
    assert sources == [small, small]
    assert not list(folder.iterdir())


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def open_to_others(path):
    path.chmod(0o666)


@pytest.mark.parametrize("change", [cut_off, one_bit, empty, open_to_others, os.unlink])
def test_doubtful_files_are_compiled_again(counted, change):
    folder, sources = counted
    assert doubled(SOURCE) == 42
    (path,) = folder.iterdir()
    change(path)
    assert doubled(SOURCE) == 42
    assert sources == [SOURCE, SOURCE]
    assert doubled(SOURCE) == 42
    assert sources == [SOURCE, SOURCE]


def test_a_file_in_the_place_of_another_is_not_run(counted, caplog):
    folder, sources = counted
    other = SOURCE.replace("x + x", "3 * x")
    assert doubled(SOURCE) == 42
    (path,) = folder.iterdir()
    first = path.read_bytes()
    assert doubled(other) == 63
    (second,) = set(folder.iterdir()) - {path}
    second.write_bytes(first)
    with caplog.at_level(logging.INFO, "rotor"):
        assert doubled(other) == 63
    assert sources == [SOURCE, other, other]
    (record,) = caplog.records
    assert str(second) in record.getMessage()
    assert "another file's copy" in record.getMessage()


def test_files_of_other_users_are_not_read(counted, monkeypatch):
    _, sources = counted
    assert doubled(SOURCE) == 42
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert doubled(SOURCE) == 42
    assert sources == [SOURCE, SOURCE]


def test_the_oldest_contents_make_room(counted):
    folder, _ = counted
    for k in range(70):
        before = set(folder.iterdir())
        cache.store_bytes("code", f"{k:02}", b"content")
        (new,) = set(folder.iterdir()) - before
        os.utime(new, (k, k))
    assert cache.load_bytes("code", "69") == b"content"
    assert cache.load_bytes("code", "05") is None
    assert len(list(folder.iterdir())) == 64
