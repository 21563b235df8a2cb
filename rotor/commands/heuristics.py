"""``rotor heuristics``: the heuristics and runtimes of the simulator."""

from __future__ import annotations

import argparse
from typing import Any

from rotor.commands import add_output, columns, say, write_command_json
from rotor.simrd import heuristics, runtimes


def add(commands: Any) -> None:
    """Add ``heuristics`` to the commands of a parser."""
    sub = commands.add_parser(
        "heuristics", help="list the heuristics and runtimes of the simulator"
    )
    add_output(sub)
    sub.set_defaults(command=_run)


def _data() -> dict[str, Any]:
    known = [(name, heuristics.get(name)) for name in heuristics.names()]
    kept = [(name, runtimes.get(name)) for name in runtimes.names()]
    return {
        "heuristics": [
            {"name": name, "needs": sorted(one.needs), "description": one.description}
            for name, one in known
        ],
        "runtimes": [
            {"name": name, "keeps": sorted(one.serves), "description": one.description}
            for name, one in kept
        ],
    }


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        write_command_json(arguments, _data(), arguments.json)
    if arguments.json == "-":
        return 0
    rows = [["heuristic", "needs", "cost: the least is evicted"]]
    for name in heuristics.names():
        found = heuristics.get(name)
        rows.append([name, ", ".join(sorted(found.needs)) or "-", found.description])
    say(columns(rows))
    rows = [["runtime", "keeps", "what it does"]]
    for name in runtimes.names():
        kept = runtimes.get(name)
        rows.append([name, ", ".join(sorted(kept.serves)) or "-", kept.description])
    say()
    say(columns(rows))
    return 0
