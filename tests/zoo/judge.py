"""The outcome of training a case within a limit: equal and within, or refused in words."""

from __future__ import annotations

import copy
import gc
import random
import re
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from zoo.cases import ZOO, Case, tensors

import rotor
from rotor import memory

CLOSE = 1e-5
EQUAL, REFUSED = "equal and within the limit", "refused in words"
OVER = "over the limit"
WARNED = "equal, and the excess was told"
_NEED = re.compile(
    r"(?:needed (?:about )?|need of a step, |a budget of )(?:[\d.]+ \w+ \()?(\d+) bytes"
)
_NAMED_WITHIN = 0.05
_REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def _randomness() -> list[Any]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest]


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().clone()


@dataclass
class Snapshot:
    """What a step leaves behind."""

    tensors: dict[str, torch.Tensor | None]
    state: Any
    randomness: list[Any]

    @classmethod
    def of(cls, case: Case, net: nn.Module, loss: torch.Tensor | None = None) -> Snapshot:
        """Copy the parameters, gradients, buffers and Python values of a model."""
        found: dict[str, torch.Tensor | None] = {"loss": _dense(loss)}
        for name, parameter in net.named_parameters():
            found[name] = _dense(parameter)
            found[f"gradient of {name}"] = _dense(parameter.grad)
        found |= {f"buffer {name}": _dense(buffer) for name, buffer in net.named_buffers()}
        return cls(found, case.state(net), _randomness())

    def difference(self, other: Snapshot) -> tuple[float, str]:
        """Return the largest relative difference and the name of its tensor."""
        if self.state != other.state:
            return float("inf"), f"Python state {self.state} became {other.state}"
        if self.randomness != other.randomness:
            return float("inf"), "random states"
        worst, where = 0.0, ""
        for name, tensor in self.tensors.items():
            ratio = _ratio(tensor, other.tensors.get(name))
            if ratio > worst:
                worst, where = ratio, name
        return worst, where


def _ratio(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan())
                             and torch.equal(a.nan_to_num(), b.nan_to_num())):  # fmt: skip
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs().max().item()
    scale = a.to(wide).abs().max().item()
    return distance / scale if scale else float("inf")


@dataclass
class Plain:
    """The steps of the plain model, and the bytes of one."""

    steps: list[Snapshot] = field(default_factory=list)
    peak_bytes: int = 0
    gradient_bytes: int = 0

    def limit(self, share: float) -> int:
        """A limit: the gradients' bytes and this share of the rest of the plain peak."""
        return self.gradient_bytes + int((self.peak_bytes - self.gradient_bytes) * share)


def _make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    _seed(1)
    net = case.make()
    return net, case.optimizer(net)


def _input_bytes(case: Case, k: int) -> int:
    """Return the bytes of a step's batch, which a limit does not count."""
    with torch.random.fork_rng():
        return memory.storage_bytes(tensors([*case.inputs(k), *case.keywords(k).values()]))


def _meter(net: nn.Module) -> memory.Meter:
    """Return a meter that sees what a step frees of tensors that the one before has kept."""
    return memory.meter("cpu", existing=tensors([list(vars(m).values()) for m in net.modules()]))


def train_plain(case: Case) -> Plain:
    """Train the plain model."""
    net, optimizer = _make(case)
    plain = Plain()
    for k in range(case.steps):
        _seed(100 + k)
        loss = case.step(case, net, net, optimizer, k)
        plain.steps.append(Snapshot.of(case, net, loss))
    net, optimizer = _make(case)
    for k in range(case.steps):
        _seed(100 + k)
        if not case.keeps_gradients:
            optimizer.zero_grad()
        with _meter(net) as meter:
            case.step(case, net, net, optimizer, k)
        plain.peak_bytes = max(plain.peak_bytes, int(meter.peak_bytes) - _input_bytes(case, k))
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    plain.gradient_bytes = memory.storage_bytes(gradients)
    return plain


@dataclass(frozen=True)
class Cell:
    """The outcome of one case under one engine and one limit."""

    outcome: str
    detail: str
    peak_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the outcome is an allowed one."""
        return self.outcome in (EQUAL, REFUSED, WARNED)


def judge(name: str, engine: str, share: float, plain: Plain) -> Cell:
    """Train a case within a limit and compare every step with the plain model's."""
    case = ZOO[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            limit_bytes = plain.limit(share)
            try:
                cell = _judge(case, engine, limit_bytes, plain, is_metered=case.pending > 0)
            except memory.MeterBusyError:
                # A step that has to measure cannot be metered from outside.
                cell = _judge(case, engine, limit_bytes, plain, is_metered=False)
            if cell.outcome == OVER and case.varies:
                if not covers(_told(caught), cell.peak_bytes):
                    # The model's own meter saw nothing while another was running.
                    _judge(case, engine, limit_bytes, plain, is_metered=False)
                if covers(_told(caught), cell.peak_bytes):
                    cell = replace(cell, outcome=WARNED)
            return replace(cell, warnings=tuple(sorted(_told(caught))))
        finally:
            torch._dynamo.reset()
            gc.collect()


def _told(caught: list[warnings.WarningMessage]) -> set[str]:
    return {str(w.message) for w in caught if issubclass(w.category, rotor.MemoryLimitWarning)}


def covers(texts: Iterable[str], peak_bytes: int) -> bool:
    """Return whether a warning names a need that covers a metered peak, within 5 %."""
    needs = [int(n) for text in texts for n in _NEED.findall(text)]
    return max(needs, default=0) >= peak_bytes * (1 - _NAMED_WITHIN)


def _judge(case: Case, engine: str, limit_bytes: int, plain: Plain, *, is_metered: bool) -> Cell:
    net, optimizer = _make(case)
    options = {"effort": "fast"} if engine == "graph" else {}
    worst, where = 0.0, ""
    peaks = []
    model = _Entrance(
        rotor.Checkpointable(net, mem_limit=limit_bytes, engine=engine, **options),
        lambda: Snapshot.of(case, net),
    )
    try:
        for k in range(case.steps):
            _seed(100 + k)
            last = k >= case.steps - 2
            last &= is_metered
            if not case.keeps_gradients:
                optimizer.zero_grad()
            if last:
                # A copy within a meter would be counted.
                model.before, model.is_metered = Snapshot.of(case, net), True
            with _meter(net) if last else _NoMeter() as meter:
                loss = case.step(case, model, net, optimizer, k)
            if last:
                peaks.append(int(meter.peak_bytes) - _input_bytes(case, k))
            ratio, at = plain.steps[k].difference(Snapshot.of(case, net, loss))
            if ratio > worst:
                worst, where = ratio, f"{at} in step {k}"
            del loss
    except memory.MeterBusyError:
        raise
    except Exception as error:
        return _refusal(error, Snapshot.of(case, net), model.before)
    if worst > (CLOSE if engine in ("auto", "graph") else 0):
        return Cell("wrong numbers", f"{where}: {worst:.2g} relative")
    allowed = limit_bytes * case.pending
    if peaks and max(peaks) > allowed:
        excess = f"{max(peaks) / allowed - 1:+.2%}"
        return Cell(
            OVER,
            f"peak {max(peaks)} of {allowed} bytes ({excess}), plain {plain.peak_bytes}",
            max(peaks) // case.pending,
        )
    return Cell(EQUAL, "" if worst == 0 else f"{worst:.1e} relative")


class _Entrance:
    """A model that notes what a call finds."""

    def __init__(self, model: Any, look: Any) -> None:
        self.model, self._look = model, look
        self.before = look()
        self.is_metered = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_metered:
            # The batch was drawn after the copy.
            self.before.randomness = _randomness()
        else:
            self.before = self._look()
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.model, memo)


class _NoMeter:
    peak_bytes = 0

    def __enter__(self) -> _NoMeter:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _refusal(error: Exception, after: Snapshot, before: Snapshot) -> Cell:
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raised_here = "/rotor/" in frames[-1].filename or type(error).__module__.startswith("rotor")
    if not raised_here or not isinstance(error, _REFUSALS) or len(str(error)) < 40:
        place = f"{frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno}"
        return Cell("crashed", f"{text} at {place}")
    ratio, where = before.difference(after)
    if ratio:
        return Cell("refused after a change", f"{where}; {text}")
    return Cell(REFUSED, text)
