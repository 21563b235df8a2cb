"""Models without a graph, whose parameters, gradients and states are on a disk."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from tiers.test_larger import GPT, OPTIMIZERS, assert_same, groups, train
from torch import nn
from torch.nn import functional as F

import rotor
from rotor.engines.dynamic.additions import AS_OPERATORS
from rotor.memory import meter

quiet = pytest.mark.filterwarnings("ignore:no single graph")


class Asking(GPT):
    """GPT whose code depends on its values."""

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean().item() > 1e6:
                x = x / 2
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Routed(nn.Module):
    """Mixture of experts, each of which sees its own words."""

    def __init__(self, width=64, experts=3) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(200, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, 200)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(words).flatten(0, 1)
        gates = self.gate(x).softmax(-1)
        best, found = gates.argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            where = (best == k).nonzero()[:, 0]
            found = found.index_add(0, where, expert(x[where]) * gates[where, k, None])
        return F.cross_entropy(self.head(x + found), targets.flatten())


MODELS = {
    "asking": (partial(Asking, 3), 480_000),
    "tied": (partial(Asking, 3, tied=True), 530_000),
    "dropout": (partial(Asking, 3, dropout=0.1), 510_000),
    "routed": (Routed, 360_000),
}


def batches(count: int = 3, lengths=(32,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    shapes = [(3, lengths[k % len(lengths)]) for k in range(count)]
    return [(torch.randint(0, 200, s), torch.randint(0, 200, s)) for s in shapes]


def compare(name: str, way: str = "plain", optimizer: str = "adamw", lengths=(32,)):
    """Train both, and compare; then see that steps keep the limit. Return the wrapped model."""
    make, limit = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    model, data = copy.deepcopy(plain), batches(lengths=lengths)
    one, other = (OPTIMIZERS[optimizer](groups(m, way)) for m in (plain, model))
    expected = train(plain, plain, one, data, way)
    settings = {"mem_limit": limit, "offload": "disk", "offload_state": other}
    chk = rotor.Checkpointable(model, **settings, engine="dynamic")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train(chk, model, other, data, way) == expected
    assert_same(plain, model, one, other)
    assert chk.plan.engine == "dynamic"
    assert not [str(w.message) for w in told if "could not be kept" in str(w.message)]
    optimizer_states = [s for state in other.state.values() for s in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *optimizer_states]
    own = sum(t.nbytes for t in tensors if type(t) in (torch.Tensor, nn.Parameter))
    for batch in data:
        # The first steps have metered themselves.
        with meter("cpu") as m:
            for _ in range(2 if way == "accumulation" else 1):
                chk(*batch).backward()
        assert m.peak_bytes + own <= limit
        other.step()
        other.zero_grad()
    assert sum(p.nbytes for p in plain.parameters()) > limit
    return chk, other


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(name):
    compare(name)


@pytest.mark.parametrize("way", ["accumulation", "clipping", "frozen"])
def test_ways_to_train(way):
    compare("asking", way)


def test_several_lengths():
    chk, _ = compare("routed", lengths=(32, 20, 28), optimizer="momentum")
    model = chk.module
    model.eval()
    with torch.no_grad():
        assert torch.equal(chk(*batches(1)[0]), copy.deepcopy(model)(*batches(1)[0]))


def test_a_shared_parameter_has_one_gradient_under_accumulation():
    compare("tied", "accumulation")


@quiet
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("make", [Asking, GPT])
def test_an_update_between_forward_and_backward_is_an_error(make, update):
    """As in plain training, also where no small parameter is there to show it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    if make is Asking:
        model.register_forward_hook(
            lambda module, given, made: made * (1 + (made.sum().item() > 9))
        )
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    chk = rotor.Checkpointable(
        model, mem_limit="2MiB", offload="disk", offload_state=optimizer, update=update
    )
    x = torch.randn(64, 64)
    for _ in range(2):
        chk(x).square().mean().backward()
    loss = chk(x).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()
    loss = chk(x).square().mean()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


@quiet
def test_too_small_a_limit_is_an_error_that_changes_nothing():
    make, limit = MODELS["asking"]
    torch.manual_seed(0)
    model = make()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    settings = {"mem_limit": limit // 2, "offload": "disk", "offload_state": optimizer}
    chk = rotor.Checkpointable(model, **settings, engine="dynamic")
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk(*batches(1)[0]).backward()
    assert caught.value.minimum_bytes > limit // 2
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    chk.mem_limit = limit
    chk(*batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.AdamW, torch.optim.Rprop])
def test_small_states_are_counted_before_they_are_made(make):
    """Such as the sums of rows and columns, which stay in memory: a limit leaves room for them."""
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 64), nn.LayerNorm(64))
    optimizer = make(model.parameters())
    chk = rotor.Checkpointable(model, mem_limit="1MiB", offload="disk", offload_state=optimizer)
    expected = chk.homes["resident"]
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    made = [s for state in optimizer.state.values() for s in state.values() if s.numel() > 1]
    assert any(s.nbytes < 4096 for s in made)
    assert expected - 500 < chk.homes["resident"] <= expected


@pytest.mark.parametrize("name", ["asking", "routed"])
def test_a_limit_that_steps_keep_is_accepted_before_the_first(name):
    """Gradients leave in a trial too, for nowhere."""
    make, limit = MODELS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    settings = {"mem_limit": limit, "offload": "disk", "offload_state": optimizer}
    chk = rotor.Checkpointable(model, engine="dynamic", **settings)
    chk.measure(*batches()[0])
    assert all(parameter.grad is None for parameter in model.parameters())


class Waiting(Asking):
    """Model whose forward sets an event, and waits for another one."""

    events = threading.Event(), threading.Event()

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        begun, other = self.events
        begun.set()
        other.wait(10)
        time.sleep(0.1)
        return super().forward(words, targets)


def test_steps_in_two_threads_leave_fetches_as_they_were(monkeypatch):
    """The second one's step begins while the first one's runs, and waits for it."""
    owner = GPT()
    rotor.Checkpointable(
        owner,
        mem_limit="4 MB",
        offload="disk",
        offload_state=OPTIMIZERS["adamw"](owner.parameters()),
    )

    def fetched_bytes() -> int:
        with torch.no_grad(), meter("cpu") as m:
            owner.head.weight.sum()
        return m.peak_bytes

    first, second = (
        rotor.Checkpointable(make(), mem_limit="4 MB", engine="dynamic")
        for make in (Waiting, Asking)
    )
    (batch,), expected = batches(1), fetched_bytes()
    begun, other = Waiting.events

    def follow() -> None:
        begun.wait(10)
        other.set()
        second(*batch).backward()

    threads = [
        threading.Thread(target=follow),
        threading.Thread(target=lambda: first(*batch).backward()),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched_bytes() == expected
    # Another thread's session does not see the fetches of this one.
    home, name, by_operator = AS_OPERATORS
    monkeypatch.setattr(home, name, by_operator)
    assert fetched_bytes() == expected
