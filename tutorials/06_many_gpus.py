# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Many GPUs
#
# Several processes, each with its own device, train one model on parts of each batch. PyTorch's
# own engines do that; rotor limits what a step takes in each process. Here two processes share
# this machine's processor and talk through gloo. On GPUs the same script runs with
# `backend="nccl"`.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

folder = Path(tempfile.mkdtemp())


def torchrun(script, *words):
    """Two processes of a script; what they wrote to results.json."""
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(path), *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


# %% [markdown]
# ## DistributedDataParallel
#
# Every process has the whole model; gradients are averaged while the backward runs. The order is:
# wrap the model for memory first, then in `DistributedDataParallel`. So DDP sees the gradients of
# rotor's backward as they are made.
#
# The script trains three times from the same start: plain, with a limit as a chain, and with a
# limit as a graph. It is an ordinary training script.

# %%
ddp_script = """
import json
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rotor

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model():
    torch.manual_seed(0)                                   # the same start everywhere
    return nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(6)), nn.Linear(64, 8))


def train(model, steps=6):
    model = DistributedDataParallel(model)                 # outside
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(1 + rank)        # each process has its part of the data
    losses, peaks = [], []
    for step in range(steps):
        x = torch.randn(512, 16, generator=draws)
        labels = torch.randint(8, (512,), generator=draws)
        optimizer.zero_grad()
        if step == steps - 1:                              # the limit is about one step
            with rotor.memory.meter("cpu") as meter:
                loss = nn.functional.cross_entropy(model(x), labels)
                loss.backward()
            peaks.append(meter.peak_bytes)
        else:
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "peak": peaks[0], "weights": weights}


runs = {"plain": train(make_model())}
limit = runs["plain"]["peak"] * 6 // 10
runs["chain"] = train(rotor.Checkpointable(make_model(), mem_limit=limit))
runs["graph"] = train(rotor.Checkpointable(make_model(), mem_limit=limit, engine="graph"))

start = runs["plain"].pop("weights")
runs["plain"]["same weights"] = True
for name in ("chain", "graph"):
    runs[name]["same weights"] = torch.equal(start, runs[name].pop("weights"))
found = [None, None]
distributed.all_gather_object(found, {"limit": limit, "runs": runs})
if rank == 0:
    with open("results.json", "w") as file:
        json.dump(found, file)
distributed.destroy_process_group()
time.sleep(1)                                              # gloo's threads let go of their tensors
"""
ranks = torchrun(ddp_script)
for rank, found in enumerate(ranks):
    print(f"rank {rank}, limit {found['limit'] / 1e6:.2f} MB")
    for name, run in found["runs"].items():
        equal = run["losses"] == found["runs"]["plain"]["losses"]
        print(f"  {name}: peak {run['peak'] / 1e6:.2f} MB,", end=" ")
        print(f"losses equal: {equal}, weights equal: {run['same weights']}")

# %%
runs = ranks[0]["runs"]
_, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, run in runs.items():
    left.plot(run["losses"], label=name, alpha=0.6)
left.set(xlabel="step", ylabel="loss of rank 0")
left.legend()
for rank, found in enumerate(ranks):
    sizes = [run["peak"] / 2**20 for run in found["runs"].values()]
    right.bar([k + 0.35 * rank for k in range(len(sizes))], sizes, width=0.33, label=f"rank {rank}")
right.axhline(ranks[0]["limit"] / 2**20, color="tab:red", linestyle="--", label="limit")
right.set_xticks(range(len(runs)), list(runs))
right.set_ylabel("peak of a step (MiB)")
_ = right.legend()

# %%
for found in ranks:
    for name in ("chain", "graph"):
        assert found["runs"][name]["peak"] <= found["limit"]
        assert found["runs"][name]["losses"] == found["runs"]["plain"]["losses"]

# %% [markdown]
# ## FSDP2
#
# `fully_shard` cuts parameters, gradients and optimizer state over the processes. What a step
# keeps for its backward stays whole in each of them: that part is rotor's. Shard first, wrap last
# ([FSDP2](../docs/fsdp.md)). All processes follow one plan, since their collective operations
# have to meet.

# %%
sharded_script = (
    ddp_script.partition("def train(")[0]
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))


def shard(model):
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(1 + rank)
    losses = []
    for step in range(steps):
        x = torch.randn(512, 16, generator=draws)
        labels = torch.randint(8, (512,), generator=draws)
        optimizer.zero_grad()
        with rotor.memory.meter("cpu") if step == steps - 1 else nullcontext() as meter:
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "peak": meter.peak_bytes}


runs = {"plain": train(shard(make_model()))}
peaks = [None, None]
distributed.all_gather_object(peaks, runs["plain"]["peak"])
limit = max(peaks) * 6 // 10                               # the same for all
runs["limited"] = train(rotor.Checkpointable(shard(make_model()), mem_limit=limit))
found = [None, None]
distributed.all_gather_object(found, {"limit": limit, "runs": runs})
if rank == 0:
    with open("results.json", "w") as file:
        json.dump(found, file)
distributed.destroy_process_group()
time.sleep(1)                                              # gloo's threads let go of their tensors
"""
)
ranks = torchrun("from contextlib import nullcontext\n" + sharded_script)
for rank, found in enumerate(ranks):
    plain, limited = found["runs"]["plain"], found["runs"]["limited"]
    print(f"rank {rank}: plain FSDP2 {plain['peak'] / 1e6:.2f} MB", end=", ")
    print(f"limit {found['limit'] / 1e6:.2f} MB, peak {limited['peak'] / 1e6:.2f} MB", end=", ")
    print("losses equal:", plain["losses"] == limited["losses"])
    assert plain["losses"] == limited["losses"]

# %% [markdown]
# The peaks are those of a meter in the thread that trains. On the CPU, threads of gloo give back
# the buffers of a collective at moments of their own, which that meter does not see, so that the
# figures of a process can lie somewhat above what it had allocated; [FSDP2](../docs/fsdp.md) says
# how rotor's own meter accounts for them.
#
# Next: [a second tier of memory](07_a_second_tier.ipynb).
