"""The networks of the experiments: published sizes, and what they compute."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import rotor.models as models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotor.models import cifar, gan, transformer, treelstm
from rotor.models.resnet import BasicBlock
from torch import nn

CONSTANTS = json.loads((Path(__file__).parents[1] / "data/published_constants.json").read_text())
"""Sizes of published logs' constants, in their order: parameters, buffers, inputs."""

# The papers round these numbers; PyTorch's common implementations have exactly these.
PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet1202": 19_421_274,
    "densenet100": 769_162,
    "inception_v4": 42_679_816,
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def state_bytes(module: nn.Module) -> list[int]:
    return [tensor.nbytes for tensor in module.state_dict().values()]


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
    assert count(model) == PARAMETERS[name]
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        # Ronneberger et al. and the usual variants of their network.
        ({"in_channels": 1, "out_channels": 2, "batch_norm": False}, 31_030_658),
        ({}, 31_043_521),
        ({"upsampling": "bilinear"}, 17_267_393),
    ],
)
def test_unet_has_the_published_number_of_parameters(options: Any, parameters: int) -> None:
    with torch.device("meta"):
        assert count(models.UNet(**options)) == parameters


def test_unet_is_that_of_the_published_log() -> None:
    constants = CONSTANTS["unet"]
    with torch.device("meta"):
        sizes = state_bytes(models.UNet(upsampling="bilinear"))
    assert constants[: len(sizes)] == sizes
    image = 6 * 608 * 416 * 4
    assert constants[len(sizes) : len(sizes) + 2] == [3 * image, image]


def test_resnet_is_that_of_the_published_log() -> None:
    constants = CONSTANTS["resnet32"]
    with torch.device("meta"):
        sizes = state_bytes(models.resnet32())
    assert constants[: len(sizes)] == sizes
    assert constants[len(sizes) : len(sizes) + 2] == [56 * 3 * 224 * 224 * 4, 56 * 8]


def test_treelstm_is_that_of_the_published_log() -> None:
    constants = CONSTANTS["treelstm"]
    with torch.device("meta"):
        sizes = state_bytes(treelstm.ChildSumCell(10, 300))
    assert constants[: len(sizes)] == sizes
    nodes = len(treelstm.complete_tree(6))
    assert constants[len(sizes) : len(sizes) + nodes] == [100 * 10 * 4] * nodes


def test_cifar_resnet_stages_and_shapes() -> None:
    model = models.resnet20(num_classes=7)
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock)]
    assert len(blocks) == 9
    x = torch.randn(2, 3, 32, 32)
    shapes = []
    for stage in model:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[3:6] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert x.shape == (2, 7)


def test_padded_shortcut() -> None:
    x = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    out = cifar.PaddedShortcut(2, 4, 2)(x)
    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert out[:, 2:].count_nonzero() == 0


def test_densenet_appends_and_halves() -> None:
    model = models.CifarDenseNet(layers=2, growth_rate=4, num_classes=3)
    x = torch.randn(2, 3, 16, 16)
    channels = []
    for stage in model:
        x = stage(x)
        channels.append(x.shape[1])
    assert channels[:6] == [8, 16, 8, 16, 8, 16]
    assert x.shape == (2, 3)


@pytest.mark.parametrize("side", [75, 299])
def test_inception_v4_shapes(side: int) -> None:
    with torch.device("meta"):
        model = models.inception_v4(num_classes=5)
        x = model.stem(torch.empty(2, 3, side, side))
        assert x.shape[1] == 384
        shapes = []
        for name in ("inception_a", "reduction_a", "inception_b", "reduction_b", "inception_c"):
            x = model.get_submodule(name)(x)
            shapes.append((x.shape[1], x.shape[2]))
    sides = {75: (7, 3, 1), 299: (35, 17, 8)}[side]
    assert [channels for channels, _ in shapes] == [384, 1024, 1024, 1536, 1536]
    assert [shapes[0][1], shapes[1][1], shapes[3][1]] == list(sides)


@pytest.mark.parametrize("upsampling", ["transposed", "bilinear"])
@pytest.mark.parametrize("size", [(16, 16), (33, 50)])
def test_unet_keeps_the_size(upsampling: Any, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = models.UNet(2, 3, width=4, upsampling=upsampling, batch_norm=False)
    x = torch.randn(1, 2, *size, requires_grad=True)
    out = model(x)
    assert out.shape == (1, 3, *size)
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.count_nonzero() == x.numel()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unet_refuses_small_images_and_unknown_words() -> None:
    with pytest.raises(ValueError, match="8 x 32 pixels cannot be halved four times"):
        models.UNet(width=2)(torch.zeros(1, 3, 8, 32))
    with pytest.raises(ValueError, match="'transposed' or 'bilinear', not 'nearest'"):
        models.UNet(upsampling="nearest")  # type: ignore[arg-type]


@pytest.mark.parametrize(("ours", "theirs"), [(models.LSTM, nn.LSTM), (models.GRU, nn.GRU)])
def test_written_out_recurrence_is_pytorchs(ours: Any, theirs: Any) -> None:
    torch.manual_seed(0)
    cell = ours(3, 5, classes=4).double()
    layer = theirs(3, 5).double()
    with torch.no_grad():
        for linear, suffix in ((cell.from_input, "ih"), (cell.from_state, "hh")):
            getattr(layer, f"weight_{suffix}_l0").copy_(linear.weight)
            getattr(layer, f"bias_{suffix}_l0").copy_(linear.bias)
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    outputs, _ = layer(x)
    torch.testing.assert_close(cell(x), cell.classify(outputs[-1]))


def test_written_out_recurrence_has_operations_for_each_time() -> None:
    torch.manual_seed(0)
    cell = models.LSTM(3, 5)
    operations = []
    for time in (4, 8):
        out = cell(torch.randn(time, 2, 3))
        nodes, seen = [out.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [before for before, _ in node.next_functions]
        operations.append(sum("Sigmoid" in node.name() for node in seen))
    assert operations == [3 * 4, 3 * 8]


@pytest.mark.parametrize("encoder", [models.LSTMEncoder, models.GRUEncoder])
def test_encoders_go_on_from_a_state(encoder: Any) -> None:
    torch.manual_seed(0)
    model = encoder(11, 4, 6, layers=2, dropout=0.5).eval()
    words = torch.randint(11, (5, 3))
    whole, _ = model(words)
    first, state = model(words[:2])
    second, _ = model(words[2:], state)
    assert whole.shape == (5, 3, 11)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def states_by_the_paper(cell: Any, x: Any, tree: Any, node: int) -> tuple[Any, Any]:
    """Equations 2 to 8 (child-sum) and 9 to 14 (two children) by recursion, gate by gate."""
    children = [states_by_the_paper(cell, x, tree, child) for child in tree[node]]
    size = cell.mem_dim
    zero = x.new_zeros(x.shape[1], size)
    u = cell.gates_of_children.weight
    v = cell.forget_of_children.weight
    if isinstance(cell, treelstm.BinaryCell):
        hidden = torch.cat([h for h, _ in children] or [zero, zero], dim=1)
        forgets = [hidden @ v[i * size : (i + 1) * size].T for i in range(len(children))]
    else:
        hidden = sum((h for h, _ in children), zero)
        forgets = [h @ v.T for h, _ in children]
    gate = {}
    for index, name in enumerate("iou"):
        rows = slice(index * size, (index + 1) * size)
        w, b = cell.gates_of_input.weight[rows], cell.gates_of_input.bias[rows]
        gate[name] = x[node] @ w.T + hidden @ u[rows].T + b
    c = torch.sigmoid(gate["i"]) * torch.tanh(gate["u"])
    for forget, (_, below) in zip(forgets, children, strict=True):
        c = c + torch.sigmoid(cell.forget_of_input(x[node]) + forget) * below
    return torch.sigmoid(gate["o"]) * torch.tanh(c), c


@pytest.mark.parametrize(
    ("cell", "tree"),
    [
        (treelstm.BinaryCell, treelstm.complete_tree(3)),
        (treelstm.BinaryCell, ((), (), (), (1, 2), (0, 3))),
        (treelstm.ChildSumCell, treelstm.complete_tree(2)),
        (treelstm.ChildSumCell, treelstm.random_parse_tree(12, seed=3)),
    ],
)
def test_trees_compute_the_papers_equations(cell: Any, tree: treelstm.Tree) -> None:
    torch.manual_seed(0)
    model = treelstm.TreeLSTM(cell(3, 4)).double()
    x = torch.randn(len(tree), 2, 3, dtype=torch.float64)
    expected, _ = states_by_the_paper(model.cell, x, tree, len(tree) - 1)
    torch.testing.assert_close(model(x, tree), expected)


def test_trees_that_do_not_fit_are_refused() -> None:
    binary = treelstm.TreeLSTM(treelstm.BinaryCell(3, 4))
    with pytest.raises(ValueError, match=r"1 children.*none or two; use ChildSumCell"):
        binary(torch.zeros(2, 1, 3), ((), (0,)))
    with pytest.raises(ValueError, match="3 inputs for a tree of 2 nodes"):
        binary(torch.zeros(3, 1, 3), ((), (0,)))
    with pytest.raises(ValueError, match="0 or more, not -1"):
        treelstm.complete_tree(-1)
    with pytest.raises(ValueError, match="at least one word, not 0"):
        treelstm.random_parse_tree(0, seed=0)


@given(st.integers(1, 60), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_random_parse_trees_are_trees(words: int, seed: int) -> None:
    tree = treelstm.random_parse_tree(words, seed)
    assert len(tree) == words
    children = [child for node in tree for child in node]
    assert sorted(children) == list(range(words - 1))
    assert all(child < node for node, below in enumerate(tree) for child in below)
    # In the order of a walk every subtree is an interval that ends with its root.
    subtrees: list[list[int]] = []
    for node, below in enumerate(tree):
        subtrees.append([*(inner for child in below for inner in subtrees[child]), node])
        assert subtrees[node] == list(range(node - len(subtrees[node]) + 1, node + 1))
    assert tree == treelstm.random_parse_tree(words, seed)


def test_random_parse_trees_vary() -> None:
    trees = [treelstm.random_parse_tree(20, seed) for seed in range(50)]
    assert len(set(trees)) == 50
    arity = {len(node) for tree in trees for node in tree}
    assert {0, 1, 2, 3} <= arity


def test_complete_trees() -> None:
    assert treelstm.complete_tree(0) == ((),)
    assert treelstm.complete_tree(1) == ((), (), (0, 1))
    tree = treelstm.complete_tree(5)
    assert len(tree) == 63
    assert sum(node == () for node in tree) == 32


def test_relatedness_depends_on_both_sentences_alike() -> None:
    torch.manual_seed(0)
    model = treelstm.Relatedness(20, 4, 5, hidden_dim=6).double()
    left = (torch.randint(20, (9,)), treelstm.random_parse_tree(9, 1))
    right = (torch.randint(20, (7,)), treelstm.random_parse_tree(7, 2))
    scores = model(left, right)
    assert scores.shape == (1, 5)
    torch.testing.assert_close(scores.exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(scores, model(right, left))


def test_transformer_is_pytorchs_layers() -> None:
    torch.manual_seed(0)
    sizes: Any = {"width": 8, "heads": 2, "hidden": 16, "layers": 2, "longest": 6}
    ours = transformer.Transformer(13, **sizes).double().eval()
    theirs = transformer.LayeredTransformer(13, **sizes).double().eval()
    theirs.embed, theirs.decode = ours.embed, ours.decode
    pairs = [("qkv", "self_attn.in_proj"), ("project", "self_attn.out_proj")]
    pairs += [("expand", "linear1"), ("contract", "linear2"), ("norm1", "norm1")]
    pairs += [("norm2", "norm2")]
    with torch.no_grad():
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            for name, target in pairs:
                joint = "_" if target.endswith("in_proj") else "."
                for part in ("weight", "bias"):
                    value = mine.get_parameter(f"{name}.{part}")
                    other.get_parameter(f"{target}{joint}{part}").copy_(value)
    tokens = torch.randint(13, (3, 6))
    # PyTorch's own layer takes a shortcut without gradients; with them it runs its operations.
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = models.Transformer(13, width=8, heads=2, hidden=16, layers=2, longest=6).eval()
    tokens = torch.randint(13, (1, 6))
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 13
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
    torch.testing.assert_close(before.exp().sum(-1), torch.ones(1, 6))


def test_transformer_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="width=8 cannot be divided among heads=3"):
        models.Transformer(13, width=8, heads=3)
    model = models.Transformer(13, width=8, heads=2, hidden=8, layers=1, longest=4)
    with pytest.raises(ValueError, match="5 tokens, but the model has 4 positions"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_positions_are_the_papers() -> None:
    table = transformer.PositionalEncoding(7, 10).table
    for position in (0, 3, 9):
        for feature in range(7):
            angle = position / 10000 ** ((feature - feature % 2) / 7)
            expected = math.cos(angle) if feature % 2 else math.sin(angle)
            assert table[position, feature].item() == pytest.approx(expected, abs=1e-6)


def players() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """Smooth ones, whose gradients differences can check."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    discriminator = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    real = gan.ring_of_gaussians(6, torch.Generator().manual_seed(1)).double()
    return generator, discriminator, real, torch.randn(6, 3, dtype=torch.float64)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_gradient_through_unrolled_steps(steps: int) -> None:
    generator, discriminator, real, noise = players()

    def generator_loss() -> torch.Tensor:
        losses = gan.unrolled_losses(generator, discriminator, real, noise, steps, 0.5)
        return losses.generator

    before = copy.deepcopy(discriminator.state_dict())
    weight = generator[0].weight
    (gradient,) = torch.autograd.grad(generator_loss(), weight)
    assert all(torch.equal(before[k], v) for k, v in discriminator.state_dict().items())
    small = 1e-6
    for row, column in ((0, 0), (2, 1), (3, 2)):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[row, column] += sign * small
            losses.append(generator_loss().item())
            with torch.no_grad():
                weight[row, column] -= sign * small
        slope = (losses[0] - losses[1]) / (2 * small)
        assert gradient[row, column].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_unrolled_discriminator_is_one_that_descends() -> None:
    generator, discriminator, real, noise = players()
    looked_ahead = [
        gan.unrolled_losses(generator, discriminator, real, noise, steps, 0.5) for steps in range(4)
    ]
    assert len({losses.discriminator.item() for losses in looked_ahead}) == 1
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.5)
    own = []
    for losses in looked_ahead:
        plain = gan.unrolled_losses(generator, discriminator, real, noise, 0, 0.5)
        torch.testing.assert_close(plain.generator, losses.generator)
        own.append(plain.discriminator.item())
        optimizer.zero_grad()
        plain.discriminator.backward()
        optimizer.step()
    assert all(later < earlier for earlier, later in pairwise(own))


def test_gan_losses_of_the_discriminator_stop_at_it() -> None:
    generator, discriminator, real, noise = players()
    losses = gan.unrolled_losses(generator, discriminator, real, noise, 2, 0.5)
    gradients = torch.autograd.grad(
        losses.discriminator, list(generator.parameters()), allow_unused=True
    )
    assert all(gradient is None for gradient in gradients)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        gan.unrolled_losses(generator, discriminator, real, noise, -1, 0.5)


def test_ring_of_gaussians() -> None:
    points = gan.ring_of_gaussians(4000, torch.Generator().manual_seed(0))
    radii = points.norm(dim=1)
    assert abs(radii.mean().item() - 2) < 0.01
    turns = torch.atan2(points[:, 1], points[:, 0]) / (math.pi / 4)
    assert (turns - turns.round()).abs().max() < 0.1
    assert set(turns.round().long().remainder(8).tolist()) == set(range(8))


@pytest.mark.parametrize("name", ["resnet20", "densenet100", "inception_v4"])
def test_options_are_checked(name: str) -> None:
    make = getattr(models, name)
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument classes; .*num_classes"):
        make(classes=10)
    with pytest.raises(ValueError, match=rf"{name}\(weights='DEFAULT'\).*load_state_dict"):
        make(weights="DEFAULT")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.CifarResNet(0), "at least one block, not 0"),
        (lambda: models.CifarDenseNet(layers=0), "at least one dense layer, not 0"),
        (lambda: models.densenet100(drop_rate=2.0), "probability from 0 to 1, not 2.0"),
        (lambda: models.UNet(width=0), "at least 1, not 0"),
    ],
)
def test_arguments_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
