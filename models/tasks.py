"""Training steps of each kind of network: data, loss and optimizer.

The data are drawn at random in the shapes of the published experiments, so nothing is downloaded. A
batch depends on its seed only, not on PyTorch's generators, from which only dropout draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gan import GANLosses, ring_of_gaussians, unrolled_losses
from .inception import InceptionOutputs
from .treelstm import Tree, complete_tree, random_parse_tree

__all__ = [
    "Batch",
    "GANTraining",
    "GPTTraining",
    "ImageTraining",
    "NextTokenTraining",
    "PairedTrees",
    "Params",
    "RelatednessTraining",
    "SegmentationTraining",
    "SequenceTraining",
    "Training",
    "TreeTraining",
    "WordTraining",
]

Value = int | float | str | bool
Params = Mapping[str, Any]


class Batch(NamedTuple):
    """Batch of a step: the network's input, and the expected output."""

    inputs: Any
    targets: Any


class PairedTrees(NamedTuple):
    """Two sentences: the words [nodes] of each and their tree."""

    left: tuple[Tensor, Tree]
    right: tuple[Tensor, Tree]


class Training(ABC):
    """Networks, their optimizers and batches of synthetic data; see `rotor.models.workloads.build`.

    Attributes
    ----------
    name
        The workload.
    params
        All its parameters, ``batch_size`` among them.
    published
        The parameters of the published experiments: ``build(name, **published)`` builds these.
    modules
        The networks, on `device`. One may be replaced, as by a wrapper of it.
    optimizers
        Optimizers that step after each backward.
    device
        Device of networks and batches.
    """

    def __init__(
        self,
        name: str,
        params: Params,
        published: Params,
        make: Callable[[Params], list[nn.Module]],
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.name = name
        self.params = dict(params)
        self.published = dict(published)
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.modules = make(self.params)
        for module in self.modules:
            module.to(device).train()
        self.optimizers = self._make_optimizers()

    def make_batch(self, seed: int) -> Any:
        """Draw a batch; the same seed gives the same one on every device."""
        drawn = self._draw(torch.Generator().manual_seed(seed))
        return _map_tensors(drawn, lambda tensor: tensor.to(self.device))

    @abstractmethod
    def forward_loss(self, batch: Any) -> Any:
        """Return the loss, a scalar; for the adversarial network, `GANLosses`."""

    def step(self, batch: Any) -> Tensor:
        """Train on a batch: gradients, then the optimizers.

        Returns
        -------
        torch.Tensor
            The loss before the step, a scalar without a graph; of several the sum.
        """
        self.zero_grad()
        loss = self.forward_loss(batch)
        self._backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()
        return cast(Tensor, sum(loss)).detach() if isinstance(loss, tuple) else loss.detach()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all networks' parameters, each once."""
        seen: set[int] = set()
        for module in self.modules:
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the tensors of one batch, that of seed 0."""
        drawn = self._draw(torch.Generator().manual_seed(0))
        sizes: list[int] = []
        _map_tensors(drawn, lambda tensor: sizes.append(tensor.nbytes))
        return sum(sizes)

    @property
    def model_bytes(self) -> int:
        """Bytes of parameters and buffers, shared ones once."""
        tensors: list[Tensor] = list(self.parameters())
        tensors += [buffer for module in self.modules for buffer in module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)]

    def _backward(self, loss: Any) -> None:
        loss.backward()

    @abstractmethod
    def _draw(self, generator: torch.Generator) -> Any:
        """Draw a batch on the processor."""


class ImageTraining(Training):
    """Images and their classes: cross-entropy, SGD."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy; an auxiliary classifier's counts 0.4."""
        output = self.modules[0](batch.inputs)
        if isinstance(output, InceptionOutputs):
            aux = F.cross_entropy(output.aux_logits, batch.targets)
            return F.cross_entropy(output.logits, batch.targets) + 0.4 * aux
        return F.cross_entropy(output, batch.targets)

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        images = _images(p, generator)
        return Batch(images, torch.randint(p["classes"], (p["batch_size"],), generator=generator))


class SegmentationTraining(Training):
    """Images and their masks: binary cross-entropy of each pixel, RMSprop."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the mean over all pixels."""
        return F.binary_cross_entropy_with_logits(self.modules[0](batch.inputs), batch.targets)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.RMSprop(self.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9)]

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        images = _images(p, generator)
        mask = torch.rand(p["batch_size"], 1, p["height"], p["width"], generator=generator)
        return Batch(images, (mask < 0.5).float())


class SequenceTraining(Training):
    """Sequences of vectors and their classes: cross-entropy of the last output, SGD."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.modules[0](batch.inputs), batch.targets)

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        shape = (p["input_size"], p["batch_size"], p["in_dim"])
        inputs = torch.randn(shape, generator=generator)
        return Batch(inputs, torch.randint(p["classes"], (shape[1],), generator=generator))


class WordTraining(Training):
    """Words and the words after them, [time, batch]: cross-entropy, SGD."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the mean over all words."""
        logits, _ = self.modules[0](batch.inputs)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        shape = (p["input_size"] + 1, p["batch_size"])
        words = torch.randint(p["vocab_size"], shape, generator=generator)
        return Batch(words[:-1].contiguous(), words[1:].contiguous())


class NextTokenTraining(Training):
    """Tokens and the tokens after them, [batch, time]: negative log-likelihood, SGD."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the mean over all tokens."""
        output = self.modules[0](batch.inputs).flatten(0, 1)
        return F.nll_loss(output, batch.targets.flatten())

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        shape = (p["batch_size"], p["input_seq_length"] + 1)
        tokens = torch.randint(p["vocab_size"], shape, generator=generator)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class GPTTraining(NextTokenTraining):
    """The same for a network that returns logits: cross-entropy, SGD."""

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the mean over all tokens."""
        return F.cross_entropy(self.modules[0](batch.inputs).flatten(0, 1), batch.targets.flatten())


class TreeTraining(Training):
    """Complete binary trees with a vector at each node: divergence of the root's classes, SGD."""

    @cached_property
    def tree(self) -> Tree:
        """The tree of every batch."""
        return complete_tree(self.params["depth"])

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the Kullback-Leibler divergence, the mean over the batch."""
        output = self.modules[0](batch.inputs, self.tree)
        return F.kl_div(output, batch.targets, reduction="batchmean")

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        inputs = torch.randn(len(self.tree), p["batch_size"], p["in_dim"], generator=generator)
        wanted = torch.randn(p["batch_size"], p["classes"], generator=generator)
        return Batch(inputs, torch.softmax(3 * wanted, dim=1))


class RelatednessTraining(Training):
    """Pairs of sentences with random parse trees and scores: divergence, SGD.

    Every pair is run on its own, since no two trees are equal.
    """

    def forward_loss(self, batch: Batch) -> Tensor:
        """Return the Kullback-Leibler divergence, the mean over the pairs."""
        scores = [self.modules[0](left, right) for left, right in batch.inputs]
        return F.kl_div(torch.cat(scores), batch.targets, reduction="batchmean")

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        pairs = tuple(
            PairedTrees(self._sentence(generator), self._sentence(generator))
            for _ in range(p["batch_size"])
        )
        score = 4 * torch.rand(p["batch_size"], generator=generator)
        lower = score.floor().clamp(max=3).long()
        share = score - lower
        targets = torch.zeros(p["batch_size"], 5)
        targets.scatter_(1, lower[:, None], 1 - share[:, None])
        targets.scatter_(1, lower[:, None] + 1, share[:, None])
        return Batch(pairs, targets)

    def _sentence(self, generator: torch.Generator) -> tuple[Tensor, Tree]:
        longest = self.params["words"]
        length = int(torch.randint(max(longest // 2, 1), longest + 1, (), generator=generator))
        seed = int(torch.randint(2**31, (), generator=generator))
        words = torch.randint(self.params["vocab_size"], (length,), generator=generator)
        return words, random_parse_tree(length, seed)


class GANTraining(Training):
    """Points on a circle of Gaussians: both losses at the same weights, Adam for each player.

    ``modules`` are the generator and the discriminator.
    """

    def forward_loss(self, batch: Batch) -> GANLosses:
        """Return both losses."""
        generator, discriminator = self.modules
        steps, rate = self.params["unrolled_steps"], self.params["unrolled_lr"]
        return unrolled_losses(generator, discriminator, batch.targets, batch.inputs, steps, rate)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        generator, discriminator = self.modules
        betas = (0.5, 0.999)
        return [
            torch.optim.Adam(generator.parameters(), lr=1e-3, betas=betas),
            torch.optim.Adam(discriminator.parameters(), lr=1e-4, betas=betas),
        ]

    def _backward(self, loss: GANLosses) -> None:
        generator, discriminator = self.modules
        torch.autograd.backward(loss.generator, inputs=list(generator.parameters()))
        torch.autograd.backward(loss.discriminator, inputs=list(discriminator.parameters()))

    def _draw(self, generator: torch.Generator) -> Batch:
        p = self.params
        noise = torch.randn(p["batch_size"], p["g_inp"], generator=generator)
        return Batch(noise, ring_of_gaussians(p["batch_size"], generator))


def _images(p: Params, generator: torch.Generator) -> Tensor:
    return torch.randn(p["batch_size"], 3, p["height"], p["width"], generator=generator)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        mapped = [_map_tensors(element, function) for element in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    return value
