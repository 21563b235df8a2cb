"""Gradients of outputs in the layout that the loss gives them: a capture reads them as they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch import nn
from torch.nn import functional
from training import weighted_loss

import rotor
from rotor.engines.graph.code import backwards as ordered


class Net(nn.Module):
    """Two layers, and a last one whose gradient has the layout of the loss."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.last, self.first, self.second = last, nn.Linear(24, 48), nn.Linear(48, 24)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(24), nn.GroupNorm(6, 24)
        self.convolution = nn.Conv2d(24, 24, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(24, 12))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        image = x.transpose(1, 2).reshape(4, 24, 5, 5)
        return getattr(self, f"_{self.last}")(x, image)

    def _linear(self, x, _):
        return self.first(x)

    def _permuted(self, x, _):
        return self.first(x).permute(2, 0, 1)

    def _batch(self, _, image):
        return self.batch_norm(image)

    def _channels_last(self, _, image):
        return self.group_norm(image.contiguous(memory_format=torch.channels_last))

    def _group(self, _, image):
        return self.group_norm(image)

    def _convolved(self, _, image):
        return self.convolution(image)

    def _weight_normed(self, x, _):
        return self.normed(x)

    def _distances(self, x, _):
        return torch.cdist(x, x.roll(1, 1))

    def _shrunk(self, x, _):
        return functional.softshrink(x * self.scale, 0.01)

    def _nearest(self, _, image):
        return functional.interpolate(image * self.scale, scale_factor=3)

    def _complex(self, x, _):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (12, 2))) * self.scale)

    def _spectral(self, x, _):
        return torch.fft.irfftn(x * self.scale, dim=-1)

    def _real(self, x, _):
        return (torch.complex(x, x.tanh()) * self.scale).real

    def _stacked(self, x, _):
        return torch.view_as_complex(torch.stack([x, x.tanh()], -1) * self.scale).real

    def _scattered(self, x, _):
        base = torch.zeros(4, 24 * 25)
        return torch.as_strided_scatter(base, x, (4, 25, 24), (600, 24, 1)).view(4, 25, 24)

    def _doubled(self, x, _):
        return doubled(x)


@torch.library.custom_op("layouts::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("layouts::doubled_in_order", mutates_args=())
def doubled_in_order(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x * 2


doubled.register_fake(torch.empty_like)
doubled_in_order.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, gradient: doubled_in_order(gradient.contiguous()))

LASTS = [name.removeprefix("_") for name in vars(Net) if re.match("_[a-z]", name)]


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.sum,
    "squares": lambda y: (y * y).mean(),
    "weighted": weighted_loss,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("last", LASTS)
def test_gradients_are_equal_whatever_their_layout(last, loss):
    torch.manual_seed(0)
    plain = Net(last)
    copied = copy.deepcopy(plain)
    model = rotor.Checkpointable(copied, mem_limit="8MB", engine="graph", effort="fast")
    for _ in range(2):
        x = torch.randn(4, 25, 24)
        for run, net in ((plain, plain), (model, copied)):
            net.zero_grad()
            LOSSES[loss](run(x)).backward()
        for one, other in zip(plain.parameters(), copied.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def _formulas() -> Iterator[tuple[str, str]]:
    path = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        for key, formula in entry.items():
            if key not in ("name", "result", "dispatch", "output_differentiability"):
                yield entry["name"].partition("(")[0], str(formula)


def test_every_operator_whose_gradient_is_made_contiguous_is_known():
    """Convolutions and nested tensors are none of them: their kernels do it themselves."""
    found = {
        name
        for name, formula in _formulas()
        if re.search(r"grads?(\[0\])?(\.mT\(\))?\.contiguous\(", formula)
        and not re.match("_?conv_|_nested", name)
    }
    known = {str(op).split(".")[1] for op in (*ordered.READERS, *ordered.VIEWS)}
    inverse = {
        "_cdist_forward": "_cdist_backward",
        "_weight_norm_interface": "_weight_norm_interface_backward",
        "as_strided_scatter": "as_strided",
        "view_as_complex": "view_as_real",
        "view_as_real": "view_as_complex",
    }
    read = {inverse.get(name, f"{name}_backward") for name in found}
    assert read <= known
    assert len(read) >= 7
