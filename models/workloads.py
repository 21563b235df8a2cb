"""Workloads of the experiments by name: a network, its loss, its optimizer, synthetic data.

    training = build("treelstm", batch_size=8, depth=5)
    loss = float(training.step(training.make_batch(seed=0)))

By default everything is small: a step takes less than a second on one core. The sizes of the
published experiments are in `published`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from . import cifar, densenet, inception, inceptionv4, resnet
from .gan import Discriminator, Generator
from .gpt import GPT, GPTSettings
from .recurrent import GRU, LSTM, GRUEncoder, LSTMEncoder
from .tasks import (
    GANTraining,
    GPTTraining,
    ImageTraining,
    NextTokenTraining,
    Params,
    RelatednessTraining,
    SegmentationTraining,
    SequenceTraining,
    Training,
    TreeTraining,
    Value,
    WordTraining,
)
from .transformer import LayeredTransformer, Transformer
from .treelstm import BinaryCell, ChildSumCell, Relatedness, TreeLSTM
from .unet import UNet

__all__ = [
    "Training",
    "accepted",
    "build",
    "from_published",
    "meaning",
    "names",
    "parameters",
    "published",
]


@dataclass(frozen=True, kw_only=True)
class _Workload:
    """Recipe of a workload.

    Attributes
    ----------
    training
        Its kind of data, loss and optimizer.
    make
        Builds the networks from all parameters.
    small, published
        The parameters: by default, and of the published experiments if they differ.
    least
        The smallest values of integers, if not 1.
    spellings
        Other names of parameters, which the published configurations have.
    configured
        Names in the published configurations that mean other parameters than here.
    """

    training: type[Training]
    make: Callable[[Params], list[nn.Module]]
    small: Mapping[str, Value]
    published: Mapping[str, Value]
    least: Mapping[str, int] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    configured: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """Return all workloads."""
    return list(_WORKLOADS)


def parameters(name: str) -> dict[str, Value]:
    """Return the parameters of a workload and their defaults, ``batch_size`` among them.

    Parameters
    ----------
    name
        One of `names`.

    Returns
    -------
    dict
        Defaults by name.

    Raises
    ------
    ValueError
        The workload is unknown.
    """
    return dict(_find(name).small)


def published(name: str) -> dict[str, Value]:
    """Return the parameters of the published experiments, as keywords of `build`.

    Parameters
    ----------
    name
        One of `names`.

    Returns
    -------
    dict
        Values by name.

    Raises
    ------
    ValueError
        The workload is unknown.

    Notes
    -----
    Batch sizes and shapes are those of Kirisame et al., "Dynamic tensor rematerialization" (ICLR
    2021), and of its configurations. Unspecified values are the usual ones: 32 inputs a step,
    widths and depths of the network's own paper, 33278 words as in WikiText-2. ``gpt`` is not among
    the published; its sizes are GPT-2's.
    """
    workload = _find(name)
    return {**workload.small, **workload.published}


def accepted(name: str) -> list[str]:
    """Return the names that `from_published` takes for a workload, all spellings included.

    Parameters
    ----------
    name
        One of `names`.

    Returns
    -------
    list of str
        The names.

    Raises
    ------
    ValueError
        The workload is unknown.
    """
    workload = _find(name)
    return list(dict.fromkeys([*workload.small, *workload.configured, *workload.spellings]))


def meaning(name: str, given: Mapping[str, Value]) -> dict[str, str]:
    """Return the parameters of `build` for names in a published configuration.

    Parameters
    ----------
    name
        One of `names`.
    given
        Parameters as the configuration has them.

    Returns
    -------
    dict
        Parameters by name, for names that mean another one. ``batch_size`` of ``lstm`` and ``gru``
        is the length of their sequences and ``input_size`` the examples of a step; ``batch_size``
        of ``treelstm`` is the depth of its trees, unless that is given as ``depth`` or ``dep``.

    Raises
    ------
    ValueError
        The workload is unknown.
    """
    workload = _find(name)
    own = {workload.spellings.get(key, key) for key in given}
    named = workload.configured.get("batch_size") in own - {"batch_size", "input_size"}
    return {} if named and "input_size" not in own else dict(workload.configured)


def from_published(
    name: str, given: Mapping[str, Value], *, small: bool = False
) -> dict[str, Value]:
    """Return parameters for `build` from those of a published configuration.

    Parameters
    ----------
    name
        One of `names`.
    given
        Parameters as the configuration has them; `meaning` says which have other names here.
    small
        Take the other parameters from `parameters` instead of from `published`.

    Returns
    -------
    dict
        All parameters.

    Raises
    ------
    ValueError
        The workload is unknown, or one parameter is given twice.

    Examples
    --------
    >>> found = from_published("treelstm", {"batch_size": 9, "input_size": 640})
    >>> found["depth"], found["batch_size"]
    (9, 640)
    """
    workload = _find(name)
    names = meaning(name, given)
    found: dict[str, Value] = {}
    for key, value in given.items():
        parameter = names.get(key, workload.spellings.get(key, key))
        if parameter in found:
            raise ValueError(
                f"{name} is given its {parameter} twice, once as {key}: in published "
                f"configurations {_sentence(workload.configured)}; give one of them"
            )
        found[parameter] = value
    return (parameters(name) if small else published(name)) | found


def _sentence(names: Mapping[str, str]) -> str:
    return " and ".join(f"{key} means {value}" for key, value in names.items())


def build(
    name: str,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **params: Value,
) -> Training:
    """Build a workload: its networks with weights drawn from `seed`, and its optimizers.

    Parameters
    ----------
    name
        One of `names`.
    batch_size
        Inputs of a step; the workload's default if None.
    seed
        Seed of the weights. PyTorch's generators are unchanged; dropout draws from them, so seed
        them with ``torch.manual_seed`` before a step that has to be repeated.
    device
        Device of networks and batches.
    **params
        Any of `parameters`, in its type.

    Returns
    -------
    Training
        Object that makes batches and runs steps.

    Raises
    ------
    ValueError
        The workload or a parameter is unknown, or a value has another type or is too small.
    """
    workload = _find(name)
    given = dict(params)
    if batch_size is not None:
        given["batch_size"] = batch_size
    resolved = _resolve(name, workload, given)
    return workload.training(
        name, resolved, published(name), workload.make, seed=seed, device=torch.device(device)
    )


def _find(name: str) -> _Workload:
    if name not in _WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]


def _resolve(name: str, workload: _Workload, given: Mapping[str, Value]) -> dict[str, Value]:
    resolved = dict(workload.small)
    taken: set[str] = set()
    for key, value in given.items():
        parameter = workload.spellings.get(key, key)
        if parameter not in resolved:
            raise ValueError(f"{name} has no parameter {key!r}; it has {', '.join(workload.small)}")
        if parameter in taken:
            raise ValueError(f"{key} and {parameter} are the same parameter of {name}; give one")
        taken.add(parameter)
        resolved[parameter] = _checked(name, workload, parameter, value)
    return resolved


def _checked(name: str, workload: _Workload, parameter: str, value: Value) -> Value:
    default = workload.small[parameter]
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            kind = "true or false" if isinstance(default, bool) else "a word"
            raise ValueError(f"{parameter} of {name} is {kind}, as {default!r}, not {value!r}")
        return value
    if isinstance(default, float):
        if isinstance(value, bool | str) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{parameter} of {name} is a number from 0, not {value!r}")
        return float(value)
    least = workload.least.get(parameter, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{parameter} of {name} is an integer, at least {least}, not {value!r}")
    return value


def _images(
    make: Callable[..., nn.Module],
    small: tuple[int, int],
    full: tuple[int, int],
    *,
    least: int,
    classes: tuple[int, int],
    **options: Value,
) -> _Workload:
    """Classify images; pairs are (batch size, side) and (classes by default, published)."""

    def sizes(batch_size: int, side: int, classes: int) -> dict[str, Value]:
        return {"batch_size": batch_size, "height": side, "width": side, "classes": classes}

    def networks(p: Params) -> list[nn.Module]:
        chosen = {key: p[key] for key in options}
        return [make(num_classes=p["classes"], **chosen)]

    return _Workload(
        training=ImageTraining,
        make=networks,
        small={**sizes(*small, classes[0]), **options},
        published=sizes(*full, classes[1]),
        least={"height": least, "width": least},
    )


def _cifar(make: Callable[..., nn.Module], full: tuple[int, int] = (32, 32)) -> _Workload:
    return _images(make, (2, 16), full, least=8, classes=(10, 10))


def _imagenet(make: Callable[..., nn.Module], batch_size: int = 32) -> _Workload:
    return _images(make, (2, 64), (batch_size, 224), least=32, classes=(10, 1000))


def _sequences(cell: type[LSTM | GRU], full: Mapping[str, Value]) -> _Workload:
    return _Workload(
        training=SequenceTraining,
        make=lambda p: [cell(p["in_dim"], p["mem_dim"], p["classes"])],
        small={"batch_size": 4, "input_size": 20, "in_dim": 10, "mem_dim": 32, "classes": 10},
        published=full,
        configured={"batch_size": "input_size", "input_size": "batch_size"},
    )


def _words(encoder: type[LSTMEncoder | GRUEncoder]) -> _Workload:
    def networks(p: Params) -> list[nn.Module]:
        sizes = (p["vocab_size"], p["in_dim"], p["mem_dim"])
        return [encoder(*sizes, layers=p["layers"], dropout=p["dropout"])]

    return _Workload(
        training=WordTraining,
        make=networks,
        small={
            "batch_size": 4,
            "input_size": 16,
            "vocab_size": 200,
            "in_dim": 32,
            "mem_dim": 32,
            "layers": 2,
            "dropout": 0.2,
        },
        published={
            "batch_size": 32,
            "input_size": 35,
            "vocab_size": 33278,
            "in_dim": 200,
            "mem_dim": 200,
        },
    )


def _tokens(make: type[Transformer | LayeredTransformer]) -> _Workload:
    def networks(p: Params) -> list[nn.Module]:
        sizes = {key: p[key] for key in ("vocab_size", "width", "heads", "hidden", "layers")}
        return [make(**sizes, longest=p["input_seq_length"], dropout=p["dropout"])]

    return _Workload(
        training=NextTokenTraining,
        make=networks,
        small={
            "batch_size": 2,
            "input_seq_length": 32,
            "vocab_size": 200,
            "width": 32,
            "heads": 4,
            "hidden": 64,
            "layers": 2,
            "dropout": 0.1,
        },
        published={
            "batch_size": 10,
            "input_seq_length": 512,
            "vocab_size": 33278,
            "width": 512,
            "heads": 8,
            "hidden": 2048,
            "layers": 6,
        },
    )


def _gpt(p: Params) -> list[nn.Module]:
    sizes = {key: p[key] for key in ("vocab_size", "width", "heads", "layers", "dropout")}
    return [GPT(GPTSettings(context_length=p["input_seq_length"], **sizes))]


def _unet(p: Params) -> list[nn.Module]:
    return [UNet(width=p["channels"], upsampling=p["upsampling"], batch_norm=p["batch_norm"])]


def _treelstm(p: Params) -> list[nn.Module]:
    cells: dict[str, type[BinaryCell | ChildSumCell]] = {
        "binary": BinaryCell,
        "childsum": ChildSumCell,
    }
    if p["cell"] not in cells:
        raise ValueError(f"cell of treelstm is {' or '.join(cells)}, not {p['cell']!r}")
    return [TreeLSTM(cells[p["cell"]](p["in_dim"], p["mem_dim"]), p["classes"])]


def _relatedness(p: Params) -> list[nn.Module]:
    return [Relatedness(p["vocab_size"], p["in_dim"], p["mem_dim"], p["hidden_dim"])]


def _adversaries(p: Params) -> list[nn.Module]:
    return [Generator(p["g_inp"], p["g_hid"]), Discriminator(p["d_hid"])]


_LSTM_SIZES = {"batch_size": 512, "input_size": 256, "in_dim": 512, "mem_dim": 1700}
_GRU_SIZES = {"batch_size": 100, "input_size": 32, "in_dim": 10, "mem_dim": 300}

_WORKLOADS: Mapping[str, _Workload] = MappingProxyType(
    {
        "resnet20": _cifar(cifar.resnet20),
        "resnet32": _cifar(cifar.resnet32, (56, 224)),
        "resnet44": _cifar(cifar.resnet44),
        "resnet56": _cifar(cifar.resnet56),
        "resnet110": _cifar(cifar.resnet110),
        "resnet1202": _images(cifar.resnet1202, (1, 8), (64, 32), least=8, classes=(10, 10)),
        "densenet100": _cifar(cifar.densenet100),
        "tv_resnet18": _imagenet(resnet.resnet18),
        "tv_resnet34": _imagenet(resnet.resnet34),
        "tv_resnet50": _imagenet(resnet.resnet50),
        "tv_resnet101": _imagenet(resnet.resnet101),
        "tv_resnet152": _imagenet(resnet.resnet152),
        "tv_densenet121": _imagenet(densenet.densenet121, 84),
        "tv_densenet161": _imagenet(densenet.densenet161),
        "tv_densenet169": _imagenet(densenet.densenet169),
        "tv_densenet201": _imagenet(densenet.densenet201),
        "inceptionv3": _images(
            inception.inception_v3,
            (2, 75),
            (32, 299),
            least=75,
            classes=(10, 1000),
            aux_logits=False,
        ),
        "inceptionv4": _images(
            inceptionv4.inception_v4, (2, 75), (64, 299), least=75, classes=(10, 1000)
        ),
        "unet": _Workload(
            training=SegmentationTraining,
            make=_unet,
            small={
                "batch_size": 1,
                "height": 32,
                "width": 32,
                "channels": 8,
                "upsampling": "bilinear",
                "batch_norm": True,
            },
            published={"batch_size": 6, "height": 608, "width": 416, "channels": 64},
            least={"height": 32, "width": 32},
        ),
        "unroll_gan": _Workload(
            training=GANTraining,
            make=_adversaries,
            small={
                "batch_size": 32,
                "g_inp": 16,
                "g_hid": 32,
                "d_hid": 32,
                "unrolled_steps": 5,
                "unrolled_lr": 0.1,
            },
            published={
                "batch_size": 512,
                "g_inp": 4096,
                "g_hid": 2048,
                "d_hid": 2048,
                "unrolled_steps": 60,
            },
            least={"unrolled_steps": 0},
        ),
        "lstm": _sequences(LSTM, _LSTM_SIZES),
        "gru": _sequences(GRU, _GRU_SIZES),
        "lstm_encoder": _words(LSTMEncoder),
        "gru_encoder": _words(GRUEncoder),
        "treelstm": _Workload(
            training=TreeTraining,
            make=_treelstm,
            small={
                "batch_size": 4,
                "depth": 4,
                "in_dim": 10,
                "mem_dim": 32,
                "classes": 5,
                "cell": "binary",
            },
            published={
                "batch_size": 640,
                "depth": 9,
                "in_dim": 100,
                "mem_dim": 300,
                "cell": "childsum",
            },
            spellings={"dep": "depth"},
            configured={"batch_size": "depth", "input_size": "batch_size"},
        ),
        "treelstm_old": _Workload(
            training=RelatednessTraining,
            make=_relatedness,
            small={
                "batch_size": 2,
                "words": 12,
                "vocab_size": 100,
                "in_dim": 16,
                "mem_dim": 32,
                "hidden_dim": 16,
            },
            published={
                "batch_size": 32,
                "words": 20,
                "vocab_size": 2400,
                "in_dim": 300,
                "mem_dim": 150,
                "hidden_dim": 50,
            },
        ),
        "transformer": _tokens(Transformer),
        "transformer_encoder": _tokens(LayeredTransformer),
        "gpt": _Workload(
            training=GPTTraining,
            make=_gpt,
            small={
                "batch_size": 2,
                "input_seq_length": 32,
                "vocab_size": 256,
                "width": 64,
                "heads": 4,
                "layers": 2,
                "dropout": 0.1,
            },
            published={
                "batch_size": 8,
                "input_seq_length": 1024,
                "vocab_size": 50257,
                "width": 768,
                "heads": 12,
                "layers": 12,
            },
        ),
    }
)
