"""One thread and drawn examples that stay: results are the same everywhere, none spins."""

from __future__ import annotations

import gc
import itertools
import os
import sys

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_protocol(item, nextitem):
    """Run tests on the simulated accelerator in a process of their own."""
    if not item.path.name.startswith("test_sim_"):
        return None
    from accelerator import processes

    if processes.is_child():
        return None
    processes.run_elsewhere(item)
    # What an earlier test of this folder left set up for this one.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@pytest.fixture(autouse=True)
def few_objects():
    """Have collections pass over what was made before the test: PyTorch is a million objects."""
    gc.collect()
    gc.freeze()


_LEARNT = {
    "rotor._pytorch.devices": ["_prepared", "_capped"],
    "rotor._pytorch.dispatch": ["_waiting"],
    "rotor.common.checksums": ["_keys"],
    "rotor.dtr.repeating": ["_known", "_unwritten"],
    "rotor.dtr.signatures": ["_needs", "_timed"],
    "rotor.engines.chain.stages": ["source_of", "token_of"],
}
"""Tables of a process, and functions with one: operators' needs, tensors kept on devices, and steps
whose last backward has not come."""


_number = itertools.count()


@pytest.fixture(autouse=True)
def nothing_learnt(tmp_path_factory, monkeypatch):
    """Begin each test with what a new process of a new user knows of operators and devices."""
    folder = tmp_path_factory.getbasetemp() / f"cache{next(_number)}"
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(folder))
    # Texts are as wide as they are, whatever terminal the tests run in.
    monkeypatch.setenv("COLUMNS", "10000")
    for module, names in _LEARNT.items():
        for name in names if module in sys.modules else ():
            table = getattr(sys.modules[module], name)
            (table.cache_clear if callable(table) else table.clear)()
    if "torch._dynamo.guards" in sys.modules:
        # For its log alone PyTorch times the guards of each capture, on emptied processor caches.
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


_CAPTURING = {"capture", "tiers", "test_background_tier", "test_sim_tier"}
_CAPTURING |= {"test_timeline", "test_trace"}


@pytest.fixture(autouse=True)
def no_compiled_code_stays(request):
    """Have captures, in these folders and files, find no code of another test's."""
    yield
    is_capturing = _CAPTURING & {request.path.parent.name, request.path.stem}
    if is_capturing and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def sim(nothing_learnt):
    """Give the simulated accelerator, empty, with the settings it starts with."""
    import torch
    from accelerator import load

    module = load()
    module.set_handles()
    module.set_devices(1)
    module.set_capacity(256 << 20)
    module.set_taken(0)
    module.set_per_process_memory_fraction(1.0)
    module.set_clock("real")
    module.set_poison(1)
    module.set_late_copies(1)
    gc.collect()
    module.forget_handles()
    module.empty_cache()
    module.set_expandable(0)
    module.reset_peak_memory_stats()
    module.reset_accumulated_memory_stats()
    torch.manual_seed(0)
    module.planned_races = 0
    races = module.races()
    yield module
    module.set_handles()
    assert module.races() == races + module.planned_races, module.last_race()


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Give a tier on the disk to which values of any size may go."""
    from rotor.tier import DiskTier

    tier = DiskTier(tmp_path_factory.mktemp("tier"))
    tier.least_bytes = 1
    yield tier
    tier.close()


@pytest.fixture(autouse=True)
def plans_stay(request, monkeypatch):
    """Let no search end while a test runs, and keep no programs for other tests.

    A test that wants better plans runs the searches itself (background_models.py).
    """
    if request.module.__name__.rpartition(".")[2].startswith("test_background"):
        return
    try:
        import torch  # noqa: F401
    except ImportError:
        return
    from background_models import Stepped

    from rotor.engines.graph import improving
    from rotor.engines.graph import searching as known

    monkeypatch.setattr(improving, "ThreadJob", Stepped())
    monkeypatch.setattr(known.Known, "keep", lambda *_: None)
    monkeypatch.setattr(known.KnownOrders, "keep", lambda *_: None)


@pytest.fixture(autouse=True)
def steady_times(request, monkeypatch):
    """Have operators of the dynamic engine take as long each: what it evicts follows from that."""
    if request.module.__name__.rpartition(".")[2].startswith("test_dynamic"):
        monkeypatch.setattr("rotor.dtr.recall.CLOCK", itertools.count(0, 1000).__next__)
