"""``rotor report``: a saved plan as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain, read_json
from rotor.commands import FORMAT, VERSION, add_output, add_pages, check_pages, examples, give, tell
from rotor.commands.curve import CurveFacts, curve_text
from rotor.commands.measure import chain_text, graph_text
from rotor.graph import Graph, Program, render, summarise
from rotor.graph.chains import ChainProgram
from rotor.report.html import program_page
from rotor.report.text import chain_rows, table
from rotor.report.trace import write_program_trace
from rotor.units import format_bytes, format_seconds


def add(commands: Any) -> None:
    """Add ``report`` to the commands of a parser."""
    sub = commands.add_parser(
        "report",
        help="a saved plan as text or as a page",
        usage="%(prog)s PLAN.json [--html FILE] [--trace FILE] [options]",
        description="Show the content of a file: a plan (`rotor plan --out`), a chain or a graph "
        "(`rotor measure --out`), a curve. Nothing is run; PyTorch is not needed.",
        epilog=examples(
            "report plan.json",
            "report plan.json --html plan.html",
            "report plan.json --trace trace.json",
        ),
    )
    sub.add_argument("plan", metavar="PLAN.json", help="file that another command has saved")
    add_pages(sub)
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_pages(arguments)
    try:
        data = read_json(Path(arguments.plan))
    except UnicodeDecodeError:
        raise ValueError(f"{arguments.plan} is no text, expected JSON") from None
    except ValueError as error:
        raise ValueError(f"{arguments.plan}: {error}") from None
    kind = data.get("format") if isinstance(data, dict) else None
    if kind == FORMAT:
        data = _of_command(arguments.plan, data)
        kind = data.get("format")
    if not isinstance(kind, str) or kind not in _SHOWN:
        raise ValueError(
            f"{arguments.plan} holds {kind!r}, expected a file of `rotor plan --out` or `rotor "
            f"measure --out`: {', '.join(_SHOWN)}"
        )
    figures, text = _SHOWN[kind](data, arguments)
    if arguments.html is not None:
        tell(arguments, f"{arguments.html} has the page")
    if arguments.trace is not None:
        tell(arguments, f"{arguments.trace} has the trace")
    give(arguments, {"file": arguments.plan, "kind": kind, **figures}, text)
    return 0


def _of_command(path: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the chain, graph, schedule or curve in what a command wrote with ``--json``."""
    if data.get("version") != VERSION:
        raise ValueError(f"{path}: version {data.get('version')!r} is unknown, expected {VERSION}")
    for name in ("curve", "measured", "schedule"):
        found = data.get(name)
        if isinstance(found, dict):
            facts = data.get("plan") if name == "schedule" else data
            return found if name == "measured" else found | {"plan": facts}
    raise ValueError(
        f"{path} is of `rotor {data.get('command')}` and holds no plan, expected the JSON of "
        "curve, measure or plan, of a model with a single plan"
    )


def _known(data: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that `rotor plan` adds to a schedule."""
    known = data.pop("plan", None)
    known = known if isinstance(known, dict) else {}
    return {
        name: known.get(name)
        for name in ("model", "inputs", "device", "limit_bytes", "predicted_bytes")
    }


def _head(known: dict[str, Any]) -> list[list[str]]:
    rows = [["plan", ""]]
    rows += [[name, str(known[name])] for name in ("model", "device") if known[name]]
    if known["inputs"]:
        rows.append(["inputs", "; ".join(map(str, known["inputs"]))])
    for name, key in (("limit", "limit_bytes"), ("peak, predicted", "predicted_bytes")):
        if isinstance(known[key], int):
            rows.append([name, format_bytes(known[key])])
    return rows


def _limit(known: dict[str, Any]) -> int | None:
    return known["limit_bytes"] if isinstance(known["limit_bytes"], int) else None


def _program(data: dict[str, Any], files: argparse.Namespace) -> tuple[dict[str, Any], str]:
    known, program = _known(data), Program.from_dict(data)
    again = int((program.runs > 1).sum())
    fates = {
        fate: summarise(program).bytes_of(fate)
        for fate in ("kept", "offloaded", "dropped", "recomputed")
        if fate != "offloaded" or program.link is not None
    }
    rows = _rows(known, "program", program)
    rows.append(["operations run again", f"{again} of {len(program.graph)}"])
    rows += [[f"{fate} after the forward", format_bytes(size)] for fate, size in fates.items()]
    _write(files, program, rows, [], _limit(known))
    figures = _figures(known, program) | {
        "operations": len(program.graph),
        "operations_again": again,
        **{f"{fate}_bytes": size for fate, size in fates.items()},
    }
    return figures, table(rows)


def _sequence(data: dict[str, Any], files: argparse.Namespace) -> tuple[dict[str, Any], str]:
    known, sequence = _known(data), Sequence.from_dict(data)
    chain = sequence.chain
    if chain is None:
        raise ValueError("the sequence was saved without its chain, so nothing is known of it")
    program = ChainProgram(sequence)
    runs = program.runs.tolist()[: len(chain)]
    again = sum(count > 1 for count in runs)
    rows = _rows(known, "schedule", program)
    rows.append(["stages recomputed", f"{again} of {len(chain)}"])
    stages = [
        [*row, str(count)] for row, count in zip(chain_rows(chain), ["runs", *runs], strict=True)
    ]
    _write(files, program, rows, [("All stages", stages)], _limit(known))
    figures = _figures(known, program) | {
        "stages": len(chain),
        "stages_again": again,
        "operations": str(sequence),
    }
    return figures, f"{table(rows)}\n\n{table(stages)}\n\n{sequence}"


def _rows(known: dict[str, Any], what: str, program: Program) -> list[list[str]]:
    return [
        *_head(known),
        [f"peak of the {what}", format_bytes(program.peak_bytes)],
        ["step, predicted", format_seconds(program.makespan)],
        ["recomputation", f"{program.slowdown - 1:+.1%}"],
    ]


def _figures(known: dict[str, Any], program: Program) -> dict[str, Any]:
    return known | {
        "peak_bytes": program.peak_bytes,
        "seconds": program.makespan,
        "slowdown": program.slowdown,
    }


def _write(
    files: argparse.Namespace, program: Program, rows: Any, tables: Any, limit: int | None
) -> None:
    if files.html is not None:
        page = program_page(program, rows[1:], tables, limit)
        Path(files.html).write_text(page, encoding="utf-8")
    if files.trace is not None:
        write_program_trace(program, files.trace, limit)


def _graph(data: dict[str, Any], files: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _no_trace(files, "graph")
    graph = Graph.from_dict(data)
    if files.html is not None:
        render(graph, files.html)
    figures = {"operations": len(graph), "seconds": graph.total_time}
    return figures, graph_text(graph, 25)


def _no_trace(files: argparse.Namespace, what: str) -> None:
    if files.trace is not None:
        raise ValueError(f"--trace is for plans, and this is a {what}")


def _no_page(files: argparse.Namespace, what: str) -> None:
    if files.html is not None:
        raise ValueError(f"--html is for plans and graphs, and this is a {what}")
    _no_trace(files, what)


def _chain(data: dict[str, Any], files: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _no_page(files, "chain")
    chain = Chain.from_dict(data)
    return {"stages": len(chain), "seconds": chain.ideal_time}, chain_text(chain)


def _curve(data: dict[str, Any], files: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _no_page(files, "curve")
    known = data.pop("plan", None) or {}
    curve = Curve.from_dict(data)
    facts = CurveFacts.from_dict(known)
    marks = [("plain PyTorch", facts.plain_bytes), ("the limit", facts.limit_bytes)]
    curve.marks = tuple([(name, size) for name, size in marks if size is not None])
    figures = {"points": len(curve.bytes), "minimum_bytes": curve.minimum_bytes}
    return figures, curve_text(curve, len(curve.bytes) if not known else 16, facts)


_SHOWN = {
    "rotor.program": _program,
    "rotor.sequence": _sequence,
    "rotor.graph": _graph,
    "rotor.chain": _chain,
    "rotor.curve": _curve,
}
