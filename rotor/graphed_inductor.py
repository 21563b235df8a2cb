"""`Checkpointable` with ``backend="inductor"``: the planned graphs are compiled."""

from __future__ import annotations

import logging
from typing import Any

from rotor.errors import InfeasibleError
from rotor.graph.engine import GraphPlan
from rotor.graph.inductor import Attempt
from rotor.graphed import GraphCheckpointable
from rotor.metering import StepBytes
from rotor.report.text import Text, attempt_table
from rotor.units import format_bytes

logger = logging.getLogger("rotor")

_WORTH_COMPILING = 0.95


class _StayWithFX(Exception):
    """No program fits under Inductor: the signature has to be captured again, for FX."""


class InductorCheckpointable(GraphCheckpointable):
    """What `Checkpointable` makes of a module when Inductor compiles its plans.

    Inductor fuses operations as it likes, so that a program's bytes are known when it has run. The
    first steps are metered; where one needed more than the limit, the step is planned again with
    what fuses far apart kept apart, then for fewer bytes; where none of these fits, our own code
    (``backend="fx"``) runs, and a warning says so.
    """

    _attempts: dict[Any, list[Attempt]]

    def _begin(self) -> None:
        super()._begin()
        self.__dict__["_attempts"] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_attempts": {}}

    def _backend_of(self, key: Any) -> str:
        return "fx" if key[0] in self._attempts else "inductor"

    def compute_sequence(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the program that the following steps run; see `GraphCheckpointable`.

        It is compiled when the first step runs. A signature that stays with FX stays there until
        `measure` is called.
        """
        for step in [found for known in self._steps.values() for found in known.variants()]:
            if step.inductor is not None:
                step.inductor.begin()
        return super().compute_sequence(*args, **kwargs)

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """Capture a training step on a sample; see `GraphCheckpointable`."""
        self._attempts.clear()
        return super().measure(*args, **kwargs)

    def display(self) -> str:
        """A table of the operations, and of the measured programs; ValueError: no plan."""
        return f"{super().display()}\n\n{self._tried()}"

    def _report(self) -> str:
        """Which backend runs, limit, peaks predicted and measured."""
        return Text(f"{super()._report()}\n\n{self._tried()}")

    def _tried(self) -> str:
        plan = self._planned()
        if isinstance(plan, GraphPlan) and plan.step.inductor is not None:
            return attempt_table(plan.step.inductor.attempts, "Inductor")
        latest = self._latest_key
        tried = [] if latest is None else self._attempts.get(latest[0], [])
        return attempt_table(tried, "FX" if isinstance(plan, GraphPlan) else "blocks")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, or its loss; see `GraphCheckpointable`."""
        try:
            return super().forward(*args, **kwargs)
        except _StayWithFX:
            return super().forward(*args, **kwargs)

    def _replanned(self, key: Any) -> Any:
        old = self._plans.get(key)
        step = self._steps.get(key[0])
        if not isinstance(old, GraphPlan) or step is None or step.inductor is None:
            return super()._replanned(key)
        try:
            return self._make(key, old.reserve_bytes)
        except InfeasibleError:
            self._give_up(key, old)
            raise _StayWithFX from None

    def _learn(self, plan: Any, step: StepBytes) -> None:
        inductor = plan.step.inductor if isinstance(plan, GraphPlan) else None
        key = next((k for k, p in self._plans.items() if p is plan), None)
        if inductor is None or key is None:
            super()._learn(plan, step)
            return
        plan.measured_bytes = step.peak_bytes
        inductor.learn(plan.limit_bytes - plan.reserve_bytes, plan.predicted_bytes, step.peak_bytes)
        logger.info(
            "Inductor: measured peak %s, predicted %s, limit %s",
            format_bytes(step.peak_bytes),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
        )
        new_loss = self._learn_loss(key, plan, step)
        if step.peak_bytes > plan.limit_bytes:
            target = inductor.next_target(plan.limit_bytes)
            if target is None:
                self._give_up(key, plan)
                return
            plan.reserve_bytes = plan.limit_bytes - target
            plan.outdated = True
        elif new_loss and plan.recomputed and plan.reserve_bytes == 0:
            # The loss needs less than was assumed: a faster program may fit.
            plan.outdated = self._repriced(key, plan) < _WORTH_COMPILING * plan.limit_bytes

    def _give_up(self, key: Any, plan: GraphPlan) -> None:
        assert plan.step.inductor is not None
        attempts = list(plan.step.inductor.attempts)
        self._forget(key[0])
        self._attempts[key[0]] = attempts
        found = ", ".join(
            f"{a.measured_bytes} bytes ({a.predicted_bytes} planned)" for a in attempts
        )
        self._warn_once(
            f"inductor {key!r}",
            f"the limit of {plan.limit_bytes} bytes was not kept by the code that Inductor "
            f'compiled: it needed {found}. The next steps run our own code, backend="fx", which '
            "needs what is planned; a higher limit or a smaller batch would let Inductor run",
        )
