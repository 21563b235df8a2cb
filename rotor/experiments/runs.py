"""Runs a configuration: `rotor experiment run`.

Baselines first, since ratios refer to them; then what runs under a budget; then what replays the
logs of these. One input after the other, each in a process of its own, so that none disturbs
another's time; finished ones are kept, and read back when the same is asked again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import time
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rotor.chain import read_json, write_json
from rotor.experiments import analysis, configuration, process, simrd_manifest
from rotor.experiments.analysis import Outcome
from rotor.experiments.cells import Cell, Store, run_cells
from rotor.experiments.configuration import Configuration, Trial
from rotor.experiments.keys import NO_LIMIT
from rotor.experiments.output import Output
from rotor.experiments.sweeps import simulate_cell
from rotor.report.text import table

__all__ = ["RunError", "plan_text", "post", "run"]

logger = logging.getLogger("rotor")
_BYTES_PER_MB = 1e6
_POST_SECONDS = 10.0
_FIELDS = ("status", "num_retries", "rows", "log", "batch_size", "examples")


class RunError(RuntimeError):
    """An input failed in a configuration that does not report errors but ends with the first."""


def run(
    config: Configuration,
    directory: Path,
    *,
    formats: tuple[str, ...] = ("pdf",),
    fresh: bool = False,
    webhook: str | None = None,
    worker: Sequence[str] | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Output:
    """Run a configuration and write its files.

    Parameters
    ----------
    config
        From `rotor.experiments.configuration.load`.
    directory
        Directory of the files; finished inputs in it are read back, failed ones run again.
    formats
        Of figures; none for no figures.
    fresh
        Forget what has run.
    webhook
        An address to which the summary is posted at the very end; see `post`.
    worker
        The command that serves an input (`rotor.experiments.process.ask`); None for the one that
        trains.
    dry_run
        Say what would run, and write nothing; the device need not be there.
    tell
        Called with a line of text after each input.

    Returns
    -------
    Output
        With the summary in ``text``, and the files written.

    Raises
    ------
    ValueError
        A model is unknown, or the device does not exist.
    RunError
        An input failed, and ``report_errors`` is false.
    """
    if webhook is not None:
        _check_address(webhook)
    if not config.active:
        config.warn()
        output = Output(directory, config.name, ())
        output.text = f"{config.name}: not active, nothing was run"
        return output
    worker = process.WORKER if worker is None else worker
    environment = process.describe("cpu" if dry_run else config.device, worker)
    config = configuration.parse(config.text, config.name, models=environment["models"])
    if config.sync_gpu and not dry_run and environment["device"] == "cpu":
        config = dataclasses.replace(config, ignored=(*config.ignored, "$.sync_gpu (on a CPU)"))
    config.warn()
    if dry_run:
        output = Output(directory, config.name, ())
        output.text = plan_text(config)
        return output
    output = Output(directory, config.name, formats)
    _tell_changes(config, output)
    outcomes = _Runner(config, output, environment, worker, fresh, tell).outcomes()
    analysis.write(config, environment, outcomes, output)
    _remove_stale(config, output)
    if webhook is not None:
        post(webhook, output.text)
    return output


def plan_text(config: Configuration) -> str:
    """Return the table of runs that the configuration asks for."""
    rows = [
        ["model", "command", "type", "batch", "budget", "parameters", "inputs", "warm-up", "steps"]
    ]
    for trial in config.trials:
        counts = ["-"] * 3
        if trial.type != "simrd":
            n_inputs = trial.options["n_inputs"]
            steps = [n_inputs * trial.options[key] for key in ("dry_run", "n_reps")]
            counts = [str(number) for number in (n_inputs, *steps)]
        kind = f"{trial.type} {trial.kind}".strip()
        batch = "-" if trial.batch_size is None else str(trial.batch_size)
        params = ", ".join(f"{key}={value}" for key, value in trial.params.items()) or "-"
        name = [trial.model, str(trial.command_id), kind, batch, trial.budget_text, params]
        rows.append([*name, *counts])
    return f"{config.name}: what would run\n\n{table(rows)}"


@dataclass
class _Runner:
    config: Configuration
    output: Output
    environment: dict[str, Any]
    worker: Sequence[str]
    fresh: bool
    tell: Callable[[str], None] | None = None
    logs: dict[tuple[Any, ...], list[tuple[float, Path]]] = field(default_factory=dict)
    saved: list[tuple[Trial, Path]] = field(default_factory=list)

    def outcomes(self) -> list[Outcome]:
        """Return the results of all trials, in their order."""
        store = self.output.store(fresh=self.fresh)
        trials = self.config.trials
        baselines = self._baselines(store)
        found: dict[int, Outcome] = {
            id(trial): Outcome(trial, None, baselines[trial.workload])
            for trial in trials
            if trial.type == "baseline"
        }
        limited: list[tuple[Trial, int | None]] = []
        for trial in (trial for trial in trials if trial.type == "dtr"):
            budget, error = self._budget(trial, baselines)
            if error is not None:
                found[id(trial)] = Outcome(trial, None, [_failed("NoBaseline", error)])
            else:
                limited.append((trial, budget))
        results = self._inputs(store, limited, "under a budget")
        for (trial, budget), inputs in zip(limited, results, strict=True):
            found[id(trial)] = Outcome(trial, budget, inputs)
            self._note_logs(trial, budget, inputs)
        if self.config.simrd_config is not None:
            path = self._log_directory / Path(self.config.simrd_config).expanduser()
            simrd_manifest.write(path, self.saved)
        replays = [trial for trial in trials if trial.type == "simrd"]
        for trial, result in zip(replays, self._replays(store, replays), strict=True):
            budget = result.get("budget", trial.budget_bytes)
            found[id(trial)] = Outcome(trial, budget, [result])
        for outcome in found.values():
            outcome.baseline = baselines.get(outcome.trial.workload)
        return [found[id(trial)] for trial in trials]

    def _baselines(self, store: Store) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        """Run the inputs of each workload that has a baseline, or a ratio which needs one."""
        wanted: dict[tuple[Any, ...], Trial] = {}
        for trial in self.config.trials:
            if trial.type == "baseline" or (trial.type == "dtr" and trial.ratio is not None):
                wanted.setdefault(trial.workload, trial)
        for trial in self.config.trials:
            if trial.type == "baseline":
                wanted[trial.workload] = trial
        trials = [(trial, None) for trial in wanted.values()]
        inputs = self._inputs(store, trials, "baselines", as_baseline=True)
        return dict(zip(wanted, inputs, strict=True))

    def _budget(
        self, trial: Trial, baselines: dict[tuple[Any, ...], list[dict[str, Any]]]
    ) -> tuple[int | None, str | None]:
        """Return bytes (None: no limit), or the reason why none are known."""
        if trial.ratio is None:
            return trial.budget_bytes, None
        failed = [found for found in baselines[trial.workload] if found["status"] != "ok"]
        if failed:
            return None, f"the baseline failed: {failed[0]['error']}: {failed[0]['message']}"
        most = max(row["total_mem"] for found in baselines[trial.workload] for row in found["rows"])
        return int(round(most * _BYTES_PER_MB) * trial.ratio), None

    def _inputs(
        self,
        store: Store,
        trials: Sequence[tuple[Trial, int | None]],
        description: str,
        *,
        as_baseline: bool = False,
    ) -> list[list[dict[str, Any]]]:
        cells = [
            self._cell(trial, budget, number, as_baseline)
            for trial, budget in trials
            for number in range(trial.options["n_inputs"])
        ]
        for cell in cells:
            _forget_unfinished(store, cell)
        results = run_cells(
            cells,
            store,
            jobs=1,
            description=f"{self.config.name}, {description}",
            finished=self._teller(description, cells, [trial for trial, _ in trials]),
        )
        left = iter(results)
        return [list(itertools.islice(left, trial.options["n_inputs"])) for trial, _ in trials]

    def _teller(
        self, description: str, cells: Sequence[Cell], trials: Sequence[Trial]
    ) -> Callable[[Cell, int], None] | None:
        tell = self.tell
        if tell is None:
            return None
        repeated = (trial for trial in trials for _ in range(trial.options["n_inputs"]))
        names = {
            cell.key: f"{trial.model} {trial.type} {trial.budget_text}".removesuffix(" -")
            for cell, trial in zip(cells, repeated, strict=True)
        }
        begun = time.monotonic()

        def finished(cell: Cell, done: int) -> None:
            tell(
                f"{self.config.name}, {description}: {done} of {len(cells)} done "
                f"({names[cell.key]}), {time.monotonic() - begun:.0f} s"
            )

        return finished

    def _cell(self, trial: Trial, budget: int | None, number: int, as_baseline: bool) -> Cell:
        config = self.config
        limited = trial.type == "dtr" and not as_baseline
        request: dict[str, Any] = {
            "request": "input",
            "model": trial.model,
            "batch_size": trial.batch_size,
            "params": trial.params,
            "sizes": config.sizes,
            "device": self.environment["device"],
            "set_seed": config.set_seed,
            "seed": config.seed + number if config.set_seed else None,
            "type": "dtr" if limited else "baseline",
            "warm_ups": trial.options["dry_run"],
            "n_reps": trial.options["n_reps"],
            "log": None,
        }
        if limited:
            request |= {
                "budget_bytes": budget,
                "heuristic": trial.options["heuristic"],
                "sample": trial.samples(budget),
                "ignore_small": trial.options["ignore_small_tensors"],
            }
        environment = {key: value for key, value in self.environment.items() if key != "models"}
        identity = {
            "kind": "input",
            "input": number,
            "sync_gpu": config.sync_gpu,
            "environment": environment,
            **request,
        }
        if limited and trial.options["save_logs"] and number == trial.options["n_inputs"] - 1:
            path = self._log_path(trial, budget, identity)
            request["log"], identity["log"] = str(path), path.name
        names = [one.name for one in dataclasses.fields(process.Limits)]
        arguments = {
            "request": request,
            "limits": process.Limits(**{name: trial.options[name] for name in names}),
            "worker": tuple(self.worker),
            "sync_gpu": config.sync_gpu,
            "reports_errors": config.report_errors,
        }
        return Cell(input_cell, arguments, identity, _FIELDS)

    @property
    def _log_directory(self) -> Path:
        return self.output.directory / Path(self.config.log_dest).expanduser()

    def _log_path(self, trial: Trial, budget: int | None, identity: dict[str, Any]) -> Path:
        text = json.dumps(identity, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        batch = "default" if trial.batch_size is None else trial.batch_size
        limit = NO_LIMIT if budget is None else budget
        return (self._log_directory / f"{trial.model}-{batch}-{limit}-{digest}.log").absolute()

    def _note_logs(self, trial: Trial, budget: int | None, inputs: list[dict[str, Any]]) -> None:
        last = inputs[-1]
        if last["status"] == "ok" and last["log"] is not None:
            size = float("inf") if budget is None else float(budget)
            path = self._log_directory / last["log"]
            self.logs.setdefault(trial.workload, []).append((size, path))
            self.saved.append((trial, path))

    def _replays(self, store: Store, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        cells = []
        for trial in trials:
            path = self._log_of(trial)
            if path is None or not path.is_file():
                what = "no command of this configuration has saved one" if path is None else path
                results.append(_failed("NoLog", f"no log to replay: {what}"))
                continue
            settings = {
                "heuristic": trial.options["heuristic"],
                "ratio": trial.ratio,
                "budget_bytes": trial.budget_bytes,
                "runtime": trial.options["runtime"],
                "overhead_limit": trial.options["overhead_limit"],
                "sample": trial.samples(trial.budget_bytes),
                "ignore_small": trial.options["ignore_small_tensors"],
                "seed": self.config.seed,
            }
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            cell = Cell(
                simulate_cell,
                {"path": str(path), "digest": digest, "settings": settings},
                {"kind": "replay", "log": digest, **settings},
                ("status", "budget"),
            )
            cells.append((len(results), cell))
            results.append({})
        description = f"{self.config.name}, simulations"
        done = run_cells([cell for _, cell in cells], store, jobs=1, description=description)
        for (place, _), result in zip(cells, done, strict=True):
            results[place] = result
        return results

    def _log_of(self, trial: Trial) -> Path | None:
        if trial.options["log"] is not None:
            return self._log_directory / Path(trial.options["log"]).expanduser()
        saved = self.logs.get(trial.workload, [])
        return max(saved)[1] if saved else None


def _forget_unfinished(store: Store, cell: Cell) -> None:
    """Drop the kept result of an input that failed, or whose log has gone: it runs again."""
    kept = store.get(cell)
    if kept is None:
        return
    log = cell.arguments["request"]["log"]
    if kept["status"] != "ok" or (log is not None and not Path(log).is_file()):
        store.path(cell).unlink(missing_ok=True)


def _failed(kind: str, message: str) -> dict[str, Any]:
    error = {"status": "error", "error": kind, "message": message, "traceback": ""}
    nothing = dict.fromkeys(("log", "batch_size", "examples"))
    return error | {"num_retries": 0, "retries": [], "rows": []} | nothing


def input_cell(
    request: dict[str, Any],
    limits: process.Limits,
    worker: Sequence[str],
    sync_gpu: bool,
    reports_errors: bool,
) -> dict[str, Any]:
    """Run one input; gives "status", "rows" and what came with them."""
    if request["log"] is not None:
        Path(request["log"]).parent.mkdir(parents=True, exist_ok=True)
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if sync_gpu else {}
    try:
        answer = process.ask(request, limits, worker=worker, environment=environment)
    except process.Failure as failure:
        if not reports_errors:
            raise RunError(f"{request['model']}: {failure}") from failure
        tries = {"num_retries": len(failure.retries), "retries": failure.retries}
        found = _failed(failure.kind, failure.message)
        return found | {"traceback": failure.traceback, **tries}
    reps = [event for event in answer.events if event["event"] == "rep"]
    return {
        "status": "ok",
        "num_retries": len(answer.retries),
        "retries": answer.retries,
        "rows": [{key: value for key, value in rep.items() if key != "event"} for rep in reps],
        "log": None if request["log"] is None else Path(request["log"]).name,
        "seed": next(event["seed"] for event in answer.events if event["event"] == "begun"),
        **{key: answer.events[-1].get(key) for key in ("batch_size", "examples")},
    }


def _manifest(config: Configuration, output: Output) -> Path:
    return output.directory / "data" / f"{config.name}_run.json"


def _previous(config: Configuration, output: Output) -> dict[str, Any] | None:
    try:
        found = read_json(_manifest(config, output))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(found, dict) and isinstance(found.get("files"), list)
    return found if is_whole else None


def _tell_changes(config: Configuration, output: Output) -> None:
    """Warn where the directory has results of another configuration of this name."""
    before = _previous(config, output)
    if before is None or before.get("configuration") == json.loads(config.text):
        return
    old, new = before.get("configuration"), json.loads(config.text)
    keys = sorted(
        key
        for key in {*(old if isinstance(old, dict) else {}), *new}
        if not isinstance(old, dict) or old.get(key) != new.get(key)
    )
    warnings.warn(
        f"{output.directory} has results of another configuration named {config.name} (it differs "
        f"in {', '.join(keys)}): inputs whose settings are the same are read back, the others run, "
        "and the files of commands that are no more are removed",
        UserWarning,
        stacklevel=3,
    )


def _remove_stale(config: Configuration, output: Output) -> None:
    """Remove what a former run of this name wrote and this one did not; remember what it wrote."""
    written = {path.relative_to(output.directory).as_posix() for path in output.files}
    before = _previous(config, output) or {"files": []}
    for name in set(map(str, before["files"])) - written:
        path = output.directory / name
        if output.directory.resolve() in path.resolve().parents:
            path.unlink(missing_ok=True)
    path = _manifest(config, output)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": "rotor.experiment.manifest", "version": 1}
    data = {"configuration": json.loads(config.text), "files": sorted(written)}
    write_json(head | data, path)


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"webhook = {address!r}, expected an address that begins with https://")


def post(address: str, text: str, *, timeout: float = _POST_SECONDS) -> bool:
    """Post a summary as JSON, ``{"text": ..}``; return whether it was accepted.

    Parameters
    ----------
    address
        Begins with ``http://`` or ``https://``. It is not shown: it may be a secret.
    text
        The summary.
    timeout
        Seconds.

    Notes
    -----
    A failure is a warning: the experiment is done.
    """
    _check_address(address)
    request = urllib.request.Request(
        address,
        data=json.dumps({"text": text}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout):
            return True
    except (OSError, ValueError) as error:
        host = urlsplit(address).hostname
        warnings.warn(f"the summary was not posted to {host}: {error}", UserWarning, stacklevel=2)
        return False
