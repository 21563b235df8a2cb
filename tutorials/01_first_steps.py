# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# A training step computes forwards, a loss, and backwards. The backward of a layer reads what its
# forward has computed, so all of it is kept until then. That is where the memory goes.
#
# rotor drops some of it and computes it again when it is needed. You say how many bytes a step
# may take; rotor finds the schedule that costs the least time.
#
# This tutorial begins with a model as you have one: put yours in its place. It goes from a plain
# training loop to one with a limit, and looks at what happens on the way.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import rotor

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## Your model
#
# Here a few residual blocks and a head. Nothing in it knows of rotor.


# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(hidden)))


class Net(nn.Module):
    def __init__(self, width=16, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        shrink = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.blocks = nn.ModuleList(
            [*(Block(width) for _ in range(4)), shrink, *(Block(2 * width) for _ in range(4))]
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x).flatten(1))


net = Net()
images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

# %% [markdown]
# What does a step of it take, and what would a limit cost? The meter and the curve answer for any
# module:

# %%
with rotor.memory.meter("cpu") as meter:
    nn.functional.cross_entropy(net(images), labels).backward()
net.zero_grad()

own = rotor.Checkpointable(copy.deepcopy(net), loss_fn=nn.functional.cross_entropy)
own.measure(images, targets=(labels,))
own_curve = own.curve()
print(f"a plain step of your model takes {meter.peak_bytes / 1e6:.1f} MB")
print(f"with {own_curve.minimum_bytes / 1e6:.1f} MB a step can do")
for share in (0.8, 0.6):
    slower = own_curve.at(int(meter.peak_bytes * share)) / own_curve.seconds[-1] - 1
    print(f"within {share:.0%} of the plain step: {slower:+.1%} time")

# %% [markdown]
# That is all there is to know before training: `rotor.Checkpointable(net, mem_limit=...)` takes
# any module, and the [next tutorial](02_any_model.ipynb) goes on with it. The rest of this one
# looks inside.
#
# ## The same as a Sequential
#
# Here we write the model as an `nn.Sequential`, because a chain of stages is the case in which the
# best schedule can be *proven*, and because you can read the schedule.
#
# Stages should be what you would keep or drop as a whole: a block, not a network, not an
# addition.

# %%
model = nn.Sequential(
    net.stem,
    *net.blocks,
    net.pool,
    nn.Flatten(),
    net.head,
)
print("same output:", torch.equal(net.eval()(images), model.eval()(images)))
_ = model.train()

# %% [markdown]
# ## The training loop
#
# An ordinary one. It stays as it is to the end of this tutorial.


# %%
def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# How much does a step take? PyTorch's allocator knows: `rotor.memory.meter` asks it, on the CPU
# through the profiler, on a GPU through the allocator's statistics. What counts is the most that
# was allocated above the level at which the step began.


# %%
def peak_of_a_step(model):
    model.zero_grad()
    with rotor.memory.meter("cpu") as meter:
        nn.functional.cross_entropy(model(images), labels).backward()
    return meter.peak_bytes


plain = copy.deepcopy(model)
plain_peak = peak_of_a_step(copy.deepcopy(model))
print(f"a plain step takes {plain_peak / 1e6:.1f} MB")

# %% [markdown]
# ## Replace the model
#
# One line. The first forward in training mode measures every stage and computes the schedule; the
# steps after that follow it.

# %%
limit = plain_peak // 2
limited = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
losses = train(limited)
plain_losses = train(plain)
print("limit        ", f"{limit / 1e6:.1f} MB")
print("losses, rotor", losses)
print("losses, plain", plain_losses)

# %% [markdown]
# The losses are not close, they are equal: the stages run the same kernels on the same numbers.
# So are gradients, parameters, and the running statistics of BatchNorm, which a careless
# recomputation would update twice.

# %%
same = all(
    torch.equal(a, b)
    for a, b in zip(limited.state_dict().values(), plain.state_dict().values(), strict=True)
)
print("parameters and buffers are bit-equal after three steps:", same)
assert same
assert losses == plain_losses

# %% [markdown]
# Did it keep the limit? `report()` has what was predicted and what was measured.

# %%
limited.report()

# %% [markdown]
# Without `mem_limit` rotor takes 90 % of what the device has free. That is what you want when the
# model has the device for itself.
#
# ## Measuring
#
# Let us do by hand what the first forward did. `measure` runs every stage on a sample, one at a
# time, and notes times, sizes and temporaries. It leaves the model as it was.

# %%
chk = rotor.Checkpointable(copy.deepcopy(model))
chk.measure(images)
chain = chk.build_chain()
for name, seconds, kept in zip(chk.names, chain.forward_time, chain.xbar_bytes, strict=True):
    print(f"stage {name:>10}: forward {seconds * 1e3:6.2f} ms, keeps {kept / 1e6:5.2f} MB")

# %% [markdown]
# Each block keeps several times its output. The last stages keep next to nothing. A stage here
# may be two modules: `Flatten` only views its input, so it was merged with its neighbour.
#
# ## Optimising
#
# Now every limit can be answered. `curve()` solves them all at once.

# %%
curve = chk.curve()
_, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
curve.plot(ax)
ax.axvline(plain_peak / 2**20, color="grey", linestyle=":", label="plain PyTorch")
ax.axvline(limit / 2**20, color="tab:red", linestyle="--", label="our limit")
_ = ax.legend()

# %%
fastest = curve.seconds[-1]
print(f"least memory that any schedule needs: {curve.minimum_bytes / 1e6:.1f} MB")
for share in (0.9, 0.7, 0.5, 0.4):
    slower = curve.at(int(plain_peak * share)) / fastest - 1
    print(f"at {share:.0%} of the plain peak: {slower:+.1%} time")

# %% [markdown]
# The left end of the curve is not zero: while one stage's backward runs, its input, what it keeps
# and its gradients must be there together. No schedule changes that; smaller stages or a smaller
# batch do.
#
# A limit below it is an error before anything runs, and the error says what would do:

# %%
try:
    chk.compute_sequence(mem_limit="500 KB")
except rotor.InfeasibleError as error:
    print(error)

# %% [markdown]
# ## Sequences
#
# A schedule is a list of operations.
#
# | operation | |
# |---|---|
# | `Fe_i` | runs stage i and keeps **e**verything that its backward needs |
# | `Fck_i` | runs stage i and keeps only its input, a **c**hec**k**point |
# | `Fn_i` | runs stage i and keeps **n**othing |
# | `L` | the loss |
# | `B_i` | the backward of stage i |

# %%
sequence = chk.compute_sequence(mem_limit=limit)
print(sequence)
print(f"{sequence.makespan * 1e3:.1f} ms a step, without recomputation {fastest * 1e3:.1f} ms")
print("forwards of each stage:", sequence.count_forwards())

# %% [markdown]
# As a picture: time to the right, stages upwards. A stage that appears twice in blue is computed
# again.


# %%
def draw(sequence, ax):
    colours = {"Fn": "#9ec5e8", "Fck": "#4477aa", "Fe": "#1b3a5c", "B": "#ee6677", "L": "black"}
    seen = set()
    for when, op in enumerate(sequence):
        label = None if op.kind in seen else op.kind
        seen.add(op.kind)
        ax.bar(when, 0.8, bottom=op.stage - 0.4, width=0.9, color=colours[op.kind], label=label)
    ax.set_xlabel("operation")
    ax.set_ylabel("stage")
    ax.legend(ncols=5, fontsize="small", loc="upper right")


_, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
draw(sequence, above)
below.fill_between(
    range(len(sequence)), sequence.timeline.peak_bytes / 2**20, step="mid", alpha=0.4
)
below.set_ylabel("live bytes (MiB)")
below.set_xlabel("operation")
_ = above.set_xlabel("")

# %% [markdown]
# The lower picture has what is live while each operation runs, by the same simulator that the
# solver is held to. The forward fills memory only up to a level from which the backward can work;
# then it is emptied and filled again.
#
# Another algorithm is another argument. All of them answer under the same rules
# ([algorithms](../docs/algorithms/index.md)):

# %%
for name in ("persistent", "chen_sqrt", "griewank"):
    algorithm = rotor.algorithms.get(name)
    try:
        found = chk.compute_sequence(mem_limit=limit, algo=algorithm)
        print(f"{name:>10}: {found.makespan * 1e3:6.1f} ms")
    except rotor.InfeasibleError as error:
        print(f"{name:>10}: needs {error.minimum_bytes / 1e6:.1f} MB")

# %% [markdown]
# ## In place
#
# `nn.ReLU(inplace=True)` destroys its input. A schedule that wants to start again from that input
# could not. rotor sees it when it measures, and merges such a stage with the one before it:

# %%
inplace = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(inplace=True),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.ReLU(inplace=True),
)
merged = rotor.Checkpointable(inplace)
print("before:", merged.names)
merged.measure(images)
print("after: ", merged.names)

# %% [markdown]
# One case is refused, because nothing stands before it: a *first* stage that changes the batch
# itself.

# %%
try:
    rotor.Checkpointable(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3))).measure(images)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Sequentials of Sequentials
#
# Sequentials inside of a Sequential are explored, so that their children are stages too. More
# stages are more choice.

# %%
nested = nn.Sequential(
    net.stem,
    nn.Sequential(*net.blocks[:3]),
    nn.Sequential(*net.blocks[3:]),
    nn.Sequential(net.pool, nn.Flatten(), net.head),
)
print(rotor.Checkpointable(nested).names)

# %% [markdown]
# To have one stage, write a subclass with a `forward` of its own, or wrap it in any other module.
# The keys of the `state_dict` are those of the plain model, so files from before can be loaded:

# %%
print(list(limited.state_dict())[:3])
print("the same keys as without rotor:", list(limited.state_dict()) == list(model.state_dict()))

# %% [markdown]
# ## The loss
#
# The loss is computed outside of the model, so before the first step nobody knows what it needs.
# rotor sets memory aside, meters the first planned step, and plans again if it has to: the limit
# holds from the second step on. Hand the loss in, and it is part of the plan from the first one
# on:

# %%
with_loss = rotor.Checkpointable(
    copy.deepcopy(model), mem_limit=limit, loss_fn=nn.functional.cross_entropy
)
loss = with_loss(images, targets=(labels,))
loss.backward()
print(with_loss.report())

# %% [markdown]
# Next: [any model](02_any_model.ipynb), without Sequential.
