"""Updates of parameters at home take the bytes that the named least limit counts."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from tiers.test_larger import LIMIT, OPTIMIZERS, assert_same, train
from torch import nn, optim

import rotor

MORE = {
    "plain": partial(optim.SGD, lr=0.1, weight_decay=0.1, maximize=True),
    "decayed": partial(optim.Adam, weight_decay=0.1, maximize=True),
    "foreach": partial(optim.AdamW, foreach=True),
    "adadelta": optim.Adadelta,
    "asgd": optim.ASGD,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.9),
    "rprop": optim.Rprop,
}


class Wide(nn.Module):
    """Model of which the update takes more than a step."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.Linear(30, 40), nn.Linear(1200, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.norm(x)).flatten(1)).square().mean()


@pytest.mark.parametrize("columns", [30, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", sorted({**OPTIMIZERS, **MORE}))
def test_the_named_least_limit_is_kept_by_updates(name, columns):
    torch.manual_seed(0)
    model, x, limit = Wide(columns), torch.randn(4, 30, 30), 1 << 14
    for _ in range(2):
        one = copy.deepcopy(model)
        optimizer = {**OPTIMIZERS, **MORE}[name](one.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error", rotor.MemoryLimitWarning)
            chk = rotor.Checkpointable(
                one, mem_limit=limit, offload="disk", offload_state=optimizer
            )
            try:
                for _ in range(3):
                    chk(x).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return
            except rotor.InfeasibleError as error:
                limit = error.minimum_bytes
    pytest.fail(f"the named limit, {limit}, is refused")


class Sparse(nn.Module):
    """Model whose embedding has sparse gradients, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.embed(words).square().sum(-1).sin().mean()


SPARSE = {
    "sgd": OPTIMIZERS["sgd"],
    "momentum": OPTIMIZERS["momentum"],
    "adagrad": OPTIMIZERS["adagrad"],
    "adam": lambda parameters: optim.SparseAdam(list(parameters)),
}


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("way", ["plain", "accumulation", "zeros"])
@pytest.mark.parametrize("name", sorted(SPARSE))
def test_sparse_gradients(name, way):
    torch.manual_seed(0)
    plain = Sparse()
    model, data = copy.deepcopy(plain), [(torch.randint(300, (4, 16)),) for _ in range(3)]
    one, other = (SPARSE[name](m.parameters()) for m in (plain, model))
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=other)
    assert train(chk, model, other, data, way) == train(plain, plain, one, data, way)
    assert torch.equal(plain.embed.weight, model.embed.weight.detach().clone())


def test_a_parameter_in_no_group_needs_no_update():
    """One that was frozen when the model was wrapped, and is trained then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = optim.Adam(model[1].parameters())
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=optimizer)
    model[0].requires_grad_(True)
    chk(torch.randn(4, 64)).sum().backward()
    assert chk.curve(training=True).minimum_bytes < LIMIT
    assert model[0].weight.grad is not None


class Several:
    """Optimizers of matrices and of the rest, which step one after the other."""

    def __init__(self, model: nn.Module, first) -> None:
        split = [
            [p for p in model.parameters() if (p.ndim == 2) == is_first] for is_first in (1, 0)
        ]
        self.each = [first(split[0]), OPTIMIZERS["adamw"](split[1])]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)


def convolved() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(16, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(384, 48))


@pytest.mark.parametrize("first", [partial(optim.Muon, lr=0.02), OPTIMIZERS["momentum"]])
def test_several_optimizers(first):
    """Each has the states of its own parameters; the least limit is kept, and states are loaded."""
    plain, model, fresh = convolved(), convolved(), convolved()
    one, other, third = (Several(m, first) for m in (plain, model, fresh))

    def trained(call, model: nn.Module, several: Several, seed: int) -> list[float]:
        data = [(torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(seed)),)] * 3
        return train(lambda x: call(x).square().mean(), model, several, data, "clipping")

    def assert_all_same(model: nn.Module, several: Several) -> None:
        for a, b in zip(one.each, several.each, strict=True):
            assert_same(plain, model, a, b)

    away = {"mem_limit": 1 << 14, "offload": "disk", "engine": "graph"}
    chk = rotor.Checkpointable(model, offload_state=other.each, **away)
    assert chk.offload_state == other.each
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk(torch.ones(4, 16, 8))
    chk.mem_limit = away["mem_limit"] = caught.value.minimum_bytes
    assert trained(chk, model, other, 1) == trained(plain, plain, one, 1)
    assert_all_same(model, other)
    chk = rotor.Checkpointable(fresh, offload_state=third.each, **away)
    fresh.load_state_dict(model.state_dict())
    for mine, theirs in zip(third.each, other.each, strict=True):
        mine.load_state_dict(theirs.state_dict())
    assert trained(chk, fresh, third, 2) == trained(plain, plain, one, 2)
    assert_all_same(fresh, third)


def test_several_optimizers_take_over(tmp_path):
    model = convolved()
    several, whole = Several(model, OPTIMIZERS["sgd"]).each, OPTIMIZERS["sgd"](model.parameters())
    away = {"mem_limit": LIMIT, "offload_state": several}
    with pytest.raises(ValueError, match="the steps of 2 optimizers cannot be recorded in the fol"):
        rotor.Checkpointable(model, offload=f"disk:{tmp_path}", **away)
    with pytest.raises(ValueError, match="in no group of the optimizer"):
        rotor.Checkpointable(model, offload="disk", offload_state=several[:1])
    chk = rotor.Checkpointable(model, offload="disk", **away)
    with pytest.raises(RuntimeError, match="is not the optimizer that the parameters have"):
        whole.step()
    chk.offload_state = whole
    assert chk.offload_state is whole
    with pytest.raises(RuntimeError, match="is not the optimizer that the parameters have"):
        several[1].step()
    chk.offload_state = several
    several[1].step()
