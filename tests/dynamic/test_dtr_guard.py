"""Reads of evicted tensors that no operator makes, and what else programs do under a budget."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor import dtr
from rotor._pytorch import dispatch, pointers
from rotor.errors import MemoryLimitWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:leaving the context brought back"),
    pytest.mark.filterwarnings("ignore:the budget of"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
SWAPS = [False, *([True] if pointers.has_storage_swap() else [])]
WIDTH = 1000
BYTES = 4 * WIDTH


def make():
    """A source, and values that are computed from it."""
    x = torch.linspace(0.1, 2.0, WIDTH)
    return x, [x.exp(), x.log(), x.sqrt(), x.sin(), x.cos(), x.tanh()]


def is_evicted(session, tensor):
    with dispatch.without_functions():
        ref = session.reference(tensor)
        assert ref is not None
    return not session._book.describe(ref.node).is_material


def address(tensor):
    return np.ctypeslib.as_array((ctypes.c_float * WIDTH).from_address(tensor.data_ptr())).copy()


def saved(tensor):
    file = io.BytesIO()
    torch.save({"a": tensor, "view": tensor[10:20]}, file)
    file.seek(0)
    return torch.load(file)["a"]


def alike(value):
    """Of what a read gives, something that can be compared after the budget."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


READS = {
    "repr": repr,
    "str": str,
    "format": lambda t: f"{t} {t[3]:.3f} {t.sum():.2e}",
    "cpu_then_print": lambda t: str(t.cpu()),
    "view_then_print": lambda t: str(t.view(10, -1)[2:4]),
    "numpy": lambda t: t.numpy(),
    "numpy_of_a_view": lambda t: t[5:50].numpy(),
    "array": lambda t: np.asarray(t),
    "array_of_a_type": lambda t: np.asarray(t, dtype=np.float64),
    "data_ptr": address,
    "tolist": lambda t: t.tolist(),
    "save": saved,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "item": lambda t: t[7].item(),
    "float": lambda t: float(t[7]),
    "index": lambda t: list(range(int(t[7] * 10))),
    "bool": lambda t: bool(t[7] > 0),
    "clone": lambda t: t.clone(),
    "iteration": lambda t: [float(v) for v in t[:5]],
    "tensor_of_elements": lambda t: torch.tensor([t[0], t[9]]),
    "tensor_of_nested_elements": lambda t: torch.as_tensor([[t[0], 1.0], (t[9], t[8])]),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float64),
    "dlpack": lambda t: torch.from_dlpack(t),
    "dlpack_to_numpy": lambda t: np.from_dlpack(t),
    "dlpack_capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "dlpack_function": lambda t: torch.from_dlpack(torch.to_dlpack(t)),
    "storage": lambda t: t.storage()[17],
    "untyped_storage": lambda t: list(t.untyped_storage()[16:24]),
    "share_memory": lambda t: t.share_memory_(),
    "apply": lambda t: t.apply_(lambda v: v + 1),
    "map": lambda t: t.map_(torch.ones(WIDTH), lambda a, b: a + b),
    "add_": lambda t: t.add_(1.0),
    "equal": lambda t: torch.equal(t, t.clone()),
    "contains": lambda t: t[3] in t,
    "write_through_a_view": lambda t: t[3:9].mul_(2.0)._base,
    "resize": lambda t: t.resize_(10, 100),
    "set": lambda t: torch.empty(0).set_(t),
    "tensor_split": lambda t: torch.tensor_split(torch.arange(WIDTH), (t * 10).long().sort()[0])[
        50
    ],
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", READS)
def test_evicted_tensors_can_be_read(name, swap):
    read = READS[name]
    _, values = make()
    expected = alike(read(values[0]))
    with dtr.budget(4 * BYTES + 200, heuristic="LRU", storage_swap=swap, strict=False) as session:
        _, values = make()
        assert is_evicted(session, values[0])
        found = alike(read(values[0]))
        for value in values[1:]:
            value + 1
        rest = [value.clone() for value in values[1:4]]
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    elif isinstance(found, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected
    for value, kept in zip(rest, make()[1][1:4], strict=True):
        assert torch.equal(value, kept)


@pytest.mark.parametrize("name", ["numpy", "data_ptr", "dlpack", "storage", "save"])
def test_what_shares_the_bytes_keeps_them(name):
    shares = {
        "numpy": lambda t: t.numpy(),
        "data_ptr": lambda t: t.data_ptr(),
        "dlpack": torch.from_dlpack,
        "storage": lambda t: t.untyped_storage(),
        "save": saved,
    }
    with dtr.budget(4 * BYTES + 200, heuristic="LRU") as session:
        _, values = make()
        shares[name](values[0])
        values[1:] = make()[1][1:]
        assert not is_evicted(session, values[0])


def test_printing_keeps_nothing():
    with dtr.budget(4 * BYTES + 200, heuristic="LRU") as session:
        _, values = make()
        str(values[0])
        assert not is_evicted(session, values[0])
        more = make()[1]
        assert is_evicted(session, values[0])
        del more


def test_writes_of_python_functions_protect_what_was_computed():
    with dtr.budget(6 * BYTES, strict=False):
        x = torch.linspace(0.1, 2.0, WIDTH).exp()
        y = x * 2
        rest = make()[1]
        x.apply_(lambda v: 0.0)
        rest.append(x + 1)
        found = y.clone()
    assert torch.equal(found, torch.linspace(0.1, 2.0, WIDTH).exp() * 2)


def test_the_guard_can_be_left_out():
    with dtr.budget(4 * BYTES + 200, heuristic="LRU", guard=False) as session:
        _, values = make()
        assert is_evicted(session, values[0])
        session.pin(values[0])
        found = values[0].numpy().copy()
    np.testing.assert_array_equal(found, make()[1][0].numpy())


def test_after_the_context_nothing_is_left_of_the_guard():
    function, run = torch.utils.dlpack.to_dlpack, torch.autograd._engine_run_backward
    with dtr.budget(4 * BYTES + 200, heuristic="LRU"):
        assert torch.utils.dlpack.to_dlpack is not function
    assert torch.utils.dlpack.to_dlpack is torch.to_dlpack is function
    assert torch.autograd._engine_run_backward is run
    assert not torch._C._is_torch_function_mode_enabled()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.detach().numpy() * gradient.numpy())


class _Deep(torch.autograd.Function):
    """Reads what it saved before any operator has run."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.tensor(np.cos(x.detach().numpy()))


def gradients(function):
    x = torch.linspace(0.1, 2.0, WIDTH).requires_grad_()
    seen = []
    y = x
    for _ in range(6):
        y = function(y.exp() / 8)
        y.register_hook(lambda g: seen.append(g.tolist()))
    y.sum().backward()
    return x.grad, seen


@pytest.mark.parametrize("function", [_Square, _Deep])
def test_functions_and_hooks_read_in_backwards(function):
    expected, expected_seen = gradients(function.apply)
    with dtr.budget(16 * BYTES, strict=False) as session:
        found, seen = gradients(function.apply)
    assert session.stats.evictions > 0
    assert torch.equal(found, expected)
    assert seen == expected_seen


def test_gradients_by_grad_are_guarded_too():
    def run():
        x = torch.linspace(0.1, 2.0, WIDTH).requires_grad_()
        y = x
        for _ in range(6):
            y = _Deep.apply(y.exp() / 8)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = run()
    with dtr.budget(10 * BYTES, strict=False) as session:
        found = run()
    assert session.stats.evictions > 0
    assert torch.equal(found, expected)


def test_backwards_of_other_threads_are_left_alone():
    found = []

    def run():
        x = torch.ones(10, requires_grad=True)
        (x * 2).sum().backward()
        found.append(x.grad)

    with dtr.budget(4 * BYTES + 200, heuristic="LRU"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(found[0], torch.full((10,), 2.0))


def under(run, fraction=0.5):
    """The results of a program, plain and under a part of the peak that it has without a limit."""
    expected = run()
    with dtr.budget(None) as session:
        run()
        peak = session.stats.peak_bytes
    with dtr.budget(int(peak * fraction), strict=False) as session:
        found = run()
        stats = session.stats
    return expected, found, stats


def deep(make_block, *, depth=6, width=64, rows=32):
    def run():
        torch.manual_seed(2)
        blocks = [make_block(width) for _ in range(depth)]
        x = torch.randn(rows, width)
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        return [x.detach(), *(p.grad for block in blocks for p in block.parameters())]

    return run


def test_changes_of_a_source_in_the_middle():
    def run():
        x = torch.linspace(0.1, 2.0, WIDTH)
        values = [x * k for k in range(1, 8)]
        x.add_(1.0)
        values += [x * k for k in range(1, 8)]
        return [value + 1 for value in values]

    expected, found, stats = under(run, 0.4)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_writes_to_slices():
    def run():
        x = torch.zeros(8, WIDTH)
        source = torch.linspace(0.1, 2.0, WIDTH)
        rows = []
        for k in range(8):
            x[k] = source.exp() * k
            rows.append(x.sum(0))
        return [x, *rows]

    expected, found, stats = under(run, 0.6)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_autocast_checkpoint_and_functions_together():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
            return F.gelu(y.float()) + x

    expected, found, stats = under(deep(Block), 0.75)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_complex_numbers():
    def run():
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x
        for _ in range(5):
            z = torch.fft.fft(y)
            y = torch.fft.ifft(z.conj() * z).imag.neg() + (z.conj() + 1).real.sin()
        y.sum().backward()
        return [y.detach(), x.grad]

    expected, found, stats = under(run, 0.6)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_a_loss_that_reads_lengths():
    def run():
        torch.manual_seed(1)
        x = torch.randn(50, 40, 20, requires_grad=True)
        lengths = (torch.arange(40) * 0 + 50).clone()
        targets = torch.randint(1, 20, (40, 5))
        target_lengths = (torch.arange(40) % 5 + 1).clone()
        rest = [x.exp() for _ in range(3)]
        loss = F.ctc_loss(x.log_softmax(-1), targets, lengths, target_lengths)
        loss.backward()
        return [loss.detach(), x.grad, *rest]

    expected, found, stats = under(run, 0.6)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_storages_that_are_replaced_or_resized():
    def run():
        x = torch.linspace(0.1, 2.0, WIDTH)
        values = [x * k for k in range(1, 6)]
        values[0].resize_(2 * WIDTH)
        values[0].fill_(3.0)
        values[1].set_(values[2])
        values[1].data = values[3]
        more = [value.exp() for value in values]
        return [*values, *more]

    expected, found, stats = under(run, 0.6)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats.evictions > 0


def test_modules_are_copied_and_saved_within():
    with dtr.budget(50_000, strict=False):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        model(torch.ones(16, 64)).sum().backward()
        again = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert torch.equal(value, loaded[name])


def test_leaving_before_the_backward():
    x = torch.linspace(0.1, 2.0, WIDTH).requires_grad_()

    def run():
        y = x
        for _ in range(8):
            y = y.sin()
        return y.sum()

    (expected,) = torch.autograd.grad(run(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryLimitWarning)
        with dtr.budget(4 * BYTES + 200, heuristic="LRU"):
            loss = run()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


def test_a_crash_is_none():
    """Reads that ended the process, in a process of their own."""
    script = """
import threading
import torch
from rotor import dtr
x = torch.linspace(0.1, 2.0, 100000)
with dtr.budget(4 * x.nbytes, strict=False) as session:
    values = [x.exp(), x.log(), x.sqrt(), x.sin(), x.cos(), x.tanh()]
    print(values[0]); print(values[1].cpu()); values[2].numpy().sum()
    session.pin(values[3])
    thread = threading.Thread(target=lambda: print(float(values[3].sum())))
    thread.start(); thread.join()
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])


def loss_of(model):
    return model(torch.linspace(-1, 1, 128 * 64).reshape(128, 64)).square().sum()


def run_in_thread(function):
    errors = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def backwards(loss, model):
    loss.backward()


def grads(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


@pytest.mark.filterwarnings("ignore:thrashing")
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("way", [backwards, grads])
@pytest.mark.parametrize("is_busy", [False, True], ids=["waiting", "busy"])
def test_a_backward_in_another_thread_brings_back_what_it_reads(swap, way, is_busy):
    plain, model, other = net(), net(), net()
    loss_of(plain).backward()
    expected = [p.grad for p in plain.parameters()]
    with dtr.budget(6 * 128 * 64 * 4, strict=False, storage_swap=swap) as session:
        loss = loss_of(model)
        assert session.stats.evictions > 0
        thread, errors = run_in_thread(lambda: way(loss, model))
        if is_busy:
            loss_of(other).backward()
        thread.join()
        assert session.stats.rematerializations > 0
    assert not errors
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    if is_busy:
        found = [p.grad for p in other.parameters()]
        assert all(map(torch.equal, found, expected))


def test_a_backward_of_another_model_in_another_thread_is_its_own():
    model = net()
    loss = loss_of(model)
    with dtr.budget("1 MiB") as session:
        loss_of(net())
        before = session.stats.operations
        thread, errors = run_in_thread(loss.backward)
        thread.join()
        assert session.stats.operations == before
    assert not errors
    assert all(p.grad is not None for p in model.parameters())
