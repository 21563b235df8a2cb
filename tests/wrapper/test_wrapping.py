"""Checkpointable behaves as the model that it wraps, and says what is wrong."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from training import Result, check_equal, conv_net, default_loss, gradients_of, images, same
from zoo.models import Tanhs

import rotor
from rotor.algorithms import RecomputeAll

# -- transparent wrapping


def test_names_and_states_carry_no_prefix():
    model = conv_net()
    chk = rotor.Checkpointable(model)
    assert list(chk.state_dict()) == list(model.state_dict())
    assert [n for n, _ in chk.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in chk.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert [n for n, _ in chk.named_modules()] == [n for n, _ in model.named_modules()]
    other = conv_net()
    chk.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(chk.parameters(), other.parameters(), strict=True))
    outer = nn.ModuleDict({"inner": chk})
    assert list(outer.state_dict()) == [f"inner.{k}" for k in model.state_dict()]
    outer.load_state_dict({f"inner.{k}": v for k, v in conv_net().state_dict().items()})


class Scaled(nn.Sequential):
    """Layers whose class does more in a call than run the forward."""

    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs) + self.offset


@pytest.mark.parametrize("engine", ["auto", "chain", "graph", "dynamic"])
def test_a_call_of_the_models_class_is_kept(engine):
    x = torch.randn(256, 32)
    hooked = []

    def make():
        model = Scaled(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)])
        model.offset = nn.Parameter(torch.ones(32))
        model.register_forward_hook(lambda *_: hooked.append(0))
        return model

    check_equal(make, lambda model, _: model(x).square().sum(), mem_limit="220KiB", engine=engine)
    assert len(hooked) == 2 * 3


def test_attributes_are_the_models():
    model = conv_net()
    model.note = "hello"
    chk = rotor.Checkpointable(model)
    assert chk.note == "hello"
    chk.note = "changed"
    chk.extra = 3
    assert model.note == "changed"
    assert model.extra == 3
    del chk.extra
    assert not hasattr(model, "extra")
    assert not hasattr(chk, "nonsense")
    assert chk[0] is model[0]
    assert len(chk) == len(model)
    assert list(chk) == list(model)
    chk.verbosity = 2
    assert not hasattr(model, "verbosity")
    chk.eval()
    assert not model.training
    chk.train()
    assert model.training
    assert bool(chk)
    assert "Checkpointable" in repr(chk)


def test_to_moves_and_hooks_fire_once():
    model = conv_net()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    chk = rotor.Checkpointable(model)
    chk.to(torch.float64)
    assert model[0][0].weight.dtype == torch.float64
    chk(images().double())
    chk.eval()
    chk(images().double())
    assert calls == [1, 1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_train_alike(duplicate):
    x = images()
    chk = rotor.Checkpointable(conv_net(), x)
    chk.compute_sequence("1GiB", algo=RecomputeAll())
    default_loss(chk(x)).backward()
    twin = duplicate(chk)
    assert twin.module is not chk.module
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in chk.parameters()})
    assert Result(chk, chk, x).differences(Result(twin, twin, x)) == []


# -- errors


def test_models_that_are_no_sequential():
    with pytest.raises(TypeError, match=r"nn\.Sequential, got Linear"):
        rotor.Checkpointable(nn.Linear(2, 2), engine="chain")

    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(TypeError, match="with a forward of its own"):
        rotor.Checkpointable(Own(nn.Linear(2, 2)), engine="chain")
    with pytest.raises(TypeError, match="got int"):
        rotor.Checkpointable(3)
    with pytest.raises(ValueError, match="empty"):
        rotor.Checkpointable(nn.Sequential())


def test_before_a_measure():
    chk = rotor.Checkpointable(conv_net())
    for call in (chk.build_chain, chk.compute_sequence, chk.curve):
        with pytest.raises(ValueError, match="nothing was measured"):
            call()
    for call in (chk.get_expected_memory, chk.get_expected_makespan, chk.display, chk.report):
        with pytest.raises(ValueError, match="no plan was made"):
            call()


@pytest.mark.parametrize("limit", [0, -5, float("nan"), "0GiB", "lots", "-1MB"])
def test_limits_that_are_no_positive_number(limit):
    with pytest.raises(ValueError, match="mem_limit"):
        rotor.Checkpointable(conv_net(), mem_limit=limit)


@pytest.mark.parametrize("limit", [True, [1], 1j])
def test_limits_of_a_wrong_type(limit):
    with pytest.raises(TypeError, match="mem_limit"):
        rotor.Checkpointable(conv_net(), mem_limit=limit)


def test_wrong_options():
    with pytest.raises(ValueError, match="unknown engine"):
        rotor.Checkpointable(conv_net(), engine="warp")
    with pytest.raises(ValueError, match="mem_slots"):
        rotor.Checkpointable(conv_net(), mem_slots=0)
    with pytest.raises(ValueError, match="mem_slots"):
        rotor.Checkpointable(conv_net(), mem_slots=1.5)
    chk = rotor.Checkpointable(conv_net(), images())
    with pytest.raises(ValueError, match="once"):
        chk.compute_sequence(10**9, mem_limit=10**9)
    with pytest.raises(ValueError, match="targets are for a loss"):
        chk(images(), targets=(1,))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("verbosity", "loud", "verbosity must be a whole number"),
        ("verbosity", None, "verbosity must be a whole number"),
        ("seed", "x", "seed must be a whole number"),
        ("time_limit", -1, "time_limit = -1, expected more than 0 seconds"),
        ("loss_fn", 5, "loss_fn must be a function"),
        ("heuristic", "lru", "unknown heuristic 'lru', expected a name of"),
    ],
)
def test_options_are_checked_before_a_step(option, value, words):
    engine = "dynamic" if option == "heuristic" else "auto"
    with pytest.raises((TypeError, ValueError), match=words):
        rotor.Checkpointable(conv_net(), mem_limit="1MiB", engine=engine, **{option: value})


@pytest.mark.parametrize("points", [-5, 0, 1.5, "a", float("nan")])
def test_points_of_a_chains_curve(points):
    chk = rotor.Checkpointable(conv_net(), images())
    with pytest.raises((TypeError, ValueError), match="points"):
        chk.curve(points)


def test_a_limit_in_the_place_of_the_sample_is_asked_about():
    for model in (conv_net(), nn.Linear(2, 2)):
        for given in ("1MiB", 1 << 20):
            with pytest.raises(TypeError, match=f"did you mean mem_limit={given!r}"):
                rotor.Checkpointable(model, given)


class Wrong(Tanhs):
    """A model with a fault of its own, behind a branch that cannot be captured."""

    def forward(self, x):
        x = super().forward(x)
        return nn.functional.linear(x if x.sum() < 1e9 else -x, torch.ones(4, 9))


@pytest.mark.parametrize("model", [Wrong(8, 3), nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2))])
def test_wrong_shapes_are_pytorchs_own_error_alone(model, capfd):
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("torch").addHandler(handler)
    try:
        with pytest.raises(
            RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied \S+ and"
        ):
            rotor.Checkpointable(model, mem_limit="1GiB")(torch.randn(4, 8))
    finally:
        logging.getLogger("torch").removeHandler(handler)
    assert said == []
    assert capfd.readouterr() == ("", "")


class Counting(nn.Module):
    """A model that counts its forwards in a buffer, before the layer that can fail."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("wrong", [torch.ones(4, 9), torch.ones(8, dtype=torch.int64), None])
def test_a_wrong_argument_of_a_graph_is_pytorchs_own_error_and_leaves_nothing(capfd, wrong):
    chk = rotor.Checkpointable(Counting(), mem_limit="8MiB", engine="graph")
    with pytest.raises((RuntimeError, TypeError), match=r"^(mat1|expected m1|linear\(\))"):
        chk(wrong)
    assert capfd.readouterr() == ("", "")
    assert chk.count == 0
    chk(torch.ones(4, 8)).sum().backward()
    assert chk.count == 1


ENGINES = {
    "chain": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
    "graph": lambda: Tanhs(8, 3),
    "dynamic": lambda: Tanhs(8, 3),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_one_target_needs_no_tuple(engine):
    model, x, labels = ENGINES[engine](), torch.randn(4, 8), torch.arange(4)
    chk = rotor.Checkpointable(
        copy.deepcopy(model), mem_limit="1GiB", engine=engine, loss_fn=nn.functional.cross_entropy
    )
    expected = nn.functional.cross_entropy(model(x), labels)
    expected.backward()
    for _ in range(2):
        chk.zero_grad()
        loss = chk(x, targets=labels)
        loss.backward()
    assert torch.equal(loss, expected)
    assert same(gradients_of(chk), gradients_of(model))
    with torch.no_grad():
        assert torch.equal(chk(x, targets=labels), expected)
        assert torch.equal(chk(x, targets=[labels]), expected)
    if engine != "dynamic":
        assert chk.measure(x, targets=labels) is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_the_output_alone_takes_no_targets(engine):
    model, x = ENGINES[engine](), torch.randn(4, 8)
    chk = rotor.Checkpointable(
        copy.deepcopy(model), mem_limit="1GiB", engine=engine, loss_fn=torch.sum
    )
    expected = model(x)
    expected.sum().backward()
    for _ in range(2):
        chk.zero_grad()
        loss = chk(x, targets=())
        loss.backward()
    assert torch.equal(loss, expected.sum())
    assert same(gradients_of(chk), gradients_of(model))
    # Without targets= it is the output, of another kind of step.
    output = chk(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    with torch.no_grad():
        assert torch.equal(chk(x, targets=()), expected.sum())
    chk.eval()
    assert torch.equal(chk(x), expected)


def test_infeasible_names_the_least_bytes():
    with pytest.raises(rotor.InfeasibleError) as caught:
        rotor.Checkpointable(conv_net(), images(), "10KB")
    assert str(caught.value.minimum_bytes) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    chk = rotor.Checkpointable(conv_net(), images(), caught.value.minimum_bytes)
    assert chk.get_expected_memory() <= chk.mem_limit
    fails = rotor.Checkpointable(conv_net(), mem_limit="10KB")
    x = images()
    with pytest.raises(rotor.InfeasibleError):
        fails(x)
    assert all(p.grad is None for p in fails.parameters())


@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_first_stage_that_changes_its_input_is_named(engine):
    if engine == "auto":
        model = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 4))
        x, other = torch.randn(2, 4), torch.randn(2, 4)
        plain_x = x.clone()
        with pytest.warns(rotor.MemoryLimitWarning, match="changes the model's input in place"):
            chk = rotor.Checkpointable(model, other, "1MB")
        assert torch.equal(chk(x), model(plain_x))
        assert torch.equal(x, plain_x)
        assert chk.plan.engine == "graph"
        return
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    kept = x.clone()
    with pytest.raises(ValueError, match="stage 0 changes the model's input in place"):
        rotor.Checkpointable(model, x, engine="chain")
    assert torch.equal(x, kept)
    viewed = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="stage 1 changes the model's input in place"):
        rotor.Checkpointable(viewed, x, engine="chain")
    assert torch.equal(x, kept)


def test_inputs_that_cannot_be_measured():
    chk = rotor.Checkpointable(conv_net())
    with pytest.raises(ValueError, match="holds no tensor"):
        chk.measure("text")
    chk.to("meta")
    with pytest.raises(ValueError, match=r"input is on cpu and parameter 0\.0\.weight is on meta"):
        chk.measure(images())


def test_torch_func_is_refused():
    chk = rotor.Checkpointable(conv_net(), images(), engine="chain")
    chk.compute_sequence("1GiB", algo=RecomputeAll())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: chk(x).sum())(images())


def test_functional_call_has_its_parameters_when_recomputing():
    chk = rotor.Checkpointable(conv_net(), images())
    chk.compute_sequence("1GiB", algo=RecomputeAll())
    found, x = [], images()
    for model in (chk, chk.module):
        torch.manual_seed(0)
        replaced = {n: p.detach().clone().requires_grad_() for n, p in chk.named_parameters()}
        default_loss(torch.func.functional_call(model, replaced, (x,))).backward()
        found.append([p.grad for p in replaced.values()])
    assert all(map(torch.equal, *found))
    assert all(p.grad is None for p in chk.parameters())


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_sharding_is_refused_also_after_wrapping(monkeypatch, engine):
    import torch.distributed.fsdp

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", Sharded, raising=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    chk = rotor.Checkpointable(model, x, "1MiB", engine=engine)
    chk(x).sum().backward()
    model[2].__class__ = Sharded
    with pytest.raises(RuntimeError, match="module 2 is sharded by fully_shard"):
        chk(x)
    with pytest.raises(RuntimeError, match="module 2 is sharded by fully_shard"):
        rotor.Checkpointable(model, engine=engine)


def test_dropout_from_a_state_of_cudnn_is_refused(monkeypatch):
    class Second(nn.Module):
        def forward(self, found):
            return found[0]

    model = nn.Sequential(nn.LSTM(8, 8, num_layers=2, dropout=0.5), Second())
    chk = rotor.Checkpointable(model, mem_limit="10MB", engine="chain")
    chk(torch.randn(5, 2, 8)).sum().backward()
    monkeypatch.setattr("rotor.common.model_state._draws_in_cudnn", lambda _: True)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"the dropout of LSTM\(\.\.\., dropout=0\.5\) is drawn"):
        chk(torch.randn(5, 2, 8))
    model[0].dropout = 0.0
    chk(torch.randn(5, 2, 8)).sum().backward()


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_model_goes_with_its_last_name(engine):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    chk = rotor.Checkpointable(model, mem_limit="1MB", engine=engine)
    for _ in range(2):
        chk(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(model)
        del model, chk
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("memlimit", "mem_limit"), ("efort", "effort"), ("loss_function", "loss_fn")],
)
def test_a_misspelt_argument_is_told_with_the_nearest_name(name, meant):
    with pytest.raises(TypeError, match=f"unknown option '{name}': did you mean {meant}"):
        rotor.Checkpointable(nn.Linear(2, 2), **{name: 1})


# -- another forward in the place of the wrapper's


def other_forward(model, x):
    return model[0:](x) * 2


class WithForward(rotor.Checkpointable):
    def forward(self, x):
        return self.module(x)


def replaced():
    chk = rotor.Checkpointable(conv_net(), mem_limit="1GiB", verbosity=0)
    chk.forward = types.MethodType(other_forward, chk)
    return chk


@pytest.mark.parametrize("make", [replaced, lambda: WithForward(conv_net(), mem_limit="1GiB")])
def test_a_forward_that_limits_nothing_is_named_in_the_first_step(make):
    chk = make()
    chk.eval()(images())
    chk.train()
    with torch.no_grad():
        chk(images())
    with pytest.warns(rotor.MemoryLimitWarning, match="forward is in the place|before rotor"):
        chk(images())
    chk(images()).sum().backward()
    assert chk.plan is None


@pytest.mark.parametrize("is_method", [True, False])
def test_a_forward_around_the_wrappers_own_is_limited(is_method):
    chk = rotor.Checkpointable(conv_net(), mem_limit="1GiB", verbosity=0)
    own = chk.forward
    if is_method:
        chk.forward = types.MethodType(lambda model, x: own(x) * 2, chk)
    else:
        chk.forward = lambda x: own(x) * 2
    chk(images()).sum().backward()
    assert chk.plan.measured_bytes


class Trained(nn.Sequential):
    """Model whose loop calls methods of it."""

    calls = 0

    def training_step(self, x):
        self.calls += 1
        return self(x).sum()

    def first(self):
        return self[0]


class TrainedTwice(Trained):
    def training_step(self, x):
        return super().training_step(x) * 2


@pytest.mark.parametrize("kind", [Trained, TrainedTwice])
def test_a_method_that_calls_the_model_is_limited(kind):
    model = kind(*conv_net())
    chk = rotor.Checkpointable(model, mem_limit="1GiB", verbosity=0)
    chk.training_step(images()).backward()
    assert chk.plan.measured_bytes
    assert model.calls == chk.calls == 1
    assert chk.first() is model[0]


class Layers(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def with_more_and(model, layer):
    model += [layer] if isinstance(model, nn.ModuleList) else nn.Sequential(layer)
    return model


def repeated(model, layer):
    model[-1] = layer
    model *= 2
    return model


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (nn.Sequential, lambda model, layer: model.append(layer)),
        (nn.Sequential, lambda model, layer: model.insert(1, layer)),
        (nn.Sequential, lambda model, layer: model.extend([layer, layer])),
        (nn.Sequential, with_more_and),
        (nn.Sequential, repeated),
        (Layers, with_more_and),
        (Layers, lambda model, layer: model.append(layer).extend([layer])),
    ],
)
def test_a_container_that_is_changed_keeps_its_limit(kind, change):
    layers = [nn.Linear(8, 8), nn.Tanh()]
    plain = kind(*layers) if kind is nn.Sequential else kind(layers)
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1 MB", verbosity=-1)
    added = nn.Linear(8, 8)
    model, plain = change(chk, added), change(plain, added)
    assert model is chk
    assert str(model.module) == str(plain)
    del model[0], plain[0]
    assert str(model.module) == str(plain)
    model(torch.randn(4, 8)).sum().backward()
    assert model.plan.measured_bytes


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
def test_parametrizations_of_a_wrapper_are_the_modules(engine):
    x, found = torch.ones(2, 4), []
    for is_limited in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        options = {"mem_limit": "1 MB", "engine": engine, "verbosity": -1}
        model = rotor.Checkpointable(module, **options) if is_limited else module
        model(x).sum().backward()
        parametrize.register_parametrization(model, "weight", Doubled())
        loss = model(x).square().sum()
        loss.backward()
        found.append([loss.item(), *(p.grad.sum().item() for p in model.parameters())])
        assert parametrize.is_parametrized(module, "weight")
        assert "weight" not in vars(nn.Linear)
        parametrize.remove_parametrizations(model, "weight")
        assert type(module) is nn.Linear
    assert type(model) is rotor.Checkpointable
    assert found[0] == found[1]


def test_the_class_of_a_wrapper_is_the_modules_unless_it_is_mixed_in():
    class Mixed:
        extra = 1

    chk = rotor.Checkpointable(nn.Linear(4, 4), mem_limit="1 MB")
    chk.__class__ = chk.__class__
    assert type(chk) is rotor.Checkpointable
    chk.__class__ = type("MixedLinear", (Mixed, chk.__class__), {})
    assert chk.extra == 1
    assert isinstance(chk, rotor.Checkpointable)
    assert type(chk.module) is nn.Linear
