"""Rockmate's published names: a model that trains within a budget, and a choice of planners."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from rotor.common.calls import sample_call
from rotor.common.frames import warn_of_ignored
from rotor.engines.contract import Key, Settings
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.graph.planned import GraphPlan
from rotor.errors import InfeasibleError
from rotor.graph import exact, planner
from rotor.graph.blockwise import plan_blocks
from rotor.graph.graph import Graph, Storage
from rotor.graph.program import Program
from rotor.meter import allocator
from rotor.rockmate.offmate import Offmate
from rotor.rockmate.solvers import Solver, chosen
from rotor.units import exact_bytes, parse_bytes
from rotor.wrapper.checkpointable import Checkpointable
from rotor.wrapper.setting import Setting, checked_limit, plan_anew

__all__ = ["Hiremate", "Offmate", "PureCheckmate", "PureRockmate", "PureRotor", "Rockmate"]

_WITHOUT_EFFECT = frozenset(
    [
        *("mem_unit", "nb_budget_save", "nb_budget_peak", "ilp_solver", "ilp_solver_params"),
        *("ilp_time_limit_top", "partitioners", "partitioner_params", "solve_recursive"),
        *("rotor_kwargs", "rotor_solve_with_python", "rkgb_res", "cpu_optim", "gpu_optim"),
        *("optim_kwargs", "minor_offload_size"),
    ]
)
_ALGORITHMS = {"hilp": "operations", "rotor": "blocks"}
_ID = datetime.now().strftime("%d_%m_%Y_%H_%M_%S")
_EXACT_SECONDS = 60.0

_Find = Callable[[Graph, int, dict[str, Any], Any], Program]


def _by_operations(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
    return planner.plan(graph, budget, progress=progress, **options)


def _exactly(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
    del progress
    seconds = options.get("time_limit") or _EXACT_SECONDS
    return exact.checkmate(graph, budget, time_limit=seconds).program


def _by_blocks(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
    del options, progress
    return plan_blocks(graph, budget)


SOLVERS: dict[str, _Find] = {
    "operations": _by_operations,
    "blocks": _by_blocks,
    "exact": _exactly,
}
"""Functions of a graph, a budget, options and a progress callback, by `Solver.algorithm`."""


def _checked_budget(budget: float | str | None) -> int | None:
    whole = int(budget) if isinstance(budget, float) and budget > 0 else budget
    return None if whole is None else parse_bytes(whole, name="budget")


class _OtherLimit(Setting):
    """Limit of the whole step, which takes the place of a budget."""

    def __set__(self, model: Any, value: Any) -> None:
        super().__set__(model, value)
        model._driver.settings.budget = None


def _gradients(graph: Graph) -> set[int]:
    """Return the gradients that a step leaves behind, and those that it hands over."""
    backward = [op for op in graph.operations if op.phase == "backward"]
    made = {s for op in backward for s in op.outputs if graph.storages[s].pinned}
    return made.union(*(op.inputs for op in backward if not op.outputs))


def _without(graph: Graph, storages: set[int]) -> Graph:
    """Return a graph of which some storages have no bytes."""
    kept = [
        Storage(0 if number in storages else storage.bytes, storage.pinned)
        for number, storage in enumerate(graph.storages)
    ]
    return Graph(kept, None, graph.operations)


def _expected(plan: GraphPlan, overhead: bool) -> list[int]:
    """Return what `Rockmate.expect_mem` does."""
    activations = _without(plan.graph, _gradients(plan.graph))
    timeline = Program(activations, plan.program.ops).timeline(runs_only=True)
    last = sum(storage.bytes for storage in activations.storages if storage.pinned)
    after = [*timeline.before_bytes.tolist()[1:], last]
    found = timeline.peak_bytes.tolist() if overhead else after
    return [live + plan.executor_bytes for live in found]


class _BudgetEngine(GraphEngine):
    """Engine of captured steps under a budget that does not count gradients of parameters."""

    settings: _Budgeted
    improves: ClassVar[bool] = False
    _limit = 0
    _beyond = 0

    @property
    def sets_aside(self) -> bool:
        """True under a budget, which counts all that a program needs but gradients."""
        return self.settings.budget is not None

    def solve(self) -> Callable[..., Program]:
        """Return the function that finds programs within the budget."""
        return self._within_budget

    def _within_budget(self, graph: Graph, limit: int, *, progress: Any, **options: Any) -> Program:
        budget = self.settings.budget
        if budget is None:
            return self._fastest(graph, limit, options, progress)
        aside = _gradients(graph)
        if not self._beyond:
            # What is added to existing gradients has room in the budget, if the program is so.
            aside = {number for number in aside if graph.storages[number].pinned}
        outside = sum(graph.storages[number].bytes for number in aside)
        # The limit has room for gradients of parameters that this step may not make, and none for
        # gradients of inputs.
        within = min(budget - (self._limit - limit), limit - outside)
        try:
            program = self._fastest(_without(graph, aside), max(within, 1), options, progress)
        except InfeasibleError as error:
            beside = max(self._limit - budget, outside)
            least = error.minimum_bytes + beside
            raise InfeasibleError(str(error.args[0]), least, peak=error.peak) from error
        return Program(graph, program.ops)

    def _fastest(
        self, graph: Graph, budget: int, options: dict[str, Any], progress: Any
    ) -> Program:
        found: list[Program] = []
        refused: list[InfeasibleError] = []
        for name in self.settings.solvers:
            try:
                found.append(SOLVERS[name](graph, budget, options, progress))
            except InfeasibleError as error:
                refused.append(error)
        if not found:
            raise min(refused, key=lambda error: error.minimum_bytes)
        return min(found, key=lambda program: program.time_ns)

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> GraphPlan:
        """Return the fastest program that was found within the budget."""
        budget = self.settings.budget
        existing = sum(allocator.rounded_bytes(g.nbytes, g.device) for g in self.context.gradients)
        try:
            return self._planned_within(key, limit_bytes, reserve_bytes)
        except InfeasibleError as error:
            if budget is None:
                raise
            if not existing:
                raise self._refusal(budget, error.minimum_bytes - (limit_bytes - budget)) from error
        # New gradients to be added to existing ones are in no budget either, nor is what a first
        # step was accepted without: the rest of the loss, and what was measured beyond it.
        beyond = existing + self._loss_bytes(key) + reserve_bytes
        try:
            plan = self._planned_within(key, limit_bytes, 0, beyond)
        except InfeasibleError as error:
            least = error.minimum_bytes - (limit_bytes + beyond - budget)
            raise self._refusal(budget, least) from error
        plan.reserve_bytes = reserve_bytes
        self.context.warn(
            "gradients",
            f"gradients exist when a step begins, and new ones beside them do not fit in "
            f"the budget of {exact_bytes(budget)}: the step takes up to "
            f"{exact_bytes(plan.predicted_bytes + plan.short_bytes)}, new gradients included. "
            "optimizer.zero_grad(set_to_none=True) before the forward avoids that",
        )
        return plan

    def _planned_within(
        self, key: Key, limit_bytes: int, reserve_bytes: int, beyond: int = 0
    ) -> GraphPlan:
        self._limit, self._beyond = limit_bytes + beyond, beyond
        try:
            plan = super().plan(key, self._limit, reserve_bytes)
        finally:
            self._beyond = 0
        plan.budget_bytes = self.settings.budget
        return plan

    def _knows_loss(self, key: Key) -> bool:
        return not self._beyond and super()._knows_loss(key)

    def _refusal(self, budget: int, least: int) -> InfeasibleError:
        return InfeasibleError(
            f"no plan was found within a budget of {exact_bytes(budget)}; the least for "
            f"which one was found is {exact_bytes(least)}, gradients of parameters aside: "
            "give at least that, or a smaller batch",
            least,
        )

    def load(self, key: Key, source: Any, limit_bytes: int) -> GraphPlan:
        """Return the plan of a saved program, which the budget must hold."""
        plan, budget = super().load(key, source, limit_bytes), self.settings.budget
        plan.budget_bytes = budget
        needed = max(_expected(plan, True))
        if budget is not None and needed > budget:
            raise InfeasibleError(
                f"the program needs {exact_bytes(needed)}, gradients of parameters aside, and the "
                f"budget is {exact_bytes(budget)}: give at least that",
                needed,
            )
        return plan


@dataclass
class _Budgeted(Settings):
    """Options of a model within a budget of activations."""

    solvers: tuple[str, ...] = ()  # Names in `SOLVERS`, of which the fastest program is taken.
    graph_class: Any = _BudgetEngine


class Rockmate(Checkpointable):
    """Model that trains within a budget of activations, by its published call.

    It is ``Checkpointable(..., engine="graph")`` with another count: gradients of parameters are
    not in `budget`, as published. Outputs are the model's own, and a step needs no more than
    ``loss.backward()``.

    Parameters
    ----------
    original_mod
        Any module.
    model_inputs
        A sample of the input: a tensor, a list or tuple of positional arguments, a dictionary of
        keyword arguments. ``None``: the first training forward measures.
    budget
        The most bytes that a training step may have allocated above the level at which its forward
        began, without gradients of parameters, new ones beside existing ones too; what
        `expect_mem` returns is within it: bytes, or text such as "700MiB"; ``None``: 90 % of
        the free memory, gradients included.
    solve, solve_sched, get_sequence
        False leaves planning to `get_sequence`, or to the first step.
    get_compiled_fct
        Accepted: a plan is compiled when it first runs.
    verbose
        True is ``verbosity=1``.
    model_kwargs
        Keyword arguments of the sample.
    ilp_time_limit
        ``time_limit`` of the planner, in seconds.
    top_solvers, bottom_solvers, list_solvers
        Lists of `rotor.rockmate.solvers.HILP` and `RK_rotor`: the fastest plan that one of them
        finds is taken, in place of what the class chooses.
    keep_outputs, dynamic_batch_dim
        Accepted: outputs are the caller's, and other shapes get plans of their own.
    **options
        Options of `Checkpointable`. Published ones that have no effect are named in one warning:
        units and numbers of budgets (plans are in bytes), partitioners (the whole step is planned),
        options of offloading.

    Attributes
    ----------
    budget
        In bytes; ``None`` if a limit was given in another way, or none.

    Raises
    ------
    InfeasibleError
        No plan was found in the budget; ``minimum_bytes`` is the least budget in which one was
        found.

    Warns
    -----
    UserWarning
        Published options that have no effect.
    """

    budget = Setting(_checked_budget, plan_anew)
    mem_limit = _OtherLimit(checked_limit, plan_anew)
    _settings_class = _Budgeted
    _shown_name = "Rockmate"
    _solvers: ClassVar[tuple[str, ...]] = ("operations",)

    def __init__(
        self,
        original_mod: nn.Module,
        model_inputs: Any = None,
        budget: float | str | None = None,
        *,
        solve: bool = True,
        solve_sched: bool = True,
        get_sequence: bool = True,
        get_compiled_fct: bool = True,
        verbose: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        ilp_time_limit: float | None = None,
        top_solvers: Sequence[Solver] | None = None,
        bottom_solvers: Sequence[Solver] | None = None,
        list_solvers: Sequence[Solver] | None = None,
        keep_outputs: bool = False,
        dynamic_batch_dim: Any = None,
        **options: Any,
    ) -> None:
        del get_compiled_fct, keep_outputs, dynamic_batch_dim
        warn_of_ignored(
            type(self).__name__,
            _WITHOUT_EFFECT & options.keys(),
            "Plans are made in bytes, for the whole step, and nothing is offloaded",
        )
        given = (*(top_solvers or ()), *(bottom_solvers or ()), *(list_solvers or ()))
        algorithms, seconds = chosen(given)
        ilp_time_limit = seconds if ilp_time_limit is None else ilp_time_limit
        options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
        if ilp_time_limit is not None:
            options["time_limit"] = ilp_time_limit
        if verbose:
            options.setdefault("verbosity", 1)
        checked = _checked_budget(budget)
        super().__init__(original_mod, engine="graph", **options)
        self.budget = checked
        vars(self._driver.settings)["solvers"] = algorithms or self._solvers
        if model_inputs is None and not model_kwargs:
            return
        args, kwargs = sample_call(() if model_inputs is None else model_inputs, takes_lists=True)
        self.measure(*args, **kwargs | (model_kwargs or {}))
        if solve and solve_sched and get_sequence:
            super().compute_sequence()

    @property
    def original_mod(self) -> nn.Module:
        """The wrapped model."""
        found: nn.Module = self.module
        return found

    # -- planning

    @contextmanager
    def _trying(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Change settings; put them back if no plan is made inside."""
        settings = vars(self._driver.settings)
        before = {name: settings[name] for name in changes}
        settings.update(changes)
        try:
            yield
        except BaseException:
            settings.update(before)
            raise

    def compute_sequence(self, *args: Any, **kwargs: Any) -> Program | None:
        """Compute the program under a limit of the whole step, as `Checkpointable` does.

        With a limit, `budget` is forgotten; without one, it is `get_sequence`.
        """
        given = [*args[:1], kwargs.get("custom_mem_limit_bytes"), kwargs.get("mem_limit")]
        is_limited = any(limit is not None for limit in given)
        with self._trying({"budget": None} if is_limited else {}):
            found: Program | None = super().compute_sequence(*args, **kwargs)
            return found

    def get_sequence(self, budget: float | str | None = None) -> Program | None:
        """Plan the following steps within a budget, by default the one given before.

        Parameters
        ----------
        budget
            As for the constructor.

        Returns
        -------
        Program or None
            ``None`` if the model has no single graph.

        Raises
        ------
        ValueError
            Nothing was measured; InfeasibleError (a ValueError) if no plan was found.
        """
        with self._trying({} if budget is None else {"budget": _checked_budget(budget)}):
            found: Program | None = super().compute_sequence()
            return found

    def solve_sched(
        self,
        budget: float | str | None = None,
        list_solvers: Sequence[Solver] | None = None,
        recursive: bool = True,
    ) -> Program | None:
        """Plan the following steps, as `get_sequence` does.

        Parameters
        ----------
        budget
            As for the constructor.
        list_solvers
            As for the constructor; by default those of before.
        recursive
            Accepted as published.

        Returns
        -------
        Program or None
            ``None`` if the model has no single graph.

        Raises
        ------
        ValueError
            As of `get_sequence`.
        TypeError
            A solver is none.
        """
        del recursive
        with self._trying({"solvers": chosen(list_solvers)[0]} if list_solvers else {}):
            return self.get_sequence(budget)

    def get_compiled_fct(self) -> None:
        """Compile the plan now instead of in the first step; ValueError: no plan was made."""
        self.graph_plan().emitted.prepare()

    # -- predictions

    def expect_time(self) -> float:
        """Return the predicted milliseconds of a step, as published; ValueError: no plan."""
        return self.get_expected_makespan() * 1e3

    def expect_mem(self, overhead: bool = False) -> list[int]:
        """Return the bytes that are live after each operation, gradients of parameters aside.

        Parameters
        ----------
        overhead
            Return the most bytes live during each operation instead, its temporaries counted.

        Returns
        -------
        list of int
            One for each run of an operation.

        Raises
        ------
        ValueError
            No plan, or no graph.
        """
        return _expected(self.graph_plan(), overhead)

    # -- files

    def save_to_file(self, path: Any, id: str = _ID) -> Path:
        """Write the plan to ``{path}/{id}_solution.json``; ValueError: no plan, or no graph.

        Returns
        -------
        Path
            The file.
        """
        file = Path(path) / f"{id}_solution.json"
        self.program.to_json(file)
        return file

    def load_from_file(self, path: Any, id: str = _ID) -> Program:
        """Run in the following steps the plan that `save_to_file` wrote, as `load_program` does.

        Raises
        ------
        ValueError
            Nothing was measured, or the plan is one of another graph.
        InfeasibleError
            It needs more than the budget.
        """
        found: Program = self.load_program(Path(path) / f"{id}_solution.json")
        return found

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the loss has run the backward already.

        Warns
        -----
        DeprecationWarning
            Always: ``loss.backward()`` has run the whole backward.
        """
        warnings.warn(
            "Rockmate.backward() does nothing and is not needed: loss.backward() runs the whole "
            "backward",
            DeprecationWarning,
            stacklevel=2,
        )


class PureRotor(Rockmate):
    """`Rockmate` with the chain's algorithm: whole blocks of the model are kept or repeated.

    The blocks lie between the points of the graph that a single tensor passes through. For
    parameters see the class `Rockmate`.
    """

    _shown_name = "PureRotor"
    _solvers = ("blocks",)


class PureCheckmate(Rockmate):
    """`Rockmate` with the exact solver: Checkmate's integer program over all operations.

    For graphs of at most 200 operations, and to optimality for 20 to 40; it needs SciPy, and stops
    after ``ilp_time_limit`` seconds, by default 60, with the best found.

    For parameters see the class `Rockmate`.
    """

    _shown_name = "PureCheckmate"
    _solvers = ("exact",)


class PureRockmate(Rockmate):
    """`Rockmate` planned by blocks and by operations: the faster plan is taken.

    For parameters see the class `Rockmate`.
    """

    _shown_name = "PureRockmate"
    _solvers = ("blocks", "operations")


class Hiremate(Rockmate):
    """`Rockmate` with a choice of algorithms: the fastest plan that one of them finds is taken.

    Parameters
    ----------
    model, model_inputs, budget, **options
        As for `Rockmate`.
    algorithms
        "rotor" keeps or repeats whole blocks, "hilp" (in the published system an integer program)
        is the planner of operations.

    Raises
    ------
    ValueError
        An algorithm has another name, or none is given.
    """

    _shown_name = "Hiremate"
    _solvers = ("operations", "blocks")

    def __init__(
        self,
        model: nn.Module,
        model_inputs: Any = None,
        budget: float | str | None = None,
        algorithms: Sequence[str] = ("hilp", "rotor"),
        **options: Any,
    ) -> None:
        wrong = [name for name in algorithms if name not in _ALGORITHMS]
        if wrong or not algorithms:
            raise ValueError(
                f"algorithms = {list(algorithms)}, expected one or several of "
                f"{', '.join(_ALGORITHMS)}"
            )
        self.__dict__["_solvers"] = tuple(_ALGORITHMS[name] for name in algorithms)
        super().__init__(model, model_inputs, budget, **options)
