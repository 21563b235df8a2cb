"""Forward and backward in whatever threads, and programs that end between the two."""

from __future__ import annotations

import queue
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from training import same
from versions import needs_swaps, needs_threads
from zoo.models import Asking, Skip

import rotor
from rotor import dtr, memory

ENGINES = ["chain", "graph", "dynamic"]
LIMIT = "2.2 MB"


def chain():
    torch.manual_seed(0)
    layers = [(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(4)]
    return nn.Sequential(*[layer for block in layers for layer in block])


def parts():
    return Asking(*(Skip(*chain()[:3]) for _ in range(4)))


def made(engine):
    model = parts() if engine == "parts" else chain()
    name = "auto" if engine == "parts" else engine
    return rotor.Checkpointable(model, mem_limit=LIMIT, engine=name, verbosity=0)


def here(function):
    return function()


def elsewhere(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def trained(model, forward=here, backward=here, steps=2):
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(512, 64, generator=generator)
        model.zero_grad()
        loss = forward(lambda x=x: model(x).square().mean())
        backward(loss.backward)
        found += [p.grad.clone() for p in model.parameters()]
    return found


@contextmanager
def remarks():
    """Give the texts of warnings, among which the one of a model in parts does not count."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = []
        yield texts
    texts += [str(w.message) for w in caught if "single graph" not in str(w.message)]


@needs_threads
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["forward", "backward", "each"])
def test_a_step_may_go_on_in_another_thread(engine, where):
    pool = ThreadPoolExecutor(1)
    ways = {
        "forward": (elsewhere, here),
        "backward": (here, lambda function: pool.submit(function).result()),
        "each": (elsewhere, elsewhere),
    }
    model = made(engine)
    with remarks() as texts:
        assert same(trained(model, *ways[where], steps=5), trained(chain(), steps=5))
    pool.shutdown()
    assert len(texts) == 1
    assert "another thread than its forward: its memory cannot be measured" in texts[0]
    assert model.plan.measured_bytes is None
    with memory.meter("cpu"):
        pass


@needs_threads
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_in_another_thread_are_metered(engine):
    model = made(engine)
    assert same(elsewhere(lambda: trained(model)), trained(chain()))
    assert model.plan.measured_bytes
    assert same(trained(model), trained(chain()))


@needs_threads
@pytest.mark.parametrize("engine", [*ENGINES, "parts"])
def test_two_models_train_in_two_threads(engine):
    plain = parts() if engine == "parts" else chain()
    expected, found = trained(plain, steps=4), {}
    models = [made(engine) for _ in range(2)]

    def train(number):
        found[number] = trained(models[number], steps=4)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    with remarks():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(found[number], expected) for number in range(2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_thread_that_prefetches_changes_no_figures(engine):
    batches, asked, done = queue.Queue(1), queue.Queue(), threading.Event()
    # Numbers from the default generator would count as the stages' own.
    own = torch.Generator()

    def feed():
        while not done.is_set():
            batches.put(torch.randn(512, 64, generator=own).mul(2).add(1))
            asked.get()

    def steps(model, take):
        found = []
        for _ in range(4):
            model.zero_grad()
            model(take()).square().mean().backward()
            found.append(getattr(model, "plan", None) and model.plan.measured_bytes)
        return found

    def taken():
        asked.put(None)
        return batches.get()

    alone = steps(made(engine), lambda: torch.randn(512, 64))
    thread = threading.Thread(target=feed)
    thread.start()
    beside = steps(made(engine), taken)
    done.set()
    asked.put(None)
    batches.get(timeout=10)
    thread.join()
    if engine == "dynamic":
        # Evictions follow measured times.
        assert max(beside) <= rotor.units.parse_bytes(LIMIT)
    else:
        assert beside == alone


def test_a_thread_that_ends_leaves_no_meter_on():
    model = made("chain")
    kept = elsewhere(lambda: model(torch.ones(512, 64)))
    with memory.meter("cpu") as meter:
        torch.ones(1000)
    assert meter.peak_bytes == 4000
    del kept


def test_a_measurement_waits_for_the_meter_of_another_thread():
    ready, go = threading.Event(), threading.Event()

    def metered():
        with memory.meter("cpu") as meter:
            ready.set()
            go.wait()
            torch.ones(500)
        return meter.peak_bytes

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(metered)
        ready.wait()
        second = pool.submit(metered)
        go.set()
        assert first.result() == second.result() == 2000


@needs_swaps
def test_budgets_of_two_threads_follow_each_other():
    def train(model):
        with dtr.budget(LIMIT):
            return trained(model)

    expected = trained(chain())
    models = [chain(), chain()]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(train, model) for model in models]
    assert all(same(future.result(), expected) for future in futures)


MODEL = """
import os, sys, threading, torch, rotor
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
model = rotor.Checkpointable(model, mem_limit="1 MB", engine=sys.argv[1], verbosity=0)
y = model(torch.randn(4, 8))
"""
ENDS = {
    "raise ValueError('the loss fails')": 1,
    "sys.exit(3)": 3,
    "": 0,
    "os._exit(4)": 4,
    "raise KeyboardInterrupt": -2,
    "model(torch.randn(4, 8)).sum().backward(); y2 = model(torch.randn(4, 8)); sys.exit(5)": 5,
    "t = threading.Thread(target=lambda: sys.exit(model(torch.randn(4, 8)).grad)); t.start()": 0,
    "del y; e = threading.Event()\n"
    "def f(): z = model(torch.randn(4, 8)); e.set(); threading.Event().wait()\n"
    "threading.Thread(target=f, daemon=True).start(); e.wait(); sys.exit(6)": 6,
    "import multiprocessing; p = multiprocessing.get_context('fork').Process("
    "target=torch.randn, args=(4,)); p.start(); p.join(); sys.exit(p.exitcode + 7)": 7,
    **{
        f"{before}\nimport ctypes, signal\nif os.fork() == 0:\n"
        f"    signal.alarm(20); ctypes.CDLL(None).printf(b'C ends'); {end}\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 8)": code + 8
        for before in ("", "y.sum().backward(); del y")
        for end, code in {"sys.exit(3)": 3, "raise ValueError": 1}.items()
    },
    "d = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context='fork')\n"
    "assert len(list(d)) == 4; y.sum().backward(); sys.exit(8)": 8,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_before_its_backward_ends_as_without_a_limit(end):
    engine = ENGINES[list(ENDS).index(end) % len(ENGINES)]
    command = [sys.executable, "-W", "ignore", "-c", MODEL + textwrap.dedent(end), engine]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.returncode == ENDS[end], child.stderr
    assert child.stdout == ("C ends" if "printf" in end else "")


WITHOUT_STDERR = """
import sys, torch, rotor
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
model = rotor.Checkpointable(model, mem_limit="700 KB", verbosity=1)
{end}
for _ in range(2):
    y = model(torch.randn(512, 64))
    (y.exp() * y.sin() * y.cos()).softmax(0).sum().backward()
print("trained")
"""


@pytest.mark.parametrize("end", ["sys.stderr.close()", "sys.stderr = None"])
def test_lines_and_warnings_that_cannot_be_shown_fail_nothing(end):
    """As in a daemon: a loss that needs more than the limit is warned of."""
    command = [sys.executable, "-c", WITHOUT_STDERR.format(end=end)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.stdout == "trained\n", child.stderr
