"""Cases: training loops that are not the usual one."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn
from zoo.cases import (
    BATCH,
    WIDTH,
    Case,
    Loop,
    blocks,
    case,
    cases,
    images,
    rows,
    scalar,
    usual_step,
)
from zoo.models import Function


@case
def empty_batch() -> Case:
    def loss(net: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output.square().sum()

    return Case(blocks, lambda k: rows(batch=0 if k == 2 else BATCH), loss=loss)


@case
def changing_dtype() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        net.to(torch.float64 if k >= 2 else torch.float32)
        optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64 if k >= 2 else torch.float32)
        loss = scalar(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(blocks, step=step)


@case
def changing_mode() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            before = model(*images(k)).mean()
        model.train()
        return usual_step(case, model, net, optimizer, k) + before

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip

    return Case(make, images, step=step)


@case
def frozen_then_unfrozen() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        for block in list(net.blocks)[:2]:
            block.requires_grad_(k >= 2)
        return usual_step(case, model, net, optimizer, k)

    return Case(Loop, step=step, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.01))


@case
def frozen_then_unfrozen_chain() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        for block in list(net)[:2]:
            block.requires_grad_(k >= 2)
        return usual_step(case, model, net, optimizer, k)

    return Case(blocks, step=step, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.01))


def _input_gradient(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    optimizer.zero_grad()
    x = rows(k)[0].requires_grad_()
    loss = scalar(model(x))
    loss.backward()
    optimizer.step()
    return loss.detach() + x.grad.double().square().sum()


@case
def gradient_penalty() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        optimizer.zero_grad()
        x = rows(k)[0].requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(blocks, step=step, pending=0)


@case
def adversarial() -> Case:
    def make() -> nn.Module:
        return Function(
            lambda self, z, real: (self.critic(self.maker(z)), self.critic(real)),
            maker=blocks(depth=2),
            critic=blocks(depth=2),
        )

    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        fake, real = model(*rows(k), *rows(k))
        optimizer.zero_grad()
        critic_loss = (fake - real).mean()
        critic_loss.backward()
        for p in net.maker.parameters():
            p.grad.neg_()
        optimizer.step()
        return critic_loss.detach()

    return Case(make, lambda k: (*rows(), *rows()), step=step)


@case
def two_networks() -> Case:
    """A generator outside of the limited model, whose gradient comes through it."""

    def make() -> nn.Module:
        return blocks(depth=4)

    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        optimizer.zero_grad()
        outer = torch.nn.Linear(WIDTH, WIDTH)
        loss = scalar(model(outer(rows(k)[0])))
        loss.backward()
        optimizer.step()
        return loss.detach() + outer.weight.grad.double().square().sum()

    return Case(make, step=step, pending=0)


@case
def lbfgs() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        (x,) = rows(k)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = scalar(model(x))
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Case(
        lambda: blocks(depth=3),
        step=step,
        pending=0,
        optimizer=lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3),
    )


def _accumulated(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        loss = scalar(model(*rows(k))) / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


def _siamese(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
    optimizer.zero_grad()
    a, b = model(*rows(k, batch=32)), model(*rows(k, batch=32))
    loss = (a - b).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@case
def two_losses() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        optimizer.zero_grad()
        y = model(*rows(k))
        first, second = y.square().mean(), y.abs().mean()
        first.backward(retain_graph=True)
        try:
            second.backward()
        except RuntimeError:
            optimizer.zero_grad()  # the first backward was a whole one
            raise
        optimizer.step()
        return (first + second).detach()

    return Case(blocks, step=step, pending=0)


@case
def gradients_by_grad() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        loss = scalar(model(*rows(k)))
        wanted = list(net.parameters())
        for p, g in zip(wanted, torch.autograd.grad(loss, wanted), strict=True):
            p.grad = g
        optimizer.step()
        return loss.detach()

    return Case(Loop, step=step)


@case
def step_skipped() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        if k == 2:
            return scalar(model(*rows(k))).detach()
        return usual_step(case, model, net, optimizer, k)

    return Case(blocks, step=step, keeps_gradients=True)


@case
def anomaly_mode() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            return usual_step(case, model, net, optimizer, k)

    return Case(blocks, step=step)


@case
def in_a_thread() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(usual_step(case, model, net, optimizer, k))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return Case(blocks, step=step)


@case
def copied_while_training() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        loss = usual_step(case, model, net, optimizer, k)
        twin = copy.deepcopy(model)
        return loss + scalar(twin(*rows(k))).detach()

    return Case(blocks, step=step, pending=0)


@case
def error_in_forward() -> Case:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 7:
                raise LookupError("seven rows")
            return self.body(x).tanh()

    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        if k in (0, 2):
            try:
                model(*rows(batch=7))
            except LookupError:
                pass
            else:
                raise AssertionError("the error of the model's own is gone")
        return usual_step(case, model, net, optimizer, k)

    def make() -> nn.Module:
        return nn.Sequential(*blocks(depth=2), Failing(), *blocks(depth=2))

    return Case(make, step=step)


@case
def error_in_loss() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        if k in (1, 3):
            model(*rows(k))  # and the loss fails: no backward comes
        return usual_step(case, model, net, optimizer, k)

    return Case(blocks, step=step)


@case
def autocast_and_scaler() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model(*rows(k)))
        (loss * 128).backward()
        for p in net.parameters():
            p.grad.div_(128)
        optimizer.step()
        return loss.detach()

    return Case(blocks, step=step)


@case
def momentum_of_weights() -> Case:
    """A teacher that follows the model's weights between steps."""

    def make() -> nn.Module:
        return Function(
            lambda self, x: self.student(x) - self.teacher(x).detach(),
            student=blocks(depth=3),
            teacher=blocks(depth=3).requires_grad_(False),
        )

    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        loss = usual_step(case, model, net, optimizer, k)
        with torch.no_grad():
            for t, s in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
                t.lerp_(s, 0.1)
        return loss

    return Case(make, step=step)


@case
def module_replaced() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        if k == 2:
            net[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return usual_step(case, model, net, optimizer, k)

    return Case(blocks, step=step)


cases(
    changing_batch=lambda: Case(Loop, lambda k: rows(batch=BATCH - 32 * (k % 2))),
    changing_batch_chain=lambda: Case(blocks, lambda k: rows(batch=BATCH - 32 * (k % 2))),
    input_gradient=lambda: Case(Loop, step=_input_gradient),
    input_gradient_chain=lambda: Case(blocks, step=_input_gradient),
    accumulation=lambda: Case(Loop, step=_accumulated, keeps_gradients=True),
    accumulation_chain=lambda: Case(blocks, step=_accumulated, keeps_gradients=True),
    siamese=lambda: Case(Loop, step=_siamese, pending=2),
    siamese_chain=lambda: Case(blocks, step=_siamese, pending=2),
)
