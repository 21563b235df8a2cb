"""The mutations that show which test guards a line of the accelerator path."""

from pathlib import Path

import pytest
from accelerator.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_mutated_lines_exist(mutation):
    """Find the line that a mutation takes away, and the files of its tests."""
    assert mutation.old in (ROOT / mutation.path).read_text()
    assert mutation.new != mutation.old
    files = [part for part in mutation.tests.split() if part.endswith(".py")]
    assert files
    assert all((ROOT / name).is_file() for name in files)


def test_mutations_are_documented():
    """List each guard in the table of the documentation."""
    lines = (ROOT / "docs" / "gpu.md").read_text().split("## ")
    table = next(part for part in lines if "accelerator.mutations" in part)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert {mutation.guard for mutation in MUTATIONS} <= set(rows)
