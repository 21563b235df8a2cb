"""Scripts in the manner of Rockmate's, of both published versions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import FeedForward, normed

import rotor
from rotor import rockmate
from rotor.graph import Program, build, simulate
from rotor.graph.blockwise import cut, plan_blocks
from rotor.graph.exact import checkmate
from rotor.rockmate import solvers
from rotor.units import format_bytes

WIDTH, TOKENS, BATCH, VOCABULARY = 32, 16, 16, 50
CHOICES = [rotor.Rockmate, rotor.PureRockmate, rotor.Hiremate, rotor.PureRotor]


class Language(nn.Module):
    """A small model of text: two arguments, residual blocks."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(FeedForward(WIDTH, 4) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids)
        if places is not None:
            x = x + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(blocks: int = 3) -> Language:
    torch.manual_seed(0)
    return Language(blocks)


def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def plain_activations(net: nn.Module, *args: Any) -> tuple[int, int]:
    """Least and most of what a budget of activations can be; from a roomy plan and a refusal."""
    rk = rotor.Rockmate(net, list(args), "1 GB")
    most = max(rk.expect_mem(overhead=True))
    with pytest.raises(rotor.InfeasibleError) as caught:
        rk.get_sequence(1000)
    return caught.value.minimum_bytes, most


def gradient_bytes(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


@pytest.fixture(scope="module")
def span() -> tuple[int, int]:
    return plain_activations(model(), ids())


# -- the examples of the READMEs


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.__name__)
def test_the_loop_of_the_readme(choice, span):
    net = model()
    plain = copy.deepcopy(net)
    m_budget = int(0.75 * span[1])
    rk = choice(net, ids(), m_budget)
    assert isinstance(rk, rotor.Rockmate)
    ours = torch.optim.Adam(net.parameters())
    theirs = torch.optim.Adam(plain.parameters())
    for step in range(3):
        target = ids().flip(0)
        for module, optimizer, call in ((net, ours, rk), (plain, theirs, plain)):
            torch.manual_seed(step)
            y = call(ids())
            loss = nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            if call is rk:
                with pytest.warns(DeprecationWarning, match="does nothing"):
                    rk.backward()
            optimizer.step()
            del module
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    assert max(rk.expect_mem(overhead=True)) <= m_budget


def test_a_list_is_positional_arguments():
    net, places = model(1), torch.arange(TOKENS)
    rk = rotor.Rockmate(net, [ids(), places], "1 GB")
    calls = [
        rotor.Rockmate(net, (ids(), places), "1 GB"),
        rotor.Rockmate(net, {"ids": ids(), "places": places}, "1 GB"),
        rotor.Rockmate(net, [ids()], "1 GB", model_kwargs={"places": places}),
    ]
    names = [op.name for op in rk.graph.operations]
    assert "embedding_1" in names
    assert all([op.name for op in other.graph.operations] == names for other in calls)
    one = rotor.Rockmate(net, [ids()], "1 GB")
    assert "embedding_1" not in [op.name for op in one.graph.operations]


# -- the budget


def test_gradients_of_parameters_are_not_in_the_budget(span):
    net = model()
    gradients = gradient_bytes(net)
    budget = (span[0] + span[1]) // 2
    rk = rotor.Rockmate(net, [ids()], budget)
    assert rk.budget == budget
    assert gradients <= rk.mem_limit - budget <= gradients + 64 * len(list(net.parameters()))
    assert max(rk.expect_mem(overhead=True)) <= budget
    assert rk.get_expected_memory() <= rk.mem_limit
    # A limit of the whole step has no room for the gradients beside these activations.
    whole = rotor.Checkpointable(net, ids(), budget, engine="graph")
    assert whole.get_expected_makespan() >= rk.get_expected_makespan()
    for _ in range(2):
        rk.zero_grad()
        rk(ids()).square().mean().backward()
        assert rk.plan.measured_bytes is None or rk.plan.measured_bytes <= rk.mem_limit
    assert rk.plan.measured_bytes > gradients


def test_gradients_that_exist_need_no_room_beside_the_budget(span):
    net = model()
    budget = (span[0] + span[1]) // 2
    rk = rotor.Rockmate(net, [ids()], budget)
    for _ in range(3):
        rk.zero_grad(set_to_none=False)
        rk(ids()).square().mean().backward()
    assert rk.mem_limit < budget + gradient_bytes(net) // 2
    assert rk.plan.measured_bytes <= rk.mem_limit
    assert max(rk.expect_mem(overhead=True)) <= budget


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.__name__)
def test_what_is_expected_is_within_the_budget_and_the_report_names_it(choice):
    net, x = normed(), torch.randn(256, 64)
    least, most = plain_activations(net, x)
    for budget in (least, (least + most) // 2, int(0.9 * most)):
        try:
            rk = choice(net, x, budget)
        except rotor.InfeasibleError as error:
            budget = error.minimum_bytes
            rk = choice(net, x, budget)
        assert max(rk.expect_mem(overhead=True)) <= budget
        assert rk.plan.budget_bytes == budget
        (row,) = [line for line in rk.report().splitlines() if line.startswith("budget")]
        assert row.endswith(f"  {format_bytes(budget)}")
    rk.compute_sequence(mem_limit="1 GB")
    assert "budget" not in rk.report()


def test_the_least_budget_is_named_and_works(span):
    net = model()
    with pytest.raises(rotor.InfeasibleError, match="gradients of parameters aside") as caught:
        rotor.Rockmate(net, [ids()], 20_000)
    assert caught.value.minimum_bytes == span[0]
    rk = rotor.Rockmate(net, [ids()], span[0])
    assert max(rk.expect_mem(overhead=True)) <= span[0]
    with pytest.raises(rotor.InfeasibleError):
        rk.get_sequence(1)
    assert rk.budget == span[0]


def test_a_budget_may_be_a_fraction_of_something(span):
    assert rotor.Rockmate(model(), ids(), 0.9 * span[1]).budget == int(0.9 * span[1])
    for wrong in (0.0, -1.0, float("nan"), True, 0):
        with pytest.raises((ValueError, TypeError)):
            rotor.Rockmate(model(), ids(), wrong)


# -- options of both versions


def test_options_without_effect_are_named_in_one_warning():
    with pytest.warns(UserWarning, match="have no effect") as caught:
        rotor.Rockmate(
            model(1),
            [ids()],
            "1 GB",
            mem_unit=1024**2,
            nb_budget_save=10,
            nb_budget_peak=5,
            ilp_solver="gurobi",
            rotor_kwargs={},
            top_solvers=[],
            partitioners=None,
            verbose=False,
            solve=True,
            get_sequence=True,
            get_compiled_fct=True,
            keep_outputs=False,
        )
    (warning,) = [str(w.message) for w in caught]
    assert "mem_unit, nb_budget_peak, nb_budget_save, partitioners" in warning
    assert "ilp_solver" in warning
    assert "rotor_kwargs" in warning
    assert "keep_outputs" not in warning
    assert caught[0].filename == __file__


def test_options_with_effect_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rk = rotor.Rockmate(model(1), ids(), "1 GB", verbose=False, ilp_time_limit=5.0)
    assert rk.options == {"time_limit": 5.0}
    assert rotor.Rockmate(model(1), None, "1 GB", verbose=True).verbosity == 1
    with pytest.raises(TypeError, match="unknown option 'nb_budgets'"):
        rotor.Rockmate(model(1), ids(), "1 GB", nb_budgets=3)


@pytest.mark.parametrize("name", ["solve", "solve_sched", "get_sequence"])
def test_planning_may_come_later(name):
    rk = rotor.Rockmate(model(1), [ids()], "1 GB", **{name: False})
    with pytest.raises(ValueError, match="no plan was made"):
        rk.expect_time()
    program = rk.get_sequence("512 MB")
    assert rk.budget == 512_000_000
    assert rk.program is program
    rk.get_compiled_fct()
    assert rk(ids()).shape == (BATCH, TOKENS, VOCABULARY)


def test_what_is_expected(span):
    net = model()
    rk = rotor.Rockmate(net, [ids()], (span[0] + span[1]) // 2)
    assert rk.expect_time() == pytest.approx(1e3 * rk.program.makespan)
    after, during = rk.expect_mem(), rk.expect_mem(overhead=True)
    assert len(after) == len(during) == len(rk.program)
    assert all(a <= d for a, d in zip(after, during, strict=True))
    assert max(after) < max(during) <= rk.budget
    assert rk.original_mod is net
    assert rk.module is net
    with pytest.raises(AttributeError, match=r"^Rockmate has no attribute"):
        rk.nothing  # noqa: B018


def test_a_limit_of_the_whole_step_is_still_possible(span):
    rk = rotor.Rockmate(model(), [ids()], span[1])
    rk.compute_sequence(mem_limit="1 GB")
    assert rk.budget is None
    assert rk.mem_limit == 10**9
    rk.get_sequence(span[1])
    assert rk.mem_limit > rk.budget == span[1]
    with pytest.raises(rotor.InfeasibleError):
        rk.compute_sequence(1000)
    assert rk.budget == span[1]


def test_plans_are_kept_in_files(tmp_path, span):
    budget = (span[0] + span[1]) // 2
    rk = rotor.Rockmate(model(), [ids()], budget)
    named = rk.save_to_file(tmp_path, id="half")
    assert named == tmp_path / "half_solution.json"
    rk.save_to_file(tmp_path)
    again = rotor.Rockmate(model(), [ids()], budget, solve=False)
    assert again.load_from_file(tmp_path, "half") == rk.program
    assert again.load_from_file(tmp_path) == rk.program
    torch.manual_seed(4)
    y = rk(ids())
    torch.manual_seed(4)
    assert torch.equal(again(ids()), y)
    other = rotor.Rockmate(model(2), [ids()], "1 GB")
    with pytest.raises(ValueError, match="another graph"):
        other.load_from_file(tmp_path, "half")


# -- choices of what plans


def chain_of_layers(pairs: int, width: int) -> nn.Module:
    torch.manual_seed(2)
    layers = [m for _ in range(pairs) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def test_pure_checkmate_is_the_exact_solver():
    pytest.importorskip("scipy")
    net, x = chain_of_layers(3, 8), torch.randn(256, 8)
    rk = rotor.PureCheckmate(net, x, sum(plain_activations(net, x)) // 2, ilp_time_limit=30)
    proof = checkmate(rk.graph, rk.mem_limit)
    assert rk.program.slowdown > 1
    assert rk.program.makespan >= proof.bound_seconds * (1 - 1e-6)
    assert max(rk.expect_mem(overhead=True)) <= rk.budget
    with pytest.raises(ValueError, match="at most 200 operations"):
        rotor.PureCheckmate(chain_of_layers(40, 2), torch.randn(2, 2), "1 GB")


def test_pure_rotor_repeats_whole_blocks(span):
    rk = rotor.PureRotor(model(), [ids()], int(0.8 * span[1]))
    blocks = cut(rk.graph)
    assert len(blocks.forward) > 4
    assert rk.program.slowdown > 1
    runs = rk.program.runs
    free = rotor.Rockmate(model(), [ids()], int(0.8 * span[1]))
    repeated = {k for k in range(len(rk.graph)) if runs[k] > 1}
    assert repeated
    assert all(rk.graph.operations[k].phase == "forward" for k in repeated)
    assert free.program.slowdown <= rk.program.slowdown * 1.05


def test_the_faster_of_two_is_taken(span):
    budget = int(0.8 * span[1])
    graph_of = {}
    for choice in (rotor.PureRotor, rotor.PureRockmate):
        graph_of[choice] = choice(model(), [ids()], budget)
    both = graph_of[rotor.PureRockmate]
    blocks = graph_of[rotor.PureRotor].program.ops
    assert both.program.time_ns <= simulate(both.graph, blocks).time_ns


def test_hiremate_has_a_choice_of_algorithms(span):
    budget = int(0.8 * span[1])
    for algorithms, names in (
        (["hilp"], ("operations",)),
        (["rotor"], ("blocks",)),
        (["hilp", "rotor"], ("operations", "blocks")),
    ):
        rk = rotor.Hiremate(model(), [ids()], budget, algorithms=algorithms)
        assert rk._solvers == names
        assert max(rk.expect_mem(overhead=True)) <= budget
    with pytest.raises(ValueError, match="expected one or several of hilp, rotor"):
        rotor.Hiremate(model(), [ids()], budget, algorithms=["twremat"])


def test_choices_are_where_they_were_published():
    assert set(rockmate.__all__) == {choice.__name__ for choice in CHOICES} | {
        "Offmate",
        "PureCheckmate",
    }
    assert all(getattr(rotor, name) is getattr(rockmate, name) for name in rockmate.__all__)


# -- programs of whole blocks


@pytest.fixture(scope="module")
def residual_graph() -> Any:
    return build(model(), ids())


def test_blocks_are_cut_where_one_storage_passes(residual_graph):
    graph = residual_graph
    blocks = cut(graph)
    ops = graph.operations
    forward = [k for group in blocks.forward for k in group]
    assert forward == [k for k, op in enumerate(ops) if op.phase == "forward"]
    assert sorted(k for group in blocks.backward for k in group) == [
        k for k, op in enumerate(ops) if op.phase == "backward"
    ]
    for i, passed in enumerate(blocks.passed[:-1]):
        before = {s for group in blocks.forward[: i + 1] for k in group for s in ops[k].outputs}
        after = {s for group in blocks.forward[i + 1 :] for k in group for s in ops[k].inputs}
        assert before & after == passed
        assert len(passed) == 1


def test_programs_of_blocks_keep_every_budget_that_is_feasible(residual_graph):
    graph = residual_graph
    everything = Program(graph, range(len(graph)))
    assert plan_blocks(graph, everything.peak_bytes).slowdown == 1
    with pytest.raises(rotor.InfeasibleError) as caught:
        plan_blocks(graph, 1)
    least = caught.value.minimum_bytes
    assert least < 0.85 * everything.peak_bytes
    slowest = None
    for budget in range(everything.peak_bytes, least - 1, (least - everything.peak_bytes) // 8):
        program = plan_blocks(graph, budget)
        assert program.peak_bytes <= budget
        assert slowest is None or program.time_ns >= slowest * 0.98
        slowest = program.time_ns
    assert plan_blocks(graph, least).peak_bytes == least


# -- solvers by their published names


def test_solvers_choose_what_plans(span):
    budget = int(0.8 * span[1])
    one = rotor.Rockmate(model(), [ids()], budget, top_solvers=[solvers.RK_rotor()])
    assert one.program == rotor.PureRotor(model(), [ids()], budget).program
    both = [solvers.HILP(time_limit=5.0)], [solvers.RK_rotor()]
    two = rotor.Rockmate(model(), [ids()], budget, top_solvers=both[0], bottom_solvers=both[1])
    assert two.options == {"time_limit": 5.0}
    assert two.program.makespan <= one.program.makespan
    assert one.solve_sched(budget, [solvers.HILP()], recursive=False) == one.program
    assert one.program != rotor.PureRotor(model(), [ids()], budget).program
    with pytest.raises(rotor.InfeasibleError):
        one.solve_sched(1, [solvers.RK_rotor()])
    assert one.get_sequence(budget) != rotor.PureRotor(model(), [ids()], budget).program


def test_solvers_without_a_counterpart_say_what_to_use():
    for name in ("CheapSolver", "TwRemat", "FastSolver"):
        with pytest.raises(NotImplementedError, match=rf"published {name}: .*HILP\(\)"):
            getattr(solvers, name)(verbose=True)
    with pytest.raises(TypeError, match=r"'hilp' is no solver: expected HILP\(\) or RK_rotor\(\)"):
        rotor.Rockmate(model(1), ids(), "1 GB", list_solvers=["hilp"])
    with pytest.raises(TypeError, match="unknown option 'nodes' of RK_rotor"):
        solvers.RK_rotor(nodes=3)


def test_options_of_solvers_without_effect_are_named():
    with pytest.warns(UserWarning, match="HILP takes .* no effect: mem_unit, nb_total_nodes") as w:
        solvers.HILP(1024**2, nb_total_nodes=20)
    assert w[0].filename == __file__
    with pytest.warns(UserWarning, match="RK_rotor takes .* no effect: force_python") as w:
        solvers.RK_rotor(force_python=True)
    assert w[0].filename == __file__
