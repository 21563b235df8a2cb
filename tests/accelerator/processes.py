"""A process of its own for each file of tests on the simulated device.

PyTorch starts the threads of devices at the first backward of a process, and the device replaces
the CPU's allocator: the tests in ``test_sim_*.py`` run in a child, whose reports are shown here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import children
import pytest

__all__ = ["earlier_end", "is_child", "run_elsewhere"]

_REPORTS = "ROTOR_SIM_REPORTS"
_found: dict[str, dict[str, list[Any]] | str] = {}


def is_child() -> bool:
    """Return whether this process runs tests on the simulated device."""
    return _REPORTS in os.environ


def run_elsewhere(item: pytest.Item) -> None:
    """Report a test of a file whose tests run in a child, all at the first of them."""
    from accelerator.build import NotBuilt, library

    hooks, config = item.ihook, item.config
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    path = str(item.path)
    if path not in _found:
        try:
            library()
        except NotBuilt as missing:
            _found[path] = str(missing)
        else:
            names = [other.nodeid for other in item.session.items if other.path == item.path]
            _found[path] = _reports_of(names, config)
    found = _found[path]
    if isinstance(found, str):
        reports = [_report(item, "skipped", (path, 0, f"Skipped: {found}"))]
    elif item.nodeid in found:
        read = config.hook.pytest_report_from_serializable
        reports = [read(config=config, data=data) for data in found[item.nodeid]]
    else:
        end = "".join(found["output"])
        reports = [_report(item, "failed", f"the process ended before this test:\n{end}")]
    for report in reports:
        hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def earlier_end(config: pytest.Config) -> list[str]:
    """Return options of a child, for it to end a test that hangs before this process is ended."""
    return ["-o", f"faulthandler_timeout={float(config.getini('faulthandler_timeout')) / 2}"]


def _report(item: pytest.Item, outcome: Any, text: Any) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, outcome, text, "call")


def _reports_of(names: Sequence[str], config: pytest.Config) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder) / "reports"
        reports.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "accelerator.processes",
            "--show-capture=no",
            *earlier_end(config),
        ]
        done = subprocess.run(
            [*command, *names],
            cwd=config.rootpath,
            env=children.environment(**{_REPORTS: str(reports)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found: dict[str, list[Any]] = {"output": [done.stdout]}
        for line in reports.read_text().splitlines():
            data = json.loads(line)
            found.setdefault(data["nodeid"], []).append(data)
    return found


if is_child():
    import accelerator

    accelerator.load()

    class _Writer:
        def __init__(self, config: pytest.Config) -> None:
            self._config = config

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            write = self._config.hook.pytest_report_to_serializable
            # PyTorch's traces are long.
            report.sections = [part for part in report.sections if "log" not in part[0]]
            with open(os.environ[_REPORTS], "a") as file:
                file.write(json.dumps(write(config=self._config, report=report)) + "\n")

    def pytest_configure(config: pytest.Config) -> None:
        config.pluginmanager.register(_Writer(config))
