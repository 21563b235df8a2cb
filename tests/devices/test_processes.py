"""Tests on the simulated device, in their child, among tests of this process."""

import subprocess
import sys

import children


def test_tests_of_another_folder_follow_a_childs():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            str(children.TESTS / "devices/test_memory.py"),
            str(children.TESTS / "devices/test_sim_mixed.py"),
            str(children.TESTS / "house/test_no_cycles.py"),
        ],
        cwd=children.TESTS.parent,
        env=children.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
