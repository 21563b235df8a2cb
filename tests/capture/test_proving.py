"""Verified steps compare what is computed again, and fail before anything is changed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from eager_inductor import stand_in
from unrepeatable import STATE, Stack, planned, runs_of, sample, step

import rotor
from rotor import memory
from rotor.errors import InfeasibleError


@pytest.fixture(autouse=True)
def _no_compiled_code_stays():
    torch.compiler.reset()
    STATE.update(calls=0, lies=False)
    yield
    STATE.update(calls=0, lies=False)
    torch.compiler.reset()


def train(chk, x, *, accumulate=False):
    if not accumulate:
        chk.zero_grad()
    loss = chk(x).square().mean()
    loss.backward()
    return loss.item()


def state_of(model):
    values = [t.clone() for t in model.state_dict().values()]
    return values, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def unchanged(model, before):
    values, gradients = state_of(model)
    return all(map(torch.equal, values, before[0])) and all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(gradients, before[1], strict=True)
    )


def source_of(chk):
    """The code that ran last."""
    return chk.plan.step.captured.emitted.source


@pytest.mark.parametrize("verify", ["first", "always", "off", 2])
def test_which_steps_are_compared(verify):
    chk, _ = planned(Stack("repeats"), sample(), engine="graph", verify=verify)
    # The first step shows what the loss needs: the next one has another plan.
    train(chk, sample())
    compared = []
    for _ in range(6):
        train(chk, sample())
        compared.append("proof" in source_of(chk))
    expected = {
        "first": [True] * 3 + [False] * 3,
        "always": [True] * 6,
        "off": [False] * 6,
        2: [True] * 3 + [False, True, False],
    }
    assert compared == expected[verify]
    if verify == "off":
        assert 'not proved: verify="off"' in chk.report()
    else:
        values = chk.plan.proved.values
        assert values >= chk.plan.recomputed
        assert f"proved in {sum(compared)} steps: {values} recomputed values" in chk.report()


def test_every_recomputed_value_that_is_used_is_compared():
    chk, _ = planned(Stack("repeats"), sample(), engine="graph")
    train(chk, sample())
    source = source_of(chk)
    first = {line.split("(")[1].split(",")[0] for line in source.splitlines() if ".first(" in line}
    again = {line.split("(")[1].split(",")[0] for line in source.splitlines() if ".again(" in line}
    assert first == again
    program, graph = chk.program, chk.graph
    recomputed = {
        str(s)
        for operation, runs in zip(graph.operations, program.runs, strict=True)
        for s in operation.outputs
        if runs > 1
    }
    assert again <= recomputed
    assert len(again) >= chk.plan.recomputed


def test_a_plan_without_recomputation_has_nothing_to_prove():
    chk = rotor.Checkpointable(Stack("repeats"), sample(), "1GB", engine="graph")
    train(chk, sample())
    assert "proof" not in source_of(chk)
    assert "nothing is recomputed" in chk.report()


@pytest.mark.parametrize(
    ("exist", "is_roomy"),
    [(False, False), (True, True), (True, False)],
    ids=["new", "held back", "added early"],
)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "buffers"])
def test_a_mismatch_leaves_everything_as_it_was(norm, exist, is_roomy):
    model, x = Stack("liar", depth=8, norm=norm), sample(512)
    chk, _ = planned(model, x, engine="graph", verify="always", effort="fast")
    train(chk, x)
    if exist:
        # What the second of several backwards needs, with and without room for holding back.
        chk.measure(x)
        with pytest.raises(InfeasibleError) as least:
            chk.compute_sequence(1)
        sizes = [p.nbytes for p in model.parameters()]
        chk.compute_sequence(least.value.minimum_bytes + is_roomy * sum(sizes))
        train(chk, x, accumulate=True)
        assert chk.plan.step.hands_over
        assert chk.plan.recomputed
        assert ("yield" in source_of(chk)) == (not is_roomy)
    else:
        model.zero_grad()
    STATE["lies"] = True
    before = state_of(model)
    with pytest.raises(rotor.RecomputationError) as caught:
        train(chk, x, accumulate=True)
    error = caught.value
    assert unchanged(model, before)
    assert error.operation == "rotor_tests.liar.default"
    assert error.module.startswith("blocks.")
    for part in ("rotor_tests.liar.default in module 'blocks.", "([512, 32], float32)", "kept"):
        assert part in str(error)


def test_the_value_is_kept_from_then_on():
    x = sample()
    chk, _ = planned(Stack("liar"), x, engine="graph")
    assert max(runs_of(chk, "liar")) > 1
    STATE["lies"] = True
    with pytest.raises(rotor.RecomputationError):
        train(chk, x)
    with pytest.raises(InfeasibleError) as least:
        train(chk, x)
    # Room for the loss, which no step has shown yet.
    chk.mem_limit = least.value.minimum_bytes + 3 * x.nbytes
    for _ in range(4):
        train(chk, x)
    assert chk.plan.proved.steps == 3
    assert chk.plan.recomputed
    assert set(runs_of(chk, "liar")) == {1}


def test_a_limit_that_does_not_allow_keeping_it_is_refused_in_words():
    x = sample()
    chk, _ = planned(Stack("liar"), x, engine="graph")
    STATE["lies"] = True
    with pytest.raises(rotor.RecomputationError):
        train(chk, x)
    for _ in range(2):
        with pytest.raises(InfeasibleError, match="least limit"):
            train(chk, x)


def test_steps_without_a_backward_prove_nothing():
    chk, _ = planned(Stack("repeats"), sample(), engine="graph")
    for _ in range(5):
        chk(sample())
    train(chk, sample())
    assert chk.plan.proved.steps == 1


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_a_kept_graph_is_compared_again():
    chk, _ = planned(Stack("liar"), sample(), engine="graph")
    model = chk.module
    loss = chk(sample()).square().mean()
    loss.backward(retain_graph=True)
    before = state_of(model)
    STATE["lies"] = True
    with pytest.raises(rotor.RecomputationError):
        loss.backward()
    assert unchanged(model, before)


@pytest.mark.parametrize("norm", [False, True])
def test_verified_steps_keep_the_limit_and_are_predicted(norm):
    chk = rotor.Checkpointable(
        Stack("repeats", norm=norm),
        engine="graph",
        loss_fn=lambda y, t: (y - t).square().mean(),
        verify="always",
    )
    x, target = sample(), torch.zeros(128, 32)
    chk.measure(x, targets=(target,))
    with pytest.raises(InfeasibleError) as caught:
        chk.compute_sequence(1)
    chk.compute_sequence(caught.value.minimum_bytes)
    for number in range(4):
        chk.zero_grad()
        # The first step is metered by the plan itself.
        with memory.meter("cpu") if number else nullcontext() as meter:
            chk(x, targets=(target,)).backward()
        peak = meter.peak_bytes if number else chk.plan.measured_bytes
        assert chk.mem_limit * 0.9 < peak <= chk.get_expected_memory() <= chk.mem_limit
    assert chk.plan.proved.steps == 4


def test_gradients_equal_with_and_without_proofs():
    model, x = Stack("default", norm=True), sample()
    results = []
    for verify in ("always", "off"):
        torch.compiler.reset()
        chk, _ = planned(model, x, engine="graph", verify=verify)
        results.append(step(chk, x))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.filterwarnings("ignore:the limit of:rotor.errors.MemoryLimitWarning")
@pytest.mark.parametrize("gradients", ["new", "existing"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "buffers"])
def test_parts_of_a_model_are_proved_and_refuted(norm, gradients):
    model, x = Stack("liar", norm=norm, parts=True), sample()
    # The named limit has room for what lies between the parts, which passes this one.
    chk, _ = planned(model, x, 0.65)
    plan = chk.plan
    for _ in range(3):
        train(chk, x)
        plan = chk.plan
    assert "recomputed values, bit for bit" in chk.report()
    assert plan.recomputes
    chk.verify = "always"
    if gradients == "new":
        model.zero_grad()
    else:
        train(chk, x, accumulate=True)
    STATE["lies"] = True
    before = state_of(model)
    with pytest.raises(rotor.RecomputationError) as caught:
        train(chk, x, accumulate=True)
    assert unchanged(model, before)
    assert caught.value.operation == "rotor_tests.liar.default"
    assert caught.value.module.startswith("blocks.")
    # The limit does not allow keeping it.
    with pytest.raises(InfeasibleError, match="captured parts of the model alone need"):
        train(chk, x, accumulate=gradients == "existing")


def test_compiled_plans_are_proved(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path)
    chk, _ = planned(Stack("repeats"), sample(), engine="graph", backend="inductor")
    for _ in range(3):
        train(chk, sample())
    values = chk.plan.proved.values
    assert values >= chk.plan.recomputed > 0
    assert f"{values} recomputed values, bit for bit" in chk.report()
