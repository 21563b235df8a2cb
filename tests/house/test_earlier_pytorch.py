"""What other versions of PyTorch do otherwise than 2.13, with any version."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import gradients_of, same
from zoo.models import Tanhs

import rotor
from rotor._pytorch import core, fsdp

BATCH = torch.randn(256, 64)


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
    assert same(gradients_of(chk), gradients_of(model))
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


class InPlace(nn.Module):
    """Operations with a factor, in place: a product and a sum of their own round otherwise."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y, z = layer(x).exp(), layer(x).cos()
            x = x.mul(1).add_(y, alpha=0.1).addcmul_(y, z, value=0.3).addcdiv_(z, y + 1, value=0.7)
        return x


def test_operations_in_place_with_a_factor_are_captured_as_they_are():
    torch.manual_seed(0)
    plain = InPlace()
    chk = rotor.Checkpointable(
        copy.deepcopy(plain), mem_limit="1GiB", engine="graph", effort="fast", verbosity=0
    )
    found, expected = chk(BATCH), plain(BATCH)
    assert torch.equal(found, expected)
    for output in (found, expected):
        output.sum().backward()
    assert same(gradients_of(chk), gradients_of(plain))


def test_a_transposed_output_has_gradients_laid_out_as_it_is():
    class Transposed(Tanhs):
        def forward(self, x):
            return self.layers[0](x).t()

    torch.manual_seed(0)
    plain = Transposed()
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1GiB", engine="graph", verbosity=0)
    for model in (chk, plain):
        model(BATCH).sum().backward()
    assert torch.equal(chk.layers[0].bias.grad, plain.layers[0].bias.grad)
    assert torch.equal(chk.layers[0].weight.grad, plain.layers[0].weight.grad)


def test_an_expanded_output_has_gradients_of_each_element():
    class Expanded(Tanhs):
        def forward(self, x):
            return self.layers[0](x)[:, :1].expand(-1, 64)

    torch.manual_seed(0)
    plain, factors = Expanded(), torch.randn(256, 64)
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1GiB", engine="graph", verbosity=0)
    for model in (chk, plain):
        (model(BATCH) * factors).sum().backward()
    assert torch.equal(chk.layers[0].weight.grad, plain.layers[0].weight.grad)


def test_a_name_that_captures_lack_is_named_with_the_versions_that_have_it(monkeypatch):
    monkeypatch.delattr("torch._dynamo.convert_frame.compile_lock")
    chk = rotor.Checkpointable(Tanhs(), mem_limit="1GiB", engine="graph", verbosity=0)
    words = r"PyTorch \d.*lacks torch._dynamo.convert_frame.compile_lock. It works with PyTorch 2"
    with pytest.raises(ImportError, match=words):
        chk(BATCH)
    plain = Tanhs()
    chk = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1GiB", verbosity=0)
    with pytest.warns(rotor.MemoryLimitWarning, match=words):
        chk(BATCH).sum().backward()
    plain(BATCH).sum().backward()
    assert torch.equal(chk.layers[0].weight.grad, plain.layers[0].weight.grad)


def test_a_module_that_its_package_lacks_after_an_import_that_broke_off_is_known(monkeypatch):
    monkeypatch.delattr(torch.utils, "_pytree")
    core.check("utils._pytree.tree_flatten utils._pytree.PyTree")
    with pytest.raises(ImportError, match=r"lacks torch\.utils\._pytree\.gone\. It works"):
        core.check(["utils._pytree.gone"])
