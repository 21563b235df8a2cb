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
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from rotor.simrd import heuristics, runtimes
from rotor.units import format_bytes, parse_bytes

__all__ = ["Configuration", "Trial", "load", "parse", "shipped", "unfold"]

TYPES = ("baseline", "dtr", "simrd")
KINDS = ("fixed", "ratio", "param_sweep")
NO_LIMIT = "inf"
"""A memory budget without a limit."""

_Check = Callable[[Any, str], Any]


def _fail(path: str, found: object, expected: str) -> NoReturn:
    raise ValueError(f"{path} = {json.dumps(found)}, expected {expected}")


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        _fail(path, value, "true or false")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        _fail(path, value, "text")
    return value


def _whole(lowest: int) -> Callable[[Any, str], int]:
    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            _fail(path, value, f"a whole number of {lowest} or more")
        return value

    return check


def _above(lowest: float, meaning: str) -> Callable[[Any, str], float]:
    def check(value: Any, path: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest < value < math.inf:
            _fail(path, value, f"a number above {lowest:g}: {meaning}")
        return float(value)

    return check


def _budget(value: Any, path: str) -> int | None:
    """Bytes, or None for no limit."""
    if value == NO_LIMIT:
        return None
    try:
        return parse_bytes(value)
    except (TypeError, ValueError):
        _fail(path, value, f'bytes, text such as "700MiB", or "{NO_LIMIT}" for no limit')


def _named(known: Callable[[], Iterable[str]]) -> Callable[[Any, str], str]:
    def check(value: Any, path: str) -> str:
        names = list(known())
        if not isinstance(value, str) or value not in names:
            _fail(path, value, f"one of {', '.join(names)}")
        return value

    return check


_ratio = _above(0, "a part of the memory of the baseline")
_seconds = _above(0, "seconds")


@dataclass(frozen=True)
class _Option:
    """What a command, its ``extra_params`` or the defaults may set for a trial."""

    check: _Check
    default: Any
    types: tuple[str, ...]


_RUNS = ("baseline", "dtr")
_OPTIONS = {
    "batch_size": _Option(_whole(1), None, TYPES),
    "timeout": _Option(_seconds, 600.0, _RUNS),
    "attempt_timeout": _Option(_seconds, 120.0, _RUNS),
    "max_retries": _Option(_whole(0), 2, _RUNS),
    "retry_on_error": _Option(_flag, False, _RUNS),
    "ignore_small_tensors": _Option(_flag, True, ("dtr", "simrd")),
    "use_sampling": _Option(_flag, True, ("dtr", "simrd")),
    "no_sampling_below_budget": _Option(_budget, None, ("dtr", "simrd")),
    "no_sampling_below_ratio": _Option(_ratio, None, ("dtr", "simrd")),
    "heuristic": _Option(_named(heuristics.names), "DTREqClass", ("dtr", "simrd")),
    "runtime": _Option(_named(runtimes.names), "V2EagerOptimized", ("simrd",)),
    "overhead_limit": _Option(_above(1, "times the time of the log"), 10.0, ("simrd",)),
    "save_logs": _Option(_flag, None, ("dtr",)),
    "log": _Option(_text, None, ("simrd",)),
}
_IGNORED_OPTIONS = ("use_profiling",)
_TOP: dict[str, tuple[_Check, Any]] = {
    "description": (_text, ""),
    "active": (_flag, True),
    "save_logs": (_flag, False),
    "log_dest": (_text, "logs"),
    "sync_gpu": (_flag, False),
    "dry_run": (_flag, False),
    "n_inputs": (_whole(1), 1),
    "n_reps": (_whole(1), 1),
    "report_errors": (_flag, True),
    "set_seed": (_flag, False),
    "seed": (_whole(0), 0),
    "device": (_text, "auto"),
}
_IGNORED_TOP = ("dtr_torch_cmd", "notify")
_STRUCTURE = ("models", "dtr_settings")
_COMMAND = ("type", "kind", "memory_budget", "ratio", "extra_params")


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
        Where it stands in the configuration.
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
        """What tells the workload from others: trials that agree in it are compared."""
        return (self.model, self.batch_size, json.dumps(self.params, sort_keys=True))

    def samples(self, budget_bytes: int | None) -> bool:
        """Whether candidates are sampled in a budget, ``no_sampling_below_..`` considered."""
        least_bytes = self.options["no_sampling_below_budget"]
        least_ratio = self.options["no_sampling_below_ratio"]
        if least_bytes is not None and budget_bytes is not None and budget_bytes < least_bytes:
            return False
        if least_ratio is not None and self.ratio is not None and self.ratio < least_ratio:
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
        What is to be run, in the order of ``models`` and of each model's commands.
    text
        The configuration as it was read, JSON.
    ignored
        Paths of keys of the prototype that have no meaning here.
    """

    name: str
    description: str
    active: bool
    save_logs: bool
    log_dest: str
    sync_gpu: bool
    dry_run: bool
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


def shipped() -> list[str]:
    """Names of the configurations that come with the package."""
    folder = resources.files("rotor.experiments") / "configurations"
    names = (entry.name for entry in folder.iterdir())
    return sorted(
        name.removeprefix("config_").removesuffix(".json")
        for name in names
        if name.startswith("config_") and name.endswith(".json")
    )


def load(
    source: str | os.PathLike[str], *, models: Mapping[str, Collection[str]] | None = None
) -> Configuration:
    """A configuration from a file, or one that is shipped.

    Parameters
    ----------
    source
        A path, or a name out of `shipped`. A name that has no separator and no ending is a name.
    models
        Known workloads, and the parameters of each; None to take any.

    Raises
    ------
    ValueError
        The configuration is wrong; the message has the JSON path, what was found there and what
        was expected. Or no shipped one has this name.
    OSError
        The file cannot be read.
    """
    text = os.fspath(source)
    if os.path.basename(text) == text and not text.endswith(".json") and not Path(text).exists():
        if text not in shipped():
            raise ValueError(
                f"no configuration is named {text!r}: expected a path, or one of "
                f"{', '.join(shipped())}"
            )
        file = resources.files("rotor.experiments") / "configurations" / f"config_{text}.json"
        return parse(file.read_text(encoding="utf-8"), text, models=models)
    path = Path(text)
    name = path.name.removesuffix(".json").removeprefix("config_") or "config"
    try:
        return parse(path.read_text(encoding="utf-8"), name, models=models)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(
    text: str, name: str, *, models: Mapping[str, Collection[str]] | None = None
) -> Configuration:
    """A configuration from JSON text; errors as of `load`.

    Parameters
    ----------
    text
        JSON.
    name
        Of the configuration.
    models
        Known workloads, and the parameters of each; None to take any.

    Raises
    ------
    ValueError
        The text is no configuration; the message begins with the path of what is wrong.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from error
    top = _object(data, "$")
    _check_keys(top, "$", [*_TOP, *_STRUCTURE], _IGNORED_TOP)
    values = {
        key: check(top[key], f"$.{key}") if key in top else default
        for key, (check, default) in _TOP.items()
    }
    chosen = _models(top.get("models"), models)
    settings = _object(top.get("dtr_settings"), "$.dtr_settings")
    defaults = _defaults(settings.get("default", {}))
    ignored = [f"$.{key}" for key in _IGNORED_TOP if key in top]
    trials: dict[str, list[Trial]] = {}
    for model, commands in settings.items():
        if model == "default":
            continue
        path = f"$.dtr_settings.{model}"
        _check_model(model, f"the key {path}", models)
        if not isinstance(commands, list) or not commands:
            _fail(path, commands, "a list of at least one command")
        trials[model] = []
        for index, command in enumerate(commands):
            place = f"{path}[{index}]"
            ignored += _ignored_in(command, place)
            if models is not None:
                _check_params(command, place, models[model])
            found = _trials(model, command, place, defaults, bool(values["save_logs"]))
            for trial in found:
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
        ignored=tuple(ignored),
        **values,
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {json.dumps(key)} stands twice in one object")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON, expected a number (a budget may be "{NO_LIMIT}")')


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(path, value, "an object")
    return value


def _check_keys(
    found: dict[str, Any], path: str, known: Collection[str], ignored: Collection[str] = ()
) -> None:
    for key in found:
        if key not in known and key not in ignored:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {json.dumps(close[0])}?" if close else "."
            raise ValueError(
                f"{path} has an unknown key {json.dumps(key)}{hint} Known keys: {', '.join(known)}"
            )


def _check_model(model: Any, path: str, models: Mapping[str, Collection[str]] | None) -> None:
    if models is not None and model not in models:
        raise ValueError(
            f"{path} names no model: {json.dumps(model)}, expected one of {', '.join(models)}"
        )


def _models(value: Any, models: Mapping[str, Collection[str]] | None) -> list[str]:
    if not isinstance(value, list) or not value:
        _fail("$.models", value, "a list of at least one model")
    for index, model in enumerate(value):
        path = f"$.models[{index}]"
        _text(model, path)
        _check_model(model, path, models)
        if model in value[:index]:
            _fail(path, model, "each model once")
    return value


def _defaults(value: Any) -> dict[str, Any]:
    path = "$.dtr_settings.default"
    found = _object(value, path)
    known = [key for key in _OPTIONS if key != "log"]
    _check_keys(found, path, known, _IGNORED_OPTIONS)
    return {key: _OPTIONS[key].check(found[key], f"{path}.{key}") for key in known if key in found}


def _ignored_in(command: Any, path: str) -> list[str]:
    if not isinstance(command, dict):
        return []
    extra = command.get("extra_params")
    found = [f"{path}.{key}" for key in _IGNORED_OPTIONS if key in command]
    if isinstance(extra, dict):
        found += [f"{path}.extra_params.{key}" for key in _IGNORED_OPTIONS if key in extra]
    return found


def _check_params(command: Any, path: str, known: Collection[str]) -> None:
    extra = command.get("extra_params") if isinstance(command, dict) else None
    if isinstance(extra, dict):
        _check_keys(
            extra, f"{path}.extra_params", [*known, *_OPTIONS], [*_IGNORED_OPTIONS, *_COMMAND]
        )


def unfold(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of the fields that are lists.

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
    model: str, value: Any, path: str, defaults: dict[str, Any], saves_logs: bool
) -> Iterator[Callable[..., Trial]]:
    command = _object(value, path)
    _check_keys(command, path, [*_COMMAND, *_OPTIONS], _IGNORED_OPTIONS)
    kind_of_run = _named(lambda: TYPES)(command.get("type"), f"{path}.type")
    kind = _kind(command, path, kind_of_run)
    budgets = _budgets(command, path, kind_of_run, kind)
    fields, places = _fields(command, path, kind_of_run)
    for combination in unfold(fields):
        options = {
            key: defaults.get(key, option.default)
            for key, option in _OPTIONS.items()
            if key != "batch_size" and kind_of_run in option.types
        }
        batch_size = defaults.get("batch_size")
        params = {}
        for key, chosen in combination.items():
            if key == "batch_size":
                batch_size = _OPTIONS[key].check(chosen, places[key])
            elif key in _OPTIONS:
                options[key] = _OPTIONS[key].check(chosen, places[key])
            else:
                params[key] = chosen
        if kind_of_run == "simrd":
            _check_serves(options, path)
        if kind_of_run == "dtr" and options["save_logs"] is None:
            options["save_logs"] = saves_logs
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
    if kind_of_run == "dtr":
        return _named(lambda: KINDS)(command.get("kind"), f"{path}.kind")
    if "kind" in command:
        _fail(f"{path}.kind", command["kind"], f"none: the type is {json.dumps(kind_of_run)}")
    return ""


def _budgets(
    command: dict[str, Any], path: str, kind_of_run: str, kind: str
) -> list[tuple[int | None, float | None]]:
    """Pairs of bytes and ratio, of which one is None or (no limit) both are."""
    wanted = {"baseline": (), "fixed": ("memory_budget",), "ratio": ("ratio",)}.get(
        kind or kind_of_run, ("memory_budget", "ratio")
    )
    word = kind or kind_of_run
    for key in ("memory_budget", "ratio"):
        if key in command and key not in wanted:
            _fail(f"{path}.{key}", command[key], f"none: the command is {json.dumps(word)}")
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
            _fail(f"{path}.{key}", command[key], "a list of at least one")
        for index, value in enumerate(values):
            place = f"{path}.{key}[{index}]"
            if key == "ratio":
                found.append((None, _ratio(value, place)))
            else:
                found.append((_budget(value, place), None))
    return found


def _fields(
    command: dict[str, Any], path: str, kind_of_run: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is unfolded: options, and parameters of the model; and where each stands."""
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    extra = _object(command.get("extra_params", {}), f"{path}.extra_params")
    sources = (
        (path, {key: command[key] for key in command if key in _OPTIONS}),
        (f"{path}.extra_params", extra),
    )
    for base, source in sources:
        for key, value in source.items():
            if key in _IGNORED_OPTIONS:
                continue
            place = f"{base}.{key}"
            if key in fields:
                raise ValueError(f"{place} stands in {places[key]} too, expected one of them")
            if key in _COMMAND:
                raise ValueError(f"{place} stands in extra_params, expected {path}.{key}")
            option = _OPTIONS.get(key)
            if option is not None and kind_of_run not in option.types:
                _fail(place, value, f"none: the type is {json.dumps(kind_of_run)}")
            if isinstance(value, list) and not value:
                _fail(place, value, "a value, or a list of at least one")
            if option is None and isinstance(value, dict):
                _fail(place, value, "a number, text, true, false, or a list of these")
            fields[key], places[key] = value, place
    return fields, places
