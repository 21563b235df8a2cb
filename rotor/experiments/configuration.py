"""Configurations of experiments that train models: read, checked, unfolded into trials.

The format is that of the published prototype's experiments [1]_; docs/experiments.md has every key,
and where this reads a configuration otherwise than the prototype did.

References
----------
.. [1] M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 5.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from rotor.experiments import keys
from rotor.experiments.keys import NO_LIMIT, OPTIONS, fail
from rotor.simrd import heuristics, runtimes
from rotor.units import format_bytes

__all__ = ["Configuration", "Trial", "load", "parse", "shipped", "shipped_text", "unfold"]

MOST_NAMED = 8
"""Keys that a warning names; of more, it says how many."""


@dataclass(frozen=True)
class Trial:
    """One command of a model after unfolding: what its inputs have in common.

    Attributes
    ----------
    model
        Its name.
    command_id
        Number among the model's trials, from 0.
    type
        "baseline", "dtr" or "simrd".
    kind
        "fixed", "ratio" or "param_sweep" for "dtr", else "".
    batch_size
        None for that of the workload.
    budget_bytes
        All memory, the model's and the inputs' included; None for no limit, or where `ratio` gives
        it.
    ratio
        The budget as a part of the baseline's memory; None where it is given in bytes.
    params
        Parameters of the workload.
    options
        The rest by name, as in the configuration; every one has a value.
    path
        Its place in the configuration.
    """

    model: str
    command_id: int
    type: str
    kind: str
    batch_size: int | None
    budget_bytes: int | None
    ratio: float | None
    params: dict[str, Any]
    options: dict[str, Any]
    path: str

    @property
    def workload(self) -> tuple[Any, ...]:
        """Key of the workload: trials with equal keys are compared."""
        return (self.model, self.batch_size, json.dumps(self.params, sort_keys=True))

    def samples(self, budget_bytes: int | None) -> bool:
        """Return whether candidates are sampled in a budget.

        ``no_sampling_below_..`` includes the value itself, as published.
        """
        least_bytes = self.options["no_sampling_below_budget"]
        least_ratio = self.options["no_sampling_below_ratio"]
        if least_bytes is not None and budget_bytes is not None and budget_bytes <= least_bytes:
            return False
        if least_ratio is not None and self.ratio is not None and self.ratio <= least_ratio:
            return False
        return bool(self.options["use_sampling"])

    @property
    def budget_text(self) -> str:
        """The budget for people."""
        if self.type == "baseline":
            return "-"
        if self.ratio is not None:
            return f"{self.ratio:g} x baseline"
        return "no limit" if self.budget_bytes is None else format_bytes(self.budget_bytes)


@dataclass(frozen=True)
class Configuration:
    """A checked configuration; attributes as its keys.

    Attributes
    ----------
    name
        Of the files that are written: that of its file without ``config_`` and ``.json``.
    trials
        Trials to run, in the order of ``models`` and of each model's commands.
    text
        The configuration as it was read, JSON.
    ignored
        Paths of keys that are known and have no meaning here, or none for their command.
    unknown
        Paths of keys that are not known, with the key that may be meant.
    """

    name: str
    description: str
    active: bool
    save_logs: bool
    log_dest: str
    simrd_config: str | None
    sizes: str
    sync_gpu: bool
    dry_run: int
    n_inputs: int
    n_reps: int
    report_errors: bool
    set_seed: bool
    seed: int
    device: str
    models: tuple[str, ...]
    trials: tuple[Trial, ...]
    text: str
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]

    def warn(self, stacklevel: int = 2) -> None:
        """Warn once of what is ignored, and once of what is unknown."""
        for found, words in (
            (self.ignored, "have no meaning here and are ignored"),
            (self.unknown, "are unknown and ignored"),
        ):
            if found:
                more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
                listed = ", ".join(found[:MOST_NAMED])
                warnings.warn(
                    f"{self.name}: keys that {words}: {listed}{more}",
                    UserWarning,
                    stacklevel=stacklevel + 1,
                )


@dataclass
class _Notes:
    """Keys that the configuration has and that nothing reads, as they are found."""

    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def sort_out(
        self,
        found: dict[str, Any],
        path: str,
        known: Collection[str],
        structure: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the known keys; note the others. Hints name `known` ones only."""
        kept = {}
        for key, value in found.items():
            if key in known or key in structure:
                kept[key] = value
            elif key in keys.WITHOUT_MEANING:
                self.ignored.append(f"{path}.{key}")
            elif key not in keys.ALWAYS:
                close = difflib.get_close_matches(key, known, 1)
                hint = f" (did you mean {json.dumps(close[0])}?)" if close else ""
                self.unknown.append(f"{path}.{key}{hint}")
        return kept


def shipped() -> list[str]:
    """Return the names of the configurations that come with the package."""
    names = (entry.name for entry in _folder().iterdir())
    return sorted(short_name(name) for name in names if re.fullmatch(r"config_.*\.json", name))


def _folder() -> Traversable:
    return resources.files("rotor.experiments") / "configurations"


def load(
    source: str | os.PathLike[str], *, models: Mapping[str, Collection[str]] | None = None
) -> Configuration:
    """Return a configuration from a file, or one that is shipped.

    Parameters
    ----------
    source
        A path, or a name out of `shipped`: ``quick``, ``config_quick`` or ``config_quick.json``. A
        file of that name goes first.
    models
        Known workloads, and the parameters of each; None to take any.

    Returns
    -------
    Configuration
        The trials, and all settings.

    Raises
    ------
    ValueError
        The configuration is wrong; the message has the JSON path, what was found there and what
        was expected. Or no shipped one has this name.
    OSError
        The file cannot be read.
    """
    text = os.fspath(source)
    if os.path.basename(text) == text and (Path(text).is_dir() or not Path(text).exists()):
        name = short_name(text)
        if name in shipped():
            return parse(shipped_text(name), name, models=models)
        if not text.endswith(".json"):
            raise ValueError(
                f"no configuration is named {text!r}: expected a path, or one of "
                f"{', '.join(shipped())}"
            )
    path = Path(text)
    try:
        name = short_name(path.name) or "config"
        return parse(path.read_text(encoding="utf-8"), name, models=models)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def short_name(name: str) -> str:
    """Return the name of a configuration by that of its file."""
    return name.removesuffix(".json").removeprefix("config_")


def shipped_text(name: str) -> str:
    """Return the text of a configuration that comes with the package.

    Raises
    ------
    ValueError
        None has this name; the message lists the others.
    """
    if short_name(name) not in shipped():
        raise ValueError(
            f"no configuration is named {name!r}: expected one of {', '.join(shipped())}"
        )
    return (_folder() / f"config_{short_name(name)}.json").read_text(encoding="utf-8")


def parse(
    text: str, name: str, *, models: Mapping[str, Collection[str]] | None = None
) -> Configuration:
    """Return a configuration from JSON text; errors as of `load`.

    Parameters
    ----------
    text
        JSON.
    name
        Of the configuration.
    models
        Known workloads, and the parameters of each; None to take any.

    Returns
    -------
    Configuration
        The trials, and all settings.

    Raises
    ------
    ValueError
        The text is no configuration; the message begins with the path of what is wrong.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from error
    notes = _Notes()
    top = notes.sort_out(_object(data, "$"), "$", keys.TOP, keys.STRUCTURE)
    values = {
        key: check(top[key], f"$.{key}") if key in top else default
        for key, (check, default) in keys.TOP.items()
    }
    chosen = _models(top.get("models"), models)
    settings = _object(top.get("dtr_settings"), "$.dtr_settings")
    defaults = _defaults(settings.get("default", {}), notes)
    for key in ("n_inputs", "n_reps", "dry_run", "save_logs"):
        defaults.setdefault(key, values[key])
    trials: dict[str, list[Trial]] = {}
    for model, commands in settings.items():
        if model == "default":
            continue
        path = f"$.dtr_settings.{model}"
        _check_model(model, f"the key {path}", models)
        if not isinstance(commands, list) or not commands:
            fail(path, commands, "a list of at least one command")
        known = None if models is None else models[model]
        trials[model] = []
        for index, command in enumerate(commands):
            for trial in _trials(model, command, f"{path}[{index}]", defaults, known, notes):
                trials[model].append(trial(command_id=len(trials[model])))
    for index, model in enumerate(chosen):
        if model not in trials:
            raise ValueError(
                f"$.models[{index}] = {json.dumps(model)} has no commands, expected "
                f"$.dtr_settings.{model}, a list of commands"
            )
    return Configuration(
        name=name,
        models=tuple(chosen),
        trials=tuple(trial for model in chosen for trial in trials[model]),
        text=json.dumps(data, indent=1),
        ignored=tuple(notes.ignored),
        unknown=tuple(notes.unknown),
        **values,
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {json.dumps(key)} occurs twice in one object")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON, expected a number (a budget may be "{NO_LIMIT}")')


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        fail(path, value, "an object")
    return value


def _check_model(model: Any, path: str, models: Mapping[str, Collection[str]] | None) -> None:
    if models is not None and model not in models:
        raise ValueError(
            f"{path} names no model: {json.dumps(model)}, expected one of {', '.join(models)}"
        )


def _models(value: Any, models: Mapping[str, Collection[str]] | None) -> list[str]:
    if not isinstance(value, list) or not value:
        fail("$.models", value, "a list of at least one model")
    for index, model in enumerate(value):
        path = f"$.models[{index}]"
        keys.text(model, path)
        _check_model(model, path, models)
        if model in value[:index]:
            fail(path, model, "each model once")
    return value


def _defaults(value: Any, notes: _Notes) -> dict[str, Any]:
    path = "$.dtr_settings.default"
    known = [key for key in OPTIONS if key != "log"]
    found = notes.sort_out(_object(value, path), path, known)
    return {key: OPTIONS[key].check(found[key], f"{path}.{key}") for key in found}


def unfold(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return every combination of the values of the fields that are lists.

    The last list varies fastest. A list in a list is a value.

    Examples
    --------
    >>> list(unfold({"depth": [1, 2], "batch_size": 3}))
    [{'depth': 1, 'batch_size': 3}, {'depth': 2, 'batch_size': 3}]
    """
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    for combination in itertools.product(*values):
        yield dict(zip(fields, combination, strict=True))


def _trials(
    model: str,
    value: Any,
    path: str,
    defaults: dict[str, Any],
    known: Collection[str] | None,
    notes: _Notes,
) -> Iterator[Callable[..., Trial]]:
    command = notes.sort_out(_object(value, path), path, OPTIONS, keys.COMMAND)
    kind_of_run = keys.named(lambda: keys.TYPES)(command.get("type"), f"{path}.type")
    kind = _kind(command, path, kind_of_run)
    budgets = _budgets(command, path, kind_of_run, kind)
    fields, places = _fields(command, path, kind_of_run, known, notes)
    for combination in unfold(fields):
        options = {
            key: defaults.get(key, option.default)
            for key, option in OPTIONS.items()
            if key != "batch_size" and kind_of_run in option.types
        }
        batch_size = defaults.get("batch_size")
        params = {}
        for key, chosen in combination.items():
            if key == "batch_size":
                batch_size = OPTIONS[key].check(chosen, places[key])
            elif key in OPTIONS:
                options[key] = OPTIONS[key].check(chosen, places[key])
            else:
                params[key] = chosen
        if kind_of_run == "simrd":
            _check_serves(options, path)
        for budget_bytes, ratio in budgets:
            yield functools.partial(
                Trial,
                model=model,
                type=kind_of_run,
                kind=kind,
                batch_size=batch_size,
                budget_bytes=budget_bytes,
                ratio=ratio,
                params=params,
                options=options,
                path=path,
            )


def _check_serves(options: dict[str, Any], path: str) -> None:
    runtime = runtimes.get(options["runtime"])
    try:
        heuristics.check(options["heuristic"], runtime.serves, runtime.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _kind(command: dict[str, Any], path: str, kind_of_run: str) -> str:
    if kind_of_run == "dtr" or "kind" in command:
        kind = keys.named(lambda: keys.KINDS)(command.get("kind"), f"{path}.kind")
        return kind if kind_of_run == "dtr" else ""
    return ""


def _budgets(
    command: dict[str, Any], path: str, kind_of_run: str, kind: str
) -> list[tuple[int | None, float | None]]:
    """Return the pairs of bytes and ratio, of which one is None or (no limit) both are."""
    wanted = {"baseline": (), "fixed": ("memory_budget",), "ratio": ("ratio",)}.get(
        kind or kind_of_run, ("memory_budget", "ratio")
    )
    word = kind or kind_of_run
    for key in ("memory_budget", "ratio"):
        if key in command and key not in wanted:
            fail(f"{path}.{key}", command[key], f"none: the command is {json.dumps(word)}")
    given = [key for key in wanted if key in command]
    if not wanted:
        return [(None, None)]
    if not given:
        raise ValueError(
            f"{path} has no {' and no '.join(wanted)}, expected a list of at least one: the "
            f"command is {json.dumps(word)}"
        )
    found: list[tuple[int | None, float | None]] = []
    for key in given:
        values = command[key] if isinstance(command[key], list) else [command[key]]
        if not values:
            fail(f"{path}.{key}", command[key], "a list of at least one")
        for index, value in enumerate(values):
            place = f"{path}.{key}[{index}]"
            if key == "ratio":
                found.append((None, keys.ratio(value, place)))
            else:
                found.append((keys.budget(value, place), None))
    return found


def _fields(
    command: dict[str, Any],
    path: str,
    kind_of_run: str,
    known: Collection[str] | None,
    notes: _Notes,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is unfolded, options and parameters of the model, and the place of each."""
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    inner = f"{path}.extra_params"
    extra = _object(command.get("extra_params", {}), inner)
    for key in keys.COMMAND:
        if key in extra:
            raise ValueError(f"{inner}.{key} is in extra_params, expected {path}.{key}")
    extra = notes.sort_out(extra, inner, extra if known is None else [*known, *OPTIONS])
    outer = {key: command[key] for key in command if key in OPTIONS}
    for base, source in ((path, outer), (inner, extra)):
        for key, value in source.items():
            place = f"{base}.{key}"
            if key in keys.ALWAYS or key in keys.WITHOUT_MEANING:
                continue
            if key in fields:
                raise ValueError(f"{place} is in {places[key]} too, expected one of them")
            option = OPTIONS.get(key)
            if option is not None and kind_of_run not in option.types:
                notes.ignored.append(f"{place} (of a {kind_of_run} command)")
                continue
            if isinstance(value, list) and not value:
                fail(place, value, "a value, or a list of at least one")
            if option is None and isinstance(value, dict):
                fail(place, value, "a number, text, true, false, or a list of these")
            fields[key], places[key] = value, place
    return fields, places
