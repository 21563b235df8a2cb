"""Plans of kernels that Inductor compiles: values bit by bit, and peaks as predicted."""

from __future__ import annotations

import copy
import importlib.util
import re
import warnings

import pytest
import torch
from eager_inductor import stand_in
from graph_modules import RandomNet, arguments, in_order, loss_of, random_program, step
from torch import nn
from torch.nn import functional as F
from training import gradients_of, same

import rotor
from rotor._pytorch import inductor as _inductor
from rotor._pytorch.draws import KEPT
from rotor.engines.graph.capture import Capture, Unplanned, fresh
from rotor.engines.graph.code.emit import emit
from rotor.engines.graph.tracing.groups import groups_among


def _compiles() -> str:
    try:
        _inductor.check()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(_compiles()), reason=f"Inductor needs: {_compiles()}")
slow = pytest.mark.slow
DROPOUT = 0.3


@pytest.fixture(autouse=True)
def _quick_compiler():
    from torch._inductor import config

    # Inductor's workers and its C++ make warnings of their own, which are not ours to judge.
    with warnings.catch_warnings(), config.patch(compile_threads=1):
        for category in (DeprecationWarning, FutureWarning, ResourceWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("error", rotor.MemoryLimitWarning)
        yield


@pytest.fixture
def eager(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path)


def test_a_gpu_needs_triton(monkeypatch):
    """Raise at once, not at the first step."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    _inductor.check({"cpu"})
    with pytest.raises(RuntimeError, match="Triton is missing"):
        _inductor.check({"cpu", "cuda"})


class Tiny(nn.Module):
    """Two layers with normalisation and dropout."""

    def __init__(self, dropout: float = DROPOUT, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.second, self.dropout = nn.Linear(4 * width, width), dropout

    def forward(self, x):
        y = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout, self.training)
        return x + self.second(y)


class Convolutions(nn.Module):
    """Convolutions with skip connections."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(blocks)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(x + norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """One block of attention, with dropout or without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(16), dropout
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


def planned(model, limit, *, loss_fn=None, **options):
    return rotor.Checkpointable(
        model,
        mem_limit=limit,
        engine="graph",
        backend="inductor",
        effort="fast",
        loss_fn=loss_fn,
        **options,
    )


def state_after(model, x, steps, **call):
    """Losses, gradients and buffers after some steps that accumulate."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        output = model(x, **call)
        loss = output if output.dim() == 0 else loss_of(output)
        loss.backward()
        losses.append(loss.detach())
        if len(losses) == 1:
            check_exact(model)
    return [*losses, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def both(model, x, fraction, *, steps=2, loss_fn=None, **call):
    """The unplanned compiled model, a planned one, and what both leave behind."""
    unplanned = planned(copy.deepcopy(model), "1GB", loss_fn=loss_fn)
    unplanned.measure(x, **call)
    unplanned.compute_sequence()
    whole = unplanned.get_expected_memory()
    limited = planned(copy.deepcopy(model), int(whole * fraction), loss_fn=loss_fn)
    return (
        unplanned,
        limited,
        state_after(unplanned, x, steps, **call),
        state_after(limited, x, steps, **call),
    )


def groups_of(lowered):
    """The groups among the operations of a graph, one by one."""
    return [group for task in lowered.tasks for group in groups_among([task.node])]


def check_exact(model):
    """The step kept its limit, and needed what was predicted, but for bytes of the engine."""
    plan = model.plan
    assert plan.engine == "graph"
    assert plan.measured_bytes <= plan.limit_bytes
    assert 0 <= plan.predicted_bytes - plan.measured_bytes <= 2 * plan.executor_bytes


# -- without a compiler


def test_unknown_backends_are_refused_with_the_known_ones():
    model = Tiny()
    with pytest.raises(
        ValueError, match="unknown backend 'triton', expected one of fx, inductor, auto"
    ):
        rotor.Checkpointable(model, mem_limit="1GB", backend="triton")


def test_chains_have_no_graph_to_compile():
    with pytest.raises(ValueError, match='engine="chain" has none'):
        rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)), engine="chain", backend="inductor")


def test_a_missing_compiler_is_named_before_anything_is_done(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(RuntimeError, match=r"finds no compiler.*CXX.*backend=\"fx\" needs none"):
        rotor.Checkpointable(Tiny(), torch.randn(4, 8), "1GB", backend="inductor")


def test_missing_private_names_are_named(monkeypatch):
    monkeypatch.setattr(_inductor, "_REQUIRED", ("_inductor.compile_fx.not_there",))
    with pytest.raises(ImportError, match=r"torch\._inductor\.compile_fx\.not_there.*PyTorch 2"):
        _inductor.check()


def test_seeds_are_drawn_once_and_attention_without_dropout_is_not_random(eager):
    model = planned(Attention(0.5), "1GB")
    with warnings.catch_warnings():
        step = model.measure(torch.randn(2, 6, 16))
    seeds = [t for t in step.lowered.tasks if "inductor_seeds" in t.name]
    assert len(seeds) == 1
    assert seeds[0].once
    assert not any("inductor_random" in text_of(t) for t in step.lowered.tasks)
    drawn = [t for t in step.lowered.tasks if t.node and t.node.target is KEPT]
    assert len(drawn) == 2
    assert not any(t.once or t.random for t in drawn)
    calm = planned(Attention(0.0), "1GB").measure(torch.randn(2, 6, 16))
    attention = [t for t in calm.lowered.tasks if "scaled_dot_product" in t.name]
    assert attention
    assert not any(t.once or t.random for t in attention)


def test_noise_is_a_function_of_its_seed(eager):
    class Noisy(Tiny):
        def forward(self, x):
            return super().forward(x + torch.rand_like(x))

    step = planned(Noisy(0.0), "1GB").measure(torch.randn(4, 8))
    drawn = [t for t in step.lowered.tasks if "inductor_random" in text_of(t)]
    assert drawn
    assert not any(t.once or t.random for t in drawn)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.75])
@pytest.mark.parametrize("size", [(0,), (7, 5), (3, 40_000)])
def test_masks_of_dropout_are_functions_of_a_seed(size, share):
    before = torch.get_rng_state()
    masks = [KEPT(size, torch.tensor(seed), share) for seed in (-5, -5, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all((mask.shape, mask.dtype) == (torch.Size(size), torch.bool) for mask in masks)
    assert torch.equal(masks[0], masks[1])
    if masks[0].numel() > 1000:
        assert all(abs(mask.double().mean() - (1 - share)) < 0.01 for mask in masks)
        assert torch.equal(masks[0], masks[2]) == (share == 0.0)
        # No two pieces have the same numbers.
        flat = masks[0].flatten()
        assert share == 0.0 or not torch.equal(flat[:1000], flat[1 << 15 :][:1000])


class Checked(Tiny):
    """A model with assertions among its operators."""

    def forward(self, x):
        y = super().forward(x)
        torch._assert_async(y.isfinite().all(), "finite")
        return y * F.one_hot(y.argmax(-1), y.shape[-1]).sum(-1, keepdim=True)


def test_a_model_that_checks_its_values_gets_all_gradients(eager):
    model = Checked(0.0)
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    limited = planned(model, "1GB")
    loss_of(limited(x)).backward()
    loss_of(twin(x)).backward()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)


def text_of(task):
    """The operators of a group; empty for other operations."""
    return "".join(group.text for group in groups_among([task.node]))


def test_the_code_repeats_what_the_program_repeats(eager):
    model = planned(nn.Sequential(*(Tiny(width=16) for _ in range(4))), "1GB")
    step = model.measure(torch.randn(64, 16))
    model.compute_sequence()
    with pytest.raises(rotor.InfeasibleError) as refused:
        model.compute_sequence(1)
    model.compute_sequence(refused.value.minimum_bytes)
    plan = model.plan
    again = [n for n, runs in enumerate(plan.program.runs) if runs > 1]
    assert again
    assert any(groups_among([step.lowered.tasks[index].node]) for index in again)
    code = plan.emitted
    for index in again:
        made = [path for path, _ in step.lowered.tasks[index].made.items()]
        names = [f"a{index}" + "".join(f"_{k}" for k in path) for path in made]
        lines = [line for line in code.source.splitlines() if " = k" in line]
        found = sum(any(re.search(rf"\b{n}\b.* = k", line) for n in names) for line in lines)
        assert found == plan.program.runs[index]
    assert code.replayed == 0


# -- what is compiled, run by eager instead


class Planned:
    """A call captured for Inductor, that runs any program."""

    def __init__(self, model, args, kwargs):
        def call(model, args, kwargs):
            return model.forward(*args, **kwargs)

        self.model, self.capture = model, Capture(fresh(call), "inductor")
        try:
            self.capture(model, args, kwargs)
        except Unplanned as reached:
            self.captured = reached.captured
        self.lowered = self.captured.lowered

    def set_program(self, ops):
        self.captured.emitted = emit(self.lowered, ops)

    def __call__(self, *args, **kwargs):
        return self.capture(self.model, args, kwargs)


def check(seed):
    torch.manual_seed(seed)
    model = RandomNet(seed)
    model.kinds = ["relu_" if kind == "max" else kind for kind in model.kinds]
    args, kwargs = arguments(seed), {"scale": 0.5}
    twin = copy.deepcopy(model)
    planned_call = Planned(model, args, kwargs)
    start = copy.deepcopy(model.state_dict())
    planned_call.set_program(in_order(planned_call.lowered))
    reference = step(model, planned_call, args, kwargs, seed=seed)
    # Statistics of a few numbers make rounding large.
    if not {"dropout", "noise", "batch_norm"} & set(model.kinds):
        eager = step(twin, twin, args, kwargs, seed=seed)
        eager.rng = reference.rng
        # Gradients that are zero but for rounding are compared with 1e-3.
        assert reference.is_close(eager, 0.02), model.kinds
    most = 1
    for k, drop in enumerate((0.3, 1.0)):
        ops = random_program(planned_call.lowered, seed + k, drop)
        most = max(most, *(ops.count(i) for i in range(len(planned_call.lowered.tasks))))
        model.load_state_dict(start)
        planned_call.set_program(ops)
        found = step(model, planned_call, args, kwargs, seed=seed)
        assert reference.differences(found) == [], (model.kinds, drop)
    return most


@pytest.mark.parametrize("seed", range(4))
def test_graphs_of_random_programs_give_what_the_unplanned_ones_give(eager, seed):
    assert check(seed) > 2


@slow
def test_graphs_of_a_hundred_random_modules(eager):
    for seed in range(2000, 2100):
        check(seed)
        torch._dynamo.reset()


# -- compiled


@needs_compiler
def test_dropout_and_norm_equal_the_unplanned_run(caplog):
    model, x, target = Tiny(width=16), torch.randn(64, 16), torch.zeros(64, 16)
    with caplog.at_level("INFO", logger="rotor"):
        _, limited, expected, found = both(model, x, 0.888, loss_fn=F.mse_loss, targets=(target,))
    assert limited.plan.recomputed > 0
    assert same(expected, found)
    assert limited.module.norm.num_batches_tracked == 2
    # Another limit, and another model of the same layers, find all kernels compiled.
    assert caplog.text.count("compiled by Inductor in") == 1


@needs_compiler
def test_gradients_of_any_layout_reach_compiled_kernels():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).double()
    x, rows = torch.randn(64, 16).double(), torch.arange(64.0)
    limited = planned(copy.deepcopy(model), "1GB")
    for loss in (torch.sum, lambda y: (y.t() * rows).sum(), lambda y: y[::2].sum()):
        for each in (model, limited):
            each.zero_grad()
            loss(each(x)).backward()
        torch.testing.assert_close(gradients_of(limited), gradients_of(model))


@slow
@needs_compiler
@pytest.mark.parametrize("fraction", [0.8, 0.7])
def test_convolutions_keep_their_limit(fraction):
    model, x = Convolutions(), torch.randn(4, 3, 16, 16)
    target = torch.randint(5, (4,))
    _, limited, expected, found = both(
        model, x, fraction, steps=4, loss_fn=F.cross_entropy, targets=(target,)
    )
    assert limited.plan.recomputed > 0
    assert same(expected, found)


@slow
@needs_compiler
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_equals_the_unplanned_run(dropout):
    model, x = Attention(dropout), torch.randn(4, 12, 16)
    _, limited, expected, found = both(
        model, x, 0.93, steps=4, loss_fn=F.mse_loss, targets=(torch.zeros(4, 12, 16),)
    )
    assert limited.plan.recomputed > 0
    assert same(expected, found)


@slow
@needs_compiler
def test_a_loss_outside_accumulation_and_another_batch():
    model, x = Tiny(width=16), torch.randn(64, 16)
    unplanned, limited = planned(copy.deepcopy(model), "1GB"), planned(model, "1GB")
    torch.manual_seed(0)
    limited.measure(x)
    limited.compute_sequence()
    limited.compute_sequence(int(limited.get_expected_memory() * 0.96))
    for batch in (x, x, torch.randn(48, 16), x):
        for each in (unplanned, limited):
            torch.manual_seed(1)
            loss_of(each(batch)).backward()
    assert same(gradients_of(unplanned), gradients_of(limited))
    # The first step alone makes new gradients; its plan went when both shapes got one graph.
    assert len(limited.plans) == 2
    told = limited.report()
    assert "shapes: 2 of x; 2 share 1 captured graph, 0 captured alone" in told
    assert limited.module.norm.num_batches_tracked == 4
