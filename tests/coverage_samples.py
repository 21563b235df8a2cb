"""How the models of ``coverage_models`` are made: libraries, batches, losses and small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchvision_standins import import_torchvision

__all__ = [
    "CLASSES",
    "SMALL",
    "TOKENS",
    "Sample",
    "clip_inputs",
    "clip_options",
    "ids",
    "language",
    "named",
    "pixels",
    "prepare",
    "segformer_inputs",
    "segmentation",
    "seq2seq",
    "small_vit",
    "speech",
    "timm",
    "torchvision",
    "transcribed",
    "whisper_inputs",
]

BATCH = 4
CLASSES = 10
TOKENS = 512
LENGTH = 64


@dataclass
class Sample:
    """A model, one batch for it, and its loss.

    Attributes
    ----------
    model
        In training mode.
    args, kwargs
        What it is called with.
    targets
        What the loss is called with after the output.
    loss_fn
        ``loss_fn(output, *targets)``; of no targets where the model computes its own loss.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss_fn: Callable[..., torch.Tensor]
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: tuple[torch.Tensor, ...] = ()


def prepare(package: str) -> None:
    """Import a package; ImportError where it, or something that it needs, is absent."""
    try:
        import_torchvision()
    except ModuleNotFoundError:
        if package == "torchvision":
            raise
    importlib.import_module(package)


# -- losses


def _classified(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, summed over whatever heads the model has."""
    if isinstance(output, torch.Tensor):
        return nn.functional.cross_entropy(output, target)
    heads = list(output.values()) if isinstance(output, dict) else list(output)
    losses = [nn.functional.cross_entropy(h, target) for h in heads if h is not None]
    return torch.stack(losses).sum()


def _own_loss(output: Any) -> torch.Tensor:
    return output.loss


def _spread(output: Any) -> torch.Tensor:
    """A loss for models that give features only."""
    return output.last_hidden_state.square().mean()


def transcribed(output: Any) -> torch.Tensor:
    """CTC, outside: with labels the model itself branches on their values."""
    scores = output.logits.log_softmax(-1).transpose(0, 1)
    length, batch, kinds = scores.shape
    target = 1 + torch.arange(batch * 3).reshape(batch, 3) % (kinds - 1)
    lengths = torch.full((batch,), length), torch.full((batch,), 3)
    return nn.functional.ctc_loss(scores, target, *lengths)


# -- images


def _images(model: nn.Module, batch: int, size: int | tuple[int, ...]) -> Sample:
    shape = (size, size) if isinstance(size, int) else size
    x = torch.randn(batch, 3, *shape)
    return Sample(model, (x,), _classified, targets=(torch.randint(0, CLASSES, (batch,)),))


def torchvision(name: str, size: Any = 96, batch: int = BATCH, **options: Any) -> Any:
    def make() -> Sample:
        models = importlib.import_module("torchvision.models")
        options.setdefault("num_classes", CLASSES)
        return _images(models.get_model(name, weights=None, **options), batch, size)

    return make


def small_vit() -> Sample:
    vision = importlib.import_module("torchvision.models.vision_transformer")
    model = vision.VisionTransformer(32, 4, 3, 4, 64, 128, dropout=0.1, num_classes=CLASSES)
    return _images(model, 8, 32)


def segmentation(name: str, size: int = 96, batch: int = 2, **options: Any) -> Any:
    def make() -> Sample:
        models = importlib.import_module("torchvision.models")
        model = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=CLASSES, **options
        )
        target = torch.randint(0, CLASSES, (batch, size, size))
        return Sample(model, (torch.randn(batch, 3, size, size),), _classified, targets=(target,))

    return make


def timm(name: str, size: int = 96, batch: int = BATCH, **options: Any) -> Any:
    def make() -> Sample:
        timm = importlib.import_module("timm")
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return _images(model, batch, size)

    return make


# -- text, sound and what else transformers has


def _transformer(kind: str, config: str = "", **options: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    cls = getattr(transformers, kind)
    config_class = getattr(transformers, config) if config else cls.config_class
    model = cls(config_class(**options))
    model.train()
    return model


def ids(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, TOKENS, (batch, length))


SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def language(kind: str, **options: Any) -> Any:
    """A model of tokens that takes labels of the same shape."""

    def make() -> Sample:
        model = _transformer(kind, **(SMALL | options))
        tokens = ids()
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        batch["labels"] = tokens.clone()
        return Sample(model, (), _own_loss, batch)

    return make


def named(
    kind: str,
    inputs: Callable[[], dict[str, Any]],
    outside: Callable[..., torch.Tensor] = _spread,
    **options: Any,
) -> Any:
    """Any model with keyword arguments; with labels among them it has its own loss."""

    def make() -> Sample:
        model = _transformer(kind, **options)
        batch = inputs()
        own = "labels" in batch or "return_loss" in batch
        return Sample(model, (), _own_loss if own else outside, batch)

    return make


def pixels(size: int, labels: bool = True) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        batch: dict[str, Any] = {"pixel_values": torch.randn(BATCH, 3, size, size)}
        if labels:
            batch["labels"] = torch.randint(0, CLASSES, (BATCH,))
        return batch

    return inputs


def seq2seq() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids()}


def clip_inputs() -> dict[str, Any]:
    return {
        "input_ids": ids(length=16),
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "return_loss": True,
    }


def segformer_inputs() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "labels": torch.randint(0, CLASSES, (BATCH, 64, 64)),
    }


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 4000)}


def whisper_inputs() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 80, 200), "labels": ids(2, 32)}


def clip_options() -> dict[str, Any]:
    small = {k: v for k, v in SMALL.items() if "token_id" not in k and k != "vocab_size"}
    text = small | {"vocab_size": TOKENS, "max_position_embeddings": 64, "eos_token_id": 2}
    return {"text_config": text, "vision_config": small | {"image_size": 64, "patch_size": 8}}
