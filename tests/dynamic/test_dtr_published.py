"""The functions of the published prototype."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor import dtr, simrd

pytestmark = pytest.mark.filterwarnings("ignore:leaving the context brought back")
WIDTH = 2000
BYTES = 4 * WIDTH


@pytest.fixture(autouse=True)
def unset():
    always = torch.zeros(10)  # Or level() would have nothing to name.
    yield
    assert always.nbytes > 0
    dtr.unset_memory_budget()
    dtr.toggle_sampling(True)
    dtr.toggle_ignore_small_tensors(True)
    assert dtr.current() is None


def level():
    """What is allocated, as the message of an error says."""
    with pytest.raises(ValueError, match="allocated already") as caught:
        dtr.set_memory_budget(1)
    text = str(caught.value).split("above the ")[1]
    return int(re.search(r"(\d+) bytes", text)[1])


def make(count=8):
    x = torch.linspace(0.1, 2.0, WIDTH)
    return [(x * k).sin() for k in range(1, count + 1)]


def test_a_budget_for_everything_on_the_device():
    expected = make()
    ballast = torch.zeros(10 * WIDTH)
    base = level()
    assert base >= ballast.nbytes
    dtr.set_memory_budget(base + 5 * BYTES)
    found = make()
    stats = dtr.current().stats
    assert stats.budget_bytes == 5 * BYTES
    assert stats.peak_bytes <= 5 * BYTES
    assert stats.evictions > 0
    dtr.unset_memory_budget()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert dtr.compute_time() == dtr.base_compute_time() + dtr.remat_compute_time()
    assert dtr.search_time() == dtr.cost_time() + dtr.loop_time() > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_of_every_layout_may_be_there():
    base = level()
    parts = [torch.zeros(WIDTH), torch.zeros(WIDTH)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    del parts
    assert level() >= base + 2 * BYTES
    columns = torch.eye(50).to_sparse_csc()
    opaque = torch.zeros(4, 4).to_mkldnn()
    strided = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)])
    dtr.set_memory_budget(level() + 5 * BYTES)
    make()
    assert dtr.current().stats.evictions > 0
    assert [jagged.layout, columns.layout, opaque.layout, strided.layout] == [
        torch.jagged,
        torch.sparse_csc,
        torch._mkldnn,
        torch.strided,
    ]


def test_a_step_under_the_published_functions():
    def step(model):
        x, target = torch.randn(64, 32), torch.randint(0, 8, (64,))
        if dtr.current() is not None:
            x = dtr.checkpoint(x)
            for parameter in model.parameters():
                dtr.checkpoint(parameter)
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        return dtr.decheckpoint(loss.detach())

    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = step(model)
    dtr.set_memory_budget(level() + 80_000)
    torch.manual_seed(1)
    found = step(other)
    assert dtr.current().stats.evictions > 0
    dtr.unset_memory_budget()
    assert torch.equal(found, expected)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_managed_tensors():
    x = torch.ones(WIDTH)
    assert not dtr.is_checkpoint(x)
    dtr.set_memory_budget(None)
    assert not dtr.is_checkpoint(x)
    assert dtr.checkpoint(x) is x
    assert dtr.is_checkpoint(x)
    with pytest.raises(ValueError, match="try_checkpoint"):
        dtr.checkpoint(x)
    assert dtr.try_checkpoint(x) is x
    y = x.exp()
    assert dtr.is_checkpoint(y)
    assert dtr.is_checkpoint(y[3:5])
    assert dtr.decheckpoint(y) is y
    assert not dtr.is_checkpoint(y)
    assert not dtr.is_checkpoint(y.view(2, -1))
    assert dtr.is_checkpoint(dtr.checkpoint(y))
    plain = torch.linspace(0, 1, 5)
    assert dtr.decheckpoint(torch.zeros(3)).tolist() == [0, 0, 0]
    dtr.unset_memory_budget()
    assert not dtr.is_checkpoint(y)
    assert dtr.decheckpoint(plain) is plain


def test_pinned_and_decheckpointed_tensors_stay():
    dtr.toggle_ignore_small_tensors(False)
    dtr.set_memory_budget(level() + 8 * BYTES)
    values = make(3)
    addresses = [dtr.pin(values[0]).data_ptr(), dtr.decheckpoint(values[1]).data_ptr()]
    more = make(12)
    assert [value.data_ptr() for value in values[:2]] == addresses
    assert 0 not in addresses
    del more


def test_the_pool_can_be_cleared():
    dtr.set_memory_budget(level() + 12 * BYTES)
    values = make(8)
    dtr.clear_checkpointpool()
    before = dtr.current().stats.evictions
    (torch.linspace(0, 1, WIDTH) * 2).sum()
    assert dtr.current().stats.evictions == before
    dtr.unset_memory_budget()
    assert all(torch.equal(a, b) for a, b in zip(values, make(8), strict=True))


def test_budgets_change():
    base = level()
    dtr.set_memory_budget(base + 20 * BYTES)
    values = make(8)
    assert dtr.current().stats.evictions == 0
    dtr.set_memory_budget(base + 6 * BYTES)
    assert dtr.current().stats.budget_bytes == 6 * BYTES
    values += make(2)
    assert dtr.current().stats.evictions > 0
    with pytest.raises(ValueError, match="not above"):
        dtr.set_memory_budget(10)
    dtr.set_memory_budget(float("inf"))
    assert dtr.current().stats.budget_bytes is None
    values[0].sum()


def test_options_are_checked_and_used():
    for toggle in (
        dtr.toggle_sampling,
        dtr.toggle_ignore_small_tensors,
        dtr.toggle_log,
        dtr.toggle_profile,
    ):
        with pytest.raises(TypeError, match="True or False"):
            toggle(1)
    dtr.toggle_ignore_small_tensors(False)
    dtr.toggle_sampling(False)
    dtr.set_memory_budget(level() + 6 * BYTES)
    make()


def test_profiles_begin_anew():
    dtr.set_memory_budget(None)
    make()
    assert dtr.base_compute_time() > 0
    dtr.reset_profile()
    assert dtr.compute_time() == dtr.remat_compute_time() == dtr.search_time() == 0


def test_logs(tmp_path):
    dtr.set_memory_budget(None)
    x = torch.ones(WIDTH).exp()
    dtr.new_log(tmp_path / "first.log")
    y = x.exp()
    dtr.new_log(tmp_path / "second.log.gz")
    dtr.annotate_log("a note")
    z = y.exp()
    dtr.toggle_log(False)
    hidden = z.sin()
    del y
    dtr.toggle_log(True)
    hidden.cos()
    dtr.annotate_log("START")
    z.exp()
    hidden.mul_(2)
    dtr.unset_memory_budget()
    first = simrd.parse(tmp_path / "first.log")
    assert [first.operation_name(k).split("/")[0] for k in range(first.operation_count)] == [
        "constant",
        "aten::exp",
    ]
    whole = simrd.parse(tmp_path / "second.log.gz", cut_at_start=False)
    names = [whole.operation_name(k).split("/")[0] for k in range(whole.operation_count)]
    assert names.count("aten::sin") == 0
    assert names.count("aten::cos") == 1
    cut = simrd.parse(tmp_path / "second.log.gz")
    names = [cut.operation_name(k).split("/")[0] for k in range(cut.operation_count)]
    assert sorted(names) == ["aten::exp", "aten::mul_", "constant", "constant"]
    assert simrd.simulate(whole).status == simrd.simulate(cut).status == "ok"


def test_logs_within_a_context(tmp_path):
    with dtr.budget(None):
        dtr.new_log(tmp_path / "some.log")
        torch.ones(WIDTH).exp()
    assert simrd.parse(tmp_path / "some.log").operation_count >= 2
    with dtr.budget(None, record_log=io.BytesIO()), pytest.raises(RuntimeError, match="record_log"):
        dtr.new_log(tmp_path / "other.log")


TIMES = (
    *(dtr.base_compute_time, dtr.remat_compute_time, dtr.compute_time),
    *(dtr.search_time, dtr.cost_time, dtr.loop_time),
)


def test_without_a_budget_there_is_nothing_to_clear_and_no_time():
    """In a process that has had no budget."""
    script = f"""
from rotor import dtr
dtr.clear_checkpointpool()
dtr.reset_profile()
assert [getattr(dtr, name)() for name in {[time.__name__ for time in TIMES]}] == [0] * 6
assert dtr.current() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_times_of_a_budget_that_ended_are_reset():
    dtr.set_memory_budget(None)
    torch.ones(WIDTH).exp()
    dtr.unset_memory_budget()
    assert dtr.compute_time() > 0
    dtr.reset_profile()
    assert dtr.compute_time() == 0


def test_without_a_log_notes_go_nowhere():
    dtr.annotate_log("x")
    dtr.toggle_log(False)
    with pytest.raises(RuntimeError, match="new_log"):
        dtr.toggle_log(True)
    dtr.set_memory_budget(None)
    dtr.annotate_log("x")
    dtr.toggle_log(False)
    with pytest.raises(RuntimeError, match="new_log"):
        dtr.toggle_log(True)


def test_misuse():
    dtr.unset_memory_budget()
    for function in (dtr.pin, dtr.decheckpoint, dtr.is_checkpoint):
        with pytest.raises(TypeError, match="expected a tensor"):
            function([1.0])
    with pytest.raises((TypeError, ValueError)):
        dtr.set_memory_budget(True)
    assert dtr.current() is None
    with dtr.budget(None), pytest.raises(RuntimeError, match="own limit"):
        dtr.set_memory_budget("1GiB")
    dtr.set_memory_budget(None)
    with pytest.raises(RuntimeError, match="do not nest"), dtr.budget("1GiB"):
        pass
    with torch.device("cpu"), pytest.raises(RuntimeError, match="leave them"):
        dtr.unset_memory_budget()
    with pytest.raises(RuntimeError, match="unset_memory_budget"):
        dtr.set_memory_budget(None, device="meta")


def test_programs_may_end_with_a_budget():
    script = (
        "import torch\nfrom rotor import dtr\ndtr.set_memory_budget(None)\n"
        "x = torch.ones(1000).exp()\nprint('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
