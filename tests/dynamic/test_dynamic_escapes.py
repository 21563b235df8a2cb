"""Tensors that Python still reads when a forward ends, or below operators (dynamic engine)."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, unpack_sequence
from training import check_equal, trained

import rotor
from rotor import dtr
from rotor.engines.dynamic import step

CAUGHT: list[torch.Tensor] = []


@dataclass
class Record:
    features: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = None


class Net(nn.Module):
    shared: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, keep: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            keep(k, x)
        return x


def _list() -> tuple[Any, Any]:
    found: list[torch.Tensor] = []
    return lambda _, t: found.append(t), lambda: found


def _global() -> tuple[Any, Any]:
    CAUGHT.clear()
    return lambda _, t: CAUGHT.append(t), lambda: CAUGHT


def _class() -> tuple[Any, Any]:
    def keep(k: int, tensor: torch.Tensor) -> None:
        if k == 2:
            Net.shared = tensor

    return keep, lambda: [Net.shared]


def _object() -> tuple[Any, Any]:
    record = Record()

    def keep(k: int, tensor: torch.Tensor) -> None:
        record.features.append(tensor[:, ::2])
        record.last = tensor

    return keep, lambda: [*record.features, record.last]


def _slots() -> tuple[Any, Any]:
    slots = Slots()

    def keep(k: int, tensor: torch.Tensor) -> None:
        slots.kept = (slots.kept, {k: (k, tensor)}) if k % 2 else slots.kept

    def read() -> Iterator[torch.Tensor]:
        at = slots.kept
        while at is not None:
            yield next(iter(at[1].values()))[1]
            at = at[0]

    return keep, read


def _queue() -> tuple[Any, Any]:
    queue: deque[Any] = deque(maxlen=3)
    return lambda k, t: queue.append((k, t.chunk(2)[1])), lambda: [t for _, t in queue]


def _variable() -> tuple[Any, Any]:
    total: torch.Tensor | None = None

    def keep(k: int, tensor: torch.Tensor) -> None:
        nonlocal total
        loss = tensor.square().mean()
        total = loss if total is None else total + loss

    return keep, lambda: [total]


KEEPERS = {
    "list": _list,
    "global": _global,
    "class": _class,
    "object": _object,
    "slots": _slots,
    "queue": _queue,
    "variable": _variable,
}


def _loss_of(keeper: Callable[[], tuple[Any, Any]]) -> Callable[..., torch.Tensor]:
    def loss_of(model: Any, _: int) -> torch.Tensor:
        keep, read = keeper()
        y = model(torch.randn(256, 64), keep)
        return y.square().mean() + sum(t.abs().mean() for t in read())

    return loss_of


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS)
def test_what_a_forward_puts_elsewhere_is_there_and_has_gradients(keeper: Any) -> None:
    check_equal(Net, _loss_of(keeper), 2, mem_limit="1.6 MB", engine="dynamic")


@pytest.mark.parametrize("keeper", [lambda: (lambda *_: None, list), _list])
def test_all_of_python_is_searched_only_for_what_a_forward_keeps(
    keeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    replace = step.replace_references

    def noted(found: Any, *others: Any) -> None:
        searched.append(len(found))
        replace(found, *others)

    monkeypatch.setattr(step, "replace_references", noted)
    trained(Net, _loss_of(keeper), 2, mem_limit="1.6 MB", engine="dynamic")
    # The last one is the output, which the list holds too.
    assert searched == ([6, 6] if keeper is _list else [])


def test_an_input_that_a_forward_keeps_stays_in_the_graph() -> None:
    def gradients(**limits: Any) -> list[Any]:
        torch.manual_seed(0)
        first, net, kept = nn.Linear(64, 64), Net(), []
        model: Any = rotor.Checkpointable(net, verbosity=0, **limits) if limits else net
        x = first(torch.randn(256, 64))
        hook = net.register_forward_pre_hook(lambda _, args: kept.append((args[0],)))
        y = model(x, lambda k, t: None)
        hook.remove()
        (y.square().mean() + kept[0][0].square().sum()).backward()
        return [p.grad for p in (*first.parameters(), *net.parameters())]

    limited = gradients(mem_limit="1.2 MB", engine="dynamic")
    assert all(map(torch.equal, gradients(), limited))


def test_a_leaf_that_a_model_takes_is_a_leaf_inside() -> None:
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            seen.append((x.is_leaf, bias.is_leaf))
            return torch.tanh(x + bias)

    model = rotor.Checkpointable(Looking(), mem_limit="1 MB", engine="dynamic", verbosity=0)
    x = torch.randn(8, requires_grad=True)
    model(x, torch.zeros(8)).sum().backward()
    assert seen == [(True, True)]
    assert x.grad is not None


def test_nothing_stays_of_a_step_without_a_backward() -> None:
    net = Net()
    model = rotor.Checkpointable(net, mem_limit="1.6 MB", engine="dynamic", verbosity=0)
    kept: list[torch.Tensor] = []
    y = model(torch.randn(256, 64), lambda _, t: kept.append(t))
    watched = [weakref.ref(t.untyped_storage()) for t in (*kept, y)]
    del y
    kept.clear()
    gc.collect()
    assert not any(ref() is not None for ref in watched)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.kept * gradient


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(Doubling.apply(layer(x)))
        return x


def test_what_only_functions_of_the_graph_hold_is_evicted() -> None:
    def loss_of(model: Any, _: int) -> torch.Tensor:
        return model(torch.randn(256, 64)).square().mean()

    model = check_equal(Squares, loss_of, 2, mem_limit="1 MB", engine="dynamic")
    assert model.plan.last.stats.evictions > 0


def test_what_functions_of_the_graph_share_with_python_is_there() -> None:
    kept: list[torch.Tensor] = []

    class Sharing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            ctx.kept, ctx.number = kept, len(kept) - 1
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.kept[ctx.number] * gradient

    class Shared(Squares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.sigmoid(Sharing.apply(layer(x)))
            return x

    def loss_of(model: Any, _: int) -> Any:
        kept.clear()
        y = model(torch.randn(256, 64))
        return y.square().mean(), *(torch.from_numpy(t.detach().numpy()) for t in kept)

    check_equal(Shared, loss_of, 2, mem_limit="1.4 MB", engine="dynamic")


# -- readers below the operators


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.net = kind(32, 32, 2, batch_first=True, **settings)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths + 0, batch_first=True, enforce_sorted=False)
        out = self.net(packed)[0]
        parts = unpack_sequence(out)
        return pad_packed_sequence(out, batch_first=True)[0].sum((1, 2)) + torch.stack(
            [part.mean() for part in parts]
        )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {}), (nn.RNN, {"nonlinearity": "relu"})],
)
@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("share", [0.2, 0.35, 0.6])
def test_packed_sequences_are_exact_at_every_limit(kind: Any, settings: Any, share: float) -> None:
    def make() -> nn.Module:
        return Recurrent(kind, **settings)

    def loss_of(model: Any, _: int) -> torch.Tensor:
        lengths = torch.tensor([32, 30, 25, 20, 14, 9, 5, 2])
        return model(torch.randn(8, 32, 32), lengths).square().mean()

    free = check_equal(make, loss_of, 2, mem_limit="1 GB", engine="dynamic")
    limit = int(share * free.plan.last.stats.peak_bytes) + 200_000
    with contextlib.suppress(rotor.InfeasibleError):
        check_equal(make, loss_of, 2, mem_limit=limit, engine="dynamic")


class Evictions:
    """Observer of what is evicted, by number."""

    def __init__(self) -> None:
        self.evicted_nodes: set[int] = set()

    def evicted(self, node: int) -> None:
        self.evicted_nodes.add(node)

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_small_integers_are_never_evicted() -> None:
    events = Evictions()
    with dtr.budget("2 MB", strict=False, heuristic="LRU", record_log=events) as session:
        x = torch.zeros(1000, dtype=torch.int64)
        lengths, large = x + 3, torch.zeros(20_000, dtype=torch.int64) + 3
        small, big = session.reference(lengths), session.reference(large)
        pressure = [torch.ones(100_000) + 1 for _ in range(8)]
        assert small is not None
        assert big is not None
        assert big.node in events.evicted_nodes
        assert small.node not in events.evicted_nodes
        assert len(pressure) == 8


def test_large_indices_are_there_for_readers_by_pointer() -> None:
    with dtr.budget("2.6 MB"):
        x = torch.arange(30_000.0)
        where = torch.arange(1, 20_001, dtype=torch.int64) + 0
        for _ in range(8):
            _ = torch.ones(100_000) + 1
            held = torch.ones(100_000) * 2
        parts = torch.tensor_split(x, where)
        assert held.sum() == 200_000
    assert [len(part) for part in parts] == [1] * 20_000 + [10_000]


READ_BY_POINTER = {
    *("_pad_packed_sequence", "lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"),
    *("tensor_split.tensor_indices_or_sections", "ctc_loss.Tensor"),
}
BY_OPERATORS = {
    # Their gradients, sums and sparse tensors are made of operators on indices.
    *("embedding_bag", "embedding_bag.padding_idx", "embedding_backward"),
    *("embedding_sparse_backward", "cummaxmin_backward", "gather_backward"),
    *("index_select_backward", "_embedding_bag_sparse_backward", "repeat_interleave.self_Tensor"),
    *("_gather_sparse_backward", "take_along_dim", "take_along_dim.out"),
    *("value_selecting_reduction_backward", "index_select.dimname", "index_select.dimname_out"),
    *("index_add.dimname", "index_fill.Dimname_Scalar", "gather.dimname", "scatter_add.dimname"),
    # A reader by pointer that only autograd calls, with what packing made: small, or refused.
    "_pack_padded_sequence_backward",
}


def test_all_readers_of_indices_and_lengths_are_known() -> None:
    names = {"batch_sizes", "lengths", "indices", "index", "offsets", "repeats"}
    names |= {"input_lengths", "target_lengths", "tensor_indices_or_sections"}
    unknown = []
    registered = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if not name.startswith("aten::") or "sparse_" in name.replace("_sparse_backward", ""):
            continue
        if "dimname" in name.lower() or "names_dim" in name:
            continue  # Names of dimensions, up to PyTorch 2.12: they call the operators without.
        takes = {a.name for a in schema.arguments if "Tensor" in str(a.type)} & names
        key = "CompositeImplicitAutograd"
        if (
            takes
            and name in registered
            and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        ):
            unknown.append(name.removeprefix("aten::"))
    assert set(unknown) >= READ_BY_POINTER
    assert set(unknown) <= READ_BY_POINTER | BY_OPERATORS, sorted(unknown)


class Activations(nn.Module):
    """Model that keeps activations, which retain gradients from the forward on if `is_inside`."""

    def __init__(self, watch: Callable[[torch.Tensor], Any], *, is_inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.watch, self.is_inside = watch, is_inside
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.kept = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.kept.append(x)
            if self.is_inside:
                self.watch(x)
        return x, self.kept[1]


def _retain_and_scale(activation: torch.Tensor) -> None:
    activation.retain_grad()
    activation.register_hook(lambda gradient: gradient * 3)


def _gradients_of_activations(model: Any, net: Activations) -> list[Any]:
    torch.manual_seed(1)
    found: list[Any] = []
    for k in range(3):
        y, second = model(torch.randn(48, 64))
        if not net.is_inside:
            for activation in net.kept:
                activation.retain_grad()
        (second.square().mean() + net.kept[3].sum()).backward(retain_graph=True)
        if k == 1:
            second.grad = None
        net.zero_grad()
        (y.square().mean() + second.mean()).backward()
        assert second is net.kept[1]
        found += [activation.grad for activation in net.kept]
        found += [p.grad.clone() for p in net.parameters()]
    return found


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("limit", ["1MB", "280KiB"])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("watch", [torch.Tensor.retain_grad, _retain_and_scale])
def test_activations_retain_their_whole_gradients(watch, is_inside, limit):
    torch.manual_seed(0)
    plain = Activations(watch, is_inside=is_inside)
    net = Activations(watch, is_inside=is_inside)
    net.load_state_dict(plain.state_dict())
    model = rotor.Checkpointable(net, mem_limit=limit, engine="dynamic")
    found = _gradients_of_activations(model, net)
    expected = _gradients_of_activations(plain, plain)
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_a_second_order_gradient_of_a_model_that_retains_some_is_refused_in_words():
    net = Activations(torch.Tensor.retain_grad, is_inside=True)
    model = rotor.Checkpointable(net, mem_limit="1MB", engine="dynamic")
    x = torch.randn(48, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="one that retains its gradient: use the plain model"):
        torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    # Any later backward ends the meter of the step that was refused.
    torch.ones((), requires_grad=True).backward()
    with rotor.memory.meter("cpu"):
        pass
