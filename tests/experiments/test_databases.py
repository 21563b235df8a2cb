"""PyTorch's own databases of operators and modules, each inside a small model at its least limit.

Run as a script, this file judges some of them in a process of its own: importing the databases
changes settings of PyTorch. ``ROTOR_SAMPLES`` sets how many samples of each operator and module are
taken; 0: all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import children
import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training import weighted_loss

import rotor

ENGINES = ("auto", "graph", "dynamic")
TYPES = (torch.float32, torch.bfloat16)
SAMPLES = int(os.environ.get("ROTOR_SAMPLES", "1")) or None
SHARDS = 40
QUICK = (
    "add",
    "cumprod",
    "index_put",
    "linalg.eig",
    "linalg.inv",
    "linalg.solve",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.group_norm",
    "nn.functional.hardshrink",
    "nn.functional.interpolate.bilinear",
    "nn.functional.scaled_dot_product_attention",
    "sgn",
    "sort",
    "split.list_args",
    "transpose",
    "chalf",
    "to_sparse",
    "nn.BatchNorm1d",
    "nn.CircularPad2d",
    "nn.GRU",
    "nn.LazyConv1d",
    "nn.MultiLabelMarginLoss",
    "nn.MultiMarginLoss",
    "nn.MultiheadAttention",
)
TRIES = 8
ROUNDED = ("addcdiv", "masked.prod", "std_mean")
"""Operators that captured graphs round in another way than eager PyTorch, for some samples."""
UNREPEATED = ("linalg.lstsq",)
"""Operators whose bits depend on where their matrices lie."""
REFUSED = (rotor.CaptureError, RuntimeError, ValueError, TypeError)


class Operator(nn.Module):
    """Model that runs an operator on its scaled arguments."""

    def __init__(self, run: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.run = nn.Parameter(torch.ones((), dtype=dtype)), run

    def forward(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the operator's results."""
        return self.run(_pytree.tree_map(self._scaled, value), *args, **kwargs)

    def _scaled(self, value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value * self.scale if is_number and value.layout == torch.strided else value


def _leaves(value: Any) -> list[torch.Tensor]:
    return [t for t in _pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _squares(t: torch.Tensor) -> torch.Tensor:
    return (t * t.conj()).real.mean() if t.is_complex() else (t * t).mean()


def _weighted(t: torch.Tensor) -> torch.Tensor:
    return _squares(t) if t.is_complex() else weighted_loss(t)


def _loss(output: Any, of_one: Any) -> torch.Tensor | None:
    found = [t for t in _leaves(output) if t.requires_grad and t.numel()]
    parts = [of_one(t if t.layout == torch.strided else t.to_dense()) for t in found]
    return torch.stack([part.double() for part in parts]).sum() if parts else None


def _copied(value: Any) -> Any:
    return _pytree.tree_map(
        lambda t: (
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        ),
        value,
    )


def _step(
    model: nn.Module, net: nn.Module, given: Any, of_one: Any
) -> list[torch.Tensor | None] | None:
    """Return outputs, gradients and buffers of a step; ``None`` if nothing needs a gradient."""
    args, kwargs = _copied(given)
    net.zero_grad()
    torch.manual_seed(1)
    output = model(*args, **kwargs)
    loss = _loss(output, of_one)
    if loss is None:
        return None
    loss.backward()
    leaves = [*net.parameters(), *(t for t in _leaves((args, kwargs)) if t.is_leaf)]
    found = [*_leaves(output), *[leaf.grad for leaf in leaves], *net.buffers()]
    return [None if t is None else t.detach().clone() for t in found]


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.layout != torch.strided:
        return one is other or (other is not None and one is not None)
    if one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(t.resolve_conj()) for t in (one, other))
    return torch.equal(
        one.nan_to_num(nan=0.5) if one.is_floating_point() else one,
        other.nan_to_num(nan=0.5) if other.is_floating_point() else other,
    )


def _is_close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether values are equal but for the rounding of a captured graph."""
    if _is_same(one, other):
        return True
    if one is None or other is None or one.dtype != other.dtype or not one.is_floating_point():
        return False
    share = max(1e-5, 8 * torch.finfo(one.dtype).eps)
    most = other.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(one, other, 0.0, share * most, equal_nan=True)


class _Nothing(TorchDispatchMode):
    """Mode that leaves operators alone: under any, some formulas of PyTorch take other branches."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LOSSES = (_squares, _weighted)


def _steps(make: Any, given: Any) -> list[Any]:
    """The results of plain steps, one of each loss."""
    plain = _made(make)
    return [_step(plain, plain, given, of_one) for of_one in LOSSES]


def _are_same(found: list[Any], wanted: list[Any], is_same: Any) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(len(one) == len(other) and all(map(is_same, one, other)) for one, other in pairs)


def _judge(make: Any, given: Any, engine: str, is_same: Any = _is_same) -> None:
    """Compare two steps at the least limit with the plain model's; "graph" may refuse in words."""
    try:
        wanted = _steps(make, given)
    except Exception:  # PyTorch's own: such as a view of a larger storage, which a copy lacks.
        return
    if wanted[0] is None:
        return
    options: dict[str, Any] = {"effort": "fast"} if engine == "graph" else {}
    limit_bytes = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(TRIES):  # What the dynamic engine needs depends on measured times.
            net = _made(make)
            model = rotor.Checkpointable(net, mem_limit=limit_bytes, engine=engine, **options)
            try:
                found = [_step(model, net, given, of_one) for of_one in LOSSES]
            except rotor.InfeasibleError as error:
                limit_bytes = error.minimum_bytes
            except REFUSED as error:
                if engine != "graph" or len(str(error)) < 40:
                    raise
                return
            else:
                break
    if engine != "graph" and not _are_same(found, wanted, is_same):
        with _Nothing():
            wanted = _steps(make, given)
    assert _are_same(found, wanted, is_same)


def _made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from islice(op.sample_inputs("cpu", dtype, requires_grad=True), SAMPLES)


def _operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in op_db
        if torch.float32 in op.supported_backward_dtypes("cpu")
    }


def _modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def _judge_operator(op: Any, engine: str) -> None:
    for dtype in TYPES:
        if dtype in op.supported_backward_dtypes("cpu"):
            torch.manual_seed(0)
            for sample in _samples(op, dtype):
                given = ((sample.input, *sample.args), dict(sample.kwargs))
                is_rounded = op.name in UNREPEATED or (engine != "dynamic" and op.name in ROUNDED)
                is_same = _is_close if is_rounded else _is_same
                _judge(lambda dtype=dtype: Operator(op.op, dtype), given, engine, is_same)


def _judge_module(info: Any, engine: str) -> None:
    for dtype in TYPES:
        if dtype not in info.dtypes:
            continue
        torch.manual_seed(0)
        found = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=True
        )
        for sample in islice(found, SAMPLES):
            if sample.forward_input is None:
                continue
            built = sample.constructor_input

            def make(built: Any = built, dtype: torch.dtype = dtype) -> nn.Module:
                return info.module_cls(*built.args, **built.kwargs).to(dtype)

            given = (tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
            _judge(make, given, engine)


def work(engine: str, shard: str) -> None:
    """Print what went wrong, by name: of the quick ones, or of a shard of all."""
    torch.set_num_threads(1)
    operators, modules = _operators(), _modules()
    names = [*operators, *modules]
    chosen = QUICK if shard == "quick" else names[int(shard) :: SHARDS]
    found = {}
    for name in chosen:
        try:
            if name in operators:
                _judge_operator(operators[name], engine)
            else:
                _judge_module(modules[name], engine)
        except Exception as error:  # All of them are judged.
            found[name] = f"{type(error).__name__}: {error}"[:300]
        torch._dynamo.reset()
    print(json.dumps(found))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shard", ["quick", *(pytest.param(str(k), marks=pytest.mark.slow) for k in range(SHARDS))]
)
def test_operators_and_modules_are_equal_at_their_least_limit(shard: str, engine: str) -> None:
    pytest.importorskip("expecttest")
    command = [sys.executable, __file__, engine, shard]
    done = subprocess.run(
        command, capture_output=True, text=True, env=children.environment(), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


if __name__ == "__main__":
    work(*sys.argv[1:])
