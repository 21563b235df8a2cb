"""The published simulator's evaluation from a fresh install: shipped logs, one command for all."""

from __future__ import annotations

import json
import pickle

import pytest

from rotor import experiments, simrd
from rotor.chain import check_header, read_json
from rotor.commands.main import main
from rotor.experiments import adversarial, linear, static, sweeps
from rotor.experiments.output import VERSION, find_logs

LOGS = sorted(experiments.shipped_logs().glob("*.log.gz"))
MOST_BYTES = 300_000
FIGURES = [
    *("ablation_eqclass", "ablation_full_e", "ablation_local", "ablation_none", "accesses"),
    *("adversarial", "banishing", "linear", "linear_heat", "pareto", "static"),
]


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["experiment", *arguments])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder: commands without arguments write below it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_logs_are_few_bytes_of_many_operations():
    assert len(LOGS) >= 6
    assert sum(path.stat().st_size for path in LOGS) < MOST_BYTES
    found = find_logs([experiments.shipped_logs()])
    assert [log.path for log in found] == LOGS
    titles = {log.title for log in found}
    assert {"ResNet-32", "DenseNet-100", "U-Net", "LSTM", "TreeLSTM", "Unrolled GAN"} <= titles


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_shipped_log_is_a_program_worth_simulating(path):
    log = simrd.parse(path)
    base = log.baseline
    assert log.ignored_releases == 0
    assert any("backward" in log.operation_name(k) for k in range(log.operation_count))
    assert base.const_memory < base.max_memory / 4
    assert base.bottleneck_memory < base.max_memory / 2
    whole, part = (simrd.simulate(log, "DTR", ratio=ratio) for ratio in (1.0, 0.8))
    assert whole.status == part.status == "ok"
    assert whole.slowdown < 1.02
    assert 1 < part.slowdown < 1.2
    assert part.n_remat > 0


def test_pareto_needs_no_argument(folder, capsys):
    code, text, _ = command(capsys, "pareto")
    assert code == 0
    assert "ResNet-32" in text
    data = read_json(folder / "results/data/pareto.json")
    results = check_header(data, "rotor.experiment.pareto", VERSION)["results"]
    assert len(results) == len(LOGS)
    assert (folder / "results/graph/pareto.pdf").read_bytes().startswith(b"%PDF")


def test_all_makes_every_figure_with_one_command(folder, capsys, monkeypatch):
    log = str(experiments.shipped_logs() / "perceptron.log.gz")
    small = ["--logs", log, "--ratios", "0.8", "1", "--trials", "1", "--checkmate-seconds", "0"]
    arguments = ["all", "--out", "figures", *small]
    code, text, _ = command(capsys, *arguments, "--formats", "svg")
    assert code == 0
    drawn = sorted(path.name for path in (folder / "figures/graph").iterdir())
    assert drawn == [f"{name}.svg" for name in FIGURES]
    for name in experiments.names():
        data = read_json(folder / f"figures/data/{name}.json")
        assert check_header(data, f"rotor.experiment.{name}", VERSION)["results"]
        assert (folder / f"figures/summary/{name}.txt").read_text().strip() in text

    # Again, and nothing runs but what writes files.
    data = folder / "figures/data"
    files = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    for module in (adversarial, linear, static, sweeps):
        monkeypatch.setattr(module, "simulate", None, raising=False)
    code, text, _ = command(capsys, *arguments, "--formats", "--json")
    assert code == 0
    assert list(json.loads(text)["results"]) == experiments.names()
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == files


def test_settings_that_no_experiment_has_are_refused(folder):
    with pytest.raises(TypeError, match="no experiment has a setting 'ratio'"):
        list(experiments.run_all(folder, ratio=(0.5,)))


def test_without_matplotlib_there_are_tables(folder, capsys, monkeypatch):
    monkeypatch.setattr("rotor.commands.experiment.find_spec", lambda name: None)
    logs = ["--logs", str(experiments.shipped_logs() / "perceptron.log.gz"), "--trials", "1"]
    code, text, err = command(capsys, "pareto", *logs)
    assert (code, "DTR" in text) == (0, True)
    assert (
        err
        == "rotor: no figures are drawn, since matplotlib is not installed; tables are written\n"
    )
    assert (folder / "results/summary/pareto.txt").is_file()
    assert not (folder / "results/graph").exists()


def test_lists_of_logs_are_read(folder):
    """The simulator's own manifest, and the prototype's list by model."""
    path = experiments.shipped_logs() / "perceptron.log.gz"
    copied = folder / "one.log.gz"
    copied.write_bytes(path.read_bytes())
    entry = {"name": "a", "title": "A title", "desc": "", "has_start": False}
    for data in (
        {"models": [{**entry, "log": "one.log.gz"}]},
        {"treelstm": [{**entry, "log": "/somewhere/else/one.log.gz"}], "lstm": []},
    ):
        (folder / "sim_conf.json").write_text(json.dumps(data))
        (log,) = find_logs([folder / "sim_conf.json"])
        assert (log.path, log.title) == (copied, "A title")
    (folder / "sim_conf.json").write_text(json.dumps({"models": [{**entry, "log": "two.log"}]}))
    with pytest.raises(FileNotFoundError, match=r"no log .*two\.log, which .* lists"):
        find_logs([folder / "sim_conf.json"])
    for data in ({"treelstm": 3}, [], {"models": [{"title": "A"}]}):
        (folder / "sim_conf.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"sim_conf\.json is malformed"):
            find_logs([folder / "sim_conf.json"])


def test_a_shipped_log_is_simulated_by_its_name(folder, capsys):
    assert main(["simulate", "unet", "--heuristic", "DTR", "--ratio", "0.9"]) == 0
    assert capsys.readouterr().out.startswith("unet: 856 commands, 306 operations")
    assert main(["simulate", "nothing", "--ratio", "0.9"]) == 2
    assert capsys.readouterr().err.endswith("nothing: No such file or directory\n")
    (folder / "unet").write_text("{}")
    assert main(["simulate", "unet", "--ratio", "0.9"]) == 2


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_shipped_log_is_read_by_its_name(path, folder):
    name = path.name.removesuffix(".log.gz")
    log = simrd.parse(name)
    assert (log.name, log.path) == (name, path)
    assert pickle.loads(pickle.dumps(log)).command_count == log.command_count
    results = [simrd.simulate(source, ratio=0.9) for source in (name, log, str(path))]
    assert len({result.max_memory for result in results}) == 1
    with pytest.raises(FileNotFoundError):
        simrd.parse(folder / name)
    with pytest.raises(FileNotFoundError):
        simrd.parse(f"{name}x")


def test_what_ships_is_listed(capsys):
    code, text, _ = command(capsys, "list")
    assert code == 0
    first = [line.split()[0] for line in text.splitlines() if line]
    assert {"all", "pareto", *(path.name for path in LOGS)} <= set(first)
    assert str(experiments.shipped_logs()) in text
