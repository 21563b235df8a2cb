"""The process in which an input of an experiment runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch

from rotor import simrd
from rotor.experiments import configuration, runs, worker
from rotor.simrd import networks


class _Step:
    """Allocates so many bytes."""

    input_bytes, model_bytes = 1000, 2000

    def __init__(self, **given):
        self.given = given
        self.params = {"batch_size": given["batch_size"], "odd": object()}

    def make_batch(self, seed):
        return seed

    def step(self, batch):
        assert batch == self.given["seed"]
        return torch.empty(1_000_000, dtype=torch.uint8).new_zeros(()) + torch.rand(())


@dataclasses.dataclass
class _Stats:
    base_ns: int = 5_000_000
    remat_ns: int = 4_000_000
    search_ns: int = 3_000_000
    cost_ns: int = 2_000_000
    evictions: int = 7
    rematerializations: int = 6


def fake_workloads(built: list[dict]):
    def build(name, **given):
        built.append({"name": name, **given})
        return _Step(**given)

    def from_published(name, given, *, small):
        return {"name": name, "small": small, **given} if small else dict(given)

    return types.SimpleNamespace(
        build=build, from_published=from_published, meaning=lambda name, given: {}
    )


def fake_dtr(entered: list[tuple]):
    @contextlib.contextmanager
    def budget(limit, **options):
        entered.append((limit, options))
        if options["record_log"] is not None:
            lines = networks.linear_text(4).splitlines(keepends=True)
            plain = b"".join(line for line in lines if b"START" not in line)
            Path(options["record_log"]).write_bytes(plain)
        yield types.SimpleNamespace(stats=_Stats(), reset_profile=lambda: None)

    return types.SimpleNamespace(budget=budget)


def request_for(**settings) -> dict:
    found = {"model": "m", "batch_size": 5, "params": {"depth": 2}, "device": "cpu", "seed": 3}
    found |= {"set_seed": True, "type": "dtr", "n_reps": 2, "log": None, "budget_bytes": 10_000}
    found |= {"heuristic": "LRU", "sample": False, "ignore_small": True}
    found |= {"warm_ups": 1, "sizes": "published"}
    return found | settings


def test_a_worker_measures_new_models_under_a_budget_above_their_level():
    built: list[dict] = []
    entered: list[tuple] = []
    events: list[dict] = []
    worker.run(request_for(), events.append, fake_workloads(built), fake_dtr(entered))
    assert [event["event"] for event in events] == [
        "begun",
        "warm",
        "metered",
        "rep",
        "rep",
        "done",
    ]
    assert len(built) == 4
    assert built[0] | {"device": "cpu"} == {
        **{"name": "m", "batch_size": 5, "seed": 3},
        **{"device": "cpu", "depth": 2},
    }
    assert entered[0] == (
        7000,
        {
            **{"heuristic": "LRU", "seed": 3, "sample": False, "ignore_small": True},
            "record_log": None,
        },
    )
    rep = events[3]
    assert (rep["input_mem"], rep["model_mem"]) == (0.001, 0.002)
    assert 1.003 <= rep["total_mem"] < 1.004
    assert (rep["base_compute_time"], rep["remat_compute_time"]) == (5.0, 4.0)
    assert (rep["search_time"], rep["cost_time"]) == (3.0, 2.0)
    assert rep["time"] == rep["gpu_time"] > 0
    # The generators begin from the seed in every repetition.
    assert rep["loss"] == events[4]["loss"]
    assert events[-1] == {
        **{"event": "done", "params": {"batch_size": 5}},
        **{"batch_size": 5, "examples": 5},
    }


@pytest.mark.parametrize("warm_ups", [0, 3])
def test_a_worker_warms_up_as_often_as_it_is_asked(warm_ups):
    built: list[dict] = []
    events: list[dict] = []
    request = request_for(warm_ups=warm_ups, type="baseline", n_reps=1)
    worker.run(request, events.append, fake_workloads(built), None)
    assert [event["event"] for event in events].count("warm") == warm_ups
    assert len(built) == warm_ups + 2


def test_a_worker_draws_a_seed_where_none_is_given():
    events: list[dict] = []
    request = request_for(seed=None, set_seed=False, type="baseline", n_reps=1)
    worker.run(request, events.append, fake_workloads([]), None)
    assert 0 <= events[0]["seed"] < 1 << 31
    assert "evictions" not in events[-2]


def test_a_worker_saves_the_log_of_a_run_of_its_own(tmp_path):
    entered: list[tuple] = []
    events: list[dict] = []
    request = request_for(log=str(tmp_path / "x.log"), n_reps=1, budget_bytes=None)
    worker.run(request, events.append, fake_workloads([]), fake_dtr(entered))
    assert [limit for limit, _ in entered] == [None] * 4
    logs = [options["record_log"] for _, options in entered]
    assert logs == [None, None, None, str(tmp_path / "x.log")]
    assert events[-2]["event"] == "logged"
    log = simrd.parse(tmp_path / "x.log")
    assert (log.baseline.n_ops, log.start_count) == (8, 1)


def test_a_budget_below_the_model_is_an_error():
    with pytest.raises(ValueError, match="not above the 3000 bytes that the model and its inputs"):
        worker.run(request_for(budget_bytes=3000), [].append, fake_workloads([]), fake_dtr([]))


def test_devices_are_checked():
    with pytest.raises(ValueError, match="expected cpu, cuda, or such as cuda:1, or auto"):
        worker.run(request_for(device="gpu"), [].append, fake_workloads([]), fake_dtr([]))


@pytest.mark.slow
def test_models_train_under_budgets_in_processes(tmp_path):
    """The real worker: `rotor.models.workloads` under `rotor.dtr`."""
    extra = {"batch_size": 4, "extra_params": {"input_size": 16}}
    settings = {
        "default": {"use_sampling": False, "ignore_small_tensors": False},
        "treelstm": [{"type": "dtr", "kind": "ratio", "ratio": [0.7, 1.0], **extra}],
    }
    top = {"models": ["treelstm"], "set_seed": True, "device": "cpu", "sizes": "small"}
    config = configuration.parse(json.dumps(top | {"dtr_settings": settings}), "test")
    runs.run(config, tmp_path, formats=())
    data = json.loads((tmp_path / "data/test.json").read_text())
    small, large = data["results"]["treelstm"]
    assert small["losses_equal"]
    assert large["losses_equal"]
    budget = small["specific_params"]["memory_budget"]
    assert small["summary"]["total_mem"]["max"] <= budget / 1e6
    assert small["summary"]["evictions"]["max"] > 0
