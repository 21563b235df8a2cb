"""The Trainers of Transformers and Lightning on two gloo processes, with a limit and without.

Run as a script, this file is one of the two processes, in an environment like that of torchrun. The
frameworks make the process group themselves.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import differences, refused
from gpt2_models import small_gpt2
from layouts import flat_pairs, sharded, split_by_transformers, split_pairs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision_standins import import_torchvision
from two_processes import PROCESSES, run_processes
from zoo.models import Gated, chain

import rotor
from rotor import memory

LIMIT = 800_000
SECONDS = 400
BATCHES, ROWS, WORDS, LENGTH = 4, 8, 120, 32


def same(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of the parameters that are not bit-equal."""
    pairs = zip(a.named_parameters(), b.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p, q)]


def one_model(module: nn.Module) -> list[str]:
    """Whether the ranks have ended with the same parameters."""
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    others = [torch.empty_like(mine) for _ in range(PROCESSES)]
    dist.all_gather(others, mine)
    return [] if all(torch.equal(mine, other) for other in others) else ["the ranks differ"]


def kept(model: rotor.Checkpointable, limit: int) -> list[str]:
    """Whether every plan was measured within the limit, and recomputes."""
    plans = list(model.plans.values())
    # A plan of the last step has no figure: the meter of the test runs.
    found = [f"measured {p.measured_bytes}" for p in plans if (p.measured_bytes or 0) > limit]
    if not plans or not all(map(recomputes, plans)):
        found.append("nothing is recomputed")
    return found


def recomputes(plan: Any) -> bool:
    sequence = getattr(plan, "sequence", None)
    if sequence is not None:
        return max(sequence.count_forwards().values()) > 1
    return plan.recomputes


# -- Transformers


def gpt(layers: int = 1) -> Any:
    torch.manual_seed(0)
    return small_gpt2(layers, WORDS, LENGTH)


def trainer(model: Any, *callbacks: Any, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (4 * ROWS * PROCESSES, LENGTH), generator=generator)
    settings = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **arguments,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=tempfile.mkdtemp(), **settings),
        train_dataset=[{"input_ids": line, "labels": line} for line in ids],
        callbacks=list(callbacks),
    )


def transformers_trains() -> list[str]:
    from rotor.integrations.transformers import RotorCallback

    plain, planned, limit = gpt(), gpt(), RotorCallback(LIMIT, effort="fast")
    losses = []
    for model, callbacks in ((plain, []), (planned, [limit])):
        made = trainer(model, *callbacks, gradient_accumulation_steps=2)
        made.train()
        if not isinstance(made.model_wrapped, DistributedDataParallel):
            return [f"trained as {type(made.model_wrapped).__name__}"]
        losses.append([line["loss"] for line in made.state.log_history if "loss" in line])
    found = same(plain, planned) + one_model(planned) + kept(limit.model, LIMIT)
    if len(losses[0]) != 3 or losses[0] != losses[1]:
        found.append(f"losses {losses}")
    if "limit" not in limit.report():
        found.append("no report")
    return found


def transformers_refuses() -> list[str]:
    from accelerate.state import AcceleratorState

    from rotor.integrations.transformers import RotorCallback

    def made(**arguments: Any) -> Any:
        AcceleratorState._reset_state()
        return trainer(gpt(), RotorCallback(LIMIT), **arguments)

    with on_accelerators(fsdp_version=1):
        found = refused(lambda: trainer(gpt(), RotorCallback(LIMIT)), ValueError, "fsdp_version")
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "aot_eager"
    found += refused(made, ValueError, "torch_compile=True")
    del os.environ["ACCELERATE_DYNAMO_BACKEND"]
    AcceleratorState._reset_state()
    model = gpt()
    found += refused(trainer(model, RotorCallback(1)).train, rotor.InfeasibleError, "least")
    if "forward" not in vars(model):
        found.append("the planned forward is gone while nobody ended the training")
    return found


@contextmanager
def on_accelerators(**plugin: Any) -> Iterator[None]:
    """Have Accelerate spread models over processes of a CPU as it does over accelerators."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, DistributedType

    begin = AcceleratorState.__init__

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if plugin:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)

    AcceleratorState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", started)
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
        yield
    AcceleratorState._reset_state()


def transformers_spreads_models() -> list[str]:
    from torch.distributed.tensor import DTensor

    from rotor.integrations.transformers import RotorCallback

    shards = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["GPT2Block"],
        "cpu_ram_efficient_loading": False,
    }
    found = []
    for kind, limit_bytes, plugin in (
        (partial(gpt, 2), 1_100_000, {"fsdp_version": 2, **shards}),
        (split_by_transformers, 1_600_000, {}),
    ):
        with on_accelerators(**plugin):
            torch.manual_seed(0)
            plain, limit, losses = kind(), RotorCallback(limit_bytes, effort="fast"), []
            torch.manual_seed(0)
            planned = kind()
            for model, callbacks in ((plain, []), (planned, [limit])):
                made = trainer(model, *callbacks)
                made.train()
                losses.append([line["loss"] for line in made.state.log_history if "loss" in line])
        one = same(plain, planned) + kept(limit.model, limit_bytes)
        if not any(isinstance(p, DTensor) for p in planned.parameters()):
            one.append("spread over no processes")
        if len(losses[0]) != 3 or losses[0] != losses[1]:
            one.append(f"losses {losses}")
        found += [f"{plugin}: {text}" for text in one]
    return found


# -- Lightning


def fit(
    kind: Callable[[], nn.Module],
    *callbacks: Any,
    metered: bool = False,
    spread: Callable[[nn.Module, Any], nn.Module] | None = None,
    strategy: Any = "ddp",
    **arguments: Any,
):
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = kind()
            self.losses: list[float] = []
            self.peaks: list[int] = []

        def configure_model(self):
            if spread is not None:
                self.net = spread(self.net, self.device_mesh)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = self(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def on_train_batch_start(self, batch, index):
            if metered and index >= BATCHES - 1:
                old = [p.grad for p in self.parameters() if p.grad is not None]
                self.meter = memory.meter("cpu", existing=old).start()

        def on_after_backward(self):
            if hasattr(self, "meter"):
                self.meter.stop()
                self.peaks.append(self.meter.peak_bytes)
                del self.meter

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(256 * BATCHES * PROCESSES, 64, generator=generator))
    module = Module()
    torch.manual_seed(2)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", strategy=strategy, devices=PROCESSES, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=256))
    if not isinstance(trainer.strategy.model, DistributedDataParallel | Module):
        raise AssertionError(f"trained as {type(trainer.strategy.model).__name__}")
    return module


def lightning_trains() -> list[str]:
    from rotor.integrations.lightning import RotorCallback

    found = []
    for kind, limit_bytes, options in (
        (chain, 600_000, {}),
        (Gated, 600_000, {}),
        (Gated, 700_000, {"module": ""}),
    ):
        limit = RotorCallback(limit_bytes, **options)
        plain = fit(kind, metered=True)
        planned = fit(kind, limit, metered=True)
        one = same(plain, planned) + one_model(planned) + kept(limit.model, limit_bytes)
        if len(plain.losses) != BATCHES or plain.losses != planned.losses:
            one.append(f"losses {plain.losses}, {planned.losses}")
        if not max(planned.peaks) <= limit_bytes < max(plain.peaks):
            one.append(f"peaks {planned.peaks}, plain {plain.peaks}")
        found += [f"{kind.__name__}, {options}: {text}" for text in one]
    return found


def lightning_spreads_models() -> list[str]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    def shard(net: nn.Sequential, mesh: Any) -> nn.Module:
        return sharded(net, net, mesh=mesh["data_parallel"])

    def split(net: nn.Sequential, mesh: Any) -> nn.Module:
        return split_pairs(net, mesh["tensor_parallel"])

    found = []
    for spread, sizes in ((shard, (PROCESSES, 1)), (split, (1, PROCESSES))):
        whole = partial(fit, flat_pairs, metered=True)
        plain = whole(spread=spread, strategy=ModelParallelStrategy(*sizes))
        limit = max(plain.peaks) * 9 // 10

        def limited(net: nn.Module, mesh: Any, way: Any = spread, limit: int = limit) -> nn.Module:
            return rotor.Checkpointable(way(net, mesh), mem_limit=limit)

        planned = whole(spread=limited, strategy=ModelParallelStrategy(*sizes))
        one = differences(plain.net, planned.net.module) + kept(planned.net, limit)
        if plain.losses != planned.losses:
            one.append(f"losses {plain.losses}, {planned.losses}")
        if not max(planned.peaks) <= limit < max(plain.peaks):
            one.append(f"peaks {planned.peaks}, plain {plain.peaks}")
        found += [f"{spread.__name__}: {text}" for text in one]
    return found


def lightning_accumulates() -> list[str]:
    from rotor.integrations.lightning import RotorCallback

    limit = RotorCallback(600_000)
    plain = fit(chain, accumulate_grad_batches=2)
    planned = fit(chain, limit, accumulate_grad_batches=2)
    return same(plain, planned) + one_model(planned) + kept(limit.model, 600_000)


def lightning_tells_what_is_too_little() -> list[str]:
    from rotor.integrations.lightning import RotorCallback

    return refused(lambda: fit(chain, RotorCallback(1)), rotor.InfeasibleError, "least")


SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "transformers: trains": transformers_trains,
    "transformers: refuses": transformers_refuses,
    "transformers: spreads": transformers_spreads_models,
    "lightning: trains": lightning_trains,
    "lightning: spreads": lightning_spreads_models,
    "lightning: accumulates": lightning_accumulates,
    "lightning: too little": lightning_tells_what_is_too_little,
}


def work(rank: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
    }
    warnings.simplefilter("ignore")
    with suppress(ModuleNotFoundError):
        import_torchvision()
    found = {}
    for name, scenario in SCENARIOS.items():
        found[name] = scenario()
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with suppress(ModuleNotFoundError):
        import_torchvision()
    for name in ("transformers", "accelerate", "lightning.pytorch"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        patch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        probe.close()
        return run_processes(__file__, tmp_path_factory.mktemp("trainers"), SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_trainers_under_ddp(found, scenario, rank):
    assert found[rank][scenario] == []


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
