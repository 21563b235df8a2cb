"""The models against torchvision's: names, shapes, initial values, results, gradients, buffers."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import rotor.models as models
import torch
from torch import Tensor, nn
from torchvision_standins import import_torchvision_models

reference = import_torchvision_models()

RESNETS = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
VGGS = [f"vgg{depth}{suffix}" for depth in (11, 13, 16, 19) for suffix in ("", "_bn")]
DENSENETS = [f"densenet{depth}" for depth in (121, 161, 169, 201)]

GROUP_NORM = partial(nn.GroupNorm, 8)

NAMED = [(name, {}) for name in [*RESNETS, *VGGS, *DENSENETS, "inception_v3"]] + [
    ("resnet18", {"num_classes": 7, "norm_layer": GROUP_NORM}),
    ("resnet50", {"replace_stride_with_dilation": [False, True, True]}),
    ("resnet50", {"groups": 2, "width_per_group": 32}),
    ("vgg13_bn", {"num_classes": 7, "dropout": 0.1}),
    ("densenet121", {"num_classes": 7, "bn_size": 2, "drop_rate": 0.1}),
    ("densenet169", {"memory_efficient": True}),
    ("inception_v3", {"num_classes": 7, "aux_logits": False, "transform_input": True}),
    ("inception_v3", {"num_classes": 7, "transform_input": True}),
]


def pair(name: str, options: dict[str, Any]) -> tuple[nn.Sequential, nn.Module]:
    """Build ours and theirs, each from the same seed."""
    theirs_only = {"init_weights": True} if name == "inception_v3" else {}
    torch.manual_seed(0)
    ours = getattr(models, name)(**options)
    torch.manual_seed(0)
    theirs = getattr(reference, name)(**{**theirs_only, **options})
    return ours, theirs


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def training_step(model: nn.Module, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the outputs and the input's gradient of one seeded step."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    outputs = model.train()(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((index + 1) * output.square().mean() for index, output in enumerate(outputs)).backward()
    assert x.grad is not None
    return outputs, x.grad


def assert_same_behaviour(
    ours: nn.Module, theirs: nn.Module, x: Tensor, buffers: bool = True
) -> None:
    """One training step and one evaluation, bit for bit."""
    our_outputs, our_grad = training_step(ours, x)
    their_outputs, their_grad = training_step(theirs, x)
    assert len(our_outputs) == len(their_outputs)
    assert all(map(torch.equal, our_outputs, their_outputs))
    assert all(output.isfinite().all() for output in our_outputs)
    assert torch.equal(our_grad, their_grad)
    assert_same_tensors(gradients(ours), gradients(theirs))
    assert len(gradients(ours)) == len(list(ours.parameters()))
    if buffers:
        assert_same_tensors(dict(ours.named_buffers()), dict(theirs.named_buffers()))
        with torch.no_grad():
            assert torch.equal(ours.eval()(x), theirs.eval()(x))


def image(batch: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 3, side, side, generator=generator)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (models.ResNet, reference.ResNet),
        (models.VGG, reference.VGG),
        (models.DenseNet, reference.DenseNet),
        (models.Inception3, reference.Inception3),
        *(
            (getattr(models.resnet, name), getattr(reference.resnet, name))
            for name in ("BasicBlock", "Bottleneck")
        ),
        *(
            (getattr(models.inception, name), getattr(reference.inception, name))
            for name in ["BasicConv2d", *(f"Inception{kind}" for kind in "ABCDE"), "InceptionAux"]
        ),
    ],
)
def test_same_constructor_arguments(ours: type, theirs: type) -> None:
    parameters = [inspect.signature(kind).parameters.values() for kind in (ours, theirs)]
    assert [(p.name, p.kind, p.default) for p in parameters[0]] == [
        (p.name, p.kind, p.default) for p in parameters[1]
    ]


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_state_has_the_same_names_shapes_and_order(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        ours, theirs = pair(name, options)
    our_state, their_state = ours.state_dict(), theirs.state_dict()
    assert [(key, value.shape, value.dtype) for key, value in our_state.items()] == [
        (key, value.shape, value.dtype) for key, value in their_state.items()
    ]
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("resnet18", {}, 64),
        ("resnet18", {"zero_init_residual": True, "num_classes": 5}, 33),
        ("resnet18", {"norm_layer": GROUP_NORM}, 33),
        ("resnet50", {"num_classes": 5, "zero_init_residual": True}, 64),
        ("resnet50", {"replace_stride_with_dilation": (False, True, True)}, 48),
        ("resnext50_32x4d", {"num_classes": 5}, 48),
        ("densenet121", {"num_classes": 5}, 64),
        ("densenet121", {"drop_rate": 0.2, "bn_size": 2}, 64),
        ("inception_v3", {"aux_logits": False, "num_classes": 5, "dropout": 0.3}, 107),
        ("inception_v3", {"num_classes": 5, "transform_input": True}, 299),
    ],
)
def test_same_initial_values_and_results(name: str, options: dict[str, Any], side: int) -> None:
    ours, theirs = pair(name, options)
    assert_same_tensors(ours.state_dict(), theirs.state_dict())
    assert_same_behaviour(ours, theirs, image(2, side))


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "inception_v3"])
def test_weights_load_strictly_both_ways(name: str) -> None:
    ours, theirs = pair(name, {"num_classes": 5})
    for model, other in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.copy_(torch.randint(1, 9, tensor.shape))
        model.load_state_dict(other.state_dict(), strict=True)
        assert_same_tensors(dict(model.state_dict()), dict(other.state_dict()))


class NarrowLinear(nn.Linear):
    """Keeps VGG's classifier, 120 million weights, small enough for a test."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(16 if in_features == 4096 else in_features, min(out_features, 16))


@pytest.mark.parametrize("name", ["vgg11", "vgg13_bn"])
def test_vgg_same_initial_values_and_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "Linear", NarrowLinear)
    ours, theirs = pair(name, {"num_classes": 5, "dropout": 0.25})
    assert_same_tensors(ours.state_dict(), theirs.state_dict())
    assert_same_behaviour(ours, theirs, image(2, 32))


def test_densenet_memory_efficient_same_gradients() -> None:
    options = {"num_classes": 5, "memory_efficient": True}
    ours, theirs = pair("densenet121", options)
    assert_same_behaviour(ours, theirs, image(2, 64), buffers=False)


def test_densenet_reads_the_names_of_published_files() -> None:
    _, theirs = pair("densenet121", {"num_classes": 5})
    published = {
        _older_name(name): tensor
        for name, tensor in theirs.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in published
    before = list(published)
    torch.manual_seed(3)
    ours = models.densenet121(num_classes=5)
    ours.load_state_dict(published, strict=True)
    assert list(published) == before
    assert_same_tensors(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def _older_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 5 and parts[3][:-1] in ("norm", "conv"):
        parts[3] = f"{parts[3][:-1]}.{parts[3][-1]}"
    return ".".join(parts)


def test_inception_takes_blocks_of_others() -> None:
    theirs = reference.inception
    blocks = [
        theirs.BasicConv2d,
        theirs.InceptionA,
        theirs.InceptionB,
        theirs.InceptionC,
        theirs.InceptionD,
        theirs.InceptionE,
        theirs.InceptionAux,
    ]
    ours, theirs = pair("inception_v3", {"num_classes": 5, "inception_blocks": blocks})
    assert_same_tensors(ours.state_dict(), theirs.state_dict())
    again = copy.deepcopy(ours)
    with torch.no_grad():
        our_outputs = ours.train()(image(2, 299))
    with torch.no_grad():
        outputs = again.train()(image(2, 299))
    assert len(outputs) == 2
    assert outputs.logits.shape == outputs.aux_logits.shape == (2, 5)
    assert torch.equal(outputs.aux_logits, our_outputs.aux_logits)
