import io
import logging
import subprocess
import sys

import pytest

from rotor.common import progress as module
from rotor.common.progress import progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_short_work_says_nothing(now, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="rotor")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(3, "working") as update:
        for done in range(4):
            now[0] += 0.25
            update(done)
    assert caplog.records == []
    assert terminal.getvalue() == ""


def test_long_work_is_logged_once_where_there_is_no_terminal(now, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="rotor")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress(10, "working") as update:
        for done in range(10):
            now[0] += 0.3
            update(done, 20)
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("rotor", logging.INFO, "working: 3 of 20 done")
    ]
    assert sys.stderr.getvalue() == ""


def test_long_work_has_a_bar_on_a_terminal(now, monkeypatch, caplog):
    pytest.importorskip("rich")
    caplog.set_level(logging.DEBUG, logger="rotor")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(4, "measuring the stages") as update:
        update(1)
        assert terminal.getvalue() == ""
        now[0] += 1.5
        update(2)
        bar = update._bar
        (task,) = bar.tasks
        assert (task.description, task.completed, task.total) == ("measuring the stages", 2, 4)
        update(6, 8)
        assert (task.completed, task.total) == (6, 8)
    assert "measuring the stages" in terminal.getvalue()
    assert bar.live.is_started is False
    update(8, 8)
    assert caplog.records == []


def test_the_bar_stops_when_the_work_fails(now, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    bars = []

    def fail():
        with progress(4, "working") as update:
            now[0] += 1.5
            update(2)
            bars.append((update._bar, update._bar.live.is_started))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    ((bar, was_started),) = bars
    assert was_started
    assert not bar.live.is_started


def test_without_rich_a_terminal_gets_the_log(now, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="rotor")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress(0, "working") as update:
        now[0] += 1.5
        update(0)
    assert [r.getMessage() for r in caplog.records] == ["working: 0 of 0 done"]


def test_no_stderr_at_all_is_no_terminal(now, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="rotor")
    monkeypatch.setattr(sys, "stderr", None)
    with progress(2, "working") as update:
        now[0] += 1.5
        update(1)
    assert len(caplog.records) == 1


def test_progress_needs_neither_torch_nor_rich():
    code = (
        "import sys, rotor.common.progress; sys.exit({'torch', 'rich'} & set(sys.modules) != set())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_work_within_a_bar_shows_no_bar_of_its_own(now, monkeypatch, caplog):
    pytest.importorskip("rich")
    caplog.set_level(logging.INFO, logger="rotor")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(1, "outer", at_once=True) as outer:
        outer(0)
        with progress(9, "inner") as inner:
            now[0] += 5
            inner(3)
        outer(1, 2)
    assert "outer" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()
    assert caplog.records == []
    with progress(9, "later", at_once=True) as later:
        later(1)
    assert "later" in terminal.getvalue()
