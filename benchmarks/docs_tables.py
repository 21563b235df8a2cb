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
from pathlib import Path

from run_all import RESULTS, ROOT, Run, about, listing, read

REGION = re.compile(
    r"<!-- bench: (?P<entry>[^;\n]+?)(?:; (?P<what>[^\n]+?))? -->"
    r"(?P<text>.*?)(?P<end><!-- bench: end -->)",
    re.DOTALL,
)
Results = dict[str, dict[str, Run]]


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
    """The text of a region; LookupError or ValueError where there is none."""
    file, _, name = entry.partition("/")
    if what == "list":
        return "\n\n" + "\n".join(listing(list(known[file].values()))) + "\n\n"
    one = known[file][name]
    if what == "about":
        return f"\n{about(one)}\n"
    if what is None:
        return _fenced("\n".join(one.output).strip("\n").split("\n"))
    if what.isdecimal():
        return _fenced(parts(one.output)[int(what)])
    (found,) = re.findall(what.strip("/"), "\n".join(one.output), re.MULTILINE)
    return str(found).strip()


def _fenced(lines: list[str]) -> str:
    return "\n".join(["", "```text", *lines, "```", ""])


def renewed(text: str, known: Results) -> str:
    """A page with its regions written anew."""

    def write(match: re.Match[str]) -> str:
        try:
            new = shown(known, match["entry"], match["what"])
        except (LookupError, ValueError) as error:
            raise ValueError(f"{match['entry']}; {match['what']}: {error!r}") from None
        start = match[0][: match.start("text") - match.start()]
        return start + new + match["end"]

    return REGION.sub(write, text)


def renew(root: Path = ROOT, folder: Path = RESULTS, *, write: bool = True) -> list[str]:
    """Write the pages, or only return which differ."""
    known, changed = results(folder), []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        new = renewed(text, known)
        if new != text:
            changed.append(path.relative_to(root).as_posix())
        if new != text and write:
            path.write_text(new, encoding="utf-8")
    return changed


def main() -> None:
    """Write or compare; fails where a page differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    changed = renew(ROOT, arguments.results, write=not arguments.check)
    if changed and arguments.check:
        raise SystemExit("\n".join(f"{page} differs from the results" for page in changed))


if __name__ == "__main__":
    main()
