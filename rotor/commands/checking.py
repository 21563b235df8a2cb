"""Models of ``rotor check``, trained plain and within a limit."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import devices
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.meter import allocator
from rotor.units import exact_bytes
from rotor.wrapper.checkpointable import Checkpointable

_STEPS = 4
_WIDTH = 256


class _Skips(nn.Module):
    """Layers with residual connections, which are no chain."""

    def __init__(self, varies: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(6))
        self.norm, self.drop, self.varies = nn.LayerNorm(_WIDTH), nn.Dropout(0.1), varies

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output; the depth depends on the data if it varies."""
        is_short = self.varies and bool(value[0, 0] > 10)
        for layer in self.layers[: len(self.layers) - is_short]:
            value = self.norm(value + self.drop(torch.tanh(layer(value))))
        return value


def _chain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(8)])


_MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "chain": (_chain, {"engine": "chain"}),
    "graph": (_Skips, {"engine": "graph"}),
    "reserved": (_Skips, {"engine": "graph", "counts": "reserved"}),
    "dynamic": (lambda: _Skips(varies=True), {"engine": "dynamic"}),
}


def settings_of(device: torch.device) -> dict[str, Any]:
    """Return settings that decide about an accelerator's memory and kernels."""
    if device.type == "cpu":
        return {}
    return {
        "libraries": [str(part) for part in devices.libraries(device)],
        "expandable_segments": devices.expandable_segments(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "capability": str(torch.accelerator.get_device_capability(device)),
    }


def checked(name: str, device: torch.device, size: int, share: float) -> dict[str, Any]:
    """Train a model plain and within a limit; return the figures as plain data.

    `size` is the scale of the input, and `share` the limit as a share of the plain step's peak.
    """
    make, options = _MODELS[name]
    counts = options.get("counts", "allocated")
    figures: dict[str, Any] = {"name": name, "counts": counts, "refused": "", "held": True}
    figures |= dict.fromkeys(
        ("plain_bytes", "limit_bytes", "predicted_bytes", "measured_bytes", "within", "equal")
    )
    if counts == "reserved" and device.type == "cpu":
        return figures | {"refused": "accelerators only"}
    torch.manual_seed(0)
    model = make().to(device)
    # 20 MiB is a segment: reserved limits are about several of them.
    rows = 1000 * size * (3 if counts == "reserved" else 1)
    batches = [torch.randn(rows, _WIDTH, device=device) for _ in range(_STEPS)]
    twin = copy.deepcopy(model)
    plain = _Training(twin, batches[:2], device, counts)
    figures["plain_bytes"] = plain.peak_bytes
    limit = figures["limit_bytes"] = int(plain.peak_bytes * share)
    expected = _Training(twin, batches, device, counts)
    del twin
    with warnings.catch_warnings(action="ignore", category=MemoryLimitWarning):
        try:
            wrapped = Checkpointable(model, mem_limit=limit, loss_fn=_loss, verbosity=-1, **options)
            wrapped.measure(batches[0], targets=(batches[0],))
            found = _Training(wrapped, batches, device, counts)
        except InfeasibleError as error:
            return figures | {"refused": f"infeasible below {exact_bytes(error.minimum_bytes)}"}
    plan: Any = wrapped.plan
    predicted = None if name == "dynamic" else plan.predicted_bytes
    measured = max(found.peak_bytes, plan.measured_bytes or 0)
    within, equal = measured <= limit, found.results_equal(expected)
    return figures | {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "within": within,
        "equal": equal,
        "held": within and equal,
        "plain_seconds": expected.seconds,
        "seconds": found.seconds,
    }


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class _Training:
    """Losses, gradients, time and peak of some steps; on the CPU, of the last one's meter."""

    def __init__(
        self, model: nn.Module, batches: Sequence[torch.Tensor], device: torch.device, counts: str
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.peak_bytes, self.seconds = 0, 0.0
        torch.manual_seed(1)
        gc.collect()
        if device.type != "cpu":
            devices.release_cached(device)
        reserved = 0 if device.type == "cpu" else devices.reserved_bytes(device)
        for number, batch in enumerate(batches):
            model.zero_grad()
            is_last = number == len(batches) - 1
            begin = time.perf_counter()
            if device.type == "cpu" and is_last and not isinstance(model, Checkpointable):
                with allocator.meter(device) as meter:
                    loss = self._step(model, batch)
                self.peak_bytes = meter.peak_bytes
            elif device.type == "cpu":
                loss = self._step(model, batch)
            else:
                loss = self._counted(model, batch, device)
                if counts == "reserved":
                    self.peak_bytes = devices.reserved_bytes(device) - reserved
            self.seconds = time.perf_counter() - begin
            self.losses.append(loss.detach().cpu())
            del loss
        self.gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        model.zero_grad()

    @staticmethod
    def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(model, Checkpointable):
            loss: torch.Tensor = model(batch, targets=(batch,))
        else:
            loss = _loss(model(batch), batch)
        loss.backward()
        return loss

    def _counted(self, model: nn.Module, batch: torch.Tensor, device: torch.device) -> torch.Tensor:
        level = devices.allocated_bytes(device)
        devices.reset_peak(device)
        loss = self._step(model, batch)
        devices.synchronize(device)
        self.peak_bytes = max(self.peak_bytes, devices.counters(device)[1] - level)
        return loss

    def results_equal(self, other: _Training) -> bool:
        """Return whether losses and gradients are the same bits."""
        pairs = [*zip(self.losses, other.losses, strict=True)]
        pairs += zip(self.gradients, other.gradients, strict=True)
        return all(torch.equal(one, two) for one, two in pairs)
