"""Logs of eager programs: what is read, and what is refused."""

from __future__ import annotations

import gzip
import io
import pickle
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from plain_logs import (
    COMPUTE,
    PIN,
    WHOLE,
    Plain,
    alias,
    assert_equal,
    assert_reads_as,
    call,
    constant,
    memory,
    other,
)

from rotor import _core
from rotor.errors import MalformedLogError
from rotor.simrd.log_writer import LogWriter
from rotor.simrd.logs import Log, parse


def test_every_instruction():
    log = parse(WHOLE)
    assert_reads_as(log, Plain().read(WHOLE))
    assert (log.line_count, log.command_count, log.backward_command) == (13, 13, 6)
    assert log.operations["bytes"].tolist() == [100, 30, 30]
    assert log.operations["output_count"].tolist() == [1, 2, 1]
    assert log.operations["first_output"].tolist() == [0, 1, 3]
    assert log.lookup("nothing") == -1
    assert (log.name, log.path, log.output_condition) == ("log", None, "rematerialize")
    assert repr(log) == "<Log 'log': 3 operations, 4 tensors, 13 commands>"


def test_arrays_are_read_only_and_kept():
    log = parse(WHOLE)
    for what in ("operations", "inputs", "tensors", "storages", "commands"):
        array = getattr(log, what)
        assert array is getattr(log, what)
        with pytest.raises(ValueError, match="read-only"):
            array[:] = array[:]
    with pytest.raises(AttributeError):
        log.name = "other"  # type: ignore[misc]
    with pytest.raises(IndexError, match="tensor 4 does not exist, the log has 4"):
        log.tensor_name(4)
    with pytest.raises(IndexError, match="operation -1"):
        log.operation_name(-1)
    with pytest.raises(IndexError):
        log.references(1 << 80)


def test_a_log_without_inputs():
    log = parse(constant("w"))
    assert log.inputs.tolist() == []
    assert log.commands.tolist() == [(COMPUTE, 0), (PIN, 0), (PIN, 0)]


@pytest.mark.parametrize(
    ("condition", "commands", "output_bytes"),
    [("rematerialize", 13, 0), ("preallocate", 10, 100), ("leave", 10, 0)],
)
def test_output_conditions(condition, commands, output_bytes):
    log = parse(WHOLE, output_condition=condition)
    assert log.command_count == commands
    assert log.output_bytes == output_bytes
    assert pickle.loads(pickle.dumps(log)).output_bytes == output_bytes


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="expected one of rematerialize, preallocate, leave"):
        parse(WHOLE, output_condition="keep")
    with pytest.raises(TypeError, match="cut_at_start"):
        parse(WHOLE, cut_at_start=1)  # type: ignore[arg-type]
    for source in (7, None, io.StringIO("x"), WHOLE.decode().splitlines()):
        with pytest.raises(TypeError, match="expected a path, bytes, or a file"):
            parse(source)  # type: ignore[arg-type]


def test_start():
    start = other("ANNOTATE", ANNOTATION="START")
    text = constant("old") + start + constant("w", "1") + start + WHOLE
    log = parse(text)
    assert_reads_as(log, Plain().read(text))
    assert (log.start_count, log.line_count) == (2, 19)
    whole = parse(constant("old") + start + constant("v") + WHOLE, cut_at_start=False)
    assert whole.operation_count == log.operation_count + 2
    assert (whole.start_count, whole.lookup("old")) == (1, 0)


def test_where_the_backward_begins():
    text = constant("w") + call(["w"], ["a"], name="conv_backward") + memory("a") + alias("a")
    assert parse(text).backward_command == 2
    assert parse(text + other("ANNOTATE", ANNOTATION="BACKWARD") * 2).backward_command == 3
    assert parse(constant("w")).backward_command == -1


def test_releases_of_unknown_names_warn_once():
    text = constant("w") + other("RELEASE", NAME="u") * 3
    with pytest.warns(UserWarning, match="log: 3 RELEASE of names that are not defined") as seen:
        log = parse(text)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert log.ignored_releases == 3
    assert pickle.loads(pickle.dumps(log)).ignored_releases == 3


CALLED = constant("w") + call(["w"], ["a", "b"])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (b"print\n", 1, 'expected a JSON object, found "print" at column 1'),
        (b"\r\n  \n[1]\n", 3, "expected a JSON object"),
        (WHOLE + b'{"INSTRUCTION":"REL', 14, "a closing quote, found the end of the line"),
        (WHOLE + other("FREE", NAME="w"), 14, '"FREE" is unknown; expected CONSTANT, MEMORY'),
        (WHOLE + other("RELEASE"), 14, "no NAME; expected it in RELEASE"),
        (WHOLE + other("RELEASE", NAME=["w"]), 14, "an array; expected a string"),
        (WHOLE + other("PIN", NAME="ü"), 14, 'the name "ü" in PIN is not defined'),
        (constant("w") * 2, 3, 'the result "w" is defined already; expected a new name'),
        (constant("w", "-5"), 2, '"-5", too small; expected an integer from 0 to 4398046511104'),
        (constant("w", 1 << 42 | 1), 2, "too large"),
        (constant("w", "1e3"), 2, "expected an integer"),
        (constant("w", 1.5), 2, 'a decimal number, "1.5"; expected an integer'),
        (constant("w", True), 2, "expected an integer"),
        (CALLED, 3, 'the log ends here, expected MEMORY of "a", result 1 of 2 of CALL "f"'),
        (CALLED + memory("b"), 4, 'found MEMORY of "b", expected MEMORY of "a"'),
        (CALLED + memory("a") + alias("a", 1), 5, "too large; expected an integer from -1 to 0"),
        (call(["x"], ["a"]), 1, 'the name "x" in CALL is not defined'),
        (call([], ["a"], "-1"), 1, "TIME in CALL"),
        (
            constant("w") + other("MUTATE", NAME="m", ARGS=["w"], MUTATE=[1], TIME="1"),
            3,
            "an index of ARGS",
        ),
        (b'{"a":"\xff"}\n', 1, "expected UTF-8"),
    ],
)
def test_errors(tmp_path, text, line, message):
    path = tmp_path / "wrong.log"
    path.write_bytes(text)
    for source, named in ((text, ""), (path, str(path))):
        with pytest.raises(MalformedLogError) as caught:
            parse(source)
        assert caught.value.line == line
        assert caught.value.source == named
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{named or 'log'}, line {line}: ")


def test_empty_logs(tmp_path):
    path = tmp_path / "empty.log"
    path.write_bytes(b"\n\n")
    with pytest.raises(MalformedLogError, match=r"empty\.log: it is empty; expected") as caught:
        parse(path)
    assert caught.value.source == str(path)
    with pytest.raises(MalformedLogError, match="log: it is empty"):
        parse(b"")
    with pytest.raises(MalformedLogError, match="the last START is followed by no operation"):
        parse(WHOLE + other("ANNOTATE", ANNOTATION="START"))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        parse(tmp_path / "none.log")
    with pytest.raises(IsADirectoryError):
        parse(str(tmp_path))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_files_in_pieces(piece):
    class Slow(io.RawIOBase):
        def __init__(self, text):
            self.rest = text

        def read(self, size=-1):
            size = min(size, piece)
            taken, self.rest = self.rest[:size], self.rest[size:]
            return taken

    for text in (WHOLE, gzip.compress(WHOLE)):
        log = parse(Slow(text))
        assert_equal(log, parse(WHOLE))
        assert_equal(pickle.loads(pickle.dumps(log)), log)


def test_kinds_of_sources(tmp_path):
    plain, packed = tmp_path / "a.log", tmp_path / "b.log.gz"
    plain.write_bytes(WHOLE)
    packed.write_bytes(gzip.compress(WHOLE[:200]) + gzip.compress(WHOLE[200:]))
    expected = parse(WHOLE)
    for path, name in ((plain, "a"), (packed, "b")):
        for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
            assert_equal(parse(source), expected)
        assert parse(str(path)).path == path
        assert parse(path).name == name
        with path.open("rb") as file:
            log = parse(file)
        assert (log.name, log.path) == (name, None)
        assert_equal(log, expected)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "damaged.log.gz"
    whole = gzip.compress(WHOLE * 1)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for text in (whole[:40], whole[:-3], bytes(flipped), whole + b"garbage", b"\x1f\x8b"):
        path.write_bytes(text)
        for source in (path, text):
            with pytest.raises(MalformedLogError) as caught:
                parse(source)
            if source is path:
                assert str(path) in str(caught.value)
    with pytest.raises(MalformedLogError, match="damaged or ends early"):
        parse(whole[:-3])


def test_core_arguments():
    core, writer = _core.Log(False), _core.LogWriter()
    for wrong in (
        lambda: _core.Log(),
        lambda: _core.Log(cut_at_start=True),
        lambda: _core.LogWriter(1),
        lambda: core.feed(),
        lambda: core.feed("text"),
        lambda: core.feed(b"", 7),
        lambda: core.finish(True),
        lambda: core.lookup(b"x"),
        lambda: core.references("x"),
        lambda: writer.call("f", [], []),
        lambda: writer.memory("f"),
        lambda: writer.copy("f"),
        lambda: writer.mutate("f", [], [None], 0),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="condition is 3"):
        core.finish(3)
    core.finish(2)
    assert core.is_finished
    with pytest.raises(MalformedLogError, match="ended already"):
        core.feed(b"\n")
    with pytest.raises(MalformedLogError, match="ended already"):
        core.finish(0)
    assert writer.take() == b""


def test_pickles(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(WHOLE)
    start = other("ANNOTATE", ANNOTATION="START")
    for source in (path, WHOLE, WHOLE + start + WHOLE):
        log = parse(source, output_condition="preallocate")
        data = pickle.dumps(log)
        back = pickle.loads(data)
        assert_equal(back, log)
        assert (back.name, back.path, back.output_condition) == (log.name, log.path, "preallocate")
    log = parse(path)
    assert len(pickle.dumps(log)) < 400
    expected = log.baseline
    assert pickle.loads(pickle.dumps(log)).__dict__["baseline"] == expected
    path.write_bytes(WHOLE + other("RELEASE", NAME="w"))
    with pytest.raises(ValueError, match=r"a\.log has changed since the log was parsed"):
        pickle.loads(pickle.dumps(log))


def count_of(log: Log) -> int:
    return log.command_count


def test_logs_go_to_other_processes(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(WHOLE)
    with get_context("spawn").Pool(1) as pool:
        assert pool.map(count_of, [parse(path), parse(WHOLE)]) == [13, 13]


def test_threads_read_at_once():
    expected = parse(WHOLE * 1)
    with ThreadPoolExecutor(8) as pool:
        for log in pool.map(parse, [WHOLE] * 64):
            assert_equal(log, expected)
        assert set(pool.map(lambda _: expected.tensor_name(1), range(64))) == {"a"}


def feed_until_asked(progress) -> _core.Log:
    """Feed ever longer pieces until the callback, which is asked now and then, was asked."""
    log = _core.Log(True)
    size = 1 << 24
    asked = threading.Event()

    def callback(done, total):
        assert 0 < done <= total == size
        asked.set()
        progress(log)

    while not asked.is_set():
        size *= 2
        log.feed(b"\n" * size, callback)
    return log


def test_a_log_that_is_fed_is_not_read():
    refused = []

    def read(log):
        for use in (
            lambda: log.line_count,
            lambda: log.footprint_bytes,
            lambda: log.is_finished,
            lambda: log.feed(b""),
            lambda: log.finish(0),
            lambda: log.commands(),
            lambda: log.operations(),
            lambda: log.inputs(),
            lambda: log.tensors(),
            lambda: log.storages(),
            lambda: log.lookup("x"),
            lambda: log.references(0),
        ):
            with pytest.raises(RuntimeError, match="is being fed"):
                use()
        refused.append(True)

    log = feed_until_asked(read)
    assert refused
    assert log.line_count > 0


def test_the_progress_callback_may_fail():
    logs = []

    def fail(log):
        logs.append(log)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        feed_until_asked(fail)
    with pytest.raises(MalformedLogError, match="an earlier piece of the log was not read"):
        logs[0].feed(b"\n")


def test_footprint_grows_with_the_log():
    sizes = []
    for steps in (1000, 2000, 4000, 8000):
        writer = LogWriter()
        writer.constant("x0", 1)
        for i in range(steps):
            writer.call("f", [f"x{i}"], [f"x{i + 1}"], 1, bytes=[1], aliases=[-1])
            writer.release(f"x{i}")
        log = parse(writer.getvalue())
        text = len(writer.getvalue())
        assert text < log.footprint_bytes < 3 * text
        sizes.append(log.footprint_bytes)
    assert 4 < sizes[-1] / sizes[0] < 16


def test_inflated_bombs_are_read_in_pieces():
    text = zlib.compress(b"\n" * (1 << 26), 9, wbits=31)
    assert len(text) < 1 << 17
    with pytest.raises(MalformedLogError, match="it is empty"):
        parse(text)
