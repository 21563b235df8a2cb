"""``rotor experiment``: experiments on the simulator, and ``run``, which trains models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rotor import experiments
from rotor.commands import add_output, columns, examples, give, number, say, write_json
from rotor.experiments.cells import usable_cpus

__all__ = ["add"]

_LOG_EXPERIMENTS = ("pareto", "ablation", "banishing", "accesses", "static")
_DESCRIBED = {
    "pareto": "seven heuristics against memory",
    "ablation": "the heuristics' parts against memory",
    "banishing": "what a release does, against memory",
    "accesses": "how much metadata heuristics read",
    "linear": "rematerializations of the uniform linear network as it grows",
    "adversarial": "executions of the network built against a heuristic",
    "static": "heuristics against plans made beforehand",
}


def add(commands: Any) -> None:
    """Add ``experiment`` to the commands of a parser."""
    sub = commands.add_parser(
        "experiment",
        help="run an experiment: tables, text and figures",
        description="Run an experiment: one on the simulator, or `run`, which trains models as a "
        "configuration says. What was run before in the same directory is read back.",
        epilog=examples(
            "experiment list",
            "experiment pareto --logs logs/ --out results/",
            "experiment linear --out results/ --formats png",
            "experiment run quick --out results/",
        ),
    )
    kinds = sub.add_subparsers(metavar="EXPERIMENT", required=True)
    for name in experiments.names():
        logs = "--logs logs/ " if name in _LOG_EXPERIMENTS else ""
        kind = kinds.add_parser(
            name,
            help=_DESCRIBED[name],
            description=_sentence(_DESCRIBED[name]),
            epilog=examples(f"experiment {name} {logs}--out results/"),
        )
        kind.add_argument("--out", required=True, metavar="DIR", help="where files are written")
        kind.add_argument(
            "--jobs",
            type=int,
            default=usable_cpus(),
            metavar="N",
            help="processes (default: %(default)s)",
        )
        _add_formats(kind)
        _add_resumption(kind)
        if name in _LOG_EXPERIMENTS:
            kind.add_argument(
                "--logs", nargs="+", required=True, metavar="PATH", help="directories, or logs"
            )
            kind.add_argument(
                "--ratios",
                nargs="+",
                type=number,
                metavar="R",
                help="budgets as parts of what a log takes without one (default: 0.1 0.2 ... 1)",
            )
            kind.add_argument(
                "--overhead-limit",
                type=float,
                metavar="X",
                help="give up beyond X times the time of the log (default: 2)",
            )
        if name in ("pareto", "ablation"):
            kind.add_argument(
                "--trials", type=int, metavar="N", help="of random heuristics (default: 10)"
            )
        if name == "static":
            kind.add_argument(
                "--planners",
                nargs="+",
                metavar="NAME",
                help="default: all of them; an unknown one lists them",
            )
            kind.add_argument(
                "--checkmate-seconds",
                type=float,
                metavar="S",
                help="time limit of Checkmate for each budget (default: 60; 0 for none)",
            )
        if name == "linear":
            kind.add_argument(
                "--sizes",
                nargs="+",
                type=int,
                metavar="N",
                help="operations in each direction (default: 16 32 64 128 256 512)",
            )
            kind.add_argument(
                "--bounds",
                nargs="+",
                metavar="NAME",
                help='memory, such as "2 sqrt(n)"; an unknown one lists them',
            )
            kind.add_argument(
                "--heat-size",
                type=int,
                metavar="N",
                help="of the heat map (default: 200; 0 for none)",
            )
        if name == "adversarial":
            kind.add_argument(
                "--nodes",
                nargs="+",
                type=int,
                metavar="N",
                help="of the network (default: 32 64 128 256 512)",
            )
            kind.add_argument(
                "--paths",
                nargs="+",
                type=int,
                metavar="B",
                help="paths, and storages that memory holds (default: 4 8 16)",
            )
        if name in ("linear", "adversarial", "static"):
            kind.add_argument(
                "--heuristics", nargs="+", metavar="NAME", help="see `rotor heuristics`"
            )
        if name != "static":
            kind.add_argument(
                "--seed", type=int, metavar="N", help="of random heuristics (default: 0)"
            )
        add_output(kind)
        kind.set_defaults(command=_experiment, experiment=name)
    _add_run(kinds)
    listing = kinds.add_parser(
        "list", help="list the experiments, and the configurations that `run` knows by name"
    )
    add_output(listing)
    listing.set_defaults(command=_list)


def _add_formats(kind: Any) -> None:
    kind.add_argument(
        "--formats",
        nargs="*",
        default=["pdf"],
        choices=("pdf", "png", "svg"),
        help="of figures (default: pdf); none for no figures",
    )


def _add_resumption(kind: Any) -> None:
    again = kind.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="read back what was run (default)")
    again.add_argument("--fresh", action="store_true", help="run everything again")


def _add_run(kinds: Any) -> None:
    kind = kinds.add_parser(
        "run",
        help="train models as a configuration says: with and without budgets",
        usage="%(prog)s CONFIG --out DIR [options]",
        description="Train models with and without memory budgets, each input in a process of its "
        "own, and replay their logs. Exits with 1 where the configuration does not report errors "
        "and an input fails.",
        epilog=examples(
            "experiment run quick --out results/ --dry-run",
            "experiment run quick --out results/ --formats png",
            "experiment run configuration.json --out results/ --fresh",
        ),
    )
    kind.add_argument(
        "config", metavar="CONFIG", help="a file, or a name that `rotor experiment list` lists"
    )
    kind.add_argument("--out", required=True, metavar="DIR", help="where files are written")
    _add_formats(kind)
    _add_resumption(kind)
    kind.add_argument("--dry-run", action="store_true", help="say what would run, and end")
    kind.add_argument(
        "--webhook",
        metavar="URL",
        help="post the summary there at the very end, as JSON (default: $ROTOR_WEBHOOK)",
    )
    add_output(kind)
    kind.set_defaults(command=_run, experiment="run")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


_SETTINGS = (
    "logs",
    "ratios",
    "overhead_limit",
    "trials",
    "planners",
    "checkmate_seconds",
    "sizes",
    "bounds",
    "heat_size",
    "nodes",
    "paths",
    "heuristics",
    "seed",
)


def _experiment(arguments: argparse.Namespace) -> int:
    settings = {}
    for name in _SETTINGS:
        value = getattr(arguments, name, None)
        if value is not None:
            settings[name] = tuple(value) if isinstance(value, list) else value
    module = experiments.get(arguments.experiment)
    if arguments.experiment in _sweeps():
        settings["name"] = arguments.experiment
    output = module.run(
        module.Config(**settings),
        Path(arguments.out),
        jobs=arguments.jobs,
        formats=tuple(arguments.formats),
        fresh=arguments.fresh,
    )
    _tell(arguments, output)
    return 0


def _sweeps() -> Iterable[str]:
    from rotor.experiments.sweeps import GROUPS

    return GROUPS


def _run(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration, runs

    config = configuration.load(arguments.config)
    try:
        output = runs.run(
            config,
            Path(arguments.out),
            formats=tuple(arguments.formats),
            fresh=arguments.fresh,
            webhook=arguments.webhook or os.environ.get("ROTOR_WEBHOOK"),
            dry_run=arguments.dry_run,
        )
    except runs.RunError as error:
        sys.stderr.write(f"rotor: {' '.join(str(error).split())}\n")
        return 1
    _tell(arguments, output)
    return 0


def _tell(arguments: argparse.Namespace, output: Any) -> None:
    files = [str(path) for path in output.files]
    give(arguments, {"summary": output.text, "files": files}, "\n".join([output.text, "", *files]))


def _list(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration

    if arguments.json is not None:
        shipped = {name: configuration.load(name) for name in configuration.shipped()}
        described = {name: config.description for name, config in shipped.items()}
        data = {"experiments": _DESCRIBED, "configurations": described}
        write_json(data, arguments.json)
    if arguments.json == "-":
        return 0
    rows = [["rotor experiment", "question"]]
    rows += [[name, text] for name, text in _DESCRIBED.items()]
    say(columns(rows))
    rows = [["rotor experiment run", "models", "what"]]
    for name in configuration.shipped():
        config = configuration.load(name)
        rows.append([name, str(len(config.models)), config.description])
    say()
    say(columns(rows))
    return 0
