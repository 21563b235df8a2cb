"""Stages with state, and values beside their output: measured without a trace, repeated exactly."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from chain_blocks import BATCH, INNER, WIDTH, Block, check_planned, planned, seeded, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import same
from zoo.models import AddSaved, Save

import rotor
from rotor.engines.chain.engine import ChainEngine

STEPS_SEEN = 0


class Annealed(Block):
    def begin(self) -> None:
        self.tau = 1.0

    def scale(self, h: torch.Tensor) -> Any:
        self.tau = max(0.1, self.tau * 0.9)
        return self.tau


class Counting(Block):
    def begin(self) -> None:
        self.stats = {"steps": 0, "by": [0, 0]}

    def scale(self, h: torch.Tensor) -> Any:
        self.stats["steps"] += 1
        self.stats["by"][self.stats["steps"] % 2] += 1
        return 1.0 / self.stats["steps"] + self.stats["by"][1]


class Averaged(Block):
    def begin(self) -> None:
        self.mean = torch.zeros(INNER)

    def scale(self, h: torch.Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return 1 + self.mean.sum()


class AveragedInPlace(Block):
    def begin(self) -> None:
        self.mean = torch.zeros(INNER)
        self.also = {"mean": self.mean}

    def scale(self, h: torch.Tensor) -> Any:
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return 1 + self.also["mean"].sum()


class Recent(Block):
    def begin(self) -> None:
        self.recent = deque([1.0], maxlen=4)
        self.seen = set[int]()
        self.log = [0.0]

    def scale(self, h: torch.Tensor) -> Any:
        self.recent.append(self.recent[-1] * 0.5)
        self.seen.add(len(self.seen))
        self.log.append(float(len(self.log)))
        return sum(self.recent) + len(self.seen) + self.log[-1]


class PythonRandom(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return random.random()


class NumpyRandom(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return float(np.random.rand())  # noqa: NPY002


class OwnRandom(Block):
    def begin(self) -> None:
        self.random = random.Random(3)
        self.drawn = np.random.default_rng(4)
        self.table = np.arange(3.0)

    def scale(self, h: torch.Tensor) -> Any:
        self.table += 1
        return self.random.random() + float(self.drawn.random()) + float(self.table[0])

    def state(self) -> Any:
        return self.random.getstate(), self.drawn.bit_generator.state, self.table.tolist()


class OwnGenerator(Block):
    def begin(self) -> None:
        self.random = {"generators": [torch.Generator().manual_seed(5)]}

    def scale(self, h: torch.Tensor) -> Any:
        generator = self.random["generators"][0]
        return (torch.rand(h.shape[0], 1, generator=generator) > 0.5) * 2.0

    def state(self) -> Any:
        return self.random["generators"][0].get_state().tolist()


class Iterating(Block):
    def begin(self) -> None:
        self.factors = iter([1.0, 0.5, 2.0, 0.25] * 10)

    def scale(self, h: torch.Tensor) -> Any:
        return next(self.factors)

    def state(self) -> Any:
        return list(copy.copy(self.factors))


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class InObject(Block):
    def begin(self) -> None:
        self.holder = Slotted()

    def scale(self, h: torch.Tensor) -> Any:
        self.holder.count += 1
        return 1.0 / self.holder.count

    def state(self) -> Any:
        return self.holder.count


class InClass(Block):
    count = 0

    def begin(self) -> None:
        type(self).count = 0

    def scale(self, h: torch.Tensor) -> Any:
        type(self).count += 1
        return 1.0 / type(self).count

    def state(self) -> Any:
        return type(self).count


class InGlobal(Block):
    def begin(self) -> None:
        global STEPS_SEEN
        STEPS_SEEN = 0

    def scale(self, h: torch.Tensor) -> Any:
        global STEPS_SEEN
        STEPS_SEEN += 1
        return 1.0 / STEPS_SEEN

    def state(self) -> Any:
        return STEPS_SEEN


class InHook(Block):
    def begin(self) -> None:
        calls = 0

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output / calls

        self.first.register_forward_hook(hook)
        self.calls = lambda: calls

    def state(self) -> Any:
        return self.calls()


class FirstStepOnly(Block):
    """Sets an attribute that was not there (data-dependent initialisation)."""

    def scale(self, h: torch.Tensor) -> Any:
        if not hasattr(self, "norm"):
            self.norm = h.detach().std()
        return 1 / self.norm


STATEFUL = [
    Annealed,
    Counting,
    Averaged,
    AveragedInPlace,
    Recent,
    PythonRandom,
    NumpyRandom,
    OwnRandom,
    OwnGenerator,
    Iterating,
    InObject,
    InClass,
    InGlobal,
    InHook,
    FirstStepOnly,
]


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_state_of_stages_is_kept(kind: type[Block]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(4)))

    net = seeded(make)
    plain = train(net, net)
    net = seeded(make)
    before = [m.state() for m in net]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    drawn = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    chk = planned(net, 0.1)
    assert same(before, [m.state() for m in net])
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert chk.plan.schedule.recomputed
    found = train(net, chk)
    assert same(plain, found)
    assert chk.plan.measured_bytes <= chk.mem_limit


norm: nn.Module


class Normed(Block):
    """A block whose running statistics change in every forward; `norm` is a global name as well."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(INNER)

    def scale(self, h: torch.Tensor) -> Any:
        return self.norm(h).mean(1, keepdim=True)

    def state(self) -> Any:
        return [b.clone() for b in self.norm.buffers()]


class Rooted(Normed):
    """Normed block that reaches all others."""

    def scale(self, h: torch.Tensor) -> Any:
        return super().scale(h) * (1.0 if self.root[0].training else 2.0)


class Reading(Rooted):
    """Normed block that reads the statistics of the last."""

    def scale(self, h: torch.Tensor) -> Any:
        return super().scale(h) + self.root[0][-1].norm.running_mean.mean()


def _hooked(net: nn.Sequential) -> nn.Sequential:
    """Blocks with a hook that closes over all of them."""
    seen: list[int] = []
    for block in net:
        block.register_forward_hook(lambda *_: seen.append(len(net)))
    return net


def _rooted(net: nn.Sequential) -> nn.Sequential:
    for block in net:
        block.root = [net]
    return net


REACHING: dict[str, tuple[type[Block], Any]] = {
    "by a global of the name of an attribute": (Normed, lambda net: globals().update(norm=net)),
    "by a hook": (Normed, _hooked),
    "by an attribute": (Rooted, _rooted),
}


@pytest.mark.parametrize("case", REACHING)
def test_stages_may_reach_buffers_of_others_that_they_do_not_read(case: str) -> None:
    kind, reach = REACHING[case]

    def make() -> nn.Module:
        net = nn.Sequential(*(kind() for _ in range(4)))
        reach(net)
        return net

    check_planned(make, 0.1)


def test_a_stage_that_reads_a_later_buffer_is_not_run_again_with_another_value() -> None:
    net = _rooted(nn.Sequential(*(Reading() for _ in range(4))))
    chk = planned(net, 0.1)
    with pytest.raises(rotor.RecomputationError, match="gave other bits when it ran again"):
        train(net, chk)


def test_state_that_another_stage_changed_is_that_of_the_first_run() -> None:
    class Shared(Block):
        def __init__(self, holder: dict[str, Any]) -> None:
            self.holder = holder
            super().__init__()

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value) if name == "holder" else super().__setattr__(
                name, value
            )

        def scale(self, h: torch.Tensor) -> Any:
            self.holder["count"] += 1
            return 1.0 / self.holder["count"] + self.holder["mask"].sum() * 1e-3

        def state(self) -> Any:
            return self.holder["count"], self.holder["mask"].clone()

    class Masks(Block):
        def __init__(self, holder: dict[str, Any]) -> None:
            super().__init__()
            object.__setattr__(self, "holder", holder)

        def scale(self, h: torch.Tensor) -> Any:
            self.holder["mask"] = h.detach().mean(0) > 0
            return 1.0

        def state(self) -> Any:
            return None

    def make() -> nn.Module:
        holder: dict[str, Any] = {"count": 0, "mask": torch.ones(INNER)}
        return nn.Sequential(
            Shared(holder), Masks(holder), Shared(holder), Masks(holder), Shared(holder)
        )

    chk = check_planned(make, 0.0)
    assert {0, 2} <= chk.plan.schedule.recomputed


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"warp": 9}, TypeError, "unknown option 'warp', expected effort, seed or time_limit"),
        ({"effort": "swift"}, ValueError, "effort = 'swift', expected one of fast"),
        ({"effort": "fast", "engine": "chain"}, TypeError, "unknown option 'effort'"),
    ],
)
def test_wrong_options_of_a_sequential_are_refused_at_once(options, error, message) -> None:
    with pytest.raises(error, match=message):
        rotor.Checkpointable(nn.Sequential(Block(), Block()), **options)


def test_features_of_hooks_reach_every_parameter() -> None:
    features: dict[int, torch.Tensor] = {}

    def make() -> nn.Module:
        net = nn.Sequential(*(Block() for _ in range(6)))
        for k in (0, 1):
            net[k].register_forward_hook(lambda m, i, o, k=k: features.__setitem__(k, o))
        return net

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() + sum(f.abs().mean() for f in features.values())

    net = seeded(make)
    plain = train(net, net, loss=loss)
    features.clear()
    net = seeded(make)
    chk = planned(net, 0.0)
    assert not features
    assert chk.plan.inspection.plain == (3, 6)
    assert chk.plan.schedule.recomputed
    assert same(plain, train(net, chk, loss=loss))
    assert chk.plan.measured_bytes <= chk.mem_limit
    least = int(chk.curve().bytes[0])
    with pytest.raises(rotor.InfeasibleError, match="3 of 6 stages are never recomputed, stage 0"):
        chk.compute_sequence(mem_limit=least // 2)


@pytest.mark.parametrize("engine", ["auto", "chain"])
def test_skip_connections_through_attributes(engine: str) -> None:
    def make() -> nn.Module:
        save = Save()
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            save,
            nn.Linear(WIDTH, INNER),
            nn.GELU(),
            nn.Linear(INNER, WIDTH),
            AddSaved(save),
            *(Block() for _ in range(4)),
        )

    net = seeded(make)
    plain = train(net, net)
    net = seeded(make)
    limit = planned(net, 0.2).mem_limit
    net = seeded(make)
    chk = rotor.Checkpointable(net, mem_limit=limit, engine=engine)
    assert same(plain, train(net, chk))
    assert chk.plan.measured_bytes <= limit
    if engine == "chain":
        assert chk.names[0] == "0+1+2+3+4+5"
        assert chk.plan.schedule.recomputed


@pytest.mark.parametrize("engine", ["auto", "chain"])
def test_values_from_outside_get_their_gradients(engine: str) -> None:
    class Conditioned(Block):
        condition: Any = 1.0

        def scale(self, h: torch.Tensor) -> Any:
            return self.condition

        def state(self) -> Any:
            return None

    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)), Conditioned(), Block())

    def gradients(limit: int | None) -> Any:
        net = seeded(make)
        encoder = nn.Linear(3, WIDTH)
        chk = net
        if limit is not None:
            chk = rotor.Checkpointable(net, mem_limit=limit, engine=engine)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            encoder.zero_grad()
            net[4].condition = encoder(torch.randn(3)).tanh()
            chk(torch.randn(BATCH, WIDTH)).square().mean().backward()
            found.append([p.grad.clone() for p in [*encoder.parameters(), *net.parameters()]])
        return found

    net = seeded(make)
    limit = planned(net, 0.4).mem_limit
    assert same(gradients(None), gradients(limit))


def test_stages_run_again_though_a_counter_of_operations_keeps_their_graphs(monkeypatch) -> None:
    measured = []
    measure = ChainEngine.measure

    def counted(*args: Any) -> Any:
        measured.append(args)
        return measure(*args)

    def make() -> nn.Module:
        return nn.Sequential(*[Block() for _ in range(4)])

    limit = planned(seeded(make), 0.3).mem_limit
    plain = train(net := seeded(make), net)
    chk = rotor.Checkpointable(net := seeded(make), mem_limit=limit, engine="chain")
    monkeypatch.setattr(ChainEngine, "measure", counted)
    for _ in range(2):
        with FlopCounterMode(display=False):
            assert same(plain, train(net, chk))
    assert chk.plan.schedule.recomputed
    assert not any(chk.plan.chain.once)
    assert len(measured) == 1


def test_what_does_not_repeat_is_kept() -> None:
    class Clocked(Block):
        ticks = staticmethod(itertools.count().__next__)

        def scale(self, h: torch.Tensor) -> Any:
            return 1.0 + Clocked.ticks() * 1e-3

    net = seeded(lambda: nn.Sequential(Block(), Block(), Clocked(), Block(), Block()))
    with pytest.warns(rotor.MemoryLimitWarning, match=r"stage 2 \(\w+\) gave other bits"):
        chk = planned(net, 0.0)
    plan = chk.plan
    assert plan.chain.once == [False, False, True, False, False]
    assert plan.sequence.count_forwards()[2] == 1
    assert plan.schedule.recomputed
    assert "stage 2 is never recomputed: two runs of it from the same state" in chk.report()
    ticks = Clocked.ticks()
    chk(torch.randn(BATCH, WIDTH)).square().mean().backward()
    assert Clocked.ticks() == ticks + 2


def test_running_generators_are_refused_before_they_move() -> None:
    class Yielding(Block):
        def begin(self) -> None:
            self.factors = (1.0 / k for k in itertools.count(1))

        def scale(self, h: torch.Tensor) -> Any:
            return next(self.factors)

    net = seeded(lambda: nn.Sequential(Block(), Yielding()))
    chk = rotor.Checkpointable(net, mem_limit="1MB", engine="chain")
    with pytest.raises(ValueError, match=r"1\.factors is a running generator"):
        chk(torch.randn(BATCH, WIDTH))
    assert next(net[1].factors) == 1.0


def test_copies_have_state_of_their_own() -> None:
    net = seeded(lambda: nn.Sequential(*(Annealed() for _ in range(3))))
    chk = planned(net, 0.1)
    other = copy.deepcopy(chk)
    plain = train(net, net)
    assert [m.state() for m in other] == [{"tau": 1.0}] * 3
    assert same(plain, train(other, other))
