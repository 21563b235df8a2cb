"""Limits of the whole process on the CPU, whose own modules and threads grow beside a step."""

import copy

import pytest
import torch
from torch import nn

import rotor
from rotor import _core
from rotor.meter import room

X = torch.randn(1024, 128)
PLAIN_BYTES = 8 << 20
LEAST_BYTES = 5 << 20
IMPORTED_BYTES = 64 << 20


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)])


def step(model):
    model.zero_grad()
    loss = model(X).square().mean()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def total_for(model, step_bytes):
    """Return the total that leaves some bytes for a step now."""
    found = room.Room(model, 1)
    found.take(torch.device("cpu"))
    return found.total_for(step_bytes)


class Process:
    """Process that holds some bytes beside the model, and modules from the second look at it on."""

    def __init__(self):
        self.looks = self.imported_bytes = self.others_bytes = 0
        self.probed = _core.probe_memory

    def probe(self):
        self.looks += 1
        outside = (64 << 20) + self.imported_bytes * (self.looks > 1)
        used = (32 << 20) + self.others_bytes
        found = {"resident_bytes": outside + used, "heap_used_bytes": used, "heap_kept_bytes": 0}
        return self.probed() | found

    def begin(self, imported_bytes):
        self.looks, self.imported_bytes = 0, imported_bytes


@pytest.fixture
def process(monkeypatch):
    found = Process()
    monkeypatch.setattr(_core, "probe_memory", found.probe)
    return found


def test_what_planning_imports_is_taken_from_the_room(process):
    model = network()
    total = total_for(model, PLAIN_BYTES) + IMPORTED_BYTES
    chk = rotor.Checkpointable(copy.deepcopy(model), total_limit=total, engine="chain")
    process.begin(IMPORTED_BYTES)
    for _ in range(3):
        loss, gradients = step(chk)
        expected, plain = step(model)
        assert loss == expected
        assert all(map(torch.equal, gradients, plain))
        assert chk.plan.predicted_bytes <= chk.limits["step"] <= PLAIN_BYTES + (4 << 20)


def test_a_step_without_room_for_it_after_planning_is_refused_at_once(process):
    model = network()
    total = total_for(model, PLAIN_BYTES)
    chk = rotor.Checkpointable(model, total_limit=total, engine="chain")
    process.begin(IMPORTED_BYTES)
    with pytest.raises(rotor.InfeasibleError, match=r"fits in no bytes.*Nothing is left") as caught:
        step(chk)
    advised = int(str(caught.value).split("in all, ")[1].split("(")[1].split()[0])
    assert advised >= total + IMPORTED_BYTES - PLAIN_BYTES
    chk.total_limit = advised
    step(chk)


def test_an_accepted_step_goes_on_where_the_room_shrinks(process):
    model = network()
    total = total_for(model, LEAST_BYTES)
    chk = rotor.Checkpointable(copy.deepcopy(model), total_limit=total, engine="chain")
    for _ in range(3):
        step(chk)
    before = chk.plan
    others = torch.zeros(32 << 20, dtype=torch.uint8)
    process.others_bytes = others.nbytes
    with pytest.warns(rotor.MemoryLimitWarning, match="by the plan that it has: no schedule"):
        loss, gradients = step(chk)
    assert chk.plan is before
    expected, plain = step(model)
    assert loss == expected
    assert all(map(torch.equal, gradients, plain))
    step(chk)
    assert chk.plan is before
    del others


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "SGD8bit"])
def test_states_of_eight_bits_are_counted_before_they_are_made(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 64))
    more = {"momentum": 0.9} if kind == "SGD8bit" else {}
    optimizer = getattr(bitsandbytes.optim, kind)(model.parameters(), lr=0.1, **more)
    looked = room.Room(model, "8GiB")
    looked.take(torch.device("cpu"))
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    made = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.startswith("qmap")
    )
    assert looked.coming_bytes == made
