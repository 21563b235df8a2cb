"""Emitted programs against eager: random small modules under random heavy recomputation."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from graph_modules import Planned, RandomNet, arguments, in_order, random_program, step
from torch import nn
from torch.nn import functional as F
from training import gradients_of, same

from rotor.engines.graph.code.backwards import READERS

DROPS = (0.15, 0.5, 1.0)


def check(seed: int) -> tuple[bool, int]:
    """Whether the captured graph equals eager bit for bit, and the most runs of one operation."""
    torch.manual_seed(seed)
    model = RandomNet(seed)
    args, kwargs = arguments(seed), {"scale": 0.5}
    eager_model = copy.deepcopy(model)
    planned = Planned(model, args, kwargs)
    start = copy.deepcopy(model.state_dict())
    eager = step(eager_model, eager_model, args, kwargs, seed=seed)
    planned.set_program(in_order(planned.lowered))
    reference = step(model, planned, args, kwargs, seed=seed)
    assert reference.is_close(eager), model.kinds
    most = 1
    for k, drop in enumerate(DROPS):
        ops = random_program(planned.lowered, seed + k, drop)
        most = max(most, *(ops.count(i) for i in range(len(planned.lowered.tasks))))
        model.load_state_dict(start)
        planned.set_program(ops)
        found = step(model, planned, args, kwargs, seed=seed)
        assert reference.differences(found) == [], (model.kinds, drop)
    return eager.differences(reference) == [], most


@pytest.mark.parametrize("seed", range(24))
def test_random_modules_under_random_programs(seed):
    _, most = check(seed)
    assert most > 2


@pytest.mark.slow
def test_hundreds_of_random_modules():
    exact = [check(seed)[0] for seed in range(1000, 1300)]
    assert sum(exact) > 0.8 * len(exact)


def dropout_net(depth: int = 5) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

        def forward(self, x):
            for linear in self.linears:
                x = F.dropout(F.gelu(linear(x)), 0.3)
            return x * torch.rand(8) + torch.randn_like(x)

    return Net()


def test_random_operations_replay_their_numbers_many_times():
    model, x = dropout_net(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    planned = Planned(model, (x,))
    ops = random_program(planned.lowered, 0, 1.0)
    runs = [ops.count(i) for i, task in enumerate(planned.lowered.tasks) if task.random]
    assert max(runs) >= 4
    planned.set_program(ops)
    for seed in (1, 2, 3):
        assert (
            step(twin, twin, (x,), seed=seed).differences(step(model, planned, (x,), seed=seed))
            == []
        )


def test_without_replaying_gradients_would_differ():
    model, x = dropout_net(), torch.randn(4, 8)
    planned = Planned(model, (x,))
    planned.set_program(in_order(planned.lowered))
    reference = step(model, planned, (x,))
    for task in planned.lowered.tasks:
        task.random = False
    planned.set_program(random_program(planned.lowered, 0, 1.0))
    assert "gradients" in reference.differences(step(model, planned, (x,)))


def test_what_is_kept_goes_with_the_output():
    model, x = dropout_net(), torch.randn(4, 8)
    planned = Planned(model, (x,))
    planned.set_program(in_order(planned.lowered))
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            y = planned(x)
            token = planned.capture.token
            assert token() is not None
            del y
            assert token() is None
            y = planned(x)
            kept = [
                weakref.ref(t) for t in planned.capture.token().kept if isinstance(t, torch.Tensor)
            ]
            assert len(kept) > 3
            y.sum().backward()
            assert sum(t() is not None for t in kept) == 0
    finally:
        gc.enable()


def test_programs_change_while_a_backward_is_pending():
    model, x = dropout_net(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    planned = Planned(model, (x,))
    torch.manual_seed(0)
    planned.set_program(random_program(planned.lowered, 0, 1.0))
    first = planned(x)
    planned.set_program(random_program(planned.lowered, 1, 0.5))
    second = planned(2 * x)
    planned.set_program(in_order(planned.lowered))
    second.sum().backward()
    first.sum().backward()
    torch.manual_seed(0)
    a, b = twin(x), twin(2 * x)
    b.sum().backward()
    a.sum().backward()
    assert same(gradients_of(model), gradients_of(twin))


@pytest.mark.parametrize("was_dropped", [False, True])
def test_a_kept_graph_runs_its_backward_again(was_dropped):
    """Also where the first backward of the captured call kept none."""
    model, x = dropout_net(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    planned = Planned(model, (x,))
    planned.set_program(random_program(planned.lowered, 3, 0.7))
    for each, call in ((model, planned), (twin, twin)):
        torch.manual_seed(0)
        if was_dropped:
            call(x).sum().backward()
        y = call(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            y.backward()
        assert all(p.grad is not None for p in each.parameters())
    assert same(gradients_of(model), gradients_of(twin))


def test_the_source_of_a_program_is_shown_in_tracebacks():
    model, x = dropout_net(1), torch.randn(4, 8)
    planned = Planned(model, (x,))
    planned.set_program(in_order(planned.lowered))
    source = planned.captured.emitted.source
    assert source.startswith("def forward(args):")
    assert "def backward(args):" in source


def test_weights_are_normed_in_any_memory_format():
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))
    up = nn.ConvTranspose2d(4, 8, 2, stride=2)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GELU(), up, nn.GELU(), nn.ReflectionPad2d(1), normed
    )
    model = model.to(memory_format=torch.channels_last)
    twin, x = copy.deepcopy(model), torch.randn(4, 3, 10, 10).to(memory_format=torch.channels_last)
    planned = Planned(model, (x,))
    planned.set_program(in_order(planned.lowered))
    planned(x).square().mean().backward()
    twin(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    targets = {node.target for node in planned.lowered.module.graph.nodes}
    assert targets & {*READERS} == {torch.ops.aten._weight_norm_interface_backward.default}
