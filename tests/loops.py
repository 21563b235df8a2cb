"""Training loops as people write them, each once: with the plain model, and within a limit.

A loop is a function of a `Loop`. Its lines that name ``loop.wrap`` or ``loop.callback`` are all
that a limit changes; the others record what is compared.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from zoo.models import First, Gated, Row, chain

import rotor
from rotor import memory, models

STEPS = 6
OPTIONS = {"effort": "fast", "planning": "before", "verbosity": 0}


@dataclass
class Loop:
    """Record of one run of a loop.

    Attributes
    ----------
    limit_bytes
        Limit of the run; ``None``: the plain model trains.
    options
        Arguments of `rotor.Checkpointable`.
    steps
        Number of steps.
    losses, seconds, peaks
        By step: its loss, its CPU time in this thread, its metered peak; within a limit that of
        the last step only.
    limited
        Models within a limit.
    parameters
        Parameters at the end.
    """

    limit_bytes: int | None = None
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    steps: int = STEPS
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    limited: list[Any] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    _meter: Any = None
    _begun: float = 0.0

    def wrap(self, model: nn.Module, share: float = 1.0) -> Any:
        """Return the model within a share of the limit; the model itself in a plain run."""
        if self.limit_bytes is None:
            return model
        limit = int(share * self.limit_bytes)
        self.limited.append(rotor.Checkpointable(model, mem_limit=limit, **self.options))
        return self.limited[-1]

    def callback(self, kind: Any) -> list[Any]:
        """Return the callback of a framework in a list, which is empty in a plain run."""
        if self.limit_bytes is None:
            return []
        self.limited.append(kind(self.limit_bytes, **self.options))
        return self.limited[-1:]

    @property
    def plans(self) -> list[Any]:
        """Plans of all limited models."""
        found = [getattr(one, "model", one) for one in self.limited]
        checked = [
            m if hasattr(m, "plans") else o for m, o in zip(found, self.limited, strict=True)
        ]
        return [plan for model in checked for plan in model.plans.values()]

    def begin(self, existing: Iterable[torch.Tensor] = ()) -> None:
        """Begin a step; meter it, unless rotor may.

        Parameters
        ----------
        existing
            Gradients that are freed within the step.
        """
        if self.limit_bytes is None or len(self.seconds) + 1 == self.steps:
            self._meter = memory.meter("cpu", existing=list(existing)).start()
        self._begun = time.thread_time()

    def end(self) -> None:
        """End a step, after its backward."""
        self.seconds.append(time.thread_time() - self._begun)
        if self._meter is not None:
            self._meter.stop()
            self.peaks.append(self._meter.peak_bytes)
            self._meter = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a step: forward, loss and backward."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def done(self, loss: torch.Tensor) -> None:
        """Record the loss of a step."""
        self.losses.append(loss.item())

    def train(
        self,
        model: Any,
        optimizer: Any,
        batch: Callable[[int], tuple[torch.Tensor, ...]],
        step: Callable[..., torch.Tensor],
    ) -> None:
        """Train plainly: `step` returns the loss of a batch, which is made by its number."""
        for number in range(self.steps):
            tensors = batch(number)
            optimizer.zero_grad()
            with self.step():
                loss = step(*tensors)
                loss.backward()
            optimizer.step()
            self.done(loss)
        self.parameters = list(model.parameters())


@dataclass(frozen=True)
class Case:
    """Loop of the table.

    Attributes
    ----------
    name
        Name in the table.
    function
        The loop.
    share
        Limit, as a share of the plain run's peak.
    tolerance
        Largest relative difference of losses; 0: bit for bit.
    needs
        Packages that it imports.
    is_slow
        True to leave it out of the quick tests.
    """

    name: str
    function: Callable[[Loop], None]
    share: float = 0.7
    tolerance: float = 0.0
    needs: tuple[str, ...] = ()
    is_slow: bool = False

    @property
    def lines(self) -> int:
        """Number of lines that a limit changes."""
        source = inspect.getsource(self.function)
        return sum("loop.wrap(" in line or "loop.callback(" in line for line in source.splitlines())

    def run(self, limit_bytes: int | None = None, **changes: Any) -> Loop:
        """Run the loop, always from the same seed."""
        loop = Loop(limit_bytes, **changes)
        torch.manual_seed(0)
        self.function(loop)
        return loop


CASES: list[Case] = []


def case(name: str, **facts: Any) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Enter a loop into the table."""

    def enter(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
        CASES.append(Case(name, function, **facts))
        return function

    return enter


def drawn(number: int, *shape: int) -> torch.Tensor:
    """Return a batch of numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def rows(number: int) -> tuple[torch.Tensor]:
    """Return a batch of 256 rows."""
    return (drawn(number, 256, 64),)


def words(number: int, *shape: int, most: int = 64) -> torch.Tensor:
    """Return a batch of tokens or labels."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(number))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        rows, time_, width = x.shape
        parts = self.mixed(self.before(x)).view(rows, time_, 3, 2, width // 2).unbind(2)
        q, k, v = [part.transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.out(y.reshape(x.shape)))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.after(x)))))


class NanoGPT(nn.Module):
    """GPT whose forward returns logits and loss, its head tied to the embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Return the logits, and the loss where targets are given."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Vision(nn.Module):
    """Convolutional network with batch norms and stochastic depth."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.convolutions = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(4)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            kept = torch.rand(x.shape[0], 1, 1, 1) < 0.9 if self.training else 1.0
            x = x + kept * F.silu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


@case("nanoGPT: accumulation, clipping, cosine")
def nanogpt(loop: Loop) -> None:
    """Train as nanoGPT's train.py does."""
    model = NanoGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model = loop.wrap(model)
    for number in range(loop.steps // 2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * number / 8))
        for micro in range(2):
            tokens = words(2 * number + micro, 16, 33)
            x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            with loop.step():
                _, loss = model(x, y)
                (loss / 2).backward()
            loop.done(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loop.parameters = list(model.parameters())


@case("timm: mixup, soft targets, channels last, EMA")
def timm(loop: Loop) -> None:
    """Train as timm's train.py does."""
    model = Vision().to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    plain, model = model, loop.wrap(model)
    for number in range(loop.steps):
        images = drawn(number, 16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        images = 0.7 * images + 0.3 * images.flip(0)
        labels = F.one_hot(words(number, 16, most=10), 10).float()
        labels = 0.7 * labels + 0.3 * labels.flip(0)
        optimizer.zero_grad()
        with loop.step():
            loss = -(labels * F.log_softmax(model(images), -1)).sum(-1).mean()
            loss.backward()
        optimizer.step()
        average.update_parameters(plain)
        loop.done(loss)
    loop.parameters = [*model.parameters(), *model.buffers(), *average.parameters()]


@case("averages of weights (EMA)")
def averages(loop: Loop) -> None:
    """Train a model, and evaluate the average of its weights."""
    model = Gated()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, model = model, loop.wrap(model)

    for number in range(loop.steps):
        (x,) = rows(number)
        optimizer.zero_grad()
        with loop.step():
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        average.update_parameters(plain)
        loop.done(loss)
    loop.parameters = [*model.parameters(), *average.parameters()]


@case("Sequential", share=0.6)
def sequential(loop: Loop) -> None:
    """Train a chain of stages."""
    model = loop.wrap(chain(64, 6))
    optimizer = torch.optim.Adam(model.parameters())
    loop.train(model, optimizer, rows, lambda x: model(x).square().mean())


@case("loss in the plan (loss_fn)")
def captured_loss(loop: Loop) -> None:
    """Train with the loss as a part of the plan."""
    model, is_planned = Gated(), loop.limit_bytes is not None
    loop.options["loss_fn"] = F.mse_loss
    model = loop.wrap(model)
    optimizer = torch.optim.Adam(model.parameters())

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        return *rows(number), *rows(number + 99)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x, targets=(y,)) if is_planned else F.mse_loss(model(x), y)

    loop.train(model, optimizer, batch, step)


@case("bf16 autocast", tolerance=5e-3)
def bf16(loop: Loop) -> None:
    """Train under autocast."""
    model = loop.wrap(Gated())
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    loop.train(model, optimizer, rows, step)


@case("GradScaler", tolerance=5e-3)
def scaled(loop: Loop) -> None:
    """Train under autocast with a scaled loss."""
    model = loop.wrap(chain(64, 6))
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")
    for number in range(loop.steps):
        (x,) = rows(number)
        optimizer.zero_grad()
        with loop.step():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        loop.done(loss)
    loop.parameters = list(model.parameters())


@case("torch.compile below")
def compiled_below(loop: Loop) -> None:
    """Train a model with compiled blocks."""
    blocks = [torch.compile(Block(dropout=0.0), backend="aot_eager") for _ in range(3)]
    model = loop.wrap(nn.Sequential(*blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = [(drawn(k, 8, 32, 32),) for k in range(loop.steps)]
    loop.train(model, optimizer, texts.__getitem__, lambda x: model(x).square().mean())


@case("torch.compile above")
def compiled_above(loop: Loop) -> None:
    """Train with a compiled model."""
    model = loop.wrap(Gated())
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.train(model, optimizer, rows, lambda x: compiled(x).square().mean())


@case("DataParallel on the CPU")
def data_parallel(loop: Loop) -> None:
    """Train a model in a DataParallel without devices, which calls it as it is."""
    model = loop.wrap(Gated())
    parallel = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.train(model, optimizer, rows, lambda x: parallel(x).square().mean())


@case("LSTM", share=0.95)
def lstm(loop: Loop) -> None:
    """Train a recurrent model."""

    enter = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    leave = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
    model = loop.wrap(Row(enter, First(nn.LSTM(32, 32, batch_first=True)), leave))
    optimizer = torch.optim.Adam(model.parameters())
    texts = [(drawn(k, 16, 24, 32),) for k in range(loop.steps)]
    loop.train(model, optimizer, texts.__getitem__, lambda x: model(x).square().mean())


@case("branches on values", share=0.9)
def branches(loop: Loop) -> None:
    """Train a model whose code depends on what it computes."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Gated(64, 3), Gated(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if x.sum() > 0 else self.second(-x)

    model = loop.wrap(Branching())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.train(model, optimizer, rows, lambda x: model(x).square().mean())


@case("GAN: two models, two optimizers", share=0.9)
def gan(loop: Loop) -> None:
    """Train a generator and a discriminator in turn."""
    generator, discriminator = Gated(), nn.Sequential(chain(64, 6), nn.Linear(64, 1))
    generator = loop.wrap(generator, 0.5)
    discriminator = loop.wrap(discriminator, 0.5)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, discriminator)]
    for number in range(loop.steps):
        (noise,), (real,) = rows(number), rows(number + 50)
        with torch.no_grad():
            both = torch.cat([real, generator(noise)])
        for k, optimizer in enumerate(optimizers):
            generator.zero_grad()
            discriminator.zero_grad()
            with loop.step():
                if k == 0:
                    loss = F.softplus(-discriminator(generator(noise))).mean()
                else:
                    seen = discriminator(both)
                    loss = F.softplus(-seen[:256]).mean() + F.softplus(seen[256:]).mean()
                loss.backward()
            optimizer.step()
            loop.done(loss)
    loop.parameters = [*generator.parameters(), *discriminator.parameters()]


@case("U-Net")
def unet(loop: Loop) -> None:
    """Train a U-Net for segmentation."""
    model = loop.wrap(models.unet.UNet(width=4))
    optimizer = torch.optim.Adam(model.parameters())

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        return drawn(number, 2, 3, 32, 32), words(number, 2, 1, 32, 32, most=2).float()

    loss_of = F.binary_cross_entropy_with_logits
    loop.train(model, optimizer, batch, lambda x, wanted: loss_of(model(x), wanted))
