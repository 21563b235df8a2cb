"""The executor: equal numbers under any schedule, errors, and what it must not do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from training import Result, default_loss, gradients_of, same, schedules, twins

from rotor.algorithms.sequence import Operation, Sequence
from rotor.engines.chain.plan import Schedule
from rotor.engines.chain.run import CheckpointOptim, run_chain
from rotor.engines.chain.stages import find_stages

NAMES = ["kept", "recompute_all", "halves", "each", "mixed"]


class Pair(nn.Module):
    """Takes a tensor, returns it transformed with a mask and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x), x.detach() > 0, 3


class Unpair(nn.Module):
    def forward(self, value):
        x, mask, k = value
        return torch.where(mask, x * k, x), x.tanh()


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, value):
        a, b = value
        return self.linear(a + b)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4)
    )


def with_state() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.5),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.Dropout(0.2),
        nn.Linear(16, 4),
    )


def with_tuples() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Pair(), Unpair(), Join(), nn.Tanh())


def with_shared() -> nn.Sequential:
    shared = nn.Linear(8, 8)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(8, 8), shared)


def frozen_middle() -> nn.Sequential:
    model = mlp()
    model[2].requires_grad_(False)
    return model


def frozen_start() -> nn.Sequential:
    model = mlp()
    model[0].requires_grad_(False)
    return model


MODELS = [mlp, with_state, with_tuples, with_shared, frozen_middle, frozen_start]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("input_grad", [False, True])
def test_bit_equal(make, schedule, input_grad):
    torch.manual_seed(3)
    model, plain = twins(make())
    stages = find_stages(model)
    compiled = Schedule(schedules(len(stages))[schedule], len(stages))
    x = torch.randn(16, 8, requires_grad=input_grad)
    expected = Result(plain, plain, x, steps=2)
    actual = Result(model, lambda v: run_chain(stages, compiled, v), x, steps=2)
    assert expected.differences(actual) == []


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("make", [mlp, with_state, with_shared])
def test_one_node_form_is_bit_equal(make, schedule):
    torch.manual_seed(3)
    model, plain = twins(make())
    functions = list(model)
    sequence = schedules(len(functions))[schedule]
    x = torch.randn(16, 8, requires_grad=True)
    expected = Result(plain, plain, x)
    actual = Result(model, lambda v: CheckpointOptim.apply(functions, sequence, None, True, v), x)
    assert expected.differences(actual) == []


def test_one_node_form_returns_tuples():
    model, plain = twins(nn.Sequential(nn.Linear(8, 8), Pair()))
    x = torch.randn(4, 8, requires_grad=True)
    y = CheckpointOptim.apply(list(model), schedules(2)["each"], ["a", "b"], True, x)
    expected = plain(x)
    assert torch.equal(y[0], expected[0])
    y[0].sum().backward()
    expected[0].sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


def test_one_node_form_warns_without_gradient():
    model = mlp()
    with pytest.warns(UserWarning, match="requires no gradient"):
        CheckpointOptim.apply(list(model), schedules(5)["each"], None, True, torch.randn(2, 8))


def test_sequence_errors():
    model = mlp()
    x = torch.randn(2, 8, requires_grad=True)

    def run(ops):
        return CheckpointOptim.apply(list(model), ops, None, True, x)

    with pytest.raises(ValueError, match="forward part"):
        run(Sequence([("Fe", 0), ("B", 0), ("L", 5)]))
    with pytest.raises(ValueError, match="backward part"):
        run(Sequence([("Fe", 0), ("L", 5), ("L", 5), ("B", 0)]))
    with pytest.raises(AttributeError, match="unknown operation"):
        run([Operation("Fx", 0)])
    with pytest.raises(AttributeError, match="unknown operation"):
        run(["Fe_0"])
    with pytest.raises(ValueError, match="no loss"):
        run(Sequence([("Fe", 0)]))
    with pytest.raises(ValueError, match="B_4 was expected"):
        run(Sequence([("Fe", 0), ("L", 5), ("B", 0)]))
    with pytest.raises(ValueError, match="5 stages"):
        run(Sequence([("Fe", 7), ("L", 5)]))
    with pytest.raises(TypeError, match="must be a tensor"):
        CheckpointOptim.apply(list(model), schedules(5)["each"], None, True, ["x"])


def planned(model, name="recompute_all"):
    stages = find_stages(model)
    compiled = Schedule(schedules(len(stages))[name], len(stages))
    return lambda x: run_chain(stages, compiled, x)


def test_two_forwards_before_a_backward():
    # No spectral norm: it uses its weight several times, and the plain sum over two forwards adds
    # those uses one by one, which rounds differently.
    model, plain = twins(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    )
    call = planned(model)
    a, b = torch.randn(16, 8), torch.randn(16, 8)

    def both(f):
        return lambda _: f(a) + 2 * f(b)

    expected = Result(plain, both(plain), a)
    assert expected.differences(Result(model, both(call), a)) == []


def test_accumulation_and_autograd_grad():
    model, plain = twins(mlp())
    call = planned(model)
    x = torch.randn(16, 8, requires_grad=True)
    for _ in range(2):
        default_loss(plain(x)).backward()
        default_loss(call(x)).backward()
    assert same(gradients_of(plain), gradients_of(model))
    subset = [2, 5]
    wanted = [list(plain.parameters())[k] for k in subset]
    mine = [list(model.parameters())[k] for k in subset]
    expected = torch.autograd.grad(default_loss(plain(x)), [*wanted, x])
    actual = torch.autograd.grad(default_loss(call(x)), [*mine, x])
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    (only,) = torch.autograd.grad(default_loss(call(x)), mine[1:])
    assert torch.equal(only, expected[1])


def test_parameter_hooks_fire_once():
    model = mlp()
    calls = []
    model[0].weight.register_hook(lambda g: calls.append(1) or g * 2)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(16, 8)
    default_loss(planned(model)(x)).backward()
    default_loss(plain(x)).backward()
    assert calls == [1]
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad * 2)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache):
    model, plain = twins(mlp())
    x = torch.randn(16, 8, requires_grad=True)

    def under(call):
        def run(v):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                return call(v)

        return run

    expected = Result(plain, under(plain), x)
    for name in NAMES:
        assert expected.differences(Result(model, under(planned(model, name)), x)) == []


def test_second_backward_is_refused():
    y = planned(mlp())(torch.randn(4, 8))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        y.sum().backward()


def test_double_backward_is_refused():
    x = torch.randn(4, 8, requires_grad=True)
    y = planned(mlp())(x)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_changed_input_is_refused():
    model = mlp()
    x = torch.randn(4, 8)
    y = planned(model)(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_changed_parameter_is_refused():
    model = mlp()
    y = planned(model)(torch.randn(4, 8))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"0\.weight was changed or replaced between"):
        y.sum().backward()


def test_a_replaced_parameter_gets_its_gradient():
    found = []
    for wrap in (planned, lambda model: model):
        torch.manual_seed(0)
        model = mlp()
        weight = model[2].weight
        y = wrap(model)(torch.randn(4, 8))
        model[2].weight = nn.Parameter(torch.zeros(16, 16))
        y.sum().backward()
        assert model[2].weight.grad is None
        found.append([weight.grad, *[p.grad for p in model.parameters() if p.grad is not None]])
    assert all(map(torch.equal, *found))


def test_state_survives_an_error_in_the_backward():
    model = with_state()
    buffers = list(model.buffers())

    def explode(module, inputs):
        if torch._C._current_graph_task_id() != -1:
            raise OSError("boom")

    model[4].register_forward_pre_hook(explode)
    y = planned(model)(torch.randn(16, 8))
    values = [b.clone() for b in buffers]
    rng = torch.get_rng_state()
    with pytest.raises(OSError, match="boom"):
        y.sum().backward()
    assert torch.equal(rng, torch.get_rng_state())
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, buffers, strict=True))


def test_a_stage_that_returns_no_tensor_is_named():
    class Text(nn.Module):
        def forward(self, x):
            return "text"

    model = nn.Sequential(nn.Linear(8, 8), Text(), nn.Tanh())
    with pytest.raises(TypeError, match=r"stage 1 returned str"):
        planned(model)(torch.randn(2, 8))


def test_without_rng_preservation_dropout_differs():
    model, plain = twins(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)))
    stages = find_stages(model)
    compiled = Schedule(schedules(3)["recompute_all"], 3)
    x = torch.randn(16, 8)
    expected = Result(plain, plain, x)
    free = Result(model, lambda v: run_chain(stages, compiled, v, preserve_rng_state=False), x)
    assert "gradients" in expected.differences(free)


def test_memory_is_released_while_the_loss_lives():
    model = mlp()
    stages = find_stages(model)
    runs = []
    compiled = Schedule(schedules(5)["halves"], 5)
    loss = run_chain(stages, compiled, torch.randn(4, 8), started=runs.append).sum()
    assert not runs[0].is_done()
    loss.backward()
    assert runs[0].is_done()
    assert all(value is None for value in [*runs[0].x, *runs[0].tapes, *runs[0].snapshots])


def test_nothing_outlives_a_step():
    model = with_state()
    stages = find_stages(model)
    compiled = Schedule(schedules(6)["mixed"], 6)
    states = []

    def step():
        x = torch.randn(16, 8, requires_grad=True)
        loss = run_chain(stages, compiled, x, started=lambda r: states.append(weakref.ref(r))).sum()
        loss.backward()

    step()
    run_chain(stages, compiled, torch.randn(16, 8), started=lambda r: states.append(weakref.ref(r)))
    gc.collect()
    assert [state() for state in states] == [None, None]
    gc.disable()
    try:
        step()
        assert states[-1]() is None, "a cycle keeps activations until the collector runs"
    finally:
        gc.enable()
