"""Logs that are written, and the published ones: what is read is what was written."""

from __future__ import annotations

import gzip
import io
import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_logs import COMPUTE, Plain, assert_reads_as
from published_logs import needs_logs, path_of, shipped

from rotor import _core
from rotor.errors import MalformedLogError
from rotor.simrd.log_writer import LogWriter
from rotor.simrd.logs import Log, parse

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)


@st.composite
def programs(draw):
    """The text of a random program, and how it may be cut into pieces."""
    writer = LogWriter()
    known: list[str] = []

    def new() -> str:
        name = draw(names)
        return f"{name}'{len(known)}" if name in known else name

    sizes, times = st.integers(0, 1 << 42), st.integers(0, 1 << 42)
    for _ in range(draw(st.integers(1, 25))):
        old = list(known)
        kinds = ["constant", "call", "annotate", "unknown"]
        kinds += ["mutate", "copy", "copy_from", "release", "pin"] if known else []
        args = draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
        match draw(st.sampled_from(kinds)):
            case "constant":
                known.append(new())
                writer.constant(known[-1], draw(sizes))
            case "call":
                for _ in range(draw(st.integers(1, 3))):
                    known.append(new())
                results = known[len(old) :]
                views = [draw(st.integers(-1, len(args) - 1)) for _ in results]
                made = [draw(sizes) for _ in results]
                writer.call(draw(names), args, results, draw(times), bytes=made, aliases=views)
            case "mutate" if args:
                mutated = draw(st.lists(st.integers(0, len(args) - 1), min_size=1, unique=True))
                writer.mutate(draw(names), args, mutated, draw(times))
            case "copy":
                known.append(draw(names))
                writer.copy(known[-1], draw(st.sampled_from(known[:-1])))
            case "copy_from":
                writer.copy_from(draw(st.sampled_from(known)), draw(st.sampled_from(known)))
            case "release":
                writer.release(draw(st.sampled_from(known)))
            case "pin":
                writer.pin(draw(st.sampled_from(known)))
            case "annotate":
                writer.annotate(draw(names))
            case "unknown":
                writer.release(new())
    writer.constant(new(), 1)
    return writer.getvalue()


@given(programs(), st.integers(1, 300))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_programs_read_as_the_plain_parser_reads_them(text, piece):
    core = _core.Log(True)
    for at in range(0, len(text), piece):
        core.feed(text[at : at + piece])
    core.finish(0)
    log = Log(core, text, 0, name="", cut_at_start=True, output_condition="rematerialize")
    assert_reads_as(log, Plain().read(text))


def rewrite(text: bytes) -> bytes:
    """A log through the writer."""
    writer = LogWriter()
    rest = iter([json.loads(line) for line in text.splitlines()])
    for line in rest:
        name = line.get("NAME")
        match line["INSTRUCTION"]:
            case "CONSTANT":
                writer.constant(name, int(next(rest)["MEMORY"]))
            case "CALL":
                pairs = [
                    (int(next(rest)["MEMORY"]), int(next(rest)["ALIAS"])) for _ in line["RESULT"]
                ]
                sizes, views = zip(*pairs, strict=True)
                time = int(line["TIME"])
                writer.call(name, line["ARGS"], line["RESULT"], time, bytes=sizes, aliases=views)
            case "MUTATE":
                writer.mutate(name, line["ARGS"], line["MUTATE"], int(line["TIME"]))
            case "COPY":
                writer.copy(line["DST"], line["SRC"])
            case "COPY_FROM":
                writer.copy_from(line["DST"], line["SRC"])
            case "RELEASE":
                writer.release(name)
            case "PIN":
                writer.pin(name)
            case "ANNOTATE":
                writer.annotate(line["ANNOTATION"])
    return writer.getvalue()


@given(programs())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_written_comes_back(text):
    assert rewrite(text) == text


def test_writer_to_files(tmp_path):
    plain, packed, buffer = tmp_path / "a.log", tmp_path / "b.log.gz", io.BytesIO()
    for file in (plain, str(packed), buffer):
        with LogWriter(file) as writer:
            for i in range(3000):
                writer.constant(f"x{i}", i)
            with pytest.raises(ValueError, match="writes to a file"):
                writer.getvalue()
    assert plain.read_bytes() == buffer.getvalue() == gzip.decompress(packed.read_bytes())
    assert parse(packed).operation_count == 3000
    assert packed.stat().st_size < plain.stat().st_size / 2
    writer.close()
    assert not buffer.closed
    with pytest.raises(TypeError, match="expected a path, a file"):
        LogWriter(io.StringIO())
    with pytest.raises(FileNotFoundError):
        LogWriter(tmp_path / "none" / "a.log")


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda w: w.constant("x", -1), ValueError, "bytes: -1 is out of range"),
        (lambda w: w.constant("x", True), TypeError, "integers"),
        (lambda w: w.constant("x", 1.0), TypeError, "float"),
        (lambda w: w.constant(7, 1), TypeError, "name must be a str, got 7"),
        (lambda w: w.constant("a\0b", 1), ValueError, "null characters"),
        (lambda w: w.release("\ud800"), UnicodeEncodeError, "surrogates"),
        (lambda w: w.mutate("m", "ab", [0], 1), TypeError, "got the str 'ab'"),
        (lambda w: w.mutate("m", ["a"], [1], 1), ValueError, "mutated is 1, expected"),
        (lambda w: w.mutate("m", ["a"], [], 1), ValueError, "mutated is empty"),
        (lambda w: w.mutate("m", ["a"], [0], 1 << 80), ValueError, "time_ns is"),
        (lambda w: w.mutate("m", [1], [0], 1), TypeError, "args must be a str"),
        (lambda w: w.mutate("m", ["a"], None, 1), TypeError, "not iterable"),
        (lambda w: w.call("f", [], [], 1, bytes=[], aliases=[]), ValueError, "results is empty"),
        (lambda w: w.call("f", [], "y", 1, bytes=[1], aliases=[-1]), TypeError, "the str 'y'"),
        (lambda w: w.call("f", [], ["y"], 1, bytes=[], aliases=[-1]), ValueError, "0 bytes"),
        (lambda w: w.call("f", [], ["y"], 1, bytes=[1], aliases=[0]), ValueError, "aliases: 0"),
        (lambda w: w.call("f", [], ["y"], -1, bytes=[1], aliases=[-1]), ValueError, "time_ns"),
    ],
)
def test_writer_refuses(write, error, message):
    writer = LogWriter()
    writer.annotate("START")
    with pytest.raises(error, match=message):
        write(writer)
    assert writer.getvalue() == b'{"ANNOTATION":"START","INSTRUCTION":"ANNOTATE"}\n'


# Lines, commands, operations, aliasing operations, tensors, constants; with all pins counted.
PUBLISHED = {
    "resnet32": (3777, 3552, 509, 696, 223, 16, 94),
    "unet": (2628, 2532, 399, 512, 152, 46, 59),
    "treelstm": (42146, 28388, 6959, 7213, 134, 2087, 127),
}


@cache
def published(name: str) -> bytes:
    return path_of(name).read_bytes()


READERS = [cache(shipped), pytest.param(published, marks=needs_logs)]


@needs_logs
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_logs(name):
    text = published(name)
    log = parse(text)
    assert_reads_as(log, Plain().read(text))
    operation_names = [log.operation_name(i) for i in range(log.operation_count)]
    aliasing = np.unique(log.tensors["operation"][log.tensors["is_alias"]])
    assert (log.start_count, log.ignored_releases) == (1, 0)
    assert PUBLISHED[name] == (
        log.line_count,
        log.command_count,
        log.operation_count,
        log.tensor_count,
        operation_names.count("constant"),
        len(aliasing),
        int((log.operations["output_count"] > 1).sum()),
    )


@needs_logs
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_logs_are_written_as_they_are(name):
    assert rewrite(published(name)) == published(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_logs_are_read_alike_when_written_again(name):
    text = shipped(name)
    assert_reads_as(parse(rewrite(text)), Plain().read(text))


def changed(rng: random.Random, text: bytes) -> bytes:
    """A log with one to three lines, bytes or ends lost, doubled, swapped or overwritten."""
    for _ in range(rng.randint(1, 3)):
        rows = text.split(b"\n")
        i, j = sorted(rng.randrange(len(rows)) for _ in range(2))
        at = rng.randrange(len(text))
        match rng.randrange(7):
            case 0:
                del rows[i]
            case 1:
                rows.insert(j, rows[i])
            case 2:
                rows[i], rows[j] = rows[j], rows[i]
            case 3:
                row = bytearray(rows[i] or b"x")
                row[rng.randrange(len(row))] = rng.choice(b'{}[]",:-0129aZ\\\x00\xff')
                rows[i] = bytes(row)
            case 4:
                rows[i] = rows[i].replace(b'":"', b'":"-' if rng.random() < 0.5 else b'":"9', 1)
            case 5:
                rows = text[:at].split(b"\n")
            case 6:
                rows = (text[:at] + text[at + rng.randint(1, 9) :]).split(b"\n")
        text = b"\n".join(rows) or b"\n"
    return text


def parse_or_error(text: bytes) -> Log | MalformedLogError:
    try:
        return parse(text)
    except MalformedLogError as error:
        return error


@pytest.mark.filterwarnings("ignore:.*RELEASE of names")
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("name", "count"), [("unet", 500), ("resnet32", 500), ("treelstm", 30)])
def test_changed_logs_give_an_error_or_a_result(read, name, count):
    rng = random.Random(name)
    refused = 0
    for _ in range(count):
        text = changed(rng, read(name))
        log = parse_or_error(text)
        if isinstance(log, MalformedLogError):
            refused += 1
            assert "expected" in str(log)
            assert log.line <= text.count(b"\n") + 1
            continue
        kinds, index = log.commands["kind"], log.commands["index"]
        assert (index[kinds == COMPUTE] == np.arange(log.operation_count)).all()
        assert index.max(initial=0) < max(log.operation_count, log.tensor_count)
    assert 0.2 * count < refused < count
