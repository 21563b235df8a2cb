"""Every benchmark, one after the other, and one page and one file of what they found.

    python benchmarks/run_all.py [--quick] [--only NAME ...] [--out benchmarks/results]
    python benchmarks/run_all.py --gpu

Each script runs in a process of its own, within a time; what it prints is shown, and kept. In the
end `<name>.md` has the machine, the versions and all output, `<name>.json` the same with the tables
as rows of numbers. Times in the tables are ratios within one run, which is what can be compared.
`--gpu` runs the tests that need CUDA, then the benchmarks on one device, in less than ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FORMAT, VERSION = "rotor.benchmarks", 1
GPU_SECONDS = 570.0
FAILED, CUT = "failed", "cut short"


@dataclass(frozen=True)
class Benchmark:
    """One script: its question, its arguments, and how long it may take, in seconds."""

    script: str
    question: str
    quick: tuple[str, ...] = ()
    limit_s: float = 3600.0
    quick_limit_s: float = 180.0
    gpu: tuple[str, ...] | None = None
    gpu_limit_s: float = 60.0
    full: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        """Name it after its script, where it has no name."""
        object.__setattr__(self, "name", self.name or self.script)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The most important ones first: where time ends early, the last ones are left out.
BENCHMARKS = (
    Benchmark(
        "truth.py",
        "chains: limit, prediction, measured peak, equal numbers",
        _words("ResNet-18 --fractions 0.8"),
        gpu=_words("ResNet-18 GPT --device cuda --fractions 0.8 0.6"),
        gpu_limit_s=50,
    ),
    Benchmark(
        "graph_truth.py",
        "graphs: limit, prediction, measured peak, and PyTorch's own at equal peak",
        _words("ResNet-18 --shrink 2 --fractions 0.7 --rounds 3"),
        gpu=_words("ResNet-18 GPT --device cuda --fractions 0.7 0.5 --rounds 5 --stock 1"),
        gpu_limit_s=70,
    ),
    Benchmark(
        "dtr_table.py",
        "the dynamic runtime: peak and time",
        _words("--tiny --rounds 2"),
        gpu=_words("resnet gpt lstm-100 treelstm-64 --device cuda --rounds 3"),
        gpu_limit_s=70,
    ),
    Benchmark(
        "against_segments.py",
        "chains against torch.utils.checkpoint at equal peak",
        _words("ResNet-18 --segments 2 --rounds 3"),
        gpu=_words("ResNet-18 GPT --device cuda --segments 2 3"),
        gpu_limit_s=40,
    ),
    Benchmark(
        "graph_curve.py",
        "whether points of a curve are what a run of them shows",
        _words("ResNet-18 --shrink 2 --points 3 --rounds 3"),
        gpu=_words("ResNet-18 --device cuda --points 5 --rounds 5"),
        gpu_limit_s=40,
    ),
    Benchmark(
        "inductor.py",
        "plans compiled by Inductor beside its own memory budget",
        _words("gpt --fractions 0.7 --budgets 0.6 --rounds 3 --layers 2"),
        gpu=_words("gpt --device cuda --fractions 0.7 --budgets 0.6 --layers 2"),
        gpu_limit_s=60,
    ),
    Benchmark(
        "largest_batch.py",
        "the largest batch, by planning and by trial",
        _words("--only GPT"),
        gpu=_words("--only GPT --device cuda"),
        gpu_limit_s=40,
    ),
    Benchmark(
        "demo.py",
        "one model, one limit, everything",
        _words("--batch 8 --size 128 --steps 3 --fraction 0.9"),
        gpu=_words("--device cuda"),
        gpu_limit_s=30,
    ),
    Benchmark(
        "dtr_overhead.py",
        "what the dynamic runtime costs an operator",
        gpu=_words("--device cuda"),
        gpu_limit_s=20,
    ),
    Benchmark(
        "graph_overhead.py",
        "what emitted code costs beyond the work itself",
        _words("--depths 2 10 --rounds 40"),
        gpu=_words("--device cuda --depths 2 10 --rounds 40"),
        gpu_limit_s=20,
    ),
    Benchmark(
        "dtr_table.py",
        "what each mechanism of the dynamic runtime is worth",
        _words("gpt --ablation --tiny --rounds 1"),
        full=_words("--ablation"),
        name="dtr_table.py --ablation",
    ),
    Benchmark(
        "overhead.py", "what the executor costs beyond the work itself", _words("--rounds 40")
    ),
    Benchmark(
        "planning.py",
        "time and memory of the solvers of chains",
        _words("--exact 20 50 --dense 50"),
    ),
    Benchmark(
        "planner.py",
        "quality and speed of the planner of graphs",
        _words("--seconds 0.5 --sizes 1000 --curve-sizes 200 --graphs none"),
    ),
    Benchmark(
        "sharded.py",
        "a model sharded by FSDP2 on two processes",
        _words("--blocks 2 --width 32 --length 32 --steps 2 --shares 0.8"),
    ),
    Benchmark(
        "overlap.py",
        "how much of DistributedDataParallel's overlap a plan keeps",
        _words("--layers 2 --steps 2"),
    ),
    Benchmark(
        "simulator.py",
        "reading and replaying logs",
        _words("--sizes 1000 10000 --no-oracle"),
    ),
    Benchmark("dtr_simulator.py", "the dynamic runtime beside the simulator"),
)
GPU_TESTS = ("-m", "pytest", "-q", "tests/gpu")
GPU_TESTS_LIMIT_S = 130.0


@dataclass
class Run:
    """What one command printed, how it ended, how long it took."""

    name: str
    question: str
    arguments: list[str]
    status: str = "ok"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)


def run(name: str, question: str, command: list[str], limit_s: float) -> Run:
    """Run a command for at most so many seconds; what it prints is shown and kept."""
    done = Run(name, question, command)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=HERE.parent,
    )

    def end() -> None:
        done.status = CUT
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                done.lines.append(line.rstrip())
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
        return float(cell)
    except ValueError:
        return cell


def machine() -> dict[str, Any]:
    """Processor, devices and versions, and the commit of the tree."""
    import rotor
    from rotor import environment

    found = environment.describe()
    known: dict[str, Any] = {key: found[key] for key in ("platform", "cpus", "devices")}
    known["versions"] = {"rotor": rotor.__version__, **found["versions"]}
    git = ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=HERE)
        known["commit"] = commit.stdout.strip() or None
    except OSError:
        known["commit"] = None
    known["processor"] = _processor()
    return known


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else None


def write(folder: Path, name: str, runs: list[Run], known: dict[str, Any], began: str) -> None:
    """Write the page and the file, of what has been run so far."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "began": began,
        "machine": known,
        "runs": [
            {
                "script": one.name,
                "arguments": one.arguments[1:],
                "status": one.status,
                "seconds": round(one.seconds, 1),
                "tables": tables(one.lines),
                "output": one.lines,
            }
            for one in runs
        ],
    }
    text = json.dumps(data, indent=1, allow_nan=True)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    versions = known.get("versions", {})
    others = [one["model"] for one in known.get("devices", []) if one["name"] != "cpu"]
    hardware = [str(known.get("processor")), *others]
    lines = [
        "# Benchmarks",
        "",
        f"Begun {began}; commit {known.get('commit')}; {'; '.join(hardware)}; "
        + ", ".join(f"{key} {value}" for key, value in versions.items() if value)
        + ".",
        "",
        "| script | question | ended | seconds |",
        "|---|---|---|---|",
        *[f"| {r.name} | {r.question} | {r.status} | {r.seconds:.0f} |" for r in runs],
    ]
    for one in runs:
        lines += ["", f"## {one.name}", "", f"`python {' '.join(one.arguments)}`", ""]
        lines += ["```text", *one.lines, "```"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def chosen(arguments: argparse.Namespace) -> list[tuple[str, str, list[str], float]]:
    """Name, question, command and time of what is to be run."""
    found = []
    if arguments.gpu:
        tests = ("tests/gpu", "the tests that need CUDA", list(GPU_TESTS), GPU_TESTS_LIMIT_S)
        found.append(tests)
    for one in BENCHMARKS:
        given = one.gpu if arguments.gpu else one.quick if arguments.quick else one.full
        if given is None:
            continue
        limit = one.quick_limit_s if arguments.quick else one.limit_s
        limit = one.gpu_limit_s if arguments.gpu else limit
        found.append((one.name, one.question, [f"benchmarks/{one.script}", *given], limit))
    if arguments.only:
        found = [entry for entry in found if any(part in entry[0] for part in arguments.only)]
    return found


def main() -> None:
    """Run them; fails when one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: minutes")
    parser.add_argument("--gpu", action="store_true", help="tests and benchmarks on one device")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--limit", type=float, help="seconds for each script, at most")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    arguments = parser.parse_args()
    selected = chosen(arguments)
    if not selected:
        parser.error(f"no benchmark has a name with {' or '.join(arguments.only)}")
    if arguments.gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error("--gpu needs CUDA, and PyTorch sees no CUDA device")
    name = "gpu" if arguments.gpu else "quick" if arguments.quick else "full"
    began = datetime.now(UTC).isoformat(timespec="seconds")
    known, runs = machine(), []
    end = time.monotonic() + (GPU_SECONDS if arguments.gpu else float("inf"))
    for script, question, command, limit in selected:
        print(f"\n== {script}", flush=True)
        left = min(limit, arguments.limit or limit, end - time.monotonic())
        runs.append(
            run(script, question, command, left)
            if left > 1
            else Run(script, question, command, CUT)
        )
        write(arguments.out, name, runs, known, began)
    print(f"\n{arguments.out / name}.md and .json have the results")
    failed = [f"{one.name} {one.status}" for one in runs if one.status != "ok"]
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
