"""Scenarios of test_fsdp.py: sharded blocks of which graphs are captured, one by one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_blocks import Network, peaks, shard, tighten, trained
from fsdp_models import BLOCKS, DEVICE, PROCESSES, Block, batch, differences, on_all, refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchvision_standins import import_torchvision

import rotor
from rotor import memory
from rotor.engines.parts.blocks import FIRST_PROGRAM
from rotor.graph.assembly import least_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "fsdp.md"


class Deep(nn.Module):
    """Of several residual parts: computed again as a whole, all of them are kept at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.scale


def programs(model: rotor.Checkpointable) -> int:
    """How many blocks run a program of their graph."""
    return sum(k >= FIRST_PROGRAM for k in model.plan.choice)


def least_of_whole(model: rotor.Checkpointable) -> int:
    """The least limit if blocks could only be computed again whole, or kept."""
    plan = model.plan
    options = [site[:FIRST_PROGRAM] for site in plan.parts.options()]
    return least_bytes(options, plan.parts.bases) + plan.reserve_bytes


def several_limits() -> list[str]:
    """Between the least limit and plain: bit for bit the same, peaks within, as predicted."""
    plain, planned = shard(Network(Deep)), rotor.Checkpointable(shard(Network(Deep)))
    planned.measure(batch(0))
    found, used = [], 0
    foreseen = planned.curve()
    least = tighten(planned)
    if foreseen.minimum_bytes != planned.curve().minimum_bytes:
        found.append(f"{foreseen} before a plan, {planned.curve()} after")
    found += refused(lambda: planned.load_program("program.json"), ValueError, "it is sharded")
    whole = least_of_whole(planned)
    if least > 0.8 * whole:
        found.append(f"least limit {least}, of whole blocks {whole}")
    for share in (0.0, 0.2, 0.5):
        limit = int(least + share * (3_400_000 - least))
        planned.compute_sequence(mem_limit=limit)
        used += programs(planned)
        found += trained(plain, planned, 3)
        found += peaks(plain, planned, limit, share=0.95)
        plan = planned.plan
        # A plan made after the last metered step has none.
        measured = plan.measured_bytes or plan.predicted_bytes
        if not 0.8 * plan.predicted_bytes <= measured <= plan.predicted_bytes:
            found.append(f"measured {measured} of {plan.predicted_bytes}, {limit}")
    if used < 3:
        found.append(f"{used} programs are used")
    if "a part kept" not in planned.display():
        found.append(planned.display())
    ways = [[p.ops.tolist() for p in b.graph.programs] for b in planned.plan.parts.sites]
    everywhere = on_all(ways)
    return found if everywhere[0] == everywhere[1] else [*found, "programs differ between ranks"]


def without_graphs() -> list[str]:
    """Blocks that cannot be captured are computed again whole; the report says why."""
    mesh = init_device_mesh(DEVICE, (PROCESSES,))

    def make() -> Any:
        model = Network(Deep)
        fully_shard(model.blocks[0].parts[1], mesh=mesh)
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
        model.blocks[2].compile(backend="aot_eager")
        return shard(model)

    plain, planned = make(), rotor.Checkpointable(make())
    planned.measure(batch(0))
    limit = tighten(planned)
    found = trained(plain, planned, 3) + peaks(plain, planned, limit, share=0.95)
    graphs = [block.graph is not None for block in planned.plan.parts.sites]
    if graphs != [False] * 3 + [True] * (BLOCKS - 3):
        found.append(f"graphs {graphs}")
    report = " ".join(planned.report().split())
    for told in ("blocks.0 whole: a part of it is sharded by itself", "is compiled already"):
        if told not in report:
            found.append(report)
    return found


def lost_graphs() -> list[str]:
    """A number that a block was captured for changes: on one rank, then on both."""
    plain, planned = shard(Network(Deep)), rotor.Checkpointable(shard(Network(Deep)))
    planned.measure(batch(0))
    limit = tighten(planned, 300_000)
    found = trained(plain, planned, 2)
    if programs(planned) < 2:
        found.append(f"choice {planned.plan.choice}")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rotor").addHandler(handler)
    for model in (plain, planned.module):
        for block in model.blocks:
            block.scale = 0.5
    found += trained(plain, planned, 3) + peaks(plain, planned, 2 * limit, share=1.0)
    logging.getLogger("rotor").removeHandler(handler)
    if not any("was captured for other arguments or Python values" in line for line in told):
        found.append(f"told {told}")
    if any(a != b for a, b in zip(*on_all(planned.plan.choice), strict=True)):
        found.append("choices differ")
    planned.measure(batch(0))
    planned.compute_sequence(mem_limit=limit)
    found += trained(plain, planned, 2) + peaks(plain, planned, limit, share=1.0)
    return found if programs(planned) else [*found, "measure() found no programs"]


def changed_afterwards() -> list[str]:
    """A program that reads what the model overwrites is not used."""

    class Overwrites(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 1:
                    x = x.mul_(2.0)
            return self.last(x)

    plain, planned = shard(Overwrites(Deep)), rotor.Checkpointable(shard(Overwrites(Deep)))
    planned.measure(batch(0))
    tighten(planned, 200_000)
    return trained(plain, planned, 3)


def documented() -> list[str]:
    """The examples of docs/fsdp.md, on the CPU."""
    text = DOCS.read_text(encoding="utf-8")
    examples = re.findall(r"```\{code-block\} python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"embedding": nn.Embedding(1000, 32), "head": nn.Linear(32, 1000)}
    names["blocks"] = [
        nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(BLOCKS)
    ]
    found = []
    for example in examples:
        exec(example.replace('"cuda"', '"cpu"'), names)
        model = names["model"]
        tokens = torch.arange(32).view(2, 16)
        model(tokens).square().mean().backward()
        if any(p.grad is None for p in model.parameters()) or model.curve().bytes.size < 2:
            found.append(example)
    return found if len(examples) == 2 else [*found, f"{len(examples)} examples"]


def transformers_models() -> list[str]:
    """Models of Hugging Face, which no chain and no single graph stands for, at half the memory."""
    import_torchvision()
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    small = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4}
    small |= {"num_hidden_layers": 3, "intermediate_size": 128}
    mesh = init_device_mesh(DEVICE, (PROCESSES,))

    def make(kind: Any, config: Any, layers: str) -> Any:
        torch.manual_seed(0)
        model = kind(config).train()
        for layer in model.get_submodule(layers):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(model: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(PROCESSES * number + dist.get_rank())
        tokens = torch.randint(128, (4, 64), generator=generator)
        torch.manual_seed(number)
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    found = []
    for given in (
        (LlamaForCausalLM, LlamaConfig(**small, use_cache=False), "model.layers"),
        (BertForMaskedLM, BertConfig(**small), "bert.encoder.layer"),
    ):
        plain, planned = make(*given), rotor.Checkpointable(make(*given), mem_limit="1GB")
        peaks: dict[Any, list[int]] = {plain: [], planned: []}
        step(planned, 0)
        for number in range(6):
            for model, levels in peaks.items():
                with memory.meter(DEVICE) as meter:
                    step(model, number)
                levels.append(meter.peak_bytes)
            found += differences(plain, planned)
            if number == 1:
                limit = min(peaks[plain]) // 2
                planned.compute_sequence(mem_limit=limit)
                step(planned, 0)
                step(planned, 0)
                peaks[planned].clear()
        if min(peaks[planned]) > limit or not programs(planned):
            found.append(f"peaks {peaks[planned]}, limit {limit}, {planned.plan.choice}")
    return found


GRAPH_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "graphs: several limits": several_limits,
    "graphs: not captured": without_graphs,
    "graphs: lost": lost_graphs,
    "graphs: changed afterwards": changed_afterwards,
    "documented examples": documented,
    "graphs: models of Hugging Face": transformers_models,
}
