"""The tests for GPUs (tests/gpu) pass on the simulated device, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys

import children
import pytest
from accelerator import NotBuilt, library
from accelerator.processes import earlier_end

QUICK = (
    "dropout_on or no_limit_is or (budgets_are_kept and not 0.8) or the_dynamic_engine "
    "or (graphs_keep_limits and language)"
)
"""The others take a minute more."""


def check(config: pytest.Config, selected: str, least: int) -> None:
    try:
        library()
    except NotBuilt as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(children.TESTS / "gpu"), "--show-capture=no"),
            *("-k", selected, *earlier_end(config)),
        ],
        cwd=children.TESTS.parent,
        # One -q leaves no line of counts.
        env=children.environment(ROTOR_GPU_TESTS="sim", PYTEST_ADDOPTS="-v -p no:cacheprovider"),
        capture_output=True,
        text=True,
        check=False,
    )
    end = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, end
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, end
    assert int(found[1]) >= least, end
    assert "skipped" not in done.stdout, end


@pytest.mark.slow
def test_some_pass_on_the_simulated_device(pytestconfig):
    check(pytestconfig, QUICK, 9)


@pytest.mark.slow
def test_all_others_pass_on_the_simulated_device(pytestconfig):
    check(pytestconfig, f"not ({QUICK})", 10)
