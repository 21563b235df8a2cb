# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # More in the same memory
#
# A GPT trains with batch 8, and there is no memory for more. With one line it trains with batch 24
# in the same bytes, and the gradients are the same. This notebook runs on a CPU in a minute; the
# bytes of a GPU are counted in the same way.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import rotor

torch.manual_seed(0)
torch.set_num_threads(1)
model = rotor.gpt.gpt2(layers=8, width=96, heads=4, vocab_size=500, context_length=96, dropout=0.0)
tokens = torch.randint(500, (24, 97))

# %% [markdown]
# ## Batch 8 fits
#
# How much memory does a step take? PyTorch's allocator knows, and `rotor.memory.meter` asks it.
# Let the answer for batch 8 be all the memory that we have.

# %%
with rotor.memory.meter("cpu") as meter:
    logits = model(tokens[:8, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:8, 1:].flatten()).backward()
limit = meter.peak_bytes
print(f"plain PyTorch, batch 8: {limit / 2**20:.0f} MiB")

# %% [markdown]
# ## Batch 24 does not

# %%
plain = copy.deepcopy(model)
plain.zero_grad()
with rotor.memory.meter("cpu") as meter:
    logits = plain(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
print(f"plain PyTorch, batch 24: {meter.peak_bytes / 2**20:.0f} MiB, loss {loss.item():.6f}")

# %% [markdown]
# ## With rotor it does
#
# One line gives the model the limit. The first step measures the model and plans: some activations
# are kept, the others are dropped and computed again in the backward, as few as the limit allows.

# %%
model.zero_grad()
limited = rotor.Checkpointable(model, mem_limit=limit)
for _ in range(3):
    limited.zero_grad()
    logits = limited(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
print(f"rotor, batch 24: {limited.plan.measured_bytes / 2**20:.0f} MiB, loss {loss.item():.6f}")

# %% [markdown]
# The live bytes of that step: up to the limit, then along it.

# %%
_, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
limited.plot_timeline(ax)
ax.axhline(meter.peak_bytes / 2**20, color="grey", linestyle=":", label="plain PyTorch, batch 24")
_ = ax.legend()

# %% [markdown]
# ## What did it cost?
#
# The report has the time of what is computed again, and the gradients equal those of the plain
# step.

# %%
worst = max(
    float((p.grad - q.grad).abs().max() / q.grad.abs().max())
    for p, q in zip(limited.parameters(), plain.parameters(), strict=True)
)
print(f"largest relative difference of a gradient: {worst:.1e}")
assert worst < 1e-5
assert limited.plan.measured_bytes <= limit
limited.report()

# %% [markdown]
# Next: [your own model](01_first_steps.ipynb).
