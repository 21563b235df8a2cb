"""Offloaded values of steps that are kept, dropped, interrupted, or fail: nothing is lost."""

from __future__ import annotations

import copy
import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from capture.test_graph_emit import dropout_net
from graph_modules import Planned, in_order
from joint_programs import MemoryTier, offload_at_random
from training import gradients_of, same

from rotor.tier import DiskTier


@pytest.fixture(params=["memory", "disk"])
def tier(request, tmp_path):
    made = MemoryTier() if request.param == "memory" else DiskTier(tmp_path)
    yield made
    made.close()


def everything_moves(planned: Planned) -> list[int]:
    return offload_at_random(
        planned.lowered, in_order(planned.lowered), planned.sizes, seed=3, share=1.0
    )


def offloading(tier) -> tuple[torch.nn.Module, torch.nn.Module, Planned, torch.Tensor]:
    model, x = dropout_net(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    planned = Planned(model, (x,))
    planned.set_actions(everything_moves(planned), tier)
    return model, twin, planned, x


def check_step(model, twin, planned, x) -> None:
    for call in (planned, twin):
        torch.manual_seed(0)
        call(x).sum().backward()
    assert same(gradients_of(model), gradients_of(twin))


def test_two_steps_may_be_pending(tier):
    model, twin, planned, x = offloading(tier)
    torch.manual_seed(0)
    first, second = planned(x), planned(2 * x)
    second.sum().backward()
    first.sum().backward()
    torch.manual_seed(0)
    a, b = twin(x), twin(2 * x)
    b.sum().backward()
    a.sum().backward()
    assert same(gradients_of(model), gradients_of(twin))


def test_a_kept_graph_fetches_again(tier):
    model, twin, planned, x = offloading(tier)
    for call in (planned, twin):
        torch.manual_seed(0)
        y = call(x).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        y.backward()
    assert same(gradients_of(model), gradients_of(twin))


def test_a_dropped_step_waits_for_its_writes():
    tier = MemoryTier()
    _, _, planned, x = offloading(tier)
    y = planned(x)
    assert len(tier.areas) == 1
    del y
    gc.collect()
    assert tier.areas == []
    assert tier.log[-1] == "release"
    # Every transfer that was begun has been waited for.
    assert tier.waiting == []


def test_areas_are_used_again(tmp_path):
    tier = DiskTier(tmp_path)
    model, twin, planned, x = offloading(tier)
    torch.manual_seed(0)
    taken = set()
    for _ in range(6):
        planned(x).sum().backward()
        taken.add(tier.reserved_bytes)
    torch.manual_seed(0)
    for _ in range(6):
        twin(x).sum().backward()
    assert same(gradients_of(model), gradients_of(twin))
    assert len(taken) == 1
    tier.close()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_failed_transfer_fails_the_step_and_no_other(kind):
    """The error comes out at the wait; the next step runs as if nothing had happened."""
    broken = {"now": True}
    tier = MemoryTier(lambda found, number: broken["now"] and found == kind and number > 2)
    model, twin, planned, x = offloading(tier)
    with pytest.raises(OSError, match=rf"{kind} .* failed") as caught:
        planned(x).sum().backward()
    del caught
    gc.collect()
    assert tier.areas == []
    broken["now"] = False
    model.zero_grad()
    check_step(model, twin, planned, x)


def test_an_exception_in_the_loss_leaves_nothing(tier):
    model, twin, planned, x = offloading(tier)
    alive = []

    def failing() -> None:
        y = planned(x)
        alive.append(weakref.ref(planned.capture.token()))
        raise ZeroDivisionError(y)

    with pytest.raises(ZeroDivisionError):
        failing()
    gc.collect()
    assert alive[0]() is None
    check_step(model, twin, planned, x)


def test_a_step_runs_in_another_thread(tier):
    model, twin, planned, x = offloading(tier)
    torch.manual_seed(0)
    y = planned(x).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    torch.manual_seed(0)
    twin(x).sum().backward()
    assert same(gradients_of(model), gradients_of(twin))


class Slow(MemoryTier):
    """Tier whose wait is interrupted once, as by Ctrl-C."""

    is_interrupted = False

    def wait(self, ticket):
        if not self.is_interrupted and ticket[0] is None and len(self.log) > 8:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super().wait(ticket)


def test_an_interrupted_wait_loses_nothing():
    tier = Slow()
    model, twin, planned, x = offloading(tier)
    with pytest.raises(KeyboardInterrupt) as caught:
        planned(x).sum().backward()
    del caught
    gc.collect()
    assert tier.is_interrupted
    assert tier.areas == []
    model.zero_grad()
    check_step(model, twin, planned, x)


def test_control_c_ends_a_wait_for_the_disk(tmp_path):
    """A wait runs handlers of signals, and the transfer keeps its memory."""
    script = """
        import os, signal, sys, threading, time
        import torch
        from rotor.tier import DiskTier
        signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have it ignored.
        tier = DiskTier(sys.argv[1])
        big = torch.ones(256 << 20, dtype=torch.uint8)
        area = tier.allocate(40 * tier.room(big.nbytes))
        tickets = [tier.write(area, k * tier.room(big.nbytes), big) for k in range(40)]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for ticket in tickets:
                tier.wait(ticket)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        os._exit(0)
    """
    done = run(script, tmp_path)
    assert done.stdout.strip() == "interrupted", done.stderr
    assert list(tmp_path.iterdir()) == []


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "1 / 0"])
def test_a_process_that_ends_leaves_no_file(tmp_path, end):
    script = f"""
        import os, signal, sys
        import torch
        from rotor.tier import DiskTier
        tier = DiskTier(sys.argv[1])
        source = torch.ones(32 << 20, dtype=torch.uint8)
        area = tier.allocate(tier.room(source.nbytes))
        ticket = tier.write(area, 0, source)
        assert os.listdir(sys.argv[1]) == []
        {end}
    """
    run(script, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_child_process_is_refused_and_harms_nothing(tmp_path):
    tier = DiskTier(tmp_path)
    source = torch.arange(1 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    area = tier.allocate(tier.room(source.nbytes))
    first = tier.write(area, 0, source)
    child = os.fork()
    if child == 0:
        try:
            tier.write(area, 0, target)
        except ValueError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    tier.wait(first)
    moved = torch.empty(source.nbytes + tier.alignment_bytes, dtype=torch.uint8)
    begin = (source.data_ptr() - moved.data_ptr()) % tier.alignment_bytes
    target = moved[begin : begin + source.nbytes]
    tier.wait(tier.read(area, 0, target))
    assert torch.equal(source, target)
    tier.close()


def test_a_full_disk_is_named_before_a_step_runs(tmp_path):
    tier = DiskTier(tmp_path)
    with pytest.raises(OSError, match=r"offloaded values need .* on the disk") as caught:
        tier.allocate(1 << 55)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(tmp_path)
    # It takes ordinary areas still.
    tier.release(tier.allocate(1 << 20))
    tier.close()


def test_reads_of_another_phase_are_refused(tmp_path):
    tier = DiskTier(tmp_path)
    source = torch.arange(4096, dtype=torch.uint8)
    area = tier.allocate(tier.room(source.nbytes))
    tier.wait(tier.write(area, 0, source[:1000]))
    begin = (source.data_ptr() % tier.alignment_bytes) + 64
    target = torch.empty(8192, dtype=torch.uint8)
    shift = (begin - target.data_ptr()) % tier.alignment_bytes
    with pytest.raises(ValueError, match="phase"):
        tier.read(area, 0, target[shift : shift + 1000])
    with pytest.raises(ValueError, match="of the area"):
        tier.write(area, 4096, source)
    tier.close()


def test_a_file_system_in_memory_is_refused():
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        pytest.skip("no file system in memory here")
    with pytest.raises(ValueError, match="buffered=True"):
        DiskTier(place)
    tier = DiskTier(place, buffered=True)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    area = tier.allocate(tier.room(100))
    tier.wait(tier.write(area, 0, source))
    tier.wait(tier.read(area, 0, target))
    assert torch.equal(source, target)
    assert tier.alignment_bytes == 1
    tier.close()
    with pytest.raises(ValueError, match="closed"):
        tier.write(area, 0, source)


def test_a_copy_has_a_file_of_its_own(tmp_path):
    tier = DiskTier(tmp_path, buffered=False)
    other = copy.deepcopy(tier)
    assert repr(other) == repr(tier) == f"DiskTier({str(tmp_path)!r})"
    tier.close()
    other.release(other.allocate(512))
    other.close()
