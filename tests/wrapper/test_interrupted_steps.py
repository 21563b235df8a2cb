"""A step that is interrupted anywhere leaves the model as it was, and training goes on."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from zoo.cases import Case, Loop, Residual, blocks, rows, usual_step
from zoo.judge import Snapshot
from zoo.models import Row

import rotor
from rotor import memory
from rotor.dtr import recall
from rotor.dtr.repeating import Verifier
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.graph.capture import Capture
from rotor.engines.parts.engine import PartsEngine

_CLEANUP = {"__exit__", "__del__", "stop", "close", "cancel", "_restore"}


class Interrupt:
    """Raises at the n-th call of a Python function of the package.

    Calls made while a context is left are passed over: no program survives those. So are, for
    errors that are no interrupts, those within a capture, which is tried again in another way.
    """

    def __init__(
        self,
        number: int | None = None,
        error: type[BaseException] = KeyboardInterrupt,
        within: str = "",
    ) -> None:
        self.number = number
        self.error = error
        self.within = within
        self.calls = 0
        self.place = ""

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or "/rotor/" not in code.co_filename:
            return
        # A generator is also called to be closed, where errors are lost.
        is_generator = code.co_flags & inspect.CO_GENERATOR
        if code.co_name in _CLEANUP or code.co_name.startswith("<") or is_generator:
            return
        if self._is_passed_over(frame) or not self._is_within(frame):
            return
        self.calls += 1
        if self.number is not None and self.calls >= self.number:
            sys.setprofile(None)
            self.place = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}"
            raise self.error

    def _is_within(self, frame: FrameType | None) -> bool:
        while self.within and frame is not None:
            code = frame.f_code
            if code.co_name == self.within and "/rotor/engines/" in code.co_filename:
                return True
            frame = frame.f_back
        return not self.within

    def _is_passed_over(self, frame: FrameType | None) -> bool:
        names = _CLEANUP | (
            {Capture.reach.__name__} if issubclass(self.error, Exception) else set()
        )
        while frame is not None:
            if frame.f_code.co_name in names:
                return True
            frame = frame.f_back
        return False


class Dropped(Residual):
    """A block with dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(super().forward(x)), 0.1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: blocks(Dropped, 4),
    "graph": lambda: Loop(Dropped, 4),
    "dynamic": lambda: Loop(Dropped, 4),
}
LIMIT = 1_400_000


def _new(engine: str) -> tuple[Case, nn.Module, Any, torch.optim.Optimizer]:
    case = Case(CASES[engine])
    torch.manual_seed(1)
    net = case.make()
    model = rotor.Checkpointable(net, mem_limit=LIMIT, engine=engine)
    return case, net, model, case.optimizer(net)


def _begun(engine: str, steps: int) -> tuple[Case, nn.Module, Any, torch.optim.Optimizer]:
    """Return a new model after some steps, without gradients."""
    case, net, model, optimizer = _new(engine)
    for k in range(steps):
        torch.manual_seed(98)
        usual_step(case, model, net, optimizer, k)
        optimizer.zero_grad()
    return case, net, model, optimizer


def _plain(engine: str, steps: int) -> list[Snapshot]:
    case = Case(CASES[engine])
    torch.manual_seed(1)
    net = case.make()
    optimizer = case.optimizer(net)
    found = []
    for k in range(steps):
        torch.manual_seed(100 + k)
        loss = usual_step(case, net, net, optimizer, k)
        found.append(Snapshot.of(case, net, loss))
    return found


def _calls(engine: str) -> int:
    case, net, model, optimizer = _new(engine)
    torch.manual_seed(100)
    with Interrupt() as counted:
        usual_step(case, model, net, optimizer, 0)
    return counted.calls


# Also where the end of an interrupted step comes late.
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("engine", list(CASES))
@pytest.mark.parametrize(
    "points", [pytest.param(8, id="few"), pytest.param(40, id="many", marks=pytest.mark.slow)]
)
def test_an_interrupted_first_step_can_be_repeated(engine: str, points: int) -> None:
    plain = _plain(engine, 3)
    total = _calls(engine)
    for point in range(points):
        case, net, model, optimizer = _new(engine)
        before = Snapshot.of(case, net)
        torch.manual_seed(100)
        (x,) = rows()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(KeyboardInterrupt), Interrupt(1 + total * point // points) as interrupt:
                model(x).square().mean().backward()
            optimizer.zero_grad()
            after = Snapshot.of(case, net)
            after.randomness = before.randomness  # a forward may have drawn before it ended
            ratio, where = before.difference(after)
            in_model = where.startswith("buffer")  # as a plain forward leaves it
            assert ratio == 0 or in_model, f"{interrupt.place}: {where} changed"
            net.load_state_dict({n: t.clone() for n, t in _state(before).items()})
            for k in range(3):
                torch.manual_seed(100 + k)
                loss = usual_step(case, model, net, optimizer, k)
                ratio, where = plain[k].difference(Snapshot.of(case, net, loss))
                assert ratio < 1e-5, f"after {interrupt.place}: {where} in step {k}"


def _state(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    named = snapshot.tensors.items()
    found = {name.removeprefix("buffer "): t for name, t in named if t is not None}
    return {n: t for n, t in found.items() if n != "loss" and not n.startswith("gradient of")}


# The first step knows nothing of the loss, and says by how much it was over.
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_what_a_recomputation_wrote_into_is_not_used_after_an_interrupt(monkeypatch):
    compared = Verifier.replayed
    clock = itertools.count()
    count = most = 0

    def replayed(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == most:
            raise KeyboardInterrupt
        compared(*args)

    monkeypatch.setattr(Verifier, "replayed", replayed)
    # The same times, and so the same evictions, in each run.
    monkeypatch.setattr(recall, "CLOCK", lambda: next(clock))
    (x,) = rows()

    def run() -> None:
        nonlocal clock
        clock = itertools.count(0, 1000)
        _, _, model, _ = _new("dynamic")
        torch.manual_seed(100)
        model(x).square().mean().backward()

    run()  # Needs of operators are guessed.
    count = 0
    run()
    total = count
    assert total > 20
    for point in range(1, total + 1):
        count, most = 0, point
        # The end of the step computes again, from what is in memory, and compares.
        with suppress(KeyboardInterrupt):
            run()
            assert count < point  # Collections of garbage differ, too.


class Interrupted(nn.Module):
    """Layers, after which the forward may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if self.stops:
                raise KeyboardInterrupt
        return x


def test_engines_refused_in_an_interrupted_step_are_asked_again():
    model = rotor.Checkpointable(Interrupted(), mem_limit="1MB")
    for step in range(3):
        model.module.stops = step == 1
        with suppress(KeyboardInterrupt):
            model(torch.randn(64, 32)).square().mean().backward()
        assert model.plan.engine == "graph"


class Taken(Interrupted):
    """Layers that no single graph holds in a step that stops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stops and x.detach().sum().item() > 1e9:
            x = -x
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize(
    ("engine", "phase", "error"),
    [(DynamicEngine, "run", KeyboardInterrupt), (PartsEngine, "measure", memory.MeterBusyError)],
)
def test_a_plan_runs_by_the_engine_that_made_it_after_one_that_was_asked_in_vain(
    engine: Any, phase: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Taken()
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, mem_limit="1MB", verbosity=-1)
    x = torch.randn(64, 32)
    for step in range(4):
        net.stops = step == 1
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt), warnings.catch_warnings():
            if step == 1:
                warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
                patch.setattr(engine, phase, _raises(error))
            model(x).square().mean().backward()
        model.zero_grad()
    assert model.plan.engine == "graph"
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


class Injected(Exception):
    """Raised in the middle of a step."""


def _raises(error: type[BaseException]) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        raise error

    return hook


def _fail(
    phase: str, error: type[BaseException], model: Any, net: nn.Module, number: int | None
) -> int:
    """Run a step that fails in a phase, or (without a number) count the calls that it makes."""
    watched = Interrupt(number, error, {"measuring": "measure", "planning": "plan"}.get(phase, ""))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(99)
    (x,) = rows()
    with watched if phase in ("measuring", "planning", "forward") else nullcontext():
        output = model(x)
    if phase == "loss" and number is not None:
        raise error
    loss = output.square().mean()
    handles = []
    if phase == "gradient" and number is not None:
        handles.append(output.register_hook(_raises(error)))
    if phase == "accumulation" and number is not None:
        parameter = list(net.parameters())[2]
        handles.append(parameter.register_post_accumulate_grad_hook(_raises(error)))
    try:
        with watched if phase == "backward" else nullcontext():
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    if phase == "optimizer" and number is not None:
        optimizer.register_step_pre_hook(_raises(error))
        optimizer.step()
    return watched.calls


PHASES = (
    *("measuring", "planning", "forward", "loss"),
    *("gradient", "backward", "accumulation", "optimizer"),
)
QUICK = ("measuring", "backward")


@pytest.mark.parametrize(
    ("phase", "engine"),
    [
        pytest.param(
            phase, engine, marks=[pytest.mark.slow] * (engine == "graph" and phase not in QUICK)
        )
        for phase in PHASES
        for engine in CASES
    ],
)
def test_a_step_that_fails_in_any_phase_can_be_repeated(phase: str, engine: str) -> None:
    is_first = phase in ("measuring", "planning")
    calls = 0
    for error in (Injected, KeyboardInterrupt):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if calls == 0:
                _, net, model, _ = _begun(engine, 0 if is_first else 1)
                calls = _fail(phase, error, model, net, None)
                if is_first and calls == 0:
                    assert engine == "dynamic"  # which knows no such phase
                    return
            case, net, model, optimizer = _begun(engine, 0 if is_first else 1)
            optimizer.zero_grad()
            before = Snapshot.of(case, net)
            with pytest.raises(error):
                _fail(phase, error, model, net, 1 + calls // 2)
            optimizer.zero_grad()
            after = Snapshot.of(case, net)
            after.randomness = before.randomness
            ratio, where = before.difference(after)
            in_model = where.startswith("buffer") and not is_first  # as a plain forward leaves it
            assert ratio == 0 or in_model, f"{error.__name__}: {where} changed"
            plain = copy.deepcopy(net)
            others = case.optimizer(plain)
            for k in range(3):
                torch.manual_seed(100 + k)
                expected = Snapshot.of(case, plain, usual_step(case, plain, plain, others, k))
                torch.manual_seed(100 + k)
                loss = usual_step(case, model, net, optimizer, k)
                ratio, where = expected.difference(Snapshot.of(case, net, loss))
                assert ratio < 1e-5, f"after {error.__name__}: {where} in step {k}"


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_meter_around_the_first_step_is_refused_in_words_and_nothing_stays(engine, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Softplus(), nn.Linear(40, 24))
    chk = rotor.Checkpointable(model, mem_limit="1GiB", engine=engine)
    x = torch.randn(20, 24)
    for _ in range(2):
        with (
            memory.meter("cpu"),
            pytest.raises(
                memory.MeterBusyError, match=r"cannot be measured now.*Measure it before"
            ),
        ):
            chk(x)
    assert chk.plan is None
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    chk.zero_grad()
    chk(x).sum().backward()
    assert type(chk.plan).__name__ == {"chain": "Plan", "graph": "GraphPlan"}[engine]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("around", [torch.profiler.profile, lambda: memory.meter("cpu")])
@pytest.mark.parametrize("make", [nn.Sequential, Row])
def test_steps_within_a_profiler_are_dynamic_until_it_has_gone(make, around, monkeypatch, tmp_path):
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    plain = make(nn.Linear(24, 40), nn.Softplus(), nn.Linear(40, 24))
    net = copy.deepcopy(plain)
    chk = rotor.Checkpointable(net, mem_limit="1GiB")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", rotor.MemoryLimitWarning)
        for number in range(3):
            x = torch.randn(20, 24)
            with around() if number < 2 else nullcontext():
                chk(x).sum().backward()
            plain(x).sum().backward()
            assert (chk.plan is None) == (number < 2)
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)
    texts = [str(one.message) for one in told if one.category is rotor.MemoryLimitWarning]
    assert len(texts) == 2
    assert any("the dynamic engine runs such steps" in text for text in texts)
    assert any("this step's memory was not measured" in text for text in texts)


@pytest.mark.parametrize("make", [nn.Sequential, Row])
def test_a_step_that_cannot_be_measured_or_run_dynamically_is_told_of(make):
    net = make(nn.Linear(24, 40), nn.Softplus(), nn.Linear(40, 24))
    chk = rotor.Checkpointable(net, mem_limit=1)
    with (
        memory.meter("cpu"),
        pytest.warns(rotor.MemoryLimitWarning, match=r"plain PyTorch, and nothing keeps the limit"),
    ):
        chk(torch.randn(20, 24)).sum().backward()


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("is_sequential", [True, False])
def test_a_step_that_cannot_be_measured_keeps_the_limit(is_sequential):
    torch.manual_seed(0)
    plain = blocks(depth=6) if is_sequential else Loop(depth=6)
    (x,) = rows()
    with memory.meter("cpu") as meter:
        plain(x).square().mean().backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    limit = int(0.75 * meter.peak_bytes)
    net = copy.deepcopy(plain)
    chk = rotor.Checkpointable(net, mem_limit=limit)
    for _ in range(2):
        net.zero_grad()
        with memory.meter("cpu", existing=()) as meter:
            chk(x).square().mean().backward()
        assert meter.peak_bytes <= limit
        assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))


class Stopped(Dropped):
    """A block that counts its forwards, and may be interrupted in them."""

    stops, calls = False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = super().forward(x)
        if self.stops:
            raise KeyboardInterrupt
        return found


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_forward_that_interrupts_itself_when_tried_leaves_no_trace(engine):
    net = {"chain": blocks, "graph": Loop}[engine](Stopped, 4)
    stages = [module for module in net.modules() if isinstance(module, Stopped)]
    stages[2].stops = True
    buffers, random = copy.deepcopy(list(net.buffers())), torch.get_rng_state()
    model = rotor.Checkpointable(net, mem_limit=LIMIT, engine=engine)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(64, 64))
    assert [stage.calls for stage in stages] == [0] * 4
    assert all(map(torch.equal, net.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), random)


class Annealed(Row):
    """Model with a number that its forward reads, and changes itself if `counts`."""

    weight, counts = 0.5, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.weight *= 0.9
        return super().forward(x) * self.weight


@pytest.mark.parametrize("around", [torch.profiler.profile, lambda: memory.meter("cpu")])
@pytest.mark.parametrize("counts", [False, True])
def test_a_planned_step_whose_values_change_within_a_profiler_trains(counts, around):
    plain = Annealed(nn.Linear(24, 40), nn.Softplus(), nn.Linear(40, 24))
    plain.counts = counts
    net = copy.deepcopy(plain)
    chk = rotor.Checkpointable(net, mem_limit="1GiB")
    texts = []
    for number in range(5):
        x = torch.randn(20, 24)
        for model in (plain, net):
            model.weight *= 1 if counts else 0.7
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", rotor.MemoryLimitWarning)
            with around() if number in (1, 2) else nullcontext():
                chk(x).sum().backward()
        texts += [(number, str(one.message)) for one in told]
        plain(x).sum().backward()
        assert net.weight == plain.weight
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    assert chk.planned_as == "graph"
    assert {number for number, text in texts if "dynamic engine runs such steps" in text} == {1}
    assert all(number in (1, 2) for number, _ in texts)
