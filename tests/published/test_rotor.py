"""Scripts in the manner of the published rotor: its README, its tests, algorithms of its users."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import pytest
import torch
from rotor.models import utils
from torch import nn
from training import same

import rotor
from rotor.algorithms import ChenSqrt, Floating, Persistent, RecomputeAll
from rotor.algorithms import sequence as sq
from rotor.algorithms.sequence import Sequence
from rotor.commands.main import main

WIDTH, BATCH = 32, 512


def network(stages: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(stages):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def sample(*, needs_gradient: bool = True) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH, requires_grad=needs_gradient)


def gradients(model: nn.Module, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


# -- attributes


def test_model_chain_and_all_values():
    net = network()
    chk = rotor.Checkpointable(net)
    assert chk.model is net
    assert chk.chain is None
    assert chk.sequence is None
    assert chk.all_values is None
    x = sample()
    chk.measure(x)
    forward, backward, kept, activations, forward_tmp, backward_tmp = chk.all_values
    n = len(chk.functions)
    assert len(forward) == len(backward) == len(forward_tmp) == len(backward_tmp) == n
    assert len(kept) == len(activations) == n + 1
    assert kept[0] == activations[0] == x.nbytes
    assert activations[-1] == BATCH * 4 * 4
    assert all(t > 0 for t in forward + backward)
    planned = chk.compute_sequence("1GB")
    assert chk.sequence == planned
    assert isinstance(chk.chain, rotor.Chain)
    assert list(chk.chain.x_bytes) == activations
    assert list(chk.chain.xbar_bytes) == kept[1:]
    assert 0.5 < planned.makespan / (sum(forward) + sum(backward)) < 2
    assert chk.get_expected_makespan() == planned.makespan


def test_all_values_are_those_of_a_chain():
    chk = rotor.Checkpointable(network(), sample(), "1GB")
    forward, backward, kept, activations, forward_tmp, backward_tmp = chk.all_values
    chain = rotor.Chain(forward, backward, activations, kept[1:], forward_tmp, backward_tmp)
    assert 0.5 < chk.get_expected_makespan() / chain.ideal_time < 2


def runs(sequence: Sequence) -> int:
    return sum(sequence.count_forwards().values())


def test_schedules_by_their_published_names():
    chk = rotor.Checkpointable(network(), sample(), "1GB", engine="chain")
    n = len(chk.chain)
    least = chk.compute_min_sequence()
    assert least == chk.sequence == RecomputeAll().solve(chk.chain, "1TB")
    chk.compute_sequence(300_000)
    whole = chk.compute_pytorch_sequence()
    assert chk.sequence == whole
    assert runs(whole) == n < runs(least)
    assert chk.mem_limit > 300_000
    segments = chk.compute_seq_sequence()
    assert segments == ChenSqrt("sqrt").solve(chk.chain, "1TB")
    assert runs(chk.compute_seq_sequence(segments=2)) < runs(segments) + n
    assert chk.compute_seq_sequence(1) == whole
    expected = gradients(chk.module, chk.module(sample()))
    assert same(gradients(chk, chk(sample())), expected)


@pytest.mark.parametrize("name", ["compute_homogeneous_sequence", "compute_heterogeneous_sequence"])
def test_schedules_of_a_limit_by_their_published_names(name):
    chk = rotor.Checkpointable(network(), sample(), "1GB")
    whole = chk.get_expected_memory()
    compute = getattr(chk, name)
    found = compute(0.8 * whole // 1)
    assert chk.sequence == found
    assert runs(found) > len(chk.chain)
    assert chk.get_expected_memory() <= chk.mem_limit == 0.8 * whole // 1
    assert compute(whole, mem_slots=50, useXbar=True) == compute(whole, 50, False)
    with pytest.raises(rotor.InfeasibleError):
        compute(1000)
    assert chk.mem_limit == whole
    unmeasured = rotor.Checkpointable(network())
    with pytest.raises(ValueError, match="nothing was measured"):
        getattr(unmeasured, name)(whole)


def test_a_model_attribute_of_the_wrapped_model_is_its_own():
    net = network()
    net.model = nn.Identity()
    assert rotor.Checkpointable(net).model is net.model


def test_functions_are_modules_and_run_one_by_one():
    net = network()
    chk = rotor.Checkpointable(net, sample(), "1GB")
    assert all(isinstance(function, nn.Module) for function in chk.functions)
    assert len(chk.functions) == len(chk.names) < len(net)
    x = sample(needs_gradient=False)
    expected, y = net(x), x
    for function in chk.functions:
        y = function(y)
    assert torch.equal(y, expected)
    assert sum(len(list(f.parameters())) for f in chk.functions) == len(list(net.parameters()))


def test_an_unknown_attribute_is_reported_as_rotors():
    chk = rotor.Checkpointable(network())
    with pytest.raises(AttributeError, match=r"^Checkpointable has no attribute 'sequense'"):
        chk.sequense  # noqa: B018
    with pytest.raises(AttributeError, match="nor has the Sequential that it wraps"):
        chk.sequense  # noqa: B018
    graph = rotor.Checkpointable(nn.Bilinear(2, 2, 2))
    with pytest.raises(AttributeError, match=r"^Checkpointable has no attribute 'in_fe.*Bil"):
        graph.in_features  # noqa: B018
    assert graph.in1_features == 2
    assert not hasattr(chk, "sequense")


class Broken(nn.Sequential):
    @property
    def size(self) -> int:
        return self.missing


def test_an_error_inside_of_a_property_is_its_own():
    with pytest.raises(AttributeError, match="'Broken' object has no attribute"):
        rotor.Checkpointable(Broken(nn.Linear(2, 2))).size  # noqa: B018


# -- operations and sequences

CLASSES = [
    (sq.ForwardNograd(3), "Fn", "Fn_3"),
    (sq.ForwardCheck(3), "Fck", "Fck_3"),
    (sq.ForwardEnable(3), "Fe", "Fe_3"),
    (sq.Backward(3), "B", "B_3"),
    (sq.Loss(), "L", "L"),
]


@pytest.mark.parametrize("op, kind, text", CLASSES, ids=[text for *_, text in CLASSES])
def test_operation_classes(op, kind, text):
    assert isinstance(op, sq.Operation)
    assert isinstance(op, sq.Forward) == kind.startswith("F")
    assert (op.name, repr(op), str(op)) == (kind, text, text)
    if kind != "L":
        assert op.index == 3
    same = sq.Operation(kind, 3)
    assert op == same
    assert hash(op) == hash(same)
    assert op != sq.Operation("Fe" if kind != "Fe" else "B", 3)
    for other in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert other == op
        assert type(other) is type(op)


def test_a_planned_sequence_is_made_of_these_classes():
    sequence = rotor.Checkpointable(network(), sample(), "1GB").compute_sequence()
    kinds = [type(op) for op in sequence]
    assert set(kinds) == {sq.ForwardEnable, sq.Loss, sq.Backward}
    assert kinds.count(sq.Loss) == 1
    assert isinstance(sequence[0], sq.Forward)
    assert all(isinstance(op, sq.Backward) for op in sequence[-3:])


def recompute_everything(length: int) -> Sequence:
    """Keep the input alone: a sequence built by inserting, as algorithms of users do."""
    sequence = Sequence(sq.Function("everything", length))
    sequence.insert(sq.ForwardCheck(0))
    for i in range(1, length):
        sequence.insert(sq.ForwardNograd(i))
    sequence.insert(sq.Loss())
    for last in reversed(range(length)):
        again = Sequence(sq.Function("again", last))
        if last:
            again.insert(sq.ForwardCheck(0))
        for i in range(1, last):
            again.insert(sq.ForwardNograd(i))
        again.insert(sq.ForwardEnable(last))
        again.insert(sq.Backward(last))
        sequence.insert_sequence(again)
    return sequence


def test_a_sequence_is_built_by_inserting():
    sequence = recompute_everything(3)
    assert str(sequence.function) == "everything(3)"
    text = "Fck_0 Fn_1 Fn_2 L Fck_0 Fn_1 Fe_2 B_2 Fck_0 Fe_1 B_1 Fe_0 B_0"
    assert " ".join(str(op) for op in sequence.list_operations()) == text
    assert sequence == Sequence.parse(text)
    assert sequence[3].index == 3
    chain = rotor.Chain([1.0] * 3, [1.0] * 3, [8] * 4, [16] * 3, [0] * 3, [0] * 3)
    assert Sequence(sequence.list_operations(), chain).makespan == pytest.approx(12.0)
    with pytest.raises(ValueError, match="priced on a chain and complete"):
        Sequence(sequence, chain).insert(sq.Loss())


@pytest.mark.parametrize("text", ["Fng_0 Fe_1 L B_1 Fe_0 B_0", "[Fng_0, Fe_1, L, B_1, Fe_0, B_0]"])
def test_published_spellings_are_parsed(text):
    sequence = Sequence.parse(text)
    assert sequence[0] == sq.ForwardNograd(0)
    assert str(sequence) == "Fn_0 Fe_1 L B_1 Fe_0 B_0"
    assert Sequence([("Fng", 0), ("CF", 1)]) == Sequence.parse("Fng_0 CF_1")


def test_without_suffix():
    sequence = Sequence.parse("Fck_0 Fn_1 Fe_2 Fe_3 L B_3 B_2 Fe_0 Fe_1 B_1 B_0")
    stripped, first = sequence.without_suffix()
    assert first == 2
    assert str(stripped) == "Fck_0 Fn_1 L Fe_0 Fe_1 B_1 B_0"
    plain = Sequence.parse("Fck_0 Fn_1 L Fe_0 Fe_1 B_1 B_0")
    assert plain.without_suffix() == (plain, None)


# -- CheckpointOptim


def test_the_published_forward_written_out():
    """The body of the published ``Checkpointable.forward``: a node, then the rest plainly."""
    net = network()
    plain = copy.deepcopy(net)
    chk = rotor.Checkpointable(net, sample())
    curve = chk.curve()
    chk.compute_sequence(int(curve.minimum_bytes + (curve.bytes[-1] - curve.minimum_bytes) // 2))
    stripped, start = chk.sequence.without_suffix()
    assert start is not None
    y = rotor.CheckpointOptim.apply(
        chk.functions, stripped.list_operations(), chk.names, True, sample()
    )
    for i in range(start, len(chk.functions)):
        y = chk.functions[i](y)
    expected = gradients(plain, plain(sample()))
    assert same(gradients(net, y), expected)


def test_a_sequence_that_leaves_everything_to_the_caller():
    x = sample()
    stripped, start = Sequence.parse("Fe_0 Fe_1 L B_1 B_0").without_suffix()
    assert start == 0
    assert rotor.CheckpointOptim.apply(list(network(1)), stripped, None, True, x) is x


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        a, b = pair
        return torch.tanh(self.inner(a)), a * b


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] - pair[1]


@pytest.mark.parametrize(
    "kept", ["Fck_0 Fn_1 Fe_2 L B_2 Fe_0 Fe_1 B_1 B_0", "Fe_0 Fe_1 Fe_2 L B_2 B_1 B_0"]
)
def test_checkpoint_optim_takes_a_tuple(kept):
    torch.manual_seed(2)
    net = nn.Sequential(Mix(), Mix(), Join())
    plain = copy.deepcopy(net)
    a, b = sample(), sample().detach().mul(2).requires_grad_()
    c, d = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    sequence = Sequence.parse(kept)
    y = rotor.CheckpointOptim.apply(list(net), sequence, None, True, (a, b))
    expected = plain((c, d))
    assert torch.equal(y, expected)
    assert same(gradients(net, y), gradients(plain, expected))
    assert same([a.grad, b.grad], [c.grad, d.grad])


def test_only_some_of_a_tuple_may_require_gradients():
    net = nn.Sequential(Mix(), Join())
    a, b = sample(needs_gradient=False), sample()
    y = rotor.CheckpointOptim.apply(list(net), recompute_everything(2), None, True, (a, b))
    y.sum().backward()
    assert a.grad is None
    assert torch.equal(b.grad, -a)


# -- models


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "densenet121", "inception_v3"])
def test_builders_take_what_torchvisions_take(name):
    build = getattr(rotor.models, name)
    with torch.device("meta"):
        keys = list(build(num_classes=3).state_dict())
        for call in (
            lambda: build(False, num_classes=3),
            lambda: build(False, True, num_classes=3),
            lambda: build(pretrained=False, progress=False, num_classes=3),
            lambda: build(weights=None, progress=True, num_classes=3),
        ):
            assert list(call().state_dict()) == keys
        for refused in (
            lambda: build(True),
            lambda: build(True, False),
            lambda: build(weights="X"),
        ):
            with pytest.raises(ValueError, match="downloads no weights"):
                refused()


def test_relu_at_end_by_its_published_name():
    torch.manual_seed(3)
    stage = utils.ReLUatEnd(nn.Linear(WIDTH, WIDTH))
    assert isinstance(stage.module, nn.Linear)
    assert isinstance(stage.relu, nn.ReLU)
    assert stage.relu.inplace
    assert list(stage.state_dict()) == ["module.weight", "module.bias"]
    net = nn.Sequential(stage, utils.ReLUatEnd(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 2))
    plain = copy.deepcopy(net)
    chk = rotor.Checkpointable(net, sample(), "1GB")
    assert len(chk.functions) == 3
    assert same(gradients(chk, chk(sample())), gradients(plain, plain(sample())))


# -- algorithms by name


def test_an_algorithm_by_name():
    chk = rotor.Checkpointable(network(), sample())
    by_class = chk.compute_sequence("1GB", algo=Floating, mem_slots=100)
    by_name = chk.compute_sequence("1GB", algo="floating", mem_slots=100)
    assert by_name == by_class
    assert isinstance(chk.algorithm, Floating)
    chk.compute_sequence("1GB", algo="persistent")
    assert isinstance(chk.algorithm, Persistent)
    with pytest.raises(ValueError, match="no algorithm is named 'swimming', expected one of persi"):
        chk.compute_sequence(algo="swimming")
    assert isinstance(chk.algorithm, Persistent)


# -- plans in files


def tight(chk: Any) -> int:
    curve = chk.curve()
    return int(curve.minimum_bytes + (curve.bytes[-1] - curve.minimum_bytes) // 3)


def test_a_plan_of_the_command_line_is_loaded(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n"
        f"    layers = [m for _ in range(6) for m in (nn.Linear({WIDTH}, {WIDTH}), nn.GELU())]\n"
        f"    return nn.Sequential(*layers), torch.randn({BATCH}, {WIDTH}, requires_grad=True)\n"
    )
    make: dict[str, Any] = {}
    exec(script.read_text(), make)
    net, x = make["make"]()
    chk = rotor.Checkpointable(net, x)
    limit = tight(chk)
    out = tmp_path / "plan.json"
    words = ["plan", f"{script}:make", "--limit", str(limit), "--engine", "chain"]
    assert main([*words, "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    saved = json.loads(out.read_text())["operations"]
    assert any(kind == "Fck" for kind, _ in saved)
    chk = rotor.Checkpointable(net, mem_limit=limit)
    chk.measure(x)
    loaded = chk.load_plan(out)
    assert [[op.kind, op.stage] for op in loaded] == saved
    assert loaded.chain is chk.chain
    plain = copy.deepcopy(net)
    for _ in range(3):
        chk.zero_grad()
        actual = gradients(chk, chk(x))
        assert same(actual, gradients(plain, plain(x)))
        assert chk.sequence == loaded
        assert chk.plan.measured_bytes is None or chk.plan.measured_bytes <= limit


def test_a_loaded_plan_gives_way_where_it_does_not_fit():
    chk = rotor.Checkpointable(network(), sample())
    everything = Sequence(chk.compute_sequence("1GB").codes)
    limit = tight(chk)
    chk.compute_sequence(limit)
    before = chk.sequence
    with pytest.raises(rotor.InfeasibleError, match=r"the plan needs .* bytes\), and the l") as e:
        chk.load_plan(everything)
    assert e.value.minimum_bytes > limit
    assert chk.sequence == before
    assert chk.compute_sequence(e.value.minimum_bytes) is not None
    assert chk.load_plan(everything) == everything
    assert chk.compute_sequence(limit) == before


def test_a_plan_of_another_chain_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    rotor.Checkpointable(network(4), sample(), "1GB").sequence.to_json(path)
    chk = rotor.Checkpointable(network(6), sample(), "1GB")
    with pytest.raises(ValueError, match="another chain: it has 5 stages, the model has 7"):
        chk.load_plan(path)
    with pytest.raises(ValueError, match="another chain: it has 2 backwards, the model has 7"):
        chk.load_plan(Sequence.parse("Fe_0 Fe_1 L B_1 B_0"))
    other = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    with pytest.raises(ValueError, match=r"stage 0 is 0\+1 in it, 0 in the model"):
        rotor.Checkpointable(other, sample(), "1GB").load_plan(path)
    with pytest.raises(ValueError, match="nothing was measured"):
        rotor.Checkpointable(network()).load_plan(path)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.relu(self.one(x)))


def test_load_plan_is_there_for_graphs_too(tmp_path):
    chk = rotor.Checkpointable(Skip(), sample(), "1GB")
    chk.program.to_json(tmp_path / "plan.json")
    again = rotor.Checkpointable(Skip(), mem_limit="1GB")
    again.measure(sample())
    assert again.load_plan(tmp_path / "plan.json").ops.tolist() == chk.program.ops.tolist()
    dynamic = rotor.Checkpointable(Skip(), mem_limit="1GB", engine="dynamic")
    with pytest.raises(ValueError, match='engine="dynamic" decides while a step runs'):
        dynamic.load_plan(tmp_path / "plan.json")


# -- verbosity


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def heard():
    logger, handler = logging.getLogger("rotor"), Kept()
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)


@pytest.mark.parametrize("make", [network, Skip])
def test_verbosity_is_of_one_model(heard, make):
    loud = rotor.Checkpointable(make(), sample(), "1GB", verbosity=1)
    assert any(message.startswith("planned") for message in heard)
    level = logging.getLogger("rotor").level
    assert level == logging.NOTSET
    heard.clear()
    quiet = rotor.Checkpointable(make(), sample(), "1GB", verbosity=-1)
    for _ in range(2):
        quiet(sample()).sum().backward()
    assert heard == []
    loud(sample()).sum().backward()
    assert any(message.startswith("measured peak") for message in heard)
    heard.clear()
    quiet.verbosity = 1
    quiet.compute_sequence("1GB")
    assert any(message.startswith("planned") for message in heard)


def test_a_level_that_the_user_set_stays(heard):
    logger = logging.getLogger("rotor")
    logger.setLevel(logging.DEBUG)
    try:
        rotor.Checkpointable(network(), sample(), "1GB", verbosity=1)
        assert logger.level == logging.DEBUG
        heard.clear()
        rotor.Checkpointable(network(), sample(), "1GB")
        assert any(message.startswith("planned") for message in heard)
    finally:
        logger.setLevel(logging.NOTSET)
