"""Exceptions at lines of rotor itself, in a step: nothing changed, and the next steps are right.

One line that a step runs is drawn, one of its visits too, and an exception is raised there: of the
kind that "auto" may go on from, or of that of Ctrl-C, which nothing may go on from.
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import inspect
import random
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from zoo.models import Asking, Row

import rotor
from rotor import dtr
from rotor.dtr import context
from rotor.dtr.recall import Recall
from rotor.dtr.stepping import StepSession
from rotor.engines.dynamic.step import BudgetedStep
from rotor.meter import allocator
from rotor.tier import homes

HOME = str(Path(rotor.__file__).parent)
pytestmark = pytest.mark.filterwarnings("ignore")

LOAD_CONST = dis.opmap["LOAD_CONST"]
ROWS, WIDTH, LIMIT = 64, 16, 150_000


class Injected(Exception):
    """Exception of a fault in rotor."""


class Stopped(BaseException):
    """Exception like that of Ctrl-C."""


class Visit(NamedTuple):
    """Visit of a line: file, line, and how often it was run before, counted from 1."""

    file: str
    line: int
    number: int


def leaves_a_context(frame: FrameType) -> bool:
    """Whether a ``with`` block is left next, where no exception can arise: `__exit__` is called."""
    code = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 6]
    return code[::2] == bytes([LOAD_CONST] * 3) and len(set(code[1::2])) == 1


@functools.cache
def restoring_lines(file: str) -> frozenset[int]:
    """Lines of a file that put something back: what follows ``finally``, and `__exit__`."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        parts = node.finalbody if isinstance(node, ast.Try) else []
        if isinstance(node, ast.FunctionDef) and node.name in ("__exit__", "__del__"):
            parts = node.body
        for part in parts:
            found.update(range(part.lineno, part.end_lineno + 1))
    return frozenset(found)


def restores(frame: FrameType | None) -> bool:
    """Whether a function is called to put something back."""
    while frame is not None and not frame.f_code.co_filename.startswith(HOME):
        frame = frame.f_back
    if frame is None:
        return False
    return frame.f_trace is None or frame.f_lineno in restoring_lines(frame.f_code.co_filename)


class Injector:
    """Context that counts visits of rotor's lines, and raises at one of them.

    What puts things back is left alone, if it is spared: an exception there leaves them as they are
    in most programs of Python.
    """

    def __init__(
        self,
        kind: type[BaseException] = Injected,
        at: Visit | None = None,
        *,
        spares: bool = True,
    ) -> None:
        self.kind, self.at, self.spares, self.visits = kind, at, spares, Counter()
        self.has_raised = False

    def __enter__(self) -> Injector:
        sys.settrace(self._at_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _at_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        is_ours = frame.f_code.co_filename.startswith(HOME)
        is_spared = self.spares and restores(frame.f_back)
        return self._at_line if is_ours and not is_spared else None

    def _at_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        file, line = place = frame.f_code.co_filename, frame.f_lineno
        is_spared = self.spares and line in restoring_lines(file)
        may_raise = not self.has_raised and not is_spared
        if event == "line" and may_raise and not leaves_a_context(frame):
            self.visits[place] += 1
            if self.at == (*place, self.visits[place]):
                self.has_raised = True
                sys.settrace(None)
                raise self.kind(f"{file}:{line}")
        return self._at_line


class Block(nn.Module):
    """Residual block with a buffer and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.shrink(torch.tanh(self.grow(self.norm(x)))))


def blocks(kind: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*(Block() for _ in range(4)))


CASES = {
    "chain": (blocks(nn.Sequential), "chain"),
    "auto, a Sequential": (blocks(nn.Sequential), "auto"),
    "graph": (blocks(Row), "graph"),
    "auto": (blocks(Row), "auto"),
    "parts": (blocks(Asking), "auto"),
    "dynamic": (blocks(Row), "dynamic"),
}


def step(model: nn.Module) -> torch.Tensor:
    output = model(torch.randn(ROWS, WIDTH))
    output.square().mean().backward()
    return output.detach()


def limited(case: str, steps: int) -> nn.Module:
    make, engine = CASES[case]
    torch.manual_seed(0)
    model = rotor.Checkpointable(make(), mem_limit=LIMIT, engine=engine)
    for _ in range(steps):
        step(model)
        model.zero_grad()
    return model


def lines(case: str, steps: int) -> list[tuple[tuple[str, int], int]]:
    """Lines that a step runs, with their visits."""
    model = limited(case, steps)
    with Injector() as injector:
        step(model)
    return sorted(injector.visits.items())


def process() -> tuple[Any, ...]:
    """What a step must leave as it was in a process."""
    return (
        gc.isenabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.compile,
        torch.get_rng_state,
        torch.autograd._engine_run_backward,
        homes.fetch,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._functorch.peek_interpreter_stack(),
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
    )


def assert_right(model: nn.Module, case: str) -> None:
    """Two steps are those of the plain model."""
    plain = CASES[case][0]()
    plain.load_state_dict(model.state_dict())
    for seed in range(2):
        found = []
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(seed)
            output = step(each)
            gradients = [p.grad for p in each.parameters()]
            buffers = [b.clone() for b in each.buffers()]
            found.append([output, *gradients, *buffers, torch.get_rng_state()])
        for expected, given in zip(*found, strict=True):
            assert given is not None
            assert torch.equal(expected, given)


def is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an exception is the injected one, or one of ours tells of it."""
    while error is not None and not isinstance(error, kind):
        error = None if kind is Stopped else error.__cause__ or error.__context__
    return error is not None


def inject(model: nn.Module, kind: type[BaseException], at: Visit) -> None:
    """A step with an exception leaves parameters and the process alone."""
    before, parameters = process(), [p.clone() for p in model.parameters()]
    try:
        with Injector(kind, at):
            step(model)
    except BaseException as error:
        if not is_of(error, kind):
            raise
    assert process() == before
    assert all(map(torch.equal, model.parameters(), parameters))


def attack(case: str, steps: int, seed: int, count: int) -> None:
    draw, known = random.Random(seed), lines(case, steps)
    model = limited(case, steps)
    for number in range(count):
        place, visits = draw.choice(known)
        at = Visit(*place, draw.choice((1, visits, draw.randint(1, visits))))
        if not steps:
            model = limited(case, steps)
        try:
            inject(model, (Injected, Stopped)[number % 2], at)
            assert_right(model, case)
        except BaseException as error:
            error.add_note(f"after an exception at {at}, number {number} of seed {seed}")
            raise


@pytest.fixture
def unheard(monkeypatch):
    """Exceptions in finalizers are lost, as everywhere in Python."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    if sys.gettrace() is not None:
        pytest.skip("another tool traces the lines")


@pytest.mark.parametrize("steps", [0, 3], ids=["first", "settled"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_survives_an_exception_of_rotor(unheard, case, steps):
    attack(case, steps, seed=0, count=3)


def test_no_meter_stays_where_planning_was_left_before_its_first_line(unheard):
    lines, first = inspect.getsourcelines(allocator.highest_peak)
    line = first + [each.strip() for each in lines].index("try:")
    inject(limited("dynamic", 0), Stopped, Visit(allocator.__file__, line, 1))
    meter = allocator.meter("cpu").start()
    stays = weakref.ref(meter)
    del meter
    gc.collect()
    assert stays() is None


def visits(run: Callable[[], Any], *codes: Any) -> list[Visit]:
    """First and second visits of all lines of functions and modules, those that restore too."""
    homes = [(inspect.getfile(code), *inspect.getsourcelines(code)) for code in codes]
    spans = [(file, range(first, first + len(text) + 1)) for file, text, first in homes]
    with Injector(spares=False) as seen:
        run()
    found = {(*place, k) for place, count in seen.visits.items() for k in {1, min(count, 2)}}
    return [Visit(*v) for v in sorted(found) if any(v[0] == f and v[1] in s for f, s in spans)]


def brings(function: Any) -> bool:
    """Whether a function computes what an operation needs, and nothing else."""
    text = [line.strip() for line in inspect.getsource(function).splitlines()]
    begins = "self._book.begin([node])"
    return begins in text and text[text.index(begins) + 2 :][:1] == ["self._book.abort()"]


def test_an_interrupt_at_a_line_that_enters_or_leaves_a_session_ends_that_step_alone(monkeypatch):
    model, lost = limited("dynamic", 3), []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: lost.append(one.exc_type))
    before = process()
    bring = [f for f in vars(Recall).values() if inspect.isfunction(f) and brings(f)]
    parts = (context, *bring, StepSession.leave_room, BudgetedStep.__init__)
    found = visits(lambda: step(model), *parts)
    assert len(found) > 100
    for at in found:
        with Injector(Stopped, at, spares=False), pytest.raises(Stopped):
            step(model)
        assert_right(model if at.number == 1 else limited("dynamic", 0), "dynamic")
        assert process() == before, at
    assert not lost


def test_a_budget_of_another_thread_follows_one_whose_end_was_interrupted():
    def run() -> None:
        with dtr.budget(None):
            torch.ones(1)

    before = process()
    for at in visits(run, context):
        with Injector(Stopped, at, spares=False), pytest.raises(Stopped):
            run()
        assert dtr.current() is None
        with ThreadPoolExecutor() as pool:
            pool.submit(run).result()
        assert process() == before, at


class TooLong(Exception):
    """Exception of a time-out."""


def time_out(*_: Any) -> None:
    raise TooLong


@pytest.mark.parametrize("case", ["auto", "dynamic"])
@pytest.mark.parametrize(
    ("number", "handler", "kind"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGALRM, time_out, TooLong),
    ],
)
def test_a_signal_while_a_meter_ends_ends_the_backward(case, number, handler, kind, monkeypatch):
    lost, levels_of = [], allocator.levels_of

    def interrupted(*args: Any) -> Any:
        if any(frame.function == "__del__" for frame in inspect.stack(0)):
            signal.raise_signal(number)
        return levels_of(*args)

    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    model, before, earlier = limited(case, 0), process(), signal.signal(number, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(allocator, "levels_of", interrupted)
            with pytest.raises(kind):
                step(model)
    finally:
        signal.signal(number, earlier)
    assert not lost
    assert process() == before
    assert_right(model, case)
    with allocator.meter("cpu"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "settled"])
@pytest.mark.parametrize("case", CASES)
def test_steps_survive_many_exceptions_of_rotor(unheard, case, steps, seed):
    attack(case, steps, seed=seed, count=42)
