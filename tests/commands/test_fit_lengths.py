"""What a distribution of lengths costs within a limit: `rotor fit --lengths`."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from capture.test_shapes import Gpt, gpt_batch, gpt_loss, plain_peak

from rotor.commands.main import main
from rotor.fit.distributions import lengths_of
from rotor.fit.lengths import LengthCost, LengthsCost, cost_of_lengths

MODEL = """
import sys
from capture.test_shapes import Gpt

def make():
    return Gpt(layers=1)
"""


def row(length: int, seconds: float | None, plain: float | None) -> LengthCost:
    return LengthCost(length, seconds is not None, 10, 20, seconds, 30, plain)


def test_lengths_come_from_a_file_or_a_distribution(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3 5,5\n8\n")
    assert lengths_of(str(path)) == {3: 1, 5: 2, 8: 1}
    drawn = lengths_of("lognormal:90,0.5,16,256")
    assert sum(drawn.values()) == 1000
    assert min(drawn) >= 16
    assert max(drawn) <= 256
    assert 80 < sorted(drawn.elements())[500] < 100
    assert drawn == lengths_of("lognormal:90,0.5,16,256")
    assert drawn != lengths_of("lognormal:90,0.5,16,256", seed=1)
    assert set(lengths_of("uniform:3,6")) == {3, 4, 5, 6}
    assert abs(sorted(lengths_of("normal:50,5,1,99").elements())[500] - 50) < 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere.txt", "neither a file nor a distribution"),
        ("uniform:5", "expected 2 numbers"),
        ("uniform:9,5", "the least and the most"),
        ("normal:a,b,1,2", "expected 4 numbers"),
        ("lognormal:0,1,1,9", "such as lognormal"),
    ],
)
def test_what_is_no_length_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        lengths_of(text)


def test_files_without_lengths_are_refused(tmp_path):
    path = tmp_path / "lengths.txt"
    for text, words in (("", "no number"), ("3 x", "'x'"), ("0", "'0'"), ("-3", "'-3'")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            lengths_of(str(path))


def test_lengths_are_weighed_between_the_ones_that_ran():
    found = LengthsCost(
        100,
        Counter({10: 1, 20: 2, 30: 1, 50: 4}),
        (row(10, 2.0, 1.0), row(30, 6.0, 2.0), row(50, None, 3.0)),
    )
    assert found.fitting_share == 0.5
    assert found.seconds("seconds") == (2 + 2 * 4 + 6) / 4
    assert found.seconds("plain_seconds") == (1 + 2 * 1.5 + 2) / 4
    assert found.slowdown == 4 / 1.5
    assert "50.0% fit" in str(found)
    assert "2.67 x" in str(found)
    nothing = LengthsCost(100, Counter({50: 4}), (row(50, None, 3.0),))
    assert nothing.fitting_share == 0
    assert nothing.slowdown is None


def test_steps_run_within_the_limit_and_the_model_is_restored():
    torch.manual_seed(0)
    model = Gpt(layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limit = int(0.8 * plain_peak(model, gpt_batch(4, 96), gpt_loss))
    lengths = Counter({16: 5, 40: 3, 64: 1, 96: 1, 127: 1})
    model.zero_grad()
    found = cost_of_lengths(
        model, gpt_batch(4, 48)["ids"], lengths, limit, engine="graph", points=9, effort="fast"
    )
    assert [found.rows[0].length, found.rows[-1].length] == [16, 127]
    for one in found.rows:
        assert one.plain_bytes > 0
        assert one.least_bytes is not None
        assert one.fits == (one.measured_bytes is not None and one.measured_bytes <= limit)
        assert one.fits == (one.least_bytes <= limit)
    assert found.rows[0].fits
    assert found.rows[0].plain_bytes < limit < found.rows[-1].plain_bytes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="second dimension"):
        cost_of_lengths(model, torch.ones(3), lengths, limit)


@pytest.mark.slow
def test_the_command_ends_and_tells_both(tmp_path, capsys):
    path = tmp_path / "gpt_model.py"
    path.write_text(MODEL)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("20 20 30 40")
    arguments = ["fit", f"{path}:make", "--input", "2,32", "--dtype", "int64", "--high", "100"]
    arguments += ["--limit", "1GB", "--lengths", str(lengths), "--points", "2", "--device", "cpu"]
    assert main([*arguments, "--effort", "fast"]) == 0
    assert "4 batches of lengths 20 to 40 in 953.7 MiB: 100.0% fit" in capsys.readouterr().out
    assert main([*arguments, "--effort", "fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == 4
    assert [one["length"] for one in found["rows"]] == [20, 40]
    assert found["slowdown"] == found["seconds"] / found["plain_seconds"]
