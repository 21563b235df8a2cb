"""Captures in which one of alike modules is traced: the graph of a plain capture, node by node."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from versions import needs_alike

import rotor
from rotor.engines.graph import capture as captures

LAYERS = 4


class Block(nn.Module):
    """A layer of a transformer that takes a mask and a keyword."""

    def __init__(self, width: int = 16, drop: float = 0.1) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.drop = nn.Dropout(drop)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False):
        """Return the result."""
        split = (*x.shape[:2], 2, x.shape[2] // 2)
        q, k, v = (p.view(split).transpose(1, 2) for p in self.mixed(self.before(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape))) * self.scale
        return x + self.dense(x)


class Small(nn.Module):
    """A layer without attention."""

    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.out, self.drop, self.scale = nn.Linear(16, 16), nn.Dropout(drop), 1.0
        self.dense = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False):
        """Return the result."""
        return x + self.dense(self.drop(self.out(x))) * self.scale


class Pair(Block):
    """A layer that returns two tensors, of which the model uses one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False):
        """Return the result, and its mean."""
        x = super().forward(x, mask, causal=causal)
        return x, x.mean(2)


class Model(nn.Module):
    """Alike layers between an embedding and a head."""

    def __init__(
        self, drop: float = 0.1, tied: bool = False, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(block(drop=drop) for _ in range(LAYERS))
        self.head = nn.Linear(16, 20, bias=False)
        self.checkpointed = self.hidden = False
        self.masked = True
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        """Return the logits, with all hidden states if wanted."""
        x, hidden = self.embed(ids), []
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x, mask) if self.masked else layer(x, causal=True)
            x = x[0] if isinstance(x, tuple) else x
            hidden.append(x)
        return (self.head(x), hidden) if self.hidden else self.head(x)


class Vision(nn.Module):
    """Patches whose layout is not contiguous, and alike layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layers = nn.Sequential(*[Block(drop=0.0) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return self.norm(self.layers(self.patches(x).flatten(2).transpose(1, 2))).mean(1)


def _ids() -> torch.Tensor:
    return torch.arange(24).view(2, 12) % 20


def _with(tied: bool = False, **attributes: bool) -> Model:
    model = Model(tied=tied)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def _frozen() -> Model:
    model = Model()
    model.layers[1].requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


def _shared() -> Model:
    model = Model()
    model.layers[2].mixed.weight = model.layers[1].mixed.weight
    return model


def _uneven() -> Model:
    model = Model()
    model.layers[1].scale = 0.5
    return model


def _hooked() -> Model:
    model = Model()
    model.layers[2].register_forward_hook(lambda module, args, output: output * 2)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int, str]] = {
    "dropout": (Model, _ids, 4, ""),
    "tied, keyword": (lambda: _with(tied=True, masked=False), _ids, 4, ""),
    "two results": (lambda: Model(block=Pair), _ids, 4, ""),
    "hidden states": (
        lambda: _with(hidden=True),
        _ids,
        0,
        "a tensor with a gradient is used by several modules",
    ),
    "checkpointed": (lambda: _with(checkpointed=True), _ids, 0, "within torch.utils.checkpoint"),
    "frozen layer": (_frozen, _ids, 2, "arguments that are not alike"),
    "shared weight": (_shared, _ids, 2, "weight is shared with another module"),
    "uneven": (_uneven, _ids, 3, "they differ in scale"),
    "hooked": (_hooked, _ids, 3, "one has a hook"),
    "gpt": (lambda: rotor.gpt.gpt("tiny", dropout=0.1), lambda: torch.arange(16).view(2, 8), 4, ""),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4, enable_nested_tensor=False
        ),
        lambda: torch.ones(2, 6, 16),
        3,
        "arguments that are not alike",
    ),
    "vision": (Vision, lambda: torch.ones(1, 3, 16, 16), 4, ""),
    "normed": (
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4)) for _ in range(LAYERS)]
        ),
        lambda: torch.ones(2, 4, 8, 8),
        0,
        "BatchNorm2d updates its statistics",
    ),
}
"""Models, their inputs, how many of their modules' calls are copies, and why others are none."""


def _call(module: nn.Module, ids: torch.Tensor) -> Any:
    return module(ids)


def captured(model: nn.Module, batch: torch.Tensor, *, folds: bool) -> Any:
    """A capture of a call, and what it reached."""
    capture = captures.Capture(captures.fresh(_call))
    if not folds:
        capture.unfold()
    return capture, capture.reach(model, batch)


def described(reached: Any, model: nn.Module) -> list[Any]:
    """Everything that a plan reads of a graph, without the names of its nodes."""
    lowered = reached.captured.lowered
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    numbers: dict[fx.Node, Any] = {
        node: ("primal", k, names.get(id(tensor)))
        for k, (node, tensor) in enumerate(zip(lowered.primals, reached.primals, strict=True))
    }
    numbers.update({node: ("tangent", k) for k, node in enumerate(lowered.tangents)})
    inner = [node for node in lowered.values if node not in numbers]
    numbers.update({node: ("node", k) for k, node in enumerate(inner)})

    def text(arguments: Any) -> str:
        return str(fx.node.map_arg(arguments, lambda node: numbers[node]))

    def layout(node: fx.Node) -> list[Any]:
        value = node.meta["val"]
        return [
            (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)
            for t in (value if isinstance(value, list | tuple) else [value])
            if isinstance(t, torch.Tensor)
        ]

    return [
        [numbers[node] for node in lowered.primals],
        [
            (str(node.target), text(node.args), text(node.kwargs), layout(node), value.storages)
            for node in inner
            for value in [lowered.values[node]]
        ],
        [
            (t.phase, t.inputs, t.made, t.random, t.once, t.module, t.source, t.gradients)
            for t in lowered.tasks
        ],
        [lowered.storages, lowered.loss, lowered.output_of_tangent, len(lowered.mutated)],
        [text(lowered.outputs), text(lowered.gradients)],
    ]


@needs_alike
@pytest.mark.parametrize("name", CASES)
def test_the_graph_of_a_capture_that_traces_one_of_alike_modules_is_the_plain_one(name):
    make, batch, copies, reason = CASES[name]
    torch.manual_seed(0)
    model = make()
    folded, found = captured(model, batch(), folds=True)
    _, expected = captured(model, batch(), folds=False)
    for ours, plain in zip(described(found, model), described(expected, model), strict=True):
        assert ours == plain
    assert (0 if folded.folding is None else folded.folding.copied) == copies
    told = f"{copies} copied from one that was traced" if copies else "traced one by one: "
    assert folded.alike.startswith(told)
    assert reason in folded.alike
    assert ("traced:" in folded.alike or not copies) == bool(reason)


class Chosen(nn.Module):
    """A part of a layer that does as its attributes say."""

    def __init__(self, function: Any = torch.tanh, axes: tuple[int, ...] = (2, 3)) -> None:
        super().__init__()
        self.function, self.axes, self.options = function, axes, {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return self.function(x.sum(self.axes, keepdim=True)) * self.options["scale"]


class Listed(Chosen):
    """A part with a module in a tuple."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return self.function[0](x)


class Doubled(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient * 2


class Tripled(Doubled):
    """Three times its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return x * 3


def _scaled(scale: float) -> Chosen:
    part = Chosen()
    part.options["scale"] = scale
    return part


PAIRS: list[tuple[nn.Module, nn.Module]] = [
    (nn.Tanh(), nn.ReLU()),
    (nn.Identity(), nn.Sigmoid()),
    (nn.GELU(), nn.GELU("tanh")),
    (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    (nn.Dropout(0.1), nn.Dropout(0.2)),
    (nn.LayerNorm(6), nn.LayerNorm(6, eps=0.1)),
    (nn.Linear(6, 6, bias=False), nn.Linear(6, 6)),
    (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)),
    (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    (nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
    (Chosen(), Chosen(torch.relu)),
    (Chosen(), Chosen(axes=(1, 2))),
    (Chosen(), _scaled(2.0)),
    (Chosen(torch.Tensor.tanh), Chosen(torch.Tensor.relu)),
    (Listed((nn.Tanh(),)), Listed((nn.ReLU(),))),
]
"""Modules that give other results; all that else tells layers apart which have one of them."""


def _layers(parts: list[nn.Module]) -> nn.Sequential:
    """Layers of a class of their own, each with a part."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x * self.weight)

    kind = type("Layer", (nn.Module,), {"forward": captures.fresh(forward)})
    layers = [kind() for _ in parts]
    for layer, part in zip(layers, parts, strict=True):
        layer.weight, layer.part = nn.Parameter(torch.ones(6)), part
    return nn.Sequential(*layers)


@needs_alike
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_layers_that_differ_in_one_setting_are_not_copies_of_each_other(pair):
    one, other = pair
    parts = [copy.deepcopy(one), copy.deepcopy(other), *map(copy.deepcopy, (one, one))]
    model = nn.Sequential(nn.Linear(6, 6), _layers(parts))
    folded, found = captured(model, torch.ones(2, 4, 6, 6), folds=True)
    _, expected = captured(model, torch.ones(2, 4, 6, 6), folds=False)
    for ours, plain in zip(described(found, model), described(expected, model), strict=True):
        assert ours == plain
    assert folded.folding.copied == 3


@needs_alike
def test_layers_that_apply_different_functions_are_not_copies_of_each_other():
    functions = [Doubled.apply, Tripled.apply, Doubled.apply, Tripled.apply]
    model = nn.Sequential(nn.Linear(6, 6), _layers(list(map(Chosen, functions))))
    x = torch.ones(2, 4, 6, 6)
    assert torch.equal(_checkpointable(model)(x), model(x))


def _checkpointable(model: nn.Module) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model, mem_limit="1 GiB", engine="graph", planning="before", effort="fast"
    )


def _row(chk: rotor.Checkpointable) -> str:
    found = [line for line in chk.report().splitlines() if line.startswith("alike layers")]
    return found[0] if found else ""


def _step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(ids).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _dropout(model: Model) -> None:
    model.layers[3].drop.p = 0.5


def _scale(model: Model) -> None:
    model.layers[2].scale = 3.0


def _weight(model: Model) -> None:
    model.layers[2].out.weight = nn.Parameter(torch.full((16, 16), 0.25))


def _shares(model: Model) -> None:
    model.layers[2].out.weight = model.layers[1].out.weight


def _layer(model: Model) -> None:
    model.layers[3] = Small()


def _hook(model: Model) -> None:
    model.layers[1].out.register_forward_hook(lambda module, args, output: output * 2)


def _child(model: Model) -> None:
    model.layers[1].dense[1] = nn.ReLU()


@needs_alike
@pytest.mark.parametrize("change", [_dropout, _scale, _weight, _shares, _layer, _hook, _child])
def test_a_change_of_a_module_that_was_not_traced_is_noticed(change):
    torch.manual_seed(0)
    model = Model(block=Small)
    chk = _checkpointable(model)
    before = [_step(chk, _ids()) for _ in range(2)]
    assert _row(chk).endswith("4 copied from one that was traced")
    change(model)
    loss, gradients = _step(chk, _ids())
    expected, plain = _step(model, _ids())
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, gradients, plain))
    assert torch.equal(before[0][0], before[1][0])
    assert not torch.equal(loss, before[0][0])


@needs_alike
def test_the_report_says_why_layers_were_traced_one_by_one():
    stages = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(LAYERS)]
    chk = _checkpointable(nn.Sequential(*stages))
    _step(chk, torch.ones(3, 4))
    assert _row(chk).endswith("traced one by one: BatchNorm1d updates its statistics")


def test_layers_without_a_twin_are_not_reported():
    chk = _checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    _step(chk, torch.ones(3, 4))
    assert not _row(chk)


class Looped(nn.Module):
    """Alike layers, called by a function."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Small(0.0) for _ in range(LAYERS))
        self.call = call

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of all layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        return self.call(self, x)


def _penalty(model: Looped, x: torch.Tensor) -> torch.Tensor:
    return model.stack(x) + sum(p.square().sum() for p in model.layers[2].parameters())


def _derivative(model: Looped, x: torch.Tensor) -> torch.Tensor:
    return sum(torch.func.jvp(model.stack, (x,), (torch.ones_like(x),)))


def _gradients(model: Looped, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: model.stack(row).square().sum()))(x)


def _half_in_low_precision(model: Looped, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.layers[1](model.layers[0](x))
    return model.layers[3](model.layers[2](x.float()))


def _teacher(model: Looped, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = model.stack(x * 0.5)
    return model.stack(x) - wanted


def _doubled(model: Looped, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        doubled = {name: 2 * value for name, value in layer.named_parameters()}
        x = torch.func.functional_call(layer, doubled, (x,))
    return x


USES = {
    "twice": lambda model, x: model.stack(model.stack(x)),
    "one of them twice": lambda model, x: model.layers[2](model.stack(x)),
    "two views": lambda model, x: model.stack(x) - model.stack(x[:1]),
    "a penalty": _penalty,
    "a weight read": lambda model, x: model.stack(x) + model.layers[3].out.weight.norm(),
    "jvp": _derivative,
    "grad": _gradients,
    "autocast": _half_in_low_precision,
    "no_grad": _teacher,
    "functional_call": _doubled,
}


@pytest.mark.parametrize("use", USES)
@needs_alike
def test_alike_layers_are_used_in_any_way(use):
    model = Looped(USES[use])
    x = torch.randn(64, next(model.parameters()).shape[-1])
    chk = _checkpointable(model)
    for _ in range(2):
        found, wanted = _step(chk, x), _step(model, x)
        assert torch.equal(found[0], wanted[0])
        assert all(map(torch.equal, found[1], wanted[1]))
