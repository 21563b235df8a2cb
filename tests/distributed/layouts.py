"""Models spread over processes by PyTorch's own means, each with what makes its layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torchvision_standins import import_torchvision

WIDTH = 64
BLOCKS = 6
BATCH = (8, 32, WIDTH)
WORDS = 128


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(torch.tanh(y) * y))


class Net(nn.Module):
    """Blocks, called one after another."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Aside(Net):
    """Its second output has no gradient."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, torch.tanh(y)


class OwnRows(Net):
    """Its rows are compared with those of all processes, its own ones with gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        rows = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        with torch.no_grad():
            dist.all_gather(rows, y)
        rows[dist.get_rank()] = y
        return torch.tanh(y) * torch.cat(rows).mean(0)


class Gathering(nn.Module):
    """A block whose rows are those of all processes."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = collectives.all_gather_tensor_autograd(self.block.norm(x), 0, self.group)
        return x + self.block(x) * torch.sigmoid(every).mean(0)


class Experts(nn.Module):
    """A block whose rows are computed by another process."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = collectives.all_to_all_single_autograd(x, None, None, self.group)
        done = self.block(sent)
        return x + collectives.all_to_all_single_autograd(done, None, None, self.group)


class Routing(nn.Module):
    """A block of which each row is computed by the process that its values choose."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = dist.get_world_size(self.group)
        rows = x.flatten(0, 1)
        place = (rows.detach().sum(1) * 64).long() % count
        order = torch.argsort(place, stable=True)
        sent = torch.bincount(place, minlength=count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        given, taken = sent.tolist(), received.tolist()
        moved = collectives.all_to_all_single_autograd(rows[order], taken, given, self.group)
        done = self.block(moved)
        back = collectives.all_to_all_single_autograd(done, given, taken, self.group)
        return x + torch.empty_like(rows).index_copy(0, order, back).view_as(x)


class _Copied(torch.autograd.Function):
    """The tensor itself; gradients are summed over processes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _Summed(torch.autograd.Function):
    """The sum over processes; gradients are passed on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Summing(nn.Module):
    """A block whose products are split by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(_Copied.apply(self.norm(x))))
        return x + _Summed.apply(self.down(torch.tanh(y) * y))


class _SummedAmong(torch.autograd.Function):
    """The sum over the processes of a group; gradients are passed on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SummingAmong(nn.Module):
    """A block whose results, or only their gradients, are summed over a group."""

    def __init__(self, group: Any, *, gradients: bool) -> None:
        super().__init__()
        self.group = group
        self.gradients = gradients
        self.block = Block()

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        if not self.gradients:
            return _SummedAmong.apply(y, self.group)
        if y.requires_grad:
            y.register_hook(self.summed)
        return y


class Broken(nn.Module):
    """A block around code that breaks a captured graph."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.block(x)


class BrokenByOne(Net):
    """Its code breaks a captured graph on one of the processes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            torch._dynamo.graph_break()
        return super().forward(x)


def whole_mesh(name: str = "tp") -> DeviceMesh:
    """All processes in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def data_and_tensors() -> DeviceMesh:
    """Two processes for each part of the batch."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def blocks(dropout: float = 0.0) -> list[Block]:
    return [Block(dropout) for _ in range(BLOCKS)]


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every block's products are split by columns, then by rows."""
    for block in model.modules():
        if isinstance(block, Block):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    return model


def split_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Rows between the products are split along the sequence."""
    given = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=False
    )
    of_block = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "drop": SequenceParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)
        parallelize_module(block, mesh, given)
    last = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(model.blocks[BLOCKS - 1], mesh, last)
    return model


def sequence_net() -> nn.Module:
    return split_sequence(Net(blocks(0.1)), whole_mesh())


def split_and_summed() -> nn.Module:
    """Products are split over one dimension of a mesh, and results are summed over the other."""
    mesh = data_and_tensors()
    model = split(Net(blocks()), mesh["tp"])
    model.head = SummingAmong(mesh["dp"].get_group(), gradients=False)
    return model


def split_net(mesh: DeviceMesh) -> nn.Module:
    return split(Net(blocks()), mesh["tp"])


def split_rows(mesh: DeviceMesh) -> nn.Module:
    return split_sequence(Net(blocks()), mesh["tp"])


def parallel_loss(y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits whose classes are split."""
    labels = torch.arange(y.shape[0] * y.shape[1]) % y.shape[-1]
    return functional.cross_entropy(y.flatten(0, 1), labels)


def split_classes() -> nn.Module:
    model = Net(blocks(), nn.Linear(WIDTH, 32))
    mesh = whole_mesh()
    split(model, mesh)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, {"head": head})


def sharded(
    model: nn.Module, units: Iterable[Any], *, root: bool = True, **options: Any
) -> nn.Module:
    """Each of the units by itself, and the rest with the root."""
    for unit in units:
        fully_shard(unit, **options)
    if root:
        fully_shard(model, **options)
    return model


def both(model: nn.Module, *, units: Callable[[nn.Module], Iterable[nn.Module]]) -> nn.Module:
    mesh = data_and_tensors()
    split(model, mesh["tp"])
    return sharded(model, units(model), mesh=mesh["dp"])


def squares(y: Any) -> torch.Tensor:
    return y.square().mean()


@dataclass(frozen=True)
class Layout:
    """A model that is made alike on every process, and how it is trained."""

    make: Callable[[], nn.Module]
    engine: str = "auto"
    loss: Callable[[Any], torch.Tensor] = squares
    processes: int = 2
    backend: str = "fx"
    same_batch: bool = True
    """Whether processes work on one batch: those of tensor parallelism do."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the loss and the backward."""
    members: int = 0
    """Number of processes that train, the first ones; 0: all."""
    words: int = 0
    """Number of different tokens in a batch; 0: a batch of numbers."""


def shared_pairs() -> nn.Module:
    model = Net(blocks())
    pairs = [[model.blocks[k], model.blocks[k + 1]] for k in range(0, BLOCKS, 2)]
    return sharded(model, pairs)


def pairs_of_stages() -> nn.Module:
    model = nn.Sequential(*blocks())
    return sharded(model, [[model[k], model[k + 1]] for k in range(0, BLOCKS, 2)])


def shared_weights() -> nn.Module:
    model = Net(blocks())
    for k in range(0, BLOCKS, 2):
        model.blocks[k + 1].up.weight = model.blocks[k].up.weight
    pairs = [[model.blocks[k], model.blocks[k + 1]] for k in range(0, BLOCKS, 2)]
    return sharded(model, pairs)


def plain_sharded() -> nn.Module:
    model = Net(blocks())
    return sharded(model, model.blocks)


def replicated() -> nn.Module:
    model = Net(blocks())
    return sharded(model, model.blocks, mesh=data_and_tensors())


def sharded_rows() -> nn.Module:
    mesh = data_and_tensors()
    model = split_sequence(Net(blocks(0.1)), mesh["tp"])
    return sharded(model, model.blocks, mesh=mesh["dp"])


def rootless() -> nn.Module:
    model = Net(blocks())
    return sharded(model, model.blocks, root=False)


def broken(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return [Broken(block) for block in blocks]


def summing() -> list[nn.Module]:
    return [Summing() for _ in range(BLOCKS)]


def summing_among(*, gradients: bool) -> nn.Sequential:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    return nn.Sequential(*[SummingAmong(group, gradients=gradients) for _ in range(BLOCKS)])


def gathering() -> list[nn.Module]:
    return [Gathering(dist.group.WORLD) for _ in range(BLOCKS)]


def experts() -> nn.Module:
    return Net(Experts(dist.group.WORLD) for _ in range(BLOCKS))


def language_model() -> Any:
    """A Llama of Transformers."""
    import_torchvision()  # Transformers imports it where it is there.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=BATCH[1],
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def split_by_transformers() -> nn.Module:
    model = language_model()
    states = {"config": model.config, "state_dict": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # The option has another name by and by.
        return (
            type(model)
            .from_pretrained(None, **states, tp_plan="auto", device_mesh=whole_mesh())
            .train()
        )


def sharded_by_accelerate() -> nn.Module:
    """What ``Accelerator.prepare`` does on accelerators."""
    model = language_model()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    return fsdp2_prepare_model(accelerator, model)


def loss_of_words(output: Any) -> torch.Tensor:
    return parallel_loss(output.logits)


def flat_pairs() -> nn.Sequential:
    wide = 4 * WIDTH
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Tanh(), nn.Linear(wide, WIDTH))
            for _ in range(BLOCKS)
        ]
    )


def hooked_on_one(pairs: nn.Sequential) -> nn.Sequential:
    """Pairs of which the first rank alone looks at one, as a logger does."""
    if dist.get_rank() == 0:
        pairs[1].register_forward_hook(lambda *_: None)
    return pairs


def split_pairs(pairs: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Stages that hand over results of collectives."""
    for pair in pairs:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return pairs


LAYOUTS = {
    "tp": Layout(lambda: split(Net(blocks()), whole_mesh())),
    "tp_aside": Layout(lambda: split(Aside(blocks()), whole_mesh()), loss=lambda y: squares(y[0])),
    "tp_graph": Layout(lambda: split(Net(blocks()), whole_mesh()), "graph"),
    "tp_dropout": Layout(lambda: split(Net(blocks(0.1)), whole_mesh())),
    "tp_sequential": Layout(lambda: split(nn.Sequential(*blocks()), whole_mesh())),
    "tp_flat": Layout(lambda: split_pairs(flat_pairs(), whole_mesh()), "chain"),
    "tp_hooked_on_one": Layout(
        lambda: hooked_on_one(split_pairs(flat_pairs(), whole_mesh())), "chain"
    ),
    "tp_flat_graph": Layout(lambda: split_pairs(flat_pairs(), whole_mesh()), "graph"),
    "tp_flat_dynamic": Layout(lambda: split_pairs(flat_pairs(), whole_mesh()), "dynamic"),
    "tp_chain": Layout(lambda: split(nn.Sequential(*blocks(0.1)), whole_mesh()), "chain"),
    "tp_dynamic": Layout(lambda: split(Net(blocks()), whole_mesh()), "dynamic"),
    "tp_broken": Layout(lambda: split(Net(broken(blocks())), whole_mesh())),
    "tp_broken_by_one": Layout(lambda: split(BrokenByOne(blocks()), whole_mesh())),
    "tp_summed": Layout(split_and_summed, same_batch=False, processes=4),
    "sp": Layout(sequence_net),
    "sp_sequential": Layout(lambda: nn.Sequential(*sequence_net().blocks), "chain"),
    "sp_inductor": Layout(lambda: split_sequence(Net(blocks()), whole_mesh()), backend="inductor"),
    "sp_without_dropout": Layout(lambda: split_sequence(Net(blocks()), whole_mesh())),
    "loss_parallel": Layout(split_classes, loss=parallel_loss, around=loss_parallel),
    "gather": Layout(lambda: Net(gathering()), same_batch=False),
    "gather_graph": Layout(lambda: Net(gathering()), "graph", same_batch=False),
    "gather_sequential": Layout(lambda: nn.Sequential(*gathering()), same_batch=False),
    "gather_dynamic": Layout(lambda: Net(gathering()), "dynamic", same_batch=False),
    "gather_broken": Layout(lambda: Net(broken(gathering())), same_batch=False),
    "own_rows": Layout(lambda: OwnRows(blocks()), same_batch=False),
    "own_rows_dynamic": Layout(lambda: OwnRows(blocks()), "dynamic", same_batch=False),
    "experts": Layout(experts, same_batch=False),
    "experts_by_data": Layout(
        lambda: Net(Routing(dist.group.WORLD) for _ in range(BLOCKS)), same_batch=False
    ),
    "summed": Layout(lambda: Net(summing())),
    "summed_broken_by_one": Layout(lambda: BrokenByOne(summing())),
    "summed_sequential": Layout(lambda: nn.Sequential(*summing())),
    "summed_dynamic": Layout(lambda: Net(summing()), "dynamic"),
    "summed_by_some": Layout(partial(summing_among, gradients=False), processes=3, members=2),
    "summed_gradients": Layout(partial(summing_among, gradients=True)),
    "fsdp": Layout(plain_sharded, same_batch=False),
    "fsdp_root_without_parameters": Layout(rootless, same_batch=False),
    "fsdp_pairs": Layout(shared_pairs, same_batch=False),
    "fsdp_pairs_of_stages": Layout(pairs_of_stages, same_batch=False),
    "fsdp_shared": Layout(shared_weights, same_batch=False),
    "fsdp_replicated": Layout(replicated, same_batch=False, processes=4),
    "fsdp_sp": Layout(sharded_rows, processes=4),
    "fsdp_tp": Layout(lambda: both(Net(blocks()), units=lambda net: net.blocks), processes=4),
    "fsdp_tp_sequential": Layout(
        lambda: both(nn.Sequential(*blocks()), units=lambda net: net), processes=4
    ),
}
if all(map(find_spec, ("accelerate", "torchvision", "transformers"))):
    words = partial(Layout, loss=loss_of_words, words=WORDS)
    LAYOUTS |= {
        "tp_transformers": words(split_by_transformers),
        "fsdp_accelerate": words(sharded_by_accelerate, same_batch=False),
    }
