"""What each mechanism of the dynamic runtime is worth: steps without it, in one run with all.

`dtr_table.py --ablation` prints these tables. Programs run in 60 % of their plain peak. For each
way of running them: time (of the CPU; on CUDA wall time) as a multiple of the plain step's (medians
of runs in turn, one thread), evictions, operators run again, and the allocator's peak as a share of
the budget.
"""

from __future__ import annotations

import copy
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from common import read_clock
from dtr_cases import Plain, Program, medians, results, same, step, timed
from oracles.dtr_operators import in_python

from rotor import _core, dtr, memory
from rotor._pytorch import dispatch
from rotor.dtr import recall
from rotor.errors import BudgetError

__all__ = ["ABLATED", "VARIANTS", "Variant", "ablation"]

ABLATED = ("resnet", "gpt", "lstm-100", "treelstm-64")
SHARE = 0.6
ROUNDS = 3
MOST_TIMES = 20.0
LEAST_SECONDS = 2.0


class TooSlow(RuntimeError):
    """A step took so many times the plain one's time that it was ended."""


@dataclass(frozen=True)
class Variant:
    """One way to run a program.

    Attributes
    ----------
    label
        What is different.
    settings
        Of `rotor.dtr.budget`.
    patches
        Makes what replaces parts of the runtime.
    keeps
        Whether values stay that the program has dropped, until they are evicted.
    """

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    patches: Callable[[], list[Any]] = list
    keeps: bool = False


def _book(**options: Any) -> Callable[[], list[Any]]:
    """Sessions whose book has these options."""
    return lambda: [mock.patch.object(recall._core, "Recorder", partial(_Recorder, **options))]


_Recorder = _core.Recorder
_known_needs = recall.known_needs
_handler_parts = dispatch.handler_parts


def _needs(**changes: int) -> Callable[[], list[Any]]:
    """Sessions that believe this of every operator that they know."""

    def known(device: torch.device) -> dict[Any, _core.Needs]:
        found = {}
        for key, needs in _known_needs(device).items():
            given = {"made_bytes": needs.made_bytes, "workspace_bytes": needs.workspace_bytes}
            found[key] = _core.Needs(**(given | changes), is_measured=True)
        return found

    return lambda: [mock.patch.object(recall, "known_needs", known)]


def _recorded_backward() -> list[Any]:
    """Sessions that take a backward for any other part of the program."""

    def nowhere() -> int:
        return -1

    def parts(device: torch.device) -> tuple[Any, ...]:
        return tuple(
            nowhere if part is torch._C._current_graph_task_id else part
            for part in _handler_parts(device)
        )

    return [
        mock.patch.object(dispatch, "graph_task", nowhere),
        mock.patch.object(dispatch, "handler_parts", parts),
    ]


def _textbook() -> list[Any]:
    book = _book(mixes_temporaries=True, rebuild_every=0, never_keep=True)
    return [*_recorded_backward(), *book()]


_CLASSES = {"heuristic": "DTREqClass"}

VARIANTS = (
    Variant("everything"),
    Variant("resize and copy instead of swapping", {"storage_swap": False}),
    Variant("temporaries not first", patches=_book(mixes_temporaries=True)),
    Variant("DTREqClass, never rebuilt", _CLASSES, patches=_book(rebuild_every=0)),
    Variant("backward recorded", patches=_recorded_backward),
    Variant("thrashing not looked for", patches=_book(never_keep=True)),
    Variant("as published", _CLASSES, patches=_textbook),
    Variant("DTREqClass, rebuilt each time", _CLASSES, patches=_book(rebuild_every=1)),
    Variant("no room for workspaces", patches=_needs(workspace_bytes=0)),
    Variant("room made afterwards", patches=_needs(made_bytes=0, workspace_bytes=0)),
    Variant("operators handled in Python", patches=lambda: [in_python()]),
    Variant("the same, dropped values kept", patches=lambda: [in_python()], keeps=True),
    Variant("no guard of reads", {"guard": False}),
    Variant("sampling", {"sample": True}),
    Variant("small tensors ignored", {"ignore_small": True}),
    Variant("heuristic DTREqClass", _CLASSES),
    Variant("heuristic DTR", {"heuristic": "DTR"}),
    Variant("heuristic DTRLocal", {"heuristic": "DTRLocal"}),
    Variant("heuristic MSPS", {"heuristic": "MSPS"}),
    Variant("heuristic LRU", {"heuristic": "LRU"}),
    Variant("heuristic LargestStorage", {"heuristic": "LargestStorage"}),
    Variant("heuristic RandomStorage", {"heuristic": "RandomStorage"}),
)


class _Keeper:
    """Holds the storages of values that can be computed again, as if nothing were dropped."""

    def __init__(self) -> None:
        self.session: Any = None
        self.held: list[Any] = []

    def operation(
        self, name: str, cost_ns: int, inputs: Any, outputs: Any, written: Any, is_recorded: bool
    ) -> None:
        """Hold what was made."""
        if is_recorded:
            self.held += [self.session._storage(node) for node, _ in outputs]

    def constant(self, node: int, nbytes: int) -> None:
        """Not held."""

    released = pinned = evicted = lambda self, node: None


@contextmanager
def _at_most(seconds: float, device: torch.device) -> Iterator[None]:
    """Lift the session's limit within after so many seconds, and say so at the end.

    The seconds are of CPU time, or on CUDA of wall time. Without a limit the step is over
    soon; an exception of a signal could fall where Python drops it.

    Raises
    ------
    TooSlow
        At the end.
    """
    on_cpu = device.type == "cpu"
    timer = signal.ITIMER_VIRTUAL if on_cpu else signal.ITIMER_REAL
    number = signal.SIGVTALRM if on_cpu else signal.SIGALRM
    is_late = False

    def lift(*_: Any) -> None:
        nonlocal is_late
        is_late = True
        session = dtr.current()
        if session is not None:
            session.set_limit(None)

    before = signal.signal(number, lift)
    signal.setitimer(timer, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
    if is_late:
        raise TooSlow


@dataclass(frozen=True)
class Ran:
    """What a step did: time, figures, the allocator's peak (metered ones), equality."""

    seconds: float
    stats: dtr.Stats
    peak_bytes: int
    is_equal: bool


def run(
    plain: Plain, limit: int, variant: Variant, most_seconds: float, *, is_metered: bool = False
) -> Ran:
    """A step of a fresh copy.

    Raises
    ------
    TooSlow
        It took longer.
    BudgetError
        It does not fit.
    """
    model = copy.deepcopy(plain.model)
    keeper = _Keeper()
    settings = dict(variant.settings)
    if variant.keeps:
        settings["record_log"] = keeper
    with ExitStack() as stack:
        for patch in variant.patches():
            stack.enter_context(patch)
        stack.enter_context(_at_most(most_seconds, plain.device))
        meter = stack.enter_context(memory.meter(plain.device)) if is_metered else None
        start = read_clock(plain.device)
        with dtr.budget(limit, device=plain.device, **settings) as session:
            keeper.session = session
            value = step(model, plain.loss)
            stats = session.stats
            keeper.held.clear()
        took = read_clock(plain.device) - start
    equal = same(plain.results, results(model, value))
    return Ran(took, stats, 0 if meter is None else meter.peak_bytes, equal)


def ablation(program: Program, plain: Plain, rounds: int = ROUNDS) -> None:
    """Print the table of one program."""
    limit = int(plain.peak_bytes * SHARE)
    plain.under(limit, strict=False)
    most = max(MOST_TIMES * min(timed(plain) for _ in range(3)), LEAST_SECONDS)
    print(f"{program.name} in {limit / 1e3:.0f} kB, {SHARE:.0%} of the plain peak", flush=True)
    print(f"{'':36}{'time':>6}{'evicted':>9}{'again':>7}{'peak/budget':>13}  equal")
    endings: dict[str, str] = {}
    ran: dict[str, Ran] = {}
    for variant in VARIANTS:
        try:
            ran[variant.label] = run(plain, limit, variant, most, is_metered=True)
        except BudgetError:
            endings[variant.label] = "does not fit"
        except TooSlow:
            endings[variant.label] = f"ended after {most:.0f} s, {MOST_TIMES:.0f} plain steps"
    finishing = [variant for variant in VARIANTS if variant.label in ran]

    def seconds(variant: Variant) -> float:
        try:
            return run(plain, limit, variant, most).seconds
        except (BudgetError, TooSlow):
            return math.inf

    base, *times = medians(
        [partial(timed, plain), *(partial(seconds, variant) for variant in finishing)], rounds
    )
    slowdowns = dict(zip([variant.label for variant in finishing], times, strict=True))
    for variant in VARIANTS:
        label = variant.label
        if label in endings:
            print(f"{label:36}  {endings[label]}")
            continue
        stats = ran[label].stats
        print(
            f"{label:36}{slowdowns[label] / base:6.2f}{stats.evictions:9}"
            f"{stats.rematerializations:7}{ran[label].peak_bytes / limit:13.3f}"
            f"  {'yes' if ran[label].is_equal else 'NO'}",
            flush=True,
        )
