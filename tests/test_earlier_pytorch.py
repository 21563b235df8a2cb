"""What PyTorch 2.11 does otherwise than 2.13, with any version."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rotor
from rotor._pytorch import core, fsdp

BATCH = torch.randn(256, 64)


class Tanhs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def least_bytes(model):
    """Smallest limit for which a plan is found; its step equals the plain one."""
    chk = rotor.Checkpointable(copy.deepcopy(model), engine="graph", effort="fast", verbosity=0)
    chk.measure(BATCH)
    with pytest.raises(rotor.InfeasibleError) as raised:
        chk.compute_sequence(mem_limit=1)
    chk.compute_sequence(mem_limit=raised.value.minimum_bytes)
    for step in (chk, model):
        step.zero_grad()
        step(BATCH).square().mean().backward()
    for a, b in zip(chk.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    return raised.value.minimum_bytes


@pytest.mark.filterwarnings("ignore:the limit of:rotor.MemoryLimitWarning")
def test_gradients_that_the_caller_of_a_backward_holds_are_counted(monkeypatch):
    model = Tanhs()
    monkeypatch.setattr(core, "hands_gradients_over", lambda: True)
    without = least_bytes(model)
    monkeypatch.setattr(core, "hands_gradients_over", lambda: False)
    assert least_bytes(model) >= without + BATCH.nbytes // 2


def test_a_capture_is_silent_where_dynamo_cannot_write_its_settings(monkeypatch, caplog):
    def written():
        return str(sorted(torch._dynamo.config.ignore_logging_functions))

    monkeypatch.setattr(torch._dynamo.utils, "_get_dynamo_config_for_logging", written)
    chk = rotor.Checkpointable(Tanhs(), mem_limit="1GiB", engine="graph", verbosity=0)
    with caplog.at_level(logging.WARNING, "torch._dynamo"):
        chk(BATCH).sum().backward()
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]
    assert torch._dynamo.utils._get_dynamo_config_for_logging is written


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), torch.float32),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16),
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
            torch.float32,
        ),
    ],
)
def test_inputs_of_a_sharded_model_are_cast_without_a_function_of_its_state(policy, expected):
    class State:
        _modules = ()
        _fsdp_param_group = None
        _mp_policy = policy

    found = fsdp.Unit(State()).cast_inputs(((torch.ones(2), torch.ones(2).long()), {"x": BATCH}))
    (real, whole), named = found
    assert (real.dtype, whole.dtype, named["x"].dtype) == (expected, torch.int64, expected)
