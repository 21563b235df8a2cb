"""Captures under a PyTorch that lacks a private name: they trace as PyTorch does."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn import functional as F

import rotor
from rotor._pytorch import lean_tracing


@pytest.mark.parametrize(
    "missing",
    [
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "torch.fx.experimental.proxy_tensor.TorchFunctionMetadataMode",
        "torch._C._set_throw_on_mutable_data_ptr",
    ],
)
def test_tracing_stays_as_it_is_where_pytorch_lacks_a_name(missing, monkeypatch, caplog):
    """Say which name is missing, replace nothing, and capture the same step."""
    place, _, name = missing.rpartition(".")
    module = importlib.import_module(place)
    x = torch.randn(4, 6, 16)

    def step():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Dropout(0.1))
        chk = rotor.Checkpointable(
            model, mem_limit="1 GiB", engine="graph", loss_fn=F.mse_loss, verbosity=0
        )
        loss = chk(x, targets=(torch.zeros_like(x),))
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    expected = step()
    missed = SimpleNamespace(**{k: v for k, v in vars(module).items() if k != name})
    real = importlib.import_module
    monkeypatch.setattr(
        lean_tracing.importlib, "import_module", lambda at: missed if at == place else real(at)
    )
    lean_tracing.missing_name.cache_clear()
    try:
        assert lean_tracing.missing_name() == missing
        dispatch = FakeTensorMode.__torch_dispatch__
        with caplog.at_level(logging.DEBUG, "rotor"):
            with lean_tracing.lean_traces():
                assert FakeTensorMode.__torch_dispatch__ is dispatch
            found = step()
        assert f"has no {missing}" in caplog.text
        assert type(lean_tracing.graph_module(nn.Module(), fx.Graph())) is not _LazyGraphModule
    finally:
        lean_tracing.missing_name.cache_clear()
    assert all(map(torch.equal, expected, found))
