"""`Checkpointable` for any module: a captured graph, planned, under a memory limit."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rotor import _torch
from rotor.algorithms.curve import Curve
from rotor.dynamic_plan import DynamicPlan
from rotor.errors import CaptureError
from rotor.graph import planner
from rotor.graph.calls import check_arguments, described, run_once, takes_targets
from rotor.graph.capture import Capture, NothingToPlan, Unplanned, fresh
from rotor.graph.drawing import write_plan
from rotor.graph.early import owners_of
from rotor.graph.engine import (
    CapturedStep,
    GraphPlan,
    build_graph,
    check_options,
    make_plan,
    repriced,
)
from rotor.graph.graph import Graph
from rotor.graph.loading import loaded_plan
from rotor.graph.pieced import PiecesPlan, make_pieces_plan, pieces_curve
from rotor.graph.program import Program
from rotor.graph.recorded import MEASURED, price, source_of
from rotor.graphed_pieces import PiecesSteps
from rotor.loss_guess import plan_with_guess
from rotor.memory import MeterBusyError
from rotor.metering import StepBytes, StepWatch, cancel_running
from rotor.progress import progress
from rotor.report.html import measured_page
from rotor.report.text import (
    dynamic_figures,
    dynamic_report,
    dynamic_table,
    graph_report,
    operation_table,
    part_rows,
    pieces_figures,
    pieces_report,
    pieces_table,
    step_rows,
)
from rotor.stages import Structure, refuse_sharded
from rotor.units import format_bytes, parse_bytes
from rotor.values import tensors_of, tensors_within

logger = logging.getLogger("rotor")


def _call(module: Any, loss_fn: Any, args: Any, kwargs: Any, targets: Any) -> Any:
    output = module.forward(*args, **kwargs)
    return output if loss_fn is None else loss_fn(output, *targets)


AnyPlan = GraphPlan | PiecesPlan | DynamicPlan
_HOPELESS = 4
_MOST_PLANS = 8
"""Of one kind of step, for as many sets of gradients that exist."""


class GraphCheckpointable(PiecesSteps):
    """What `Checkpointable` makes of a module that is no ``nn.Sequential``.

    The first training forward of each signature captures forward, loss (``loss_fn=``) and backward
    as one graph, measures its operations and plans them; `graph` is the cost model, `program` the
    plan. Where no single graph can be captured, ``engine="auto"`` warns, captures the largest
    children that can be and plans them together; where there are none, or their plan cannot keep
    the limit, the dynamic engine runs the model. ``engine="graph"`` raises.
    """

    _steps: dict[Any, CapturedStep]
    _plans: dict[Any, AnyPlan]
    _latest: AnyPlan | None
    _pending: weakref.ref[torch.Tensor] | None
    _structure: Structure
    _learned_loss: dict[Any, int]
    _unplanned: set[Any]
    _solve: Callable[..., Program] | None = None

    def _begin(self) -> None:
        if not self.preserve_rng_state:
            raise ValueError(
                "a graph is always recomputed with the random numbers of the first forward: leave "
                "preserve_rng_state at True"
            )
        self.__dict__.update(
            _steps={}, _reasons={}, _pieces={}, _unplanned=set(), _profile=source_of(self._profile)
        )

    def _measure_sample(self, sample: Any) -> None:
        if isinstance(sample, dict):
            self.measure(**sample)
        else:
            self.measure(*(sample if isinstance(sample, tuple) else (sample,)))

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code belongs to this module and this process.
        compiled: dict[str, Any] = {"_steps": {}, "_plans": {}, "_reasons": {}, "_latest": None}
        compiled |= {"_pieces": {}, "_latest_key": None, "_structure": None, "_unplanned": set()}
        return super().__getstate__() | compiled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_structure"] = Structure(self.module)

    def _check_options(self, options: dict[str, Any]) -> None:
        check_options(options)

    def _backend_of(self, key: Any) -> str:
        """What runs the programs of a signature."""
        return "fx"

    # -- measuring and planning

    @property
    def graph(self) -> Graph:
        """The cost model of the step planned last; ValueError: no plan, or no graph."""
        return self._graph_plan().graph

    @property
    def program(self) -> Program:
        """The program of the step planned last; ValueError: no plan, or no graph."""
        return self._graph_plan().program

    def _graph_plan(self) -> GraphPlan:
        plan = self._planned()
        if not isinstance(plan, GraphPlan):
            raise ValueError(f"the model runs without a graph: {plan.reason}")
        return plan

    def measure(
        self, *args: Any, targets: Sequence[Any] = (), **kwargs: Any
    ) -> CapturedStep | None:
        """Capture a training step on a sample of the arguments, and measure its operations.

        Nothing is changed: parameters, gradients, buffers, random states, training flags.

        Returns
        -------
        CapturedStep or None
            ``None`` where there is no single graph: a warning has said why, and what runs instead.

        Raises
        ------
        CaptureError
            There is no single graph of it, with ``engine="graph"``; the message has the reason and
            the line of code.
        TypeError
            The model does not take such arguments.
        ValueError
            Nothing in the step needs a gradient.
        """
        flags = [(module, module.training) for module in self.module.modules()]
        if not self.module.training:
            self.module.train()
        try:
            with torch.enable_grad():
                key = self._plan_key(args, targets, kwargs)
                self._forget(key[0])
                try:
                    self._capture_or_warn(key, args, targets, kwargs)
                except NothingToPlan:
                    raise ValueError(
                        "nothing in this step needs a gradient: call the plain model, chk.module"
                    ) from None
                self.__dict__["_latest_key"] = key
        finally:
            for module, training in flags:
                module.training = training
        return self._steps.get(key[0])

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        *,
        mem_limit: int | str | None = None,
        **options: Any,
    ) -> Program | None:
        """Compute the program that the following steps run.

        Parameters
        ----------
        custom_mem_limit_bytes, mem_limit
            The limit, by its published name or by ours; by default the one given before.
        mem_slots
            Accepted as published; graphs are planned in bytes.
        **options
            ``effort``, ``seed`` and ``time_limit`` of `rotor.graph.plan`.

        Returns
        -------
        Program or None
            ``None`` where there is no single graph.

        Raises
        ------
        ValueError
            Nothing was measured; two limits are given; InfeasibleError (a ValueError) when no
            program was found that fits.
        """
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise ValueError("give the limit once: mem_limit= or custom_mem_limit_bytes=")
        given = custom_mem_limit_bytes if mem_limit is None else mem_limit
        limit = self.mem_limit if given is None else parse_bytes(given)
        key = self._measured_key()
        check_options(options)
        before = (self.mem_limit, self._options, self._plans)
        self.__dict__.update(mem_limit=limit, _options=self._options | options, _plans={})
        try:
            for step in self._steps.values():
                step.capture.forget_programs()
            plan = self._make(key)
            return plan.program if isinstance(plan, GraphPlan) else None
        except BaseException:
            self.__dict__.update(zip(("mem_limit", "_options", "_plans"), before, strict=True))
            raise

    def curve(self, points: int = 40) -> Curve:
        """Step time against limit: what `rotor.graph.curve` finds, as limits of this step.

        Raises
        ------
        ValueError
            Nothing was measured.
        """
        key = self._measured_key()
        if key in self._pieces:
            device = self._reasons[key[0]][0]
            return self._marked(pieces_curve(self._pieces[key], points), device)
        if key[0] not in self._steps:
            raise ValueError(f"the model runs without a graph: {self._reasons[key[0]][1]}")
        step = self._step_of(key)
        graph = build_graph(step.lowered, step.costs, self._loss_bytes(key))
        with progress(points, "computing the curve") as update:
            found = planner.curve(graph, points, progress=update, **self._options)
        own = [step.most_own_bytes(peak) for peak in found.bytes.tolist()]
        curve = Curve(found.bytes + own, found.seconds)
        return self._marked(curve, step.device)

    def display(self) -> str:
        """A table of the operations and how often each runs; ValueError: no plan."""
        plan = self._planned()
        if isinstance(plan, DynamicPlan):
            return dynamic_table(plan)
        return pieces_table(plan) if isinstance(plan, PiecesPlan) else operation_table(plan)

    def _write_page(self, path: Path) -> None:
        plan = self._planned()
        if isinstance(plan, GraphPlan):
            write_plan(plan, path)
            return
        if isinstance(plan, PiecesPlan):
            text = measured_page(plan, pieces_figures(plan), ("Parts", part_rows(plan)))
        else:
            text = measured_page(plan, dynamic_figures(plan), ("Last steps", step_rows(plan)))
        path.write_text(text, encoding="utf-8")

    def _report(self) -> str:
        plan = self._planned()
        if isinstance(plan, PiecesPlan):
            return pieces_report(plan)
        return graph_report(plan) if isinstance(plan, GraphPlan) else dynamic_report(plan)

    def load_program(self, source: Program | str | os.PathLike[str]) -> Program:
        """Have the following steps run a program that was saved, instead of planning one.

        The model was measured (`measure`, or a step). The program must be one of the same
        operations on the same storages; times may differ. Should a step need more than predicted,
        it is planned again, as any.

        Parameters
        ----------
        source
            A program, its JSON text, or the file at a path: what ``program.to_json(path)`` wrote.

        Returns
        -------
        Program
            The program, priced with the times measured here.

        Raises
        ------
        ValueError
            Nothing was measured; the file holds no program; it is one of another graph, and the
            message has the first difference.
        InfeasibleError
            It needs more than the limit; ``minimum_bytes`` is what it needs.
        """
        key = self._measured_key()
        if key[0] not in self._steps:
            raise ValueError(f"the model runs without a graph: {self._reasons[key[0]][1]}")
        step = self._step_of(key)
        plan = loaded_plan(step, source, self._limit_on(step.device))
        self._plans[key] = plan
        if not step.loss_captured:
            # What the loss needs is known with the program: seeing it again changes nothing.
            self._learned_loss[key[0]] = plan.loss_bytes
        self.__dict__.update(_latest=plan, _latest_key=key)
        return plan.program

    def load_plan(self, source: Program | str | os.PathLike[str]) -> Program:
        """Do as `load_program`; a chain has a method of this name too."""
        return self.load_program(source)

    def _plan_key(self, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a plan belongs to: what a capture belongs to, and which gradients are missing."""
        measured = self._key(args, targets, kwargs)
        absent = self._structure.parameter_flags()[1]
        if (measured, absent) not in self._plans:
            known = sum(key[0] == measured for key in self._plans)
            if known >= _MOST_PLANS and not all(absent):
                # A plan that makes every gradient anew holds for any of them.
                absent = (True,) * len(absent)
        return measured, absent

    def _step_of(self, key: Any) -> CapturedStep:
        """What was captured, with the gradients that exist."""
        step = self._steps[key[0]]
        return step.with_existing(step.existing_among(key[1]))

    def _key(self, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves, spec = _torch.tree_flatten((args, kwargs, tuple(targets)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError("the arguments hold no tensor, expected at least one")
        kind = tensors[0].device.type
        if kind == "meta":
            raise ValueError(
                "the arguments are meta tensors, which nothing can be trained on: "
                "rotor.graph.build(model, ..., profile=Machine(...)) and rotor.graph.plan plan "
                "without values"
            )
        return (
            str(spec),
            tuple([described(leaf) for leaf in leaves]),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            self._structure.training_flags(),
            self._structure.parameter_flags()[0],
        )

    def _captured(
        self, key: Any, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> CapturedStep:
        refuse_sharded(self.module)
        self._check_devices((args, kwargs))
        check_arguments(self.module, args, kwargs)
        device = tensors_of((args, kwargs))[0].device
        loss_fn = self.loss_fn if targets else None
        cancel_running()
        capture = Capture(fresh(_call), self._backend_of(key))
        with progress(1, "capturing the model"):
            try:
                found = capture.reach(self.module, loss_fn, args, kwargs, tuple(targets))
            except CaptureError as error:
                # Modules that prepare themselves in their first forward can be captured after it.
                if not run_once(self.module, args, kwargs):
                    raise error from None
                capture = Capture(fresh(_call), self._backend_of(key))
                found = capture.reach(self.module, loss_fn, args, kwargs, tuple(targets))
        arguments = (args, kwargs, tuple(targets))
        return self._profiled(key, capture, found, device, loss_fn is not None, arguments)

    def _profiled(
        self,
        key: Any,
        capture: Capture,
        found: Unplanned,
        device: torch.device,
        loss_captured: bool,
        arguments: Any,
    ) -> CapturedStep:
        source, lowered = self._profile, found.captured.lowered
        owners = owners_of(lowered, found.primals, self._structure.parameters, arguments)
        try:
            with progress(1, "measuring the operations") as update:
                costs = price(source, lowered, device, found.primals, progress=update)
        finally:
            # The inputs of the call must not live as long as a frame that is in a cycle.
            found.primals.clear()
            found.__traceback__ = None
        self._warn_unrepeatable([lowered])
        planned_for = "" if source == MEASURED else source.device
        step = CapturedStep(
            capture, found.captured, costs, device, loss_captured, planned_for, owners
        )
        step.verifies = self.verify != "off"
        self._steps[key[0]] = step
        return step

    def _loss_bytes(self, key: Any) -> int:
        return self._steps[key[0]].loss_workspace(
            self.loss_tmp_memory_usage, self._learned_loss.get(key[0])
        )

    def _make(self, key: Any, reserve_bytes: int = 0) -> AnyPlan:
        plan: AnyPlan
        if key in self._pieces:
            device, reason = self._reasons[key[0]]
            limit = self._limit_on(device)
            plan = make_pieces_plan(device, reason, self._pieces[key], limit, reserve_bytes)
        elif key[0] in self._reasons:
            plan = self._dynamic_plan(key)
        else:
            plan = self._make_program(key, reserve_bytes)
        self._plans[key] = plan
        self.__dict__.update(_latest=plan, _latest_key=key)
        return plan

    def _make_program(self, key: Any, reserve_bytes: int) -> GraphPlan:
        step = self._step_of(key)
        limit = self._limit_on(step.device)
        with progress(1, "planning") as update:

            def plan_with(loss_bytes: int) -> GraphPlan:
                return make_plan(
                    step,
                    limit,
                    loss_bytes,
                    reserve_bytes=reserve_bytes,
                    options=self._options,
                    progress=update,
                    solve=self._solve,
                )

            loss_bytes = self._loss_bytes(key)
            is_known = key[0] in self._learned_loss or self.loss_tmp_memory_usage
            if is_known or not loss_bytes:
                plan = plan_with(loss_bytes)
            else:
                plan, reserved = plan_with_guess(plan_with, loss_bytes, limit)
                plan.short_bytes = loss_bytes - reserved
        logger.info(
            "planned %d operations: predicted peak %s of %s, %.4g s a step, %d run more than once",
            len(step.lowered.tasks),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
            plan.makespan,
            plan.recomputed,
        )
        return plan

    # -- running

    def forward(self, *args: Any, targets: Any = (), **kwargs: Any) -> Any:
        """The model's output, or its loss where ``loss_fn`` and `targets` are given.

        In training mode with gradients enabled the program is run (and made, the first time);
        otherwise the plain model runs.
        """
        if self.loss_fn is None and targets is not _NO_TARGETS and takes_targets(self.module):
            kwargs["targets"], targets = targets, _NO_TARGETS
        if not self._checked_call(targets):
            return self._with_loss(self.module.forward(*args, **kwargs), targets)
        if not self._structure.is_current():
            self.__dict__.update(
                _structure=Structure(self.module),
                _steps={},
                _plans={},
                _reasons={},
                _pieces={},
                _unplanned=set(),
                _latest_key=None,
            )
        key = self._plan_key(args, targets, kwargs)
        plan = self._plans.get(key)
        if isinstance(plan, PiecesPlan) and plan.is_over:
            plan = self._without_pieces(key, plan, args, targets, kwargs)
        if isinstance(plan, PiecesPlan) and plan.pieces.wants_search:
            self._search_pieces(key, args, kwargs)
            del self._plans[key]
            plan = None
        self._expect_sparse(plan)
        if plan is None or plan.outdated or plan.is_refuted:
            if key[0] in self._unplanned:
                return self._with_loss(self.module.forward(*args, **kwargs), targets)
            if key[0] not in self._steps and key[0] not in self._reasons:
                try:
                    self._capture_or_warn(key, args, targets, kwargs)
                except NothingToPlan:
                    self._unplanned.add(key[0])
                    return self._with_loss(self.module.forward(*args, **kwargs), targets)
            elif plan is None and any(other[0] == key[0] for other in self._pieces):
                # The same parts, where other gradients exist.
                self._search_pieces(key, args, kwargs)
            plan = self._replanned(key)
        self.__dict__.update(_latest=plan, _latest_key=key)
        if isinstance(plan, DynamicPlan):
            return self._step_dynamically(plan, args, targets, kwargs)
        if self._pending is not None and self._pending() is not None:
            self._warn_pending(plan.limit_bytes)
        if isinstance(plan, GraphPlan):
            try:
                return self._step(key, plan, args, targets, kwargs)
            except CaptureError as error:
                # It was captured before, but the code now wants other graphs all the time.
                cancel_running()
                self._no_graph(key, args, kwargs, error)
                plan = self._make(key)
        if isinstance(plan, PiecesPlan):
            return self._step_by_pieces(plan, args, targets, kwargs)
        assert isinstance(plan, DynamicPlan)
        return self._step_dynamically(plan, args, targets, kwargs)

    def _capture_or_warn(
        self, key: Any, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        if len(self._reasons) >= _HOPELESS and not (self._steps or self._pieces):
            # The model differs from call to call: looking again takes longer than a step.
            self._reasons[key[0]] = next(reversed(self._reasons.values()))
            return
        try:
            self._captured(key, args, targets, kwargs)
        except CaptureError as error:
            self._no_graph(key, args, kwargs, error)

    def _no_graph(self, key: Any, args: Any, kwargs: dict[str, Any], error: CaptureError) -> None:
        if self.engine != "auto":
            raise error
        self._reasons[key[0]] = (tensors_of((args, kwargs))[0].device, str(error))
        self._steps.pop(key[0], None)
        try:
            self._search_pieces(key, args, kwargs)
        except MeterBusyError:
            # The next step looks again.
            del self._reasons[key[0]]
            raise
        if key in self._pieces:
            self._warn_unrepeatable(self._pieces[key].graphs())
            self._warn_once("capture", f"{self._pieces[key].told()} The reason:\n{error}")
            return
        self._warn_once(
            "capture",
            "no single graph of the model could be captured, so its memory is not planned: the "
            "dynamic engine runs it, which evicts and recomputes while a step runs. The reason:\n"
            f"{error}",
        )

    def _step(
        self, key: Any, plan: GraphPlan, args: Any, targets: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        capture = plan.step.capture
        arguments = (args, kwargs, tuple(targets))
        output, meter, reached = self._called(plan, arguments)
        if reached is not None:
            # A Python value that the code depends on has changed: this is another graph.
            cancel_running()
            device, loss_captured = plan.device, plan.step.loss_captured
            self._profiled(key, capture, reached, device, loss_captured, arguments)
            plan = self._make_program(key, plan.reserve_bytes)
            self._plans[key] = plan
            self.__dict__["_latest"] = plan
            output, meter, reached = self._called(plan, arguments)
            if reached is not None:
                raise reached
        self.__dict__["_pending"] = capture.token
        if meter is not None and capture.ran is not plan.step.captured:
            meter.cancel()
            meter = None
        if meter is not None or plan.step.several_tangents:
            tensors = tensors_within(output)
            capture.note_absent_tangents(tensors)
            if meter is not None:
                meter.forward_done(tensors)
        return output

    def _called(
        self, plan: GraphPlan, arguments: Any
    ) -> tuple[Any, StepWatch | None, Unplanned | None]:
        """What the captured call gives under a plan, and what meters it; or that it has none."""
        tally = plan.tally(self.verify)
        plan.install(tally)
        meter = self._start_meter(plan)
        loss_fn = self.loss_fn if arguments[2] else None
        slots, spread = self._structure.parameters, _torch.in_ddp()
        with plan.installed(slots, arguments, spread=spread, tally=tally) as (given, early):
            try:
                output = plan.step.capture(self.module, loss_fn, *given)
            except Unplanned as reached:
                if meter is not None:
                    meter.cancel()
                if early is not None:
                    reached.primals[:] = map(early.original, reached.primals)
                return None, None, reached
        return output, meter, None

    def _learn(self, plan: Any, step: StepBytes) -> None:
        if isinstance(plan, GraphPlan):
            super()._learn(plan, step)
            return
        if isinstance(plan, DynamicPlan):
            self._learn_dynamically(plan, step)
            return
        plan.measured_timeline = step.timeline
        self._learn_pieces(plan, step)

    def _learn_loss(self, key: Any, plan: GraphPlan, step: StepBytes) -> bool:
        learned = max(step.loss_bytes - plan.step.tangent_bytes, 0)
        if plan.step.loss_captured or learned == plan.loss_bytes:
            return False
        self._learned_loss[key[0]] = learned
        return True

    def _repriced(self, key: Any, plan: GraphPlan) -> int:
        return repriced(plan, self._loss_bytes(key))


_NO_TARGETS: tuple[Any, ...] = ()
