"""Does a test fail for every guard of the accelerator's path that is taken away?

    PYTHONPATH=tests python -m accelerator.mutations [NUMBER ...]

Each mutation replaces a line in a copy of the package, and runs the tests named beside it there.
Prints a table; the exit code is 1 if a mutation goes unseen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A guard: its name, its file, the text to replace, the new text, tests that should fail."""

    guard: str
    path: str
    old: str
    new: str
    tests: str


DEVICES = "rotor/_pytorch/devices.py"
CONTEXT = "rotor/dtr/context.py"
BLOCKS = "rotor/engines/graph/captured_step.py"
LEVEL = "rotor/meter/reserving.py"
METER = "rotor/meter/allocator.py"
EMIT = "rotor/engines/graph/code/emit.py"
GRAPH = "tests/devices/test_sim_bits.py -k draws_are"
CHAIN = "tests/devices/test_sim_bits.py -k bit_equal"
DYNAMIC = "tests/devices/test_sim_bits.py -k dynamic"
DEFECTS = "tests/devices/test_sim_defects.py -k "
FIRST = "tests/devices/test_sim_first_step.py -k "
POOLING = "rotor/engines/graph/code/pricing.py"
POOLS = "tests/devices/test_sim_pools.py -k "
RESERVED = "tests/devices/test_sim_reserved.py -k "
HOST = "rotor/tier/host.py"
MOVES = "rotor/engines/graph/code/offloading.py"
TIER = "tests/devices/test_sim_tier.py -k "

MUTATIONS = [
    Mutation("a graph's replayed draws start from their state", EMIT,
             'self.lines.append(f"set_state({replay[1:]}, {replay})")', "pass", GRAPH),
    Mutation("draws after a graph's replay are undisturbed", EMIT,
             'self.lines.append(f"set_state({replay[1:]}, now)")', "pass", GRAPH),
    Mutation("a chain's replayed draws start from their state", "rotor/common/modes.py",
             "generator.set_state(state)", "pass", CHAIN),
    Mutation("measuring puts random states back", "rotor/common/undisturbed.py",
             "self._rng.write(self._states)", "pass", "tests/devices/test_sim_bits.py -k draws_no"),
    Mutation("the device's own generator is kept", DEVICES,
             "found: Generator = generators[index]", "found = torch.default_generator", CHAIN),
    Mutation("the dynamic engine keeps the device's generator", "rotor/dtr/runtime.py",
             "return devices.generator_of(self.device)", "return torch.default_generator", DYNAMIC),
    Mutation("libraries are prepared before measuring", "rotor/wrapper/driver.py",
             "devices.prepare(device)", "pass", "tests/devices/test_sim_first_step.py"),
    Mutation("the thread of backwards is prepared too", DEVICES,
             "torch.autograd.grad((matrix @ matrix).sum(), matrix)", "matrix @ matrix",
             "tests/devices/test_sim_first_step.py"),
    Mutation("cached memory is given back after measuring", "rotor/wrapper/driver.py",
             "devices.release_cached(device)", "pass", DEFECTS + "cached"),
    Mutation("a meter waits for the last node of a backward", DEVICES,
             "nothing.view(0).backward(torch.empty(0, device=device))", "pass",
             "tests/devices/test_sim_meter.py"),
    Mutation("a meter pauses the collector", METER, "self._pause.begin()\n        try:",
             "try:", "tests/devices/test_sim_meter.py"),
    Mutation("a meter resets the peak", DEVICES,
             "torch.accelerator.reset_peak_memory_stats(device)", "pass",
             "tests/devices/test_sim_meter.py"),
    Mutation("free bytes include cached ones", METER,
             "free += devices.reserved_bytes(device) - allocated", "pass",
             "tests/devices/test_sim_meter.py"),
    Mutation("free bytes are within the process's fraction", METER,
             "devices.memory_fraction(device)", "1.0", "tests/devices/test_sim_meter.py"),
    Mutation("plans include the slack of large blocks", BLOCKS,
             "needed = found.allocated_peak_bytes", "needed = 0", RESERVED + "allocated_limits"),
    Mutation("reserved limits price reserved bytes", BLOCKS,
             "needed = (pool or found).reserved_peak_bytes", "pass", RESERVED + "a_reserved_limit"),
    Mutation("reserved levels begin without cached memory", LEVEL,
             "devices.release_cached(device)", "pass", RESERVED + "cached_memory"),
    Mutation("reserved levels follow other tensors", LEVEL,
             "known is None or abs(allocated - known) > _NOISE_BYTES", "known is None",
             RESERVED + "came_to_live"),
    Mutation("metered steps count reserved bytes", "rotor/meter/step_meter.py",
             "meter.peak_bytes if reserving is None else reserving.grown_bytes(meter.device)",
             "meter.peak_bytes", RESERVED + "metered"),
    Mutation("freed storages leave the model of the allocator", "rotor/graph/blocks.py",
             "writer.drop(dying)", "pass", RESERVED + "a_reserved_limit"),
    Mutation("workspaces are read from the device's allocator", "rotor/dtr/signatures.py",
             "profiler.AllocationTrace(device_type=device.type)", "profiler.AllocationTrace()",
             DEFECTS + "learnt_workspaces"),
    Mutation("a budget has room for checksums", "rotor/dtr/recall.py",
             "self._slack_bytes) + self._proof_bytes", "self._slack_bytes)",
             DEFECTS + "checksums"),
    Mutation("costs are times of the device", "rotor/dtr/signatures.py",
             "needs.cost_ns = ns", "needs.cost_ns = 1000",
             DEFECTS + "times_of_the_device"),
    Mutation("a budget refuses other streams", DEVICES,
             "torch.accelerator.current_stream(index) != current", "False", DEFECTS + "stream"),
    Mutation("captures are refused", "rotor/wrapper/usage_warnings.py",
             "if devices.is_capturing():",
             "if False:", DEFECTS + "capture"),
    Mutation("costs depend on flags", "rotor/engines/graph/costs/profile.py",
             "dispatch.backend_flags(), ", "", DEFECTS + "flags"),
    Mutation("no index is made up out of bounds", "rotor/engines/graph/costs/profile.py",
             "return (0, 1) if is_safe else (0,)", "return (0, 1)", DEFECTS + "index"),
    Mutation("allocators without counters are refused", METER, "except RuntimeError as error:",
             "except KeyError as error:", DEFECTS + "counters"),
    Mutation("both threads search before a step", "rotor/engines/graph/costs/profile.py",
             "devices.run_in_backward(device, run)", "pass", FIRST + "searched"),
    Mutation("a stage's kernels are chosen in the thread of backwards",
             "rotor/engines/chain/measure.py",
             "devices.run_in_backward(self.device, forward)", "pass", FIRST + "searched"),
    Mutation("one-off reserves are given back", "rotor/engines/learning.py",
             "if 2 * needed < plan.reserve_bytes:", "if False:", FIRST + "shrinks"),
    Mutation("measuring leaves peak statistics", METER, "if not is_traced:\n                "
             "devices.reset_peak(self.device)", "devices.reset_peak(self.device)",
             "tests/devices/test_sim_meter.py -k statistics"),
    Mutation("metered steps read events", METER,
             "return ends.is_main_thread() and not by_counters",
             "return False", "tests/devices/test_sim_meter.py -k statistics"),
    Mutation("the main thread ends a step's trace", METER,
             "ends.at_return_of_backward(self._note_end, done, failed)",
             "super().at_end_of_backward(done, failed)", "tests/devices/test_sim_meter.py"),
    Mutation("backwards of other threads are noticed", METER,
             "elif core.profiler_enabled_here():", "else:\n            "
             "ends.at_return_of_backward(self._note_end, done, failed)\n        if False:",
             "tests/devices/test_sim_meter.py -k another_thread"),
    Mutation("levels at marks are the counters'", METER,
             "self._levels.append(devices.allocated_bytes(self.device) - self._base)",
             "self._levels.append(0)", "tests/devices/test_sim_meter.py"),
    Mutation("the CPU takes no reserved limit", "rotor/engines/graph/calls.py",
             'if counts == "reserved" and device.type == "cpu":', "if False:",
             "tests/engines/test_counts.py"),
    Mutation("a write to the host waits for the value", HOST,
             "to_host.wait_event(came)", "pass", TIER + "for_the_value"),
    Mutation("a fetch waits for its memory", HOST,
             "to_device.wait_event(came)", "pass", TIER + "its_memory"),
    Mutation("a fetch waits for its write", HOST,
             "to_device.wait_event(area.written[offset])", "pass", TIER + "its_memory"),
    Mutation("host bytes are overwritten after a read of them", HOST,
             "to_host.wait_event(copy.event)", "pass", TIER + "overwritten"),
    Mutation("host bytes of an earlier step are overwritten after its reads", HOST,
             "to_host.wait_event(event)", "pass", TIER + "overwritten"),
    Mutation("computing waits for copies", HOST,
             "computing.wait_event(ticket.event)", "pass", TIER + "used_again"),
    Mutation("a step waits for offloads before their memory goes", MOVES,
             'writer.lines.append(f"tier.written({storage})")',
             'writer.lines.append(f"tier._tickets.popitem()")', TIER + "as_large"),
    Mutation("a step waits for fetches before their first use", MOVES,
             'writer.lines.append(f"tier.fetched({storage})")', "pass", TIER + "as_large"),
    Mutation("a clock waits for its last event", "rotor/timing.py",
             "self._events[1].synchronize()", "pass", "tests/algorithms/test_timing.py -k cuda"),
    Mutation("times leave launches out", "rotor/timing.py", "devices.occupy(self._device)", "pass",
             DEFECTS + "launches"),
    Mutation("the runtime waits for no event", "rotor/dtr/signatures.py",
             "clock.stop_later()", "clock.stop", DEFECTS + "waits"),
    Mutation("what outlives a step is copied out of its pool", POOLING,
             "return found.copy_(tensor)", "return tensor", POOLS + "outlives"),
    Mutation("what outlives a step is made outside of its pool", EMIT,
             'self.lines.append("pool.leave()")', 'self.lines.append("pass")', POOLS + "outlives"),
    Mutation("an error leaves the pool", "rotor/engines/graph/code/emit.py",
             '["        pass", "    finally:", "        pool.leave()"]',
             '["        pool.leave()", "    finally:", "        pass"]', POOLS + "failed"),
    Mutation("segments are taken before a step", LEVEL,
             "self.pool = _pool(device, blocks)", "self.pool = _pool(device, ())",
             POOLS + "before_a_step"),
    Mutation("one plan has a pool at a time", LEVEL, "latest.pool = None", "pass",
             POOLS + "goes_with"),
    Mutation("compiled code keeps no pool", POOLING, "weakref.ref(reserving)",
             "(lambda: reserving)", POOLS + "goes_with"),
    Mutation("a gradient that is delivered leaves the pool", "rotor/engines/graph/code/emit.py",
             "with self.outside(self.pooling is not None):", "with self.outside(False):",
             POOLS + "added"),
    Mutation("pools are priced", BLOCKS, "(pool or found).reserved_peak_bytes",
             "found.reserved_peak_bytes", POOLS + "needs_less"),
    Mutation("another plan's cached memory goes first", LEVEL,
             "self._allocated_bytes = None\n            _latest", "_latest",
             RESERVED + "other_shapes"),
    Mutation("orders within operations are priced", "rotor/graph/blocks.py",
             "known[-is_second] if known else", "", POOLS + "priced"),
    Mutation("both blocks of one size may be the freed one",
             "rotor/engines/graph/costs/repeating.py", "for latest in (True, False)",
             "for latest in (True,)", POOLS + "by_hand"),
    Mutation("a budget counts the slack of blocks", CONTEXT, "session.count_slack()", "pass",
             DEFECTS + "rests"),
    Mutation("a budget foresees the slack of blocks", "rotor/dtr/recall.py",
             "self._handler.slack_bytes = self._slack.most_per_block", "pass", DEFECTS + "rests"),
    Mutation("a budget that was passed unseen is a warning", "rotor/dtr/runtime.py",
             "self._warn_of_excess()", "pass", DEFECTS + "passed_unseen"),
]  # fmt: skip


def main(numbers: list[int]) -> int:
    """Run the mutations, all or some by number; return 1 if one goes unseen."""
    unseen = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        for name in ("rotor", "tests", "models"):
            shutil.copytree(ROOT / name, copied / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", copied)
        (copied / "build").mkdir()
        (copied / "build" / "accelerator").symlink_to(ROOT / "build" / "accelerator")
        for number, mutation in enumerate(MUTATIONS, start=1):
            if numbers and number not in numbers:
                continue
            shutil.rmtree(copied / "cache", ignore_errors=True)
            failed = _failed(copied, mutation)
            unseen += not failed
            print(f"{number:2}  {mutation.guard:55}  {failed or 'UNSEEN'}", flush=True)
    return 1 if unseen else 0


def _failed(folder: Path, mutation: Mutation) -> str:
    """Return the first test that fails under a mutation."""
    path = folder / mutation.path
    text = path.read_text()
    if mutation.old not in text:
        raise SystemExit(f"{mutation.path} has no longer {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *mutation.tests.split()],
            cwd=folder,
            env=os.environ
            | {
                "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}",
                "ROTOR_CACHE_DIR": str(folder / "cache"),  # Costs are measured, not remembered.
            },
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ")[1] if failed and done.returncode else ""


if __name__ == "__main__":
    raise SystemExit(main([int(number) for number in sys.argv[1:]]))
