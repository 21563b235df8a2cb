"""``rotor check`` on the simulated accelerator."""

import json

import pytest

from rotor.commands.main import main


@pytest.mark.slow
def test_every_model_is_held(sim, tmp_path, capsys):
    sim.set_capacity(2 << 30)
    sim.set_poison(0)
    target = tmp_path / "check.json"
    code = main(["check", "--device", "sim", "--size", "1", "--quiet", "--json", str(target)])
    out, _ = capsys.readouterr()
    data = json.loads(target.read_text())
    assert code == 0, out
    assert [case["name"] for case in data["cases"]] == ["chain", "graph", "reserved", "dynamic"]
    for case in data["cases"]:
        assert not case["refused"]
        assert case["within"]
        assert case["equal"]
    assert data["settings"]["expandable_segments"] is False
