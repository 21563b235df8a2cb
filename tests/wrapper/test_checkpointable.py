"""Checkpointable: limits that hold, equal numbers, its interface, transparent wrapping."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from training import Result, conv_net, default_loss, images, twins

import rotor
from rotor import memory
from rotor.algorithms import ChenSqrt, NoCheckpoint, Persistent, RecomputeAll
from rotor.algorithms.sequence import Sequence


def step_peak(model, x, loss=default_loss, **kwargs) -> int:
    model.zero_grad()
    with memory.meter("cpu") as meter:
        y = model(x, **kwargs)
        (y if y.dim() == 0 else loss(y)).backward()
    return meter.peak_bytes


def peaks(model, x):
    """Plain peak, and the least that the chain engine can do with."""
    step_peak(model, x)
    plain = step_peak(model, x)
    chk = rotor.Checkpointable(copy.deepcopy(model), x)
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(1)
    return plain, caught.value.minimum_bytes


# -- the promise


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("fraction", [0.9, 0.6, 0.3, 0.0])
def test_measured_peak_respects_the_limit_and_numbers_are_equal(fraction, dropout):
    torch.manual_seed(0)
    model = conv_net(dropout=dropout)
    x = images()
    plain_peak, least = peaks(model, x)
    limit = int(least + fraction * (plain_peak - least))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, engine="chain")
    plain = copy.deepcopy(model)
    for _ in range(2):
        expected = Result(plain, plain, x, seed=1)
        assert expected.differences(Result(chk, chk, x, seed=1)) == []
    measured = step_peak(chk, x)
    assert measured <= chk.get_expected_memory() <= limit
    if not dropout:
        # The backward of a dropout needs no input, which the cost model holds all the same.
        assert measured == pytest.approx(chk.get_expected_memory(), rel=0.01, abs=20_000)


def test_limit_holds_from_the_first_step_with_a_captured_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 2000))
    x, target = torch.randn(64, 64), torch.randint(0, 2000, (64,))
    chk = rotor.Checkpointable(model, loss_fn=nn.functional.cross_entropy)
    chk.measure(x, targets=(target,))
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(1)
    chk.compute_sequence(mem_limit=caught.value.minimum_bytes)
    with memory.meter("cpu") as meter, pytest.warns(rotor.MemoryLimitWarning, match="not measured"):
        chk(x, targets=(target,)).backward()
    assert meter.peak_bytes <= chk.mem_limit


def test_first_step_is_metered_and_a_dear_loss_is_learned():
    torch.manual_seed(0)
    model = conv_net()
    x = images()
    plain_peak, least = peaks(model, x)

    def dear(y):
        extra = torch.zeros(400_000)
        return default_loss(y) + extra.sum()

    limit = plain_peak - 300_000
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    measured = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            chk.zero_grad()
            dear(chk(x)).backward()
            measured.append(chk.plan.measured_bytes)
    assert least < limit < measured[0]
    assert len(caught) == 1
    assert f"({limit} bytes) was not kept" in str(caught[0].message)
    assert f"({measured[0]} bytes)" in str(caught[0].message)
    assert measured[1] <= limit
    assert step_peak(chk, x, dear) <= chk.get_expected_memory() <= limit


def test_a_limit_that_cannot_be_kept_warns_with_figures():
    torch.manual_seed(0)
    model = conv_net()
    x = images()
    plain_peak, _ = peaks(model, x)
    sizes = iter([100_000, 200_000, 300_000, 400_000])

    def growing(y):
        return default_loss(y) + torch.zeros(next(sizes)).sum()

    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=plain_peak)

    def train():
        for _ in range(4):
            chk.zero_grad()
            growing(chk(x)).backward()

    with pytest.warns(rotor.MemoryLimitWarning, match=rf"limit of .*\({plain_peak} bytes\)"):
        train()


# -- nothing is changed


def test_measuring_changes_nothing():
    model = conv_net()
    model[2].eval()
    x = images(requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    flags = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = list(model.buffers())
    rng = torch.get_rng_state()
    chk = rotor.Checkpointable(model)
    chk.measure(x)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert x.grad is None
    assert torch.equal(rng, torch.get_rng_state())


def test_a_failed_measure_changes_nothing():
    class Fails(nn.Module):
        def forward(self, x):
            raise OSError("boom")

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Fails())
    model.eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = list(model.buffers())
    x = torch.randn(8, 4)
    rng = torch.get_rng_state()
    chk = rotor.Checkpointable(model)
    with pytest.raises(OSError, match="boom"):
        chk.measure(x)
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert chk.inspection_values is None


def test_a_failed_plan_keeps_the_old_one():
    chk = rotor.Checkpointable(conv_net(), images(), "1GiB")
    before = chk.get_expected_memory()
    with pytest.raises(rotor.InfeasibleError):
        chk.compute_sequence(1)
    assert chk.mem_limit == 2**30
    assert chk.get_expected_memory() == before


# -- the published interface


def test_three_ways_to_construct():
    x = images()
    limit = 500 * 1024 * 1024
    first = rotor.Checkpointable(conv_net())
    first.measure(x)
    first.compute_sequence(limit)
    second = rotor.Checkpointable(conv_net(), x, limit)
    third = rotor.Checkpointable(conv_net(), x)
    third.compute_sequence(mem_limit=limit)
    fourth = rotor.Checkpointable(conv_net(), x)
    fourth.compute_sequence(custom_mem_limit_bytes=limit)
    for chk in (first, second, third, fourth):
        assert chk.mem_limit == limit
        assert chk(x).shape == (8, 10)
        assert chk.get_expected_memory() <= limit


def test_first_forward_measures_and_plans_by_itself():
    chk = rotor.Checkpointable(conv_net())
    assert chk.inspection_values is None
    assert chk.mem_slots == 500
    default_loss(chk(images())).backward()
    assert chk.inspection_values is not None
    free = memory.free_bytes("cpu")
    assert 0.5 * free < chk.mem_limit < free


def test_attributes_and_sequence_text():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x, "1 GiB", mem_slots=200)
    assert chk.mem_slots == 200
    assert chk.mem_limit == 2**30
    assert chk.preserve_rng_state is True
    assert chk.loss_tmp_memory_usage == 0
    assert len(chk.names) == len(chk.functions) == len(chk.inspection_values.measures)
    sequence = chk.compute_sequence("1GiB", algo=RecomputeAll())
    assert isinstance(sequence, Sequence)
    n = len(chk.names)
    assert str(sequence).startswith("Fck_0 Fn_1 ")
    assert "L Fck_0 Fn_1" in str(sequence) or f"Fe_{n - 1} L" in str(sequence)
    chain = chk.build_chain(2**30)
    assert len(chain) == n
    assert chain.x_bytes[0] == x.numel() * 4
    assert sequence.peak_bytes - chain.x_bytes[0] <= chk.get_expected_memory()
    assert chk.get_expected_makespan() == pytest.approx(sequence.makespan)


def test_algorithms_by_class_and_by_instance():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x)
    a = chk.compute_sequence("1GiB", algo=NoCheckpoint)
    b = chk.compute_sequence("1GiB", algo=NoCheckpoint())
    c = chk.compute_sequence("1GiB", algo=Persistent, mem_slots=300)
    assert a == b == c
    chk.compute_sequence("1GiB", algo=ChenSqrt())
    plain = copy.deepcopy(chk.module)
    assert Result(plain, plain, x).differences(Result(chk, chk, x)) == []


def test_curve_excludes_the_input_and_ends_without_recomputation():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x)
    curve = chk.curve()
    chain = chk.build_chain()
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(1)
    own = caught.value.minimum_bytes - curve.minimum_bytes
    assert 0 <= own < 100_000
    assert curve.seconds[-1] == pytest.approx(chain.ideal_time)


def test_display_and_report_are_text():
    chk = rotor.Checkpointable(conv_net(), images(), "1GiB")
    assert "3.0.0" in chk.display()
    assert repr(chk.display()) == str(chk.display())
    assert "1 GiB" in chk.report() or "1.00 GiB" in chk.report()


def test_merged_stages_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="rotor"):
        rotor.Checkpointable(conv_net(), images())
    assert "0.1+0.2" in caplog.text
    assert "4+5" in caplog.text


def test_eval_and_no_grad_run_the_plain_model():
    chk = rotor.Checkpointable(conv_net())
    x = images()
    with torch.no_grad():
        chk(x)
    assert chk.inspection_values is None
    chk.eval()
    assert not chk.module.training
    assert torch.equal(chk(x), chk.module(x))
    assert chk.inspection_values is None


def test_other_inputs_get_other_plans():
    chk = rotor.Checkpointable(conv_net(), mem_limit="1GiB")
    for batch in (4, 8, 4, 8):
        default_loss(chk(images(batch))).backward()
        chk.zero_grad()
    assert len(chk.plans) == 2
    chk[2].eval()
    default_loss(chk(images(4))).backward()
    assert len(chk.plans) == 3
    default_loss(chk(images(4))).backward()
    assert len(chk.plans) == 4
    chk.module[0][0].weight.requires_grad_(False)
    default_loss(chk(images(4))).backward()
    assert len(chk.plans) == 5


def test_existing_gradients_are_not_counted_again():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x, "1GiB")
    fresh = sum(chk.build_chain().pgrad_bytes)
    assert fresh == sum(p.numel() * 4 for p in chk.parameters())
    default_loss(chk(x)).backward()
    default_loss(chk(x)).backward()
    assert sum(chk.build_chain().pgrad_bytes) == 0


def test_shared_parameters_count_once():
    linear = nn.Linear(8, 8)
    chk = rotor.Checkpointable(nn.Sequential(linear, nn.Tanh(), linear), torch.randn(4, 8))
    assert chk.build_chain().pgrad_bytes == [0, 0, 8 * 8 * 4 + 8 * 4]


def test_frozen_first_stages_are_one_stage_that_keeps_its_output_only():
    model = conv_net(inplace=False)
    model[0].requires_grad_(False)
    model[0].eval()
    x = images()
    chk = rotor.Checkpointable(copy.deepcopy(model), x, "1GiB")
    first = chk.inspection_values.measures[0]
    assert first.name == "0.0+0.1+0.2"
    assert first.xbar_bytes == first.output_bytes
    assert first.grad_bytes == 0
    plain, _ = twins(model)
    for algo in (RecomputeAll(), NoCheckpoint()):
        chk.compute_sequence("1GiB", algo=algo)
        assert Result(plain, plain, x).differences(Result(chk, chk, x)) == []


def test_a_model_without_trainable_parameters_runs_plainly():
    model = conv_net().requires_grad_(False)
    chk = rotor.Checkpointable(model)
    assert not chk(images()).requires_grad


def test_structure_changes_are_seen():
    chk = rotor.Checkpointable(conv_net(), images(), "1GiB")
    chk.module.append(nn.Linear(10, 3))
    assert chk(images()).shape == (8, 3)


def test_two_pending_forwards_warn_once():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x)
    chk.compute_sequence("1GiB", algo=RecomputeAll())
    chk.plan.measured_bytes = 1
    y = chk(x)
    with pytest.warns(rotor.MemoryLimitWarning, match="each keeps its own limit"):
        z = chk(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = chk(x)
    default_loss(y + z + w).backward()


@pytest.mark.parametrize("limit", ["1GiB", "1.8MB"])
def test_models_in_one_backward_are_not_metered(limit):
    torch.manual_seed(0)
    layers, x = conv_net(), images()
    first = rotor.Checkpointable(layers[:3], x, limit)
    second = rotor.Checkpointable(layers[3:], first(x).detach().requires_grad_(), "1GiB")
    default_loss(second(first(x))).backward()
    assert first.plan.meterings == second.plan.meterings == 0
    default_loss(first(x)).backward()
    assert (first.plan.meterings, second.plan.meterings) == (1, 0)


def test_a_running_profiler_skips_metering_with_a_warning():
    x = images()
    chk = rotor.Checkpointable(conv_net(), x, "1GiB")
    with torch.profiler.profile(), pytest.warns(rotor.MemoryLimitWarning, match="not measured"):
        default_loss(chk(x)).backward()
    assert chk.plan.measured_bytes is None


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_a_meter_gives_way_to_a_profiler_of_the_backward(engine):
    x = images()
    chk = rotor.Checkpointable(conv_net(), mem_limit="1GiB", engine=engine)
    loss = default_loss(chk(x))
    with torch.profiler.profile() as profiler, pytest.warns(match="not measured: a profiler"):
        loss.backward()
    assert any("conv" in event.name for event in profiler.events())
    assert not any(event.name in ("backward", "end") for event in profiler.events())
    assert chk.plan.measured_bytes is None
    default_loss(chk(x)).backward()
    assert chk.plan.meterings == 1


class _BackwardWithin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backward):
        ctx.run = backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.run()
        return gradient, None


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic"])
def test_a_step_whose_backward_runs_within_another_is_metered_and_leaves_no_profiler_on(engine):
    x = images()
    chk = rotor.Checkpointable(conv_net(), mem_limit="1GiB", engine=engine)
    loss = default_loss(chk(x))
    _BackwardWithin.apply(torch.ones(1, requires_grad=True), loss.backward).backward()
    assert chk.plan.meterings == 1
    for recorder in (torch.profiler.profile(), memory.meter("cpu")):
        with recorder:
            pass


class _Equilibrium(nn.Module):
    """Fixed point of a layer, whose gradient a hook solves for by backwards of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x):
        z = torch.tanh(self.layer(x) + x)
        z0 = z.detach().requires_grad_()
        f0 = torch.tanh(self.layer(z0) + x)
        if z.requires_grad:
            z.register_hook(lambda g: g + torch.autograd.grad(f0, z0, g, retain_graph=True)[0])
        return z


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_backwards_of_a_hook_leave_no_profiler_on():
    x = torch.randn(64, 16)
    chk = rotor.Checkpointable(_Equilibrium(), mem_limit="1GiB")
    for _ in range(2):
        default_loss(chk(x)).backward()
    for recorder in (torch.profiler.profile(), memory.meter("cpu")):
        with recorder:
            pass


# -- unusual stages


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 16), nn.Tanh())
    tokens = torch.randint(0, 1000, (8, 4))
    plain = copy.deepcopy(model)
    chk = rotor.Checkpointable(model, tokens)
    assert 0 < chk.inspection_values.measures[0].pgrad_bytes[0] < 8 * 4 * (16 * 4 + 8) + 1
    chk.compute_sequence("1MiB", algo=RecomputeAll())
    for _ in range(2):
        default_loss(chk(tokens)).backward()
        default_loss(plain(tokens)).backward()
    assert torch.equal(chk[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())


def test_recurrent_stages_return_nested_tuples():
    class Last(nn.Module):
        def forward(self, value):
            output, (hidden, cell) = value
            return output[:, -1] + hidden[-1] * cell[-1]

    model = nn.Sequential(nn.LSTM(8, 16, batch_first=True), Last(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 6, 8, requires_grad=True)
    chk = rotor.Checkpointable(model, x)
    chk.compute_sequence("1MiB", algo=RecomputeAll())
    assert Result(plain, plain, x).differences(Result(chk, chk, x)) == []
