"""Cases: unusual layers, parametrizations, dtypes and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from zoo.cases import (
    BATCH,
    HIDDEN,
    WIDTH,
    Case,
    Loop,
    Residual,
    blocks,
    case,
    cases,
    images,
    rows,
    tokens,
)
from zoo.models import Function


def _conv(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@case
def channels_last() -> Case:
    def make() -> nn.Module:
        return _conv().to(memory_format=torch.channels_last)

    return Case(make, lambda k: (images(k)[0].to(memory_format=torch.channels_last),))


@case
def complex64() -> Case:
    def make() -> nn.Module:
        return blocks(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64), 6)

    return Case(make, lambda k: (torch.randn(BATCH, WIDTH, dtype=torch.complex64),))


@case
def fourier_mixing() -> Case:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x + torch.fft.fft2(x).real / WIDTH)

    return Case(lambda: blocks(Mix))


@case
def tied_weights() -> Case:
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.body(self.embed(ids)), self.embed.weight)

    return Case(lambda: Function(forward, embed=nn.Embedding(100, WIDTH), body=blocks()), tokens)


@case
def shared_block() -> Case:
    def make() -> nn.Module:
        block = Residual()
        return nn.Sequential(block, nn.Tanh(), block, nn.Tanh(), block)

    return Case(make)


def _frozen(net: nn.Sequential, numbers: range) -> nn.Sequential:
    for i in numbers:
        net[i].requires_grad_(False)
    return net


@case
def low_rank_adapters() -> Case:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual().requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) + self.b(self.a(x))

    return Case(lambda: blocks(Adapted))


def _changed(change: Any) -> Any:
    def make() -> nn.Module:
        def block() -> nn.Module:
            made = Residual()
            change(made.up)
            return made

        return blocks(block, 4)

    return make


@case
def hypernetwork() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        code = x.mean(0)
        for layer in self.layers:
            weight = layer(code).view(WIDTH, WIDTH)
            x = x + functional.linear(x, weight / WIDTH).tanh()
        return x

    return Case(
        lambda: Function(
            forward, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH * WIDTH) for _ in range(2))
        )
    )


@case
def functional_call_inside() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            values = {name: p * 0.5 for name, p in block.named_parameters()}
            x = torch.func.functional_call(block, values, (x,))
        return x

    return Case(lambda: Function(forward, body=blocks(depth=3)))


@case
def vmapped_ensemble() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.func.vmap(functional.linear, in_dims=(None, 0, 0))
        return inner(self.body(x), self.weight, self.bias).tanh()

    return Case(
        lambda: Function(
            forward,
            body=blocks(),
            weight=nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8),
            bias=nn.Parameter(torch.zeros(3, WIDTH)),
        )
    )


@case
def vmap_in_stage() -> Case:
    class Mapped(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.func.vmap(lambda r: self.down(self.up(r).tanh()))(x)

    return Case(lambda: blocks(Mapped, 4))


@case
def gradient_within_forward() -> Case:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda v: self.up(v).tanh().square().sum())
            return x - 0.01 * slope(x)

    return Case(lambda: blocks(Energy, 3))


@case
def autograd_within_forward() -> Case:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.up(y).tanh().square().sum()
            (slope,) = torch.autograd.grad(energy, y, create_graph=True)
            return x - 0.01 * slope

    return Case(lambda: blocks(Force, 3))


@case
def attention_with_mask() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(2, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return x + self.out(y.transpose(1, 2).flatten(2))

    return Case(lambda: blocks(Attention, 4), lambda k: (torch.randn(4, 32, WIDTH),))


@case
def transformer_layers() -> Case:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, batch_first=True)

    return Case(lambda: blocks(layer, 3), lambda k: (torch.randn(4, 32, WIDTH),))


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


@case
def lstm() -> Case:
    def make() -> nn.Module:
        return nn.Sequential(_First(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), Residual())

    return Case(make, lambda k: (torch.randn(4, 16, WIDTH),))


@case
def gru_both_ways() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.body(x))[0])

    return Case(
        lambda: Function(
            forward,
            body=blocks(depth=2),
            rnn=nn.GRU(WIDTH, 32, batch_first=True, bidirectional=True),
            head=blocks(depth=2),
        ),
        lambda k: (torch.randn(4, 16, WIDTH),),
    )


@case
def recurrent_cell_loop() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h

    return Case(
        lambda: Function(forward, cell=nn.RNNCell(WIDTH, WIDTH)),
        lambda k: (torch.randn(64, 16, WIDTH),),
    )


@case
def sparse_embedding() -> Case:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(2000, WIDTH, sparse=True), *blocks(depth=3))

    return Case(make, tokens)


@case
def sparse_embedding_bag() -> Case:
    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(2000, WIDTH, sparse=True), *blocks())

    return Case(make, lambda k: (torch.randint(2000, (BATCH, 8)),))


@case
def sparse_input() -> Case:
    def forward(self: Any, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = torch.sparse.mm(adjacency, block(x))
        return x

    def inputs(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.eye(BATCH).to_sparse_csr(), torch.randn(BATCH, WIDTH)

    return Case(lambda: Function(forward, body=blocks(depth=3)), inputs)


@case
def renormed_embedding() -> Case:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(100, WIDTH, max_norm=1.0), *blocks())

    return Case(make, tokens)


@case
def sorting_and_scans() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x).sort(dim=1).values.cumsum(1) / WIDTH
        return x.topk(8, dim=1).values

    return Case(lambda: Function(forward, body=blocks(depth=4)))


@case
def scatter_and_gather() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[0]).flip(0)
        for block in self.body:
            x = torch.zeros_like(x).index_add(0, index, block(x))
            x = x.gather(1, torch.arange(WIDTH).flip(0).expand_as(x))
        return x

    return Case(lambda: Function(forward, body=blocks(depth=4)))


@case
def unet() -> Case:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv2d(3, 16, 3, padding=1)
            self.down = nn.Conv2d(16, 32, 3, 2, 1)
            self.middle = nn.Conv2d(32, 32, 3, padding=1)
            self.up = nn.ConvTranspose2d(32, 16, 2, 2)
            self.leave = nn.Conv2d(32, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.enter(x).relu()
            b = self.middle(self.down(a).relu()).relu()
            return self.leave(torch.cat([a, self.up(b).relu()], 1))

    return Case(UNet, images)


@case
def contrastive_distances() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = functional.normalize(self.body(x), dim=1)
        return torch.logsumexp(-torch.cdist(y, y), 1)

    return Case(lambda: Function(forward, body=blocks()))


@case
def autocast_within() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)

    return Case(lambda: Function(forward, body=blocks()))


@case
def fake_quantized() -> Case:
    class Rounded(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + ((y * 16).round() / 16 - y).detach()

    return Case(lambda: blocks(Rounded))


@case
def empty_parameter() -> Case:
    class Odd(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x), self.nothing])

    return Case(lambda: blocks(Odd))


@case
def unused_parameters() -> Case:
    class Unused(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)

    return Case(lambda: blocks(Unused))


cases(
    mlp_chain=lambda: Case(
        lambda: nn.Sequential(
            *[
                m
                for _ in range(4)
                for m in (
                    nn.Linear(WIDTH, HIDDEN),
                    nn.ReLU(inplace=True),
                    nn.Linear(HIDDEN, WIDTH),
                    nn.Tanh(),
                )
            ]
        )
    ),
    residual_loop=lambda: Case(Loop),
    conv_batchnorm=lambda: Case(_conv, images),
    batchnorm_cumulative=lambda: Case(
        lambda: _conv(lambda n: nn.BatchNorm2d(n, momentum=None)), images
    ),
    group_norm=lambda: Case(lambda: _conv(lambda n: nn.GroupNorm(4, n)), images),
    instance_norm_tracked=lambda: Case(
        lambda: _conv(lambda n: nn.InstanceNorm2d(n, track_running_stats=True)), images
    ),
    float64=lambda: Case(lambda: blocks().double(), lambda k: (rows(k)[0].double(),)),
    bfloat16=lambda: Case(lambda: blocks().bfloat16(), lambda k: (rows(k)[0].bfloat16(),)),
    frozen_prefix=lambda: Case(lambda: _frozen(blocks(), range(2))),
    frozen_middle=lambda: Case(lambda: _frozen(blocks(), range(1, 4))),
    weight_norm=lambda: Case(_changed(parametrizations.weight_norm)),
    spectral_norm=lambda: Case(_changed(parametrizations.spectral_norm)),
    orthogonal=lambda: Case(_changed(parametrizations.orthogonal)),
    spectral_norm_by_hooks=lambda: Case(_changed(nn.utils.spectral_norm)),
)
