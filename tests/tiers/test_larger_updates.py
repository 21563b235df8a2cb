"""Updates of parameters at home take the bytes that the named least limit counts."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from tiers.test_larger import LIMIT, OPTIMIZERS, train
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
