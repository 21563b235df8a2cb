# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading the curve and the report
#
# Which limit should you give? What do the figures of a report mean? Why does the curve end where
# it ends, and what moves that end?

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import rotor
from rotor import graph as rg

torch.manual_seed(0)
torch.set_num_threads(1)


def make_model(width=64, layers=4, classes=500):
    block = [
        nn.Sequential(
            nn.Conv1d(width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(2 * width, width, 3, padding=1),
            nn.BatchNorm1d(width),
        )
        for _ in range(layers)
    ]

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv1d(8, width, 3, padding=1)
            self.blocks = nn.ModuleList(block)
            self.head = nn.Linear(width, classes)

        def forward(self, x):
            x = self.embed(x)
            for part in self.blocks:
                x = x + part(x)
            return self.head(x.transpose(1, 2))

    return Residual()


def batch(size=16):
    return torch.randn(size, 8, 64), torch.randint(500, (size, 64))


def loss_of(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


signals, labels = batch()
with rotor.memory.meter("cpu") as meter:
    loss_of(make_model()(signals), labels).backward()
plain_peak = meter.peak_bytes
print(f"a plain step takes {plain_peak / 1e6:.2f} MB")

# %% [markdown]
# ## Reading a curve
#
# Each point is a limit and the time of a step within it. Between two points nothing is gained:
# you pay for the upper limit and run the plan of the lower one. So choose a limit *at* a point
# or, more easily, look for the knee: the place from which less memory becomes expensive.

# %%
model = rotor.Checkpointable(make_model(), loss_fn=loss_of)
model.measure(signals, targets=(labels,))
curve = model.curve()

slower = curve.seconds / curve.seconds[-1]
knee = int(curve.bytes[(slower < 1.1).argmax()])
_, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
curve.plot(ax)
ax.axvline(plain_peak / 2**20, color="grey", linestyle=":", label="plain PyTorch")
ax.axvline(knee / 2**20, color="tab:green", linestyle="--", label="10 % slower")
ax.legend()
print(f"least {curve.minimum_bytes / 1e6:.2f} MB, {slower[0]:.2f} x the time")
print(f"10 % slower: {knee / 1e6:.2f} MB, {knee / plain_peak:.0%} of plain PyTorch's peak")

# %% [markdown]
# The right end is a plan that repeats nothing. It may lie left of plain PyTorch's peak: the
# captured graph drops some results earlier than autograd does.
#
# ## What the limit counts
#
# The limit is what *one step* may allocate **above the level at its start**. Parameters,
# optimizer state and the batch are there already. The gradients of the parameters are not, if the
# step makes them; if they exist, as with `zero_grad(set_to_none=False)` or in an accumulation,
# they cost nothing. [The memory model](../docs/memory-model.md) is the whole definition.

# %%
parameters = sum(p.numel() * p.element_size() for p in model.parameters())
print(f"gradients that a step creates: {parameters / 1e6:.2f} MB of {knee / 1e6:.2f} MB")

# %% [markdown]
# ## Reading a report
#
# We train three steps at the knee.

# %%
model.compute_sequence(mem_limit=knee)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(signals, targets=(labels,)).backward()
    optimizer.step()
model.report()

# %% [markdown]
# | line | |
# |---|---|
# | limit | yours, or 90 % of what was free |
# | peak, predicted | of the plan, by the simulator that every plan is held to |
# | peak, measured | of a step that was metered, on the allocator's own figures |
# | step, predicted | forward, loss and backward, from medians of single operations |
# | recomputation | what the repeated operations add |
# | operations run again | of how many |
# | set aside after metering | bytes that a metered step needed beyond the plan, now reserved |
#
# If measured lies above predicted, something outside the plan allocates during the step - mostly
# a loss that rotor was not told of. Here is the same model without `loss_fn=`:

# %%
outside = rotor.Checkpointable(make_model(), mem_limit=plain_peak * 8 // 10)
for step in range(3):
    outside.zero_grad()
    loss_of(outside(signals), labels).backward()
    if step == 0:
        print("after the first step\n", outside.report(), "\n", sep="")
print("after the third\n", outside.report(), sep="")

# %% [markdown]
# Before the first step four times the output's bytes were set aside for the unknown loss. Then
# its step was metered, and the plan made again with the true figure.
#
# ## The timeline
#
# Live bytes over one step: predicted as an area, measured as a line, the limit dashed. The peak
# is where they touch it.

# %%
_, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
_ = model.plot_timeline(ax)

# %% [markdown]
# A plan that uses its limit touches it in many places: everything above it was flattened, at the
# price of repeated operations. `model.report("plan.html")` writes a page in which a click on the
# timeline leads to the operation.

# %%
page = Path(tempfile.mkdtemp()) / "plan.html"
model.report(page)
print(f"{page.name}: {page.stat().st_size / 1e3:.0f} kB, one file")

# %% [markdown]
# ## What moves the left end?
#
# At the least limit one operation fills everything: its inputs, outputs and workspace, and what
# must be there beside it. The batch moves it, and so does the largest operation. Width and depth
# in numbers:

# %%
rows = []
for name, net, size in (
    ("as above", make_model(), 16),
    ("twice the layers", make_model(layers=8), 16),
    ("half the batch", make_model(), 8),
    ("a smaller head", make_model(classes=50), 16),
):
    x, y = batch(size)
    step = rg.build(net, x, loss_fn=loss_of, targets=(y % 50,))
    everything = rg.simulate(step, range(len(step))).peak_bytes
    try:
        rg.plan(step, rg.lower_bound(step), effort="fast")
        least = rg.lower_bound(step)
    except rotor.InfeasibleError as error:
        least = error.minimum_bytes
    rows.append((name, everything, least))
    print(f"{name:>17}: {everything / 1e6:5.2f} MB, least found {least / 1e6:5.2f} MB")

_, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
names, most, least = zip(*rows, strict=True)
ax.barh(names, [size / 2**20 for size in most], color="#cccccc", label="without recomputation")
ax.barh(names, [size / 2**20 for size in least], color="#4477aa", label="least")
ax.set_xlabel("MiB")
ax.invert_yaxis()
_ = ax.legend()

# %% [markdown]
# Twice the layers hardly move it: depth is what recomputation is for. The head with 500 outputs
# per position does.
#
# ## Which batch fits?
#
# The question can be turned round. `largest_batch` plans sizes until it has the largest one under
# the limit, runs it, and compares with the largest that plain PyTorch fits ([the largest
# batch](../docs/fitting.md)).

# %%
found = rotor.largest_batch(
    make_model(), signals, "8 MB", loss_fn=loss_of, targets=(labels,), multiple_of=8, points=2
)
print(found)
print(found.display())

# %% [markdown]
# ## For another machine
#
# Memory is known without running anything, and times can be estimated from five figures of a
# machine. The model may lie on the `meta` device, so that nothing is allocated here at all
# ([profiles](../docs/graph.md)).

# %%
accelerator = rg.Machine(
    "an accelerator",
    flops_per_second=2e13,
    low_precision_flops_per_second=1e14,
    bytes_per_second=1e12,
    launch_seconds=5e-6,
    device="cuda",
)
with torch.device("meta"):
    large = make_model(width=1024, layers=12)
    big_signals, big_labels = torch.zeros(64, 8, 512), torch.zeros(64, 512, dtype=torch.int64)
elsewhere = rg.build(
    large, big_signals, loss_fn=loss_of, targets=(big_labels,), profile=accelerator
)
everything = rg.simulate(elsewhere, range(len(elsewhere)))
print(f"without recomputation: {everything.peak_bytes / 2**30:.2f} GiB")
for share in (0.75, 0.5):
    program = rg.plan(elsewhere, int(everything.peak_bytes * share), effort="fast")
    gibibytes = program.peak_bytes / 2**30
    print(f"{gibibytes:.2f} GiB: {program.slowdown:.3f} x the time, predicted")

# %% [markdown]
# Next: [dynamic models](04_dynamic_models.ipynb), where nothing can be planned beforehand.
