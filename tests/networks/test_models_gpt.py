"""The GPT of rotor.models."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import rotor.models as models
import torch
from rotor.models.gpt import GPT, SIZES, CausalSelfAttention, GPTSettings, gpt
from rotor.models.utils import Residual
from torch import Tensor, nn

SMALL = GPTSettings(vocab_size=17, context_length=9, layers=2, heads=2, width=8)


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(17, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_published_number_of_parameters(function: str, count: int) -> None:
    with torch.device("meta"):
        model = getattr(models, function)()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_stages() -> None:
    model = GPT(SMALL)
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward
    assert [name for name, _ in model.named_children()] == ["embed", "blocks", "norm", "head"]
    for block in model.get_submodule("blocks"):
        assert type(block) is nn.Sequential
        assert [type(half) for half in block] == [Residual, Residual]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"tie_weights": False}])
def test_a_step_gives_every_parameter_a_gradient(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = gpt(SMALL, **options).train()
    logits = model(tokens(3, 9))
    assert logits.shape == (3, 9, 17)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens(3, 9).flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    names = [name for name, _ in model.named_parameters()]
    assert any(name.endswith("bias") for name in names) == options.get("bias", True)


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    first = tokens(1, 9)
    second = first.clone()
    second[0, 5] = (second[0, 5] + 1) % 17
    with torch.no_grad():
        one, other = model(first), model(second)
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = CausalSelfAttention(SMALL).eval().double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    query, key, value = attention.qkv(x).split(8, dim=2)
    expected = torch.empty_like(x)
    for head in (slice(0, 4), slice(4, 8)):
        scores = query[..., head] @ key[..., head].mT / math.sqrt(4)
        scores += torch.full((5, 5), -math.inf).triu(1)
        expected[..., head] = scores.softmax(-1) @ value[..., head]
    assert torch.allclose(attention(x), attention.project(expected), atol=1e-12)


def test_dropout_in_training_only() -> None:
    torch.manual_seed(0)
    model = gpt(SMALL, dropout=0.5)
    x = tokens(2, 9)
    with torch.no_grad():
        outputs = [model.train()(x) for _ in range(2)]
        assert not torch.equal(*outputs)
        assert torch.equal(model.eval()(x), model.eval()(x))
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(model.train()(x))
    assert torch.equal(*outputs)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = gpt("tiny")
    block = model.get_submodule("blocks.0")
    assert model[0].token.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block[0].body.attend.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for last in (block[0].body.attend.project, block[1].body.project):
        assert last.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        assert last.bias.count_nonzero() == 0


def test_tied_weights_stay_tied_in_copies() -> None:
    model = GPT(SMALL)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double()):
        assert one.get_parameter("head.weight") is one.get_parameter("embed.token.weight")
    untied = gpt(SMALL, tie_weights=False)
    assert untied.get_parameter("head.weight") is not untied.get_parameter("embed.token.weight")


def test_sizes_and_changes() -> None:
    assert gpt("tiny", layers=1).settings == dataclasses.replace(SIZES["tiny"], layers=1)
    with torch.device("meta"):
        assert models.gpt2(layers=1).settings.width == 768
        assert gpt("mini").settings == SIZES["mini"]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (("huge",), {}, ValueError, "no GPT of size 'huge'; there are tiny, mini, gpt2"),
        ((SMALL,), {"depth": 3}, TypeError, r"no setting depth; it has vocab_size"),
        ((SMALL,), {"heads": 3}, ValueError, "width=8 cannot be divided among heads=3"),
        ((SMALL,), {"layers": 0}, ValueError, "layers is a positive integer, not 0"),
        ((SMALL,), {"width": 8.0}, ValueError, "width is a positive integer, not 8.0"),
        ((SMALL,), {"dropout": 1.0}, ValueError, "from 0 to below 1, not 1.0"),
    ],
)
def test_errors(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        gpt(*arguments, **options)


def test_too_many_tokens() -> None:
    with pytest.raises(ValueError, match="10 tokens, but the model has context_length=9"):
        GPT(SMALL)(tokens(1, 10))
