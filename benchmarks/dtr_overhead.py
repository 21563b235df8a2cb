"""What the dynamic runtime costs an operator: tiny tensors, so that nothing else takes time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import open_device
from torch.utils._python_dispatch import TorchDispatchMode

from rotor import dtr

OPERATORS = 300
ROUNDS = 40


class PassThrough(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        return func(*args, **(kwargs or {}))


def forward(x: torch.Tensor) -> None:
    """A chain of products without gradients."""
    with torch.no_grad():
        for _ in range(OPERATORS):
            x = x * x


def training(x: torch.Tensor) -> None:
    """A chain of products and its backward."""
    y = x
    for _ in range(OPERATORS):
        y = y * x
    y.sum().backward()


def microseconds(
    work: Callable[[torch.Tensor], None], context: Callable[[], Any], device: torch.device
) -> float:
    """Wall time of one operator of the forward; the least of all rounds."""
    x = torch.ones(100, requires_grad=True, device=device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = []
    with context():
        for _ in range(ROUNDS):
            start = now()
            work(x)
            times.append((now() - start) / OPERATORS * 1e6)
            x.grad = None
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = open_device(parser.parse_args().device)
    contexts: dict[str, Callable[[], Any]] = {
        "eager": nullcontext,
        "mode that does nothing": PassThrough,
        "rotor.dtr, no limit": lambda: dtr.budget(None, device=device),
    }
    print(f"microseconds per operator of the forward, {OPERATORS} operators on 100 floats")
    print(f"{'':24}{'forward':>10}{'training':>10}")
    for name, context in contexts.items():
        print(
            f"{name:24}{microseconds(forward, context, device):10.2f}"
            f"{microseconds(training, context, device):10.2f}"
        )


if __name__ == "__main__":
    main()
