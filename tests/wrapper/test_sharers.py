"""Processes that share an accelerator, where each is shown some of the devices only."""

import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed

from rotor._pytorch import core, devices
from rotor.common import ranks

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def store(monkeypatch):
    """Return the store of rank 0 of two, both on this machine, which sees one device."""
    found = distributed.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(core, "default_store", lambda: found)
    monkeypatch.setattr(devices, "count", lambda kind: 1)
    monkeypatch.setattr(devices, "identity", lambda device: "GPU-a")
    monkeypatch.setattr(ranks, "_sharers", {})
    monkeypatch.setattr(ranks, "_PATIENCE", timedelta(seconds=0.2))
    return found


@pytest.mark.parametrize(("other", "expected"), [("GPU-b", 1), ("GPU-a", 2)])
def test_one_visible_device_each(store, other, expected):
    """Divide no device by processes that have another one."""
    store.set("rotor/device/1", f"{socket.gethostname()} {other}")
    assert ranks.sharers(DEVICE) == expected
    assert store.get("rotor/device/0").decode() == f"{socket.gethostname()} GPU-a"


def test_a_rank_that_says_nothing(store):
    """Divide the memory as if all shared it, and wait for nobody twice."""
    assert ranks.sharers(DEVICE) == 2
    store.set("rotor/device/1", f"{socket.gethostname()} GPU-b")
    assert ranks.sharers(DEVICE) == 2


def test_devices_for_all(store, monkeypatch):
    """Ask nobody where there are as many devices as processes."""
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.setattr(core, "default_store", None)
    assert ranks.sharers(DEVICE) == 1
