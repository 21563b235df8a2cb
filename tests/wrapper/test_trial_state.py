"""State that trials put back: written to and replaced, in objects of C, in hidden modules."""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import decimal
import functools
import hashlib
import mmap
import queue
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

import rotor
from rotor.common.undisturbed import Untriable, trial

pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")

WIDTH = 32
Step = Callable[[Any], float]
Number = TypeVar("Number")


class Stateful(nn.Module):
    """Layers scaled by a number out of the state, which each forward changes."""

    def __init__(self, state: Any, step: Step, *, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.state, self.step, self.breaks = state, step, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.step(self) / 10
        if self.breaks and x.sum() > 1e9:
            x = x + 1
        for layer in self.layers:
            x = torch.tanh(layer(x) * scale)
        return x


def grown_array(model: Any) -> float:
    model.state[0] += 1
    model.state = model.state * 1.1
    return float(model.state[0])


def grown_tensor(model: Any) -> float:
    model.state += 1
    model.state = model.state * 1.1
    return model.state[0].item()


def grown_in_numpy(model: Any) -> float:
    model.state.numpy()[0] += 1
    return model.state[0].item()


def grown_list(model: Any) -> float:
    model.state.append(len(model.state) + 1.0)
    model.state = copy.copy(model.state)
    return float(len(model.state))


def grown_inner_list(model: Any) -> float:
    model.state[0].append(1.0)
    model.state[0] = list(model.state[0])
    return float(len(model.state[0]))


def grown_entry(model: Any) -> float:
    model.state["a"] += 1
    model.state = dict(model.state)
    return float(model.state["a"])


def popped_entry(model: Any) -> float:
    taken = model.state.pop("a")
    taken += 1
    model.state["a"] = taken * 1.1
    return float(model.state["a"][0])


def grown_attribute(model: Any) -> float:
    model.state.n += 1
    model.state = types.SimpleNamespace(n=model.state.n)
    return float(model.state.n)


def grown_objects(model: Any) -> float:
    model.state[1]["x"] = model.state[1].get("x", 0) + 1
    return float(model.state[1]["x"])


def grown_number(model: Any) -> float:
    model.state.value += 1
    return float(model.state.value)


def grown_byte(model: Any) -> float:
    model.state[0] = model.state[0] + 1
    return float(model.state[0])


def exchanged(model: Any) -> float:
    a, b = model.state
    a[0] += 1
    model.state[:] = b, a
    return float(torch.as_tensor(a[0]).mean())


REPLACED: dict[str, tuple[Callable[[], Any], Step]] = {
    "array": (lambda: np.ones(3), grown_array),
    "array of an entry": (lambda: {"a": np.ones(3)}, popped_entry),
    "array of objects": (lambda: np.array([1.0, {}], dtype=object), grown_objects),
    "tensor": (lambda: torch.ones(3), grown_tensor),
    "tensor of NumPy": (lambda: torch.ones(3), grown_in_numpy),
    "list": (lambda: [1.0], grown_list),
    "inner list": (lambda: [[1.0]], grown_inner_list),
    "exchanged lists": (lambda: [[1.0], [1.0]], exchanged),
    "exchanged tensors": (lambda: [[torch.ones(1100)], [torch.ones(1100)]], exchanged),
    "deque": (lambda: collections.deque([1.0]), grown_list),
    "numbers": (lambda: array.array("d", [1.0]), grown_list),
    "dictionary": (lambda: {"a": 1.0}, grown_entry),
    "namespace": (lambda: types.SimpleNamespace(n=1.0), grown_attribute),
    "number of C": (lambda: ctypes.c_long(1), grown_number),
    "array of C": (lambda: (ctypes.c_long * 3)(1, 1, 1), grown_byte),
    "memory map": (lambda: mmap.mmap(-1, 8), grown_byte),
}


def first_of_all(model: Any) -> float:
    is_first, model.state = model.state, False
    return 1.0 if is_first else 5.0


def seen_before(model: Any) -> float:
    scale = 5.0 + len(model.state)
    model.state.add("a")
    return scale


def filled_once(model: Any) -> float:
    if "a" not in model.state:
        model.state["a"] = 3.0
        return 7.0
    return model.state["a"]


FIRST: dict[str, tuple[Callable[[], Any], Step]] = {
    "flag": (lambda: True, first_of_all),
    "set": (set, seen_before),
    "entry": (dict, filled_once),
}


def losses(made: tuple[Callable[[], Any], Step], *, breaks: bool, limit: int | None) -> list[float]:
    state, step = made
    model: Any = Stateful(state(), step, breaks=breaks)
    if limit is not None:
        model = rotor.Checkpointable(model, mem_limit=limit)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = model(torch.randn(256, WIDTH)).square().mean()
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", REPLACED)
def test_trials_put_back_what_a_forward_replaces(name, breaks):
    plain = losses(REPLACED[name], breaks=breaks, limit=None)
    assert len(set(plain)) == 3
    # More than a dynamic step keeps, so that no engine has to be refused.
    assert losses(REPLACED[name], breaks=breaks, limit=300_000) == plain


def chain_steps(stages: list[Any], limit: int | None) -> list[Any]:
    """Return the losses and gradients of some steps of a chain of one layer a stage."""
    for stage in stages:
        stage.layers = stage.layers[:1]
    model: Any = nn.Sequential(*stages)
    if limit is not None:
        model = rotor.Checkpointable(model, mem_limit=limit, engine="chain")
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(4):
        loss = model(torch.randn(256, WIDTH)).square().mean()
        loss.backward()
        found += [loss.item(), *[p.grad.tolist() for s in stages for p in s.parameters()]]
    return found


class Counted:
    """Number that rises with each call."""

    n = 0

    def __call__(self, *_: object) -> float:
        self.n += 1
        return float(self.n)


def in_nested_class() -> Any:
    class Config:
        class Train:
            step = 0

        def __call__(self) -> float:
            self.Train.step += 1
            return float(self.Train.step)

    return Config()


def in_class_of_a_function() -> Any:
    class Config:
        class Scaled(torch.autograd.Function):
            step = 0

            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                Config.Scaled.step += 1
                return x * Config.Scaled.step

    return lambda: Config.Scaled.apply(torch.ones(())).item()


def in_object_of_a_class() -> Any:
    class Config:
        count = Counted()

    return lambda: Config.count()


def in_property() -> Any:
    count = Counted()

    class Config:
        @property
        def n(self) -> float:
            return self.last

        @n.setter
        def n(self, value: float) -> None:
            self.last = value * count()

        def __call__(self) -> float:
            self.n = 1
            return self.n

    return Config()


def in_cached_property() -> Any:
    count = Counted()

    class Config:
        n = functools.cached_property(lambda self: count())

    return lambda: Config().n


def in_partial_method() -> Any:
    class Config:
        n = functools.partialmethod(lambda self, count: count(), Counted())

    return lambda: Config().n()


def in_implementation() -> Any:
    count = Counted()

    @functools.singledispatch
    def scale_of(value: Any) -> float:
        raise TypeError

    scale_of.register(dict)(lambda value: count())
    return lambda: scale_of({})


def in_implementation_of_a_method() -> Any:
    count = Counted()

    class Config:
        @functools.singledispatchmethod
        def scale_of(self, value: Any) -> float:
            raise TypeError

        scale_of.register(dict)(lambda self, value: count())

    return lambda: Config().scale_of({})


def in_list_of_a_method() -> Any:
    made: list[int] = []
    add, size = made.append, made.__len__

    def grown() -> float:
        add(1)
        return float(size())

    return grown


def in_view() -> Any:
    view = types.MappingProxyType({"count": Counted()})
    return lambda: view["count"]()


def in_generic_class() -> Any:
    class Config(Generic[Number]):
        n = 0

        def __call__(self) -> float:
            Config.n += 1
            return float(Config.n)

    made = Config[int]
    return lambda: made()()


SETTINGS = types.ModuleType("trial_settings")
SETTINGS.inner = types.ModuleType("trial_settings.inner")


@contextmanager
def settings() -> Iterator[None]:
    """Let modules of these settings be imported, and forget what they hold."""
    made = {SETTINGS.__name__: SETTINGS, SETTINGS.inner.__name__: SETTINGS.inner}
    sys.modules.update(made)
    try:
        for module in made.values():
            module.__path__, module.step = [], 0.0
        SETTINGS.__dict__.pop("late", None)
        globals().pop("LATE", None)
        yield
    finally:
        for name in made:
            del sys.modules[name]


def imported() -> float:
    import trial_settings

    trial_settings.step += 1
    return trial_settings.step


def imported_from_package() -> float:
    from trial_settings import inner

    inner.step += 1
    return inner.step


def imported_within_package() -> float:
    import trial_settings.inner

    trial_settings.inner.step += 1
    return trial_settings.inner.step


def attribute_of_module() -> float:
    SETTINGS.inner.step += 1
    return SETTINGS.inner.step


def new_attribute_of_module() -> float:
    SETTINGS.late = getattr(SETTINGS, "late", 0.0) + 1
    return SETTINGS.late


def module_by_name() -> float:
    module = sys.modules["trial_settings"]
    module.step += 1
    return module.step


def attribute_by_name() -> float:
    vars(SETTINGS)["step"] += 1
    return vars(SETTINGS)["step"]


def new_attribute_by_name() -> float:
    setattr(SETTINGS, "late", getattr(SETTINGS, "late", 0.0) + 1)  # noqa: B010
    return SETTINGS.late


def global_by_name() -> float:
    globals()["LATE"] = globals().get("LATE", 0.0) + 1
    return globals()["LATE"]


RELATIVE: dict[str, Any] = {"__package__": "trial_settings.deep", "__name__": "own"}
exec(
    "def relative():\n from .. import inner\n inner.step += 1\n return inner.step\n",
    RELATIVE,
)


REACHED = [
    *(in_nested_class, in_class_of_a_function, in_object_of_a_class, in_property),
    *(in_cached_property, in_partial_method, in_implementation, in_implementation_of_a_method),
    *(in_list_of_a_method, in_view, in_generic_class),
]
NAMED = [
    *(imported, imported_from_package, imported_within_package, attribute_of_module),
    *(new_attribute_of_module, module_by_name, attribute_by_name, new_attribute_by_name),
    *(global_by_name, RELATIVE["relative"]),
]


@pytest.mark.parametrize("make", REACHED)
def test_trials_put_back_what_code_reaches(make):
    step = make()
    roots = [("a function", step)]
    with trial(roots, (), torch.device("cpu")):
        assert [step(), step()] == [1, 2]
    assert step() == 1
    made = make, lambda model: model.state()
    assert losses(made, breaks=True, limit=300_000) == losses(made, breaks=True, limit=None)


@pytest.mark.parametrize("step", NAMED)
def test_trials_put_back_what_code_names(step):
    with settings():
        with trial([("a function", step)], (), torch.device("cpu")):
            assert [step(), step()] == [1, 2]
        assert step() == 1
    found = []
    for limit in (None, 180_000):
        with settings():
            stages = [Stateful(None, lambda _: step(), breaks=False) for _ in range(5)]
            found.append(chain_steps(stages, limit))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FIRST)
def test_a_first_forward_that_differs_is_a_step(name):
    plain = losses(FIRST[name], breaks=True, limit=None)
    assert losses(FIRST[name], breaks=True, limit=300_000) == plain


@pytest.mark.parametrize(
    "name", ["array", "list", "inner list", "tensor", "array of objects", "exchanged tensors"]
)
def test_recomputed_stages_begin_with_what_was_replaced(name):
    def steps(limit: int | None) -> list[Any]:
        state, step = REPLACED[name]
        stages = [Stateful(state(), step, breaks=False) for _ in range(5)]
        return [chain_steps(stages, limit), *[repr(stage.state) for stage in stages]]

    assert steps(None) == steps(260_000 if name == "exchanged tensors" else 180_000)


class Late(nn.Module):
    """Stage that writes to a small array from the sixth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.known, self.writes = nn.Linear(WIDTH, WIDTH), np.ones(3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.known[0] += 1
        return torch.tanh(self.layer(x) * self.known[0].item())


def test_stages_that_begin_to_write_to_an_array_are_recomputed_with_it():
    torch.manual_seed(0)
    plain = nn.Sequential(*[Late() for _ in range(5)])
    planned = copy.deepcopy(plain)
    model = rotor.Checkpointable(planned, mem_limit=180_000, engine="chain")
    for step in range(8):
        x = torch.randn(256, WIDTH)
        for net, call in ((plain, plain), (planned, model)):
            for stage in net:
                stage.writes = step >= 5
            call(x).square().mean().backward()
        assert all((a.known == b.known).all() for a, b in zip(plain, planned, strict=True))
        pairs = zip(plain.parameters(), planned.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_what_a_first_forward_prepares_stays():
    made: list[int] = []

    def prepared(model: Any) -> float:
        if model.state is None:
            made.append(1)
            model.state = {"table": np.ones(3)}
        return float(model.state["table"][0])

    losses((lambda: None, prepared), breaks=False, limit=300_000)
    # Once by a trial, whose result the steps have.
    assert len(made) == 1


@pytest.mark.parametrize(
    "make",
    [
        hashlib.sha256,
        queue.SimpleQueue,
        decimal.Context,
        lambda: sqlite3.connect(":memory:"),
        lambda: np.nditer(np.arange(50.0)),
        lambda: np.random.SeedSequence(3),
    ],
)
def test_objects_that_cannot_be_put_back_are_named(make):
    model = Stateful(make(), lambda model: 1.0, breaks=False)
    with (
        pytest.raises(Untriable, match=r"state is a \w+, whose state measuring may change"),
        trial(model, (), torch.device("cpu")),
    ):
        pytest.fail("it was tried")


def test_a_step_runs_once_where_nothing_can_be_put_back():
    def grown(model: Any) -> float:
        model.state.put(1)
        return float(model.state.qsize())

    made = queue.SimpleQueue, grown
    plain = losses(made, breaks=False, limit=None)
    assert losses(made, breaks=False, limit=300_000) == plain


class Taught(nn.Module):
    """Stage with a teacher, of which no module knows, that a forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, theirs in zip(
                self.hidden[0].parameters(), self.layer.parameters(), strict=True
            ):
                mine.lerp_(theirs, 0.1)
            known = self.hidden[0](x)
        return torch.tanh(self.layer(x) + known)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(WIDTH, WIDTH), [nn.BatchNorm1d(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden[0](self.layer(x)))


def hidden_values(net: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for stage in net for t in stage.hidden[0].state_dict().values()]


@pytest.mark.parametrize("kind", [Taught, Normed])
def test_a_chain_names_hidden_modules_that_a_forward_writes_to(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(*[kind() for _ in range(4)])
    named, planned = copy.deepcopy(plain), copy.deepcopy(plain)
    before = hidden_values(named)
    x = torch.randn(256, WIDTH)
    model = rotor.Checkpointable(named, mem_limit="400 KB", engine="chain")
    with pytest.raises(ValueError, match=r"writes to 0.hidden\[0\], a \w+ that is no child"):
        model(x)
    assert all(map(torch.equal, hidden_values(named), before))
    model = rotor.Checkpointable(planned, mem_limit="400 KB")
    for _ in range(3):
        plain(x).square().mean().backward()
        model(x).square().mean().backward()
    assert all(map(torch.equal, hidden_values(planned), hidden_values(plain)))


class Centred(nn.Module):
    """Loss with a moving centre."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(y.detach().mean(0), 0.1)
        return (y - self.centre).square().mean()


def test_measuring_a_loss_leaves_its_buffers():
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    loss, other = Centred(), Centred()
    model = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1 MB", engine="chain", loss_fn=other
    )
    for _ in range(3):
        x = torch.randn(256, WIDTH)
        assert torch.equal(model(x, targets=()), loss(plain(x)))
        assert torch.equal(other.centre, loss.centre)
