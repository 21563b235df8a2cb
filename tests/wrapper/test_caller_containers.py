"""Forwards that write to containers of their caller's: these are the ones that the caller finds."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import rotor
from rotor.common.substitutes import substituted

WIDTH = 16


class Net(nn.Module):
    """Layers on the values that a function takes from the arguments, and writes to them."""

    def __init__(self, take) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.body, self.take = nn.Sequential(*parts), take

    def forward(self, *args):
        """Return the loss."""
        return self.body(self.take(*args)).square().mean()


def _dictionary(batch):
    batch["x"] = batch["x"] * 2
    batch["length"] = len(batch["x"])
    return batch["x"]


def _nested(batch):
    inner = batch["parts"][0]
    inner["y"] = inner["x"].sin()
    del inner["x"]
    return inner["y"]


def _list(batch, scale):
    batch.append(batch[0] * scale)
    return batch[-1]


def _two(first, second):
    second["x"] = first["x"] + 1
    return second["x"]


CASES: dict[str, tuple[Any, Any]] = {
    "dictionary": (_dictionary, lambda x: ({"x": x},)),
    "ordered": (_dictionary, lambda x: (collections.OrderedDict(x=x),)),
    "nested": (_nested, lambda x: ({"parts": ({"x": x},)},)),
    "list": (_list, lambda x: ([x], 2.0)),
    "two": (_two, lambda x: ({"x": x}, {})),
}


def _seen(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().sum().item()
    if isinstance(item, dict):
        return {key: _seen(part) for key, part in item.items()}
    return [_seen(part) for part in item] if isinstance(item, list | tuple) else item


def _steps(case: str, engine: str | None, *, of_input: bool) -> list[Any]:
    """What three steps that accumulate gradients leave."""
    take, make = CASES[case]
    net, found = Net(take), []
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine) if engine else net
    for step in range(3):
        x = torch.rand(64, WIDTH, generator=torch.Generator().manual_seed(step))
        batch = make(x.requires_grad_(of_input))
        loss = model(*batch)
        loss.backward()
        gradients = [p.grad.clone() for p in (*net.parameters(), *([x] if of_input else []))]
        found.append((loss.item(), _seen(batch), [g.tolist() for g in gradients]))
    return found


@pytest.mark.parametrize("of_input", [False, True], ids=["input", "input with a gradient"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_writes_to_containers_are_the_callers_in_every_step(engine, case, of_input):
    assert _steps(case, engine, of_input=of_input) == _steps(case, None, of_input=of_input)


class Keeping(nn.Module):
    """Containers of the caller's and of its own that each forward fills; it returns one of them."""

    def __init__(self, outer: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.outer, self.last, self.results = outer, {}, [None, 0]
        self.nested = (self.last,)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.outer.append(x)
        self.last["x"] = x
        self.results[:] = [x.sum(), len(self.outer)]
        return self.results


@pytest.mark.parametrize("engine", ["graph", "dynamic", "auto"])
def test_containers_that_a_forward_fills_stay_the_same_objects(engine):
    def gradients(net, model, outer):
        last, results, found = net.last, net.results, []
        for step in range(1, 4):
            net.zero_grad()
            x = torch.rand(64, WIDTH, generator=torch.Generator().manual_seed(step))
            assert model(x) is results
            assert net.results is results
            assert net.outer is outer
            assert net.last is last
            assert net.nested[0] is last
            assert len(outer) == 4 * step
            (results[0] + outer[-2].sum() + last["x"].mean()).backward()
            found += [p.grad.tolist() for p in net.parameters()]
        return found

    net, outer = Keeping(plain_outer := []), []
    limited = copy.deepcopy(net)
    limited.outer = outer
    model = rotor.Checkpointable(limited, mem_limit="1 MB", engine=engine)
    assert gradients(limited, model, outer) == gradients(net, net, plain_outer)


@dataclasses.dataclass(frozen=True)
class _Batch:
    x: torch.Tensor
    others: tuple[Any, ...]


def test_substitutes_are_taken_out_of_all_kinds_of_containers():
    a, b, mine = torch.ones(1), torch.zeros(1), torch.full((1,), 5.0)
    deep = collections.deque([a, {"a": a}])
    batch = _Batch(a, (b, [a], deep))
    value = (batch, {"batch": batch, "b": b})
    with substituted(value, {id(a): mine}) as given:
        assert given[0] is batch
        assert batch.x is mine
        assert batch.others[1][0] is mine
        assert deep[0] is mine
        assert deep[1]["a"] is mine
        deep.append(mine)
    assert batch.x is a
    assert batch.others[1][0] is a
    assert [deep[0], deep[1]["a"], deep[2]] == [a, a, a]
    assert value[1]["b"] is b
