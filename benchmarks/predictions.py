"""Which predictions about an accelerator come true: each confirmed or refuted, and its cure.

    python benchmarks/predictions.py --device cuda [--json FILE] [--traces FOLDER] [NAME ...]

Each experiment runs in a process in which nothing ran before. A prediction is confirmed where what
docs/gpu.md foresees is seen; its cure holds where rotor is right all the same. With --traces, the
history of the allocator during a step of two models is saved in the form of csrc/rotor/blocks.c,
with the bytes that the device reserved, and replayed. The exit code is 1 if a cure fails.
``--device sim`` is a dry run on the simulated accelerator of the tests, with handles, searches and
launches that take as much as a GPU's.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import rotor
from rotor import _core, memory
from rotor._pytorch import devices
from rotor.timing import Clock, measure_ns

MIB = 1 << 20
SECONDS = 120


class Verdict(NamedTuple):
    """A prediction by its number, and what was found; ``None`` where nothing can be said."""

    number: int
    prediction: str
    confirmed: bool | None
    cured: bool | None

    def text(self) -> str:
        """Return a line."""
        words = {True: "confirmed", False: "refuted", None: "unknown"}
        cures = {True: ", cure holds", False: ", CURE FAILS", None: ""}
        return f"#{self.number:<2} {words[self.confirmed]}{cures[self.cured]}: {self.prediction}"


Figures = dict[str, Any]


def peak_of(device: torch.device, call: Callable[[], object]) -> int:
    """Return the peak of a call above the level before it, by the device's counters."""
    level = devices.allocated_bytes(device)
    devices.reset_peak(device)
    call()
    devices.settle_backwards(device)
    return devices.counters(device)[1] - level


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return (output - target).square().mean()


def images(norm: bool = True) -> nn.Module:
    """Return a small convolutional model."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        blocks += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
        blocks += [nn.BatchNorm2d(32)] if norm else []
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def pictures(device: torch.device, rows: int = 8) -> torch.Tensor:
    """Return a batch of them."""
    torch.manual_seed(0)
    return torch.randn(rows, 3, 64, 64, device=device)


def limited(device: torch.device, engine: str, share: float = 0.7) -> Figures:
    """Return the peaks of three first steps under a limit."""
    torch.manual_seed(0)
    model, batch = images(norm=False).to(device), pictures(device)
    target = torch.zeros(8, 32, device=device)

    def step(one: nn.Module, *, inside: bool) -> None:
        one.zero_grad()
        (one(batch, targets=(target,)) if inside else distance(one(batch), target)).backward()

    plain = copy.deepcopy(model)
    step(plain, inside=False)
    limit = int(share * peak_of(device, partial(step, plain, inside=False)))
    del plain
    wrapped = rotor.Checkpointable(model, mem_limit=limit, engine=engine, loss_fn=distance)
    wrapped.measure(batch, targets=(target,))
    peaks = [peak_of(device, lambda: step(wrapped, inside=True)) for _ in range(3)]
    return {"limit": limit, "peaks": peaks, "reserve": wrapped.plan.reserve_bytes}


def first_steps(device: torch.device) -> Figures:
    """#5: libraries take memory at the first matrix product of the thread of backwards."""
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    value = (weight @ weight).sum()
    level = devices.allocated_bytes(device)
    (gradient,) = torch.autograd.grad(value, weight)
    devices.settle_backwards(device)
    taken = devices.allocated_bytes(device) - level - memory.rounded_bytes(gradient.nbytes, device)
    return {"taken": taken, **limited(device, "graph")}


def judge_first_steps(found: Figures) -> Verdict:
    """Judge by what the backward left, and by the first step."""
    text = "the thread of backwards takes a workspace at its first product"
    return Verdict(5, text, found["taken"] >= MIB // 2, max(found["peaks"]) <= found["limit"])


def searches(device: torch.device) -> Figures:
    """#6: each thread searches the algorithms of convolutions."""
    torch.backends.cudnn.benchmark = True
    layer, batch = nn.Conv2d(3, 32, 3, padding=1).to(device), pictures(device)

    def forward() -> None:
        with torch.no_grad():
            layer(batch)

    forward()
    again = [peak_of(device, lambda: devices.run_in_backward(device, forward)) for _ in range(2)]
    warnings.filterwarnings("ignore", message="torch.backends.cudnn.benchmark is on")
    return {"again": again, **limited(device, "graph")}


def judge_searches(found: Figures) -> Verdict:
    """Judge by the peaks of one call in the other thread, and by the reserve."""
    first, second = found["again"]
    text = "a convolution is searched again in the thread of backwards, with memory of its own"
    good = max(found["peaks"][1:]) <= found["limit"] and found["reserve"] == 0
    return Verdict(6, text, first > second + MIB // 2, good)


def blocks(device: torch.device) -> Figures:
    """#8: blocks above 1 MiB keep rests of segments."""
    sizes = [int(size * MIB) for size in (3.3, 6.5, 19.3, 1.7, 11.2, 4.9)]
    devices.release_cached(device)
    level = devices.allocated_bytes(device)
    kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    counted = devices.allocated_bytes(device) - level
    del kept
    import numpy as np

    expandable = devices.expandable_segments()
    model, _ = _core.replay_blocks(np.array(sizes, dtype=np.int64), expandable, 0, False)
    rounded = sum(memory.rounded_bytes(size, device) for size in sizes)
    found = {"counted": counted, "rounded": rounded, "model": model["allocated_peak_bytes"]}
    return found | {"expandable": expandable}


def judge_blocks(found: Figures) -> Verdict:
    """Judge by bytes beyond 512-byte rounding, and by the model of the allocator."""
    text = "blocks above 1 MiB are larger than their tensors"
    confirmed = None if found["expandable"] else found["counted"] > found["rounded"]
    return Verdict(8, text, confirmed, found["counted"] == found["model"])


def times(device: torch.device) -> Figures:
    """#10: a time from an idle device has its launch in it."""
    value = torch.zeros(1 << 16, device=device)
    events = [torch.Event(device, enable_timing=True) for _ in range(2)]
    stream = torch.accelerator.current_stream(device)

    def between(count: int) -> float:
        torch.accelerator.synchronize(device)
        events[0].record(stream)
        for _ in range(count):
            value.add_(1)
        events[1].record(stream)
        events[1].synchronize()
        return 1e6 * float(events[0].elapsed_time(events[1])) / count

    between(20)
    idle = min(between(1) for _ in range(5))
    devices.occupy(device)
    events[0].record(stream)
    for _ in range(20):
        value.add_(1)
    events[1].record(stream)
    events[1].synchronize()
    alone = 1e6 * float(events[0].elapsed_time(events[1])) / 20
    return {"idle": idle, "busy": alone, "ours": measure_ns(lambda: value.add_(1), device)}


def judge_times(found: Figures) -> Verdict:
    """Judge by times of an operation alone, in a row, and as rotor measures it."""
    text = "a time from an idle device is that of a launch"
    good = found["ours"] <= max(1.5 * found["busy"], found["busy"] + 2_000)
    return Verdict(10, text, found["idle"] > 1.5 * found["busy"], good)


def launches(device: torch.device) -> Figures:
    """#3: the host's time of an operation is that of a launch."""
    value = torch.randn(2048, 2048, device=device)
    value @ value
    torch.accelerator.synchronize(device)
    clock, host = Clock(device), Clock("cpu")
    host.start()
    value @ value
    launched = host.stop()
    clock.start()
    value @ value
    return {"host": launched, "device": clock.stop()}


def judge_launches(found: Figures) -> Verdict:
    """Judge by the time of one product."""
    text = "an operator has returned long before it has run"
    return Verdict(3, text, found["device"] > 2 * found["host"], None)


def normalisation(device: torch.device) -> Figures:
    """#9: BatchNorm of captured graphs has other bits than eager mode's."""
    torch.manual_seed(0)
    model, batch = images().to(device), pictures(device)
    target = torch.zeros(8, 32, device=device)
    found = []
    for share in (2.0, 0.7):
        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        peak = peak_of(device, lambda one=plain: distance(one(batch), target).backward())
        limit = int(share * peak)
        wrapped = rotor.Checkpointable(ours, mem_limit=limit, engine="graph", loss_fn=distance)
        loss = wrapped(batch, targets=(target,))
        loss.backward()
        found.append([p.grad.cpu() for p in ours.parameters() if p.grad is not None])
        eager = [p.grad.cpu() for p in plain.parameters() if p.grad is not None]
    same = all(torch.equal(a, b) for a, b in zip(found[1], eager, strict=True))
    again = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"eager": same, "unplanned": again}


def judge_normalisation(found: Figures) -> Verdict:
    """Judge by gradients: against eager mode, and with and without recomputation."""
    text = "BatchNorm of captured graphs has other bits than eager mode's"
    return Verdict(9, text, not found["eager"], found["unplanned"])


def seeds(device: torch.device) -> Figures:
    """#13: attention with its seed on the CPU is recorded by the dynamic runtime."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    weight = torch.randn(64, 64, device=device, requires_grad=True)
    value, places = torch.randn(8, 4, 256, 64, device=device), set()

    def loss() -> torch.Tensor:
        found = value
        for _ in range(8):
            query = found @ weight
            kernel = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.MATH
            with sdpa_kernel(kernel):
                found = nn.functional.scaled_dot_product_attention(query, query, query)
        return found.square().mean()

    peak = peak_of(device, lambda: torch.autograd.grad(loss(), weight))
    if device.type == "cuda":
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            value, value, value, None, True, 0.0
        )
        places = {str(part.device.type) for part in out}
    with rotor.dtr.budget(int(0.6 * peak), device=device) as session:
        torch.autograd.grad(loss(), weight)
    return {"evictions": session.stats.evictions, "places": sorted(places)}


def judge_seeds(found: Figures) -> Verdict:
    """Judge by the devices of its results, and by evictions."""
    text = "memory-efficient attention keeps its seed on the CPU"
    confirmed = "cpu" in found["places"] if found["places"] else None
    return Verdict(13, text, confirmed, found["evictions"] > 0)


def reserved(device: torch.device) -> Figures:
    """#11: a step reserves more than it allocates."""
    model, batch = images().to(device), pictures(device, 24)
    devices.release_cached(device)
    level = devices.reserved_bytes(device)
    peak = peak_of(device, lambda: model(batch).sum().backward())
    return {"allocated": peak, "reserved": devices.reserved_bytes(device) - level}


def judge_reserved(found: Figures) -> Verdict:
    """Judge by 5 %."""
    text = "a step reserves more than 5 % beyond what it allocates"
    return Verdict(11, text, found["reserved"] > 1.05 * found["allocated"], None)


EXPERIMENTS: dict[str, tuple[Callable[[torch.device], Figures], Callable[[Figures], Verdict]]] = {
    "first steps": (first_steps, judge_first_steps),
    "searches": (searches, judge_searches),
    "blocks": (blocks, judge_blocks),
    "times": (times, judge_times),
    "launches": (launches, judge_launches),
    "normalisation": (normalisation, judge_normalisation),
    "seeds": (seeds, judge_seeds),
    "reserved": (reserved, judge_reserved),
}
"""In order: what matters most comes first, should the time not suffice."""


# -- traces of the allocator


def events_of(trace: Iterable[dict[str, Any]]) -> tuple[list[int], int]:
    """Return a history of the allocator as events of blocks.c, and the bytes that it reserved.

    Parameters
    ----------
    trace
        Entries of ``torch.cuda.memory._snapshot()["device_traces"]``, one device's, from an empty
        cache; frees of what was allocated before are left out.
    """
    events: list[int] = []
    places: dict[int, int] = {}
    held = most = made = 0
    for entry in trace:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            events.append(size)
            places[address] = made
            made += 1
        elif action == "free_requested" and address in places:
            events.append(-1 - places.pop(address))
        elif action in ("segment_alloc", "segment_map"):
            held += size
            most = max(most, held)
        elif action in ("segment_free", "segment_unmap"):
            held -= size
    return events, most


def save_traces(device: torch.device, folder: Path) -> list[Figures]:
    """Record a step of two models; return what the device reserved, and the model of it."""
    import numpy as np

    from rotor._pytorch import core

    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    language = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 4, batch_first=True), 4, enable_nested_tensor=False
    )
    cases = [("images", images(), pictures(device, 16))]
    cases.append(("language", language, torch.randn(16, 128, 256, device=device)))
    for name, model, batch in cases:
        model.to(device)
        model(batch).sum().backward()
        model.zero_grad()
        devices.release_cached(device)
        rests = devices.reserved_bytes(device) - devices.allocated_bytes(device)
        core.record_history(True)
        model(batch).sum().backward()
        trace = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
        core.record_history(False)
        events, held = events_of(trace)
        expandable = devices.expandable_segments()
        given = np.array(events, dtype=np.int64)
        figures, _ = _core.replay_blocks(given, expandable, 0, False)
        row = {"model": name, "reserved": held, "replayed": figures["reserved_peak_bytes"]}
        row["rests"] = rests
        settings = {"expandable": expandable, "torch": torch.__version__}
        (folder / f"{name}.json").write_text(json.dumps(row | settings | {"events": events}))
        rows.append(row)
    return rows


# -- running


def run(name: str, device: str) -> tuple[Figures, Verdict | None]:
    """Run an experiment in a process of its own; return its figures and the verdict."""
    command = [sys.executable, __file__, "--child", name, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
        found: Figures = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"more than {SECONDS} s"}, None
    except (subprocess.CalledProcessError, IndexError, ValueError) as error:
        return {"error": getattr(error, "stderr", str(error)).strip()[-400:]}, None
    return found, EXPERIMENTS[name][1](found)


def main() -> int:
    """Print a verdict for each prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments, by default all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="file of figures and verdicts")
    parser.add_argument("--traces", type=Path, help="folder of the allocator's histories")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device.startswith("sim"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        import accelerator

        sim = accelerator.load()
        sim.set_capacity(4 << 30)
        sim.set_handles(handle_bytes=8 * MIB, search_bytes=32 * MIB)
        sim.set_clock("model")
        sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    device = devices.known(given.device)
    if given.child:
        found = EXPERIMENTS[given.child][0](device)
        # A thread that drops Python's objects while the interpreter ends would end the process.
        devices.settle_backwards(device)
        print(json.dumps(found))
        return 0
    rows: list[dict[str, Any]] = []
    fails = 0
    for name in given.names or EXPERIMENTS:
        figures, verdict = run(name, given.device)
        fails += verdict is None or verdict.cured is False
        print(verdict.text() if verdict else f"{name}: {figures['error']}", flush=True)
        rows.append(
            {"experiment": name, "figures": figures, **(verdict._asdict() if verdict else {})}
        )
    if given.traces and device.type != "cuda":
        print(f"history of the allocator: unknown: {device.type} records none", flush=True)
        rows.append({"experiment": "history", "figures": {}, "cured": None})
    elif given.traces:
        for row in save_traces(device, given.traces):
            # The step may use the rests of segments in which the model lies.
            same = 0 <= row["replayed"] - row["reserved"] <= row["rests"]
            fails += not same
            print(f"history of {row['model']}: {'as' if same else 'NOT as'} the model's", row)
            rows.append({"experiment": "history", "figures": row, "cured": same})
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 1 if fails else 0


if __name__ == "__main__":
    raise SystemExit(main())
