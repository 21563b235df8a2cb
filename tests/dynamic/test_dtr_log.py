"""Logs of programs under a budget, and the simulator on them: what it predicts has happened."""

from __future__ import annotations

import copy
import gzip
import io
import itertools
import math
import random

import pytest
import torch
from dynamic_cases import CASES, Plain, step
from torch import nn
from versions import needs_swaps

from rotor import dtr, simrd
from rotor.common.accounting import scrap_bytes
from rotor.dtr import recall
from rotor.dtr.log import ProgramLog
from rotor.simrd.results import EVENT_KINDS

pytestmark = [
    pytest.mark.filterwarnings("ignore:leaving the context brought back"),
    pytest.mark.filterwarnings("ignore:the budget of"),
]
HEURISTICS = [
    *("DTR", "DTRAncestors", "DTRLocal", "DTRUnopt", "MSPS"),
    *("LRU", "LargestStorage", "AbStale", "AbESize"),
]
REBUILD_EVERY = 16


class Watched(ProgramLog):
    """A log that also notes, by the names in the log, what is evicted."""

    def __init__(self, session, file):
        super().__init__(simrd.LogWriter(file), session.bytes_of)
        self.gone = []
        session.observer = self

    def evicted(self, node):
        self.gone.append(self._names.get(node))


@pytest.fixture
def ticks(monkeypatch):
    """Every operator takes 1,000 ns, as the runtime reads the clock."""
    clock = itertools.count(0, 1000).__next__
    monkeypatch.setattr(recall, "CLOCK", clock)


def program(seed, *, releases=0.0, operations=60):
    """A random program on vectors of three sizes: what it returns, it holds."""
    inputs = [torch.full((size,), 0.5) for size in (1000, random.Random(seed).choice([100, 300]))]

    def run():
        draw = random.Random(seed)
        made = [x.neg() for x in inputs]
        for _ in range(operations):
            x = draw.choice(made[-25:])
            kind = draw.random()
            if kind < 0.4:
                made.append(x.neg())
            elif kind < 0.6:
                made.append(x.sin())
            elif kind < 0.9:
                made.append(x + draw.choice([y for y in made[-25:] if len(y) == len(x)]))
            else:
                made.append(torch.cat([x[:200], draw.choice(made[-25:])[:100]]))
            del x
            while draw.random() < releases and len(made) > 6:
                made.pop(draw.randrange(len(made)))
        return made

    return run


def run_both(run, heuristic, fraction):
    """Under a fraction of the peak: the runtime's figures and evictions, and the simulator's."""
    with dtr.budget(None) as session:
        held = run()
        limit = int(session.stats.peak_bytes * fraction)
        del held
    file = io.BytesIO()
    with dtr.budget(limit, heuristic=heuristic, strict=False) as session:
        log = Watched(session, file)
        held = run()
        stats = session.stats
        del held
        session.observer = None
    log.close()
    parsed = simrd.parse(file.getvalue())
    result = simrd.simulate(
        parsed,
        heuristic,
        budget_bytes=limit - scrap_bytes(limit) + parsed.baseline.const_memory,
        overhead_limit=math.inf,
        rebuild_classes_every=REBUILD_EVERY,
        trace=True,
    )
    events = result.events[result.events["kind"] == EVENT_KINDS.index("evict")]
    roots = parsed.storages["root"]
    return stats, log.gone, parsed, result, [parsed.tensor_name(roots[k]) for k in events["index"]]


@needs_swaps
@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("fraction", [0.5, 0.35])
def test_evictions_are_those_that_the_simulator_predicts(heuristic, fraction, ticks):
    evictions = rematerializations = 0
    for seed in range(6):
        stats, gone, log, result, predicted = run_both(program(seed), heuristic, fraction)
        assert result.status == "ok"
        # After the last eviction to make room the program drops what it holds.
        assert predicted[: len(gone)] == gone
        assert result.n_evict == len(predicted)
        assert result.n_remat == stats.rematerializations
        assert result.remat_compute == stats.remat_ns
        assert result.max_memory - log.baseline.const_memory == stats.peak_bytes
        evictions += len(gone)
        rematerializations += stats.rematerializations
    assert evictions > 100
    assert rematerializations > 0


@pytest.mark.parametrize(
    ("heuristic", "seeds", "releases", "fraction", "near"),
    [
        ("DTREqClass", 12, 0.0, 0.35, 0.1),
        ("AbEqSize", 12, 0.0, 0.35, 0.1),
        # Programs that drop values.
        ("DTREqClass", 20, 0.3, 0.6, 0.25),
    ],
)
def test_classes_are_rebuilt_at_other_times_and_predict_nearly_as_much(
    heuristic, seeds, releases, fraction, near, ticks
):
    real = predicted = 0
    for seed in range(seeds):
        run = program(seed, releases=releases)
        stats, _, log, result, _ = run_both(run, heuristic, fraction)
        assert result.max_memory - log.baseline.const_memory == pytest.approx(
            stats.peak_bytes, abs=4000
        )
        real += stats.rematerializations
        predicted += result.n_remat
    assert real > 50
    assert real == pytest.approx(predicted, rel=near)


@pytest.mark.parametrize("name", CASES)
def test_a_log_has_the_time_and_the_memory_of_the_program(name):
    case = Plain(CASES[name])
    model = copy.deepcopy(case.model)
    with dtr.budget(None):
        step(copy.deepcopy(case.model), case.loss)
    file = io.BytesIO()
    with dtr.budget(None, record_log=file) as session:
        step(model, case.loss)
        stats = session.stats
    log = simrd.parse(file.getvalue())
    baseline = log.baseline
    assert baseline.compute_ns == stats.base_ns
    assert b'"BACKWARD"' in file.getvalue()
    # Above the model and its inputs; workspaces stand in no log.
    peak = baseline.max_memory - baseline.const_memory
    assert peak <= stats.peak_bytes
    if name in ("lstm_cell", "treelstm"):
        assert peak == stats.peak_bytes
    assert peak > 0.9 * stats.peak_bytes
    for ratio in (1.0, 0.8):
        assert simrd.simulate(log, ratio=ratio, overhead_limit=math.inf).status == "ok"


def test_logs_go_to_paths(tmp_path):
    for name in ("step.log", "step.log.gz"):
        with dtr.budget(None, record_log=tmp_path / name):
            torch.ones(100).exp().sum()
    plain = (tmp_path / "step.log").read_bytes()
    packed = gzip.decompress((tmp_path / "step.log.gz").read_bytes())
    assert [line for line in plain.split(b"\n") if b"TIME" not in line] == [
        line for line in packed.split(b"\n") if b"TIME" not in line
    ]
    assert b'"aten::exp"' in plain


def logged(run):
    file = io.BytesIO()
    with dtr.budget(None, record_log=file):
        kept = run()
    del kept
    lines = file.getvalue().decode().splitlines()
    return [line for line in lines if "MEMORY" not in line and "ALIAS" not in line], file


def test_writes_in_place_are_mutations():
    x = torch.ones(100)
    lines, file = logged(lambda: x.exp().mul_(2))
    assert [line.split('"INSTRUCTION":"')[1].split('"')[0] for line in lines] == [
        "CONSTANT",
        "CALL",
        "MUTATE",
    ]
    log = simrd.parse(file.getvalue())
    assert log.operation_count == 3


def test_writes_to_what_is_not_computed_make_nothing():
    parameter = nn.Parameter(torch.ones(100))

    def run():
        with torch.no_grad():
            parameter.add_(1.0)

    lines, file = logged(run)
    assert sum("CALL" in line for line in lines) == 1
    assert not any("MUTATE" in line for line in lines)
    assert simrd.parse(file.getvalue()).baseline.max_memory == 400


def test_what_is_kept_for_good_is_pinned():
    x = torch.ones(100)

    def run():
        y = x.exp()
        dtr.current().pin(y)
        dtr.current().pin(y)
        dtr.current().pin(x)
        return y.exp()

    lines, file = logged(run)
    assert sum("PIN" in line for line in lines) == 1
    assert simrd.simulate(simrd.parse(file.getvalue())).status == "ok"


def test_every_instruction_is_whole_when_storages_die_in_between(monkeypatch):
    """A collection of garbage may drop storages while a line is written."""
    write = simrd.LogWriter.call
    waiting = []

    def call(self, *args, **kwargs):
        waiting.clear()
        write(self, *args, **kwargs)

    monkeypatch.setattr(simrd.LogWriter, "call", call)
    file = io.BytesIO()
    with dtr.budget(None, record_log=file):
        for _ in range(5):
            waiting.append(torch.ones(100).exp())
            torch.ones(100).sin()
    log = simrd.parse(file.getvalue())
    assert log.baseline.max_memory <= 4 * 400


def test_operations_may_drop_what_they_are_given():
    x = torch.ones(100)

    def run():
        y = torch.zeros(50)
        y.set_(x.exp())
        return copy.deepcopy(y)

    lines, file = logged(run)
    assert any("aten::set_" in line for line in lines)
    assert simrd.simulate(simrd.parse(file.getvalue())).status == "ok"


def test_observers_are_taken_as_they_are():
    class Count:
        operations = 0

        def operation(self, *_):
            self.operations += 1

        def constant(self, *_):
            pass

        released = pinned = evicted = constant

    count = Count()
    with dtr.budget(None, record_log=count):
        torch.ones(100).exp()
    assert count.operations > 0


def test_bad_files_are_refused_before_anything_runs():
    with pytest.raises(TypeError, match="cannot write a log"), dtr.budget(None, record_log=3):
        pass
    assert dtr.current() is None
