"""Values in the graph that leave a stage of a chain otherwise than by its output, or enter so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from chain_blocks import BATCH, WIDTH, Block, planned, seeded, train
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from training import same

import rotor

FEATURES: list[torch.Tensor] | None = None


class Keeping(Block):
    """A block that keeps what it makes once there is a list for it."""

    features: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.features is not None:
            self.features.append(y)
        if FEATURES is not None and not FEATURES:
            FEATURES.append(y)
        return y

    def state(self) -> Any:
        return None


def keeps_in_a_hook(net: Any, features: list[torch.Tensor]) -> Callable[[], object]:
    return net[0].register_forward_hook(lambda *call: features.append(call[2])).remove


def keeps_in_a_hook_of_a_layer(net: Any, features: list[torch.Tensor]) -> Callable[[], object]:
    return net[0].first.register_forward_hook(lambda *call: features.append(call[2])).remove


def keeps_in_an_attribute(net: Any, features: list[torch.Tensor]) -> Callable[[], object]:
    net[0].features = features
    return lambda: setattr(net[0], "features", None)


def least(net: nn.Module) -> int:
    """The least limit of a net's chain, by the error of a limit of one byte."""
    net.zero_grad()
    with pytest.raises(rotor.InfeasibleError) as caught:
        rotor.Checkpointable(net, mem_limit=1, engine="chain")(torch.ones(BATCH, WIDTH))
    return caught.value.minimum_bytes


def keeps_by_a_global_name(_: Any, features: list[torch.Tensor]) -> Callable[[], object]:
    globals()["FEATURES"] = features
    return lambda: globals().update(FEATURES=None)


@pytest.mark.parametrize(
    "keep",
    [
        keeps_in_a_hook,
        keeps_in_a_hook_of_a_layer,
        keeps_in_an_attribute,
        keeps_by_a_global_name,
    ],
)
def test_activations_kept_after_the_first_steps_have_gradients(keep: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Keeping() for _ in range(6)))

    outcomes, features = [], list[torch.Tensor]()
    for is_planned in (False, True):
        net = seeded(make)
        features.clear()
        chk: Any = net
        if is_planned:
            undo = keep(net, features)
            limit = least(net)
            undo()
            chk = rotor.Checkpointable(net, mem_limit=limit, engine="chain")
        outcomes.append([train(net, chk, steps=2)])
        undo = keep(net, features)
        for _ in range(2):
            outcomes[-1].append(train(net, chk, loss=lambda y: y.sum() + features.pop().sum()))
        undo()
    assert same(*outcomes)


@pytest.mark.filterwarnings("ignore:the limit of")
def test_activations_kept_in_earlier_plain_steps_are_seen_to_be_kept() -> None:
    def make() -> nn.Module:
        return nn.Sequential(WithAuxiliary(), *(Block() for _ in range(5)))

    outcomes = []
    for is_planned in (False, True):
        net = seeded(make)
        outcomes.append([train(net, net, loss=auxiliary(net), steps=1)])
        chk: Any = net
        if is_planned:
            chk = rotor.Checkpointable(net, mem_limit=least(net), engine="chain")
        outcomes[-1].append(train(net, chk, loss=auxiliary(net)))
        assert not is_planned or 0 not in chk.plan.schedule.recomputed
    assert same(*outcomes)


class WithAuxiliary(Block):
    def scale(self, h: torch.Tensor) -> Any:
        self.aux = h.square().mean()
        return 1.0

    def state(self) -> Any:
        return None


def auxiliary(net: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda y: (
        y.square().mean() + sum(b.aux for b in net.modules() if isinstance(b, WithAuxiliary))
    )


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
@pytest.mark.parametrize("engine", ["auto", "chain"])
@pytest.mark.parametrize("share", [1.3, 0.5])
def test_auxiliary_losses_reach_every_parameter(engine: str, share: float) -> None:
    def make() -> nn.Module:
        return nn.Sequential(WithAuxiliary(), *(Block() for _ in range(5)), WithAuxiliary())

    net = seeded(make)
    plain = train(net, net, loss=auxiliary(net))
    net = seeded(make)
    measured = planned(net, share)
    limit = measured.mem_limit
    net = seeded(make)
    chk = rotor.Checkpointable(net, mem_limit=limit, engine=engine)
    found = train(net, chk, loss=auxiliary(net))
    assert same(plain, found)
    assert chk.plan.measured_bytes <= limit
    assert (chk.plan.engine == "chain") == (engine == "chain")
    if engine == "chain":
        assert chk.plan.inspection.plain == (1, 6)
        assert bool(chk.plan.schedule.recomputed) == (share < 1)
        assert "stage 0 is never recomputed: 0.aux has values of its graph" in chk.report()


def test_options_of_graphs_are_used_where_a_sequential_becomes_one(monkeypatch) -> None:
    from rotor.graph import planner

    efforts, plan = [], planner.plan
    monkeypatch.setattr(
        planner, "plan", lambda *a, **k: efforts.append((k["effort"], k["seed"])) or plan(*a, **k)
    )
    for make, becomes_graph in ((WithAuxiliary, True), (Block, False)):
        efforts.clear()
        net = seeded(lambda make=make: nn.Sequential(make(), Block()))
        chk = rotor.Checkpointable(net, mem_limit="1GiB", effort="fast", seed=3, planning="before")
        train(net, chk)
        assert (chk.planned_as == "chain") != becomes_graph
        assert set(efforts) == ({("fast", 3)} if becomes_graph else set())


class Dropped(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weight, 0.3, self.training)


@pytest.mark.parametrize("kind", [spectral_norm, Dropped])
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("limit", ["350 KB", "8 MB"])
def test_weights_that_are_cached_once_for_two_calls_are_those_of_plain_pytorch(kind, begin, limit):
    def steps(**options: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(48, 48), nn.Tanh())])
        for layer in (net[0], net[4]):
            if kind is Dropped:
                parametrize.register_parametrization(layer, "weight", Dropped())
            else:
                spectral_norm(layer)
        model = rotor.Checkpointable(net, verbosity=0, **options) if options else net
        found = []
        for number in range(3):
            torch.manual_seed(number)
            x, other = torch.randn(2, 256, 48)
            model.zero_grad()
            with parametrize.cached() if number >= begin else nullcontext():
                loss = model(x).square().mean() - model(other).mean()
                loss.backward()
            values = (
                loss.detach(),
                torch.rand(2),
                *net.buffers(),
                *[p.grad for p in net.parameters()],
            )
            found.append([value.clone() for value in values])
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found, plain in zip(steps(mem_limit=limit), steps(), strict=True):
            # Sums over both calls are made in another order.
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-8)
        with pytest.raises(
            RuntimeError, match=r"0\.weight is another whenever its parametrization"
        ):
            steps(mem_limit=limit, engine="chain")
