"""Trainings that change on their way, with parameters, gradients and states on a disk."""

from __future__ import annotations

import copy

import pytest
import torch
from tiers.test_larger import GPT, OPTIMIZERS, assert_same, train
from tiers.test_larger_dynamic import Asking, batches
from tiers.test_larger_parts import Breaking
from torch.nn import functional as F

import rotor
from rotor.memory import meter

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
