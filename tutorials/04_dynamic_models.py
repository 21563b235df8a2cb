# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dynamic models
#
# Some models have no graph: how often a loop runs, which cell is next, what tree is walked
# depends on the data. Nothing can be planned for them. But one can decide *while the program
# runs*: when memory gets short, results that can be computed again lose their bytes, and come
# back when somebody reads them. That is dynamic tensor rematerialization, DTR (Kirisame et al.,
# ICLR 2021), here on plain PyTorch tensors.

# %%
import random

import matplotlib.pyplot as plt
import torch
from torch import nn

import rotor

torch.set_num_threads(1)

# %% [markdown]
# ## A model over random trees
#
# A sentence is a tree, and every batch has another one. The network follows it.


# %%
class TreeNet(nn.Module):
    def __init__(self, width=64, classes=5):
        super().__init__()
        self.leaf = nn.Linear(16, width)
        self.gates, self.join = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def node(self, tree):
        if torch.is_tensor(tree):
            return torch.tanh(self.leaf(tree))
        both = torch.cat([self.node(child) for child in tree], -1)
        keep, take = self.gates(both).sigmoid().chunk(2, -1)
        return keep * torch.tanh(self.join(both)) + take * both[:, : keep.shape[1]]

    def forward(self, tree):
        return self.head(self.node(tree))


def random_tree(leaves, rng):
    if leaves == 1:
        return torch.randn(64, 16)
    left = rng.randint(1, leaves - 1)
    return random_tree(left, rng), random_tree(leaves - left, rng)


rng = random.Random(0)
torch.manual_seed(0)
batches = [(random_tree(24, rng), torch.randint(5, (64,))) for _ in range(3)]


def train(model, optimizer):
    losses = []
    for tree, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tree), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh():
    torch.manual_seed(1)
    model = TreeNet()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


# %% [markdown]
# Plain training, with its peak above the level at the start:

# %%
model, optimizer = fresh()
with rotor.memory.meter("cpu") as meter:
    plain_losses = train(model, optimizer)
plain_peak = meter.peak_bytes
plain_state = {name: value.clone() for name, value in model.state_dict().items()}
print(f"{plain_peak / 1e6:.2f} MB, losses {plain_losses}")

# %% [markdown]
# ## Within a budget
#
# The whole loop goes into a `with`: forward, backward and optimizer. Adam's state is made inside,
# so it counts too.

# %%
model, optimizer = fresh()
limit = plain_peak * 6 // 10
with rotor.memory.meter("cpu") as meter, rotor.dtr.budget(limit) as session:
    losses = train(model, optimizer)

stats = session.stats
print(f"budget {limit / 1e6:.2f} MB, peak by the allocator {meter.peak_bytes / 1e6:.2f} MB")
print("equal losses:    ", losses == plain_losses)
print(
    "equal parameters:",
    all(torch.equal(plain_state[name], value) for name, value in model.state_dict().items()),
)
print(f"{stats.operations} operators, {stats.evictions} evictions,", end=" ")
print(f"{stats.rematerializations} operators ran again")
assert meter.peak_bytes <= limit

# %% [markdown]
# ## The price of memory
#
# The same at several budgets. Time in operators that ran again over time in operators of the
# program is the price, without what the runtime itself costs for each operator.

# %%
shares, extra, again = [], [], []
for percent in range(100, 20, -10):
    model, optimizer = fresh()
    try:
        with rotor.dtr.budget(plain_peak * percent // 100) as session:
            train(model, optimizer)
    except rotor.dtr.BudgetError as error:
        print(f"{percent} %: {error}")
        break
    stats = session.stats
    shares.append(percent)
    extra.append(1 + stats.remat_ns / stats.base_ns)
    again.append(stats.rematerializations)

_, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(shares, extra, marker="o")
left.set(xlabel="budget (% of the plain peak)", ylabel="time in operators, relative")
right.plot(shares, again, marker="o", color="tab:orange")
right.set(xlabel="budget (% of the plain peak)", ylabel="operators run again")
for ax in (left, right):
    ax.invert_xaxis()

# %% [markdown]
# Below some budget it cannot go on: an operator, its inputs and what must stay are too much. That
# is an error *before* the operator, which says how much is missing.
#
# ## What is evicted, and when
#
# A session tells an observer of everything it does (`rotor.dtr.Observer`). Ours notes when each
# storage was made, and when it lost its bytes.


# %%
class Watch:
    def __init__(self):
        self.now, self.made, self.evictions = 0, {}, []

    def operation(self, name, cost_ns, inputs, outputs, written, is_recorded):
        self.now += 1
        self.made |= dict.fromkeys([number for number, _ in outputs], self.now)

    def evicted(self, node):
        if node in self.made:
            self.evictions.append((self.now, self.made[node]))

    def constant(self, node, nbytes): ...

    def released(self, node): ...

    def pinned(self, node): ...


watch = Watch()
model, optimizer = fresh()
with rotor.dtr.budget(limit, record_log=watch):
    train(model, optimizer)

_, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ax.scatter(*zip(*watch.evictions, strict=True), s=6)
ax.plot([0, watch.now], [0, watch.now], color="grey", linewidth=0.8)
ax.set(xlabel="evicted at operator", ylabel="made by operator")
print(f"{len(watch.evictions)} evictions in {watch.now} operators")

# %% [markdown]
# Three steps, three groups, each around the end of a forward, where most is live. Points near the
# line were evicted soon after they were made, those below it had waited. What the backward makes
# is not evicted: gradients of parameters stay, and the others are read at once.
#
# ## Which one to evict?
#
# The heuristic decides. `DTREqClass`, the default, divides what it would cost to bring a storage
# back - with the evicted ones around it - by its size and by how long nobody has touched it.
# Others look at less:

# %%
for heuristic in ("DTREqClass", "DTR", "LRU", "LargestStorage", "RandomStorage"):
    model, optimizer = fresh()
    with rotor.dtr.budget(plain_peak // 2, heuristic=heuristic, strict=False) as session:
        train(model, optimizer)
    stats = session.stats
    print(f"{heuristic:>15}: {stats.rematerializations:5d} operators again", end=", ")
    print(f"{stats.remat_ns / 1e6:6.2f} ms in them, {stats.search_ns / 1e6:6.2f} ms choosing")

# %% [markdown]
# A heuristic that suits a program badly makes it *thrash*: what was brought back is evicted again
# before it was of use. A `MemoryLimitWarning` says so, and the runtime then holds on to what came
# back most often. How the heuristics fare on other programs and budgets can be asked of the
# [simulator](05_simulator_and_experiments.ipynb), without running the model again.
#
# ## Reads that no operator makes
#
# `tensor.numpy()` and `print` read memory behind PyTorch's back. A guard brings an evicted tensor
# back first, so that nobody ever sees garbage:

# %%
x = torch.randn(1000, 100)
with rotor.dtr.budget("1200 KB") as session:
    values = [x.exp()]
    for _ in range(5):
        values.append(values[-1].sin())
    evicted = session.stats.evictions
    first = values[0].numpy()
    del values
print(f"{evicted} evicted; the first is what it was: {(first == x.exp().numpy()).all()}")

# %% [markdown]
# ## A model with a limit
#
# `rotor.dtr.budget` limits a program. To limit the steps of one model, wrap it: the limit is then
# that of every engine, one step above the level at its start. The training loop is the one from
# above.

# %%
model, _ = fresh()
limited = rotor.Checkpointable(model, mem_limit=plain_peak * 7 // 10, engine="dynamic")
losses = train(limited, torch.optim.Adam(limited.parameters(), lr=1e-3))
print("equal losses:", losses == plain_losses)
print(limited.report())
print(limited.display())

# %% [markdown]
# Without `engine=` rotor tries to capture a graph first, then the largest parts that can be
# captured, and comes here last, each time with a warning that has the reason. Memory that was
# planned is cheaper than memory that is decided on the spot: nothing has to be looked up while
# the step runs.
#
# [Any eager program](../docs/dynamic.md) has the rules, and what cannot be promised: other
# threads, and extensions that read memory off PyTorch's dispatcher.
#
# Next: [the simulator](05_simulator_and_experiments.ipynb).
