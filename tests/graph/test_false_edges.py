"""Arguments that operators read for their sizes only: the same bits without them, less memory."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from rotor.models.unet import UNet
from torch import nn
from torch.nn import functional as F
from training import gradients_of, same
from versions import HANDS_OVER

import rotor
from rotor.engines.graph.tracing import false_edges
from rotor.graph import lower_bound

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = (torch.contiguous_format, torch.channels_last)

WITHOUT_KERNEL = [
    (aten.avg_pool3d_backward.default, torch.bfloat16),
    (aten.avg_pool3d_backward.default, torch.float16),
]

# Channels, kernel, stride, padding, dilation, transposed, groups, batch.
CONVOLUTIONS = {
    "plain": (8, 16, 3, 1, 1, 1, False, 1, 2),
    "pointwise": (8, 16, 1, 1, 0, 1, False, 1, 2),
    "strided": (8, 16, 3, 2, 1, 1, False, 1, 2),
    "depthwise": (8, 8, 3, 1, 1, 1, False, 8, 2),
    "dilated": (8, 16, 3, 1, 2, 2, False, 1, 2),
    "grouped": (8, 16, 3, 1, 1, 1, False, 4, 2),
    "transposed": (8, 16, 2, 2, 0, 1, True, 1, 2),
    "one image": (8, 16, 3, 1, 1, 1, False, 1, 1),
}


def garbage_like(tensor):
    """A tensor of the same layout whose values would show in any result."""
    return torch.full((tensor.numel(),), float("nan"), dtype=tensor.dtype).as_strided(
        tensor.shape, tensor.stride()
    )


def assert_same(ours, theirs):
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_read_sizes_only(name, dtype):
    torch.manual_seed(0)
    small, large, kernel, stride, padding, dilation, transposed, groups, batch = CONVOLUTIONS[name]
    shape = (small, large // groups) if transposed else (large, small // groups)
    for layout_of_input in LAYOUTS:
        for layout_of_weight in LAYOUTS:
            x = torch.randn(batch, small, 14, 14).to(dtype).to(memory_format=layout_of_input)
            w = torch.randn(*shape, kernel, kernel).to(dtype).to(memory_format=layout_of_weight)
            how = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)
            y = aten.convolution(x, w, None, *how)
            slope = torch.empty_like(y).copy_(torch.randn(y.shape))

            def backward(x, w, mask, slope=slope, how=how):
                return aten.convolution_backward(slope, x, w, [large], *how, mask)

            mask = [True, False, False]
            assert_same(backward(garbage_like(x), w, mask)[0], backward(x, w, mask)[0])
            mask = [False, True, True]
            ours, theirs = backward(x, garbage_like(w), mask), backward(x, w, mask)
            assert_same(ours[1], theirs[1])
            assert_same(ours[2], theirs[2])


def loss_of_classes(operator, x):
    """A backward of a loss of classes, some of them ignored, as a function of the logits."""
    flat = operator is aten.nll_loss_backward.default
    x = x.sum(dim=tuple(range(2, x.dim()))) if flat else x
    target = torch.arange(x[:, 0].numel()).reshape(x[:, 0].shape) % x.shape[1]
    weight = torch.linspace(0.5, 2.0, x.shape[1]).to(x.dtype)
    forward = aten.nll_loss_forward if flat else aten.nll_loss2d_forward
    loss, total = forward(x, target, weight, 1, 1)
    return lambda v: operator(
        loss, v.reshape(-1)[: x.numel()].view_as(x), target, weight, 1, 1, total
    )


def pooled(operator, x):
    """A backward of pooling, as a function of its second argument."""
    if operator is aten.max_pool2d_with_indices_backward.default:
        y, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
        return lambda v: operator(y, v, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)
    if operator is aten.max_pool3d_with_indices_backward.default:
        y, indices = aten.max_pool3d_with_indices(x, [2] * 3, [2] * 3)
        return lambda v: operator(y, v, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, indices)
    name = operator.name().split("::")[1]
    if name.startswith("avg_pool"):
        dims = x.dim() - 2
        forward = getattr(aten, name.removesuffix("_backward"))
        y = forward(x, [2] * dims)
        return lambda v: operator(y, v, [2] * dims, [2] * dims, [0] * dims, False, True, None)
    if name.startswith("nll"):
        return loss_of_classes(operator, x)
    if name.startswith("adaptive_max"):
        y, indices = getattr(aten, name.removesuffix("_backward"))(x, [3] * (x.dim() - 2))
        return lambda v: operator(y, v, indices)
    if name.startswith("_adaptive"):
        y = getattr(aten, name.removesuffix("_backward"))(x, [3] * (x.dim() - 2))
        return lambda v: operator(y, v)
    padding = [1] * (2 * (x.dim() - 2))
    y = getattr(aten, name.removesuffix("_backward"))(x, padding)
    return lambda v: operator(y, v, padding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", false_edges.OF_SECOND, ids=lambda o: o.name())
def test_pooling_reads_sizes_only(operator, dtype):
    torch.manual_seed(0)
    dims = next((n for n in (1, 2, 3) if f"{n}d" in operator.name()), 2)
    x = torch.randn(2, 6, *[8] * dims).to(dtype)
    if (operator, dtype) in WITHOUT_KERNEL:
        with pytest.raises(RuntimeError, match="not implemented for"):
            pooled(operator, x)(x)
        return
    call = pooled(operator, x)
    assert_same(call(garbage_like(x)), call(x))
    if dims == 2:
        x = x.to(memory_format=torch.channels_last)
        call = pooled(operator, x)
        assert_same(call(garbage_like(x)), call(x))


class Net(nn.Module):
    """Convolutions whose gradients are as large as their inputs, smaller and larger; pools."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.same = nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 8, 2, stride=2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.same(torch.tanh(self.first(x)))), 2)
        x = F.gelu(self.up(F.gelu(self.down(x))))
        x = F.avg_pool2d(self.normed(F.pad(x, (1, 1, 1, 1), mode="reflect")), 2)
        return self.last(x.mean((2, 3)))


def edges_of(chk):
    """Number of inputs of operations that have no memory."""
    return sum(
        argument.target is false_edges.of_sizes
        or (argument.op == "get_attr" and argument.target.startswith(false_edges.PREFIX))
        for task in chk.plan.step.lowered.tasks
        if task.node is not None
        for argument in task.node.all_input_nodes
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_those_of_plain_training(dtype, layout):
    if layout is torch.channels_last and not HANDS_OVER:
        pytest.skip("PyTorch 2.11 runs other layouts than it captures where formats are mixed")
    torch.manual_seed(0)
    plain = Net().to(dtype).to(memory_format=layout)
    chk = rotor.Checkpointable(copy.deepcopy(plain), engine="graph", effort="fast", mem_limit="1GB")
    x = torch.randn(4, 3, 16, 16, dtype=dtype).to(memory_format=layout)
    chk.measure(x)
    least = chk.curve(3).minimum_bytes
    chk.compute_sequence(mem_limit=least + chk.cost_model().storages[0].bytes)
    for _ in range(2):
        plain.zero_grad()
        chk.module.zero_grad()
        chk(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert same(gradients_of(chk.module), gradients_of(plain))
    assert chk.plan.recomputed
    assert edges_of(chk) >= 4


def test_shapes_that_share_a_graph_keep_no_false_edge():
    torch.manual_seed(0)
    plain = Net()
    chk = rotor.Checkpointable(copy.deepcopy(plain), engine="graph", effort="fast", mem_limit="1GB")
    found = []
    for batch, size in ((4, 16), (2, 24), (3, 32), (5, 20)):
        x = torch.randn(batch, 3, size, size)
        for model in (plain, chk):
            model.zero_grad()
            model(x).square().mean().backward()
        assert same(gradients_of(chk.module), gradients_of(plain))
        found.append((edges_of(chk), lower_bound(chk.graph), chk.plan.step.captured))
    assert found[1][2] is found[2][2] is found[3][2]
    edges, bound, _ = found[3]
    assert edges == found[0][0] >= 4
    alone = rotor.Checkpointable(copy.deepcopy(plain), engine="graph", mem_limit="1GB")
    alone(x).square().mean().backward()
    # Workspaces come from fits.
    assert bound < 1.03 * lower_bound(alone.graph)


OTHER_ARGUMENTS = {
    aten.fill.Scalar: lambda x: [1],
    aten.fill.Tensor: lambda x: [torch.tensor(1)],
    aten.full_like.default: lambda x: [7],
    aten.new_empty.default: lambda x: [[2, 3]],
    aten.new_empty_strided.default: lambda x: [[2, 3], [1, 2]],
    aten.new_full.default: lambda x: [[2, 3], 1],
    aten.new_ones.default: lambda x: [[2, 3]],
    aten.new_zeros.default: lambda x: [[2, 3]],
}


@pytest.mark.parametrize("operator", false_edges.OF_FIRST, ids=lambda o: o.name())
def test_makers_read_sizes_only(operator):
    for x in (
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(torch.bfloat16).to(memory_format=torch.channels_last),
        torch.ones(3, 4, dtype=torch.int64).t(),
        torch.ones(2) > 0,
    ):
        if "rand" in operator.name() and not x.is_floating_point():
            continue
        given = OTHER_ARGUMENTS.get(operator, lambda x: [])(x)
        torch.manual_seed(1)
        ours = operator(false_edges.without_memory(x.shape, x.stride(), x.dtype), *given)
        torch.manual_seed(1)
        theirs = operator(x, *given)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert "empty" in operator.name() or torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64], ids=str)
def test_stand_ins_have_a_layout_and_no_memory(dtype):
    with rotor.memory.meter("cpu") as meter:
        made = false_edges.without_memory(torch.Size([4, 8, 1024, 1024]), (8, 1, 8192, 8), dtype)
    assert meter.peak_bytes == 0
    assert made.dtype == dtype
    assert made.shape == (4, 8, 1024, 1024)
    assert made.stride() == (8, 1, 8192, 8)
    assert not made[3, 7, 1023, 1023]
    empty = false_edges.without_memory(torch.Size([0, 3]), (3, 1), dtype)
    assert empty.shape == (0, 3)


def test_other_devices_keep_their_edges(monkeypatch):
    monkeypatch.setattr(false_edges, "DEVICES", ("another",))
    chk = rotor.Checkpointable(Net(), engine="graph", effort="fast", mem_limit="1GB")
    chk.measure(torch.randn(2, 3, 16, 16))
    chk.compute_sequence()
    assert edges_of(chk) == 0


def test_frozen_convolutions_keep_no_input():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Softplus()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers)
    for parameter in model[1:].parameters():
        parameter.requires_grad_(False)
    chk = rotor.Checkpointable(model, engine="graph", effort="fast", mem_limit="1GB")
    chk(torch.randn(2, 3, 16, 16)).sum().backward()
    graph = chk.graph
    made = {s: k for k, op in enumerate(graph.operations) for s in op.outputs}
    for op in graph.operations:
        if op.phase == "backward":
            assert not any("softplus_default" in graph.operations[made[s]].name for s in op.inputs)
    assert edges_of(chk) == 4


@pytest.mark.slow
def test_bound_of_a_unet_falls(monkeypatch):
    def bound():
        torch.manual_seed(0)
        chk = rotor.Checkpointable(
            UNet(3, 2, width=16, batch_norm=False), engine="graph", effort="fast", mem_limit="4GB"
        )
        chk.measure(torch.randn(4, 3, 96, 96))
        return lower_bound(chk.cost_model())

    ours = bound()
    monkeypatch.setattr(false_edges, "DEVICES", ())
    assert ours < 0.88 * bound()


def test_a_loss_of_classes_keeps_no_logits_for_their_sizes(monkeypatch):
    class Padded(nn.Module):
        """Logits of classes, shifted by values that are drawn for their layout."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 500)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            shifted = self.last(x + x.new_ones(x.shape) * torch.rand_like(x))
            return F.log_softmax(shifted, 1) * shifted.clone().fill_(2.0)

    def step(model, x, target):
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x, targets=(target,)) if isinstance(model, rotor.Checkpointable) else None
        loss = F.nll_loss(model(x), target) if loss is None else loss
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    plain = Padded()
    x, target = torch.randn(64, 4), torch.arange(64)
    found = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(false_edges, "DEVICES", devices)
        chk = rotor.Checkpointable(
            copy.deepcopy(plain), loss_fn=F.nll_loss, engine="graph", mem_limit="1GB"
        )
        for _ in range(2):
            assert torch.equal(step(chk, x, target), step(plain, x, target))
            assert same(gradients_of(chk.module), gradients_of(plain))
        read = [len(op.inputs) for op in chk.graph.operations if "nll_loss_backward" in op.name]
        found.append((edges_of(chk), read))
    assert found[0][0] >= 4
    assert found[1][0] == 0
    assert found[0][1][0] == found[1][1][0] - 1


def test_without_workspaces_the_bound_of_a_unet_falls_by_a_fifth(monkeypatch):
    def bound():
        torch.manual_seed(0)
        model = UNet(3, 2, width=8, batch_norm=False)
        chk = rotor.Checkpointable(model, engine="graph", effort="fast", mem_limit="4GB")
        chk.measure(torch.randn(4, 3, 96, 96))
        graph = chk.cost_model()
        bare = [dataclasses.replace(op, workspace_bytes=0) for op in graph.operations]
        return lower_bound(rotor.graph.Graph(graph.storages, None, bare))

    ours = bound()
    monkeypatch.setattr(false_edges, "DEVICES", ())
    assert ours < (0.82 if HANDS_OVER else 0.83) * bound()
