"""``rotor experiment``: experiments on the simulator, and ``run``, which trains models."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rotor import experiments
from rotor.commands import (
    add_output,
    columns,
    examples,
    give,
    number,
    say,
    tell,
    write_command_json,
)
from rotor.experiments.cells import usable_cpus

_LOG_EXPERIMENTS = ("pareto", "ablation", "banishing", "accesses", "static")
_DESCRIBED = {
    "pareto": "seven heuristics against memory",
    "ablation": "the heuristics' parts against memory",
    "banishing": "the effect of a release, against memory",
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
        "configuration says. Finished parts in the same directory are read back.",
        epilog=examples(
            "experiment list",
            "experiment all",
            "experiment pareto --logs logs/ --out results/",
            "experiment linear --out results/ --formats png",
            "experiment run quick --out results/",
        ),
    )
    kinds = sub.add_subparsers(metavar="EXPERIMENT", required=True)
    for name in experiments.names():
        logs = " --logs logs/" if name in _LOG_EXPERIMENTS else ""
        kind = kinds.add_parser(
            name,
            help=_DESCRIBED[name],
            description=_sentence(_DESCRIBED[name]),
            epilog=examples(f"experiment {name}", f"experiment {name}{logs} --out results/"),
        )
        _add_options(kind, (name,))
        kind.set_defaults(command=_experiment, experiment=name)
    kind = kinds.add_parser(
        "all",
        help="all of these, with their defaults: every figure of the simulated experiments",
        description="Run all experiments on the simulator, one after the other. Options go to the "
        "experiments that have them.",
        epilog=examples("experiment all --out results/"),
    )
    _add_options(kind, tuple(experiments.names()), few=True)
    kind.set_defaults(command=_all, experiment="all")
    _add_run(kinds)
    _add_copy(kinds)
    listing = kinds.add_parser(
        "list",
        help="list the experiments, and the configurations and logs that come with the package",
    )
    add_output(listing)
    listing.set_defaults(command=_list)


def _add_options(kind: Any, names: tuple[str, ...], *, few: bool = False) -> None:
    """Add the options of experiments; `few`: the options that several of them share."""
    _add_out(kind)
    kind.add_argument(
        "--jobs",
        type=int,
        default=usable_cpus(),
        metavar="N",
        help="processes (default: %(default)s)",
    )
    _add_formats(kind)
    _add_resumption(kind)

    def add(*those: str, shared: bool = False, option: str, **details: Any) -> None:
        if any(name in those for name in names) and (shared or not few):
            kind.add_argument(option, **details)

    add(
        *_LOG_EXPERIMENTS,
        shared=True,
        option="--logs",
        nargs="+",
        metavar="PATH",
        help="directories, logs, or lists of logs (default: the shipped logs)",
    )
    add(
        *_LOG_EXPERIMENTS,
        shared=True,
        option="--ratios",
        nargs="+",
        type=number,
        metavar="R",
        help="budgets as fractions of a log's memory without a budget (default: 0.1 0.2 ... 1)",
    )
    add(
        *_LOG_EXPERIMENTS,
        shared=True,
        option="--overhead-limit",
        type=float,
        metavar="X",
        help="stop beyond X times the time of the log (default: 2)",
    )
    add(
        *("pareto", "ablation"),
        shared=True,
        option="--trials",
        type=int,
        metavar="N",
        help="seeds of random heuristics (default: 10)",
    )
    add(
        "static",
        option="--planners",
        nargs="+",
        metavar="NAME",
        help="default: all of them; an unknown one lists them",
    )
    add(
        "static",
        shared=True,
        option="--checkmate-seconds",
        type=float,
        metavar="S",
        help="time limit of Checkmate for each budget (default: 60; 0 for none)",
    )
    add(
        "linear",
        option="--sizes",
        nargs="+",
        type=int,
        metavar="N",
        help="operations in each direction (default: 16 32 64 128 256 512)",
    )
    add(
        "linear",
        option="--bounds",
        nargs="+",
        metavar="NAME",
        help='memory, such as "2 sqrt(n)"; an unknown one lists them',
    )
    add(
        "linear",
        option="--heat-size",
        type=int,
        metavar="N",
        help="size of the heat map (default: 200; 0 for none)",
    )
    add(
        "adversarial",
        option="--nodes",
        nargs="+",
        type=int,
        metavar="N",
        help="nodes of the network (default: 32 64 128 256 512)",
    )
    add(
        "adversarial",
        option="--paths",
        nargs="+",
        type=int,
        metavar="B",
        help="paths, and storages that memory holds (default: 4 8 16)",
    )
    add(
        *("linear", "adversarial", "static"),
        option="--heuristics",
        nargs="+",
        metavar="NAME",
        help="see `rotor heuristics`",
    )
    add(
        *(name for name in experiments.names() if name != "static"),
        shared=True,
        option="--seed",
        type=int,
        metavar="N",
        help="seed of random heuristics (default: 0)",
    )
    add_output(kind)


def _add_out(kind: Any) -> None:
    kind.add_argument(
        "--out",
        default="results",
        metavar="DIR",
        help="where files are written (default: %(default)s)",
    )


def _add_formats(kind: Any) -> None:
    kind.add_argument(
        "--formats",
        nargs="*",
        choices=("pdf", "png", "svg"),
        help="formats of figures (default: pdf if matplotlib is installed); none for no figures",
    )


def _add_resumption(kind: Any) -> None:
    again = kind.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="read back finished parts (default)")
    again.add_argument("--fresh", action="store_true", help="run everything again")


def _add_run(kinds: Any) -> None:
    kind = kinds.add_parser(
        "run",
        help="train models as a configuration says: with and without budgets",
        usage="%(prog)s CONFIG [--out DIR] [options]",
        description="Train models with and without memory budgets, each input in a process of its "
        "own, and replay their logs. Exits with 1 if an input fails and the configuration does not "
        "report errors.",
        epilog=examples(
            "experiment run config_get_log.json --dry-run",
            "experiment run quick --out results/ --formats png",
            "experiment run configuration.json --out results/ --fresh",
        ),
    )
    kind.add_argument(
        "config", metavar="CONFIG", help="a file, or a name that `rotor experiment list` lists"
    )
    _add_out(kind)
    _add_formats(kind)
    _add_resumption(kind)
    kind.add_argument(
        "--dry-run",
        action="store_true",
        help="list the runs, and end; the device need not exist",
    )
    kind.add_argument(
        "--webhook",
        metavar="URL",
        help="post the summary to this address at the end, as JSON (default: $ROTOR_WEBHOOK)",
    )
    add_output(kind)
    kind.set_defaults(command=_run, experiment="run")


def _add_copy(kinds: Any) -> None:
    kind = kinds.add_parser(
        "copy",
        help="copy a configuration that comes with the package, to change it",
        description="Copy a configuration that comes with the package to a file, to change it and "
        "run it by its path.",
        epilog=examples("experiment copy quick", "experiment copy run_graphs mine.json"),
    )
    kind.add_argument("name", metavar="NAME", help="a name that `rotor experiment list` lists")
    kind.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a file or a folder (default: config_NAME.json in the current folder)",
    )
    kind.add_argument("--force", action="store_true", help="overwrite the file")
    add_output(kind)
    kind.set_defaults(command=_copy)


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


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(arguments, name, None)
        if value is not None:
            settings[name] = tuple(value) if isinstance(value, list) else value
    return settings


def _formats(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the formats that were asked for; else pdf, or none without matplotlib."""
    if arguments.formats is not None:
        return tuple(arguments.formats)
    if find_spec("matplotlib") is not None:
        return ("pdf",)
    tell(arguments, "no figures are drawn, since matplotlib is not installed; tables are written")
    return ()


def _experiment(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    module = experiments.get(arguments.experiment)
    if arguments.experiment in _LOG_EXPERIMENTS:
        settings.setdefault("logs", (str(experiments.shipped_logs()),))
    if arguments.experiment in _sweeps():
        settings["name"] = arguments.experiment
    output = module.run(
        module.Config(**settings),
        Path(arguments.out),
        jobs=arguments.jobs,
        formats=_formats(arguments),
        fresh=arguments.fresh,
    )
    _tell(arguments, output)
    return 0


def _all(arguments: argparse.Namespace) -> int:
    found = {}
    for name, output in experiments.run_all(
        Path(arguments.out),
        jobs=arguments.jobs,
        formats=_formats(arguments),
        fresh=arguments.fresh,
        **_settings(arguments),
    ):
        data, text = _told(output)
        found[name] = data
        if arguments.json != "-":
            say(f"{text}\n")
    if arguments.json is not None:
        write_command_json(arguments, {"results": found}, arguments.json)
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
            formats=() if arguments.dry_run else _formats(arguments),
            fresh=arguments.fresh,
            webhook=arguments.webhook or os.environ.get("ROTOR_WEBHOOK"),
            dry_run=arguments.dry_run,
            tell=functools.partial(tell, arguments),
        )
    except runs.RunError as error:
        sys.stderr.write(f"rotor: {' '.join(str(error).split())}\n")
        return 1
    _tell(arguments, output)
    return 0


def _told(output: Any) -> tuple[dict[str, Any], str]:
    files = [str(path) for path in output.files]
    return {"summary": output.text, "files": files}, "\n".join([output.text, "", *files])


def _tell(arguments: argparse.Namespace, output: Any) -> None:
    give(arguments, *_told(output))


def _copy(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration

    text = configuration.shipped_text(arguments.name)
    short = arguments.name.removesuffix(".json").removeprefix("config_")
    path = Path(arguments.file or ".")
    if path.is_dir():
        path /= f"config_{short}.json"
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} exists: name another file, or overwrite it with --force")
    path.write_text(text, encoding="utf-8")
    give(arguments, {"file": str(path)}, str(path))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration
    from rotor.experiments.output import find_logs

    logs = find_logs([experiments.shipped_logs()])
    if arguments.json is not None:
        shipped = {name: configuration.load(name) for name in configuration.shipped()}
        described = {name: config.description for name, config in shipped.items()}
        data: dict[str, Any] = {"experiments": _DESCRIBED, "configurations": described}
        data["logs"] = {str(log.path): log.title for log in logs}
        write_command_json(arguments, data, arguments.json)
    if arguments.json == "-":
        return 0
    rows = [["rotor experiment", "question"]]
    rows += [[name, text] for name, text in _DESCRIBED.items()]
    rows.append(["all", "all of these, one after the other"])
    say(columns(rows))
    rows = [["rotor experiment run", "models", "what"]]
    for name in configuration.shipped():
        config = configuration.load(name)
        rows.append([name, str(len(config.models)), config.description])
    say()
    say(columns(rows))
    say()
    say(columns([["log", "what"], *[[log.path.name, log.title] for log in logs]]))
    say(f"in {experiments.shipped_logs()}")
    return 0
