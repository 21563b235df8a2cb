"""Operators that do not repeat: kept where that is found, and never wrong in silence."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from versions import EXCHANGES

import rotor
from rotor import dtr
from rotor.dtr.operators import KERNELS, ODD_OPERATORS, Operator, Treatment
from rotor.dtr.repeating import known_repeats
from rotor.errors import MemoryLimitWarning, RecomputationError

_own = torch.Generator()
_calls = [0]


@torch.library.custom_op("rotor_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("rotor_tests::python_noise", mutates_args=())
def python_noise(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


@torch.library.custom_op("rotor_tests::own_noise", mutates_args=())
def own_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=_own)


@torch.library.custom_op("rotor_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("rotor_tests::late", mutates_args=())
def late(x: torch.Tensor) -> torch.Tensor:
    """Begins to differ after three calls, so that the test of the first does not see it."""
    _calls[0] += 1
    return x * (2 if _calls[0] <= 3 else _calls[0])


for _operator in (noise, python_noise, own_noise, late):
    _operator.register_autograd(lambda _, gradient: gradient)
doubled.register_autograd(lambda _, gradient: gradient * 2)


def chain(operator: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    x = torch.linspace(0, 1, 20_000, requires_grad=True)
    values = [x]
    for _ in range(10):
        values.append(operator(values[-1]).sin() * values[0])
    loss = sum(value.square().sum() for value in values)
    (gradient,) = torch.autograd.grad(loss, x)
    return [gradient, *(value.detach().sum() for value in reversed(values))]


@pytest.mark.parametrize("operator", [noise, doubled])
def test_custom_operators_that_repeat_are_computed_again(
    operator: Callable[[torch.Tensor], torch.Tensor],
):
    torch.manual_seed(1)
    expected = chain(operator)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    with dtr.budget(1_300_000 if EXCHANGES else 1_500_000) as session:
        found = chain(operator)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.rand(3), drawn)
    assert session.stats.rematerializations > 0


def test_numbers_of_pythons_generator_are_kept():
    random.seed(2)
    expected = chain(python_noise)
    drawn = random.random()
    random.seed(2)
    with dtr.budget(2_300_000, strict=False) as session:
        with pytest.warns(MemoryLimitWarning, match="python_noise does not repeat bit for bit"):
            found = chain(python_noise)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert random.random() == drawn
    assert session.stats.evictions > 0


def test_numbers_of_a_generator_of_its_own_are_kept():
    _own.manual_seed(3)
    with dtr.budget(None), pytest.warns(MemoryLimitWarning, match="own_noise"):
        chain(own_noise)
    _own.manual_seed(3)
    expected = chain(own_noise)
    _own.manual_seed(3)
    with dtr.budget(2_300_000, strict=False) as session:
        with pytest.warns(MemoryLimitWarning, match="own_noise does not repeat bit for bit"):
            found = chain(own_noise)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert session.stats.evictions > 0


def test_verified_budgets_refuse_what_differs():
    _calls[0] = 0
    with (
        pytest.raises(
            RecomputationError, match=r"rotor_tests::late \(\[20000\], torch.float32\)"
        ) as raised,
        dtr.budget(1_300_000, verify="always"),
    ):
        chain(late)
    assert raised.value.module == ""
    with pytest.raises(ValueError, match="verify='first'"), dtr.budget(None, verify="first"):
        pass


def test_verified_budgets_pass_what_repeats():
    """Operators of several results, in place, uninitialised, of the program's generators."""
    x = torch.linspace(0, 1, 10_000)
    lstm = nn.LSTM(50, 50, batch_first=True)

    def program() -> torch.Tensor:
        torch.manual_seed(0)
        kept = []
        for k in range(12):
            y = torch.empty(10_000)
            y[:5_000] = x[:5_000] * k
            y[5_000:] = 1
            kept += [y, torch.nn.functional.dropout(x, 0.5), torch.sort(x * k)[0]]
            kept += [torch.frexp(x + k)[0], (x * k).mul_(2), lstm(x.view(2, 100, 50))[0]]
            kept.append(x[x > k / 12])
        return torch.stack([v.detach().sum() for v in [*kept, *reversed(kept)]])

    expected = program()
    with dtr.budget(2_500_000, verify="always") as session:
        found = program()
    assert torch.equal(found, expected)
    assert session.stats.rematerializations > 30
    assert session.compared > 20


class Inner(nn.Module):
    """A linear layer beside an operator that begins to differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return late(self.layer(x))


def named_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(100, 100), Inner()) for _ in range(8)))


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_the_error_names_the_module():
    torch.manual_seed(0)
    known_repeats().clear()
    _calls[0] = 0
    model = rotor.Checkpointable(named_model(), mem_limit=600_000, engine="dynamic")
    with pytest.raises(
        RecomputationError,
        match=r"late in module '\d\.1' \(\[100, 100\], torch.float32\) gave.*run the step again",
    ) as raised:
        model(torch.randn(100, 100)).square().sum().backward()
    assert raised.value.module in {f"{k}.1" for k in range(8)}


def test_a_budgets_error_names_the_module():
    torch.manual_seed(0)
    net = named_model()
    known_repeats().clear()
    _calls[0] = 0
    with (
        pytest.raises(RecomputationError, match=r"late in module '\d\.1' \(\[100, 100\]") as raised,
        dtr.budget(600_000, verify="always"),
    ):
        net(torch.randn(100, 100)).square().sum().backward()
    assert raised.value.module in {f"{k}.1" for k in range(8)}


def test_paths_follow_modules_that_raise_and_other_threads():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Failing()
            self.seen: list[str | None] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(session._handler.module)
            with pytest.raises(ValueError, match="on purpose"):
                self.failing(x)
            thread = threading.Thread(target=nn.Identity(), args=(x,))
            thread.start()
            thread.join()
            self.seen.append(session._handler.module)
            return x

    net = nn.ModuleDict({"outer": Outer()})
    net.forward = lambda x: net["outer"](x)
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    with dtr.budget(None, verify="always") as session:
        net(torch.ones(3))
        assert session._handler.module is None
    assert net["outer"].seen == ["outer", "outer"]
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    with dtr.budget(None) as session:
        net(torch.ones(3))
    assert net["outer"].seen[2:] == [None, None]


@pytest.mark.parametrize("is_written", [True, False])
def test_second_results_of_operators_are_compared(
    is_written: bool, monkeypatch: pytest.MonkeyPatch
):
    """The mean differs; or its memory is left as it was, which may be anything."""
    x = torch.linspace(0, 1, 20_000).view(10_000, 2)
    var_mean = torch.ops.aten.var_mean.correction
    calls = 0

    def again(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        variance, mean = var_mean(*args, **kwargs)
        if is_written:
            return variance, mean + 1
        found = torch.empty_like(mean)
        return variance, found if found.isnan().all() else found.fill_(calls)

    monkeypatch.setitem(ODD_OPERATORS, "aten::var_mean", Treatment(replay=again))
    monkeypatch.setitem(KERNELS, var_mean, Operator(var_mean).kernel)
    with dtr.budget(400_000, verify="always") as session:
        means = [torch.var_mean(x * k, 1)[1] for k in range(1, 16)]
        if is_written:
            with pytest.raises(RecomputationError, match=r"var_mean \(\[10000\], torch.float32\)"):
                [mean.sum() for mean in means]
        else:
            [mean.sum() for mean in means]
            assert session.compared > 0
        means.clear()
    assert calls > 0


class Late(nn.Module):
    """Batch statistics, an operator that begins to differ, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(100)
        self.layers = nn.ModuleList(nn.Linear(100, 100) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = late(layer(x)).sin()
        return x


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_a_step_that_differs_leaves_no_trace_and_the_next_one_keeps_the_value():
    torch.manual_seed(0)
    known_repeats().clear()
    net = Late()
    x = torch.randn(100, 100)
    model = rotor.Checkpointable(net, mem_limit=600_000, engine="dynamic")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    drawn = torch.get_rng_state()
    _calls[0] = 0
    with pytest.raises(RecomputationError, match="rotor_tests::late") as raised:
        model(x).square().sum().backward()
    assert raised.value.operation == "rotor_tests::late"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    _calls[0] = 10
    model(x).square().sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.load_state_dict(before)
    net.zero_grad()
    _calls[0] = 10
    net(x).square().sum().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert "proved in 1 step" in str(model.report())


def test_steps_are_proved_as_often_as_asked():
    for verify, proved in (("first", 3), ("off", 0), ("always", 5), (4, 4)):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        limit = 500_000 if EXCHANGES else 560_000
        model = rotor.Checkpointable(net, mem_limit=limit, engine="dynamic", verify=verify)
        for _ in range(5):
            net.zero_grad()
            model(torch.ones(256, 64)).square().mean().backward()
        plan = model.plan
        assert plan.proved.steps == proved
        assert plan.last.stats.rematerializations > 0
        assert (plan.proved.values > 0) == (proved > 0)
