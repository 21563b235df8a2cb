"""Scripts that fail in the memory of their process: the line that is advised ends the failure."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import library
from card_scripts import SCRIPTS, environment

from rotor.units import parse_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are Linux's")

ROOT = Path(__file__).parents[2]


def run(folder, *command, limit_kib=0, path=None, steps=3, card_bytes=None):
    def cap():
        if limit_kib:
            resource.setrlimit(resource.RLIMIT_AS, (limit_kib << 10, limit_kib << 10))

    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(steps, card_bytes) | ({} if path is None else {"PYTHONPATH": str(path)}),
        preexec_fn=cap,
    )


def bits(text):
    """Return the losses that a script has printed."""
    return re.findall(r"-?0x1\.\w+", text)


def with_line(text, number, line):
    """Return a script with a line of rotor after the line of this number."""
    lines = text.splitlines()
    indent = re.match(" *", lines[number - 1])[0]
    lines[number:number] = [f"{indent}import rotor", indent + line]
    return "\n".join(lines)


def advised(folder, **options):
    """Have a script fail under ``rotor run``; return where the advised line belongs, and it."""
    told = run(folder, "-m", "rotor", "run", "train.py", **options)
    assert told.returncode == 1, told.stderr
    said = re.search(r"add this line after line (\d+) of train.py\n {4}(.*)\n", told.stderr)
    assert said is not None, told.stderr
    return int(said[1]), said[2]


def cure(folder, name, share, path=None):
    """Have a script fail in a share of its memory, and train with the line that is advised."""
    (folder / "train.py").write_text(SCRIPTS[name], encoding="utf-8")
    plain = run(folder, "train.py")
    peak_kib = int(re.search(r"VmPeak:\s+(\d+) kB", plain.stderr)[1])
    limit_kib = int(peak_kib * share)
    place = advised(folder, limit_kib=limit_kib, path=path)
    (folder / "added.py").write_text(with_line(SCRIPTS[name], *place), encoding="utf-8")
    cured = run(folder, "added.py", limit_kib=limit_kib, path=path)
    assert cured.returncode == 0, cured.stderr
    assert bits(cured.stdout) == bits(plain.stdout) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_advised_line_ends_the_failure(tmp_path, name):
    cure(tmp_path, name, 0.88)


REPORT = "import atexit, sys; atexit.register(lambda m=kept: print(m.report(), file=sys.stderr))"


def parts_of(report):
    """Return the parts of the sum in a report, bytes by name."""
    line = next(line for line in report.splitlines() if "for a step" in line)
    words = [part.split(" ", 2) for part in line.partition(" = ")[2].split(" + ")]
    return {name: parse_bytes(f"{number}{unit}") for number, unit, name in words}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_forty_steps_fit_on_a_card_that_plain_training_overfills(tmp_path, name):
    """With no limit, with a total in bytes, and with the advised line, whose sum is counted."""
    library()
    (tmp_path / "train.py").write_text(SCRIPTS[name], encoding="utf-8")
    plain = run(tmp_path, "train.py", steps=2, card_bytes=1 << 40)
    assert plain.returncode == 0, plain.stderr
    card = int(re.search(r"peak (\d+)", plain.stderr)[1]) * 4 // 5
    number, line = advised(tmp_path, steps=40, card_bytes=card)
    kept = f"{line}; {REPORT}".replace(" = ", " = kept = ", 1)
    assert 'total_limit="card"' in line
    lines = {
        line.replace(', total_limit="card"', ""): card,
        line.replace('"card"', str(card)): 2 * card,
        kept: card,
    }
    for added, device_bytes in lines.items():
        text = with_line(SCRIPTS[name], number, added)
        (tmp_path / "added.py").write_text(text, encoding="utf-8")
        done = run(tmp_path, "added.py", steps=40, card_bytes=device_bytes)
        assert done.returncode == 0, done.stderr
        assert len(bits(done.stdout)) == 40
        assert bits(done.stdout)[:2] == bits(plain.stdout)
        assert int(re.search(r"peak (\d+)", done.stderr)[1]) <= card
    parts = parts_of(done.stderr)
    assert abs(sum(parts.values()) - card) <= card // 100
    own = sum(parts.values()) - parts["slack"] - parts["for a step"] - parts.get("gradients", 0)
    assert abs(own - int(re.search(r"counted (\d+)", done.stderr)[1])) <= card // 100


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
