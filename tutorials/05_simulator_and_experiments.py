# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The simulator and the experiments
#
# What would another heuristic do, or another budget? Running the model for each question is slow.
# So a program is run once and written down as a log: what each operation reads and makes, how
# long it takes. `rotor.simrd` replays logs under any heuristic and budget, in milliseconds, with
# the decisions of the simulator that was published with DTR (Kirisame et al., ICLR 2021).

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Image
from torch import nn

import rotor
from rotor import simrd
from rotor.simrd import networks, static

torch.manual_seed(0)
torch.set_num_threads(1)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A log of our own
#
# Two programs: a recurrent cell over forty words, and a small convolutional network with a skip.
# Without a limit nothing is evicted; the log is what the program does by itself.


# %%
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 2)

    def forward(self, x):
        state = x.new_zeros(len(x), 64)
        for word in x.unbind(1):
            state = self.cell(word, state)
        return self.head(state)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(10))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.mean((2, 3))


samples = {
    "reader": (Reader(), torch.randn(64, 40, 32)),
    "skips": (Skips(), torch.randn(8, 8, 24, 24)),
}
logs = {}
for name, (model, x) in samples.items():
    path = folder / "logs" / f"{name}.log"
    path.parent.mkdir(exist_ok=True)
    with rotor.dtr.budget(None, record_log=path):
        model(x).square().mean().backward()
    logs[name] = simrd.parse(path)
    print(f"{name}: {logs[name].operation_count} operations,", end=" ")
    print(f"baseline {logs[name].baseline.max_memory / 1e6:.2f} MB")

# %% [markdown]
# A log is text, one instruction a line, and can come from anywhere ([the
# format](../docs/logs.md)):

# %%
print("".join((folder / "logs" / "reader.log").open().readlines()[20:26]))

# %% [markdown]
# ## Replaying it
#
# `ratio` is the budget, as a part of what the program takes without one.

# %%
result = simrd.simulate(logs["reader"], "DTR", ratio=0.6)
print(result.describe())

# %% [markdown]
# Live bytes over time, with and without the budget:

# %%
_, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for ratio in (1.0, 0.6):
    clock, live = simrd.simulate(logs["reader"], "DTR", ratio=ratio, trace=True).timeline()
    label = f"{ratio:.0%} of the memory"
    ax.step(clock / 1e6, live / 2**20, where="post", label=label, linewidth=0.8)
ax.set(xlabel="ms", ylabel="MiB")
_ = ax.legend()

# %% [markdown]
# ## Heuristics against memory
#
# All of it for six heuristics and many budgets. A curve ends where a heuristic runs out of
# memory, or thrashes: the run is given up when it takes five times as long.

# %%
ratios = [k / 10 for k in range(10, 1, -1)]
names = ["DTR", "DTREqClass", "DTRLocal", "LRU", "LargestStorage", "MSPS"]
_, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for ax, (title, log) in zip(axes, logs.items(), strict=True):
    for name in names:
        runs = [simrd.simulate(log, name, ratio=r, overhead_limit=5) for r in ratios]
        done = [(run.ratio, run.slowdown) for run in runs if run.status == "ok"]
        ax.plot(*zip(*done, strict=True), marker=".", label=name)
    ax.set(title=title, xlabel="budget / memory", ylim=(0.95, 3))
    ax.invert_xaxis()
axes[0].set_ylabel("slow-down")
_ = axes[1].legend(fontsize="small")

# %% [markdown]
# Running out of memory is an outcome, not an exception. It says what could not be evicted:

# %%
print(simrd.simulate(logs["skips"], "DTR", ratio=0.1).describe())

# %% [markdown]
# ## A heuristic of your own
#
# A function of a candidate: the storage with the least value goes.


# %%
def oldest_and_largest(candidate):
    return 1 / (candidate.staleness * candidate.bytes + 1)


for heuristic in (oldest_and_largest, "LRU", "DTR"):
    run = simrd.simulate(logs["reader"], heuristic, ratio=0.7)
    print(f"{run.heuristic:>20}: {run.status}, {run.n_evict} evictions, {run.n_remat} again")

# %% [markdown]
# ## Against plans made beforehand
#
# How much does it cost not to know the future? On a uniform linear network everything is known
# about the optimum. Static planners see the whole program; DTR sees what has happened.

# %%
linear = networks.linear(64)
points = static.plan(linear)
budgets = range(10, 68, 3)
planned = [static.solve(points, budget) for budget in budgets]
online = [simrd.simulate(linear, "DTREqClass", budget_bytes=budget) for budget in budgets]
_, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.step(budgets, [point.slowdown for point in planned], where="post", label="best static plan")
ax.plot(budgets, [run.slowdown for run in online], ".", label="DTR, online")
ax.set(xlabel="budget (storages of one byte)", ylabel="slow-down")
ax.legend()
print("planner at 16 bytes:", static.solve(points, 16).planner)

# %% [markdown]
# On this network it costs next to nothing. Here and there DTR is even ahead by a hundredth: each
# planner contributes some two dozen schedules, not one for every budget.
#
# ## The published experiments
#
# The sweeps and figures of the paper are one command each. `pareto` is the figure above, on any
# logs:


# %%
def rotor_command(*words):
    command = [sys.executable, "-m", "rotor", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


out = folder / "results"
options = ["--ratios", *(k / 10 for k in range(4, 11)), "--trials", 2, "--jobs", 1]
options += ["--formats", "png"]
print(rotor_command("experiment", "pareto", "--logs", folder / "logs", "--out", out, *options))
Image(out / "graph" / "pareto.png", width=700)

# %% [markdown]
# ## Training under budgets
#
# `rotor experiment run` trains models in fresh processes, with and without budgets, and puts the
# simulator beside the real runs. A configuration is JSON. This one is tiny; `rotor experiment run
# quick --out results/` is the one to look at.

# %%
resnet = {"batch_size": 16, "extra_params": {"height": 32, "width": 32}}
configuration = {
    "models": ["resnet20"],
    "n_reps": 3,
    "set_seed": True,
    "save_logs": True,
    "device": "cpu",
    "dtr_settings": {
        "default": {"timeout": 120, "use_sampling": False, "ignore_small_tensors": False},
        "resnet20": [
            {"type": "dtr", "kind": "ratio", "ratio": [0.6, 0.8], **resnet},
            {"type": "simrd", "ratio": [0.6, 0.8], **resnet},
        ],
    },
}
(folder / "small.json").write_text(json.dumps(configuration))
print(rotor_command("experiment", "run", folder / "small.json", "--out", out, "--formats", "png"))
Image(out / "graph" / "small_ratio.png", width=420)

# %% [markdown]
# Everything it measured is in `data/`, with confidence intervals; an interrupted run goes on
# where it was. [Experiments](../docs/experiments.md) has all settings.
#
# Next: [many GPUs](06_many_gpus.ipynb).
