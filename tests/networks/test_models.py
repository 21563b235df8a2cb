"""The networks of rotor.models: published names and shapes, stages, arguments, copies."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rotor.models as models
import torch
from rotor.models.densenet import DenseLayer
from rotor.models.inception import InceptionA, InceptionAux, InputScaling
from rotor.models.resnet import BasicBlock, Bottleneck
from torch import nn

# Number of parameters, and of the state's names and shapes the first digits of their SHA-256.
PUBLISHED = {
    "resnet18": (11_689_512, "84fb10d9c6905a1c"),
    "resnet34": (21_797_672, "28f9096d51307499"),
    "resnet50": (25_557_032, "d7e4f8bb0a536344"),
    "resnet101": (44_549_160, "02c0f34f4842751f"),
    "resnet152": (60_192_808, "685c66205bc823aa"),
    "resnext50_32x4d": (25_028_904, "e3bad165c034e60f"),
    "resnext101_32x8d": (88_791_336, "da7dd7525807e2ee"),
    "resnext101_64x4d": (83_455_272, "90caac80ae24c51d"),
    "wide_resnet50_2": (68_883_240, "41203d1d536c02ed"),
    "wide_resnet101_2": (126_886_696, "4f088c0a152b8f5c"),
    "vgg11": (132_863_336, "cb3dc23f2a13e182"),
    "vgg11_bn": (132_868_840, "8b6717e727c0ecf9"),
    "vgg13": (133_047_848, "67c1dc8b57fde74b"),
    "vgg13_bn": (133_053_736, "f6b0597d18a7e4d2"),
    "vgg16": (138_357_544, "35c4623e0cd4a39d"),
    "vgg16_bn": (138_365_992, "347371586a8ea365"),
    "vgg19": (143_667_240, "4723255af8f6c485"),
    "vgg19_bn": (143_678_248, "fc3ff6fab2b5cc09"),
    "densenet121": (7_978_856, "aa0fd9923b0003b8"),
    "densenet161": (28_681_000, "82d337d48f910d3a"),
    "densenet169": (14_149_480, "e2d0f02d9c0ce650"),
    "densenet201": (20_013_928, "0d234ad7e9a31b95"),
    "inception_v3": (27_161_264, "aab0ac2cbaf84aa2"),
}


class NarrowLinear(nn.Linear):
    """Keeps VGG's classifier, 120 million weights, small enough for a test."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(16 if in_features == 4096 else in_features, min(out_features, 16))


@pytest.fixture(scope="module")
def small() -> dict[str, nn.Sequential]:
    """One model of each family, to be copied, never changed."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn, "Linear", NarrowLinear)
        vgg = models.vgg11_bn(num_classes=5)
    return {
        "resnet": models.resnet18(num_classes=5),
        "bottleneck": models.ResNet(Bottleneck, [1, 1, 1, 1], num_classes=5),
        "vgg": vgg,
        "densenet": models.DenseNet(8, (2, 3), 16, num_classes=5),
        "inception": models.inception_v3(num_classes=5, init_weights=False),
    }


FAMILIES = ["resnet", "bottleneck", "vgg", "densenet", "inception"]


def stages_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Explore nested Sequentials as the chain engine does."""
    for name, child in model.named_children():
        if type(child).forward is nn.Sequential.forward:
            yield from stages_of(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def images(batch: int, side: int) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_number_of_parameters_names_and_shapes(name: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
    lines = [f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (count, digest[:16]) == PUBLISHED[name]
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("resnet18", BasicBlock, 8),
        ("resnet152", Bottleneck, 50),
        ("vgg16", nn.Conv2d, 13),
        ("densenet121", DenseLayer, 58),
        ("inception_v3", InceptionA, 3),
        ("inception_v3", InceptionAux, 1),
    ],
)
def test_each_block_is_one_stage(name: str, kind: type[nn.Module], count: int) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
    assert sum(isinstance(stage, kind) for _, stage in stages_of(model)) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_every_parameter_a_gradient(
    small: dict[str, nn.Sequential], family: str
) -> None:
    model = copy.deepcopy(small[family]).train()
    x = images(2, 299 if family == "inception" else 64).requires_grad_()
    outputs = model(x)
    if family == "inception":
        assert type(outputs) is models.InceptionOutputs
        assert outputs.aux_logits.shape == (2, 5)
        loss = outputs.logits.square().sum() + outputs.aux_logits.square().sum()
    else:
        loss = outputs.square().sum()
    assert (outputs[0] if family == "inception" else outputs).shape == (2, 5)
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_only_inplace_layers_change_their_input(
    small: dict[str, nn.Sequential], family: str
) -> None:
    model = copy.deepcopy(small[family]).train()
    changing = []
    x: Any = images(2, 299 if family == "inception" else 64)
    with torch.no_grad():
        for name, stage in stages_of(model):
            tensors = x if isinstance(x, tuple) else (x,)
            before = [tensor._version for tensor in tensors]
            x = stage(x)
            if [tensor._version for tensor in tensors] != before:
                changing.append((name, stage))
    assert all(isinstance(stage, nn.ReLU) and stage.inplace for _, stage in changing)
    assert (
        len(changing)
        == {"resnet": 1, "bottleneck": 1, "vgg": 10, "densenet": 3, "inception": 0}[family]
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_compute_the_same(small: dict[str, nn.Sequential], family: str, how: str) -> None:
    model = small[family]
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert list(other.state_dict()) == list(model.state_dict())
    assert not {p.data_ptr() for p in other.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }
    x = images(1, 75)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), copy.deepcopy(model).eval()(x))
    assert [type(stage) for stage in other] == [type(stage) for stage in model]


def test_slices_are_plain_sequentials_that_share_stages(small: dict[str, nn.Sequential]) -> None:
    model = small["resnet"]
    head, tail = model[:4], model[4:]
    assert type(head) is type(tail) is nn.Sequential
    assert [*head.state_dict(), *tail.state_dict()] == list(model.state_dict())
    assert head[0] is model[0] is model.get_submodule("conv1")
    assert model[-1] is model.get_submodule("fc")


@pytest.mark.parametrize("name", ["resnet50", "vgg11", "densenet121", "inception_v3"])
@pytest.mark.parametrize(
    "options",
    [{"weights": "DEFAULT"}, {"weights": "https://example.org/model.pth"}, {"pretrained": True}],
)
def test_weights_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name}\({next(iter(options))}=.*load_state_dict"):
        getattr(models, name)(**options)


@pytest.mark.parametrize("name", ["resnet50", "vgg11", "densenet121", "inception_v3"])
def test_unknown_arguments_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument classes; .*num_classes"):
        getattr(models, name)(classes=10)


@pytest.mark.parametrize(
    ("constructor", "options", "structure"),
    [
        (models.ResNet, models.resnet.ResNetOptions, {"block", "layers"}),
        (models.VGG, models.vgg.VGGOptions, {"features"}),
        (models.DenseNet, models.densenet.DenseNetOptions, set()),
        (models.Inception3, models.inception.InceptionOptions, set()),
    ],
)
def test_functions_take_what_the_class_takes(
    constructor: type, options: type, structure: set[str]
) -> None:
    taken = set(inspect.signature(constructor).parameters)
    assert taken - structure == options.__annotations__.keys() - {"weights"}


def test_no_weights_is_accepted() -> None:
    with torch.device("meta"):
        assert models.resnet18(weights=None)[-1].out_features == 1000


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnext50_32x4d", {"groups": 16}),
        ("wide_resnet50_2", {"width_per_group": 64}),
        ("densenet121", {"growth_rate": 12}),
    ],
)
def test_a_size_cannot_be_contradicted(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name}\(\) has {next(iter(options))}=.*the class"):
        getattr(models, name)(**options)


def test_a_size_can_be_repeated() -> None:
    with torch.device("meta"):
        model = models.resnext50_32x4d(groups=32, num_classes=3)
    assert model[-1].out_features == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.resnet18(groups=2), "BasicBlock is defined for groups=1"),
        (lambda: models.resnet18(replace_stride_with_dilation=(True, False, False)), "dilation=1"),
        (
            lambda: models.resnet50(replace_stride_with_dilation=(True, False)),
            "each of the last three groups",
        ),
        (lambda: models.ResNet(BasicBlock, [1, 1, 1]), "four groups"),
        (lambda: models.densenet121(drop_rate=1.5), "probability from 0 to 1, not 1.5"),
        (lambda: models.inception_v3(inception_blocks=[InceptionA]), "seven callables"),
        (lambda: models.vgg11(dropout=2.0), "dropout probability"),
    ],
)
def test_arguments_that_make_no_sense(make: Any, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        make()


def test_resnet_zero_init_residual() -> None:
    model = models.ResNet(Bottleneck, [1, 1, 1, 1], zero_init_residual=True)
    for name, parameter in model.named_parameters():
        if "bn" in name and name.endswith("weight"):
            assert parameter.unique().tolist() == [0.0 if "bn3" in name else 1.0]


def test_resnet_dilation_keeps_the_image_and_the_parameters() -> None:
    with torch.device("meta"):
        plain = models.resnet50()
        dilated = models.resnet50(replace_stride_with_dilation=(False, True, True))
        x = torch.empty(1, 3, 64, 64)
        assert plain[:8](x).shape == (1, 2048, 2, 2)
        assert dilated[:8](x).shape == (1, 2048, 8, 8)
    assert list(plain.state_dict()) == list(dilated.state_dict())


def test_resnet_norm_layer() -> None:
    with torch.device("meta"):
        model = models.resnet18(norm_layer=partial(nn.GroupNorm, 4))
    kinds = {type(module) for module in model.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds


def test_vgg_without_initial_weights_has_pytorchs() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn, "Linear", NarrowLinear)
        ours = models.vgg11(num_classes=5)
        plain = models.vgg11(num_classes=5, init_weights=False)
    name = "features.0.bias"
    assert ours.get_parameter(name).count_nonzero() == 0
    assert plain.get_parameter(name).count_nonzero() == 64


def test_densenet_memory_efficient_changes_no_result_and_updates_buffers_once() -> None:
    torch.manual_seed(0)
    plain = models.DenseNet(8, (2, 3), 16, num_classes=5)
    efficient = models.DenseNet(8, (2, 3), 16, num_classes=5, memory_efficient=True)
    efficient.load_state_dict(plain.state_dict())
    x = images(2, 32)
    outputs = [model.train()(x) for model in (plain, efficient)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    for ours, theirs in zip(plain.parameters(), efficient.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for (name, ours), theirs in zip(plain.named_buffers(), efficient.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_densenet_memory_efficient_keeps_less() -> None:
    kept = []
    for memory_efficient in (False, True):
        torch.manual_seed(0)
        layer = DenseLayer(16, 8, 4, 0.0, memory_efficient)
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = storages) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(2, 16, 16, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(x)
        kept.append(sum(storages.values()))
        assert output.shape == (2, 24, 16, 16)
    assert kept[1] < kept[0]


def test_densenet_reads_older_names() -> None:
    torch.manual_seed(0)
    model = models.DenseNet(8, (2, 3), 16, num_classes=5)
    older = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if len(parts) == 5 and parts[3] in ("norm1", "norm2", "conv1", "conv2"):
            parts[3] = f"{parts[3][:-1]}.{parts[3][-1]}"
        older[".".join(parts)] = tensor
    assert "features.denseblock2.denselayer3.conv.2.weight" in older
    other = models.DenseNet(8, (2, 3), 16, num_classes=5)
    other.load_state_dict(older, strict=True)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_densenet_still_refuses_wrong_names() -> None:
    model = models.DenseNet(8, (2, 3), 16, num_classes=5)
    state = model.state_dict()
    state["features.denseblock1.denselayer1.norm.3.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"norm\.3\.weight"):
        model.load_state_dict(state)


def test_inception_without_aux_has_no_pairs() -> None:
    with torch.device("meta"):
        model = models.inception_v3(aux_logits=False, num_classes=5).train()
        assert model(torch.empty(2, 3, 75, 75)).shape == (2, 5)
    assert not any(name.startswith("AuxLogits") for name in model.state_dict())
    assert type(model[-1]) is nn.Linear


def test_inception_trains_without_aux_after_it_is_deleted(small: dict[str, nn.Sequential]) -> None:
    model = copy.deepcopy(small["inception"])
    del model.AuxLogits
    assert model.train()(images(2, 75)).shape == (2, 5)


def test_inception_aux_is_the_aux_branch(small: dict[str, nn.Sequential]) -> None:
    model = copy.deepcopy(small["inception"]).train()
    names = [name for name, _ in model.named_children()]
    split = names.index("AuxLogits")
    x = images(2, 299)
    with torch.no_grad():
        middle = model[:split](x)
        passed, aux = model[split](middle)
        assert passed is middle
        torch.manual_seed(0)
        outputs = model[split + 1 :]((middle, aux))
        torch.manual_seed(0)
        alone = model[split + 1 :](middle)
    assert outputs.aux_logits is aux
    assert torch.equal(outputs.logits, alone)


def test_inception_input_scaling() -> None:
    x = images(2, 4)
    scaled = InputScaling()(x)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    assert torch.allclose(scaled, ((x * deviation + mean) - 0.5) / 0.5, atol=1e-6)
    with torch.device("meta"):
        names = [name for name, _ in models.inception_v3(transform_input=True).named_children()]
    assert names[0] == "input_scaling"


def test_inception_initial_weights() -> None:
    torch.manual_seed(0)
    aux = models.inception_v3(num_classes=5).get_submodule("AuxLogits")
    assert aux.fc.weight.std().item() == pytest.approx(0.001, rel=0.1)
    assert aux.conv1.conv.weight.std().item() == pytest.approx(0.1, rel=0.1)


def test_models_need_no_torchvision() -> None:
    sources = [path.read_text() for path in Path(models.__path__[0]).glob("*.py")]
    assert len(sources) >= 7
    assert not any(
        f"{word} torchvision" in source for word in ("import", "from") for source in sources
    )
