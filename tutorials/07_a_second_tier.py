# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A second tier of memory
#
# A limit leaves three choices for each value that the backward reads: keep it, compute it again,
# or write it somewhere else and fetch it back. Here the other place is this machine's disk; on a
# GPU it is the memory of the host, `offload="host"`. The plan chooses for all values together.
#
# The script below gives itself 600 MiB and trains a model whose step needs more. The kernel
# enforces that, as after `ulimit -d`: a process that asks for more gets nothing. The heap of a C
# library keeps large blocks that were freed; two settings of glibc have it give them back at once.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

folder = Path(tempfile.mkdtemp())
script = folder / "train.py"
script.write_text("""
import json
import resource
import sys
import time

import torch
from torch import nn

import rotor

torch.set_num_threads(1)
torch.manual_seed(0)
how, room_mib, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(24)), nn.Linear(64, 8))

if room_mib:                                     # from here on, the kernel gives no more than that
    with open("/proc/self/status") as status:
        data = int(status.read().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + room_mib * 2**20,) * 2)

if how == "recompute":
    model = rotor.Checkpointable(model, mem_limit="200MiB", engine="graph", verbosity=-1)
if how == "disk":
    model = rotor.Checkpointable(model, mem_limit="200MiB", offload="disk", verbosity=-1)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draws = torch.Generator().manual_seed(1)
losses, seconds = [], []
for step in range(steps):
    x = torch.randn(16384, 16, generator=draws)
    labels = torch.randint(8, (16384,), generator=draws)
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - began)
report = "" if how == "plain" else str(model.report())
json.dump({"losses": losses, "seconds": seconds, "report": report}, sys.stdout)
""")


def train(how, room_mib=600, steps=10):
    """What a run printed; None if it did not survive."""
    command = [sys.executable, str(script), how, str(room_mib), str(steps)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        print(f"{how}:", done.stderr.strip().splitlines()[-1])
        return None
    return json.loads(done.stdout.splitlines()[-1])


# %% [markdown]
# ## Plain PyTorch does not survive

# %%
assert train("plain") is None
free = train("plain", room_mib=0)  # without a limit, to compare with
print("without a limit:", [round(loss, 4) for loss in free["losses"][:4]], "...")

# %% [markdown]
# ## One argument more
#
# With `offload="disk"` the step takes 200 MiB. Its file has no name and lies in `$TMPDIR`, else in
# `/var/tmp`; `offload="disk:/folder"` chooses. It is written and read past the page cache, so that
# the bytes leave memory, and they go with the process.

# %%
disk = train("disk")
assert disk["losses"] == free["losses"]  # bit for bit
print(disk["report"])

# %% [markdown]
# The peak is the predicted one whatever the disk does: the order of operations and moves decides
# about it, not their speed. A slow disk costs time, and metered steps teach the plan how slow it
# is. Disks wear out, so the report says what a day of such steps writes.
#
# ## Recomputation alone
#
# The same limit without a second tier, and both runs without the kernel's limit, so that only the
# times differ:

# %%
again = train("recompute", room_mib=0)
disk = train("disk", room_mib=0)
assert again["losses"] == disk["losses"] == free["losses"]
for name, run in (("plain, no limit", free), ("disk", disk), ("recompute", again)):
    late = sorted(run["seconds"][5:])
    print(f"{name:16} {late[len(late) // 2]:.2f} s a step")

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, run in (("plain, no limit", free), ("disk", disk), ("recompute", again)):
    axes.plot(run["seconds"], marker="o", label=name)
axes.set(xlabel="step", ylabel="seconds", yscale="log", title="the first steps plan")
_ = axes.legend()

# %% [markdown]
# Which is faster depends on the disk, the processor, and the limit. `report()` has the predicted
# times, and the plan takes what they favour: with a slow disk it computes again, and with a fast
# one it moves. [When a second tier is worth it](../docs/offload.md) has figures.
