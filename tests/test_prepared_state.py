"""Forwards that prepare a model: what the next one changes again does not stay."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from rotor.common.dependencies import Dependencies, Record
from rotor.engines.graph.calls import run_once


class Noting(nn.Module):
    """Notes figures, by name, in a container of any kind that the first forward makes."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda _, __, output: note(output.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Statistics:
    pass


def in_lists(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("norms", []).append(value.norm().item())


def in_nested(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("layer", {}).setdefault("norms", []).append(value.norm().item())


def in_objects(notes: Any, value: torch.Tensor) -> None:
    found = notes.setdefault("layer", Statistics())
    found.seen = getattr(found, "seen", 0) + 1


def in_tensors(notes: Any, value: torch.Tensor) -> None:
    if "mean" in notes:
        notes["mean"].mul_(0.9).add_(value.mean(), alpha=0.1)
    else:
        notes["mean"] = value.mean()


def in_lists_of_tensors(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("sums", [torch.zeros(4)])[0].add_(value.sum(0))


def in_tuples(notes: Any, value: torch.Tensor) -> None:
    notes.setdefault("pair", ([], "norms"))[0].append(value.norm().item())


@pytest.mark.parametrize(
    "note", [in_tuples, in_lists, in_nested, in_objects, in_tensors, in_lists_of_tensors]
)
def test_figures_in_new_containers_do_not_stay(note):
    notes: dict[str, Any] = defaultdict(list)
    model = Noting(lambda value: note(notes, value))
    assert run_once(model, (torch.ones(2, 4),), {})
    assert notes == {}


def test_a_cache_that_is_only_read_again_stays():
    notes: dict[str, Any] = {}
    model = Noting(lambda value: notes.setdefault(len(value), torch.arange(len(value))))
    assert run_once(model, (torch.ones(2, 4),), {})
    assert list(notes) == [2]


def test_state_in_a_tuple_is_compared_by_identity():
    # An evicted tensor has nothing to compare.
    layer = nn.Linear(2, 2)
    layer.state = before = (torch.ones(1),)
    record = Record(Dependencies([("layer", layer)]).recorded())
    layer.state = (torch.ones(1),)
    record.restore((), [])
    assert layer.state is before
