"""Optimizers that Accelerate has prepared, with their states in a second tier."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import rotor

accelerate = pytest.importorskip("accelerate")


def test_an_optimizer_that_accelerate_has_wrapped_steps_as_before():
    """Accumulation, clipping, a scaler and a scheduler that was made before are its own.

    Also where it takes over from another one.
    """
    scaled = accelerate.optimizer.AcceleratedOptimizer
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))

    def trained(*, is_away: bool, scaler: torch.amp.GradScaler | None, takes_over=False):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        outer = (
            accelerator.prepare(optimizer) if scaler is None else scaled(optimizer, scaler=scaler)
        )
        first = torch.optim.SGD(model.parameters()) if takes_over else outer
        settings = {"mem_limit": "1MiB", "offload": "disk", "offload_state": first}
        call = rotor.Checkpointable(model, **settings) if is_away else model
        if takes_over:
            call.offload_state = outer
        losses = []
        for number in range(4):
            with accelerator.accumulate(model):
                loss = (call(x + number) - x).square().mean()
                losses.append(loss.item())
                (accelerator.backward(loss) if scaler is None else scaler.scale(loss).backward())
                if accelerator.sync_gradients and scaler is None:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                outer.step()
                if accelerator.sync_gradients and scaler is None:
                    schedule.step()
                outer.zero_grad()
        return losses, model, optimizer

    scalers = None, torch.amp.GradScaler("cpu")
    for scaler, takes_over in itertools.product(scalers, (False, True)):
        expected, plain, one = trained(is_away=False, scaler=copy.deepcopy(scaler))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, model, other = trained(
                is_away=True, scaler=copy.deepcopy(scaler), takes_over=takes_over
            )
        assert found == expected
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(one.state[p]["exp_avg"], other.state[q]["exp_avg"])
