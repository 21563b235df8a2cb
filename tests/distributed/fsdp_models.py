"""What the tests of FSDP2 on two processes share: models, steps, and what differs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rotor
from rotor import memory

PROCESSES = 2
DEVICE = os.environ.get("ROTOR_FSDP_DEVICE", "cpu")
WIDTH = 32
BLOCKS = 4
STEPS = 20
METERED = 8


class Block(nn.Module):
    """A residual block with a random part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, WIDTH), *[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 4)
    ).to(DEVICE)


def batch(step: int, rows: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(rows, 8, generator=generator).to(DEVICE)


def shard(model: Any, *, root: bool, **options: Any) -> Any:
    """Every block; with a root the ends of the model belong to it."""
    options["mesh"] = init_device_mesh(DEVICE, (PROCESSES,))
    for k in range(1, BLOCKS + 1) if root else range(BLOCKS + 2):
        fully_shard(model[k], **options)
    if root:
        fully_shard(model, **options)
    return model


def tighten(model: rotor.Checkpointable) -> int:
    """Put a measured model under the least limit; returns it."""
    try:
        model.compute_sequence(mem_limit=1)
    except rotor.InfeasibleError as error:
        sequence = model.compute_sequence(mem_limit=error.minimum_bytes)
        if max(sequence.count_forwards().values()) < 2:
            raise AssertionError("the limit makes nothing recompute") from None
        return error.minimum_bytes
    raise AssertionError("a limit of one byte was accepted")


def run(
    model: Any,
    steps: int,
    *,
    parts: int = 1,
    loss: Callable[[Any], torch.Tensor] = lambda y: y.float().square().mean(),
    metered: bool = False,
) -> tuple[list[float], int]:
    """Steps of gradient descent: their losses, and the lowest peak of the metered ones.

    The lowest: threads of gloo now and then give buffers back a moment late.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    torch.manual_seed(5 + dist.get_rank())
    losses, peaks = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [batch(10 * step + part) for part in range(parts)]
        meter = memory.meter(DEVICE).start() if metered else None
        total = 0.0
        for part, x in enumerate(batches):
            if parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)
            value = loss(model(x))
            value.backward()
            total += value.item()
        if meter is not None:
            meter.stop()
            peaks.append(meter.peak_bytes)
        losses.append(total)
        if step < steps - 1:
            optimizer.step()
    return losses, min(peaks, default=0)


def peak_of(model: Any) -> int:
    """What a step needs: the lowest peak of several."""
    return run(model, METERED, metered=True)[1]


def kept(
    model: rotor.Checkpointable, limit: int, plain_bytes: int | None = None, share: float = 0.8
) -> list[str]:
    """Whether a planned model keeps its limit, and takes a share of the plain one's bytes."""
    peak = peak_of(model)
    found = []
    if peak > limit:
        found.append(f"peak {peak}, limit {limit}, predicted {model.plan.predicted_bytes}")
    if plain_bytes is not None and peak > share * plain_bytes:
        found.append(f"peak {peak}, plain {plain_bytes}")
    return found


def squares(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return (y - target).square().mean()


def with_loss(
    plain: Any, planned: Any, tighten: Callable[[rotor.Checkpointable], int]
) -> list[str]:
    """Steps whose loss, `squares`, is a part of the plan, under the least limit."""
    target = torch.ones(256, 4, device=DEVICE)
    planned.measure(batch(0), targets=(target,))
    limit = tighten(planned)
    peaks = []
    for step in range(1 + METERED):
        torch.manual_seed(step)
        squares(plain(batch(step)), target).backward()
        torch.manual_seed(step)
        x = batch(step)
        with memory.meter(DEVICE) as meter:
            planned(x, targets=(target,)).backward()
        peaks.append(meter.peak_bytes)
    found = differences(plain, planned)
    return found + ([f"peaks {peaks}, limit {limit}"] if min(peaks[1:]) > limit else [])


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differences(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> list[str]:
    """The names of parameters and gradients that are not equal, by default bit by bit."""

    def same(s: Any, t: Any) -> bool:
        return torch.allclose(local(s), local(t), rtol=tolerance, atol=tolerance)

    found = []
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        if not same(p, q):
            found.append(name)
        if (p.grad is None) != (q.grad is None):
            found.append(f"{name}.grad is there on one side")
        elif p.grad is not None and not same(p.grad, q.grad):
            found.append(f"{name}.grad")
    return found


def on_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * PROCESSES
    dist.all_gather_object(found, value)
    return found


def same_plans(model: rotor.Checkpointable) -> list[str]:
    found = on_all((str(model.plan.sequence), model.plan.limit_bytes))
    return [] if found[0] == found[1] else [f"plans {found}"]


def compare(
    plain: Any,
    planned: Any,
    steps: int,
    tolerance: float = 0.0,
    same: Callable[[Any], list[str]] = same_plans,
    **options: Any,
) -> list[str]:
    """Trains both: what differs in losses, parameters, gradients, and in the plans of the ranks."""
    losses = [run(model, steps, **options)[0] for model in (plain, planned)]
    found = differences(plain, planned, tolerance) + same(planned)
    if any(abs(a - b) > tolerance for a, b in zip(*losses, strict=True)):
        found.append(f"losses {losses}")
    return found


def train_in_backwards(model: nn.Module) -> list[str]:
    """Have hooks scale and train each parameter; return the list of the names they are called for.

    The calls of the first kind differ in their scale, as a counter of calls would.
    """
    called: list[str] = []

    def scale(name: str, gradient: torch.Tensor) -> torch.Tensor:
        called.append(f"{name}.grad")
        return gradient * (1 + 0.01 * called.count(f"{name}.grad"))

    def train(name: str, optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
        called.append(name)
        optimizer.step()
        optimizer.zero_grad()

    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05, foreach=False)
        parameter.register_hook(partial(scale, name))
        parameter.register_post_accumulate_grad_hook(partial(train, name, optimizer))
    return called


def trained_in_backwards(
    make: Callable[[], Any],
    blocks_of: Callable[[Any], Iterable[nn.Module]],
    tighten: Callable[[rotor.Checkpointable], int],
    same: Callable[[Any], list[str]],
) -> list[str]:
    """Steps whose hooks train each parameter once, as in plain steps; measuring calls none."""
    models = [make() for _ in range(2)]
    for block in [block for model in models for block in blocks_of(model)]:
        fully_shard(block, mesh=init_device_mesh(DEVICE, (PROCESSES,)))
    called = [train_in_backwards(model) for model in models]
    before = [local(parameter).clone() for parameter in models[1].parameters()]
    planned = rotor.Checkpointable(models[1], batch(0), "1GB")
    found = [f"measuring called {len(called[1])} hooks"] if called[1] else []
    if not all(map(torch.equal, before, map(local, planned.parameters()))):
        found.append("measuring changed parameters")
    found += compare(models[0], planned, 3, same=same)
    tighten(planned)
    found += compare(models[0], planned, 3, same=same)
    return found if sorted(called[0]) == sorted(called[1]) else [*found, "other calls of hooks"]


def refused(call: Callable[[], Any], kind: type[Exception], words: str) -> list[str]:
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"expected {words!r}: {error}"]
    except Exception as error:
        return [f"expected {kind.__name__}, not {type(error).__name__}: {error}"]
    return [f"nothing was refused, expected {words!r}"]


def in_order(
    make: Callable[[], nn.Module], shard: Callable[..., Any], shard_first: bool, **options: Any
) -> tuple[Any, rotor.Checkpointable]:
    """Return a plain sharded model and a planned one, sharded before or after it is wrapped."""
    plain, model = shard(make(), **options), make()
    if shard_first:
        planned = rotor.Checkpointable(shard(model, **options), batch(0), "1GB")
    else:
        planned = rotor.Checkpointable(model)
        shard(planned, **options)
        planned.measure(batch(0))
        planned.compute_sequence(mem_limit="1GB")
    return plain, planned


def ranks_that_differ(
    plain: Any,
    module: Any,
    tighten: Callable[[rotor.Checkpointable], int],
    same: Callable[[rotor.Checkpointable], list[str]],
    more: int,
    nothing: Any,
) -> list[str]:
    """Batches of other sizes, limits, and no batch at all on one rank."""
    rank = dist.get_rank()
    planned = rotor.Checkpointable(module)
    planned.measure(batch(0))
    limit = tighten(planned)
    planned.compute_sequence(mem_limit=limit + (1 - rank) * more)
    found = same(planned)
    if planned.plan.limit_bytes != limit:
        found.append("the least limit does not hold")
    planned.mem_limit = 2 * limit
    for model in (plain, planned):
        torch.manual_seed(3)
        model(batch(0)).sum().backward()
        model(batch(1, rows=256 + 32 * rank)).sum().backward()
    found += differences(plain, planned) + same(planned)
    kind, words = (ValueError, "no tensor") if rank else (rotor.common.ranks.RankError, "rank 1")
    found += refused(lambda: planned(nothing if rank else batch(0)), kind, words)
    for model in (plain, module):
        forget_iteration(model)
    return found


def forget_iteration(model: Any) -> None:
    """Forget a step that was not finished, where FSDP2 can be told to: from PyTorch 2.13 on."""
    getattr(model, "reset_iter_state", lambda: None)()
