"""Every benchmark, one after the other, and one page and one file of what they found.

    python benchmarks/run_all.py [--quick] [--only NAME ... | --missing] [--keep] [--out FOLDER]
    python benchmarks/run_all.py --gpu

Each script runs in a process of its own, within a time; what it prints is shown, and kept. In the
end `<name>.md` has all output, `<name>.json` the same with the tables as rows of numbers. Every
entry says when, where, with which arguments, versions and commit it was taken: with `--only`,
`--missing` or `--keep` a file's other entries stay. Times in the tables are ratios within one run,
which is what can be compared. `docs_tables.py` writes the tables of the docs from these files.
`--gpu` runs the tests that need CUDA, then the benchmarks on one device, in at most 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from entries import BENCHMARKS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
FORMAT, VERSION = "rotor.benchmarks", 2
GPU_SECONDS = 1500.0
FAILED, CUT = "failed", "cut short"


GPU_TESTS = ("-m", "pytest", "-q", "tests/gpu")
GPU_TESTS_LIMIT_S = 105.0
PREDICTIONS_LIMIT_S = 95.0
SANITIZED = {"TORCH_CUDA_SANITIZER": "1"}


@dataclass(frozen=True)
class Task:
    """What is to be run: arguments of Python, seconds at most, what is set in the environment."""

    name: str
    question: str
    command: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """What one command printed, how it ended, how long it took, when, and on what."""

    name: str
    question: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    began: str = ""
    load: float | None = None
    status: str = "ok"
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)


def run(task: Task, machine: dict[str, Any] | None = None) -> Run:
    """Run a command in its time; what it prints is shown and kept, without the paths of here."""
    done = Run(task.name, task.question, task.command, task.environment, machine or {})
    done.began = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):
        done.load = round(os.getloadavg()[0], 1)
    if task.limit_s <= 1:
        done.status = CUT
        return done
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *task.command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, **task.environment},
    )

    def end() -> None:
        done.status = CUT
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(task.limit_s, end)
    timer.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                done.output.append(_without_paths(line.rstrip()))
            code = process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    if code and done.status == "ok":
        done.status = FAILED
    done.seconds = time.monotonic() - start
    return done


def _without_paths(line: str) -> str:
    for folder in (ROOT, ROOT.parent, sys.prefix, tempfile.gettempdir()):
        line = line.replace(f"{folder}/", "")
    return line


def tables(lines: list[str]) -> list[dict[str, Any]]:
    """The tables in what was printed: under dashes, in Markdown, or columns of numbers."""
    found: list[dict[str, Any]] = []
    done = 0
    for k, line in enumerate(lines):
        if k == 0:
            continue
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line):
            cells = [_cells(text) for text in _following(lines, k, lambda text: text[:1] == "|")]
        elif re.fullmatch(r"-+(\s+-+)+", line):
            spans = [match.span() for match in re.finditer("-+", line)]
            rows = _following(lines, k, lambda text: bool(text.strip()))
            cells = [[text[a:b].strip() for a, b in spans] for text in rows]
        elif k > done and _is_row(line, lines[k - 1]) and "---" not in line:
            count = len(_columns(line))
            same = _following(lines, k - 1, lambda text, n=count: len(_columns(text)) == n)
            cells = [_columns(lines[k - 1]), *map(_columns, same[1:])]
        else:
            continue
        done = k + len(cells)
        title = lines[k - 2] if k > 1 and lines[k - 2].strip() else ""
        values = [[_value(cell) for cell in row] for row in cells[1:]]
        found.append({"title": title, "columns": cells[0], "rows": values})
    return found


def _following(lines: list[str], dashes: int, belongs: Any) -> list[str]:
    end = dashes + 1
    while end < len(lines) and belongs(lines[end]):
        end += 1
    return [lines[dashes - 1], *lines[dashes + 1 : end]]


def _columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def _is_row(line: str, head: str) -> bool:
    """Whether a line has numbers, in as many columns as names stand above."""
    cells, names = _columns(line), _columns(head)
    numbers = sum(isinstance(_value(cell), float) for cell in cells)
    is_named = not any(isinstance(_value(name), float) for name in names)
    return len(cells) == len(names) >= 3 and numbers >= 2 and is_named


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _value(cell: str) -> float | str:
    try:
        value = float(cell)
    except ValueError:
        return cell
    return value if math.isfinite(value) else cell


def machine() -> dict[str, Any]:
    """Processor, devices and versions, and the commit of the sources."""
    import rotor
    from rotor.commands import environment

    found = environment.describe()
    known: dict[str, Any] = {"processor": _processor(), "cpus": found["cpus"]}
    known["devices"] = [
        {key: device.get(key) for key in ("name", "model", "total_bytes")}
        for device in found["devices"]
    ]
    known["versions"] = {"rotor": rotor.__version__, **found["versions"]}
    known["platform"] = f"{platform.system()}, {platform.machine()}"
    known["commit"] = _commit()
    return known


def _commit() -> str | None:
    """The commit; "-dirty" where the sources differ, results and docs aside."""
    sources = ["rotor", "csrc", "models", "setup.py", "benchmarks/*.py"]
    known = []
    for words in (
        ["rev-parse", "--short=10", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no", "--", *sources],
    ):
        try:
            done = subprocess.run(
                ["git", *words], capture_output=True, text=True, check=False, cwd=ROOT
            )
        except OSError:
            return None
        known.append(done.stdout.strip())
    commit, changed = known
    return f"{commit}-dirty" if commit and changed else commit or None


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else None


def read(path: Path) -> dict[str, Run]:
    """The runs of a file by their names; none where there is no file."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is {data.get('format')}, version {data.get('version')}, where {FORMAT}, "
            f"version {VERSION}, was expected: delete it and run the benchmarks again"
        )
    names = [one.name for one in fields(Run)]
    return {one["name"]: Run(**{name: one[name] for name in names}) for one in data["runs"]}


def _text(value: Any, indent: int = 0) -> str:
    """JSON with what fits in a line in one line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or len(flat) + indent <= 120:
        return flat
    if isinstance(value, list):
        parts, ends = [_text(one, indent + 1) for one in value], "[]"
    else:
        parts = [f"{json.dumps(key)}: {_text(one, indent + 1)}" for key, one in value.items()]
        ends = "{}"
    inner = ",\n".join(" " * (indent + 1) + part for part in parts)
    return f"{ends[0]}\n{inner}\n{' ' * indent}{ends[1]}"


def words_of(one: Run) -> str:
    """The command of a run, as one would type it."""
    given = [f"{key}={value}" for key, value in one.environment.items()]
    return " ".join([*given, "python", *one.command])


def about(one: Run) -> str:
    """When, how, where and with which versions a run was taken."""
    known = one.machine
    versions = known.get("versions", {})
    others = [device["model"] for device in known.get("devices", []) if device["name"] != "cpu"]
    parts = [
        known.get("processor") or known.get("platform") or "a machine that is not known",
        *others,
        f"{known['cpus']} cores" if known.get("cpus") else "",
        f"PyTorch {versions['torch']}" if versions.get("torch") else "",
        f"Python {versions['python']}" if versions.get("python") else "",
        f"commit {known['commit']}" if known.get("commit") else "",
        f"{one.seconds:.0f} s" if one.seconds else "",
        f"load {one.load} when it began" if one.load is not None else "",
    ]
    said = ", ".join(part for part in parts if part)
    return f"`{words_of(one)}`, {one.began[:10]}: {said}."


def write(folder: Path, name: str, runs: list[Run]) -> None:
    """Write the page and the file, of what has been run so far."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [{**asdict(one), "tables": tables(one.output)} for one in runs]
    for entry in entries:
        entry["seconds"] = round(entry["seconds"], 1)
        entry["output"] = entry.pop("output")
    text = _text({"format": FORMAT, "version": VERSION, "runs": entries})
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    lines = ["# Benchmarks", "", *listing(runs)]
    for one in runs:
        lines += ["", f"## {one.name}", "", about(one), "", "```text", *one.output, "```"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds else ""


def listing(runs: list[Run]) -> list[str]:
    """A table of runs, in Markdown."""
    return [
        "| entry | question | ended | seconds |",
        "|---|---|---|---:|",
        *[f"| {r.name} | {r.question} | {r.status} | {_rounded(r.seconds)} |" for r in runs],
    ]


def chosen(arguments: argparse.Namespace) -> list[Task]:
    """What is to be run."""
    found = []
    if arguments.gpu:
        question = "the tests that need CUDA"
        found.append(Task("tests/gpu", question, list(GPU_TESTS), GPU_TESTS_LIMIT_S))
        traces = str((RESULTS / "traces").relative_to(ROOT))
        command = ["benchmarks/predictions.py", "--device", "cuda", "--traces", traces]
        question = "which predictions of docs/gpu.md come true, and histories of the allocator"
        found.append(Task("predictions.py", question, command, PREDICTIONS_LIMIT_S))
        # PyTorch captures no graph beside the sanitizer.
        command = [*GPU_TESTS, "-k", "budget_in_another_stream"]
        question = "streams, under CUDA's sanitizer"
        found.append(Task("tests/gpu, sanitized", question, command, 25.0, SANITIZED))
    for one in BENCHMARKS:
        given = one.gpu if arguments.gpu else one.quick if arguments.quick else one.full
        if given is None:
            continue
        limit = one.quick_limit_s if arguments.quick else one.limit_s
        limit = one.gpu_limit_s if arguments.gpu else limit
        environment = {"OMP_NUM_THREADS": "1"} if one.one_thread and not arguments.gpu else {}
        found.append(Task(one.name, one.question, one.command(given), limit, environment))
    if arguments.only:
        found = [task for task in found if _is_meant(task.name, arguments.only, found)]
    return found


def _is_meant(name: str, words: list[str], tasks: list[Task]) -> bool:
    """Whether a word is this name, or is in it and is no other's name."""
    names = {task.name for task in tasks}
    return any(name == word or (word in name and word not in names) for word in words)


def main() -> None:
    """Run them; fails when one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: minutes")
    parser.add_argument("--gpu", action="store_true", help="tests and benchmarks on one device")
    parser.add_argument("--only", nargs="+", default=[], help="names, or parts of them")
    parser.add_argument("--missing", action="store_true", help="what the file lacks, or failed")
    parser.add_argument("--keep", action="store_true", help="keep what the file has until replaced")
    parser.add_argument("--limit", type=float, help="seconds for each script, at most")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    selected = chosen(arguments)
    if not selected:
        parser.error(f"no benchmark has a name with {' or '.join(arguments.only)}")
    if arguments.gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error("--gpu needs CUDA, and PyTorch sees no CUDA device")
    name = "gpu" if arguments.gpu else "quick" if arguments.quick else "full"
    kept: dict[str, Run] = {}
    if arguments.only or arguments.missing or arguments.keep:
        try:
            kept = read(arguments.out / f"{name}.json")
        except ValueError as error:
            parser.error(str(error))
    if arguments.missing:
        done = {one.name for one in kept.values() if one.status == "ok"}
        selected = [task for task in selected if task.name not in done]
    failed = run_tasks(selected, arguments, name, kept)
    print(f"\n{arguments.out / name}.md and .json have the results")
    if failed:
        raise SystemExit("; ".join(failed))


def run_tasks(
    selected: list[Task], arguments: argparse.Namespace, name: str, kept: dict[str, Run]
) -> list[str]:
    """Run what was chosen, write the files after each; what did not end well."""
    everything = argparse.Namespace(**{**vars(arguments), "only": []})
    order = [task.name for task in chosen(everything)]
    known = machine()
    end = time.monotonic() + (GPU_SECONDS if arguments.gpu else float("inf"))
    failed = []
    for task in selected:
        print(f"\n== {task.name}", flush=True)
        left = min(task.limit_s, arguments.limit or task.limit_s, end - time.monotonic())
        done = run(replace(task, limit_s=left), known)
        kept[task.name] = done
        write(arguments.out, name, [kept[one] for one in order if one in kept])
        if done.status != "ok":
            failed.append(f"{task.name} {done.status}")
    return failed


if __name__ == "__main__":
    main()
