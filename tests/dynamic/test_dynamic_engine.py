"""`Checkpointable(engine="dynamic")`: the plain model's results, within the limit."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from limited_models import Perceptron, both, limited, same, small_pair
from rotor.models import treelstm
from rotor.models.gpt import GPTSettings, gpt
from torch import nn
from torch.nn import functional as F
from versions import EXCHANGES, needs_swaps
from zoo.models import First, Row

import rotor
from rotor import dtr, memory
from rotor.errors import MemoryLimitWarning


@dataclass(frozen=True)
class Case:
    model: nn.Module
    arguments: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]


def square(y: Any) -> torch.Tensor:
    return y.square().mean()


class Branching(nn.Module):
    """How often the layers run depends on what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = self.first(x).tanh() if x.sum() > 0 else self.second(x).sigmoid() - 0.4
            x = x * 2
        return x


def _gpt() -> Case:
    settings = GPTSettings(
        vocab_size=128, context_length=48, layers=3, heads=4, width=64, dropout=0.1
    )
    model = gpt(settings)
    tokens, target = torch.randint(0, 128, (4, 48)), torch.randint(0, 128, (192,))
    return Case(model, (tokens,), lambda y: F.cross_entropy(y.flatten(0, 1), target))


def _cnn() -> Case:
    layers: list[nn.Module] = []
    for inputs in (3, 16, 16, 16, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    target = torch.randint(0, 10, (8,))
    return Case(model, (torch.randn(8, 3, 20, 20),), lambda y: F.cross_entropy(y, target))


def _lstm() -> Case:
    model = Row(First(nn.LSTM(32, 32, num_layers=6, dropout=0.2)), nn.Linear(32, 8))
    return Case(model, (torch.randn(20, 8, 32),), square)


def _tree() -> Case:
    model = treelstm.TreeLSTM(treelstm.ChildSumCell(32, 32), classes=5)
    tree = treelstm.random_parse_tree(24, 3)
    return Case(model, (torch.randn(24, 16, 32), tree), lambda y: -y[:, 2].mean())


def _branching() -> Case:
    return Case(Branching(), (torch.randn(256, 32),), square)


CASES = {"gpt": _gpt, "cnn": _cnn, "lstm": _lstm, "tree": _tree, "branching": _branching}


class Plain:
    """Steps of the plain model: what they leave, and the peak of one."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.case = CASES[name]()
        model = copy.deepcopy(self.case.model)
        self.left = [run(model, self.case, seed) for seed in range(4)]
        model.zero_grad()
        with memory.meter("cpu") as meter:
            run(model, self.case, 9)
        self.peak_bytes = meter.peak_bytes


def run(model: nn.Module, case: Case, seed: int) -> list[torch.Tensor | None]:
    """A step without gradients before it; all that it leaves."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = case.loss(model(*case.arguments))
    value.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [value.detach(), *gradients, *buffers, torch.get_rng_state()]


plain = cache(Plain)


@pytest.fixture
def pair() -> tuple[Perceptron, Any, torch.Tensor, int]:
    """A model, a copy under a limit that makes it evict, an input, and that limit."""
    return small_pair()


# -- the promise


# It is found by times, so that a busy machine may have it.
@pytest.mark.filterwarnings("ignore:thrashing:rotor.errors.MemoryLimitWarning")
@pytest.mark.parametrize("fraction", [0.7, 0.5 if EXCHANGES else 0.6])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_plain_ones_and_keep_the_limit(name, fraction):
    expected = plain(name)
    limit = int(expected.peak_bytes * fraction)
    model = copy.deepcopy(expected.case.model)
    chk = limited(model, limit)
    with warnings.catch_warnings():
        # Of a first step, in which an operator took a workspace that was not known.
        warnings.filterwarnings("ignore", "the limit of .* of which nothing was known before")
        assert same(run(chk, expected.case, 0), expected.left[0])
    assert same(run(chk, expected.case, 1), expected.left[1])
    # Metered until one keeps the limit: the second does.
    assert chk.plan.meterings in (1, 2)
    assert chk.plan.measured_bytes <= limit
    assert same(run(chk, expected.case, 2), expected.left[2])
    assert chk.plan.reserve_bytes == 0
    with memory.meter("cpu") as meter:
        left = run(chk, expected.case, 3)
    assert same(left, expected.left[3])
    assert meter.peak_bytes <= limit
    stats = chk.plan.last.stats
    assert stats.evictions > 0
    assert stats.overflows == 0


def test_a_captured_loss_is_within_the_limit_from_the_second_step():
    expected = plain("gpt")
    limit = int(expected.peak_bytes * 0.5)
    loss_fn = lambda y, _: expected.case.loss(y)  # noqa: E731
    chk = limited(copy.deepcopy(expected.case.model), limit, loss_fn=loss_fn)
    for seed in range(3):
        chk.zero_grad()
        torch.manual_seed(seed)
        loss = chk(*expected.case.arguments, targets=(torch.zeros(1),))
        loss.backward()
        assert torch.equal(loss.detach(), expected.left[seed][0])
    assert chk.plan.measured_bytes <= limit
    assert chk.plan.last.output_bytes == 4


def large_loss(y: torch.Tensor) -> torch.Tensor:
    """Takes and holds many times the bytes of the output."""
    return (y.repeat(6, 1) * 2).exp().log().square().mean()


def peak_of(model: nn.Module, x: torch.Tensor, loss: Callable[[Any], torch.Tensor]) -> int:
    model.zero_grad()
    with memory.meter("cpu") as meter:
        loss(model(x)).backward()
    return meter.peak_bytes


@pytest.mark.parametrize("fraction", [0.8, 0.7])
def test_a_loss_that_needs_more_than_assumed_is_learned_in_the_first_step(pair, fraction):
    model, _, x, _ = pair
    limit = int(peak_of(model, x, large_loss) * fraction)
    peaks = []
    for metered in range(1, 4):
        chk = limited(copy.deepcopy(model), limit)
        for _ in range(metered):
            chk.zero_grad()
            large_loss(chk(x)).backward()
        plan = chk.plan
        assert plan.loss_bytes > 4 * x.nbytes
        # Room was made for more than is assumed, so that the first step keeps the limit too.
        assert plan.meterings == 1
        peaks += [plan.measured_bytes, peak_of(chk, x, large_loss)]
        assert plan.reserve_bytes == 0
    assert max(peaks) <= limit
    assert "peak, measured" in chk.report()


def test_operators_are_learned_in_a_metered_step(pair):
    """Of operators that nobody knows yet: what they make, and a workspace."""
    model, chk, _, _ = pair
    x = torch.randn(61, 32)
    known = dtr.signatures.known_needs(torch.device("cpu"))
    before = set(known)
    chk.compute_sequence(10_000_000)
    chk(x).sum().backward()
    plan = chk.plan
    assert plan.meterings == 1
    assert plan.measured_bytes < 10_000_000
    learned = [needs for key, needs in known.items() if key not in before]
    assert len(learned) > 5
    assert all(needs.is_measured for needs in learned)
    assert len(plan.unknown) >= len(learned)
    assert {mark[0] for mark in plan.measured_timeline.marks} == {"loss", "backward"}
    linear = [needs for needs in learned if needs.made_bytes == 61 * 32 * 4]
    assert linear
    guessed = [(needs.made_bytes, needs.workspace_bytes) for needs in learned]
    # What a session measures by itself is the same.
    known.clear()
    with dtr.budget(None):
        copy.deepcopy(model)(x).sum().backward()
    measured = [(needs.made_bytes, needs.workspace_bytes) for needs in known.values()]
    assert set(guessed) <= set(measured)


def test_what_cannot_fit_changes_nothing(pair):
    model, _, x, _ = pair
    model(x).sum().backward()
    chk = limited(copy.deepcopy(model), 40_000)
    for mine, parameter in zip(chk.parameters(), model.parameters(), strict=True):
        mine.grad = parameter.grad.clone()
    before = [b.clone() for b in chk.buffers()] + [p.grad.clone() for p in chk.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(
        rotor.InfeasibleError, match="the forward does not fit: the budget"
    ) as caught:
        chk(x).sum().backward()
    assert caught.value.minimum_bytes > 40_000
    assert "which may be too little or more than needed" in str(caught.value)
    assert same(before, [*chk.buffers(), *(p.grad for p in chk.parameters())])
    assert torch.equal(state, torch.get_rng_state())
    chk.compute_sequence(mem_limit="150 KB")
    assert dtr.current() is None
    both(model, chk, lambda m: [m(x).sum().backward() or x])


@needs_swaps
def test_a_backward_that_cannot_fit_changes_nothing(pair):
    model, _, x, _ = pair
    chk = limited(model)
    before = [b.clone() for b in chk.buffers()]
    state = torch.get_rng_state()
    infeasible = []
    for limit in range(40_000, 200_000, 4_000):
        chk.compute_sequence(limit)
        try:
            chk(x).sum().backward()
        except rotor.InfeasibleError as error:
            infeasible.append(str(error).split(" does")[0])
            assert same(before, list(chk.buffers()))
            assert torch.equal(state, torch.get_rng_state())
            assert all(p.grad is None for p in chk.parameters())
        else:
            break
    assert infeasible[0] == "the forward"
    assert infeasible[-1] == "the backward"


@needs_swaps
def test_without_strictness_the_limit_is_passed_with_a_warning(pair):
    model, _, x, _ = pair
    chk = limited(copy.deepcopy(model), 40_000, strict=False)
    with pytest.warns(MemoryLimitWarning, match=r"\(40000 bytes\) is too small"):
        both(model, chk, lambda m: [m(x).sum().backward() or x])
    assert chk.plan.last.stats.overflows > 0
    assert "times over the limit" in chk.report()


# -- what a backward may be


@needs_swaps
def test_a_graph_may_be_kept_for_a_second_backward(pair):
    model, chk, x, _ = pair

    def act(m: nn.Module) -> list[torch.Tensor]:
        y = m(x)
        (y * 2).sum().backward(retain_graph=True)
        y.square().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        return [y.detach()]

    both(model, chk, act)
    assert chk.plan.last.stats.evictions > 0


def test_two_forwards_before_a_backward(pair):
    model, chk, x, _ = pair

    def act(m: nn.Module) -> list[torch.Tensor]:
        first, second = m(x), m(x + 1)
        (first.sum() * 3).backward()
        second.square().sum().backward()
        return [first.detach(), second.detach()]

    with pytest.warns(MemoryLimitWarning, match="each keeps its own limit"):
        both(model, chk, act)


def test_two_forwards_in_one_loss(pair):
    model, chk, x, _ = pair
    with pytest.warns(MemoryLimitWarning, match="each keeps its own limit"):
        both(model, chk, lambda m: [(m(x) * m(x + 1)).mean().backward() or x])


def test_gradients_accumulate(pair):
    model, chk, x, _ = pair
    both(model, chk, lambda m: [m(x + k).square().mean().backward() or x for k in range(3)])


def test_hooks_on_parameters_run_once(pair):
    model, chk, x, _ = pair
    calls: list[int] = []

    def act(m: nn.Module) -> list[torch.Tensor]:
        parameter = m.layers[0].weight
        handles = [
            parameter.register_hook(lambda g: calls.append(1) or g * 3),
            parameter.register_post_accumulate_grad_hook(lambda p: calls.append(2)),
        ]
        m(x).sum().backward()
        for handle in handles:
            handle.remove()
        return [x]

    both(model, chk, act)
    assert calls == [1, 2, 1, 2]


def test_frozen_and_shared_parameters_and_inputs_that_need_gradients(pair):
    model, chk, x, _ = pair
    for m in (model, chk):
        m.layers[3].weight = m.layers[5].weight
        m.layers[0].requires_grad_(False)

    def act(m: nn.Module) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        m(leaf * 2).square().sum().backward()
        assert m.layers[0].weight.grad is None
        return [leaf.grad]

    both(model, chk, act)


def test_autograd_grad_of_some_parameters(pair):
    model, chk, x, _ = pair
    both(model, chk, lambda m: torch.autograd.grad(m(x).sum(), [m.norm.weight, m.layers[2].bias]))


def test_leaves_outside_the_model_get_their_gradients(pair):
    model, chk, x, _ = pair
    scale = nn.Parameter(torch.ones(32))
    for m in (model, chk):
        m.layers[4].register_forward_hook(lambda _, __, y: y * scale * 2)

    def act(m: nn.Module) -> list[torch.Tensor]:
        scale.grad = None
        m(x).square().sum().backward()
        return [scale.grad]

    both(model, chk, act)


def test_second_derivatives_are_made_by_a_forward_that_runs_again(pair):
    _, chk, x, _ = pair
    with pytest.warns(rotor.MemoryLimitWarning, match="ran the model's forward again"):
        (gradient,) = torch.autograd.grad(chk(x).sum(), [chk.norm.weight], create_graph=True)
    assert gradient.requires_grad


def test_what_was_evicted_goes_when_a_forward_is_abandoned(pair):
    _, chk, x, _ = pair
    for _ in range(2):
        chk(x).sum().backward()
    chk.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with memory.meter("cpu") as meter:
            for _ in range(3):
                y = chk(x)
                del y
        assert meter.end_bytes < 1000
    finally:
        gc.enable()


def test_exceptions_leave_no_session(pair):
    model, chk, x, _ = pair
    handle = chk.layers[6].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chk(x)
    handle.remove()
    assert dtr.current() is None
    y = chk(x)
    y.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    del y
    handle = chk.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chk(x).sum().backward()
    handle.remove()
    assert dtr.current() is None
    chk.load_state_dict(model.state_dict())
    chk.zero_grad()
    both(model, chk, lambda m: [m(x).sum().backward() or x])


def test_writes_between_forward_and_backward_are_noticed(pair):
    _, chk, x, limit = pair
    chk(x).sum().backward()
    y = chk(x)
    with torch.no_grad():
        chk.layers[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="written to in place"):
        y.sum().backward()
    chk.compute_sequence(10 * limit)
    y = chk(x)
    with torch.no_grad():
        chk.layers[0].bias.add_(1)
    y.sum().backward()


def test_a_later_forward_may_write_to_what_an_earlier_one_read():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x - self.mean.clone()
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
            for layer in self.layers:
                y = layer(y).tanh()
            return y

    torch.manual_seed(0)
    model = Centred()
    chk = limited(copy.deepcopy(model), 180_000)
    x = torch.randn(64, 64)

    def act(m: nn.Module) -> list[torch.Tensor]:
        first, second = m(x), m(x + 1)
        first.sum().backward()
        second.sum().backward()
        return []

    with pytest.warns(MemoryLimitWarning, match="each keeps its own limit"):
        both(model, chk, act)


class Tangents(nn.Module):
    """Values and tangents of layers; the tangents of biases are zeros without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Row(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, tangent = torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))
        return (value * tangent).sum()


def test_zeros_without_memory_are_evicted_and_proven() -> None:
    plain = Tangents()
    net = copy.deepcopy(plain)
    model = rotor.Checkpointable(net, mem_limit="1500KiB", engine="dynamic", verify="always")
    for given in (plain, model):
        given(torch.linspace(-1, 1, 512 * 64).view(512, 64)).backward()
    assert same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert model.plan.last.stats.evictions > 0


def test_operators_that_compile_their_functions_are_refused_in_words() -> None:
    class Chooses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    model = rotor.Checkpointable(Chooses(8, 8), mem_limit="1 MB", engine="dynamic")
    with pytest.raises(RuntimeError, match=r"compiles its functions \(torch.cond"):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("engine", ["chain", "dynamic"])
def test_parameters_are_swapped_between_steps(engine: str, monkeypatch: Any) -> None:
    get = torch.__future__.get_swap_module_params_on_conversion
    monkeypatch.setattr(torch.__future__, get.__name__, lambda: True)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net = copy.deepcopy(plain)
    model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine)
    for given in (plain, model):
        given(torch.ones(2, 8)).sum().backward()
        given.zero_grad()
        given.double()
        given(torch.ones(2, 8).double()).sum().backward()
    assert same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
