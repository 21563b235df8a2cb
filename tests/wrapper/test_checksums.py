"""Checksums of tensors' bits, and the proof of a step that is made of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotor
from rotor import memory
from rotor.common import checksums
from rotor.common.checksums import Proof, Proved, checked_verify, checksum, is_verified

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def on_device(tensor):
    """The way of other devices, run on this one."""
    out = torch.empty(1, dtype=torch.int64)
    checksums._on_device(checksums._plain(tensor), out)
    return int(out)


WAYS = pytest.mark.parametrize("summed", [checksum, on_device], ids=["cpu", "device"])


def drawn(dtype, numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * width,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@WAYS
@pytest.mark.parametrize("numel", [1, 37, 4099, 40_961])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_any_type_gives_another_checksum(summed, dtype, numel):
    tensor = drawn(dtype, numel)
    whole = summed(tensor)
    assert summed(tensor.clone()) == whole
    raw = tensor.view(torch.uint8)
    for at in {0, raw.numel() // 2, raw.numel() - 1}:
        raw[at] ^= 1
        assert summed(tensor) != whole
        raw[at] ^= 1
    assert summed(tensor) == whole


@WAYS
@pytest.mark.parametrize("numel", [1000, 100_000])
def test_exchanged_and_negated_values_are_seen(summed, numel):
    values = drawn(torch.int32, numel).to(torch.float32) + 0.5
    whole = summed(values)
    for distance in (1, 2, 64, 512):
        changed = values.clone()
        changed[[3, 3 + distance]] = values[[3 + distance, 3]]
        assert summed(changed) != whole
    signs = torch.where(drawn(torch.bool, numel, 3), -1.0, 1.0)
    assert summed(values * signs) != whole
    # In words of 64 bits only the highest bit changes.
    double = values.to(torch.float64)
    assert summed(double * signs) != summed(double)
    assert summed(values.roll(1)) != whole
    rows = values.view(10, -1)
    assert summed(rows[torch.arange(9, -1, -1)].contiguous()) != summed(rows)


@pytest.mark.parametrize("distance", [1, 8, 4093, 8186, 4093 * 16])
def test_changes_that_cancel_are_seen(distance):
    """Sums alone, in columns or without, stay the same."""
    values = drawn(torch.int64, 100_000)
    whole = checksum(values)
    for step in (1, 1 << 31, 1 << 62):
        values[5] += step
        values[5 + distance] -= step
        assert checksum(values) != whole
        values[5] -= step
        values[5 + distance] += step
    assert checksum(values) == whole


@WAYS
@pytest.mark.parametrize("size", [8, 200])
def test_layouts(summed, size):
    base = drawn(torch.float64, size * size * 6).view(size, size, 6)
    for view in (base.permute(2, 0, 1), base[1:, :, ::2], base[:, 1:], base.transpose(0, 1)):
        whole = summed(view)
        assert summed(view) == whole
        at = tuple(n // 2 for n in view.shape)
        kept = view[at].item()
        view[at] = 0.0
        assert summed(view) != whole
        view[at] = kept
    expanded = base[:1, :1, :1].expand(size, size, 6)
    assert summed(expanded) == summed(expanded)
    gap = base[:, :, :4]
    whole = summed(gap)
    base[:, :, 5] = 7.0
    assert summed(gap) == whole
    assert isinstance(summed(base[:0]), int)


@WAYS
def test_lazy_conjugation_and_sign(summed):
    value = drawn(torch.complex64, 50_000)
    assert summed(value.conj()) == summed(value)
    assert isinstance(summed(value.conj().imag), int)
    proof = Proof()
    proof.first("a", value)
    proof.again("a", value.conj())
    assert [m.site for m in proof.finish()] == ["a"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_and_those_that_cannot_be_read():
    dense = torch.eye(7)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert checksum(sparse) == checksum(sparse.clone())
        assert checksum(sparse) != checksum(sparse * 2)
    with pytest.raises(TypeError, match="layout"):
        checksum(dense.to_mkldnn())


@pytest.mark.parametrize("numel", [100, 1 << 20])
def test_a_cpu_needs_no_memory_for_a_checksum(numel):
    value = torch.randn(numel)
    checksum(value)
    with memory.meter("cpu") as meter:
        checksum(value)
    assert meter.peak_bytes <= 64
    assert checksums.proof_bytes(torch.device("cpu"), 1000) == 0
    assert checksums.proof_bytes(torch.device("cuda"), 0) == 0
    assert checksums.proof_bytes(torch.device("cuda"), 5) < 2 << 20


def test_a_proof_names_what_differs():
    proof = Proof()
    a, b = torch.arange(6.0), torch.ones(2, 3)
    proof.first(("op", 0), a)
    proof.first(("op", 1), b)
    proof.first("never made again", b)
    proof.again(("op", 0), a + 1)
    proof.again(("op", 0), a)
    proof.again(("op", 1), b.clone())
    with pytest.raises(KeyError):
        proof.again("unknown", b)
    assert proof.compared == 2
    (found,) = proof.finish()
    assert found.site == ("op", 0)
    assert found.first == found.again == "[6], float32"
    assert proof.finish() == []


@pytest.mark.parametrize(
    "again",
    [torch.ones(6), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).t()],
    ids=["shape", "type", "strides"],
)
def test_another_layout_is_a_mismatch(again):
    proof = Proof()
    proof.first(0, torch.ones(2, 3))
    proof.again(0, again)
    assert len(proof.finish()) == 1


def test_a_device_is_read_once_at_the_end(monkeypatch):
    def as_tensor(tensor):
        return torch.tensor([checksum(tensor.to("cpu", copy=True))])

    values = [torch.full((5,), float(k)) for k in range(5000)]
    proof = Proof()
    # CPU tensors in the way of a device: slots are filled, and read by `finish` alone.
    monkeypatch.setattr(checksums, "checksum", as_tensor)
    proof._is_read = lambda tensor: False
    for k, value in enumerate(values):
        proof.first(k, value)
    for k, value in enumerate(values):
        proof.again(k, value + (k in (17, 4999)))
    assert [m.site for m in proof.finish()] == [17, 4999]


@pytest.mark.parametrize("value", ["first", "always", "off", 1, 10])
def test_verify_takes_these(value):
    assert checked_verify(value) == value
    model = rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)), verify=value)
    assert model.verify == value


@pytest.mark.parametrize(
    ("value", "error"),
    [("never", ValueError), (0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)],
)
def test_verify_refuses_others(value, error):
    with pytest.raises(error, match=r'expected "first", "always", "off", or a number n >= 1'):
        rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)), verify=value)


def test_which_steps_are_verified():
    assert [is_verified("first", n) for n in range(6)] == [True] * 3 + [False] * 3
    assert all(is_verified("always", n) for n in range(6))
    assert not any(is_verified("off", n) for n in range(6))
    assert [n for n in range(12) if is_verified(4, n)] == [0, 1, 2, 4, 8]


def test_what_reports_say():
    proved = Proved()
    assert proved.text("first") == "not proved yet"
    assert proved.text("off") == 'not proved: verify="off"'
    proved.add(0)
    assert proved.text("first") == "proved in 1 step: nothing was recomputed"
    proved.add(41)
    assert proved.text("first") == "proved in 2 steps: 41 recomputed values, bit for bit"
    assert Proved(unproved="compiled").text("first") == "not proved: compiled"


def test_the_error_names_module_operation_shapes_and_cure():
    proof = Proof()
    proof.first(0, torch.ones(2, 3))
    proof.again(0, torch.zeros(2, 3))
    (found,) = proof.finish()
    error = checksums.recomputation_error("aten.mul", "layers.3", found, "Keep it.", others=2)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, rotor.RecomputationError)
    assert (error.module, error.operation) == ("layers.3", "aten.mul")
    text = str(error)
    for part in ("aten.mul", "'layers.3'", "[2, 3], float32", "Keep it.", "2 other values"):
        assert part in text
