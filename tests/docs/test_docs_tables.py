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


def write_results(folder: Path, output: list[str] = PRINTED) -> None:
    runs = [entry("one.py", output), entry("bad.py", ["x"], status="failed")]
    run_all.write(folder, "full", runs)


def region(what: str, text: str = "old") -> str:
    return f"<!-- bench: {what} -->{text}<!-- bench: end -->"


def test_the_docs_are_those_of_the_results():
    """Where this fails: `make docs-tables`."""
    assert [str(problem) for problem in docs_tables.renew(write=False)] == []


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


def test_no_comment_begins_a_line_within_a_sentence():
    """Markdown would take the line for HTML."""
    for path in docs_tables.pages():
        for match in docs_tables.REGION.finditer(path.read_text(encoding="utf-8")):
            starts = not match.string[: match.start()].rpartition("\n")[2].strip()
            assert starts == ("\n" in match["text"]), f"{path.name}: {match['entry']}"


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


def test_what_regions_show(tmp_path):
    write_results(tmp_path)
    known = docs_tables.results(tmp_path)

    def text(entry: str, what: str | None = None) -> str:
        return docs_tables.shown(known, entry, what)

    assert text("full/one.py", "0") == "\n```text\na table\nx  y\n```\n"
    assert text("full/one.py").split("\n")[2:5] == ["a table", "x  y", ""]
    assert text("full/one.py", "/^60 % of it: (.*) times/") == "1.16"
    assert text("full/one.py", "about") == (
        "\n`OMP_NUM_THREADS=1 python benchmarks/one.py --steps 3`, 2001-02-03: Z80, 2 cores, "
        "PyTorch 9.9, commit abc, 7 s, load 0.5 when it began.\n"
    )
    assert "| bad.py | why? | failed | 7 |" in text("full", "list")


@pytest.mark.parametrize(
    ("region", "reason"),
    [
        (("half/one.py", None), "there is no file half.json"),
        (("full/two.py", None), "no entry two.py: run_all.py --only 'two.py' makes it"),
        (("full/bad.py", "0"), "bad.py of full.json failed: run it again"),
        (("full/one.py", "2"), "printed 2 parts"),
        (("full/one.py", "/(.*) times/"), "2 times, where one is needed"),
        (("full/one.py", "/nothing (.*)/"), "0 times, where one is needed"),
        (("full/one.py", "everything"), "neither a number, nor about, nor /pattern/"),
    ],
)
def test_regions_without_figures(tmp_path, region, reason):
    write_results(tmp_path)
    with pytest.raises(ValueError, match=re.escape(reason)):
        docs_tables.shown(docs_tables.results(tmp_path), *region)


def test_pages_are_renewed(tmp_path):
    """What is outside of regions stays, what has no figures too, and is told."""
    results = tmp_path / "benchmarks" / "results"
    write_results(results)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    kept = f"x {region('full/two.py')} y\n"
    page.write_text(
        f"1 {region('full/one.py; /^40 %.*: (.*) times/')} 2\n"
        f"\n{region('full/one.py; 0', '')}\n\n{kept}",
        encoding="utf-8",
    )
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    told = docs_tables.renew(tmp_path, write=False)
    assert page.read_text(encoding="utf-8") == before
    assert [problem.region for problem in told] == ["full/two.py", "full/one.py", "full/one.py"]
    assert "run make docs-tables" in str(told[-1])
    (told,) = docs_tables.renew(tmp_path)
    assert str(told).startswith("docs/page.md: full/two.py: full.json has no entry")
    after = page.read_text(encoding="utf-8")
    assert after.startswith("1 <!-- bench: full/one.py; /^40 %.*: (.*) times/ -->1.25<!-- bench:")
    assert "-->\n```text\na table\nx  y\n```\n<!-- bench: end -->" in after
    assert after.endswith(kept)
    assert [problem.region for problem in docs_tables.renew(tmp_path, write=False)] == [
        "full/two.py"
    ]
    write_results(results, [line.replace("1.25", "1.26") for line in PRINTED])
    (_, told) = docs_tables.renew(tmp_path, write=False)
    assert str(told) == "docs/page.md: full/one.py: differs from the results: run make docs-tables"
