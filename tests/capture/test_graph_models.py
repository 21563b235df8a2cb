"""Public models within half of their activation memory, and what their code does in small."""

from __future__ import annotations

import copy
import logging
import threading
import warnings

import coverage_models
import pytest
import torch
from torch import nn

import rotor
from rotor import memory

logger = logging.getLogger("talks")

QUICK = ["tv/squeezenet", "tv/shufflenet", "tv/resnet18", "tv/mnasnet", "tv/vit_small"]


@pytest.fixture(autouse=True)
def one_thread(tmp_path_factory, monkeypatch):
    # One cache of profiles for all of them.
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "profiles"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def peak_of_a_step(run):
    with memory.meter("cpu") as meter:
        run()
    return meter.peak_bytes


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_training(model, x, limit=10**9, steps=2):
    """Train beside the plain model: loss, gradients and buffers are the same bits."""
    twin = copy.deepcopy(model)
    chk = rotor.Checkpointable(model, mem_limit=limit, engine="graph", effort="fast")
    for step in range(steps):
        results = []
        for trained in (twin, chk):
            torch.manual_seed(step)
            trained.zero_grad()
            loss = trained(x).square().mean()
            loss.backward()
            results.append(loss.detach())
        assert torch.equal(*results)
        for name, gradient in gradients_of(twin).items():
            assert torch.equal(gradient, dict(model.named_parameters())[name].grad)
        for name, buffer in twin.named_buffers():
            assert torch.equal(buffer, dict(model.named_buffers())[name])
    return chk


class PreparesItself(nn.Module):
    """Does in its first forward what no graph can hold; counts with a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.lock = threading.Lock()
        self.ready = False

    def __deepcopy__(self, memo):
        twin = PreparesItself()
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x):
        if not self.ready:
            with self.lock:
                self.ready = True
        return nn.functional.dropout(self.norm(self.linear(x)))


def test_a_module_that_prepares_itself_in_its_first_forward():
    torch.manual_seed(0)
    check_training(PreparesItself(), torch.randn(4, 8))


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        logger.warning("a forward")
        print("a forward")
        return self.linear(x)


def test_a_module_that_logs():
    torch.manual_seed(0)
    check_training(Talks(), torch.randn(4, 8))


class RequiresGradients(nn.Module):
    """Has what it computes from its input require gradients, as speech models do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        x = x[:, None]
        if self.how == "attribute":
            x.requires_grad = True
        else:
            x.requires_grad_()
        return self.layers(x) if (2 * x).requires_grad else x


@pytest.mark.parametrize("how", ["attribute", "method"])
def test_a_forward_that_sets_requires_grad(how):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    check_training(RequiresGradients(how), x)
    assert not x.requires_grad


def test_a_buffer_filled_from_values_that_were_asked_for_gradients():
    class Fills(RequiresGradients):
        def forward(self, x):
            x = x.mul(2).requires_grad_()
            filled = torch.zeros_like(x)
            filled.copy_(self.layers(x))
            return filled

    torch.manual_seed(0)
    check_training(Fills("method"), torch.randn(4, 8))


class Asks(RequiresGradients):
    """Has a value require gradients that the caller sees, as for saliency."""

    def forward(self, x):
        seen = x if self.how == "input" else x * 2
        if self.how == "attribute":
            seen.requires_grad = True
        else:
            seen.requires_grad_(requires_grad=True)
        derived = seen[:, :1] if self.how == "derived" else seen
        self.kept = (seen, derived)
        return self.layers(seen)


@pytest.mark.filterwarnings("ignore:no single graph:rotor.MemoryLimitWarning")
@pytest.mark.parametrize("how", ["input", "attribute", "method", "derived"])
def test_values_that_are_asked_for_gradients_have_them_after_the_call(how):
    torch.manual_seed(0)
    plain = Asks(how)
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit=10**9)
    for _ in range(2):
        x = torch.randn(4, 8)
        for model in (plain, chk):
            given = x.clone()
            model(given).square().sum().backward()
            assert given.requires_grad == (how == "input")
        for found, expected in zip(chk.kept, plain.kept, strict=True):
            assert found.requires_grad
            assert found.is_leaf == expected.is_leaf
        assert torch.equal(chk.kept[0].grad, plain.kept[0].grad)
        assert torch.equal(chk.layers[0].weight.grad, plain.layers[0].weight.grad)
    with pytest.raises(rotor.CaptureError, match=r"requires?[ _]grad"):
        rotor.Checkpointable(Asks(how), mem_limit=10**9, engine="graph")(x)


class ManyOutputs(nn.Module):
    """Returns far more than its loss reads, as models with caches do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x).sin()
            seen.append(x)
        return x.square().mean(), seen


def test_an_assumed_loss_makes_no_step_infeasible():
    torch.manual_seed(0)
    model = ManyOutputs()
    x = torch.randn(256, 64)
    twin = copy.deepcopy(model)
    model(x)[0].backward()
    model.zero_grad()
    plain = peak_of_a_step(lambda: model(x)[0].backward())
    model.zero_grad()

    def step(trained):
        output = trained(x)
        output[0].backward()

    outputs = 6 * 256 * 64 * 4
    limit = plain + outputs
    assert 4 * outputs > limit
    chk = rotor.Checkpointable(model, mem_limit=limit, engine="graph", effort="fast")
    step(chk)
    model.zero_grad()
    step(chk)
    step(twin)
    assert chk.plan.measured_bytes <= limit
    for name, gradient in gradients_of(twin).items():
        assert torch.equal(gradient, dict(model.named_parameters())[name].grad)


@pytest.mark.parametrize("name", QUICK)
def test_public_model_in_half_of_its_activation_memory(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sample = coverage_models.build(name)
        except ImportError as error:
            pytest.skip(str(error))
    plain, ours = sample.model, copy.deepcopy(sample.model)

    def loss_of(model):
        return sample.loss_fn(model(*sample.args, **sample.kwargs), *sample.targets)

    loss_of(copy.deepcopy(plain)).backward()
    probe = copy.deepcopy(plain)
    peak = peak_of_a_step(lambda: loss_of(probe).backward())
    gradients = sum(p.grad.nbytes for p in probe.parameters() if p.grad is not None)
    limit = gradients + (peak - gradients) // 2
    chk = rotor.Checkpointable(ours, mem_limit=limit, engine="graph", effort="fast")

    def losses_of(step):
        losses = []
        for model in (plain, chk):
            torch.manual_seed(step)
            model.zero_grad()
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.detach())
        return losses

    refusal = None
    try:
        steps = [losses_of(step) for step in range(2)]
    except rotor.InfeasibleError as error:
        refusal = error
    if refusal is not None:
        # Some processors' convolutions need several times the bytes of their weights.
        assert refusal.lower_bound_bytes > limit
        return
    assert all(torch.equal(*losses) for losses in steps)
    assert chk.plan.measured_bytes <= limit
    largest = max(g.abs().max() for g in gradients_of(plain).values())
    got = dict(ours.named_parameters())
    for parameter_name, gradient in gradients_of(plain).items():
        assert (gradient - got[parameter_name].grad).abs().max() <= 1e-5 * largest
    for buffer_name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(ours.named_buffers())[buffer_name])
