"""What an installed rotor must do; run as a script, outside of the source tree.

`python tests/installed.py [FOLDER]` works through one feature of each part. With a folder, every
module must come from below it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import rotor
from rotor import _core, algorithms, experiments, graph, models, simrd
from rotor.simrd import networks


def main(folder: str | None) -> None:
    """Run them; fails at the first that does not work."""
    modules = (rotor, models, models.resnet, _core, algorithms, experiments, graph, simrd)
    if folder is not None:
        for module in modules:
            found = Path(module.__file__).resolve()
            assert found.is_relative_to(Path(folder).resolve()), found
    assert "models" not in sys.modules

    n = 6
    chain = rotor.Chain([1.0] * n, [2.0] * n, [10] * (n + 1), [30] * n, [0] * n, [0] * n)
    everything = algorithms.NoCheckpoint().curve(chain).minimum_bytes
    sequence = algorithms.Persistent().solve(chain, everything // 2)
    assert sequence.peak_bytes <= everything // 2
    assert sequence.makespan > chain.ideal_time

    result = simrd.simulate(networks.linear(64), "DTREqClass", ratio=0.25)
    assert result.status == "ok"
    logs = sorted(experiments.shipped_logs().glob("*.log.gz"))
    assert logs
    assert all(simrd.simulate(simrd.parse(log), ratio=1.0).status == "ok" for log in logs)

    torch.manual_seed(0)
    model = rotor.Checkpointable(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 4), "1 MB"
    )
    model(torch.randn(16, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert len(rotor.resnet.resnet18()) > 5
    for name in ("plan.html", "plan.json"):
        model.report(name)
        assert Path(name).stat().st_size > 1000
    with rotor.dtr.budget("1 MB"):
        (torch.randn(16, 4) * 2).sum().item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
