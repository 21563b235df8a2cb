"""Write the tables and figures of the docs from the files of results.

    python benchmarks/docs_tables.py [--check] [--results benchmarks/results]

In the docs and the README a region stands between two comments, which no reader sees:

    <!-- bench: full/planning.py; 0 -->
    ...
    <!-- bench: end -->

names the file, the entry, and what is shown of it: nothing for all that it printed, a number for
that of the parts between its empty lines, `about` for the sentence on when and where it was taken,
`/pattern/` for the text of the pattern's one group, within a sentence. `<!-- bench: full; list -->`
is the table of a file's entries. `--check` writes nothing, and fails where the docs differ.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from run_all import RESULTS, ROOT, Run, about, listing, read

REGION = re.compile(
    r"<!-- bench: (?P<entry>[^;\n]+?)(?:; (?P<what>[^\n]+?))? -->"
    r"(?P<text>.*?)(?P<end><!-- bench: end -->)",
    re.DOTALL,
)
Results = dict[str, dict[str, Run]]


@dataclass(frozen=True)
class Problem:
    """A region that cannot be written, or whose text is not that of the results."""

    page: str
    region: str
    reason: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.page}: {self.region}: {self.reason}"


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may have regions."""
    found = [path for path in sorted((root / "docs").rglob("*.md")) if "_build" not in path.parts]
    return [root / "README.md", *found]


def results(folder: Path = RESULTS) -> Results:
    """Each file's runs by name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def parts(lines: list[str]) -> list[list[str]]:
    """What was printed, in the parts that empty lines make."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [part for part in found if part]


def shown(known: Results, entry: str, what: str | None) -> str:
    """The text of a region; ValueError where there is none."""
    file, _, name = entry.partition("/")
    if file not in known:
        raise ValueError(f"there is no file {file}.json")
    if what == "list" and not name:
        return "\n\n" + "\n".join(listing(list(known[file].values()))) + "\n\n"
    if name not in known[file]:
        raise ValueError(f"{file}.json has no entry {name}: run_all.py --only {name!r} makes it")
    one = known[file][name]
    if one.status != "ok":
        raise ValueError(f"the entry {name} of {file}.json {one.status}: run it again")
    if what == "about":
        return f"\n{about(one)}\n"
    if what is None:
        return _fenced("\n".join(one.output).strip("\n").split("\n"))
    if what.isdecimal():
        several = parts(one.output)
        if int(what) >= len(several):
            raise ValueError(f"{name} printed {len(several)} parts")
        return _fenced(several[int(what)])
    if len(what) > 2 and what[0] == what[-1] == "/":
        found = re.findall(what[1:-1], "\n".join(one.output), re.MULTILINE)
        if len(found) != 1 or not isinstance(found[0], str):
            raise ValueError(f"{name} printed {what} {len(found)} times, where one is needed")
        return found[0].strip()
    raise ValueError(f"{what} is neither a number, nor about, nor /pattern/")


def _fenced(lines: list[str]) -> str:
    return "\n".join(["", "```text", *lines, "```", ""])


def renewed(text: str, known: Results, page: str = "") -> tuple[str, list[Problem]]:
    """A page with its regions written anew, and those that could not be."""
    problems = []

    def write(match: re.Match[str]) -> str:
        region = "; ".join(part for part in match.group("entry", "what") if part)
        try:
            new = shown(known, match["entry"], match["what"])
        except ValueError as error:
            problems.append(Problem(page, region, str(error)))
            return match[0]
        start = match[0][: match.start("text") - match.start()]
        return start + new + match["end"]

    return REGION.sub(write, text), problems


def renew(root: Path = ROOT, folder: Path | None = None, *, write: bool = True) -> list[Problem]:
    """Write the pages, or say only which regions differ."""
    known = results(folder or root / "benchmarks" / "results")
    problems = []
    for path in pages(root):
        text, page = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        new, missing = renewed(text, known, page)
        problems += missing
        if write and new != text:
            path.write_text(new, encoding="utf-8")
        if not write:
            pairs = zip(REGION.finditer(text), REGION.finditer(new), strict=True)
            problems += [
                Problem(page, a["entry"], "differs from the results: run make docs-tables")
                for a, b in pairs
                if a[0] != b[0]
            ]
    return problems


def main() -> None:
    """Write or compare; fails where a region has no figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    problems = renew(ROOT, arguments.results, write=not arguments.check)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))


if __name__ == "__main__":
    main()
