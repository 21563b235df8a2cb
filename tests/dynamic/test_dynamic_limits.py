"""The dynamic engine's limit holds from the second step on, or the step is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from versions import EXCHANGES, needs_swaps
from zoo.models import First, Residual, Row

import rotor
import rotor.engines.dynamic.step as steps
from rotor import _core, memory
from rotor.units import exact_bytes

STEPS = 5
FIRST = "the limit of .* of which nothing was known before"


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what operators needed in earlier tests."""
    needs: dict[Any, Any] = {}
    monkeypatch.setattr("rotor.dtr.recall.known_needs", lambda device: needs)


def residual() -> nn.Module:
    blocks = [Residual(64, 256, torch.relu) for _ in range(5)]
    return Row(nn.Linear(64, 64), *blocks)


def sequential() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 64), nn.Tanh()]
    return nn.Sequential(*layers)


def in_double(y: torch.Tensor) -> torch.Tensor:
    return (y * y).mean().double()


def of_four_outputs(y: torch.Tensor) -> torch.Tensor:
    return (y.repeat(2, 1) * 2).exp().square().mean()


def train(model: nn.Module, x: torch.Tensor, loss: Callable[..., Any], steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        loss(model(x)).backward()


def peak_of(model: nn.Module, x: torch.Tensor, loss: Callable[..., Any]) -> int:
    model.zero_grad()
    with memory.meter("cpu") as meter:
        loss(model(x)).backward()
    return meter.peak_bytes


def peaks_from_the_second_step(
    make: Callable[[], nn.Module], limit: int, x: torch.Tensor, loss: Callable[..., Any]
) -> list[int]:
    """Meter each step in a model of its own: another meter keeps the engine's from running."""
    peaks = []
    for step in range(1, STEPS):
        chk = rotor.Checkpointable(make(), mem_limit=limit, engine="dynamic")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", FIRST)
            train(chk, x, loss, step)
            warnings.filterwarnings("ignore", "this step's memory was not measured")
            peaks.append(peak_of(chk, x, loss))
    return peaks


@pytest.mark.parametrize("loss", [in_double, of_four_outputs])
@pytest.mark.parametrize("make", [sequential, residual])
@pytest.mark.parametrize("fraction", [0.96, 0.93, 0.88])
def test_the_limit_holds_from_the_second_step_or_the_step_is_refused(
    make: Callable[[], nn.Module], loss: Callable[..., Any], fraction: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    plain = make()
    train(plain, x, loss, 1)
    limit = int(peak_of(plain, x, loss) * fraction)
    for _ in range(2):
        try:
            peaks = peaks_from_the_second_step(make, limit, x, loss)
        except rotor.InfeasibleError as error:
            limit = max(limit, error.minimum_bytes)
        else:
            break
    else:
        pytest.fail(f"{limit} bytes were named, and do not do")
    assert max(peaks) <= limit


def test_a_step_that_the_loss_leaves_no_room_for_is_refused_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = rotor.Checkpointable(sequential(), mem_limit="2 MB", engine="dynamic")
    x = torch.randn(128, 64)

    def large(y: torch.Tensor) -> torch.Tensor:
        return y.repeat(60, 1).square().mean()

    with pytest.warns(rotor.MemoryLimitWarning, match="for the loss, of which nothing was known"):
        train(model, x, large, 1)
    model.zero_grad()
    state = torch.get_rng_state()
    with pytest.raises(rotor.InfeasibleError, match="the loss does not fit") as raised:
        model(x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    limit = raised.value.minimum_bytes
    assert max(peaks_from_the_second_step(sequential, limit, x, large)) <= limit


def test_what_a_later_loss_holds_is_seen() -> None:
    steps._paused.clear()  # A step of an earlier test that is still pending is no neighbour.
    torch.manual_seed(0)
    model = rotor.Checkpointable(sequential(), mem_limit="2 MB", engine="dynamic")
    x = torch.randn(128, 64)
    train(model, x, in_double, 3)
    plan = model.plan
    metered = plan.meterings
    held: list[torch.Tensor] = []

    def hoarding(y: torch.Tensor) -> torch.Tensor:
        held.append(torch.zeros(1 << 17))
        return in_double(y)

    for _ in range(2):
        train(model, x, hoarding, 1)
        held.clear()
    assert plan.meterings == metered + 1
    assert plan.held_bytes > 1 << 19
    assert plan.most_bytes_seen <= 2_000_000


@torch.library.custom_op("rotor_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x) * torch.rand_like(x)


noisy.register_autograd(lambda context, gradient: gradient)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = noisy(layer(x)).tanh()
        return x


@pytest.mark.parametrize("fraction", [0.95, 0.8, 0.5])
def test_random_custom_operators_keep_the_limit_or_warn(fraction: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    plain = Noisy()
    train(plain, x, in_double, 1)
    limit = int(peak_of(plain, x, in_double) * fraction)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            peaks = peaks_from_the_second_step(Noisy, limit, x, in_double)
        except rotor.InfeasibleError as error:
            limit = error.minimum_bytes
            peaks = peaks_from_the_second_step(Noisy, limit, x, in_double)
    texts = [str(found.message) for found in caught]
    assert max(peaks) <= limit or any("could not be kept" in text for text in texts)


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers)


@pytest.mark.filterwarnings(f"ignore:{FIRST}")
@pytest.mark.parametrize("part", [3, 4, 5, 6, 8])
def test_the_limit_named_for_convolutions_works(part: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    plain = convolutions()
    train(plain, x, in_double, 1)
    peak = peak_of(plain, x, in_double)
    chk = rotor.Checkpointable(convolutions(), mem_limit=peak // part, engine="dynamic")
    with pytest.raises(rotor.InfeasibleError) as raised:
        train(chk, x, in_double, 2)
    limit = raised.value.minimum_bytes
    assert limit <= peak or not EXCHANGES
    assert max(peaks_from_the_second_step(convolutions, limit, x, in_double)) <= limit


@pytest.mark.parametrize(
    ("make", "fraction"), [(sequential, 0.94), (sequential, 0.935), (residual, 0.895)]
)
def test_what_python_frees_meanwhile_is_not_taken_for_room(
    make: Callable[[], nn.Module], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    plain = make()
    train(plain, x, in_double, 1)
    limit = int(peak_of(plain, x, in_double) * fraction)
    # The heap's level is that of Python's objects too, of which more go than tensors come.
    falling = itertools.count(1 << 30, -(1 << 20))
    monkeypatch.setattr(_core, "heap_bytes", lambda: next(falling))
    try:
        peaks = peaks_from_the_second_step(make, limit, x, in_double)
    except rotor.InfeasibleError as error:
        limit = error.minimum_bytes
        peaks = peaks_from_the_second_step(make, limit, x, in_double)
    assert max(peaks) <= limit


def of_everything(y: torch.Tensor) -> torch.Tensor:
    return (y.double() * 2).exp().log().square().mean()


def of_pairs(y: torch.Tensor) -> torch.Tensor:
    similar = nn.functional.normalize(y) @ nn.functional.normalize(y).T
    return nn.functional.cross_entropy(similar / 0.1, torch.arange(len(y)))


def of_classes(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, torch.arange(len(y)) % y.shape[1], label_smoothing=0.1)


def classifier() -> nn.Module:
    return nn.Sequential(sequential(), nn.Linear(64, 1000))


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "cross-entropy of 1000 classes": (classifier, of_classes),
    "in double precision": (sequential, of_everything),
    "of a larger tensor": (sequential, lambda y: of_four_outputs(y.repeat(2, 1))),
    "of pairs": (sequential, of_pairs),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("fraction", [0.95, 0.8, 0.65, 0.5])
def test_the_first_step_keeps_the_limit_or_says_that_it_did_not(name: str, fraction: float) -> None:
    make, loss = LOSSES[name]
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    plain = make()
    train(plain, x, loss, 1)
    limit = int(peak_of(plain, x, loss) * fraction)
    chk = rotor.Checkpointable(make(), mem_limit=limit, engine="dynamic")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(chk, x, loss, 1)
        except rotor.InfeasibleError:
            return
    peak = chk.plan.measured_bytes or chk.plan.most_bytes_seen
    texts = [str(found.message) for found in caught]
    if peak <= limit:
        assert texts == []
    else:
        assert len(texts) == 1
        assert (
            f"{exact_bytes(limit)} could not be kept: the step needed {exact_bytes(peak)}"
            in texts[0]
        )
    try:
        peaks = peaks_from_the_second_step(make, limit, x, loss)
    except rotor.InfeasibleError as error:
        limit = error.minimum_bytes
        peaks = peaks_from_the_second_step(make, limit, x, loss)
    assert max(peaks) <= limit


@pytest.mark.parametrize("loss", [of_four_outputs, of_pairs, of_everything])
def test_room_is_made_for_a_large_loss_of_which_nothing_is_known(loss: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    plain = sequential()
    train(plain, x, loss, 1)
    limit = int(peak_of(plain, x, loss) * 0.8)
    chk = rotor.Checkpointable(sequential(), mem_limit=limit, engine="dynamic")
    train(chk, x, loss, 1)
    assert chk.plan.measured_bytes <= limit


@needs_swaps
@pytest.mark.filterwarnings("ignore:this step's memory was not measured")
def test_the_proof_of_a_first_step_keeps_the_limit():
    # An LSTM, whose operator leaves a part of a result unwritten.
    lstm = First(nn.LSTM(64, 64, 2, batch_first=True))
    model = Row(nn.Embedding(100, 64), lstm, nn.Linear(64, 100))
    words = torch.randint(100, (16, 32))
    with memory.meter("cpu") as meter:
        model(words).sum().backward()
    plain = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    chk = rotor.Checkpointable(model, mem_limit=int(0.7 * plain), engine="dynamic")
    with memory.meter("cpu") as meter:
        chk(words).sum().backward()
    assert meter.peak_bytes <= 0.7 * plain
    assert "1 step: " in chk.plan.proved.text("first")


class Forking(nn.Module):
    """Noise that is drawn while the state of the generator is put aside."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(**self.settings):
            torch.manual_seed(7)
            noise = torch.rand_like(x)
        return torch.tanh(self.linear(x)) * noise


@pytest.mark.parametrize("settings", [{}, {"devices": []}])
def test_states_that_a_forward_puts_aside_count(settings: dict[str, Any]):
    torch.manual_seed(0)
    model = nn.Sequential(*(Forking(**settings) for _ in range(6)))
    x = torch.randn(64, 64)
    limit = peak_of(model, x, in_double) * 6 // 10
    asked = torch.get_rng_state
    limited = rotor.Checkpointable(model, mem_limit=limit, engine="dynamic")
    train(limited, x, in_double, 2)
    assert peak_of(limited, x, in_double) <= limit
    assert torch.get_rng_state is torch.random.get_rng_state is asked
