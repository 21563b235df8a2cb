"""What a forward prints, logs and warns of comes out in each step, as in plain PyTorch."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Row

import rotor

pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
WIDTH = 32
logger = logging.getLogger("said")
quiet = logging.getLogger("quiet")
quiet.setLevel(logging.WARNING)


def print_a_number(y: Any) -> None:
    print("rows", y.shape[0], end="!\n", sep=": ")


def print_a_tensor(y: Any) -> None:
    print("mean", y.mean())


def print_text(y: Any) -> None:
    print(f"mean {y.mean()}")


def print_what_changes(y: Any) -> None:
    print("first", y[0, 0])
    y.mul_(2)


def log_text(y: Any) -> None:
    logger.info("rows %d", y.shape[0], extra={"more": 1})


def log_a_tensor(y: Any) -> None:
    logger.warning("mean %s", y.mean())


def log_if_asked(y: Any) -> None:
    if logger.isEnabledFor(logging.INFO) and not quiet.isEnabledFor(logging.INFO):
        logger.log(logging.INFO, "mean %s", y.mean())


def log_for_nobody(y: Any) -> None:
    quiet.info("mean %s", y.mean())


def log_to_the_root(y: Any) -> None:
    logging.warning("rows %d", y.shape[0])


def warn(y: Any) -> None:
    warnings.warn("a warning", RuntimeWarning, stacklevel=1)


def log_an_object(y: Any) -> None:
    logger.info("%s", [y.shape, logger])


CAPTURED = (
    *(print_a_number, print_a_tensor, print_text, print_what_changes, log_text, log_a_tensor),
    *(log_if_asked, log_for_nobody, log_to_the_root, warn),
)


class Block(nn.Module):
    """Layers that say something between them."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.say = say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        self.say(y)
        return x + self.down(torch.tanh(y))


def net_of(say: Callable[[Any], None], blocks: int) -> nn.Module:
    """Blocks, perhaps more than are traced one by one."""
    torch.manual_seed(0)
    return Row(*(Block(say) for _ in range(blocks)))


@pytest.fixture(autouse=True)
def info():
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(logging.NOTSET)


def said(model: Any, caplog: Any) -> list[Any]:
    """What each of three steps says."""
    found = []
    for _ in range(3):
        caplog.clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model(torch.ones(64, WIDTH)).square().mean().backward()
        own = [w for w in warned if w.category is RuntimeWarning]
        logs = [r.getMessage() for r in caplog.records if r.name in ("said", "quiet", "root")]
        text = [printed.getvalue(), *logs, *(f"{w.filename}:{w.lineno}: {w.message}" for w in own)]
        found.append(re.sub(r",\s*grad_fn=<\w+>", "", "\n".join(text)))
    return found


@pytest.mark.parametrize("blocks", [2, 6])
@pytest.mark.parametrize("say", [*CAPTURED, log_an_object])
def test_each_step_says_it(caplog, say, blocks):
    model = rotor.Checkpointable(net_of(say, blocks), mem_limit="250 KB")
    found = said(model, caplog)
    assert found == said(net_of(say, blocks), caplog)
    assert bool(found[0].strip()) == (say is not log_for_nobody)
    assert (model.plan.engine == "graph") == (say is not log_an_object)


def test_a_level_that_changes(caplog):
    model = rotor.Checkpointable(net_of(log_text, 2), mem_limit="250 KB")
    logger.setLevel(logging.ERROR)
    assert said(model, caplog) == [""] * 3
    logger.setLevel(logging.INFO)
    assert said(model, caplog) == said(net_of(log_text, 2), caplog)


def test_what_is_said_is_no_output_for_the_gradients(caplog):
    plain, planned = net_of(print_what_changes, 2), net_of(print_what_changes, 2)
    said(plain, caplog)
    said(rotor.Checkpointable(planned, mem_limit="250 KB"), caplog)
    for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
