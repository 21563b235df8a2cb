"""Programs at random: models made of blocks with habits of everyday code, and their loops."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from zoo.cases import WIDTH, Case, Residual, rows, usual_step
from zoo.models import Row

Inner = Callable[["Block", torch.Tensor], torch.Tensor]
HABITS: dict[str, Inner] = {}
FACTOR = [1.0]


class Block(Residual):
    """A residual block whose inner function has a habit, and state for it."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.calls, self.seen = habit, 0, []
        self.drawn, self.noise = random.Random(7), torch.Generator().manual_seed(7)
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(WIDTH) if habit == "batch_norm" else nn.LayerNorm(WIDTH)
        self.extra = _extra(habit)
        if habit in HOOKS:
            HOOKS[habit](self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(HABITS[self.habit](self, self.norm(x)))))


def habit(function: Inner) -> Inner:
    """Register a habit by the name of its function."""
    HABITS[function.__name__] = function
    return function


def _extra(name: str) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "recurrent": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
        "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "embedded": lambda: nn.Embedding(WIDTH, WIDTH),
        "convolved": lambda: nn.Conv1d(4, 4, 3, padding=1),
        "attended": lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
    }
    return made.get(name, nn.Identity)()


def _pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))


def _forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: output + 0.5)


def _backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _, given, made: (given[0] * 0.5,))


HOOKS = {"hook_before": _pre_hook, "hook_after": _forward_hook, "hook_backward": _backward_hook}


class Cubed(torch.autograd.Function):
    """The cube, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return given[0] * 3 * x * x


@dataclass
class Pair:
    """Two halves."""

    left: torch.Tensor
    right: torch.Tensor


for _name in ("plain", "batch_norm", *HOOKS):
    HABITS[_name] = lambda block, x: x


HABITS.update(
    in_place=lambda block, x: (x * 2).relu_(),
    dropped=lambda block, x: functional.dropout(x, 0.2, block.training),
)


@habit
def counted(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return x * (1 + block.calls % 3)


@habit
def buffer_replaced(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.count = block.count + 1
    return x * (1 + block.count)


@habit
def buffer_written(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.count.add_(1)
    return x * 2


@habit
def escapes(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.seen[:] = [x, x.sum()]
    return block.seen[0] * 2


@habit
def asks_autograd(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.requires_grad and not x.is_leaf and x.grad_fn is not None else 3.0)


HABITS.update(
    asks_compiler=lambda block, x: x * (3.0 if torch.compiler.is_compiling() else 2.0),
    draws_python=lambda block, x: x * random.uniform(0.5, 1.5),
    draws_numpy=lambda block, x: x * float(np.random.uniform(0.5, 1.5)),  # noqa: NPY002
    draws_own=lambda block, x: x * block.drawn.uniform(0.5, 1.5),
    draws_generator=lambda block, x: x + 0.1 * torch.randn(x.shape, generator=block.noise),
    draws_noise=lambda block, x: x + 0.1 * torch.randn_like(x),
)


@habit
def filled(block: Block, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[:, ::2], made[:, 1::2] = x[:, 1::2], -x[:, ::2]
    return made


@habit
def assigned(block: Block, x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, :4] = made[:, 4:8] * 2
    return made


@habit
def split(block: Block, x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, 1)
    return torch.cat([right * torch.sigmoid(left), left], 1)


@habit
def masked(block: Block, x: torch.Tensor) -> torch.Tensor:
    chosen = x[:, 0] > 0
    made = x * 1
    made[chosen] = x[chosen] * 2
    return made


HABITS.update(
    reads_value=lambda block, x: x * (1 + abs(float(x.detach().mean()))),
    branches_on_value=lambda block, x: x * 2 if x.detach().sum() > 0 else x * 3,
    branches_on_positions=lambda block, x: x if (torch.arange(4).diff() == 1).all() else -x,
)


@habit
def tries(block: Block, x: torch.Tensor) -> torch.Tensor:
    try:
        return x @ x.new_ones(3, 3)
    except RuntimeError:
        return x * 2


@habit
def tensor_hook(block: Block, x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return made


HABITS.update(
    checkpointed=lambda block, x: checkpoint(lambda t: torch.tanh(t) * t, x, use_reentrant=False),
    custom=lambda block, x: Cubed.apply(x),
)


@habit
def without_gradient(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().amax(1, keepdim=True)
    return x / (1 + scale)


HABITS.update(
    detached=lambda block, x: x + (x.tanh() - x).detach(),
    spectral=lambda block, x: block.extra(x),
    weight_norm=lambda block, x: block.extra(x),
    tied=lambda block, x: functional.linear(block.up(x), block.up.weight.t()),
    embedded=lambda block, x: x + block.extra(x.argmax(1)),
    recurrent=lambda block, x: block.extra(x.unsqueeze(1))[0].squeeze(1),
)


@habit
def attended(block: Block, x: torch.Tensor) -> torch.Tensor:
    given = x.unsqueeze(0)
    return block.extra(given, given, given, need_weights=False)[0].squeeze(0)


@habit
def convolved(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.extra(x.view(-1, 4, WIDTH // 4)).flatten(1)


@habit
def in_a_thread(block: Block, x: torch.Tensor) -> torch.Tensor:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(float(torch.ones(8).sum())))
    thread.start()
    thread.join()
    return x * found[0]


@habit
def in_an_object(block: Block, x: torch.Tensor) -> torch.Tensor:
    pair = Pair(x[:, : WIDTH // 2], x[:, WIDTH // 2 :])
    return torch.cat([pair.right, pair.left], 1)


@habit
def in_containers(block: Block, x: torch.Tensor) -> torch.Tensor:
    found = {"all": [x * k for k in range(1, 4)]}
    return torch.stack(found["all"]).sum(0)


HABITS.update(
    viewed=lambda block, x: x.view(-1, 8, WIDTH // 8).transpose(1, 2).contiguous().flatten(1),
    sorted_values=lambda block, x: x.sort(1).values + x.cumsum(1) / WIDTH,
    global_factor=lambda block, x: x * FACTOR[0],
    transformed=lambda block, x: torch.fft.irfft(torch.fft.rfft(x), n=WIDTH),
)


@habit
def clamped_weight(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.up.weight.clamp_(-0.1, 0.1)
    return x


@habit
def layer_drop(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    for _ in range(1 + block.calls % 2):
        x = torch.tanh(x)
    return x


def _toggles(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    FACTOR[0] = 1.0 + k
    for block in net.modules():
        if isinstance(block, Block):
            block.train(k % 2 == 0)
    return usual_step(case, model, net, optimizer, k)


def _hooks(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    if k == 2:
        _forward_hook(next(m for m in net.modules() if isinstance(m, nn.Linear)))
    return usual_step(case, model, net, optimizer, k)


def _adds(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    loss = case.loss(net, model(*case.inputs(k)))
    loss.backward()
    if k % 2:
        optimizer.step()
    return loss.detach()


def _retains(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = case.loss(net, model(*case.inputs(k)))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _evaluates(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    with torch.no_grad():
        model(*case.inputs(k))
    return usual_step(case, model, net, optimizer, k)


def _saliency(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    optimizer.zero_grad()
    (x,) = case.inputs(k)
    loss = case.loss(net, model(x.requires_grad_()))
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss.detach() + found.square().mean()


def _loads(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    return usual_step(case, model, net, optimizer, k)


def _casts(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = case.loss(net, model(*case.inputs(k)))
    loss.backward()
    optimizer.step()
    return loss.detach()


LOOPS = {
    "usual": usual_step,
    "toggles": _toggles,
    "hooks": _hooks,
    "adds": _adds,
    "retains": _retains,
    "evaluates": _evaluates,
    "saliency": _saliency,
    "loads": _loads,
    "casts": _casts,
    "sizes": usual_step,
}


def _sizes(k: int) -> tuple[torch.Tensor]:
    return rows(batch=(128, 96, 128, 64)[k % 4])


@dataclass(frozen=True)
class Program:
    """A model, its loop, an engine and a share of the plain peak."""

    habits: tuple[str, ...]
    is_sequential: bool
    loop: str
    engine: str
    share: float

    @classmethod
    def of(cls, seed: int) -> Program:
        """Return the program of a seed."""
        draw = random.Random(seed)
        habits = tuple(draw.choice(list(HABITS)) for _ in range(draw.randint(2, 5)))
        is_sequential, loop = draw.random() < 0.5, draw.choice(list(LOOPS))
        engine = draw.choice(["auto", "auto", "graph", "dynamic", "chain"])
        share = draw.choice([0.9, 0.7, 0.5])
        return cls(habits, is_sequential or engine == "chain", loop, engine, share)

    def case(self) -> Case:
        """Return the model and its loop."""

        def make() -> nn.Module:
            FACTOR[0] = 1.0
            blocks: list[nn.Module] = [Block(name) for name in self.habits]
            return nn.Sequential(*blocks) if self.is_sequential else Row(*blocks)

        keeps = self.loop == "adds"
        inputs = _sizes if self.loop == "sizes" else rows
        return Case(
            make, inputs, step=LOOPS[self.loop], varies=True, steps=4, keeps_gradients=keeps
        )
