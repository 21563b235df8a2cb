"""A planned forward in the place of a module's own: transparent, removable, copied with it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from limited_models import Perceptron, same
from torch import nn
from torch.autograd.function import Function

from rotor.integrations.planned import PlannedForward


class WithLoss(nn.Module):
    """Computes its loss where it gets labels, as models of Hugging Face do."""

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.body = Perceptron(layers=4)
        self.as_tuple = as_tuple

    def forward(self, x, labels=None):
        y = self.body(x)
        loss = None if labels is None else nn.functional.mse_loss(y, labels)
        return (loss, y) if self.as_tuple else {"loss": loss, "y": y}


def has_labels(arguments):
    return arguments.get("labels") is not None


def pair(**settings):
    torch.manual_seed(0)
    module = WithLoss(**settings)
    return module, copy.deepcopy(module), torch.randn(64, 32), torch.randn(64, 32)


def planned(module, limit="110 KB", effort="fast", **settings):
    options = {"effort": effort} if effort else {}
    found = PlannedForward(module, mem_limit=limit, **options, **settings)
    found.install()
    return found


def left(module):
    return [p.grad for p in module.parameters()] + list(module.buffers())


@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_loss_of_the_output_is_planned(as_tuple):
    module, plain, x, labels = pair(as_tuple=as_tuple)
    limit = planned(module, has_loss=has_labels)
    name, key = (1, 0) if as_tuple else ("y", "loss")
    for step in range(2):
        outputs = []
        for candidate in (plain, module):
            torch.manual_seed(step)
            output = candidate(x, labels=labels)
            output[key].backward()
            outputs.append([output[key], output[name]])
        assert same(*outputs)
        assert same(left(plain), left(module))
        measured = limit.model.plan.measured_bytes
        assert measured is not None
        assert measured <= limit.model.mem_limit
    assert limit.model.plan.recomputed > 0
    assert limit.model.plan.meterings == 1


def test_another_output_of_a_planned_loss_has_no_gradient():
    module, _, x, labels = pair()
    planned(module, has_loss=has_labels, limit="1 MB")
    output = module(x, labels=labels)
    assert output["y"].requires_grad
    with pytest.raises(RuntimeError, match="all_gradients=True"):
        (output["loss"] + output["y"].sum()).backward()
    del output
    # Without labels the loss is outside, and all outputs have gradients.
    module(x)["y"].sum().backward()
    assert module.body.layers[0].weight.grad is not None


class Sink(Function):
    """Visits several outputs, as DistributedDataParallel does to find unused parameters."""

    @staticmethod
    def forward(ctx, *values):
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def test_an_output_that_is_visited_without_a_gradient_is_no_error():
    module, plain, x, labels = pair()
    planned(module, has_loss=has_labels, limit="1 MB")
    for candidate in (plain, module):
        torch.manual_seed(3)
        output = candidate(x, labels=labels)
        loss, _ = Sink.apply(output["loss"], output["y"])
        loss.backward()
    assert same(left(plain), left(module))


def test_the_module_stays_what_it_is():
    module, plain, x, _ = pair()
    limit = planned(module)
    assert type(module) is WithLoss
    assert list(module.state_dict()) == list(plain.state_dict())
    assert list(inspect.signature(module.forward).parameters) == ["x", "labels"]
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    module(x)["y"].sum().backward()
    assert calls == [1]
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(x)["y"], plain.eval()(x)["y"]) is False
    module.train()
    limit.remove()
    assert "forward" not in vars(module)
    assert list(vars(module)) == list(vars(plain))
    limit.install()
    assert limit.active
    limit.remove()


def test_copies_are_planned_for_themselves():
    module, plain, x, labels = pair()
    limit = planned(module, has_loss=has_labels)
    module(x, labels=labels)["loss"].backward()
    module.zero_grad()
    copied = copy.deepcopy(module)
    assert copied.forward.__self__ is copied
    plain.load_state_dict(module.state_dict())
    for candidate in (plain, copied):
        torch.manual_seed(3)
        candidate(x, labels=labels)["loss"].backward()
    assert same(left(plain), left(copied))
    assert all(p.grad is None for p in module.parameters())
    loaded = pickle.loads(pickle.dumps(module))
    assert torch.equal(loaded.eval()(x)["y"], module.eval()(x)["y"])
    limit.remove()


def test_a_replaced_forward_is_refused():
    module, _, x, _ = pair()
    limit = planned(module)
    with pytest.raises(RuntimeError, match="has been replaced already"):
        planned(module)
    # What others put around our forward later stays; it runs the plain module.
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    limit.remove()
    module(x)["y"].sum().backward()
    assert not limit.ran
    limit.install()
    module(x)["y"].sum().backward()
    assert limit.ran


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("before", [0, 1])
def test_a_compiled_module_runs_the_plan(in_place, before):
    torch.manual_seed(0)
    module = Perceptron(layers=4)
    plain, x = copy.deepcopy(module), torch.randn(64, 32)
    compiled = module
    if in_place:
        module.compile(backend="eager")
    else:
        compiled = torch.compile(module, backend="eager")
    limit = None
    for step in range(before + 2):
        if step == before:
            limit = planned(module)
        for candidate in (plain, compiled):
            torch.manual_seed(step)
            candidate.zero_grad()
            candidate(x).square().sum().backward()
        assert same(left(plain), left(module))
    assert limit.model.plan.measured_bytes <= 110_000


def test_many_shapes_are_told():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    planned(module, limit="1 MB", effort="")
    for length in range(1, 9):
        module(torch.randn(length, 4)).sum().backward()
    with pytest.warns(UserWarning, match="batches of 9 different shapes"):
        module(torch.randn(9, 4)).sum().backward()
    module(torch.randn(10, 4)).sum().backward()
