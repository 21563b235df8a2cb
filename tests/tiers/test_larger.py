"""Parameters, gradients and optimizer states on a disk: training is that of the plain model."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import rotor
from rotor.memory import meter
from rotor.tier.weights import save_weights, weights_of

LIMIT = 3 << 20


class Block(nn.Module):
    """Layer of a GPT."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(y.reshape(b, t, d)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers=2, width=64, words=200, *, tied=False, dropout=0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return x if targets is None else F.cross_entropy(x.flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    def __init__(self, width=64) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(200, width), nn.Linear(width, 3)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 200)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        gates = self.gate(x).softmax(-1)
        x = x + sum(gates[..., k : k + 1] * F.silu(e(x)) for k, e in enumerate(self.experts))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Convolutions(nn.Module):
    def __init__(self, width=16) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Linear(width * 64, 50)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return F.cross_entropy(self.head(F.relu(x + self.second(x)).flatten(1)), targets)


class Products(nn.Module):
    """Weights with low-rank additions, whose gradients follow from those of the weights."""

    def __init__(self, width=64, rank=32) -> None:
        super().__init__()
        sizes = [(width, width), (width, rank), (rank, width)]
        layers = [[nn.Parameter(torch.randn(size) / 10) for size in sizes] for _ in range(4)]
        self.layers = nn.ModuleList([nn.ParameterList(layer) for layer in layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for whole, left, right in self.layers:
            x = F.relu(x @ (whole + left @ right))
        return x.square().mean()


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 200, (3, 32)), torch.randint(0, 200, (3, 32))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 50, (4,))


MODELS = {
    "gpt": (GPT, words),
    "tied": (partial(GPT, tied=True), words),
    "dropout": (partial(GPT, dropout=0.1), words),
    "experts": (Experts, words),
    "convolutions": (Convolutions, images),
    "products": (Products, lambda: (torch.randn(128, 64),)),
}
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=1e-3, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=1e-3, weight_decay=0.1),
    "fused": partial(optim.AdamW, lr=1e-3, fused=True),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def batches(name: str, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [MODELS[name][1]() for _ in range(count)]


def train(call, model, optimizer, data, way="plain") -> list[float]:
    """Return the losses of a training, and the norms of its gradients where these are clipped."""
    found = []
    scaler = torch.amp.GradScaler("cpu") if way == "scaler" else None
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if way == "schedule" else None
    torch.manual_seed(2)
    for batch in data:
        for _ in range(2 if way == "accumulation" else 1):
            loss = call(*batch)
            found.append(loss.item())
            (loss if scaler is None else scaler.scale(loss)).backward()
        if way == "clipping":
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad(set_to_none=way != "zeros")
    return found


def groups(model: nn.Module, way: str):
    if way == "frozen":
        for parameter in list(model.parameters())[:3]:
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return (
        [{"params": trained[:2], "lr": 1e-4}, {"params": trained[2:]}]
        if way == "groups"
        else trained
    )


def assert_same(one: nn.Module, other: nn.Module, a: optim.Optimizer, b: optim.Optimizer) -> None:
    """Assert that parameters, buffers and states have the same bits."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for state, known in zip(
        a.state_dict()["state"].values(), b.state_dict()["state"].values(), strict=True
    ):
        assert flat(state).keys() == flat(known).keys()
        for name, value in flat(known).items():
            assert torch.equal(torch.as_tensor(flat(state)[name]), torch.as_tensor(value)), name


def flat(state: dict, prefix: str = "") -> dict:
    """Return a state without dictionaries in it."""
    found = {prefix + name: v for name, v in state.items() if not isinstance(v, dict)}
    inner = [flat(v, f"{name}.") for name, v in state.items() if isinstance(v, dict)]
    return found | {name: v for more in inner for name, v in more.items()}


def compare(name: str, optimizer: str, way: str, limit: int = LIMIT, **settings):
    """Train both, and compare; return the wrapped model and its optimizer."""
    plain, model, data = made(name), made(name), batches(name)
    one, other = (OPTIMIZERS[optimizer](groups(m, way)) for m in (plain, model))
    expected = train(plain, plain, one, data, way)
    chk = rotor.Checkpointable(
        model, mem_limit=limit, offload="disk", offload_state=other, **settings
    )
    assert train(chk, model, other, data, way) == expected
    assert_same(plain, model, one, other)
    assert chk.planned_as == chk.plan.engine == "graph"
    assert chk.plan.measured_bytes <= limit
    return chk, other


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(name):
    compare(name, "adamw", "plain")


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_optimizers(optimizer):
    compare("tied", optimizer, "plain")


@pytest.mark.parametrize("kind", ["AdamW8bit", "SGD8bit", "LAMB8bit"])
def test_optimizers_of_bitsandbytes(kind, monkeypatch):
    """States of a byte an element, with maps and scales beside them."""
    quantised = pytest.importorskip("bitsandbytes")
    more = {"momentum": 0.9} if kind == "SGD8bit" else {}
    monkeypatch.setitem(OPTIMIZERS, kind, partial(getattr(quantised.optim, kind), lr=1e-3, **more))
    _, optimizer = compare("gpt", kind, "plain")
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert torch.uint8 in {s.dtype for s in states if isinstance(s, torch.Tensor)}


@pytest.mark.parametrize(
    "way", ["accumulation", "clipping", "frozen", "groups", "schedule", "scaler", "zeros"]
)
def test_ways_to_train(way):
    compare("gpt", "adamw", way)


@pytest.mark.parametrize("share", [1, 1.5, 2.5, 8])
@pytest.mark.parametrize("name", ["gpt", "dropout"])
def test_limits_that_leave_room(name, share):
    """Also where all gradients would fit until the end of a step that is compared."""
    size = sum(p.nbytes for p in made(name).parameters())
    compare(name, "adamw", "plain", int(share * size))


@pytest.mark.parametrize("update", ["device", "host"])
def test_on_a_disk_both_updates_are_the_cpus(update):
    compare("gpt", "adamw", "plain", update=update)


def test_the_least_limit_is_kept_to_the_byte():
    """Parameters and states, most of them away, count in the limit."""
    plain, model, data = made("gpt"), made("gpt"), batches("gpt", 5)
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    expected = train(plain, plain, one, data[:4])
    chk = rotor.Checkpointable(model, mem_limit=1 << 16, offload="disk", offload_state=other)
    with pytest.raises(rotor.InfeasibleError, match="counts what the model keeps") as caught:
        chk(*data[0])
    chk.mem_limit = caught.value.minimum_bytes
    assert train(chk, model, other, data[:4]) == expected
    kept = [p for p in model.parameters() if p.nbytes < 4096]
    states = [s for p in kept for s in other.state[p].values()]
    away = [s for p in model.parameters() if p.nbytes >= 4096 for s in other.state[p].values()]
    scalars = [s for s in away if s.numel() == 1]
    own = sum(t.nbytes for t in (*kept, *states, *scalars))
    with meter("cpu") as m:
        chk(*data[4]).backward()
        other.step()
    assert m.peak_bytes + own <= chk.mem_limit
    everything = 3 * sum(p.nbytes for p in plain.parameters())
    assert everything > 3 * chk.mem_limit


def test_a_step_moves_what_its_plan_says():
    model, data, tier = made("gpt"), batches("gpt", 4), rotor.DiskTier()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    chk = rotor.Checkpointable(
        model, mem_limit=1 << 19, offload=tier, offload_state=optimizer, planning="before"
    )
    train(chk, model, optimizer, data[:3])
    before = tier.traffic.copy()
    chk(*data[3]).backward()
    moved, program = tier.traffic.since(before), chk.plan.program
    # A parameter is fetched to bytes whose place in a sector is that of the write.
    operations = program.graph.operations
    runs = [operations[action] for action in program.actions if action in range(len(operations))]
    padding = sum(op.clock == "read" for op in runs) * (tier.alignment_bytes - 1)
    assert program.fetched_bytes - padding == moved.read_bytes > 0
    assert program.offloaded_bytes == moved.written_bytes > 0


def test_what_belongs_to_the_model_is_never_seen_empty():
    chk, optimizer = compare("gpt", "adamw", "plain")
    model, weight = chk.module, chk.module.head.weight
    values = weight.detach().clone()
    assert type(values) is torch.Tensor
    assert isinstance(weight, nn.Parameter)
    assert repr(weight) == repr(nn.Parameter(values))
    assert weight.sum().item() == values.sum().item()
    assert weight.tolist() == values.tolist()
    assert torch.equal(weight.t()[3:5], values.t()[3:5])
    assert torch.equal(copy.deepcopy(model).head.weight, values)
    average = optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(average.module.head.weight, values)
    with pytest.raises(RuntimeError, match="no memory that others"):
        weight.detach().numpy()
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    fresh = made("gpt")
    fresh.load_state_dict(loaded["model"])
    assert torch.equal(fresh.head.weight, values)
    with torch.no_grad():
        model.head.weight.t()[0].mul_(2)
        model.head.weight.data[:, 1] = 7
    values[:, 0] *= 2
    values[:, 1] = 7
    assert torch.equal(weight, values)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert_same(model, fresh, optimizer, optimizer)
    batch = batches("gpt")[0]
    model.eval()
    fresh.eval()
    with torch.no_grad():
        assert torch.equal(chk(*batch), fresh(*batch))
    model.train()
    # Plain training works too, fetching for each operation.
    model(*batch).backward()
    fresh(*batch).backward()
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_training_goes_on_from_saved_states():
    plain, model, data = made("gpt"), made("gpt"), batches("gpt", 4)
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    train(plain, plain, one, data[:2])
    states = copy.deepcopy((plain.state_dict(), one.state_dict()))
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=other)
    train(chk, model, other, data[:1])
    model.load_state_dict(states[0])
    other.load_state_dict(states[1])
    assert train(chk, model, other, data[2:]) == train(plain, plain, one, data[2:])
    assert_same(plain, model, one, other)


def test_large_parameters_are_updated_in_pieces():
    """Pieces of half a MiB, the last one not whole; their bits are those of the whole."""
    torch.manual_seed(0)
    plain, model = nn.Linear(700, 613), nn.Linear(700, 613)
    model.load_state_dict(plain.state_dict())
    for name in ("momentum", "adamw", "fused", "adam", "adagrad", "adafactor"):
        one, other = (OPTIMIZERS[name](m.parameters()) for m in (plain, copy.deepcopy(plain)))
        away = nn.Linear(700, 613)
        away.load_state_dict(plain.state_dict())
        other = OPTIMIZERS[name](away.parameters())
        chk = rotor.Checkpointable(away, mem_limit="40MiB", offload="disk", offload_state=other)
        torch.manual_seed(1)
        for x in torch.randn(3, 5, 700):
            for call, optimizer in ((plain, one), (chk, other)):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(plain, away, one, other)


def test_files_of_weights(tmp_path):
    model = made("tied")
    model.half()
    path = tmp_path / "model.safetensors"
    save_weights(model.state_dict().items(), path)
    found = weights_of(path)
    weight = found("embed.weight")
    assert weight.shape == (200, 64)
    assert torch.equal(weight.read(), model.embed.weight)
    assert found("none") is None
    assert weights_of(tmp_path)("embed.weight") is not None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no safetensors file: the bytes of"):
        weights_of(path)
    path.write_bytes(b"not")
    with pytest.raises(ValueError, match="its header is not in it"):
        weights_of(path)
    with pytest.raises(ValueError, match="holds no"):
        weights_of(path.parent / "..")


def test_a_model_begins_on_the_meta_device(tmp_path):
    plain, data = made("tied"), batches("tied")
    save_weights(plain.state_dict().items(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = GPT(tied=True)
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    settings = {"mem_limit": LIMIT, "offload": "disk", "offload_state": other}
    with pytest.raises(ValueError, match="have no values, on the meta device"):
        rotor.Checkpointable(model, **settings)
    wrong = {name: torch.zeros(3) for name in model.state_dict()}
    with pytest.raises(ValueError, match="in the weights, and"):
        rotor.Checkpointable(model, **settings, weights=wrong)
    assert model.embed.weight.is_meta
    chk = rotor.Checkpointable(model, **settings, weights=tmp_path)
    assert train(chk, model, other, data) == train(plain, plain, one, data)
    assert_same(plain, model, one, other)


LARGE = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from tiers.test_larger import GPT
import rotor

torch.set_num_threads(1)
with torch.device("meta"):
    model = GPT(3, 768, 4000)
torch.manual_seed(0)
weights = lambda name: torch.randn(model.state_dict()[name].shape) * 0.02
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(8, 8, requires_grad=True)
torch.compile(lambda t: t.sin().sum(), backend="aot_eager")(x).backward()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (320 << 20),) * 2)
if sys.argv[2] == "plain":
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    model = rotor.Checkpointable(
        model,
        mem_limit="64MiB",
        offload="disk:" + sys.argv[3],
        offload_state=optimizer,
        weights=weights,
    )
for _ in range(4):
    model(*torch.randint(0, 4000, (2, 2, 64))).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", 3 * sum(p.nbytes for p in model.parameters()) // (64 << 20))
"""


def test_a_model_trains_where_the_plain_one_cannot_exist(tmp_path):
    """320 MiB beside the interpreter hold a limit of 64, for 330 of parameters and states."""
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    tests = str(Path(__file__).parents[1])
    ran = [
        subprocess.run(
            [sys.executable, "-W", "ignore", script, tests, way, tmp_path],
            capture_output=True,
            text=True,
            timeout=300,
        )
        for way in ("plain", "away")
    ]
    assert ran[0].returncode != 0
    assert ran[1].returncode == 0, ran[1].stderr[-2000:]
    assert ran[1].stdout.startswith("trained 4")


class Counting(optim.SGD):
    """Optimizer that counts in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"offload": None}, ValueError, "needs a second tier"),
        ({"engine": "chain", "offload": None}, ValueError, "needs a second tier"),
        ({"engine": "chain"}, ValueError, "moves values of captured graphs"),
        ({"update": "elsewhere"}, ValueError, "unknown update 'elsewhere'"),
        ({"offload_state": None, "update": "host"}, ValueError, "update= is for parameters"),
        ({"offload_state": "adam"}, TypeError, "must be an optimizer"),
        ({"offload": "host"}, ValueError, "does not reach the memory of cpu"),
    ],
)
def test_wrong_options_are_refused(settings, error, text):
    model = made("gpt")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    given = {"mem_limit": LIMIT, "offload": "disk", "offload_state": optimizer, **settings}
    with pytest.raises(error, match=text):
        rotor.Checkpointable(model, **given)
    assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: optim.LBFGS(m.parameters()), "LBFGS computes with all parameters at once"),
        (lambda m: optim.SGD(m.head.parameters(), lr=1.0), "in no group of the optimizer"),
        (lambda m: optim.Adam(m.parameters(), differentiable=True), "no differentiable updates"),
    ],
)
def test_optimizers_that_do_not_suit(make, text):
    model = made("gpt")
    with pytest.raises(ValueError, match=text):
        rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=make(model))
    assert type(model.head.weight) is nn.Parameter


def test_an_optimizer_that_changes_its_settings_is_refused_before_it_changes_anything():
    model = made("gpt")
    optimizer = Counting(model.parameters(), lr=0.1)
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=optimizer)
    chk(*batches("gpt")[0]).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="Counting changes settings of its groups"):
        optimizer.step()
    for parameter, values in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, values)


def test_hooks_on_steps_run_once():
    model, seen = made("gpt"), []
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(chk, model, optimizer, batches("gpt", 1))
    assert seen == ["before", "after"]


def test_replaced_parameters_are_errors_and_hooks_on_them_run():
    model, batch = made("gpt"), batches("gpt")[0]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    settings = {"mem_limit": LIMIT, "offload": "disk", "offload_state": optimizer}
    chk = rotor.Checkpointable(model, **settings, engine="graph")
    handle = model.head.weight.register_hook(lambda gradient: 2 * gradient)
    chk(*batch).backward()
    twice = model.head.weight.grad.clone()
    handle.remove()
    seen = []
    handle = model.head.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(weight.grad.clone())
    )
    optimizer.zero_grad()
    chk(*batch).backward()
    assert torch.equal(2 * model.head.weight.grad, twice)
    assert torch.equal(2 * seen[0], twice)
    handle.remove()
    chk(*batch).backward()
    weight, model.head.weight = model.head.weight, nn.Parameter(torch.zeros(200, 64))
    with pytest.raises(RuntimeError, match=r"parameter head\.weight was replaced"):
        chk(*batch)
    model.head.weight = weight
    chk(*batch).backward()


class Asks(nn.Module):
    """Model that no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if x.sum().item() > 0 else 3)


def test_a_model_without_a_graph_runs_with_a_warning():
    torch.manual_seed(0)
    plain = Asks()
    model = copy.deepcopy(plain)
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    chk = rotor.Checkpointable(model, mem_limit=LIMIT, offload="disk", offload_state=other)
    with pytest.warns(rotor.MemoryLimitWarning, match="the dynamic engine runs it"):
        chk(torch.ones(3, 64)).sum().backward()
    plain(torch.ones(3, 64)).sum().backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert "AwayTensor" in type(model.linear.weight.grad).__name__
    one.step()
    other.step()
    assert_same(plain, model, one, other)


def test_an_engine_by_name_raises_and_the_model_stays_whole():
    model = Asks()
    values = copy.deepcopy(model.linear.weight)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    settings = {"mem_limit": LIMIT, "offload": "disk", "offload_state": optimizer}
    chk = rotor.Checkpointable(model, **settings, engine="graph")
    with pytest.raises(rotor.CaptureError):
        chk(torch.ones(3, 64))
    assert torch.equal(model.linear.weight, values)


def test_data_of_a_parameter_is_taken_over():
    chk, _ = compare("gpt", "sgd", "plain")
    model = chk.module
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(2 * vector, model.parameters())
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), 2 * vector)
    weight = model.head.weight
    weight.data = torch.ones(200, 64)
    assert weight.sum().item() == weight.numel()
    with pytest.raises(RuntimeError, match="keeps its shape, type and device"):
        model.half()
    assert model.float().head.weight is weight


def test_offmate_is_the_published_call():
    plain, model, data = made("gpt"), made("gpt"), batches("gpt")
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    expected = train(plain, plain, one, data)
    chk = rotor.Offmate(model, data[0], LIMIT, other)
    assert chk.plan.predicted_bytes <= LIMIT
    assert train(chk, model, other, data) == expected
    assert_same(plain, model, one, other)
    values = rotor.Offmate(made("gpt"), list(data[0]), "8MiB")
    assert type(values.module.head.weight) is nn.Parameter


def test_a_wrapped_model_is_not_copied():
    chk, _ = compare("gpt", "sgd", "plain")
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(chk)
