"""An accelerator that PyTorch was built for and that this machine does not have."""

import copy

import pytest
import torch
from torch import nn

import rotor
from rotor._pytorch import devices


@pytest.fixture
def absent(monkeypatch):
    """Have PyTorch name CUDA, and refuse every question, as without a driver."""
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")

    def missing(*_):
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    names = "is_current_stream_capturing", "current_stream", "get_device_properties", "mem_get_info"
    for name in names:
        monkeypatch.setattr(torch.cuda, name, missing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("engine", ["graph", "chain", "dynamic"])
def test_a_model_trains_on_the_cpu(engine):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    plain, batch = copy.deepcopy(model), torch.randn(256, 64)
    chk = rotor.Checkpointable(model, mem_limit="800KiB", engine=engine, verbosity=0)
    for step in (plain, chk):
        step(batch).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.usefixtures("absent")
def test_nothing_is_in_use_and_nothing_is_captured():
    assert devices.accelerator_in_use() == torch.device("cpu")
    assert not devices.is_capturing()
    assert devices.chosen(None) == torch.device("cpu")


class Listed:
    """Module of a device that says nothing of being initialised."""

    @staticmethod
    def is_available():
        return False

    @staticmethod
    def device_count():
        return 0


@pytest.mark.usefixtures("absent")
def test_a_module_that_says_nothing_of_its_state_is_asked_whether_it_is_there(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Listed)
    assert devices.accelerator_in_use() == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_device_that_is_missing_is_refused_in_words():
    with pytest.raises(ValueError, match="'cuda': this machine has 0 CUDA devices"):
        devices.known("cuda")
    with pytest.raises(ValueError, match="'cuda': this machine has 0 CUDA devices"):
        rotor.memory.meter("cuda")
