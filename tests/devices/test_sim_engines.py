"""Every engine in every situation, on a device that is too small for plain training."""

import copy
import gc

import pytest
import torch
from limited_on_sim import Trained, assert_equal, distance, one_step
from torch import nn
from zoo.models import Asking, Row, Skip, Varying

import rotor
from rotor._pytorch import devices
from rotor.common.checksums import checksum

MIB = 1 << 20
WIDTH, ROWS = 128, 2048  # 1 MiB each activation.
SHARES = {"chain": 0.5, "graph": 0.5, "parts": 0.65, "dynamic": 0.6}
REST = 4 * MIB
"""Slack of the allocator's segments."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:no single graph"),
    pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step"),
    pytest.mark.filterwarnings("ignore:the limit of .* could not be kept.*nothing was known"),
]


def block(dropout, layers=3):
    parts = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
        for _ in range(layers)
    )
    return nn.Sequential(*parts)


MODELS = {
    "chain": lambda dropout: block(dropout, 9),
    "graph": lambda dropout: Row(*(Skip(block(dropout, 2)) for _ in range(4))),
    "parts": lambda dropout: Asking(block(dropout, 5), block(dropout, 5)),
    "dynamic": lambda dropout: Varying(*(block(dropout, 1) for _ in range(10))),
}


def batches(count=4, rows=ROWS):
    torch.manual_seed(0)
    return [torch.randn(rows, WIDTH, device="sim") for _ in range(count)]


class Case:
    """A model, plain training's figures, the same model under a limit, and a small device."""

    def __init__(
        self, sim, engine, data, *, dropout=0.0, inside=True, share=None, rest=REST, **options
    ):
        sim.set_poison(0)
        # Their keys stay on a device, as the workspaces of libraries do.
        checksum(torch.zeros(1, device="sim"))
        torch.manual_seed(1)
        self.plain = MODELS[engine](dropout).to("sim")
        model = copy.deepcopy(self.plain)
        self.sim, self.data, self.inside, self.options = sim, data, inside, options
        self.expected = Trained(sim, copy.deepcopy(self.plain), data, **options)
        self.limit = int(max(self.expected.peaks) * (share or SHARES[engine]))
        self.wrapped = rotor.Checkpointable(
            model,
            mem_limit=self.limit,
            engine="auto" if engine == "parts" else engine,
            verbosity=0,
            **({"loss_fn": distance} if inside else {}),
        )
        # What the loss, or code between parts, needs is known after some steps.
        self.first = {"parts": 2, "dynamic": 1}.get(engine, 0 if inside else 1)
        gc.collect()
        sim.empty_cache()
        resident = sim.memory_allocated()
        self.capacity = resident + self.limit + rest
        assert self.capacity < resident + max(self.expected.peaks)

    def train(self, model=None, data=None):
        return Trained(
            self.sim,
            self.wrapped if model is None else model,
            self.data if data is None else data,
            inside=self.inside,
            **self.options,
        )

    def warm(self):
        """Run the steps whose need is not known yet on a larger device, without a trace."""
        states = copy.deepcopy(self.wrapped.state_dict())
        self.train(data=self.data[: self.first])
        self.wrapped.load_state_dict(states)
        self.sim.empty_cache()

    def check(self):
        """Train on the small device: plain training ends, ours is bit-equal."""
        self.warm()
        self.sim.set_capacity(self.capacity)
        with pytest.raises(torch.OutOfMemoryError):
            self.train(self.plain)
        self.plain.zero_grad()
        self.sim.empty_cache()
        found = self.train()
        assert_equal(found, self.expected)
        assert max(found.peaks) <= self.limit
        return found


@pytest.fixture(params=list(MODELS))
def engine(request):
    return request.param


@pytest.mark.parametrize(
    ("inside", "dropout"),
    [
        (True, 0.2),
        pytest.param(True, 0.0, marks=pytest.mark.slow),
        pytest.param(False, 0.0, marks=pytest.mark.slow),
        pytest.param(False, 0.2, marks=pytest.mark.slow),
    ],
)
def test_loss_and_dropout(sim, engine, inside, dropout):
    Case(sim, engine, batches(), inside=inside, dropout=dropout).check()


@pytest.mark.slow
def test_accumulation(sim, engine):
    Case(sim, engine, batches(), dropout=0.1, accumulate=2).check()


@pytest.mark.slow
def test_changing_shapes(sim, engine):
    data = [*batches(4), *batches(2, ROWS // 2), *batches(2)]
    Case(sim, engine, data, dropout=0.1).check()


@pytest.mark.slow
def test_autocast(sim, engine):
    Case(sim, engine, batches(), share=0.7, rest=3 * MIB, autocast=torch.bfloat16).check()


@pytest.mark.slow
def test_copies(sim, engine):
    """Train a deep copy of a wrapped model, made after some of its steps."""
    case = Case(sim, engine, batches(), dropout=0.1)
    case.warm()
    case.wrapped = copy.deepcopy(case.wrapped)
    gc.collect()
    case.capacity += case.sim.memory_allocated() - (case.capacity - case.limit - REST)
    case.check()


class Interrupted(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
def test_exceptions(sim, engine, place):
    """Leave nothing of a step that fails, and train on as if it had not been."""
    case = Case(sim, engine, batches(), inside=False, dropout=0.1)
    case.warm()
    sim.set_capacity(case.capacity)

    def fail(*_):
        raise Interrupted

    def interrupted():
        if place == "forward":
            case.wrapped(torch.zeros(8, WIDTH + 1, device="sim"))
        output = case.wrapped(case.data[0])
        if place == "loss":
            fail()
        handle = next(iter(case.wrapped.parameters())).register_hook(fail)
        try:
            distance(output, torch.tensor(0.5, device="sim")).backward()
        finally:
            handle.remove()

    for _ in range(2):
        with pytest.raises((Interrupted, RuntimeError)):
            interrupted()
        case.wrapped.zero_grad()
        gc.collect()
    devices.settle_backwards(torch.device("sim", 0))
    level = sim.memory_allocated()
    with pytest.raises((Interrupted, RuntimeError)):
        interrupted()
    case.wrapped.zero_grad()
    gc.collect()
    devices.settle_backwards(torch.device("sim", 0))
    assert sim.memory_allocated() == level
    found = case.train()
    assert_equal(found, case.expected)
    assert max(found.peaks) <= case.limit


@pytest.mark.slow
def test_running_out_is_survived(sim, engine):
    """Go on after OutOfMemoryError, which a larger batch ended with."""
    case = Case(sim, engine, batches(), dropout=0.1)
    case.warm()
    large = torch.randn(ROWS * 3, WIDTH, device="sim")
    sim.set_capacity(case.capacity + 20 * MIB)
    with pytest.raises((torch.OutOfMemoryError, rotor.InfeasibleError, rotor.dtr.BudgetError)):
        one_step(case.wrapped, large, True)
    del large
    case.wrapped.zero_grad()
    gc.collect()
    sim.empty_cache()
    sim.set_capacity(case.capacity)
    assert_equal(case.train(), case.expected)
