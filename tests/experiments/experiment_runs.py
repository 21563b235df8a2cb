"""Configurations and runs of experiments without PyTorch, for tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rotor.experiments import configuration, runs

WORKER = (sys.executable, "-S", str(Path(__file__).with_name("experiment_worker.py")))
BASELINE = {"type": "baseline"}
FIXED = {"type": "dtr", "kind": "fixed", "memory_budget": [8_000_000, "inf"]}
RATIO = {"type": "dtr", "kind": "ratio", "ratio": [0.5]}


def requests_of(calls: Path) -> list[dict]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def text_of(*commands: dict, default: dict | None = None, **top) -> str:
    settings = {"default": default or {}, "one": list(commands)}
    data = {"models": ["one"], "set_seed": True, "device": "cpu", "dtr_settings": settings}
    return json.dumps(data | top)


def parse(*commands: dict, **top) -> configuration.Configuration:
    return configuration.parse(text_of(*commands, **top), "test")


def run(config: configuration.Configuration, directory: Path, **options) -> dict:
    """Run without figures; the results of model "one"."""
    output = runs.run(config, directory, formats=options.pop("formats", ()), **options)
    data = json.loads((directory / "data" / "test.json").read_text())
    assert data["format"] == "rotor.experiment.test"
    assert output.text in (directory / "summary" / "test.txt").read_text()
    return data["results"]["one"]
