# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Any model
#
# Models with keyword arguments, skip connections, dictionaries as outputs are no chains. rotor
# captures such a model as one graph of operations - forward, loss and backward - and decides
# operation by operation what is kept and what is computed again. You change one line.

# %%
import shutil
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import SVG
from torch import nn

import rotor
from rotor import graph as rg

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A model that is no Sequential
#
# A small language model with a skip from the embedding to the head, an optional mask, dropout,
# and a dictionary as its result.


# %%
class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        heads = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(heads.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, words=200, width=64, layers=4):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, ids, *, mask=None):
        start = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        hidden = self.mix(torch.cat([start, x], -1))
        return {"logits": self.head(hidden), "hidden": hidden}


ids = torch.randint(200, (4, 64))
targets = ids.roll(-1, 1)
mask = torch.ones(64, 64, dtype=torch.bool).triu(1)


def loss_of(output, targets):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


# %% [markdown]
# What a plain step takes:

# %%
model = Model()
torch.manual_seed(1)
with rotor.memory.meter("cpu") as meter:
    plain_loss = loss_of(model(ids, mask=mask), targets)
    plain_loss.backward()
plain_peak = meter.peak_bytes
plain_gradients = [p.grad for p in model.parameters()]
model.zero_grad()
print(f"plain: {plain_peak / 1e6:.1f} MB, loss {plain_loss.item()}")

# %% [markdown]
# ## The line that changes
#
# Half of it is our limit. With `loss_fn=` the loss is captured and planned too, so the limit
# holds from the first step on. Everything else about the call stays: keyword arguments, the
# random numbers of dropout, gradients on the parameters.

# %%
limit = plain_peak // 2
limited = rotor.Checkpointable(model, mem_limit=limit, loss_fn=loss_of)
torch.manual_seed(1)
loss = limited(ids, mask=mask, targets=(targets,))
loss.backward()
print("equal loss:     ", torch.equal(loss, plain_loss))
print(
    "equal gradients:",
    all(map(torch.equal, plain_gradients, (p.grad for p in limited.parameters()))),
)
print(limited.report())

# %% [markdown]
# The first call took longer: the model was captured through `torch.compile` (no compiler is run),
# each distinct operation was timed alone, and a plan was searched. All of it is kept: a batch of
# the same shape goes straight through, another shape gets a plan of its own when it first comes.
# Timings of operations are also kept on disk, for the next run.
#
# ## What is the price?

# %%
curve = limited.curve(points=16)
_, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
curve.plot(ax)
ax.axvline(plain_peak / 2**20, color="grey", linestyle=":", label="plain PyTorch")
ax.legend()
print(f"from {curve.minimum_bytes / 1e6:.1f} MB on; at the limit {curve.at(limit) * 1e3:.1f} ms")

# %% [markdown]
# The limit and what is free are marked by `plot` itself. With nothing recomputed the graph stays
# below plain PyTorch, which keeps some tensors longer than any operation needs them.
#
# ## What does the plan do?
#
# A plan is a *program*: the operations of the graph in the order in which they run, with repeats.
# To the right each run of an operation, upwards the operations in their original order. A plain
# step would be one straight line.


# %%
def draw(program, ax):
    phases = [op.phase for op in program.graph.operations]
    seen = set()
    colours = {"forward": "#4477aa", "loss": "k", "backward": "#ee6677", "again": "#ccbb44"}
    points = {"forward": [], "loss": [], "backward": [], "again": []}
    for when, op in enumerate(program.ops.tolist()):
        points["again" if op in seen else phases[op]].append((when, op))
        seen.add(op)
    for name, found in points.items():
        if found:
            ax.scatter(*zip(*found, strict=True), s=4, label=name, color=colours[name])
    ax.set_ylabel("operation")
    ax.legend(markerscale=3, fontsize="small")


program = limited.program
_, (above, below) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, layout="constrained")
draw(program, above)
below.fill_between(range(len(program)), program.timeline().peak_bytes / 2**20, alpha=0.4)
below.set(xlabel="run", ylabel="live bytes (MiB)")
print(f"{len(program.graph)} operations, {len(program)} runs, {program.slowdown:.3f} x the time")

# %% [markdown]
# What is repeated is chosen by what it costs against the bytes that it frees, and for how long.
# The repetitions that cost most:

# %%
summary = rg.summarise(program)
for entry in sorted(summary.again, key=lambda e: -e.extra_ns)[:5]:
    operation = program.graph.operations[entry.operation]
    microseconds = entry.extra_ns / 1e3
    print(f"{operation.module:>16} {operation.name:<12} {entry.runs} runs, {microseconds:+.0f} us")
print(f"kept: {summary.kept_bytes / 1e6:.1f} MB", end=", ")
print(f"made again: {summary.recomputed_bytes / 1e6:.1f} MB")

# %% [markdown]
# The live bytes of a real step, measured, lie on those predicted:

# %%
_, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
_ = limited.plot_timeline(ax)

# %% [markdown]
# `report()` writes all of this as a page that can be clicked through: one file, no network.

# %%
page = Path(tempfile.mkdtemp()) / "plan.html"
limited.report(page)
print(page.name, f"{page.stat().st_size / 1e3:.0f} kB")

# %% [markdown]
# ## The graph by itself
#
# The graph of a step can be had without training anything: measured, planned, drawn. Which
# modules make how much?

# %%
step = rg.build(Model(layers=2), ids, loss_fn=loss_of, targets=(targets,))
everything = rg.simulate(step, range(len(step)))
print(f"{len(step)} operations, every one once: {everything.peak_bytes / 1e6:.1f} MB")
print(f"no program can go below {rg.lower_bound(step) / 1e6:.1f} MB")

sizes: dict[str, int] = {}
for operation in step.operations:
    made = sum(step.storages[s].bytes for s in operation.outputs)
    name = ".".join(operation.module.split(".")[:2]) or "(model)"
    sizes[name] = sizes.get(name, 0) + made
_, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
ax.barh(list(sizes), [size / 2**20 for size in sizes.values()])
_ = ax.set_xlabel("bytes made in a step (MiB)")

# %% [markdown]
# With Graphviz installed, `rg.render` draws it; here one box for each module, coloured by what a
# plan for two thirds of the memory does.

# %%
tighter = rg.plan(step, everything.peak_bytes * 2 // 3, effort="fast")
if shutil.which("dot"):
    rg.render(step, page.with_suffix(".svg"), program=tighter, level="modules")
    picture = SVG(page.with_suffix(".svg"))
else:
    picture = "Graphviz's program dot is not installed"
picture

# %% [markdown]
# ## What cannot be captured
#
# A branch on the *values* of a tensor has no graph. rotor says so, with the line, and plans the
# largest parts of the model that can be captured:


# %%
class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().max() > 1000:
                x = x / 2
        return x


rows = torch.randn(512, 64)
adaptive = rotor.Checkpointable(Adaptive(), mem_limit="3 MB")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        adaptive.zero_grad()
        adaptive(rows).square().mean().backward()
print(str(caught[0].message).partition("Explanation")[0])
print(adaptive.display())

# %% [markdown]
# `engine="graph"` makes that an error instead. Where nothing can be captured, the dynamic engine
# runs the model: [dynamic models](04_dynamic_models.ipynb).
#
# Next: [reading the curve and the report](03_reading_the_curve.ipynb).
