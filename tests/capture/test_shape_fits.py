"""Sizes by expressions and costs by fits, against what captures and measures give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rotor.engines.graph.capture import Capture, fresh
from rotor.engines.graph.costs.profile import keys_of
from rotor.engines.graph.costs.symbols import AnySize, Fits, Point, at, origin_values

CPU = torch.device("cpu")


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def test_a_graph_with_symbols_is_that_of_each_shape():
    module = model()
    x = torch.randn(4, 3, 20, 30)
    found = Capture(fresh(call)).reach(module, x, symbolic=[(x, d) for d in (0, 2, 3)])
    lowered = found.captured.lowered
    sizes = AnySize(lowered, CPU, None, {})
    assert len(lowered.symbols) == 3
    for shape in ((4, 3, 20, 30), (2, 3, 33, 17), (7, 3, 24, 41)):
        given = torch.randn(shape)
        primals = [given if p is x else p for p in found.primals]
        values = []
        for place, dimension in lowered.symbols.values():
            if dimension is not None:
                values.append(primals[place].shape[dimension])
            else:
                values.append(shape[(4, 3, 20, 30).index(primals[place])])
        alone = Capture(fresh(call)).reach(module, given).captured.lowered
        storages, _, _ = sizes.of(tuple(values))
        assert storages.tolist() == [size for size, _ in alone.storages]
        concrete = at(lowered, storages.tolist(), values)
        assert keys_of(concrete, CPU) == keys_of(alone, CPU)
    assert origin_values(lowered, found.primals) == tuple(
        int(p) if d is None else p.shape[d]
        for p, d in [(found.primals[k], d) for k, d in lowered.symbols.values()]
    )


def point(values, ns, workspace, work) -> Point:
    amounts = np.array(work, dtype=np.float64)
    return Point(values, np.array(ns, dtype=np.float64), np.array(workspace), amounts, amounts)


def test_times_follow_the_work():
    fits = Fits()
    fits.add(point((10,), [10_000, 3_000], [0, 0], [100, 100]))
    # Of one shape only the launch is known not to grow.
    assert fits.ns(np.array([200.0, 200.0])).tolist() == [17_000, 3_000]
    fits.add(point((30,), [20_000, 2_000], [0, 0], [300, 300]))
    assert fits.ns(np.array([200.0, 200.0]))[0] == pytest.approx(15_000, abs=2)
    # Noise gives no negative times.
    assert fits.ns(np.array([1e6, 1e6]))[1] > 1_900
    assert fits.ns(np.array([0.0, 0.0])).min() >= 0


def test_workspaces_are_bounded_from_above():
    fits = Fits()
    fits.add(point((10,), [1, 1, 1], [0, 1_000, 100], [100, 100, 100]))
    fits.add(point((20,), [1, 1, 1], [0, 1_000, 400], [200, 200, 200]))

    def bound(value: int) -> list[int]:
        return fits.workspaces((value,), np.full(3, 10.0 * value)).tolist()

    assert bound(10) == [0, 1_000, 100]
    assert bound(15) == [0, 1_000, 400]
    # A quadratic one goes on as it grew, a constant one at most as the bytes.
    assert bound(40) == [0, 2_000, 1_600]
