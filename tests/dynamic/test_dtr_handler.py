"""The handler in C of the dynamic runtime: what it counts, keys and lets go."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from dynamic_cases import CASES, Plain

from rotor import _core, dtr, memory
from rotor._pytorch import dispatch
from rotor.dtr import signatures
from rotor.dtr.operators import Operator

aten = torch.ops.aten


def test_twenty_thousand_operators_leave_no_references():
    x = torch.randn(64, 8, requires_grad=True)
    w = torch.randn(8, 8)
    number = 123456789.25
    parts: list[Any] = [x, w, torch.float32, torch.strided, torch.Tensor, number]

    def work(count: int) -> None:
        for _ in range(count):
            y = torch.cat([x @ w, x, x], 1).mul(number)
            y = torch.stack([y, y]).sum(0, dtype=torch.float32)
            y.add_(1.0)
            first, second = torch.split(y.exp(), 8, 1)[:2]
            with pytest.raises(RuntimeError, match="size of tensor"):
                first + y
            with torch.no_grad():
                x.add_(second, alpha=0.0)

    with dtr.budget(None) as session:
        work(20)
        gc.collect()
        before = [sys.getrefcount(part) for part in parts]
        objects = len(gc.get_objects())
        counters = session.counters()
        work(2_520)
        gc.collect()
        after = [sys.getrefcount(part) for part in parts]
        assert session.counters()["operations"] - counters["operations"] >= 20_000
        assert session.counters()["nodes"] == counters["nodes"]
        assert session.counters()["records"] == counters["records"]
        assert session.counters()["current_bytes"] == counters["current_bytes"]
        # One lost in each round would be 2,520; other code of the process makes some, too.
        assert len(gc.get_objects()) <= objects + 1_000
    assert all(abs(b - a) <= 1_000 for a, b in zip(before, after, strict=True))


def test_sessions_are_let_go():
    def one() -> None:
        with dtr.budget("1MiB"):
            x = torch.randn(100, requires_grad=True)
            (x * 2).sum().backward()

    def alive() -> int:
        gc.collect()
        kinds = (_core.Recorder, _core.Handler, _core.StorageRef, _core.Kernel)
        return sum(type(found) in kinds for found in gc.get_objects())

    one()
    before = alive()
    for _ in range(5):
        one()
    assert alive() <= before


@pytest.mark.parametrize("name", ["gpt", "lstm", "treelstm"])
def test_without_dlpack_attributes_are_read(name, monkeypatch):
    plain = Plain(CASES[name])
    parts = dispatch.handler_parts
    monkeypatch.setattr(dispatch, "handler_parts", lambda device: (*parts(device)[:-1], None))
    limit = int(plain.peak_bytes * 0.6)
    equal, peak_bytes, stats = plain.under(limit)
    assert equal
    assert peak_bytes <= limit
    assert stats.rematerializations > 0


def shared_weight(weight: torch.Tensor, keep: Any = None) -> torch.Tensor:
    parts = [torch.tanh(weight * k) for k in (1.0, 2.0, 3.0, 4.0)]
    if keep is not None:
        for part in parts:
            part.grad_fn.next_functions[0][0].register_hook(lambda made, _: keep.append(made[0]))
    torch.stack(parts).sum().backward()
    gradient, weight.grad = weight.grad, None
    assert gradient is not None
    return gradient


def test_gradients_add_up_in_place_as_without_a_mode():
    weight = torch.linspace(-1, 1, 50_000).requires_grad_()
    with memory.meter("cpu") as plain:
        expected = shared_weight(weight)
    with dtr.budget(None) as session:
        shared_weight(weight)
    with memory.meter("cpu") as meter, dtr.budget(None) as session:
        found = shared_weight(weight)
        assert session.stats.peak_bytes < plain.peak_bytes + 4096
    assert torch.equal(found, expected)
    assert meter.peak_bytes < plain.peak_bytes + 4096


def test_gradients_that_somebody_keeps_do_not_change():
    weight = torch.linspace(-1, 1, 50_000).requires_grad_()
    first: list[torch.Tensor] = []
    expected = shared_weight(weight, first)
    copies = [value.clone() for value in first]
    for _ in range(2):
        kept: list[torch.Tensor] = []
        with dtr.budget(None):
            found = shared_weight(weight, kept)
        assert torch.equal(found, expected)
        assert len(kept) == 4
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_only_the_engines_own_sums_are_made_in_place():
    assert dispatch.sole_owners() is not None

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            half = gradient * 0.5
            return (half + gradient) * half

    weight = torch.linspace(-1, 1, 50_000).requires_grad_()

    def program() -> torch.Tensor:
        Twice.apply(weight * 2).sin().sum().backward()
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        return gradient

    expected = program()
    for _ in range(2):
        with dtr.budget(None):
            assert torch.equal(program(), expected)


def key_of(function: Any, *args: Any, **kwargs: Any) -> bytes | None:
    with dtr.budget(None) as session:
        return session._handler.signature(Operator(function).kernel, args, kwargs)


def test_signatures_tell_layouts_apart_and_floats_not():
    x = torch.ones(4, 3)
    mul = aten.mul.Tensor
    assert key_of(mul, x, x) == key_of(mul, torch.zeros(4, 3), x)
    others = [torch.ones(3, 4), torch.ones(3, 4).t(), torch.ones(4, 3, dtype=torch.float64), 1, 1.0]
    keys = {key_of(mul, x, other) for other in [x, *others]}
    assert len(keys) == len(others) + 1
    add = aten.add.Tensor
    assert key_of(add, x, x, alpha=0.5) == key_of(add, x, x, alpha=float("nan"))
    assert key_of(add, x, x, alpha=1) != key_of(add, x, x, alpha=2)
    assert key_of(add, x, x) != key_of(aten.sub.Tensor, x, x)
    assert key_of(aten.sum.dim_IntList, x, [0], False) != key_of(aten.sum.dim_IntList, x, [0], True)
    to = aten._to_copy.default
    assert key_of(to, x, dtype=torch.float64) != key_of(to, x, dtype=torch.float16)
    assert key_of(aten.arange.default, 2.0) != key_of(aten.arange.default, 3.0)
    assert key_of(mul, x, 1 << 70) is None


def test_what_is_known_of_operators_does_not_grow(monkeypatch):
    monkeypatch.setattr(signatures, "_needs", {})
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    with dtr.budget(None) as session:
        sizes = []
        for step in range(40):
            parameter.grad = torch.randn(1000)
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
            sizes.append(len(session._needs))
    assert sizes[-1] == sizes[3]
    monkeypatch.setattr(signatures, "_MOST_KNOWN", 3)
    known: dict[Any, Any] = {}
    for k in range(10):
        signatures.remember(known, bytes([k]), _core.Needs(0, 0, False))
        assert len(known) <= 3


def test_lazy_bits_survive_a_replay():
    def program(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32)
        kept = []
        for k in range(6):
            z = torch.polar(x + k, x)
            kept.append((z.conj() * z.conj(), z.conj().imag * 2))
        for a, b in kept:
            total = total + a.real.sum() + (b * b).sum()
        return total

    x = torch.randn(2000)
    expected = program(x)
    with dtr.budget(140_000) as session:
        found = program(x)
        assert session.stats.rematerializations > 0
    assert torch.equal(found, expected)


def test_settings_are_those_of_the_time():
    x = torch.randn(4000, requires_grad=True)
    with dtr.budget(None, guard=False) as session:
        x.exp()
        y = x.exp()
        torch.use_deterministic_algorithms(True)
        try:
            z = x.exp()
        finally:
            torch.use_deterministic_algorithms(False)
        w = x.exp()
        records = [
            session._book.describe(session._ref_of(tensor).node).record for tensor in (y, z, w)
        ]
    assert [record.flags[0] for record in records] == [False, True, False]
    assert records[0].flags[1:] == records[1].flags[1:]


def test_arguments_are_checked():
    with dtr.budget(None) as session:
        handler = session._handler
        with pytest.raises(TypeError, match="3 to 4 positional arguments"):
            session.__torch_dispatch__(aten.mul.Tensor)
        with pytest.raises(TypeError, match="tuple"):
            session.__torch_dispatch__(aten.mul.Tensor, (), [], None)
        with pytest.raises(TypeError, match="Kernel"):
            handler.signature(aten.mul.Tensor, (), {})
        with pytest.raises(TypeError, match="StorageRef"):
            handler.gone(3)
        with pytest.raises(TypeError, match="Record"):
            handler.rerun(3, (), None)
        with pytest.raises(RuntimeError, match="no operation has begun"):
            handler.catch_up(session)
        with pytest.raises(RuntimeError, match="has not entered"):
            handler.__exit__(None, None, None)
        with pytest.raises(TypeError, match="Handler"):
            session.handler = 3
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="entries"):
        _core.Handler(session._book, (), {}, {}, set(), cpu, None, 1, 256, 64, True)
    with pytest.raises(TypeError, match="cannot create"):
        _core.StorageRef(torch.ones(1).untyped_storage(), print)
    with pytest.raises(TypeError):
        _core.Record()


def test_while_a_cuda_graph_is_captured_operators_are_refused(monkeypatch):
    parts = dispatch.handler_parts
    asked = []

    def capturing() -> bool:
        asked.append(True)
        return len(asked) > 3

    monkeypatch.setattr(
        dispatch, "handler_parts", lambda device: (*parts(device)[:-2], capturing, None)
    )
    x = torch.ones(100)
    with dtr.budget(None, guard=False):
        for _ in range(3):
            aten.mul.Tensor(x, x)
        with pytest.raises(RuntimeError, match="CUDA graphs cannot be captured"):
            aten.mul.Tensor(x, x)
    assert len(asked) == 4
