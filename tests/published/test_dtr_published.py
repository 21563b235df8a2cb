"""Programs written for the prototype of dynamic tensor rematerialization, on the CPU.

The prototype's functions are methods of tensors and functions of ``torch``; these programs call
them in the same order by their names in `rotor.dtr`.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor import dtr, simrd

pytestmark = pytest.mark.filterwarnings("ignore:leaving the context brought back")
WIDTH = 2000
BYTES = 4 * WIDTH
ROOM = 1_000_000


@pytest.fixture(autouse=True)
def unset():
    yield
    dtr.unset_memory_budget()
    dtr.toggle_sampling(True)
    dtr.toggle_ignore_small_tensors(True)
    assert dtr.current() is None


def level() -> int:
    """Bytes that are allocated, from the message of an error."""
    with pytest.raises(ValueError, match="allocated already") as caught:
        dtr.set_memory_budget(1)
    text = str(caught.value).split("above the ")[1]
    return int(re.search(r"(\d+) bytes", text)[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])


def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One step as the prototype's trials do it: checkpoint, annotate, backward, decheckpoint."""
    x, target = dtr.checkpoint(x), dtr.checkpoint(target)
    for parameter in model.parameters():
        dtr.try_checkpoint(parameter)
    loss = F.mse_loss(model(x), target)
    dtr.annotate_log("BACKWARD")
    loss.backward()
    dtr.decheckpoint(x)
    dtr.decheckpoint(target)
    return dtr.uncheckpoint(loss)


def plain(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), target)
    loss.backward()
    return loss


def test_checkpoint_needs_no_budget():
    model, x, target = network(), torch.randn(256, 64), torch.randn(256, 64)
    other = copy.deepcopy(model)
    expected = plain(other, x, target)
    found = step(model, x, target)
    assert dtr.current() is not None
    assert dtr.current().limit is None
    assert dtr.current().stats.evictions == 0
    assert torch.equal(found, expected)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    dtr.unset_memory_budget()
    assert dtr.current() is None


def test_a_limit_may_follow_the_first_checkpoint():
    x = torch.linspace(0.1, 2.0, WIDTH)
    dtr.try_checkpoint(x)
    dtr.set_memory_budget(level() + 6 * BYTES)
    values = [(x * k).sin() for k in range(1, 13)]
    assert dtr.current().stats.evictions > 0
    assert dtr.current().stats.peak_bytes <= 6 * BYTES
    dtr.unset_memory_budget()
    assert all(torch.equal(value, (x * k).sin()) for k, value in enumerate(values, 1))


def test_the_order_of_a_published_trial(tmp_path):
    """Budget, then toggles, profile and log off; then repetitions, the last one of them logged."""
    model, x, target = network(), torch.randn(256, 64), torch.randn(256, 64)
    expected = plain(copy.deepcopy(model), x, target)
    dtr.set_memory_budget(level() + ROOM)
    dtr.toggle_ignore_small_tensors(False)
    dtr.toggle_sampling(False)
    dtr.toggle_log(False)
    dtr.toggle_profile(True)
    for repetition in range(2):
        if repetition == 1:
            dtr.new_log(tmp_path / "last.log")
            dtr.toggle_log(True)
            dtr.annotate_log("START")
        dtr.reset_profile()
        found = step(copy.deepcopy(model), x.clone(), target.clone())
        assert torch.equal(found, expected)
    stats = dtr.current().stats
    assert stats.evictions > 0
    assert dtr.compute_time() == dtr.base_compute_time() + dtr.remat_compute_time() > 0
    dtr.unset_memory_budget()
    log = simrd.parse(tmp_path / "last.log")
    assert log.start_count == 1
    assert simrd.simulate(log, ratio=1.0).status == "ok"


@pytest.fixture
def installed():
    dtr.install()
    yield
    dtr.uninstall()


def test_a_program_of_the_prototype_runs_as_it_is(installed, tmp_path):
    """Methods of tensors and functions of torch, in the order of the prototype's trials."""
    model, x, target = network(), torch.randn(256, 64), torch.randn(256, 64)
    expected = plain(copy.deepcopy(model), x, target)
    torch.reset_profile()
    torch.set_memory_budget(level() + ROOM)
    torch.toggle_sampling(False)
    torch.toggle_ignore_small_tensors(False)
    torch.toggle_profile(True)
    torch.new_log(str(tmp_path / "trial.log"))
    torch.annotate_log("START")
    torch.reset_profile()
    parameters = [parameter.try_checkpoint() for parameter in model.parameters()]
    x, target = x.checkpoint(), target.checkpoint()
    assert x.is_checkpoint()
    loss = F.mse_loss(model(x), target)
    torch.annotate_log("BACKWARD")
    loss.backward()
    torch.toggle_log(False)
    assert x.decheckpoint() is x
    assert loss.pin() is loss
    assert torch.equal(target.uncheckpoint(), target)
    assert torch.equal(loss.decheckpoint(), expected)
    assert torch.compute_time() == torch.base_compute_time() + torch.remat_compute_time() > 0
    assert torch.search_time() == torch.cost_time() + torch.loop_time()
    torch.clear_checkpointpool()
    torch.unset_memory_budget()
    torch.clear_checkpointpool()
    assert all(parameter.grad is not None for parameter in parameters)
    assert simrd.simulate(tmp_path / "trial.log", ratio=1.0).status == "ok"


def test_installing_twice_is_installing_once_and_is_taken_back(installed):
    dtr.install()
    assert torch.ones(2).decheckpoint().tolist() == [1, 1]
    dtr.uninstall()
    dtr.uninstall()
    names = [n for n in dtr.published.__all__ if hasattr(torch, n) or hasattr(torch.Tensor, n)]
    assert names == []


def test_what_exists_is_not_replaced(monkeypatch):
    monkeypatch.setattr(torch, "new_log", print, raising=False)
    with pytest.raises(RuntimeError, match=r"torch\.new_log exists already"):
        dtr.install()
    assert not hasattr(torch.Tensor, "checkpoint")
    dtr.uninstall()
    assert torch.new_log is print


class Evicted:
    """Observes what is evicted."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def evicted(self, node: int) -> None:
        self.nodes.append(node)

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def evicted_positions(heuristic: str, **choice: bool) -> list[int]:
    """Positions of what is evicted among large results of many sizes, each before a small one."""
    seen = Evicted()
    x = torch.linspace(0.1, 2.0, 20 * WIDTH)
    with dtr.budget(30 * x.nbytes, heuristic=heuristic, record_log=seen) as session:
        session.consider(**choice)
        nodes, values = {}, []
        for k in range(1, 90):
            values += [(x[: 19 * WIDTH + k] * k).sin(), (x[:100] * k).sin()]
            for value in values[-2:]:
                nodes[session.reference(value).node] = len(nodes)
        return [nodes[node] for node in seen.nodes if node in nodes]


def test_candidates_may_change_while_a_budget_holds():
    """LRU evicts the oldest, LargestStorage the largest of what they look at."""
    plain = evicted_positions("LRU", sample=False, ignore_small=False)
    assert len(plain) > 60
    assert plain == list(range(len(plain)))
    large = evicted_positions("LRU", sample=False, ignore_small=True)
    assert large == list(range(0, 2 * len(large), 2))
    largest = evicted_positions("LargestStorage", sample=False, ignore_small=False)
    assert largest == sorted(largest)
    sampled = evicted_positions("LargestStorage", sample=True, ignore_small=False)
    assert sampled != sorted(sampled)


def test_toggles_may_follow_the_budget(monkeypatch):
    """The session that holds is told at once; one that begins later has the same settings."""
    considered = []
    consider = dtr.Session.consider

    def spied(session, *, sample, ignore_small):
        considered.append((sample, ignore_small))
        consider(session, sample=sample, ignore_small=ignore_small)

    monkeypatch.setattr(dtr.Session, "consider", spied)
    dtr.set_memory_budget(None)
    dtr.toggle_sampling(False)
    dtr.toggle_ignore_small_tensors(False)
    dtr.toggle_sampling(True)
    assert considered == [(False, True), (False, False), (True, False)]


def test_what_is_not_managed_cannot_be_unmanaged():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="not managed"):
        dtr.uncheckpoint(x)
    with pytest.raises(TypeError, match="expected a tensor"):
        dtr.uncheckpoint([1.0])
    assert dtr.uncheckpoint(dtr.checkpoint(x)) is x
    with pytest.raises(ValueError, match="decheckpoint accepts others too"):
        dtr.uncheckpoint(x)
    assert dtr.decheckpoint(x) is x


def test_a_log_needs_no_budget(tmp_path):
    dtr.new_log(tmp_path / "free.log")
    torch.ones(WIDTH).exp()
    dtr.unset_memory_budget()
    assert simrd.parse(tmp_path / "free.log").operation_count >= 2
