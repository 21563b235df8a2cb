"""A generative adversarial network whose generator looks several steps of its opponent ahead.

Metz, Poole, Pfau and Sohl-Dickstein, "Unrolled generative adversarial networks", arXiv:1611.02163:
the generator's loss is that of a discriminator which has taken `unrolled_steps` steps of gradient
descent (equations 7 to 9), and its gradient runs through these steps. The data are eight Gaussians
on a circle, as in section 3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

__all__ = ["Discriminator", "GANLosses", "Generator", "ring_of_gaussians", "unrolled_losses"]


class GANLosses(NamedTuple):
    """Losses of both players, scalars; the generator's is against the unrolled discriminator."""

    discriminator: Tensor
    generator: Tensor


class Generator(nn.Sequential):
    """Noise [batch, g_inp] to points [batch, 2], by three linear layers.

    Parameters
    ----------
    g_inp, g_hid
        Features of the noise, and of the two layers within.
    """

    def __init__(self, g_inp: int, g_hid: int) -> None:
        super().__init__(*_perceptron(g_inp, g_hid, 2))


class Discriminator(nn.Sequential):
    """Points [batch, 2] to logits [batch, 1] of being real, by three linear layers.

    Parameters
    ----------
    d_hid
        Features of the two layers within.
    """

    def __init__(self, d_hid: int) -> None:
        super().__init__(*_perceptron(2, d_hid, 1))


def unrolled_losses(
    generator: nn.Module,
    discriminator: nn.Module,
    real: Tensor,
    noise: Tensor,
    unrolled_steps: int,
    learning_rate: float,
) -> GANLosses:
    """Compute both players' losses at their present weights.

    Parameters
    ----------
    generator, discriminator
        From noise to points, from points to logits [batch, 1].
    real, noise
        Points of the data, and the generator's input.
    unrolled_steps
        Steps that the discriminator is unrolled; 0 is the plain network.
    learning_rate
        Learning rate of these steps.

    Returns
    -------
    GANLosses
        Losses, each to be differentiated by its own player's parameters. The discriminator's
        has no path to the generator.

    Raises
    ------
    ValueError
        `unrolled_steps` is negative.
    """
    if unrolled_steps < 0:
        raise ValueError(f"the number of unrolled steps is 0 or more, not {unrolled_steps}")
    fake = generator(noise)
    weights: dict[str, Tensor] = dict(discriminator.named_parameters())
    own = _discriminator_loss(discriminator, weights, real, fake.detach())
    for _ in range(unrolled_steps):
        loss = _discriminator_loss(discriminator, weights, real, fake)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: weight - learning_rate * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
    logits = functional_call(discriminator, weights, (fake,))
    return GANLosses(own, _cross_entropy(logits, 1.0))


def ring_of_gaussians(points: int, generator: torch.Generator) -> Tensor:
    """Draw points [points, 2] from eight Gaussians of deviation 0.02 on a circle of radius 2."""
    angles = torch.randint(8, (points,), generator=generator) * (math.pi / 4)
    centres = 2 * torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)
    return centres + 0.02 * torch.randn(points, 2, generator=generator)


def _discriminator_loss(
    discriminator: nn.Module, weights: dict[str, Tensor], real: Tensor, fake: Tensor
) -> Tensor:
    on_real = functional_call(discriminator, weights, (real,))
    on_fake = functional_call(discriminator, weights, (fake,))
    return _cross_entropy(on_real, 1.0) + _cross_entropy(on_fake, 0.0)


def _cross_entropy(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def _perceptron(features: int, hidden: int, out: int) -> list[nn.Module]:
    return [
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, out),
    ]
