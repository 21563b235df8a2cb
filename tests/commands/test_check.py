"""``rotor check`` on the CPU; test_sim_check.py runs it on an accelerator."""

import json

import pytest

from rotor.commands import checking
from rotor.commands.main import main


def test_limits_are_held_on_the_cpu(tmp_path, capsys):
    """Train within limits, and say in text and in a file what was held."""
    target = tmp_path / "check.json"
    options = ["--models", "chain,reserved", "--size", "1", "--quiet", "--json", str(target)]
    code = main(["check", "--device", "cpu", *options])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "All limits were held on cpu." in out
    data = json.loads(target.read_text())
    assert (data["format"], data["command"], data["held"]) == ("rotor.command", "check", True)
    chain, reserved = data["cases"]
    assert chain["within"]
    assert chain["equal"]
    assert 0 < chain["measured_bytes"] <= chain["limit_bytes"] < chain["plain_bytes"]
    assert reserved["refused"] == "accelerators only"
    assert data["versions"]["torch"]


def test_a_limit_that_was_not_held(monkeypatch, capsys):
    """End with 1, and ask for the file, where a measured peak is above the limit."""
    case = dict.fromkeys(("plain_bytes", "predicted_bytes"), 100)
    case |= {"limit_bytes": 70, "measured_bytes": 80, "counts": "allocated", "refused": ""}
    case |= {"name": "chain", "within": False, "equal": True, "held": False}
    monkeypatch.setattr(checking, "checked", lambda *_: case)
    assert main(["check", "--device", "cpu", "--models", "chain", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "Not all limits were held on cpu: please attach the file of --json to an issue" in out
    assert "NO" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "chain,tree"], "--models 'tree': expected some of chain, graph"),
        (["--size", "0"], "--size 0: expected a whole number"),
        (["--share", "2"], "--share 2.0: expected a number from 0.3 to 1"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
