"""A training whose process takes no more memory than it has at its beginning, and a margin.

Run as a script: ``limited_process.py KIND MARGIN_MIB FOLDER STEPS``, KIND one of plain, tier. It
prints the losses; MARGIN_MIB 0 sets no margin.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import nn

import rotor

WIDTH, ROWS, DEPTH = 512, 4096, 24


class Net(nn.Module):
    """Cheap layers with large activations, 8 MiB for each result."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) * 1.1 for _ in range(DEPTH))
        self.mixing = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale) + x
        return self.mixing(x)


def address_space() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmSize:")[1].split()[0])


def main(kind: str, margin_mib: str, folder: str, steps: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    call = model
    if kind == "tier":
        call = rotor.Checkpointable(
            model,
            mem_limit="120 MiB",
            engine="graph",
            offload=f"disk:{folder}",
            loss_fn=nn.functional.mse_loss,
            effort="fast",
            verbosity=0,
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        x = torch.randn(ROWS, WIDTH, generator=generator)
        target = x[:, :16].sin()
        optimizer.zero_grad(set_to_none=True)
        if kind == "tier":
            loss = call(x, targets=(target,))
        else:
            loss = nn.functional.mse_loss(call(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    if int(margin_mib):
        # Libraries are loaded by a first small step.
        warm = nn.Linear(4, 4)
        (torch.compile(warm, backend="aot_eager")(torch.randn(2, 4))).sum().backward()
        most = address_space() + (int(margin_mib) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for _ in range(int(steps)):
        losses.append(step())
    if kind == "tier" and call.plan.program.offloaded_bytes == 0:
        raise AssertionError("nothing was offloaded")
    print(losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
