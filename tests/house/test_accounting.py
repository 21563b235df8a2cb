"""The constants and rules of the memory model (docs/memory-model.md)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rotor.common import accounting

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| `([A-Z_]+)` \| `([^`]+)` \|")


def constants() -> list[tuple[str, object]]:
    """Names and values of a module's constants, in the order of its source."""
    found = vars(accounting)
    source = ast.parse(Path(accounting.__file__).read_text(encoding="utf-8"))
    names = [
        node.targets[0].id
        for node in source.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    return [(name, found[name]) for name in names]


def test_the_page_states_every_constant_in_the_order_of_the_source():
    page = (ROOT / "docs" / "memory-model.md").read_text(encoding="utf-8")
    stated = [(name, ast.literal_eval(value)) for name, value in ROW.findall(page)]
    assert stated == constants()
    assert len(stated) > 20


def test_every_constant_and_rule_is_public():
    rules = [
        name
        for name, value in vars(accounting).items()
        if callable(value) and getattr(value, "__module__", "") == accounting.__name__
    ]
    assert len(rules) > 8
    assert not any(name.startswith("_") for name in [*rules, *(name for name, _ in constants())])


def test_the_rules_need_no_torch(tmp_path):
    script = tmp_path / "rules.py"
    script.write_text(
        "import sys\nimport rotor.common.accounting\nassert 'torch' not in sys.modules\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, str(script)], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["5056", "5_056", "1 << 17", "9 // 10"])
def test_a_figure_of_the_model_is_written_once(name):
    written = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "rotor").rglob("*.py"))
        if re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", path.read_text(encoding="utf-8"))
    ]
    assert written in ([], ["rotor/common/accounting.py"])


def test_bytes_are_rounded_as_the_allocator_of_the_device_rounds_them():
    assert [accounting.rounded_bytes(n, "cpu") for n in (0, 1, 513)] == [0, 1, 513]
    assert [accounting.rounded_bytes(n, "cuda") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert accounting.scalar_bytes("cpu") == 64
    assert accounting.scalar_bytes("cuda") == 4096


def test_random_states_are_kept_on_the_cpu_with_one_more_for_the_current_one():
    assert [accounting.generator_bytes("cpu", n) for n in (0, 1, 3)] == [0, 2 * 5056, 4 * 5056]
    assert accounting.generator_bytes("cuda", 3) == 0
