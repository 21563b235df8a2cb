"""Calls made of samples, and their signatures."""

from __future__ import annotations

import math

import pytest
import torch

from rotor.common.calls import call_signature, leaf_signature, sample_call

X, Y = torch.ones(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("sample", "options", "expected"),
    [
        (X, {}, ((X,), {})),
        ((X, Y), {}, ((X, Y), {})),
        ({"x": X}, {}, ((), {"x": X})),
        ([X, Y], {}, (([X, Y],), {})),
        ([X, Y], {"takes_lists": True}, ((X, Y), {})),
        ((X, Y), {"takes_lists": True}, ((X, Y), {})),
        ((X, Y), {"is_one": True}, (((X, Y),), {})),
        ({"x": X}, {"is_one": True}, (({"x": X},), {})),
        ((), {}, ((), {})),
    ],
)
def test_a_sample_stands_for_arguments(sample, options, expected):
    assert sample_call(sample, **options) == expected


def test_other_objects_count_by_type_and_numbers_by_their_bits():
    a, b = object(), object()
    assert leaf_signature(a) == leaf_signature(b)
    assert leaf_signature(1) != leaf_signature(True)
    assert leaf_signature(0.0) != leaf_signature(-0.0)
    assert leaf_signature(math.nan) == leaf_signature(math.nan)


def test_a_signature_has_the_layout_and_autocast_of_every_device():
    same = call_signature((X,), {"y": Y})
    assert same == call_signature((X.clone(),), {"y": Y + 1})
    assert same != call_signature((X.t().contiguous().t(),), {"y": Y})
    assert same != call_signature((X.to_sparse(),), {"y": Y})
    mixed = (X, torch.ones(1, device="meta"))
    before = call_signature(mixed, {})
    with torch.autocast("cpu", torch.bfloat16):
        assert call_signature(mixed, {}) != before
        assert call_signature((X,), {"y": Y}) != same
