"""Workers of experiments in the process of the test."""

from __future__ import annotations

import json
from typing import Any

from rotor.models import workloads

from rotor import dtr
from rotor.experiments import process, worker


def served_here(requests: list[dict], events_of: list[list[dict]] | None = None):
    """Return a function in the place of `process.ask`: the worker's code, without a process.

    `requests` gets every request, and `events_of` what the worker said to each but descriptions.
    """

    def ask(request: Any, limits: Any, *, worker: Any = None, environment: Any = None):
        requests.append(dict(request))
        if request["request"] == "describe":
            found = _worker.describe(request["device"], workloads)
            return process.Answer([{"event": "described", **found}])
        events: list[dict] = []
        _worker.run(dict(request), events.append, workloads, dtr)
        if events_of is not None:
            events_of.append(events)
        return process.Answer(json.loads(json.dumps(events)))

    return ask


_worker = worker
