"""Tests on the simulated device, in their child, among tests of this process."""

import subprocess
import sys

import children


def test_tests_of_another_folder_follow_a_childs():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            f"{children.TESTS}/devices/test_probe.py",
            f"{children.TESTS}/devices/test_sim_memory.py::test_best_fit",
            f"{children.TESTS}/house/test_no_cycles.py::test_substitutes_in_a_tuple",
        ],
        cwd=children.TESTS.parent,
        env=children.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
