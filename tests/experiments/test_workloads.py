"""The workloads of the experiments: every one trains a step, the same one for a seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import rotor.models as models
import torch
from rotor.models import workloads
from rotor.models.gan import GANLosses
from torch import nn
from torch.overrides import TorchFunctionMode

PUBLISHED_NAMES = {
    *(f"resnet{depth}" for depth in (20, 32, 44, 56, 110, 1202)),
    *(f"tv_resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"tv_densenet{depth}" for depth in (121, 161, 169, 201)),
    *("inceptionv3", "inceptionv4", "unet", "densenet100", "unroll_gan"),
    *("lstm", "gru", "lstm_encoder", "gru_encoder", "treelstm", "treelstm_old"),
    *("transformer", "transformer_encoder"),
}
HEAVY = [
    *("resnet1202", "tv_resnet50", "tv_resnet101", "tv_resnet152", "inceptionv3"),
    *("tv_densenet161", "tv_densenet169", "tv_densenet201"),
]
LIGHT = [
    *("resnet20", "densenet100", "unet", "unroll_gan", "lstm", "gru", "lstm_encoder"),
    *("gru_encoder", "treelstm", "treelstm_old", "transformer", "transformer_encoder", "gpt"),
]
EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else [])
    for name in workloads.names()
]

# What `from rotor.models import ...` found before the experiments' networks came.
CHAIN_EXPORTS = (
    "densenet gpt inception resnet utils vgg DenseNet densenet121 densenet161 densenet169 "
    "densenet201 GPT GPTSettings gpt2 gpt2_large gpt2_medium gpt2_xl Inception3 InceptionOutputs "
    "inception_v3 ResNet resnet18 resnet34 resnet50 resnet101 resnet152 resnext50_32x4d "
    "resnext101_32x8d resnext101_64x4d wide_resnet50_2 wide_resnet101_2 VGG vgg11 vgg11_bn vgg13 "
    "vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn"
)
CHAIN_MODELS = CHAIN_EXPORTS.split()


class Calls(TorchFunctionMode):
    """Notes the functions of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def state(training: workloads.Training) -> list[torch.Tensor]:
    return [tensor for module in training.modules for tensor in module.state_dict().values()]


def assert_equal(left: Any, right: Any) -> None:
    """Compare batches and what they are made of."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def test_the_published_names_are_there() -> None:
    assert set(workloads.names()) == PUBLISHED_NAMES | {"gpt"}


@pytest.mark.parametrize("name", EVERY)
def test_a_step_gives_every_parameter_a_finite_gradient(name: str) -> None:
    training = workloads.build(name)
    assert (training.name, training.params) == (name, workloads.parameters(name))
    before = [parameter.detach().clone() for parameter in training.parameters()]
    torch.manual_seed(0)
    loss = training.step(training.make_batch(0))
    assert loss.shape == ()
    assert not loss.requires_grad
    assert math.isfinite(float(loss))
    for module in training.modules:
        for parameter_name, parameter in module.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
    changed = [
        not torch.equal(old, new) for old, new in zip(before, training.parameters(), strict=True)
    ]
    assert sum(changed) > 0.9 * len(changed)
    training.zero_grad()
    assert all(parameter.grad is None for parameter in training.parameters())


@pytest.mark.parametrize("name", LIGHT)
def test_a_seed_gives_the_same_run(name: str) -> None:
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    first, second = (workloads.build(name, seed=3) for _ in range(2))
    batches = [training.make_batch(7) for training in (first, second)]
    assert torch.equal(torch.rand(3), expected_draw)
    assert_equal(*batches)
    losses: list[list[float]] = []
    for training, batch in zip((first, second), batches, strict=True):
        torch.manual_seed(1)
        losses.append([float(training.step(batch)) for _ in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    for ours, theirs in zip(state(first), state(second), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", LIGHT)
def test_seeds_differ_and_a_state_dict_loads_back(name: str) -> None:
    one, other = workloads.build(name, seed=1), workloads.build(name, seed=2)
    batch = one.make_batch(0)
    with pytest.raises(AssertionError):
        assert_equal(batch, one.make_batch(1))

    def loss(training: workloads.Training) -> Any:
        torch.manual_seed(0)
        found = training.forward_loss(batch)
        parts = found if isinstance(found, tuple) else (found,)
        return [float(part.detach()) for part in parts]

    assert loss(one) != loss(other)
    one, other = workloads.build(name, seed=1), workloads.build(name, seed=2)
    for source, target in zip(one.modules, other.modules, strict=True):
        target.load_state_dict(source.state_dict(), strict=True)
    assert loss(one) == loss(other)


@pytest.mark.parametrize("name", [name for name in LIGHT if name != "unroll_gan"])
def test_training_on_one_batch_lowers_its_loss(name: str) -> None:
    training = workloads.build(name)
    batch = training.make_batch(0)
    torch.manual_seed(0)
    steps = 8 if name in ("resnet20", "densenet100") else 25
    losses = [float(training.step(batch)) for _ in range(steps)]
    assert min(losses[-3:]) < 0.97 * losses[0]


def test_the_players_of_the_gan_both_learn() -> None:
    training = workloads.build("unroll_gan")
    batch = training.make_batch(0)
    before = training.forward_loss(batch)
    assert isinstance(before, GANLosses)
    for _ in range(60):
        training.step(batch)
    # Neither loss need fall, but both players have moved, and stay finite.
    after = training.forward_loss(batch)
    for old, new in zip(before, after, strict=True):
        assert new.isfinite()
        assert not torch.isclose(old, new, rtol=1e-3)
    generator, discriminator = training.modules
    kinds = [type(optimizer) for optimizer in training.optimizers]
    assert kinds == [torch.optim.Adam, torch.optim.Adam]
    owned = [
        {id(p) for group in optimizer.param_groups for p in group["params"]}
        for optimizer in training.optimizers
    ]
    assert owned == [{id(p) for p in m.parameters()} for m in (generator, discriminator)]


def test_the_gan_step_is_that_of_both_gradients() -> None:
    stepped, by_hand = (workloads.build("unroll_gan") for _ in range(2))
    batch = stepped.make_batch(0)
    stepped.step(batch)
    losses = by_hand.forward_loss(batch)
    for module, trained, loss in zip(
        by_hand.modules, stepped.modules, (losses.generator, losses.discriminator), strict=True
    ):
        gradients = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        for gradient, parameter in zip(gradients, trained.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("resnet20", torch.optim.SGD), ("treelstm", torch.optim.SGD), ("unet", torch.optim.RMSprop)],
)
def test_published_optimizers(name: str, optimizer: type) -> None:
    (found,) = workloads.build(name).optimizers
    assert type(found) is optimizer
    if optimizer is torch.optim.SGD:
        assert (found.defaults["lr"], found.defaults["momentum"]) == (0.1, 0.9)


def test_bytes_of_input_and_model() -> None:
    training = workloads.build("resnet32", **workloads.published("resnet32"))
    assert training.params == training.published
    # The constants of the published log: state and input; four more bytes of targets an image.
    assert training.input_bytes == 56 * (3 * 224 * 224 * 4 + 8)
    module = training.modules[0]
    assert training.model_bytes == sum(t.nbytes for t in module.state_dict().values())
    tied = workloads.build("gpt")
    weights = {id(p): p.nbytes for p in tied.modules[0].parameters()}
    assert tied.model_bytes == sum(weights.values())
    assert len(list(tied.parameters())) == len(weights)


@pytest.mark.parametrize("name", workloads.names())
def test_published_parameters_are_all_there(name: str) -> None:
    sizes = workloads.published(name)
    defaults = workloads.parameters(name)
    assert sizes.keys() == defaults.keys()
    assert [type(value) for value in sizes.values()] == [type(v) for v in defaults.values()]
    assert sizes != defaults
    integers = [key for key, value in sizes.items() if type(value) is int]
    assert all(sizes[key] >= defaults[key] for key in integers)


def test_parameters_reach_the_network_and_the_data() -> None:
    training = workloads.build("lstm", batch_size=3, input_size=5, in_dim=6, mem_dim=7, classes=4)
    batch = training.make_batch(0)
    assert batch.inputs.shape == (5, 3, 6)
    assert training.modules[0](batch.inputs).shape == (3, 4)
    assert training.modules[0].mem_dim == 7
    images = workloads.build("resnet20", height=24, width=12).make_batch(0).inputs
    assert images.shape == (2, 3, 24, 12)
    published = training.published
    assert (published["batch_size"], published["mem_dim"]) == (512, 1700)


def test_the_published_spelling_of_a_trees_depth() -> None:
    training = workloads.build("treelstm", dep=3)
    assert training.params["depth"] == 3
    assert "dep" not in training.params
    assert training.make_batch(0).inputs.shape[0] == 15
    with pytest.raises(ValueError, match="the same parameter of treelstm"):
        workloads.build("treelstm", dep=3, depth=3)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("treelstm", {"batch_size": 3, "input_size": 5}, {"depth": 3, "batch_size": 5}),
        ("treelstm", {"batch_size": 3}, {"depth": 3, "batch_size": 640}),
        ("treelstm", {"batch_size": 5, "dep": 3}, {"depth": 3, "batch_size": 5}),
        ("treelstm", {"input_size": 5, "depth": 3}, {"depth": 3, "batch_size": 5}),
        ("lstm", {"batch_size": 7, "input_size": 2}, {"input_size": 7, "batch_size": 2}),
        ("gru", {"batch_size": 7}, {"input_size": 7, "batch_size": 100}),
        ("unet", {"batch_size": 7, "height": 64}, {"batch_size": 7, "height": 64, "channels": 64}),
    ],
)
def test_names_of_published_configurations(name: str, given: Any, expected: Any) -> None:
    found = workloads.from_published(name, given)
    assert found == workloads.published(name) | expected
    small = workloads.from_published(name, {"batch_size": 2}, small=True)
    assert small.keys() == workloads.parameters(name).keys()
    assert set(workloads.accepted(name)) >= {*given, *workloads.parameters(name)}


def test_a_size_that_a_published_configuration_gives_twice_is_refused() -> None:
    for given in ({"batch_size": 3, "input_size": 4, "depth": 5}, {"dep": 3, "depth": 4}):
        with pytest.raises(ValueError, match="treelstm is given its depth twice, once as"):
            workloads.from_published("treelstm", given)


def test_random_trees_decide_what_runs() -> None:
    training = workloads.build("treelstm_old", batch_size=3)
    counts = []
    for seed in range(4):
        batch = training.make_batch(seed)
        trees = [tree for pair in batch.inputs for _, tree in pair]
        assert len(trees) == 6
        assert all(6 <= len(tree) <= 12 for tree in trees)
        torch.testing.assert_close(batch.targets.sum(1), torch.ones(3))
        with Calls() as calls:
            training.forward_loss(batch)
        counts.append(calls.functions.count(torch.sigmoid))
        # Two gates for each node, one for each edge, and one in each comparison of a pair.
        assert counts[-1] == sum(2 * len(tree) + len(tree) - 1 for tree in trees) + 3
    assert len(set(counts)) > 1


@pytest.mark.parametrize("cell", ["binary", "childsum"])
def test_cells_of_complete_trees(cell: str) -> None:
    training = workloads.build("treelstm", cell=cell, depth=2)
    assert math.isfinite(float(training.step(training.make_batch(0))))


def test_an_auxiliary_classifier_counts() -> None:
    class TwoOutputs(nn.Module):
        def forward(self, x: torch.Tensor) -> models.InceptionOutputs:
            return models.InceptionOutputs(x[:, 0, 0, :10], x[:, 1, 0, :10])

    training = workloads.build("resnet20")
    batch = training.make_batch(0)
    training.modules[0] = TwoOutputs()
    logits, aux = training.modules[0](batch.inputs)
    cross_entropy = nn.functional.cross_entropy
    expected = cross_entropy(logits, batch.targets) + 0.4 * cross_entropy(aux, batch.targets)
    torch.testing.assert_close(training.forward_loss(batch), expected)


def test_unknown_names_are_refused() -> None:
    for ask in (workloads.build, workloads.parameters, workloads.published):
        with pytest.raises(ValueError, match=r"no workload 'alexnet'; there are resnet20, .*gpt"):
            ask("alexnet")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("lstm", {"height": 3}, "lstm has no parameter 'height'; it has batch_size, input_size"),
        ("unet", {"upsampling": 2}, "upsampling of unet is a word, as 'bilinear', not 2"),
        ("unet", {"upsampling": "nearest"}, "'transposed' or 'bilinear'"),
        ("unet", {"batch_norm": 1}, "batch_norm of unet is true or false"),
        ("unet", {"height": 8}, "height of unet is an integer, at least 32, not 8"),
        ("lstm", {"batch_size": 0}, "batch_size of lstm is an integer, at least 1, not 0"),
        ("lstm", {"mem_dim": 3.5}, "mem_dim of lstm is an integer, at least 1, not 3.5"),
        ("lstm", {"mem_dim": True}, "mem_dim of lstm is an integer, at least 1, not True"),
        ("gpt", {"dropout": "half"}, "dropout of gpt is a number from 0, not 'half'"),
        ("gpt", {"dropout": float("nan")}, "dropout of gpt is a number from 0, not nan"),
        ("gpt", {"dropout": 1.0}, "probability"),
        ("transformer", {"heads": 5}, "width=32 cannot be divided among heads=5"),
        ("treelstm", {"cell": "ternary"}, "cell of treelstm is binary or childsum"),
        ("unroll_gan", {"unrolled_steps": -1}, "an integer, at least 0, not -1"),
    ],
)
def test_parameters_that_make_no_sense(name: str, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workloads.build(name, **params)


def test_exports_of_the_chain_models_are_unchanged() -> None:
    for name in CHAIN_MODELS:
        found = getattr(models, name)
        if isinstance(found, type) or callable(found):
            assert found.__name__ == name
            assert found.__module__ in {
                f"rotor.models.{module}" for module in CHAIN_MODELS[:6] if module != "utils"
            }
        else:
            assert found.__name__ == f"rotor.models.{name}"


def test_new_exports_do_not_hide_the_old() -> None:
    public = [name for name in vars(models) if not name.startswith("_")]
    assert set(CHAIN_MODELS) < set(public)
    for name in ("resnet20", "densenet100", "inception_v4", "UNet", "LSTM", "GRU", "TreeLSTM"):
        assert name in public
    assert models.workloads is workloads
