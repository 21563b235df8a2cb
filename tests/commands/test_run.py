"""Scripts that are run as they are: advice, limits, exit codes; batch sizes of a function."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import folder_with
from command_line import run as run_command
from torch import nn
from zoo.models import Row

import rotor
from rotor.algorithms.curve import Curve
from rotor.commands import script
from rotor.commands.main import main
from rotor.fit.advice import cheap_limit
from rotor.meter import allocator

SCRIPT = """
import argparse
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--fail-at", type=int, default=-1)
arguments = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(layer(x) * scale)
        return x


torch.manual_seed(0)
criterion = nn.MSELoss()
net, data = (Net(), torch.randn(512, 32))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with torch.no_grad():
    net(data)
print(__name__, sys.argv[1:], flush=True)
for step in range(arguments.steps):
    if step == arguments.fail_at:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    loss = criterion(net(data, scale=0.5), data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step} {loss.item():.9f}", flush=True)
sys.exit(4 if arguments.steps == 7 else 0)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with folder_with("train.py", SCRIPT, tmp_path, monkeypatch):
        yield


def run(capsys, *arguments):
    return run_command(capsys, "run", *arguments)


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [([4.0, 1.09, 1.0], 50), ([4.0, 1.2, 1.0], 50), ([4.0, 1.9, 1.0], 50), ([4.0, 3.0, 1.0], 10)],
)
def test_the_limit_in_the_advice_is_the_cheapest_that_saves_something(seconds, limit):
    assert cheap_limit(Curve([10, 50, 100], seconds)) == limit


def test_the_limit_in_the_advice_is_below_what_the_step_needs():
    """A chain that keeps more than plain PyTorch has a limit that saves nothing as its cheapest."""
    curve = Curve([60, 90, 140, 160], [1.5, 1.24, 1.08, 1.0])
    assert cheap_limit(curve) == 140
    assert cheap_limit(curve, 100) == 90
    assert cheap_limit(curve, 94) == 60
    assert cheap_limit(curve, 50) == 60


def test_a_script_runs_as_it_is(capsys):
    plain = subprocess.run(
        [sys.executable, "train.py", "--steps", "2"], capture_output=True, text=True, check=True
    )
    before, path = list(sys.argv), list(sys.path)
    call = nn.Module.__call__
    code, out, err = run(capsys, "train.py", "--steps", 2)
    assert (code, out, err) == (0, plain.stdout, "")
    assert (sys.argv, sys.path, nn.Module.__call__) == (before, path, call)
    assert run(capsys, "train.py", "--steps", 7)[0] == 4
    code, out, err = run(capsys, "train.py", "--bogus")
    assert (code, out) == (2, "")
    assert "train.py: error: unrecognized arguments: --bogus" in err


def test_watching_says_what_a_limit_costs_and_which_line_to_add(capsys):
    plain = run(capsys, "train.py")[1]
    code, out, err = run(capsys, "--watch", "--json", "advice.json", "train.py", "--steps", 3)
    assert code == 0
    assert out.splitlines()[1:] == plain.splitlines()[1:]
    said = re.search(
        r"this step needs (\S+ \S+) above the model; within (\S+) it costs ([+-]\d+)%: add this "
        r"line after line (\d+) of train.py\n    (.*)\n",
        err,
    )
    assert said is not None
    assert said[5] == f'net = rotor.Checkpointable(net, mem_limit="{said[2]}")'
    assert "net, data = " in SCRIPT.splitlines()[int(said[4]) - 1]
    assert f"rotor run --limit {said[2]} train.py --steps 3" in err
    data = json.loads(Path("advice.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"], data["command"]) == ("rotor.command", 1, "run")
    assert data["limit_bytes"] < data["needs_bytes"]
    assert data["line"] == said[5]
    # The line, added where it is said, trains in that many bytes.
    lines = SCRIPT.splitlines()
    lines.insert(int(said[4]), said[5] + "\nprint('wrapped')")
    text = "\n".join(lines).replace("import torch\n", "import rotor\nimport torch\n", 1)
    Path("added.py").write_text(text + "\nassert net.plan.measured_bytes", encoding="utf-8")
    code, out, err = run(capsys, "added.py")
    assert (code, "wrapped" in out) == (0, True), err
    losses = [line for line in out.splitlines() if line[0].isdigit()]
    assert losses == [line for line in plain.splitlines() if line[0].isdigit()]


def test_advice_is_for_the_autocast_of_the_script(capsys):
    text = SCRIPT.replace(
        "loss = criterion(net(data, scale=0.5), data)",
        """with torch.autocast("cpu", torch.bfloat16):
        output = net(data, scale=0.5)
    loss = criterion(output.float(), data)""",
    )
    Path("half.py").write_text(text, encoding="utf-8")
    peaks = []
    for name in ("train.py", "half.py"):
        code, _, err = run(capsys, "--json", "advice.json", name, "--fail-at", 1)
        assert code == 1, err
        data = json.loads(Path("advice.json").read_text(encoding="utf-8"))
        peaks.append(data["curve"]["bytes"][-1])
    assert peaks[1] < 0.7 * peaks[0]


def test_a_limit_is_kept_without_a_change_of_the_script(capsys):
    plain = run(capsys, "train.py")[1]
    code, out, err = run(capsys, "--json", "run.json", "--limit", "500KiB", "train.py")
    assert (code, out) == (0, plain)
    data = json.loads(Path("run.json").read_text(encoding="utf-8"))
    assert 0 < data["measured_bytes"] <= data["predicted_bytes"] <= data["limit_bytes"] == 512_000
    peak = re.search(r"the metered step peaked at (\S+) KiB of 500 KiB", err)
    assert peak is not None
    assert 0 < float(peak[1]) <= 500
    code, _, err = run(capsys, "--limit", "20KiB", "train.py")
    assert code == 2
    assert "error: no plan was found that fits in 20 KiB (20480 bytes)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--limit", "500KiB", "--offload", "host"), "HostTier does not reach the memory of cpu"),
        (("--limit", "500KiB", "--offload", "disk:/no/folder"), "/no/folder: No such file"),
        (("--total", "1KiB"), "Nothing is left for a step: 1 KiB = "),
    ],
)
def test_what_cannot_be_given_is_one_line(capsys, options, text):
    code, _, err = run(capsys, *options, "train.py")
    assert (code, "Traceback" in err) == (2, False)
    assert text in err


BACKWARD = """
import sys
import weakref
import torch

kept = []


def fail(grad):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class Net(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x).tanh()
        kept.append(weakref.ref(x))
        x.register_hook(fail)
        return {"x": x} if "mapping" in sys.argv else x


net = Net(8, 8)
output = net(torch.randn(4, 8))
value = output["x"] if "mapping" in sys.argv else output
loss = value.square().sum()
del value
loss.backward()
"""


@pytest.mark.parametrize("kind", ["tensor", "mapping"])
def test_a_step_that_failed_in_its_backward_is_freed_before_planning(
    kind, capsys, monkeypatch, tmp_path
):
    """A plan is made in the memory that the script's variables have kept from it."""
    (tmp_path / "backward.py").write_text(BACKWARD, encoding="utf-8")
    seen, inner = [], script.advise

    def advise(*arguments):
        kept = vars(sys.modules["__main__"])["kept"]
        seen.append([each() is None or each().grad_fn is None for each in kept])
        return inner(*arguments)

    monkeypatch.setattr(script, "advise", advise)
    code, _, err = run(capsys, str(tmp_path / "backward.py"), kind)
    assert code == 1
    assert "Traceback" not in err
    assert seen == [[True]]


def test_out_of_memory_is_answered(capsys, monkeypatch):
    monkeypatch.setattr(allocator, "free_bytes", lambda _: 600_000)
    code, out, err = run(capsys, "train.py", "--fail-at", 1)
    assert code == 1
    assert out.splitlines()[-1].startswith("0 ")
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "raise torch.Out" in text)
    assert re.search(rf"out of memory in .*train.py, line {line}: CUDA out of memory", err)
    # Of what is free, a sixteenth is slack.
    assert re.search(r" = .* \+ 36\.\d KiB slack \+ 549\.\d KiB for a step", err)
    assert re.search(r"this step needs .* above the model; within 549\.\d+KiB it costs \+\d+%", err)
    assert 'net = rotor.Checkpointable(net, total_limit="card")' in err
    assert "rotor run --total card train.py --fail-at 1" in err
    code, _, err = run(capsys, "train.py", "--fail-at", 0)
    assert (code, "no module was training before" in err) == (1, True)


@pytest.mark.parametrize("free_bytes", [64 << 20, 1 << 30])
def test_a_failed_step_whose_plan_fits_gets_the_line_too(capsys, monkeypatch, free_bytes):
    """Plain PyTorch has just not fitted: saying that the step fits would cure nothing."""
    monkeypatch.setattr(allocator, "free_bytes", lambda _: free_bytes)
    code, _, err = run(capsys, "train.py", "--fail-at", 1)
    assert code == 1
    assert re.search(r"this step needs .* within \d+MiB it costs \+0%: add this line", err)
    assert 'net = rotor.Checkpointable(net, total_limit="card")' in err


def test_errors_of_the_script_are_its_own(capsys):
    Path("wrong.py").write_text("import torch\n\n\ndef f():\n    return 1 / 0\n\n\nf()\n")
    code, _, err = run(capsys, "wrong.py")
    assert code == 1
    assert err.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "runpy" not in err
    assert "commands" not in err
    code, _, err = run(capsys, "none.py")
    assert (code, "no file none.py" in err) == (2, True)
    code, _, err = run(capsys, "--watch", "--limit", "1GiB", "train.py")
    assert (code, "give one of them" in err) == (2, True)
    Path("quiet.py").write_text("import torch\n", encoding="utf-8")
    assert "no module trained" in run(capsys, "--watch", "quiet.py")[2]
    assert "no module trained" in run(capsys, "--limit", "1MiB", "quiet.py")[2]
    Path("held.py").write_text(
        "import torch\nclass Trainer:\n    def __init__(self):\n"
        "        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())\n"
        "                  for _ in range(40)]\n"
        "        self.network = torch.nn.Sequential(*layers)\n"
        "    def fit(self):\n        self.network(torch.randn(4096, 8)).sum().backward()\n"
        "Trainer().fit()\n"
    )
    code, _, err = run(capsys, "--watch", "held.py")
    assert code == 0
    assert "self.network = rotor.Checkpointable(self.network, mem_limit=" in err
    assert "after line 6 of held.py" in err


@pytest.mark.parametrize("base", ["object", "torch.nn.Module"])
def test_a_module_within_another_gets_its_line_where_it_is_made(capsys, base):
    """Lightning's modules hold the network that their training_step calls, as a child."""
    Path("within.py").write_text(
        f"import torch\nclass Outer({base}):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())\n"
        "                  for _ in range(40)]\n"
        "        self.net = torch.nn.Sequential(*layers)\n"
        "    def step(self):\n        self.net(torch.randn(4096, 8)).sum().backward()\n"
        "Outer().step()\n"
    )
    code, _, err = run(capsys, "--watch", "within.py")
    assert code == 0
    assert "self.net = rotor.Checkpointable(self.net, mem_limit=" in err
    assert "after line 7 of within.py" in err


MADE = "torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())] * 40)"
STEP = "(torch.randn(4096, 8)).sum().backward()"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"def other():\n    m = None\nm: object = {MADE}\nm{STEP}\nm = 1", "line 4 of"),
        (
            f"def f(flag):\n  if flag:\n    m = {MADE}\n  else:\n    m = 1\n  m{STEP}\nf(1)",
            "line 6",
        ),
        (f"if True:\n  m = {MADE}\n  m{STEP}\n", "line 3 of"),
        (f"for m in [{MADE}]:\n  m{STEP}\n", "line 2 of"),
        (f"try:\n  m = {MADE}\nexcept OSError:\n  m = 1\nm{STEP}\ndef g(): m = 2", "line 5 of"),
        (f"if (m := {MADE}) is not None:\n  m{STEP}\n", "line 2 of"),
        (f"def f(m):\n  m{STEP}\nf({MADE})\n", "add this line at the beginning of f(), line 2 of"),
        (f"def f(m):\n  m{STEP}\nnet = {MADE}\nf(net)\n", "line 4 of"),
        (f"def f():\n  m{STEP}\nm = {MADE}\nf()\nm = 1", "line 4 of"),
    ],
)
def test_the_line_belongs_after_the_assignment_that_has_run(text, place, capsys):
    Path("places.py").write_text(f"import torch\n{text}\n", encoding="utf-8")
    code, _, err = run(capsys, "--watch", "places.py")
    assert code == 0
    assert f"{place} " in err.replace(" of places.py", " of places.py ")


def test_models_of_the_class_that_has_the_limit_have_it_too(capsys):
    Path("folds.py").write_text(
        "import torch\nimport rotor\npeaks = []\n"
        "class Net(torch.nn.Sequential):\n    pass\n"
        "class Other(torch.nn.Linear):\n    pass\n"
        f"for fold in range(3):\n    net = Net(*{MADE})\n    for step in range(3):\n"
        f"        net{STEP}\n"
        "    print(vars(net)['_rotor_planned'].model.plan.measured_bytes <= 2 << 20)\n"
        f"Other(8, 8){STEP}\n",
        encoding="utf-8",
    )
    code, out, err = run(capsys, "--limit", "2MiB", "folds.py")
    assert (code, out.split()) == (0, ["True"] * 3), err
    assert "the limit was for Net alone, not for Other" in err


def test_a_compiled_model_trains_within_the_limit(capsys):
    text = SCRIPT.replace("= (Net(),", "= (torch.compile(Net(), backend='eager'),")
    Path("compiled.py").write_text(text, encoding="utf-8")
    code, _, err = run(capsys, "--json", "run.json", "--limit", "500KiB", "compiled.py")
    assert code == 0, err
    data = json.loads(Path("run.json").read_text(encoding="utf-8"))
    assert 0 < data["measured_bytes"] <= data["limit_bytes"] == 512_000


@pytest.mark.parametrize("options", [["--watch"], ["--limit", "2MiB"]])
def test_a_script_that_limits_its_model_itself_is_left_to_it(options, capsys):
    text = f"import rotor\nimport torch\nnet = rotor.Checkpointable({MADE}, mem_limit='2MiB')\n"
    Path("own.py").write_text(f"{text}net{STEP}\n", encoding="utf-8")
    code, _, err = run(capsys, *options, "own.py")
    assert code == 0
    assert "Sequential trained within a limit of the script's own" in err
    assert "no module trained" not in err


def test_a_limit_by_which_no_step_ran_is_said(capsys):
    Path("replaces.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\nnet = Net(8, 8)\n"
        f"net.register_forward_pre_hook(lambda net, _: net.eval() and None)\nnet{STEP}",
        encoding="utf-8",
    )
    code, _, err = run(capsys, "--limit", "2MiB", "replaces.py")
    assert code == 0
    assert "the limit was not kept: no step of Net ran by a plan" in err


@pytest.mark.parametrize("end", ["sys.stderr.close()", "sys.stderr = None"])
@pytest.mark.parametrize("options", [["--watch"], ["--limit", "1MiB"]])
def test_a_script_may_close_stderr(end, options, monkeypatch):
    made = "net, data = (Net(), torch.randn(512, 32))"
    Path("closes.py").write_text(SCRIPT.replace(made, f"{made}\n{end}"), encoding="utf-8")
    command = [sys.executable, "-m", "rotor", "run", *options, "closes.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("options", [["--watch"], ["--limit", "640KiB"]])
def test_a_script_may_train_in_a_thread(options, capsys):
    begin, loop = SCRIPT.split("for step in ")
    lines = f"for step in {loop.split('sys.exit')[0]}".splitlines(keepends=True)
    text = f"{begin}\ndef train():\n    {'    '.join(lines)}\nimport threading\n"
    text += "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"
    Path("threads.py").write_text(text, encoding="utf-8")
    code, out, err = run(capsys, *options, "threads.py")
    plain = subprocess.run([sys.executable, "threads.py"], capture_output=True, text=True)
    assert (code, out) == (0, plain.stdout)
    said = "this step needs" if options == ["--watch"] else "the metered step peaked at"
    assert said in err
    assert "no module trained" not in err


@pytest.mark.parametrize("options", [["--watch"], ["--limit", "640KiB"]])
def test_files_are_those_of_the_folder_in_which_the_command_begins(options, capsys):
    begin, loop = SCRIPT.split("torch.manual_seed(0)")
    text = f"{begin}import os\nos.mkdir('sub')\nos.chdir('sub')\ntorch.manual_seed(0){loop}"
    Path("moves.py").write_text(text, encoding="utf-8")
    Path("values").mkdir()
    tier = [] if options == ["--watch"] else ["--offload", "disk:values", "--offload-state"]
    folder = Path.cwd()
    try:
        code, _, err = run(capsys, *options, *tier, "--json", "out.json", "moves.py")
    finally:
        os.chdir(folder)
    assert code == 0, err
    assert json.loads(Path("out.json").read_text(encoding="utf-8"))["script"] == "moves.py"


@pytest.mark.parametrize("name", ["not_there", "not_there.train", "json.not_there"])
def test_a_module_that_is_not_there_is_one_line(name, capsys):
    code, _, err = run(capsys, "-m", name)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "o module named" in err


def test_a_syntax_error_has_no_frames_of_ours(capsys):
    Path("wrong.py").write_text("x = 1\ndef\n", encoding="utf-8")
    plain = subprocess.run([sys.executable, "wrong.py"], capture_output=True, text=True)
    code, _, err = run(capsys, "wrong.py")
    assert code == plain.returncode == 1
    assert err.splitlines() == plain.stderr.splitlines()


def test_a_script_finds_itself_from_another_folder(capsys, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import os\nos.chdir('/')\nprint(os.path.isfile(__file__))")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "script.py"]) == 0
    assert capsys.readouterr().out == "True\n"


def test_modules_are_run_by_name(capsys, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "train.py").write_text(SCRIPT, encoding="utf-8")
    code, out, _ = run(capsys, "-m", "pack.train", "--steps", 1)
    assert (code, out.splitlines()[0]) == (0, "__main__ ['--steps', '1']")


def test_a_factory_in_a_script_names_the_cure(capsys):
    code = main(["curve", "train.py:Net", "--quiet"])
    err = capsys.readouterr().err
    assert code == 2
    assert "guard it with if __name__ == '__main__', or use rotor run train.py" in err


def plain():
    return Row(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_a_function_gets_the_batch_that_fits(kind):
    limit, sizes, peaks = 200_000, [], []

    @rotor.fit_batch_size(limit, starting_batch_size=2048, multiple_of=16)
    def train(batch_size, seed, *, steps):
        sizes.append(batch_size)
        torch.manual_seed(seed)
        model = plain() if kind == "plain" else rotor.Checkpointable(plain(), mem_limit=limit)
        x = torch.randn(batch_size, 32)
        model(x).sum().backward()
        for _ in range(steps):
            model.zero_grad()
            if kind == "wrapped":
                model(x).sum().backward()
                peaks.append(model.plan.most_bytes_seen)
                continue
            with rotor.memory.meter("cpu") as meter:
                model(x).sum().backward()
            peaks.append(meter.peak_bytes)
        return batch_size

    found = train(0, steps=2)
    assert found == sizes[-1]
    assert sizes[0] == 2048
    assert found % 16 == 0
    assert len(peaks) == 2
    assert max(peaks) <= limit
    assert max(peaks) > 0.5 * limit
    assert len(sizes) <= 8


def test_batch_sizes_that_cannot_be():
    @rotor.fit_batch_size("1 KB", starting_batch_size=8)
    def train(batch_size):
        plain()(torch.randn(batch_size, 32)).sum().backward()

    with pytest.raises(rotor.InfeasibleError, match="a batch of 1 does not fit in"):
        train()
    for given, words in (({"multiple_of": 0}, "multiple_of = 0"), ({"multiple_of": 999}, "below")):
        with pytest.raises(ValueError, match=words):
            rotor.fit_batch_size("1 GB", **given)

    @rotor.fit_batch_size("1 GB", starting_batch_size=8)
    def awaits(batch_size):
        if batch_size > 3:
            raise torch.OutOfMemoryError("out of memory")
        return batch_size

    assert awaits() == 2

    @rotor.fit_batch_size("1 GB")
    def fails(batch_size):
        raise ZeroDivisionError(batch_size)

    with pytest.raises(ZeroDivisionError, match="128"):
        fails()
