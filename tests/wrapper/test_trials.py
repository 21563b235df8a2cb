"""Runs that are not the user's leave no trace in arguments, in the model, or elsewhere."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import itertools
import logging
import os
import random
import threading
import types
import unittest.mock
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from training import Habits

import rotor
from rotor.common.undisturbed import Trial, Untriable, trial
from rotor.meter import allocator

CPU = torch.device("cpu")
WIDTH, BATCH = 32, 256
SEEN: list[Any] = []
TALLY = array.array("d", [0.0])
LEVEL = contextvars.ContextVar("level", default=0)
NAMES, ENTRIES = argparse.Namespace(), collections.UserList[int]()
HELPER: Any = types.ModuleType("helper")


def tally() -> float:
    return TALLY[0]


def forget() -> None:
    SEEN.clear()
    ENTRIES.clear()
    TALLY[0] = NAMES.n = HELPER.n = tally.n = 0
    LEVEL.set(0)
    os.environ.pop("ROTOR_TALLY", None)


def tallies() -> list[Any]:
    known = [TALLY[0], LEVEL.get(), NAMES.n, list(ENTRIES), HELPER.n, tally.n]
    return [*known, os.environ.get("ROTOR_TALLY")]


class Record:
    """Object with state."""

    def __init__(self) -> None:
        self.count, self.entries = 0, [0]


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    steps: int = 0


class Net(nn.Module):
    """Model with state of many kinds, of which one function is the habit."""

    def __init__(self, habit: Callable[..., Any], *, breaks: bool = True) -> None:
        super().__init__()
        self.habit, self.breaks = habit, breaks
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.table = nn.Embedding(10, WIDTH, max_norm=0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.plain, self.calls, self.last = torch.zeros(WIDTH), 0, None
        self.nested = {"a": [0], "b": {1}}
        self.record = Record()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, *args: Any) -> torch.Tensor:
        x = self.habit(self, *args)
        if self.breaks and float(x.detach().sum()) == 12345.0:
            x = x + 1
        return self.body(x).square().mean()


def tensor() -> torch.Tensor:
    return torch.rand(BATCH, WIDTH)


habit = HABITS = Habits(lambda: (tensor(),))


@habit()
def scaled_in_place(net, x):
    return x.mul_(0.5)


@habit()
def joins_the_graph(net, x):
    return x.mul_(net.scale)


@habit(lambda: (lambda x: (x, x[:10]))(tensor()))
def written_by_a_view(net, x, part):
    part.add_(1)
    return x * 1


@habit()
def transposed_in_place(net, x):
    return x.t_().t() * 1


@habit(lambda: ({"x": tensor(), "scale": 2.0, "last": 1},))
def popped(net, batch):
    return batch["x"] * batch.pop("scale")


@habit(lambda: (tensor(), []))
def appended(net, x, outputs):
    outputs.append(x * net.scale)
    return x * len(outputs)


@habit(lambda: ({"a": {"x": tensor(), "l": [{"c": 1}]}},))
def changed_deep_inside(net, batch):
    batch["a"]["l"][0]["c"] += 1
    return batch["a"]["x"] * batch["a"]["l"][0]["c"]


@habit(lambda: (tensor(), torch.Generator().manual_seed(3)))
def drawn_from_an_argument(net, x, generator):
    return x + torch.randn(x.shape, generator=generator)


@habit(lambda: (tensor(), {"python": random.Random(3), "numpy": np.random.default_rng(3)}))
def drawn_from_other_generators(net, x, generators):
    return x * generators["python"].random() + generators["numpy"].random()


@habit(lambda: (tensor(), iter([1.0, 2.0]), zip([1.0], [2.0], strict=True)))
def taken_from_iterators(net, x, values, pairs):
    return x * next(values) * next(pairs)[1]


@habit(lambda: (tensor(), np.ones(3)))
def array_written_to(net, x, array):
    array *= 2
    return x * float(array[0])


@habit(lambda: (tensor(), Sample(torch.ones(3))))
def counted_in_a_dataclass(net, x, sample):
    sample.steps += 1
    sample.x.add_(1)
    return x * sample.steps


@habit(lambda: (tensor(), Record(), collections.deque([1.0, 2.0])))
def counted_in_an_object(net, x, record, queue):
    record.count += 1
    record.entries.append(record.count)
    queue.rotate()
    return x * record.count * queue[0]


@habit()
def masked_at_random_places(net, x):
    x[:, np.random.choice(WIDTH, 3)] = 0  # noqa: NPY002
    x[random.randrange(BATCH)] = 0
    return x


@habit()
def buffers_changed(net, x):
    net.count = net.count + 1
    net.mean.mul_(0.9).add_(x.mean(0))
    return net.norm(x) / net.count + net.mean


@habit()
def attributes_changed(net, x):
    net.calls += 1
    net.plain.add_(1)
    net.nested["a"][0] += 1
    net.nested["b"].add(net.calls)
    net.nested[f"call {net.calls}"] = net.calls
    net.record.entries.append(x * net.scale)
    net.record.count += 1
    return x * net.calls + net.plain * net.nested["a"][0] + net.record.count


@habit()
def kept_outside(net, x):
    SEEN.append(x * net.scale)
    return x * len(SEEN)


@habit()
def counted_outside_of_modules(net, x):
    TALLY[0] += 1
    NAMES.n += 1
    HELPER.n += 1
    tally.n += 1
    ENTRIES.append(0)
    LEVEL.set(LEVEL.get() + 1)
    os.environ["ROTOR_TALLY"] = str(tally.n)
    counts = tally() + NAMES.n + HELPER.n + tally.n + len(ENTRIES) + LEVEL.get()
    return x * (counts + float(os.environ["ROTOR_TALLY"]))


@habit()
def moving_average(net, x):
    mean = x.detach().mean(0)
    net.last = mean if net.last is None else net.last * 0.5 + mean
    return x + net.last


@habit()
def weights_written_to(net, x):
    with torch.no_grad():
        net.body[0][0].weight.mul_(0.9)
    net.body[1][0].weight.data.clamp_(-0.1, 0.1)
    return x + net.table((x.detach()[:, 0] * 9).long())


@habit()
def hooks_added(net, x):
    net.body[2].register_forward_hook(lambda module, args, y: y * 1.5)
    return x


@habit()
def backward_inside(net, x):
    with torch.enable_grad():
        (net.scale * 2).backward()
    return x * net.scale


@habit()
def drawn_in_the_module(net, x):
    return x + torch.rand(x.shape, generator=net.generator) + torch.rand(x.shape)


def plain_data(value: Any) -> Any:
    """Everything in a value that may change, as plain data."""
    if isinstance(value, torch.Tensor):
        graph = None if value.grad_fn is None else id(value.grad_fn)
        grad = None if value.grad is None else value.grad.tolist()
        return value.tolist(), value.stride(), value._version, value.requires_grad, graph, grad
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, plain_data(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return [plain_data(item) for item in value]
    if isinstance(value, Record | Sample):
        return plain_data(vars(value))
    if isinstance(value, nn.Module):
        return [(key, plain_data(item)) for key, item in vars(value).items()]
    return repr(value)


def world(net: Net, args: Any) -> Any:
    randoms = random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())  # noqa: NPY002
    return plain_data((net, args, SEEN, tallies())), randoms


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", HABITS)
def test_a_trial_leaves_the_world_as_it_was(name, fails):
    function, make = HABITS[name]
    forget()
    net, args = Net(function), make()
    net.body[3][0].weight.grad = torch.ones(WIDTH, WIDTH)
    net.scale.grad = torch.ones(())
    before = world(net, args)
    buffers = list(net.buffers())
    expected = pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with expected, trial(net, args, CPU) as made:
        net(*made.arguments).backward()
        if fails:
            raise ZeroDivisionError
    assert world(net, args) == before
    assert all(one is other for one, other in zip(net.buffers(), buffers, strict=True))
    if name == "taken_from_iterators":
        assert [list(one) for one in args[1:]] == [[1.0, 2.0], [(1.0, 2.0)]]


def test_a_tensor_of_a_graph_is_not_written_to():
    leaf = torch.ones(3, 4, requires_grad=True)
    x = leaf * 2
    node, version = x.grad_fn, x._version
    with trial(nn.ReLU(inplace=True), (x.t(), x), CPU) as made:
        assert made.arguments[0].stride() == (1, 4)
        made.arguments[1].mul_(3).sum().backward()
    assert (x.grad_fn, x._version, x.tolist()) == (node, version, (leaf * 2).tolist())
    assert leaf.grad is None


def test_the_bytes_of_what_is_not_written_to_are_not_copied():
    net = nn.Linear(512, 512)
    x = torch.zeros(512, 512)
    with allocator.meter(CPU) as meter, trial(net, (x, [x]), CPU) as made, torch.no_grad():
        net.bias.add_(1)
        made.arguments[0].sum()
    assert meter.peak_bytes < 512 * 512


@pytest.mark.parametrize(
    "argument", [(k for k in range(3)), threading.Lock()], ids=["generator", "lock"]
)
def test_arguments_that_cannot_be_copied_are_not_tried(argument):
    with pytest.raises(Untriable, match="cannot be copied"):
        Trial(nn.Identity(), (torch.ones(1), argument), CPU)


def test_a_cache_of_parametrizations_is_not_filled():
    net = weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        with trial(net, (), CPU), torch.no_grad():
            net(torch.ones(2))
        net(torch.ones(2)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def outcome(make: Callable[[], nn.Module], arguments: Callable[[], Any], **limit: Any) -> Any:
    torch.compiler.reset()
    forget()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    net, found = make(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = rotor.Checkpointable(net, verbosity=0, **limit) if limit else net
        for _ in range(3):
            args = arguments()
            loss = model(*args)
            loss.backward()
            grads = [None if p.grad is None else p.grad.tolist() for p in net.parameters()]
            state = [value.tolist() for value in net.state_dict().values()]
            left = [v.tolist() for v in args if isinstance(v, torch.Tensor)]
            sizes = [len(v) for v in args if isinstance(v, list | dict)]
            found.append((loss.item(), grads, state, left, sizes, len(SEEN), tallies()))
            net.zero_grad()
    return found, random.getstate(), torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("masked_at_random_places", "auto"),
        ("popped", "auto"),
        ("kept_outside", "auto"),
        ("counted_outside_of_modules", "auto"),
        ("drawn_from_an_argument", "auto"),
        ("weights_written_to", "auto"),
        ("buffers_changed", "auto"),
        ("taken_from_iterators", "auto"),
        ("joins_the_graph", "dynamic"),
        ("weights_written_to", "dynamic"),
    ],
)
def test_steps_equal_plain_ones(name, engine):
    function, make = HABITS[name]
    plain = outcome(lambda: Net(function), make)
    assert outcome(lambda: Net(function), make, mem_limit="1 MB", engine=engine) == plain


class Counting(dict):
    """A dictionary that counts what is put into it."""

    puts = 0

    def __setitem__(self, key, value):
        self.puts += 1
        super().__setitem__(key, value)


def scheduled():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def one_more(name="n"):
    def added(held):
        setattr(held, name, getattr(held, name, 0) + 1)
        return getattr(held, name)

    return added


def called(held):
    held()
    return held.call_count


def put(held):
    held["a"] = 1
    return held.puts


def stepped(held):
    held.step()
    return held.optimizer.param_groups[0]["lr"]


def counted_by_keys(held):
    held[len(held)] = 0
    return len(held)


OWNED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list": (lambda: type("Named", (list,), {})(), one_more()),
    "array": (lambda: np.ma.masked_array([1.0], mask=[0]), one_more()),
    "dict": (Counting, put),
    "mock": (unittest.mock.Mock, called),
    "logger": (lambda: logging.Logger("a", 1), one_more("level")),
    "scheduler": (scheduled, stepped),
    "zip": (lambda: zip(range(1, 9), range(8), strict=True), lambda held: next(held)[0]),
    "map": (lambda: map(float, iter(range(1, 9))), next),
    "chain": (lambda: itertools.chain([1, 2], map(float, range(3, 9))), next),
    "cell": (lambda: types.CellType(0), one_more("cell_contents")),
    "keys": (dict, counted_by_keys),
    "tensor": (lambda: torch.ones(1), one_more()),
    "parameter": (lambda: nn.Parameter(torch.ones(1)), one_more()),
}


@pytest.mark.parametrize("engine", ["auto", "chain"])
@pytest.mark.parametrize("kind", OWNED)
def test_state_in_objects_of_libraries_changes_once_a_step(kind, engine):
    make, use = OWNED[kind]
    limited = {"mem_limit": "1 MB", "engine": engine}

    class Owner(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.held = make()

        def forward(self, x):
            return super().forward(x) * use(self.held)

    class Mean(nn.Module):
        def forward(self, x):
            return x.square().mean()

    def whole():
        if engine == "chain":
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), Owner(), Mean())
        owner = Owner()
        net = Net(lambda net, x: owner(x))
        net.owner = owner
        return net

    found = [outcome(whole, lambda: (tensor(),), **limit) for limit in (limited, {})]
    assert found[0] == found[1]


def test_a_running_generator_among_the_arguments_is_left_to_the_next_engine():
    def taken(net, x, values):
        return x * next(values)

    def make() -> Any:
        return tensor(), (float(k) for k in range(1, 5))

    plain = outcome(lambda: Net(taken), make)
    assert outcome(lambda: Net(taken), make, mem_limit="1 MB", engine="auto") == plain


class Recomputed(torch.autograd.Function):
    """Function whose backward runs another, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Stage(nn.Module):
    """Stage of a chain with a habit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.table = nn.Embedding(10, WIDTH, max_norm=0.5)

    def forward(self, x):
        first = self.inner[0]
        with torch.no_grad():
            if self.kind == "decay":
                first.weight.mul_(0.9)
            elif self.kind == "norm":
                first.weight.div_(first.weight.norm())
            elif self.kind == "data":
                first.weight.data = first.weight.data.clamp(-0.05, 0.05)
        if self.kind == "max_norm":
            x = x + self.table((x.detach()[:, 0].abs() * 3).long() % 10)
        if self.kind == "backward":
            return Recomputed.apply(x, self.inner)
        return x + self.inner(x)


@pytest.mark.parametrize("engine", ["chain", "auto"])
@pytest.mark.parametrize("kind", ["decay", "norm", "max_norm", "backward"])
def test_measuring_a_chain_leaves_weights_and_gradients(kind, engine):
    def make() -> nn.Module:
        ends = nn.Linear(WIDTH, WIDTH), nn.Flatten(0), Mean()
        return nn.Sequential(ends[0], *[Stage(kind) for _ in range(3)], *ends[1:])

    def arguments() -> Any:
        return (torch.randn(BATCH, WIDTH),)

    plain = outcome(make, arguments)
    assert outcome(make, arguments, mem_limit="50 MB", engine=engine) == plain


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def test_targets_that_a_loss_writes_to_are_written_to_once():
    def loss_fn(y, target):
        target.sub_(1)
        return (y - target).square().mean()

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = rotor.Checkpointable(net, mem_limit="50 MB", engine="chain", loss_fn=loss_fn)
    target = torch.zeros(BATCH, WIDTH)
    model(torch.randn(BATCH, WIDTH), targets=(target,)).backward()
    assert target.eq(-1).all()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_weights_cached_around_a_call_get_their_gradients(engine, inside):
    def gradients(**limit: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(
            *[m for _ in range(6) for m in (weight_norm(nn.Linear(64, 64)), nn.Tanh())]
        )
        model = rotor.Checkpointable(net, verbosity=0, **limit) if limit else net
        x = torch.randn(2048, 64)
        with parametrize.cached():
            loss = model(x).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad.tolist() for p in net.parameters()]

    plain = gradients()
    for limit in ("3.5 MB", "100 MB"):
        assert gradients(mem_limit=limit, engine=engine) == plain


def test_refused_captures_hold_no_activations():
    held: list[weakref.ref[torch.Tensor]] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            torch._noted.append(weakref.ref(x))
            if float(x.detach().sum()) == 12345.0:
                x = x + 1
            return x + self.linear(x)

    # No module's own state, which trials put back.
    torch._noted = held
    try:
        net = nn.Sequential(*[Block() for _ in range(4)], Mean())
        wrapped = Net(lambda net, x: x)
        wrapped.body = net
        outcome(lambda: wrapped, lambda: (tensor(),), mem_limit="1 MB", engine="auto")
    finally:
        del torch._noted
    assert len(held) > 4
    assert not any(reference() is not None for reference in held)
