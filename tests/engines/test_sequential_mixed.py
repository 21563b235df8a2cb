"""An ``nn.Sequential`` with stages that cannot be captured: parts, and chains between them."""

from __future__ import annotations

import copy
import os
import sys
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn
from training import same
from zoo.models import Branching, FeedForward

import rotor
from rotor.engines.parts.chained import ChainKind
from rotor.engines.parts.plan import fastest
from rotor.graph.assembly import choose, least_bytes, simulate

WIDTH, ROWS = 64, 512
MIXED = "ffofoorf"
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
ALL = 1 << 30
PLACES = [f"rotor.engines.parts.{module}.choose_within" for module in ("engine", "plan")]


@pytest.fixture(scope="module", autouse=True)
def _no_compiled_code_stays():
    yield
    torch._dynamo.reset()


class Opaque(nn.Module):
    """Branches on a value: no graph, no child that could be captured; dropout, changing buffers."""

    def __init__(self, width=WIDTH, dropout=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.dropout = dropout
        for name, value in (("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x):
        y = nn.functional.batch_norm(x @ self.weight, self.mean, self.var, training=self.training)
        y = nn.functional.dropout(
            (y + self.bias).tanh().sin().sigmoid(), self.dropout, self.training
        )
        return x + (y * 2 if y.sum().item() > 1e30 else y)


def model_of(*stages):
    torch.manual_seed(0)
    made = {"f": lambda: FeedForward(WIDTH), "o": Opaque, "r": lambda: nn.ReLU(inplace=True)}
    return nn.Sequential(*[made[stage]() if isinstance(stage, str) else stage for stage in stages])


def mixed():
    """Two captured stages, one that is not, a captured one, two that are not, a captured one."""
    return model_of(*MIXED)


def trained(model, call, steps=3, x=X, context=None):
    """Losses, gradients, buffers, random states and parameters of some steps of an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        optimizer.zero_grad()
        with context() if context else torch.enable_grad():
            loss = call(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), torch.get_rng_state(), *(b.clone() for b in model.buffers())]
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def limit_of(model, share, x=X):
    chk = rotor.Checkpointable(copy.deepcopy(model), engine="chain", mem_limit=ALL)
    chk.measure(x)
    return int(share * chk.curve().bytes[-1])


def chains_of(plan):
    """The chosen treatment of each chain, by its name."""
    return {
        site.name: site.kind.treatment(k)
        for site, k in zip(plan.parts.sites, plan.choice, strict=True)
        if isinstance(site.kind, ChainKind)
    }


def keeping(plan):
    """The options of a plan's parts where what is not captured is kept: parts without a mix."""
    return [
        [o for k, o in enumerate(options) if not isinstance(kind, ChainKind) or k == best]
        for kind, options, best in zip(
            [site.kind for site in plan.parts.sites],
            plan.parts.options(),
            fastest(plan.parts.options()),
            strict=True,
        )
    ]


def limited(chk, limit):
    """Have the next step planned under another limit, with what the steps so far have taught."""
    chk.mem_limit = limit
    chk.plan.outdated = True


def squeezed(model, x=X, **options):
    """A wrapped model of which no choice fits that keeps all of what is not captured."""
    before = copy.deepcopy(model.state_dict())
    chk = rotor.Checkpointable(model, mem_limit=ALL, **options)
    chk(x).square().mean().backward()
    plan = chk.plan
    model.load_state_dict(before)
    model.zero_grad()
    least, kept = (
        least_bytes(options, plan.parts.bases) for options in (plan.parts.options(), keeping(plan))
    )
    assert least < kept
    limited(chk, (least + kept) // 2)
    return chk


@contextmanager
def parts_are_taken():
    """Parts whatever the chain recomputes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor.engines.sequential.recomputation_of", lambda chain: 9.0)
        yield


@pytest.fixture
def forced():
    with parts_are_taken():
        yield


@pytest.fixture(scope="module")
def _measured():
    """Models of which others have been squeezed, by their stages."""
    return {}


@pytest.fixture
def squeeze(_measured, forced):
    """Give a plain model of some stages, and a squeezed one, which is measured once."""

    def given(stages):
        if stages not in _measured:
            model = model_of(*(Fails() if stage == "e" else stage for stage in stages))
            chk = squeezed(copy.deepcopy(model))
            _measured[stages] = model, chk, chk.mem_limit
        model, chk, limit = _measured[stages]
        chk.module.load_state_dict(model.state_dict())
        chk.zero_grad()
        limited(chk, limit)
        return copy.deepcopy(model), chk

    return given


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5, 0.4])
def test_steps_equal_plain_ones_within_the_limit(share, forced):
    model = mixed()
    limit = limit_of(model, share)
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    peaks = []

    def call(x):
        y = chk(x)
        peaks.append(chk.plan)
        return y

    assert same(trained(chk.module, call), trained(model, model))
    plan = chk.plan
    assert plan.engine == "parts"
    assert all(plan.measured_bytes <= limit for plan in peaks)
    # It includes what was between the parts under the first choices.
    assert 0.9 * plan.predicted_bytes <= plan.measured_bytes <= plan.predicted_bytes <= limit
    assert list(chains_of(plan)) == ["2", "4 to 5+6"]


def test_the_limit_decides_between_keeping_and_recomputing(squeeze):
    model, chk = squeeze(MIXED)
    assert same(trained(chk.module, chk), trained(model, model))
    assert (
        chk.plan.measured_bytes
        <= chk.plan.limit_bytes
        < least_bytes(keeping(chk.plan), chk.plan.parts.bases)
    )
    assert set(chains_of(chk.plan).values()) != {"kept"}
    assert chk.plan.recomputes
    limited(chk, ALL)
    assert same(trained(chk.module, chk), trained(model, model))
    assert set(chains_of(chk.plan).values()) == {"kept"}
    assert not chk.plan.recomputes
    options, bases = chk.plan.parts.options(), chk.plan.parts.bases
    least, most = least_bytes(options, bases), chk.plan.predicted_bytes
    limits = [least + (most - least) * k // 20 for k in range(21)]
    times = [simulate(options, bases, choose(options, bases, limit)).time_ns for limit in limits]
    assert all(later <= earlier for earlier, later in pairwise(times))


def test_the_plan_with_the_least_recomputation_runs():
    model = mixed()
    with parts_are_taken():
        chk = squeezed(copy.deepcopy(model))
    assert same(trained(chk.module, chk), trained(model, model))
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes
    lines = chk.report().split("\ncompared")[1].splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith(("chain", "parts"))}
    shares = {
        name: float(row.split("step, ")[1].split("%")[0])
        for name, row in rows.items()
        if "step, " in row
    }
    assert "parts" in shares
    assert shares[chk.plan.engine] == min(shares.values())
    assert rows[chk.plan.engine].endswith("runs")


def _any_choice(seed):
    draw = torch.Generator().manual_seed(seed)

    def choice(options, *_):
        return [int(torch.randint(len(o), (), generator=draw)) for o in options]

    return choice


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_is_equal_and_as_large_as_predicted(seed, forced, monkeypatch):
    model = mixed()
    chk = rotor.Checkpointable(model, mem_limit=ALL, verify="off")
    trained(model, chk, 1)
    for place in PLACES:
        monkeypatch.setattr(place, _any_choice(seed))
    limited(chk, ALL)
    plain, gradients = copy.deepcopy(model), []
    predicted = None
    for module, call in ((plain, plain), (model, chk)):
        module.zero_grad()
        torch.manual_seed(0)
        loss = call(X).square().mean()
        if call is chk:
            plan, predicted = chk.plan, chk.plan.predicted_bytes
        loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    assert same(*gradients)
    assert same(list(model.buffers()), list(plain.buffers()))
    assert len(plan.parts.names(plan.choice)) == 6
    assert 0.97 * predicted <= plan.measured_bytes <= predicted


class Errors:
    """What fails, in a module of Python's: elsewhere it would be put back for a second run."""

    @staticmethod
    def get() -> BaseException | None:
        return getattr(sys, "error_of_a_stage", None)

    @staticmethod
    def set(error: BaseException | None) -> None:
        sys.error_of_a_stage = error


ERROR = Errors()


class Fails(Opaque):
    """Raises in its forward while an error is set."""

    def forward(self, x):
        if (error := ERROR.get()) is not None:
            raise error
        return super().forward(x)


@pytest.mark.parametrize("error", [RuntimeError("in the recomputation"), KeyboardInterrupt()])
def test_an_exception_in_a_recomputation_leaves_the_model_as_it_was(error, squeeze):
    model, chk = squeeze("ffeff")
    trained(chk.module, chk)
    trained(model, model)
    assert chains_of(chk.plan) == {"2": "recomputed whole"}
    before = [b.clone() for b in chk.module.buffers()]
    chk.module.zero_grad()
    loss = chk(X).square().mean()
    ERROR.set(error)
    try:
        with pytest.raises(type(error)):
            loss.backward()
    finally:
        ERROR.set(None)
    del loss
    assert all("forward" not in vars(module) for module in chk.module.modules())
    for buffer, old in zip(chk.module.buffers(), before, strict=True):
        buffer.copy_(old)
    assert same(trained(chk.module, chk), trained(model, model))
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes


def test_an_exception_in_a_forward_leaves_the_model_as_it_was(squeeze):
    model, chk = squeeze("ffeff")
    trained(chk.module, chk)
    trained(model, model)
    ERROR.set(ValueError("in the forward"))
    try:
        with pytest.raises(ValueError, match="in the forward"):
            chk(X)
    finally:
        ERROR.set(None)
    assert all("forward" not in vars(module) for module in chk.module.modules())
    chk.module.load_state_dict(model.state_dict())
    assert same(trained(chk.module, chk), trained(model, model))


class Lies(Opaque):
    """Draws from a source that nothing sets back, once it lies."""

    lies = 0

    def forward(self, x):
        y = super().forward(x)
        return y + os.urandom(1)[0] if self.lies else y


def test_values_that_differ_are_refused_and_their_stage_is_kept(forced):
    model = model_of("f", "f", Lies(), "f", "f")
    chk = squeezed(model, verify="always")
    trained(model, chk)
    assert chains_of(chk.plan) == {"2": "recomputed whole"}
    assert "recomputed values, bit for bit" in chk.report()
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    Lies.lies = 1
    try:
        with pytest.raises(rotor.RecomputationError, match="Lies in module '2'") as caught:
            chk(X).square().mean().backward()
    finally:
        Lies.lies = 0
    assert caught.value.module == "2"
    assert same(gradients, [p.grad for p in model.parameters()])
    assert same(buffers, list(model.buffers()))
    # Under this limit it would have to run again.
    with pytest.raises(rotor.InfeasibleError):
        chk(X)
    limited(chk, ALL)
    plain = copy.deepcopy(model)
    assert same(trained(model, chk), trained(plain, plain))
    assert chains_of(chk.plan) == {"2": "kept"}
    assert [len(chain.schedules) for chain in chk.plan.parts.chains] == [1]
    assert chk.inspection_values.measures[2].varies


def hooked(model, *names):
    """The model, with hooks that change the values they are given."""
    for name in names:
        stage = model.get_submodule(name)
        stage.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
        stage.register_forward_hook(lambda _, given, made: made * 0.75 + given[0])
        stage.register_full_backward_hook(lambda _, given, made: (given[0] * 0.5,))
    return model


def test_hooks_of_stages_run_with_their_values(forced):
    model = model_of(*"ffooff")
    chk = squeezed(hooked(copy.deepcopy(model), "2", "3"))
    assert same(trained(chk.module, chk), trained(hooked(model, "2", "3"), model))
    assert list(chains_of(chk.plan)) == ["2 to 3"]
    assert "recomputed" in chains_of(chk.plan)["2 to 3"]
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_hooks_that_are_new_run_too(forced):
    model = model_of(*"ffoof")
    chk = squeezed(copy.deepcopy(model))
    assert same(trained(chk.module, chk), trained(model, model))
    hooked(chk.module, "3"), hooked(model, "3")
    assert same(trained(chk.module, chk), trained(model, model))
    assert list(chains_of(chk.plan)) == ["2 to 3"]


@pytest.mark.filterwarnings("ignore::rotor.errors.MemoryLimitWarning")
def test_what_a_chain_refuses_is_refused(forced):
    model = model_of("o", "f", "f")
    chk = squeezed(model)
    trained(model, chk)
    assert chains_of(chk.plan) == {"0": "recomputed whole"}
    y = chk(X).square().mean()
    y.backward(retain_graph=True)
    y.backward()
    del y
    given = X.clone()
    y = chk(given).square().mean()
    given.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between its forward"):
        y.backward()
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    wanted = torch.autograd.grad(plain(X).square().mean(), list(plain.parameters()))
    torch.manual_seed(0)
    y = chk(X).square().mean()
    found, told = wanted, "whose plan has freed its input"
    try:  # It depends on the plan whether a part's input is left.
        found = torch.autograd.grad(y, list(model.parameters()), create_graph=True)
    except RuntimeError as error:
        told = str(error)
    assert "whose plan has freed its input" in told
    assert all(map(torch.allclose, found, wanted))
    del y
    plain = copy.deepcopy(model)
    assert same(trained(model, chk), trained(plain, plain))


def test_autocast_is_kept(forced, monkeypatch):
    model = model_of("f", "o", "f")

    def context():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    chk = rotor.Checkpointable(model, mem_limit=ALL)
    trained(model, chk, 1, context=context)
    plan, again = chk.plan, copy.deepcopy(model)
    assert not plan.recomputes
    # Captured graphs round elsewhere than eager code: of both plans they recompute nothing.
    expected = trained(model, chk, context=context)
    model.load_state_dict(again.state_dict())
    chosen = fastest(plan.parts.options())
    chosen[1] = len(plan.parts.options()[1]) - 1
    for place in PLACES:
        monkeypatch.setattr(place, lambda *_: list(chosen))
    limited(chk, ALL)
    assert same(trained(model, chk, context=context), expected)
    assert chains_of(chk.plan) == {"1": "recomputed whole"}


class Splits(Opaque):
    """Takes a tensor, returns it in halves."""

    def forward(self, x):
        return {"halves": list(super().forward(x).chunk(2, dim=1)), "rows": x.shape[0]}


class Joins(Opaque):
    """Takes halves, returns a tensor."""

    def forward(self, given):
        assert given["rows"] == ROWS
        return super().forward(torch.cat(given["halves"], 1))


def test_values_between_stages_are_trees_and_gradients_of_inputs_flow(forced):
    model = model_of("f", Splits(), Joins(), "f", "f")
    chk = squeezed(copy.deepcopy(model))
    results = []
    for called in (chk, model):
        module = chk.module if called is chk else model
        for seed in range(3):
            x = X.clone().requires_grad_()
            module.zero_grad()
            torch.manual_seed(seed)
            called(x).square().mean().backward()
        results.append([x.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    assert same(*results)
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes
    (treatment,) = chains_of(chk.plan).values()
    assert "recomputed" in treatment


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_gradients_accumulate(squeeze):
    model, chk = squeeze(MIXED)
    for module, called in ((model, model), (chk.module, chk)):
        for step in range(9):
            if step % 3 == 0:
                module.zero_grad()
            torch.manual_seed(step)
            called(X).square().mean().backward()
            # What is between the parts is estimated for the first step with gradients.
            is_known = module is chk.module and step > 4
            assert not is_known or chk.plan.measured_bytes <= chk.plan.limit_bytes
    assert same([p.grad for p in chk.module.parameters()], [p.grad for p in model.parameters()])
    assert set(chains_of(chk.plan).values()) != {"kept"}


def test_captured_children_of_a_stage_stay_parts(forced):
    model = model_of("f", "f", Branching(FeedForward(WIDTH)), "o", "f")
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit_of(model, 0.5))
    assert same(trained(chk.module, chk), trained(model, model))
    assert [site.name for site in chk.plan.parts.sites] == ["0", "1", "2.inner", "3", "4"]
    assert list(chains_of(chk.plan)) == ["3"]


class Mostly(Opaque):
    """Has a small child that can be captured."""

    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x):
        return super().forward(x + self.small(x))


def test_a_stage_of_which_little_was_captured_runs_whole(forced):
    model = model_of("f", "f", Mostly(), "f")
    chk = squeezed(copy.deepcopy(model))
    assert same(trained(chk.module, chk), trained(model, model))
    assert chains_of(chk.plan) == {"2": "recomputed whole"}
    assert chk.plan.measured_bytes <= chk.plan.limit_bytes


def test_a_stage_that_does_not_repeat_is_kept(forced):
    model = model_of("f", "f", Lies(), "f", "f")
    chk = rotor.Checkpointable(model, mem_limit=ALL)
    Lies.lies = 1
    try:
        with pytest.warns(rotor.MemoryLimitWarning, match="gave other bits"):
            chk(X).square().mean().backward()
    finally:
        Lies.lies = 0
    assert chk.plan.engine == "parts"
    assert chains_of(chk.plan) == {}


def test_the_model_may_run_otherwise_meanwhile(squeeze):
    model, chk = squeeze(MIXED)
    trained(chk.module, chk)
    trained(model, model)
    for call, module in ((model, model), (chk, chk.module)):
        torch.manual_seed(0)
        with torch.no_grad():
            call(X)
        module.eval()
        call(X)
        module.train()
    assert same(list(chk.module.buffers()), list(model.buffers()))
    assert same(trained(chk.module, chk), trained(model, model))


def test_pages_and_traces_name_the_chains(squeeze, tmp_path):
    _, chk = squeeze(MIXED)
    trained(chk.module, chk)
    assert "recomputed whole" in chk.display().split("compared")[0]
    assert "; not captured: " in chk.report()
    assert "not captured, a chain: 2, 4 to 5+6" in chk.report()
    for name in ("plan.html", "plan.json"):
        chk.report(tmp_path / name)
    assert "recomputed whole" in (tmp_path / "plan.html").read_text()
    assert (tmp_path / "plan.json").stat().st_size
