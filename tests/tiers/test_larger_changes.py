"""Trainings that change on their way, with parameters, gradients and states on a disk."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from tiers.test_larger import GPT, OPTIMIZERS, assert_same, train
from tiers.test_larger_dynamic import Asking, batches
from tiers.test_larger_parts import Breaking
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.lr_scheduler import StepLR

import rotor
from rotor.memory import meter
from rotor.units import exact_bytes

MODELS = {"graph": (GPT, 900_000), "parts": (Breaking, 900_000), "dynamic": (Asking, 600_000)}


def pair(engine: str):
    """Return two equal models that an engine runs, and a limit."""
    torch.manual_seed(0)
    make, limit = MODELS[engine]
    plain = make()
    return plain, copy.deepcopy(plain), limit


def wrapped(model, engine: str, **settings):
    return rotor.Checkpointable(
        model, engine="dynamic" if engine == "dynamic" else "auto", offload="disk", **settings
    )


def own_bytes(model, optimizer) -> int:
    """Return the bytes in memory of parameters, buffers and states."""
    states = [s for state in optimizer.state.values() for s in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return sum(t.nbytes for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter))


def assert_kept(chk, optimizer, limit: int) -> None:
    """Assert that further steps, with their updates, keep a limit."""
    for batch in batches(2):
        with meter("cpu") as m:
            chk(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert m.peak_bytes + own_bytes(chk.module, optimizer) <= limit


# The first steps of parts show what the loss and the code between them need.
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("engine", sorted(MODELS))
def test_parameters_are_frozen_and_trained_later(engine):
    """Some are frozen when the model is wrapped, others after that, and then all are trained."""
    plain, model, limit = pair(engine)
    pairs = [(plain, plain)]
    optimizers = []
    for one in (plain, model):
        first, second, *rest = one.parameters()
        first.requires_grad_(False)
        optimizers.append(OPTIMIZERS["adamw"]([first, second, *rest]))
    chk = wrapped(model, engine, mem_limit=limit, offload_state=optimizers[1])
    pairs.append((chk, model))
    found: list = [[], []]
    for frozen in ((0,), (-1, -2), (), (3,)):
        for losses, optimizer, (call, one) in zip(found, optimizers, pairs, strict=True):
            parameters = list(one.parameters())
            for parameter in parameters:
                parameter.requires_grad_(True)
            for k in frozen:
                parameters[k].requires_grad_(False)
            losses += train(call, one, optimizer, batches(2))
    assert found[0] == found[1]
    assert_same(plain, model, *optimizers)
    assert chk.plan.engine == engine
    assert_kept(chk, optimizers[1], limit)


class Skipping(GPT):
    """GPT that leaves out a block in some steps."""

    def forward(self, words: torch.Tensor, skip=None) -> torch.Tensor:
        x = self.embed(words)
        for k, block in enumerate(self.blocks):
            if k != skip:
                x = block(x)
        return self.head(x)


def test_a_step_is_captured_anew_as_it_runs():
    """For another value of a number: it fetches parameters, and they get its gradients."""
    torch.manual_seed(0)
    plain = Skipping(3, words=300)
    words, targets = torch.randint(0, 300, (2, 4, 32))
    model = copy.deepcopy(plain)
    optimizers = [OPTIMIZERS["adamw"](one.parameters()) for one in (plain, model)]
    chk = rotor.Checkpointable(
        model, mem_limit=746_000, offload="disk", offload_state=optimizers[1]
    )
    steps = (None, 0, 1, 2, None, 1, 1, None, 0, 1, 2, 1)
    for number, skip in enumerate(steps):
        losses = []
        for call, optimizer in zip((plain, chk), optimizers, strict=True):
            made = call(words, skip).flatten(0, 1)
            losses.append(F.cross_entropy(made, targets.flatten()))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number not in (1, 4))
        assert torch.equal(*losses)
    assert_same(plain, model, *optimizers)


def taken_over(one, call, name: str, frozen: int = 0):
    """Return a new optimizer of a model that freezes some parameters, once it has taken over."""
    for parameter in list(one.parameters())[:frozen]:
        parameter.requires_grad_(False)
    made = OPTIMIZERS[name]([p for p in one.parameters() if p.requires_grad])
    if call is not one:
        call.offload_state = made
        assert call.offload_state is made
    return made


def held(model, *optimizers):
    """Return parameters, states and settings, with copies of their values."""
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    return [p.detach().clone() for p in model.parameters()], states


def assert_unchanged(before, now) -> None:
    assert all(map(torch.equal, before[0], now[0]))
    for one, other in zip(before[1], now[1], strict=True):
        assert one["param_groups"] == other["param_groups"]
        assert one["state"].keys() == other["state"].keys()
        for key, state in one["state"].items():
            assert all(torch.equal(value, other["state"][key][k]) for k, value in state.items())


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("change", [("adamw", 0), ("momentum", 12)], ids=["all", "half"])
@pytest.mark.parametrize("engine", sorted(MODELS))
def test_another_optimizer_takes_over(engine, change):
    """Its states are in the tier, and the former one can come back with the states that it had."""
    plain, model, limit = pair(engine)
    olds = [OPTIMIZERS["momentum"](one.parameters()) for one in (plain, model)]
    chk = wrapped(model, engine, mem_limit=limit, offload_state=olds[1])
    found: list = [[], []]
    news = []
    for losses, old, call, one in zip(found, olds, (plain, chk), (plain, model), strict=True):
        losses += train(call, one, old, batches(2))
        news.append(taken_over(one, call, *change))
        losses += train(call, one, news[-1], batches(2))
    assert found[0] == found[1]
    assert_same(plain, model, *news)
    assert_kept(chk, news[1], limit)
    assert "step" not in vars(olds[1])
    for batch in batches(2):
        plain(*batch).backward()
        news[0].step()
        news[0].zero_grad()
    for parameter in (*plain.parameters(), *model.parameters()):
        parameter.requires_grad_(True)
    chk.offload_state = olds[1]
    losses = [
        train(call, one, old, batches(2))
        for call, one, old in ((plain, plain, olds[0]), (chk, model, olds[1]))
    ]
    assert losses[0] == losses[1]
    assert_same(plain, model, *olds)
    assert_kept(chk, olds[1], limit)


@pytest.mark.parametrize("way", ["step", "closure", "scaler", "former"])
def test_another_optimizer_is_refused(way):
    """Before it has changed anything; with those of other models nothing happens."""
    _, model, limit = pair("graph")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    chk = wrapped(model, "graph", mem_limit=limit, offload_state=optimizer)
    train(chk, model, optimizer, batches(1))
    other = OPTIMIZERS["adamw"](model.parameters())
    if way == "former":
        chk.offload_state = other
        optimizer, other = other, optimizer
    chk(*batches(1)[0]).backward()
    before = held(model, optimizer, other)
    step = other.step
    if way == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        step = partial(scaler.step, other)
    if way == "closure":
        step = partial(step, lambda: pytest.fail("a closure ran"))
    with pytest.raises(RuntimeError, match=r"model\.offload_state = optimizer"):
        step()
    assert_unchanged(before, held(model, optimizer, other))
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64)).sum().backward()
    weight = layer.weight.detach().clone()
    OPTIMIZERS["adamw"](layer.parameters()).step()
    assert not torch.equal(layer.weight, weight)
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: "adamw", TypeError, "must be an optimizer of torch.optim, got str"),
        (lambda p: None, TypeError, "must be an optimizer of torch.optim, got NoneType"),
        (lambda p: StepLR(torch.optim.SGD(p), 1), TypeError, "an optimizer of .*, got StepLR"),
        (lambda p: torch.optim.SGD(p[3:]), ValueError, "3 of .* and in no group"),
        (lambda p: torch.optim.LBFGS(p), ValueError, "LBFGS computes with all parameters"),
        (lambda p: torch.optim.SGD(p, differentiable=True), ValueError, "no differentiable"),
    ],
)
def test_an_optimizer_that_does_not_suit_takes_nothing_over(make, error, text):
    """The present one goes on."""
    _, model, limit = pair("graph")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    chk = wrapped(model, "graph", mem_limit=limit, offload_state=optimizer)
    losses = train(chk, model, optimizer, batches(1))
    before = held(model, optimizer)
    with pytest.raises(error, match=text):
        chk.offload_state = make(list(model.parameters()))
    assert chk.offload_state is optimizer
    assert_unchanged(before, held(model, optimizer))
    assert train(chk, model, optimizer, batches(1)) != losses


def test_a_model_in_memory_takes_no_optimizer():
    chk = rotor.Checkpointable(GPT(), mem_limit="1MB")
    assert chk.offload_state is None
    with pytest.raises(ValueError, match="in memory, where any optimizer steps"):
        chk.offload_state = OPTIMIZERS["adamw"](chk.parameters())


def test_nothing_is_held_of_a_model_that_is_gone():
    """Nor of an optimizer that another one has replaced."""
    _, model, limit = pair("dynamic")
    first = OPTIMIZERS["adamw"](model.parameters())
    chk = wrapped(model, "dynamic", mem_limit=limit, offload_state=first)
    train(chk, model, first, batches(1))
    tier = chk.offload.tier
    taken = tier.taken_bytes
    chk.offload_state = second = OPTIMIZERS["sgd"](model.parameters())
    gone = [weakref.ref(first), weakref.ref(model)]
    del first
    gc.collect()
    assert gone[0]() is None
    assert tier.taken_bytes < taken
    train(chk, model, second, batches(1))
    del chk, model, second
    gc.collect()
    assert gone[1]() is None


def test_weights_without_a_tensor_are_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"gave a NoneType for 0.weight, expected a tensor"):
        rotor.Checkpointable(
            model,
            mem_limit="1MiB",
            offload="disk",
            offload_state=optimizer,
            weights=lambda name: None,
        )


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_parameters_get_other_names(engine):
    """Pruning begins, and ends, between steps."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model, losses = copy.deepcopy(plain), []
    one, other = (OPTIMIZERS["adam"](m.parameters()) for m in (plain, model))
    chk = rotor.Checkpointable(
        model, mem_limit=1 << 20, engine=engine, offload="disk", offload_state=other
    )
    for call, module, optimizer in ((plain, plain, one), (chk, model, other)):
        torch.manual_seed(1)
        for change in (None, prune.l1_unstructured, None, prune.remove, None):
            loss = call(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if change is not None:
                change(module[0], "weight", **({} if change is prune.remove else {"amount": 0.5}))
    assert losses[:5] == losses[5:]
    assert_same(plain, model, one, other)


class Growing(nn.Module):
    """Model that gets blocks between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64)])
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def grown(limit: int | None) -> list[float]:
    """Return the losses of a training in which blocks are added."""
    torch.manual_seed(0)
    model, found = Growing(), []
    call, optimizer = model, torch.optim.AdamW(model.parameters(), 1e-2)
    if limit is not None:
        call = wrapped(model, "auto", mem_limit=limit, offload_state=optimizer, planning="before")
    for k in range(6):
        if k in (2, 4):
            model.blocks.append(nn.Linear(64, 64))
            optimizer.add_param_group({"params": model.blocks[-1].parameters()})
        loss = call(torch.linspace(-1, 1, 4096).sin().view(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore:no single graph")
def test_modules_are_added():
    """Their parameters have no homes; the least limit that is named counts them in memory."""
    added = r"parameter blocks\.1\.weight was added after its model was wrapped with offload_state="
    with pytest.warns(rotor.MemoryLimitWarning, match=added) as told:
        assert grown(400_000) == grown(None)
    assert not any("report this line" in str(one.message) for one in told)
    for limit in (120_000, 200_000):
        with pytest.raises(rotor.InfeasibleError) as caught:
            grown(limit)
        least, text = caught.value.minimum_bytes, str(caught.value)
        assert least > limit
        assert f"try a limit of {exact_bytes(least)}" in text
        assert f"The limit, {exact_bytes(limit)}, counts what the model keeps in memory" in text
    assert grown(least) == grown(None)
