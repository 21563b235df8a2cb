"""The pieces of rotor.models.utils."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from rotor.models.utils import (
    Apply,
    Flatten,
    Model,
    ReLUAtEnd,
    Residual,
    branch_off,
    named,
    on_first,
)
from torch import nn


def test_relu_at_end_is_a_relu_after_the_stages() -> None:
    torch.manual_seed(0)
    stages = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y = ReLUAtEnd(*copy.deepcopy(stages))(x)
    expected = torch.relu(nn.Sequential(*stages)(other))
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, other.grad)


def test_relu_at_end_is_one_stage_and_keeps_names() -> None:
    module = ReLUAtEnd(OrderedDict(conv=nn.Conv2d(3, 4, 3)))
    assert type(module).forward is not nn.Sequential.forward
    assert list(module.state_dict()) == ["conv.weight", "conv.bias"]


def test_relu_at_end_after_a_layer_that_needs_its_output() -> None:
    y = ReLUAtEnd(nn.Sigmoid())(torch.randn(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_flatten_keeps_the_batch() -> None:
    assert Flatten()(torch.zeros(2, 3, 4)).shape == (2, 12)


def test_residual() -> None:
    x = torch.tensor([1.0, -2.0])
    assert Residual(nn.ReLU())(x).tolist() == [2.0, -2.0]
    assert Residual(nn.ReLU(), Apply(torch.neg))(x).tolist() == [0.0, 2.0]


def test_residual_refuses_a_body_that_overwrites_the_input() -> None:
    body = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"ReLU\(inplace=True\).*give it inplace=False"):
        Residual(body)


def test_apply() -> None:
    stage = Apply(torch.sum, dim=1)
    assert stage(torch.ones(2, 3)).tolist() == [3.0, 3.0]
    assert repr(stage) == "Apply(sum, dim=1)"
    assert pickle.loads(pickle.dumps(stage))(torch.ones(2, 3)).tolist() == [3.0, 3.0]


def test_named() -> None:
    model = named(one=nn.Linear(2, 2), two=nn.ReLU())
    assert [name for name, _ in model.named_children()] == ["one", "two"]


def test_slices_of_a_model_keep_a_module_used_twice() -> None:
    linear = nn.Linear(2, 2)
    model = Model(linear, nn.ReLU(), linear, nn.Sequential(nn.ReLU()))
    part = model[1:]
    assert type(part) is nn.Sequential
    assert [name for name, _ in part.named_modules(remove_duplicate=False)] == [
        "",
        "1",
        "2",
        "3",
        "3.0",
    ]
    assert part[1] is linear
    assert model[-2] is linear


def test_on_first_changes_the_first_and_passes_the_rest() -> None:
    linear = nn.Linear(2, 3)
    stage = on_first(linear)
    x, rest = torch.ones(1, 2), object()
    y, passed = stage((x, rest))
    assert passed is rest
    assert torch.equal(y, stage(x))
    assert stage is linear
    assert isinstance(stage, nn.Linear)
    assert list(stage.state_dict()) == ["weight", "bias"]


def test_wrapping_twice_is_wrapping_once() -> None:
    stage = on_first(nn.Linear(2, 3))
    kind = type(stage)
    assert type(on_first(stage)) is kind
    assert type(on_first(nn.Linear(3, 3))) is kind
    assert type(nn.Linear(2, 3)) is nn.Linear


def test_branch_off_only_in_training() -> None:
    stage = branch_off(nn.Linear(2, 3))
    x = torch.ones(1, 2)
    passed, branch = stage.train()(x)
    assert passed is x
    assert branch.shape == (1, 3)
    assert stage.eval()(x) is x


@pytest.mark.parametrize("wrap", [on_first, branch_off])
def test_wrapped_modules_are_copied_and_pickled(wrap: object) -> None:
    stage = wrap(nn.Linear(2, 3))
    x = (torch.ones(1, 2), torch.zeros(1)) if wrap is on_first else torch.ones(1, 2)
    for other in (copy.copy(stage), copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert type(other) is type(stage)
        assert all(map(torch.equal, other(x), stage(x)))
    assert copy.deepcopy(stage).weight is not stage.weight


def test_wrapped_modules_take_parametrizations() -> None:
    stage = nn.utils.parametrizations.weight_norm(on_first(nn.Linear(2, 3)))
    x = (torch.ones(1, 2), torch.zeros(1))
    assert torch.equal(copy.deepcopy(stage)(x)[0], stage(x)[0])
