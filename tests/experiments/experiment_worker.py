"""Serves requests of experiments without PyTorch: figures made up from the request, and failures.

Run as a script by the tests. What goes wrong is said by parameters of the model; each call is
noted in the file that ``$CALLS`` names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

LOG = "\n".join(
    json.dumps(line)
    for line in (
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
        {"INSTRUCTION": "CONSTANT", "NAME": "x"},
        {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "10"},
        {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["x"], "RESULT": ["y"], "TIME": "100"},
        {"INSTRUCTION": "MEMORY", "NAME": "y", "MEMORY": "10"},
        {"INSTRUCTION": "ALIAS", "NAME": "y", "ALIAS": "-1"},
    )
)


def emit(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def first_time(name: str) -> bool:
    """Whether this is the first process that asks."""
    path = Path(os.environ["CALLS"]).with_suffix(f".{name}")
    if path.exists():
        return False
    path.touch()
    return True


def describe(device: str) -> None:
    if device != "cpu":
        emit(event="error", error="ValueError", message=f"no {device}", traceback="")
        return
    parameters = ["batch_size", "depth", "trouble"]
    emit(
        event="described",
        models={"one": parameters, "two": parameters},
        device="cpu",
        device_name="a processor",
        threads=1,
        torch="0.0",
        rotor="0.0",
    )


def serve(request: dict) -> None:
    trouble = request["params"].get("trouble")
    emit(event="begun", seed=7 if request["seed"] is None else request["seed"])
    if trouble == "hangs":
        time.sleep(60)
    if trouble == "hangs once" and first_time("hang"):
        time.sleep(60)
    if trouble == "crashes once" and first_time("crash"):
        sys.stderr.write("broken\n")
        raise SystemExit(3)
    if trouble == "chatters":
        for _ in range(200):
            emit(event="warm")
            time.sleep(0.02)
    if trouble == "fails" or (trouble == "fails once" and first_time("fail")):
        emit(event="error", error="OutOfMemoryError", message="too\nlarge", traceback="there")
        return
    is_limited = request["type"] == "dtr"
    total = 10.0 * (request["batch_size"] or 1) + request["seed"] if request["seed"] else 10.0
    budget = request.get("budget_bytes")
    loss = 0.25 if trouble == "differs" and is_limited else 0.5
    for number in range(request["n_reps"]):
        figures = {
            "time": (15.0 if is_limited else 10.0) + number,
            "gpu_time": (15.0 if is_limited else 10.0) + number,
            "cpu_time": 8.0 if is_limited else 4.0,
            "input_mem": 1.0,
            "model_mem": 2.0,
            "total_mem": total if budget is None else min(total, budget / 1e6),
            "sync_time": 0.0,
            "loss": loss.hex(),
        }
        if is_limited:
            figures |= {"base_compute_time": 9.0, "remat_compute_time": 2.0, "search_time": 1.0}
            figures |= {"cost_time": 0.25, "evictions": 4, "rematerializations": 3}
        emit(event="rep", rep=number, **figures)
    if request["log"]:
        Path(request["log"]).write_text(LOG, encoding="utf-8")
    batch = request["batch_size"] or 1
    emit(event="done", params={"batch_size": batch}, batch_size=batch, examples=batch)


def main() -> None:
    request = json.loads(sys.stdin.read())
    if request["request"] == "describe":
        describe(request["device"])
        return
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(request) + "\n")
    serve(request)


if __name__ == "__main__":
    main()
