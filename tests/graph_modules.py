"""Random small modules, random valid programs, and what a step leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from training import same

from rotor.common.tensor_trees import output_tensors
from rotor.engines.graph.capture import Capture, Unplanned, fresh
from rotor.engines.graph.code.emit import emit
from rotor.engines.graph.code.offloading import layout_of
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.tier import Tier

BATCH, TIME, WIDTH = 3, 4, 8
KINDS = [
    "linear",
    "gelu",
    "relu_",
    "dropout",
    "layer_norm",
    "batch_norm",
    "conv",
    "chunk",
    "attention",
    "skip",
    "views",
    "max",
    "index",
    "noise",
    "slices",
    "counter",
    "detach",
    "expand",
    "split",
    "softmax",
    "function",
]


class Scaled(torch.autograd.Function):
    """x -> 2 x, with a gradient that says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class RandomNet(nn.Module):
    """A network of randomly chosen pieces on tensors of shape [BATCH, TIME, WIDTH]."""

    def __init__(self, seed: int, size: int = 7) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.kinds = [rng.choice(KINDS) for _ in range(size)]
        self.output = rng.choice(["tensor", "tuple", "dict", "nested"])
        self.embedding = nn.Embedding(11, WIDTH) if rng.random() < 0.3 else None
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(size)])
        if rng.random() < 0.3:
            self.linears[size - 1].weight = self.linears[0].weight
        if rng.random() < 0.3:
            self.linears[size // 2].requires_grad_(False)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(WIDTH) if k == "batch_norm" else nn.LayerNorm(WIDTH)
                for k in self.kinds
            ]
        )
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def piece(self, k: int, kind: str, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        if kind in ("linear", "detach"):
            y = self.linears[k](x)
            return y + x.detach() if kind == "detach" else y
        if kind == "gelu":
            return F.gelu(self.linears[k](x))
        if kind == "relu_":
            return F.relu_(self.linears[k](x))
        if kind == "dropout":
            return F.dropout(self.linears[k](x), 0.3, self.training)
        if kind == "layer_norm":
            return self.norms[k](x)
        if kind == "batch_norm":
            return self.norms[k](x.flatten(0, 1)).view_as(x)
        if kind == "conv":
            return self.conv(x.transpose(1, 2)).transpose(1, 2)
        if kind == "chunk":
            a, b, c = self.wide(x).chunk(3, -1)
            return torch.cat([a * b, c], 1)[:, ::2]
        if kind == "attention":
            q, k_, v = self.wide(x).view(BATCH, TIME, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k_, v, dropout_p=0.0)
            return y.transpose(1, 2).reshape(BATCH, TIME, WIDTH)
        if kind == "skip":
            return torch.tanh(self.linears[k](x)) + first
        if kind == "views":
            y = self.linears[k](x)
            return y.transpose(0, 1).reshape(-1, WIDTH).view(TIME, BATCH, WIDTH).transpose(0, 1)
        if kind == "max":
            values, where = self.linears[k](x).max(-1, keepdim=True)
            return x * values + where.float()
        if kind == "index":
            return self.linears[k](x)[:, torch.tensor([3, 1, 0, 0])]
        if kind == "noise":
            return self.linears[k](x) + torch.randn_like(x) * torch.rand(WIDTH)
        if kind == "slices":
            y = self.linears[k](x).clone()
            y[:, 1:3].mul_(2)
            y[:, 0] = 1.5
            return y
        if kind == "counter":
            self.count.add_(1)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return self.linears[k](x) * self.count.clone() + self.mean
        if kind == "expand":
            return self.linears[k](x) * x.mean(1, keepdim=True).expand(-1, TIME, -1)
        if kind == "split":
            a, b = self.linears[k](x).split([3, 5], -1)
            return torch.cat([b.sigmoid(), a], -1)
        if kind == "softmax":
            return self.linears[k](x).softmax(-1)
        return Scaled.apply(self.linears[k](x))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, *, scale: float = 1.0) -> Any:
        first = x if self.embedding is None else x + self.embedding(tokens)
        y, seen = first * scale, []
        for k, kind in enumerate(self.kinds):
            y = self.piece(k, kind, y, first)
            seen.append(y)
        out = self.head(y)
        if self.output == "tensor":
            return out
        if self.output == "tuple":
            return out, seen[1], None
        if self.output == "dict":
            return {"out": out, "classes": out.argmax(-1), "number": 3}
        return {"out": (out, [seen[-1].mean()]), "view": out.transpose(0, 1), "x": x}


def arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a `RandomNet` is called with."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, TIME, WIDTH, generator=generator)
    tokens = torch.randint(11, (BATCH, TIME), generator=generator)
    return x.requires_grad_(seed % 2 == 0), tokens


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every output that requires a gradient."""
    tensors = [t for t in output_tensors(output) if t.requires_grad]
    return sum((t.float() * t.detach().float().cos()).sum() for t in tensors)  # type: ignore


@dataclass
class Step:
    """Everything that a step leaves behind."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    rng: torch.Tensor

    def differences(self, other: Step) -> list[str]:
        """The names of what is not equal bit for bit."""
        found = [
            name
            for name in ("outputs", "gradients", "buffers")
            if not same(getattr(self, name), getattr(other, name))
        ]
        return found + ([] if torch.equal(self.rng, other.rng) else ["rng"])

    def is_close(self, other: Step, tolerance: float = 1e-5) -> bool:
        """Whether everything agrees relative to its largest number, and random states exactly."""
        pairs = [
            *zip(self.outputs, other.outputs, strict=True),
            *zip(self.gradients, other.gradients, strict=True),
            *zip(self.buffers, other.buffers, strict=True),
        ]
        return torch.equal(self.rng, other.rng) and all(
            a is b is None
            or (
                a is not None
                and b is not None
                and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3))
            )
            for a, b in pairs
            if a is None or a.is_floating_point()
        )


def step(
    model: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    loss: Callable[[Any], torch.Tensor] = loss_of,
) -> Step:
    """Forward, loss, backward from no gradients."""
    tensors = output_tensors([args, kwargs])
    for tensor in [*model.parameters(), *tensors]:
        tensor.grad = None
    torch.manual_seed(seed)
    output = call(*args, **(kwargs or {}))
    loss(output).backward()
    return Step(
        [t.detach().clone() for t in output_tensors(output)],
        [_copy(t.grad) for t in [*model.parameters(), *tensors]],
        [b.clone() for b in model.buffers()],
        torch.get_rng_state(),
    )


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


# -- captured calls and programs for them


def _call(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return model.forward(*args, **kwargs)


class Planned:
    """A captured call of a model, that runs any program."""

    def __init__(self, model: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        self.model = model
        self.capture = Capture(fresh(_call))
        try:
            self.capture(model, args, kwargs or {})
        except Unplanned as reached:
            self.captured = reached.captured
        self.lowered: Lowered = self.captured.lowered

    def set_program(self, ops: list[int]) -> None:
        """Run these operations from now on."""
        self.captured.emitted = emit(self.lowered, ops)

    @property
    def sizes(self) -> list[int]:
        """Bytes of the storages, and room for what operators make beyond the capture."""
        return [2 * size + 1024 for size, _ in self.lowered.storages]

    def set_actions(self, actions: list[int], tier: Tier) -> None:
        """Run these actions, with a second tier, from now on."""
        layout = layout_of(tier, self.lowered, actions, self.sizes)
        self.captured.emitted = emit(self.lowered, actions, layout=layout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.capture(self.model, args, kwargs)


def in_order(lowered: Lowered) -> list[int]:
    """Every operation once."""
    return list(range(len(lowered.tasks)))


def random_program(lowered: Lowered, seed: int, drop: float) -> list[int]:
    """A valid program that forgets storages at random, and makes them again when needed."""
    rng = random.Random(seed)
    tasks = lowered.tasks
    maker = {s: i for i, task in enumerate(tasks) for s in task.made.values()}
    stays = {s for s, (_, pinned) in enumerate(lowered.storages) if pinned}
    for task in tasks:
        if task.once or task.phase == "loss":
            stays.update(task.made.values())
    live: set[int] = set()
    program: list[int] = []

    def run(index: int) -> None:
        # Deep chains are made with a stack of our own.
        waiting = [index]
        while waiting:
            missing = [s for s in tasks[waiting[-1]].inputs if s not in live]
            if missing:
                waiting.append(maker[missing[0]])
                continue
            done = waiting.pop()
            program.append(done)
            live.update(tasks[done].made.values())

    ran: set[int] = set()
    for index, task in enumerate(tasks):
        if index in ran and task.once:
            continue
        if set(task.made.values()) and set(task.made.values()) <= live and index in program:
            continue
        run(index)
        ran.update(program)
        for storage in sorted(live - stays):
            if rng.random() < drop:
                live.discard(storage)
    return program
