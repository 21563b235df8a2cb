"""Engines on an accelerator: bits, random states and peaks by the device's counters."""

import pytest
import torch
from choice_models import parts
from limited_on_sim import Trained, assert_equal, batches, compared, distance, one_step
from torch import nn
from zoo.models import Asking, FeedForward, Row, Varying

import rotor
from rotor import dtr
from rotor.engines.parts.chained import ChainKind

WIDTH, ROWS, STAGES = 128, 512, 6  # 256 KiB each activation.


def chain(dropout=0.0):
    """Return a chain whose activations are large beside its parameters."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Tanh())
            for _ in range(STAGES)
        )
    )


class Branches(nn.Module):
    """A model that is no chain: two branches and skips, with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, value):
        for left, right in zip(self.left, self.right, strict=True):
            branches = torch.tanh(left(value)), self.drop(torch.relu(right(value)))
            value = self.norm(value + branches[0] * branches[1])
        return value


def varying(dropout):
    parts = lambda: (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))  # noqa: E731
    return Varying(*(nn.Sequential(*parts()) for _ in range(6)))


def block(dropout):
    first = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))


MODELS = {"chain": (chain, 0.6), "graph": (Branches, 0.6), "dynamic": (varying, 0.7)}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("engine", MODELS)
def test_bit_equal_within_the_limit(sim, engine, dropout, inside):
    make, share = MODELS[engine]
    limit, plain, ours = compared(
        sim, lambda: make(dropout), batches(), share, engine=engine, inside=inside
    )
    assert min(plain.peaks) > limit
    assert max(ours.peaks[0 if inside else 1 :]) <= limit


@pytest.mark.parametrize(("engine", "share"), [("chain", 0.6), ("graph", 0.7)])
def test_accumulation(sim, engine, share):
    """Add gradients over two steps, as plain training does."""
    limit, _, ours = compared(
        sim, lambda: MODELS[engine][0](0.1), batches(4), share, engine=engine, inside=True,
        accumulate=2,
    )  # fmt: skip
    assert max(ours.peaks) <= limit


@pytest.mark.parametrize(
    ("engine", "dropout", "count", "share"), [("chain", 0.0, 3, 0.7), ("graph", 0.1, 2, 0.8)]
)
def test_autocast(sim, engine, dropout, count, share):
    compared(
        sim, lambda: MODELS[engine][0](dropout), batches(count), share, engine=engine, inside=True,
        autocast=torch.bfloat16,
    )  # fmt: skip


def test_changing_shapes(sim):
    both = [*batches(2), *batches(2, ROWS // 2), *batches(1)]
    limit, _, ours = compared(sim, lambda: chain(0.2), both, 0.6, engine="chain", inside=True)
    assert max(ours.peaks) <= limit


def test_trains_where_plain_runs_out_of_memory(sim):
    """Train with a capacity below the plain step's peak, bit-equal to training without one."""
    torch.manual_seed(1)
    model = chain(0.2).to("sim")
    data = batches()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Trained(sim, model, data)
    limit = max(plain.peaks) * 6 // 10
    wrapped = rotor.Checkpointable(model, mem_limit=limit, engine="chain", loss_fn=distance)
    # Room for what is resident, the limit, and the slack of segments.
    sim.empty_cache()
    resident = sim.memory_allocated()
    sim.set_capacity(resident + limit + (4 << 20))
    plain_peak = resident + max(plain.peaks)
    if plain_peak <= resident + limit + (4 << 20):
        sim.set_capacity(plain_peak - 1)
    with pytest.raises(torch.OutOfMemoryError):
        Trained(sim, model, data)
    model.zero_grad()
    sim.empty_cache()
    model.load_state_dict(state)
    ours = Trained(sim, wrapped, data, inside=True)
    assert_equal(ours, plain)


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_measuring_draws_no_numbers(sim, engine):
    """Leave the states of the CPU's and the device's generators as they were."""
    model = chain(0.3).to("sim")
    wrapped = rotor.Checkpointable(model, mem_limit="2.5 MB", engine=engine, loss_fn=distance)
    data = batches(1)[0]
    states = torch.get_rng_state(), sim.get_rng_state()
    wrapped.measure(data, targets=(torch.tensor(0.5, device="sim"),))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(sim.get_rng_state(), states[1])


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_the_named_least_limit_is_accepted(sim, engine):
    """Checksums of verified steps have room under the named limit, not under the given one."""
    wrapped = rotor.Checkpointable(chain().to("sim"), engine=engine, loss_fn=distance)
    data = batches(1, 80 * ROWS)[0]
    wrapped.measure(data, targets=(torch.tensor(0.5, device="sim"),))
    with pytest.raises(rotor.InfeasibleError) as refusal:
        wrapped.compute_sequence(1)
    wrapped.compute_sequence(refusal.value.minimum_bytes)
    assert wrapped.plan.predicted_bytes <= refusal.value.minimum_bytes


def test_draws_are_repeated(sim):
    """Compute dropout again with the device's own random states, and disturb no later draw."""
    _, _, ours = compared(
        sim, lambda: Branches(0.3), batches(), 0.37, engine="graph", inside=True,
        settings={"verbosity": 0},
    )  # fmt: skip
    plan = ours.model.plan
    runs = zip(plan.graph.operations, plan.program.runs, strict=True)
    assert any(operation.random and count > 1 for operation, count in runs)


def test_attention_with_dropout(sim):
    """Repeat the draws of attention, which takes no generator."""

    def attention():
        make = nn.TransformerEncoderLayer
        return Row(*(make(32, 2, 64, dropout=0.2, batch_first=True) for _ in range(2)))

    torch.manual_seed(0)
    data = [torch.randn(16, 32, 32, device="sim") for _ in range(2)]
    compared(sim, attention, data, 0.6, engine="graph", inside=True)


class Scripted(nn.Module):
    """A model that calls a script of torch.jit, whose arguments are made up when it is measured."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, device="sim") for _ in range(2))
        layers = nn.Linear(WIDTH, WIDTH, device="sim"), nn.ReLU()
        self.script = torch.jit.script(nn.Sequential(*layers))

    def forward(self, value):
        return self.last(self.script(torch.tanh(self.first(value))))


def test_measuring_a_script_disturbs_no_draw(sim):
    chk = rotor.Checkpointable(Scripted(), mem_limit="8 MB", engine="graph")
    value = batches(1)[0]
    before = torch.get_device_module("sim").get_rng_state()
    chk.measure(value)
    assert torch.equal(torch.get_device_module("sim").get_rng_state(), before)


def test_a_budget_takes_the_accelerator(sim):
    """Limit the device that is in use, and keep its random states in replays."""
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)
    value = torch.randn(ROWS, WIDTH, device="sim")

    def loss_of():
        found = value
        for _ in range(8):
            found = nn.functional.dropout(torch.tanh(found @ weight), 0.2)
        return found.square().mean()

    torch.manual_seed(2)
    expected = torch.autograd.grad(loss_of(), weight)[0].cpu()
    torch.manual_seed(2)
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    with dtr.budget("2 MiB") as session:
        found = torch.autograd.grad(loss_of(), weight)[0]
        assert session.device == torch.device("sim", 0)
    assert session.stats.rematerializations > 0
    assert torch.equal(found.cpu(), expected)
    assert sim.max_memory_allocated() - level <= 2 << 20


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore:no single graph")
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_parts_are_bit_equal_within_the_limit(sim, dropout):
    make = lambda: Asking(block(dropout), block(dropout))  # noqa: E731
    limit, plain, ours = compared(sim, make, batches(4), 0.75, engine="auto")
    assert min(plain.peaks) > limit
    assert max(ours.peaks[2:]) <= limit


@pytest.mark.filterwarnings("ignore:no single graph")
def test_a_limit_that_is_lowered_is_kept_at_once(sim):
    """Hand over before a step where what metered steps have shown does not fit."""
    data = torch.randn(ROWS, 64, device="sim")
    limited = rotor.Checkpointable(parts()[0].to("sim"), mem_limit="200MiB", verbosity=-1)
    for _ in range(2):
        one_step(limited, data, False)
        limited.zero_grad()
    assert limited.plan.engine == "parts"
    limited.mem_limit = limit = int(0.4 * limited.plan.unlimited_bytes)
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    with pytest.warns(rotor.MemoryLimitWarning, match="is less than the predicted need"):
        one_step(limited, data, False)
    assert limited.plan.engine == "dynamic"
    assert sim.max_memory_allocated() - level <= limit


class Opaque(nn.Module):
    """A stage that cannot be captured.

    Branches on a value between its own operations; draws random numbers, changes buffers.
    """

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def forward(self, x):
        y = self.norm(self.up(x)).tanh()
        if y.sum().item() > 1e30:
            y = y * 2
        return x + nn.functional.dropout(self.down(y.sigmoid()), 0.2)


def mixed():
    torch.manual_seed(0)
    known, opaque = lambda: FeedForward(WIDTH), Opaque
    first = known(), opaque(), known(), opaque(), opaque()
    return nn.Sequential(*first, nn.ReLU(inplace=True), known())


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_mixed_chains_are_bit_equal_within_the_limit(sim, monkeypatch, share):
    monkeypatch.setattr("rotor.engines.sequential.recomputation_of", lambda chain: 9.0)
    limit, plain, ours = compared(sim, mixed, batches(5), share, engine="auto")
    assert min(plain.peaks) > limit
    assert max(ours.peaks[2:]) <= limit
    plan = ours.model.plan
    assert plan.engine == "parts"
    chains = {
        site.name: site.kind.treatment(k)
        for site, k in zip(plan.parts.sites, plan.choice, strict=True)
        if isinstance(site.kind, ChainKind)
    }
    assert list(chains) == ["1", "3 to 4+5"]
    if share == 0.5:
        assert set(chains.values()) != {"kept"}
