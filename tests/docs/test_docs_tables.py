"""Tables and figures of the docs are those of the files of results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import docs_tables
import run_all

ROOT = run_all.ROOT
MACHINE = {"processor": "Z80", "cpus": 2, "versions": {"torch": "9.9"}, "commit": "abc"}
PRINTED = ["", "a table", "x  y", "", "", "60 % of it: 1.16 times", "40 % of it: 1.25 times", ""]


def entry(name: str, output: list[str], **given) -> run_all.Run:
    command = [f"benchmarks/{name}", "--steps", "3"]
    environment = {"OMP_NUM_THREADS": "1"}
    began = "2001-02-03T04:05:06+00:00"
    return run_all.Run(
        name, "why?", command, environment, MACHINE, began, 0.5, seconds=7.2, output=output, **given
    )


def test_the_docs_are_those_of_the_results():
    """Where this fails: `make docs-tables`."""
    assert docs_tables.renew(write=False) == []


def test_regions_name_entries_that_are_run():
    named = set()
    for path in docs_tables.pages():
        text = path.read_text(encoding="utf-8")
        found = list(docs_tables.REGION.finditer(text))
        assert text.count("<!-- bench:") == 2 * len(found), path.name
        named |= {match["entry"] for match in found}
    known = {f"full/{one.name}" for one in run_all.BENCHMARKS} | {"full", "gpu"}
    known |= {f"gpu/{one.name}" for one in run_all.BENCHMARKS if one.gpu is not None}
    assert named <= known
    assert {f"full/{one.name}" for one in run_all.BENCHMARKS if one.full is not None} <= named


def test_no_table_of_figures_is_pasted():
    text = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    outside = docs_tables.REGION.sub("", text)
    assert "```" not in outside
    assert re.findall(r"\b\d+\.\d{2,}", outside) == []


@pytest.mark.parametrize("path", sorted(run_all.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results(path):
    runs = run_all.read(path)
    assert {one.status for one in runs.values()} == {"ok"}
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"""[\s"'(]/(?!s\b)\w+/[\w/]+""", text) == []


def test_committed_results_are_small():
    """They are in the sdist, whose tests read them."""
    assert sum(path.stat().st_size for path in run_all.RESULTS.iterdir()) < 300_000


def test_the_page_of_results_is_that_of_the_file(tmp_path):
    for path in run_all.RESULTS.glob("*.json"):
        run_all.write(tmp_path, path.stem, list(run_all.read(path).values()))
        for suffix in (".json", ".md"):
            same = path.with_suffix(suffix)
            written = (tmp_path / path.stem).with_suffix(suffix)
            assert written.read_text(encoding="utf-8") == same.read_text(encoding="utf-8")


def test_pages_show_what_was_printed(tmp_path):
    """What is outside of regions stays."""
    runs = [entry("one.py", PRINTED), entry("bad.py", ["x"], status="failed")]
    run_all.write(tmp_path, "full", runs)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    wanted = ["; 0", "; /^40 %.*: (.*) times/", "; about", "; list"]
    regions = [f"<!-- bench: full/one.py{what} -->old<!-- bench: end -->" for what in wanted]
    page.write_text("before " + "|".join(regions).replace("/one.py; list", "; list") + " after")
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    assert docs_tables.renew(tmp_path, tmp_path, write=False) == ["docs/page.md"]
    assert page.read_text(encoding="utf-8").count("old") == 4
    docs_tables.renew(tmp_path, tmp_path)
    after = page.read_text(encoding="utf-8")
    assert after.startswith("before <!-- bench: full/one.py; 0 -->\n```text\na table\nx  y\n```\n")
    assert after.endswith("<!-- bench: end --> after")
    assert "times/ -->1.25<!-- bench: end -->" in after
    assert "abc, 7 s, load 0.5 when it began.\n<!-- bench: end -->" in after
    assert "| bad.py | why? | failed | 7 |" in after
    assert docs_tables.renew(tmp_path, tmp_path, write=False) == []
    page.write_text("<!-- bench: full/two.py; 0 -->old<!-- bench: end -->", encoding="utf-8")
    with pytest.raises(ValueError, match=r"full/two.py; 0: KeyError"):
        docs_tables.renew(tmp_path, tmp_path)
