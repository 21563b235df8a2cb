"""The models of the benchmarks: sized so that activations outweigh parameters, as in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Batch, classification_batch, token_batch
from torch import nn

import rotor


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.device], Batch]


def _images(batch: int, size: int) -> Callable[[torch.device], Batch]:
    return lambda device: classification_batch(batch, size, device)


def cases(device: torch.device) -> list[Case]:
    """ResNet-18 and 50, VGG-11, DenseNet-121 and a GPT of 12 layers."""
    gpu = device.type == "cuda"
    length = 1024 if gpu else 256
    gpt = rotor.gpt.gpt("gpt2" if gpu else "mini", dropout=0.0)
    vocabulary = gpt[-1].out_features
    return [
        Case("ResNet-18", rotor.resnet.resnet18, _images(64 if gpu else 8, 224)),
        Case("ResNet-50", rotor.resnet.resnet50, _images(64 if gpu else 8, 224)),
        Case("VGG-11", rotor.vgg.vgg11, _images(64 if gpu else 4, 224)),
        Case("DenseNet-121", rotor.densenet.densenet121, _images(64 if gpu else 4, 160)),
        Case(
            "GPT, 12 layers",
            lambda: rotor.gpt.gpt("gpt2" if gpu else "mini", dropout=0.0),
            lambda where: token_batch(8 if gpu else 6, length, vocabulary, where),
        ),
    ]


def chosen(device: torch.device, words: list[str]) -> list[Case]:
    """The cases whose names contain one of the words; all without words.

    On CUDA but for VGG-11: the backward of its pooling is not the same twice there.
    """
    known = [case for case in cases(device) if device.type == "cpu" or "VGG" not in case.name]
    return [
        case
        for case in known
        if not words or any(word.lower() in case.name.lower() for word in words)
    ]
