"""``rotor experiment``: experiments on the simulator, and ``run``, which trains models."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rotor import experiments
from rotor.commands import (
    add_options,
    add_output,
    columns,
    examples,
    give,
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
            description=f"{_DESCRIBED[name][0].upper()}{_DESCRIBED[name][1:]}.",
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
    listing = kinds.add_parser(
        "list",
        help="list the experiments, and the configurations and logs that come with the package",
    )
    add_output(listing)
    listing.set_defaults(command=_list)


_OPTIONS: tuple[tuple[tuple[str, ...], bool, dict[str, str]], ...] = (
    (
        _LOG_EXPERIMENTS,
        True,
        {
            "--logs PATH ...": "directories, logs, or lists of logs (default: the shipped logs)",
            "--ratios R ...": "budgets as fractions of a log's memory without a budget (default: "
            "0.1 0.2 ... 1)",
            "--overhead-limit X": "stop beyond X times the time of the log (default: 2)",
        },
    ),
    (("pareto", "ablation"), True, {"--trials N": "seeds of random heuristics (default: 10)"}),
    (
        ("static",),
        False,
        {"--planners NAME ...": "default: all of them; an unknown one lists them"},
    ),
    (
        ("static",),
        True,
        {
            "--checkmate-seconds S": "time limit of Checkmate for each budget (default: 60; 0 for "
            "none)"
        },
    ),
    (
        ("linear",),
        False,
        {
            "--sizes N ...": "operations in each direction (default: 16 32 64 128 256 512)",
            "--bounds NAME ...": 'memory, such as "2 sqrt(n)"; an unknown one lists them',
            "--heat-size N": "size of the heat map (default: 200; 0 for none)",
        },
    ),
    (
        ("adversarial",),
        False,
        {
            "--nodes N ...": "nodes of the network (default: 32 64 128 256 512)",
            "--paths B ...": "paths, and storages that memory holds (default: 4 8 16)",
        },
    ),
    (
        ("linear", "adversarial", "static"),
        False,
        {"--heuristics NAME ...": "see `rotor heuristics`"},
    ),
    (
        tuple(name for name in _DESCRIBED if name != "static"),
        True,
        {"--seed N": "seed of random heuristics (default: 0)"},
    ),
)
"""Experiments, whether `all` has their options too, and the options with their help."""


def _add_options(kind: Any, names: tuple[str, ...], *, few: bool = False) -> None:
    """Add the options of experiments; `few`: the options that several of them share."""
    _add_output(kind, {"--jobs N": "processes (default: %(default)s)"})
    for those, is_shared, options in _OPTIONS:
        if any(name in those for name in names) and (is_shared or not few):
            add_options(kind, options)
    add_output(kind)


def _add_output(kind: Any, more: dict[str, str]) -> None:
    """Add ``--out``, more options, and those on figures and on finished parts."""
    out = {"--out DIR": "where files are written (default: %(default)s)"}
    add_options(kind, out | more, out="results", jobs=usable_cpus())
    kind.add_argument(
        "--formats",
        nargs="*",
        choices=("pdf", "png", "svg"),
        help="formats of figures (default: pdf if matplotlib is installed); none for no figures",
    )
    again = {"--resume": "read back finished parts (default)", "--fresh": "run everything again"}
    add_options(kind.add_mutually_exclusive_group(), again)


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
    _add_output(kind, {"config CONFIG": "a file, or a name that `rotor experiment list` lists"})
    options = {
        "--dry-run": "list the runs, and end; the device need not exist",
        "--webhook URL": "post the summary to this address at the end, as JSON (default: "
        "$ROTOR_WEBHOOK)",
    }
    add_options(kind, options)
    add_output(kind)
    kind.set_defaults(command=_run, experiment="run")
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


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of experiments that are given, by their names in configurations."""
    settings: dict[str, Any] = {}
    for usage in (usage for _, _, options in _OPTIONS for usage in options):
        name = usage.partition(" ")[0].lstrip("-").replace("-", "_")
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
    from rotor.experiments.sweeps import GROUPS

    if arguments.experiment in GROUPS:
        settings["name"] = arguments.experiment
    output = module.run(
        module.Config(**settings),
        Path(arguments.out),
        jobs=arguments.jobs,
        formats=_formats(arguments),
        fresh=arguments.fresh,
    )
    give(arguments, *_told(output))
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
    give(arguments, *_told(output))
    return 0


def _told(output: Any) -> tuple[dict[str, Any], str]:
    files = [str(path) for path in output.files]
    return {"summary": output.text, "files": files}, "\n".join([output.text, "", *files])


def _copy(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration

    text = configuration.shipped_text(arguments.name)
    path = Path(arguments.file or ".")
    if path.is_dir():
        path /= f"config_{configuration.short_name(arguments.name)}.json"
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} exists: name another file, or overwrite it with --force")
    path.write_text(text, encoding="utf-8")
    give(arguments, {"file": str(path)}, str(path))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from rotor.experiments import configuration
    from rotor.experiments.output import find_logs

    logs = find_logs([experiments.shipped_logs()])
    shipped = [(name, configuration.load(name)) for name in configuration.shipped()]
    data = {
        "experiments": _DESCRIBED,
        "configurations": {name: config.description for name, config in shipped},
        "logs": {str(log.path): log.title for log in logs},
    }
    questions = [["rotor experiment", "question"], *map(list, _DESCRIBED.items())]
    questions.append(["all", "all of these, one after the other"])
    rows = [["rotor experiment run", "models", "what"]]
    rows += [[name, str(len(config.models)), config.description] for name, config in shipped]
    named = columns([["log", "what"], *[[log.path.name, log.title] for log in logs]])
    where = f"in {experiments.shipped_logs()}"
    give(arguments, data, f"{columns(questions)}\n\n{columns(rows)}\n\n{named}\n{where}")
    return 0
