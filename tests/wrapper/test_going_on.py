"""What plain PyTorch runs, ``engine="auto"`` runs: engine by engine, plain PyTorch last."""

from __future__ import annotations

import copy
import functools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from training import gradients_of, same
from zoo.models import Row

import rotor
from rotor import memory
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.parts.engine import PartsEngine

WIDTH = 16
ENGINES = {
    "chain": ChainEngine,
    "graph": GraphEngine,
    "parts": PartsEngine,
    "dynamic": DynamicEngine,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.calls = nn.Dropout(0.3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Branching(Row):
    """A model without a single graph, of which parts are captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.detach().sum().item() > -1e9 else x


MODELS = {"chain": nn.Sequential, "graph": Row, "parts": Branching, "dynamic": Branching}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind](*[Block() for _ in range(3)])


def batch() -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def steps(model: Any, net: nn.Module, count: int = 2) -> list[torch.Tensor]:
    """Outputs, gradients, buffers and random numbers of some steps."""
    torch.manual_seed(5)
    found = []
    for _ in range(count):
        y = model(batch())
        y.square().mean().backward()
        found += [y.detach(), *(p.grad for p in net.parameters())]
        found += [b.clone() for b in net.buffers()]
        found.append(torch.get_rng_state())
        net.zero_grad()
    return found


def broken(monkeypatch: Any, kind: str, method: str) -> None:
    """Have a method of an engine do its work, and then raise."""
    before = getattr(ENGINES[kind], method)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        raise ZeroDivisionError("an odd defect")

    monkeypatch.setattr(ENGINES[kind], method, fails)


def heard(function: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = function()
    return found, [str(w.message) for w in caught if w.category is rotor.MemoryLimitWarning]


FOLLOWING = {"chain": "graph", "graph": "parts", "parts": "dynamic", "dynamic": "plain"}


@pytest.mark.parametrize("method", ["measure", "plan", "run"])
@pytest.mark.parametrize("kind", ["chain", "graph", "parts", "dynamic"])
def test_a_defect_of_an_engine_sends_a_step_to_the_next(
    kind: str, method: str, monkeypatch: Any
) -> None:
    if (kind, method) == ("dynamic", "measure"):
        pytest.skip("the dynamic engine measures nothing")
    plain = made(kind)
    expected = steps(plain, plain)
    if kind == "dynamic":
        broken(monkeypatch, "parts", "measure")
    broken(monkeypatch, kind, method)
    net = made(kind)
    model = rotor.Checkpointable(net, mem_limit="1 MB", planning="before")
    found, told = heard(lambda: steps(model, net))
    assert same(found, expected)
    assert [block.calls for block in net] == [block.calls for block in plain]
    assert model.plan.engine == FOLLOWING[kind] == list(model.plan.why)[-1]
    assert "ZeroDivisionError: an odd defect" in model.plan.why[kind]
    named = [text for text in told if "ZeroDivisionError: an odd defect" in text]
    assert len(named) == 1
    assert "please report this line: rotor " in named[0]
    assert f"ZeroDivisionError at {__file__.split('/')[-1]}" in named[0]


def test_the_last_engine_is_plain_pytorch_which_says_in_numbers_what_it_needs(
    monkeypatch: Any,
) -> None:
    for kind in ("graph", "parts"):
        broken(monkeypatch, kind, "measure")
    broken(monkeypatch, "dynamic", "plan")
    plain, net = made("graph"), made("graph")
    expected = steps(plain, plain, 3)
    model = rotor.Checkpointable(net, mem_limit=20_000)
    found, told = heard(lambda: steps(model, net, 3))
    assert same(found, expected)
    first, second = told
    for kind in ("graph", "parts", "dynamic"):
        assert f"the {kind} engine raised ZeroDivisionError: an odd defect" in first
    assert "nothing keeps the limit of 19.5 KiB (20000 bytes)" in first
    assert "a step of plain PyTorch needed" in second
    assert f"({model.plan.measured_bytes} bytes), and the limit is 19.5 KiB (20000" in second
    assert model.plan.measured_bytes > 20_000
    assert list(model.plan.why) == ["graph", "parts", "dynamic", "plain"]
    assert "runs as plain PyTorch" in model.report()
    assert "an odd defect" in model.display()


@pytest.mark.parametrize("kind", ["chain", "graph", "dynamic"])
def test_an_engine_by_name_raises(kind: str, monkeypatch: Any) -> None:
    broken(monkeypatch, kind, "run")
    model = rotor.Checkpointable(made(kind), mem_limit="1 MB", engine=kind)
    with pytest.raises(ZeroDivisionError, match="an odd defect"):
        model(batch())


class Odd(Exception):
    """An exception of the caller's, with arguments of its own."""

    def __init__(self, one: int, other: str) -> None:
        super().__init__(one, other)


class Refuses(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.linear, self.error, self.refuses = nn.Linear(WIDTH, WIDTH), error, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(self.linear(x), 0.2, self.training)
        if self.refuses:
            raise self.error
        return x


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), Odd(1, "b"), KeyError("x"), StopIteration()])
@pytest.mark.parametrize("kind", ["chain", "graph"])
def test_errors_of_the_callers_own_code_are_raised_as_they_are(
    kind: str, error: Exception, later: bool
) -> None:
    def run(limited: bool) -> tuple[list[torch.Tensor], BaseException]:
        torch.manual_seed(0)
        net = MODELS[kind](Block(), Refuses(error), Block())
        model: Any = rotor.Checkpointable(net, mem_limit="1 MB") if limited else net
        net[1].refuses = not later
        found = steps(model, net, 1) if later else []
        net[1].refuses = True
        torch.manual_seed(3)
        with pytest.raises(type(error)) as caught:
            model(batch())
        found += [torch.rand(3), *(b.clone() for b in net.buffers()), torch.tensor(net[0].calls)]
        net[1].refuses = False
        found += steps(model, net, 2)
        if limited:
            assert model.plan.engine in ("chain", "graph")
        return found, caught.value

    expected, plain = run(limited=False)
    found, limited = run(limited=True)
    assert limited is plain is error
    assert error.__cause__ is None
    assert not getattr(error, "__notes__", [])
    assert same(found, expected)


def test_a_wrong_shape_is_told_in_the_words_of_pytorch() -> None:
    for kind in ("chain", "graph", "parts"):
        net = made(kind)
        model = rotor.Checkpointable(net, mem_limit="1 MB")
        with pytest.raises(RuntimeError) as plain:
            net(torch.randn(4, WIDTH + 1))
        with pytest.raises(RuntimeError) as limited:
            model(torch.randn(4, WIDTH + 1))
        assert str(limited.value) == str(plain.value)
        assert type(limited.value) is type(plain.value)


def test_an_answer_of_an_engine_is_no_reason_to_go_on() -> None:
    for kind in ("chain", "graph"):
        model = rotor.Checkpointable(made(kind), mem_limit=1000)
        with pytest.raises(rotor.InfeasibleError):
            model(batch())


def test_a_sample_that_plain_pytorch_refuses_leaves_the_engines_as_they_were() -> None:
    net = made("chain")
    model = rotor.Checkpointable(net, mem_limit="1 MB")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.measure(torch.randn(4, WIDTH + 1))
    model.measure(batch())
    assert model.planned_as == "chain"


def test_a_sample_is_measured_by_an_engine_that_can(monkeypatch: Any) -> None:
    for kind in ("graph", "parts"):
        broken(monkeypatch, kind, "measure")
    plain, net = made("graph"), made("graph")
    expected = steps(plain, plain)
    with pytest.warns(rotor.MemoryLimitWarning, match="an odd defect"):
        model = rotor.Checkpointable(net, batch(), "1 MB")
    assert same(steps(model, net), expected)
    assert model.plan.engine == "dynamic"


# -- calls within something that only plain PyTorch can run in


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def of_tangents(model: Any) -> torch.Tensor:
    with forward_ad.dual_level():
        x = batch()
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        value, tangent = forward_ad.unpack_dual(model(dual))
        assert tangent is not None
        return value + tangent


OUTER = {
    "forward_ad": of_tangents,
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(batch()).detach(),
    "vmap": lambda model: torch.func.vmap(model)(batch()),
    "jvp": lambda model: sum(torch.func.jvp(model, (batch(),), (torch.ones(32, WIDTH),))),
    "checkpoint": lambda model: checkpoint(model, batch(), use_reentrant=False),
    "reentrant": lambda model: checkpoint(model, batch().requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("kind", OUTER)
def test_a_call_within_what_only_plain_pytorch_runs_in_is_plain_and_warned(kind: str) -> None:
    plain, net = smooth(), smooth()
    model = rotor.Checkpointable(net, mem_limit="1 MB")

    def run(model: Any, net: nn.Module) -> list[torch.Tensor]:
        y = OUTER[kind](model)
        if y.requires_grad:
            y.sum().backward()
        return [y, *(p.grad for p in net.parameters() if p.grad is not None)]

    found, told = heard(lambda: run(model, net))
    assert same(found, run(plain, plain))
    (text,) = told
    assert "nothing keeps the limit of 976.6 KiB (1000000 bytes)" in text
    for engine in ("chain", "graph", "dynamic"):
        named = rotor.Checkpointable(smooth(), mem_limit="1 MB", engine=engine)
        with pytest.raises(RuntimeError, match=r"torch\.func|forward-mode|torch\.utils\.checkp"):
            run(named, named)


class Seen(TorchDispatchMode):
    """A mode that sees operators and lets them run."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_a_model_is_traced_as_plain_pytorch_runs_it():
    model = rotor.Checkpointable(smooth(), mem_limit="16 KB", verbosity=0)
    x = batch()
    with pytest.warns(rotor.MemoryLimitWarning, match=r"torch.jit.trace sees each operator"):
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model.module(x))


def exported(model: Any) -> None:
    torch.export.export(model, (batch(),))


def traced_by_proxies(model: Any) -> None:
    make_fx(model)(batch())


def faked(model: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(32, WIDTH)).sum()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("engine", ["auto", "chain", "dynamic"])
@pytest.mark.parametrize(
    ("trace", "name"),
    [
        (exported, "torch.export"),
        (traced_by_proxies, "ProxyTorchDispatchMode"),
        (faked, "FakeTensorMode"),
    ],
)
def test_a_traced_forward_is_plain_by_every_engine(trace, name, engine, before):
    plain = smooth()
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="16 KB", engine=engine)
    for _ in range(before):
        heard(lambda: [net(batch()).sum().backward() for net in (plain, model)])
    with pytest.warns(rotor.MemoryLimitWarning, match=f"{name} sees each operator"):
        trace(model)
    heard(lambda: [net(batch()).sum().backward() for net in (plain, model)])
    assert same(gradients_of(plain), gradients_of(model))
    heard(lambda: model(batch()).sum().backward())
    assert model.plan.measured_bytes <= 16_000


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (Seen, "Seen"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (allow_mutation_on_saved_tensors, "CloneArgBeforeMutateMode"),
    ],
)
@pytest.mark.parametrize("make", [smooth, lambda: Row(*[smooth() for _ in range(3)])])
def test_a_step_that_a_mode_sees_is_plain_and_warned_and_later_ones_are_planned(mode, name, make):
    torch.manual_seed(0)
    plain = make()
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="16 KB", verbosity=0)

    def run(net: Any, number: int) -> list[torch.Tensor]:
        with mode() if number == 1 else nullcontext():
            net(batch()).sum().backward()
        return gradients_of(net)

    for number in range(4):
        found, told = heard(functools.partial(run, model, number))
        assert same(found, run(plain, number))
        if number == 1:
            assert len(told) == 1
            assert f"{name} sees each operator of this step" in told[0]
            assert "nothing keeps the limit of 15.6 KiB (16000 bytes)" in told[0]
    assert model.plan.measured_bytes <= 16_000


def test_the_engine_of_graphs_by_name_says_which_mode_it_cannot_run_under():
    model = rotor.Checkpointable(smooth(), mem_limit="32 KB", engine="graph")
    with Seen(), pytest.raises(rotor.CaptureError, match="Seen sees each operator of this step"):
        model(batch())
    model(batch()).sum().backward()
    assert model.plan.measured_bytes <= 32_000


class Tangents(Row):
    """A model whose forward has tangents of its last layers, which no capture goes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        value, tangent = torch.func.jvp(self[1], (x,), (torch.ones_like(x),))
        return value + tangent


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_a_capture_that_fails_in_a_transform_leaves_gradients_to_other_models(engine):
    torch.manual_seed(0)
    plain = Tangents(smooth(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="40 KB", engine=engine)
    if engine == "graph":
        with pytest.raises(rotor.CaptureError):
            heard(lambda: model(batch()))
    else:
        heard(lambda: model(batch()).sum().backward())
        heard(lambda: plain(batch()).sum().backward())
        assert same(gradients_of(model), gradients_of(plain))
    assert nn.Linear(WIDTH, WIDTH)(batch()).requires_grad


class Stop(Exception):
    """Signal of a hook that has what it wants."""


def stopping(layers: int, last: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model whose forward ends with `Stop` after a layer, and the list of its outputs."""
    found: list[torch.Tensor] = []

    def noted(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        found.append(output)
        raise Stop

    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    blocks[last].register_forward_hook(noted)
    return nn.Sequential(*blocks), found


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_what_a_forward_does_before_it_raises_stays(engine):
    net, found = stopping(4, 2)
    model = rotor.Checkpointable(net, mem_limit="40 KB", engine=engine)
    for _ in range(3):
        found.clear()
        with pytest.raises(Stop):
            model(batch())
        assert len(found) == 1
        assert found[0].requires_grad


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", ["graph", "parts"])
def test_an_engine_that_takes_steps_over_plans_all_kinds_of_them(kind):
    net = made(kind)
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, mem_limit="1 MB", verbosity=0)

    def step(call: Any) -> None:
        torch.manual_seed(2)
        call(batch()).square().mean().backward()

    for number in range(4):
        for _ in range(2):  # Gradients exist in the second one.
            step(model)
            step(plain)
        if number == 1:
            model.plan.is_over = True
        assert same(gradients_of(model), gradients_of(plain))
        model.zero_grad()
        plain.zero_grad()
    assert model.plan.engine == ("dynamic" if kind == "parts" else "parts")


class Checkpointed(nn.ModuleList):
    """A model without a single graph, whose blocks are in reentrant checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x if x.detach().sum().item() > -1e9 else -x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_that_no_graph_holds_are_plain_and_warned():
    torch.manual_seed(0)
    plain = Checkpointed([Block() for _ in range(3)])
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="64 KB", verbosity=0)

    def step(call: Any) -> torch.Tensor:
        torch.manual_seed(3)
        x = batch().requires_grad_()
        call(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    with pytest.warns(rotor.MemoryLimitWarning, match="with use_reentrant=True runs a backward"):
        first = step(model)
    assert torch.equal(first, step(plain))
    for _ in range(2):
        assert torch.equal(heard(lambda: step(model))[0], step(plain))
        assert same(gradients_of(model), gradients_of(plain))
        assert same(list(model.buffers()), list(plain.buffers()))
    assert [b.calls for b in model.module.children()] == [b.calls for b in plain.children()]
    named = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="64 KB", engine="dynamic")
    with pytest.raises(RuntimeError, match="with use_reentrant=True runs a backward of its own"):
        step(named)


class Raising(nn.Module):
    """Module that counts its forwards, and refuses large batches and its fourth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if len(x) > 64:
            raise ValueError("a batch of 64 at most")
        if self.forwards == 4:
            raise KeyError("fourth")
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_a_forward_that_raises_is_the_plain_one(engine, is_first):
    net = Raising()
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, mem_limit="200 KB", engine=engine)
    for rows in ([65] if is_first else []) + [32, 65, 32, 32, 32, 65, 32]:
        x, found = torch.randn(rows, WIDTH), []
        for call in (model, plain):
            try:
                call(x).sum().backward()
                found.append("")
            except (ValueError, KeyError) as error:
                found.append(repr(error))
        assert found[0] == found[1]
        assert net.forwards == plain.forwards
    assert same(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_what_is_noted_before_a_forward_raises_is_metered(engine):
    net, found = stopping(8, 6)
    model = rotor.Checkpointable(net, mem_limit=8 * 512 * WIDTH * 4, engine=engine)

    def step() -> None:
        net.zero_grad()
        found.clear()
        with pytest.raises(Stop):
            model(torch.randn(512, WIDTH))
        found[0].sum().backward()

    told = [[text for text in heard(step)[1] if "forward raised an" in text] for _ in range(3)]
    assert [len(texts) for texts in told] == [1, 0, 0]
    with pytest.raises(Stop):
        model(batch())
    found.clear()
    with memory.meter("cpu"):  # Nothing is metered any more: the step was given up.
        pass


class Compiling(Block):
    """A model without captured parts, which reaches an operator that compiles its functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) if x.detach().sum().item() > -1e9 else x
        if self.calls < 3:
            return x
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


def test_an_operator_that_compiles_its_functions_goes_on_as_plain_pytorch():
    torch.manual_seed(0)
    net = Compiling()
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, mem_limit="1 MB")
    found, told = heard(lambda: steps(model, net, 5))
    assert same(found, heard(lambda: steps(plain, plain, 5))[0])
    assert net.calls == plain.calls == 5
    assert len([text for text in told if "nothing keeps the limit" in text]) == 1


class Advances(nn.Module):
    """A model that writes to one of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return (x * self.scale).sum() + y.sum()


APART, BESIDE, WITHIN, FARTHER = None, 32, 8, 16


@pytest.mark.parametrize(
    "begins", [(BESIDE,), (WITHIN,), (APART, BESIDE), (APART, WITHIN), (WITHIN, FARTHER, APART)]
)
def test_an_argument_that_is_written_to_may_share_its_memory(begins: tuple[int | None]) -> None:
    """Written tensors that begin so far behind another one in its storage, from step to step."""

    def run(model: Any, net: nn.Module) -> list[torch.Tensor]:
        found = []
        for begin in begins:
            base = torch.arange(64.0 * WIDTH).view(64, WIDTH)
            other = base[:32].clone() if begin is APART else base[begin : begin + 32]
            model(base[:32], other).backward()
            found += [base, other, *gradients_of(net)]
        return found

    for engine in ("auto", "graph", "dynamic"):
        plain, net = Advances(), Advances()
        model = rotor.Checkpointable(net, mem_limit="1 MB", engine=engine)
        if engine == "graph" and begins != (WITHIN,):
            with pytest.raises(rotor.CaptureError, match="shares its memory with another one"):
                run(model, net)
        else:
            assert same(heard(lambda: run(model, net))[0], run(plain, plain))  # noqa: B023
