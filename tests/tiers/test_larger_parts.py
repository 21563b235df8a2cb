"""Models that break their graph, whose parameters, gradients and states are on a disk."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tiers import test_larger
from tiers.test_larger import GPT, OPTIMIZERS, assert_same, groups, train
from torch import nn
from torch.nn import functional as F

import rotor
from rotor.engines.graph import capture
from rotor.engines.graph.code import early
from rotor.memory import meter
from rotor.tier.homes import AwayTensor
from rotor.tier.state import AwayState

LIMIT = 700_000

# The first steps show what the loss and the code between the parts need.
pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")


class Breaking(GPT):
    """GPT with Python's own code between its blocks."""

    def __init__(self, *, shares=False, **settings) -> None:
        super().__init__(3, **settings)
        if shares:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.head.weight = self.blocks[1].out.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS = {"dropout": {"dropout": 0.1}, "shared": {"shares": True, "words": 64}}


def batches(count: int = 4, length: int = 32, words: int = 64) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return [tuple(torch.randint(0, words, (2, 3, length)).unbind()) for _ in range(count)]


def pair(name: str):
    torch.manual_seed(0)
    plain = Breaking(**MODELS[name])
    return plain, copy.deepcopy(plain)


def compare(name: str, way: str = "plain", optimizer: str = "adamw", limit: int = LIMIT):
    """Train both, and compare; then see that steps keep the limit. Return the wrapped model."""
    plain, model = pair(name)
    data = batches()
    one, other = (OPTIMIZERS[optimizer](groups(m, way)) for m in (plain, model))
    expected = train(plain, plain, one, data, way)
    chk = rotor.Checkpointable(model, mem_limit=limit, offload="disk", offload_state=other)
    assert train(chk, model, other, data, way) == expected
    assert_same(plain, model, one, other)
    assert chk.plan.engine == "parts"
    states = [s for state in other.state.values() for s in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    own = sum(t.nbytes for t in tensors if type(t) in (torch.Tensor, nn.Parameter))
    for batch in (*data[:2], *data[:2]):
        # No plan is made any more in the last of these steps.
        with meter("cpu") as m:
            for _ in range(2 if way == "accumulation" else 1):
                chk(*batch).backward()
        other.step()
        other.zero_grad()
    assert m.peak_bytes + own <= limit
    assert 3 * sum(p.nbytes for p in plain.parameters()) > 2 * limit
    return chk, other


@pytest.mark.parametrize(("name", "way"), [("dropout", "plain"), ("shared", "accumulation")])
def test_training_is_that_of_the_plain_model(name, way):
    compare(name, way)


def train_both(lengths, limit: int):
    """Train both on batches of some lengths, and compare; return the wrapped model."""
    plain, model = pair("dropout")
    data = [batch for length in lengths for batch in batches(1, length)]
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    expected = train(plain, plain, one, data, "accumulation")
    chk = rotor.Checkpointable(model, mem_limit=limit, offload="disk", offload_state=other)
    assert train(chk, model, other, data, "accumulation") == expected
    assert_same(plain, model, one, other)
    assert chk.plan.engine == "parts"
    return chk


def test_all_lengths_share_captures(monkeypatch):
    captured, lower = [], capture.lower

    def noted(*given, **settings):
        captured.append(lower(*given, **settings))
        return captured[-1]

    monkeypatch.setattr(capture, "lower", noted)
    chk = train_both((32, 24, 28, 17, 20, 30), 900_000)
    # Three blocks at the first length, and with symbols.
    assert len(captured) == 6
    chk(*batches(1, 19)[0]).backward()
    assert len(captured) == 6


def test_tensors_on_which_a_part_runs_live_until_its_output_is_known(monkeypatch):
    exchanged, checked = early.exchanged, []

    def with_originals(output, originals):
        # A result could have the id of a tensor that is gone, and be taken for its original.
        live = [value for value in gc.get_objects() if id(value) in originals]
        kept = [v for v in live if issubclass(type(v), torch.Tensor)]
        same = [v for v in kept if v.data_ptr() == originals[id(v)].data_ptr()]
        checked.append(len(same) == len(originals))
        return exchanged(output, originals)

    monkeypatch.setattr(early, "exchanged", with_originals)
    _, model = pair("dropout")
    # The list of what is looked at is in memory too.
    chk = rotor.Checkpointable(model, mem_limit="100 MB", verbosity=-1)
    for batch in batches(2):
        chk(*batch).backward()
    assert len(checked) == 6
    assert all(checked)


def test_gradients_leave_while_the_backward_of_a_part_goes_on(monkeypatch):
    chk, _ = compare("dropout")
    awaited, take = [], AwayState.take
    monkeypatch.setattr(AwayState, "take", lambda *given: awaited.append(given[1]) or take(*given))
    chk(*batches(1)[0]).backward()
    inside = [p for p in chk.module.blocks.parameters() if isinstance(p, AwayTensor)]
    assert all(isinstance(p.grad, AwayTensor) for p in inside)
    assert len(inside) == 12
    assert not {*map(id, inside)} & {*map(id, awaited)}
    assert awaited


class Foreign(test_larger.Block):
    """Block with a tensor that is no parameter, and gets a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.extra[0]


def test_a_part_that_cannot_be_planned_is_left_out_at_all_lengths(monkeypatch):
    begin = Breaking.__init__

    def made(self, **settings) -> None:
        begin(self, **settings)
        self.blocks[1].__class__ = Foreign
        self.blocks[1].extra = [torch.ones(64, requires_grad=True)]

    monkeypatch.setattr(Breaking, "__init__", made)
    train_both((32, 24, 28), 900_000)


def test_frozen_parameters_evaluation_and_hooks():
    chk, optimizer = compare("dropout", "frozen", "momentum")
    model, seen = chk.module, []
    model.eval()
    with torch.no_grad():
        assert torch.equal(chk(*batches(1)[0]), model(*batches(1)[0]))
    model.train()
    model.head.weight.register_hook(lambda gradient: seen.append("tensor"))
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda gradient: seen.append("in a part"))
    chk(*batches(1)[0]).backward()
    assert seen == ["tensor", "in a part"]
    loss = chk(*batches(1)[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


def test_gradients_by_autograd_and_of_second_order():
    """They are asked for, and so in memory: those of second order with a warning."""
    chk, _ = test_larger.compare("experts", "sgd", "plain")
    model = chk.module
    plain = copy.deepcopy(model)
    parameters, others = list(model.parameters()), list(plain.parameters())
    batch = test_larger.batches("experts")[0]
    found = torch.autograd.grad(chk(*batch), parameters)
    expected = torch.autograd.grad(plain(*batch), others)
    assert all(map(torch.equal, found, expected))
    assert all(parameter.grad is None for parameter in parameters)
    with pytest.warns(rotor.MemoryLimitWarning, match="ran the model's forward again"):
        found = torch.autograd.grad(chk(*batch), parameters, create_graph=True)
    expected = torch.autograd.grad(plain(*batch), others, create_graph=True)
    norms = [sum(g.square().sum() for g in gradients) for gradients in (found, expected)]
    second = [torch.autograd.grad(norms[0], parameters), torch.autograd.grad(norms[1], others)]
    assert all(map(torch.equal, *second))
