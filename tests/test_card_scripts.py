"""Scripts that fail in the memory of their process: the line that is advised ends the failure."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are Linux's")

ROOT = Path(__file__).parent.parent

MODEL = """
import sys
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


model = Net()
"""

STEPS = """
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(16384, 128)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""

LOOPS = {
    "adam": f"optimizer = torch.optim.AdamW(model.parameters())\n{STEPS}",
    "sgd": f"optimizer = torch.optim.SGD(model.parameters(), 0.01)\n{STEPS}",
    "accumulation": """
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    loss = model(torch.randn(16384, 128)).square().mean()
    loss.backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(loss.item().hex(), flush=True)
""",
    "averages": """
import copy

average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(16384, 128)).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, other in zip(average.parameters(), model.parameters()):
            mine.lerp_(other, 0.1)
    print(loss.item().hex(), flush=True)
""",
}

PEAK = """
print([line for line in open("/proc/self/status") if "VmPeak" in line][0], file=sys.stderr)
"""


def run(folder, *command, limit_kib=0, path=None):
    def cap():
        if limit_kib:
            resource.setrlimit(resource.RLIMIT_AS, (limit_kib << 10, limit_kib << 10))

    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | ({} if path is None else {"PYTHONPATH": str(path)}),
        preexec_fn=cap,
    )


def cure(folder, name, share, path=None):
    """Have a script fail in a share of its memory, and train with the line that is advised."""
    script = folder / "train.py"
    script.write_text(MODEL + LOOPS[name] + PEAK, encoding="utf-8")
    plain = run(folder, "train.py")
    peak_kib = int(re.search(r"VmPeak:\s+(\d+) kB", plain.stderr)[1])
    limit_kib = int(peak_kib * share)
    assert run(folder, "train.py", limit_kib=limit_kib).returncode == 1
    told = run(folder, "-m", "rotor", "run", "train.py", limit_kib=limit_kib, path=path)
    assert told.returncode == 1
    said = re.search(r"add this line after line (\d+) of train.py\n {4}(.*)\n", told.stderr)
    assert said is not None, told.stderr
    lines = script.read_text(encoding="utf-8").splitlines()
    lines.insert(int(said[1]), f"import rotor\n{said[2]}")
    (folder / "added.py").write_text("\n".join(lines), encoding="utf-8")
    cured = run(folder, "added.py", limit_kib=limit_kib, path=path)
    assert cured.returncode == 0, cured.stderr
    assert cured.stdout == plain.stdout


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.75, 0.9])
@pytest.mark.parametrize("name", LOOPS)
def test_the_advised_line_ends_the_failure(tmp_path, name, share):
    cure(tmp_path, name, share)


@pytest.mark.slow
def test_a_newcomer_gets_from_a_clone_to_training_within_a_limit(tmp_path):
    """Clone, install, run the first script of the README, and cure a script that fails."""
    if not (ROOT / ".git").exists():
        pytest.skip("this copy is no repository")
    clone, site, work = (tmp_path / name for name in ("clone", "site", "work"))
    work.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    installed = run(clone, "-m", "pip", "install", *options, ".")
    assert installed.returncode == 0, installed.stderr
    readme = (clone / "README.md").read_text(encoding="utf-8")
    first = readme.split("```python\n")[1].partition("```")[0]
    (work / "first.py").write_text(first, encoding="utf-8")
    done = run(work, "first.py", path=site)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"peak [\d.]+ MiB within 4 MiB, [\d.]+ MiB without recomp", done.stderr)
    assert re.search(r"operations run again +[1-9]", done.stdout)
    cure(work, "adam", 0.8, path=site)
