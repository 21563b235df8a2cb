"""Backwards that a plan cannot give: a part of the step runs again, under plain autograd.

What a plan keeps is enough for one first-order backward of the whole part. Gradients that are to be
differentiated themselves, gradients of inputs before those of parameters, batches of gradients, and
a second backward take another way: the part's forward runs again from its inputs, in the state in
which it ran first, and autograd differentiates that.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from rotor._pytorch import backwards, core, devices, ends
from rotor._pytorch.draws import generators, state_of
from rotor.common.accounting import NEW_MAXIMUM
from rotor.common.collector import CollectorPause
from rotor.common.dependencies import Dependencies, Record
from rotor.common.modes import SPLIT_BACKWARD, Modes, RngTracker
from rotor.common.places import is_same
from rotor.common.tensor_trees import apart_of, join, tree_tensors, with_tensors
from rotor.common.undisturbed import buffers_copied, generators_kept, trial


class Needs:
    """Largest number of bytes in use while a part of a step runs again, and is differentiated.

    `report` is called with the bytes, and with whether the plan keeps others beside them (``None``
    if these are all). `start_bytes` are the bytes in use before the step, if the part is all of it.
    """

    def __init__(self, device: torch.device, report: Callable[[int, bool | None], object]) -> None:
        self._device, self._report = device, report
        self._level = self._most = self._told = 0
        self._is_kept: bool | None = None
        self.start_bytes: int | None = None

    def begin(self) -> None:
        """Begin to count, at the start of the step or now."""
        level = devices.level(self._device)
        backwards.load_checks()
        self._level, self._most, self._told = devices.level(self._device), 0, 0
        if self.start_bytes is not None:
            self.start_bytes = self._level = self.start_bytes + self._level - level

    def note(self, more_bytes: int = 0) -> None:
        """Note the bytes in use where a part needs most, and more that follow."""
        needed = devices.level(self._device) - self._level + more_bytes
        self._most = max(needed, self._most)
        if 0 < self._told * NEW_MAXIMUM < needed:
            self.tell(self._is_kept)

    def tell(self, is_kept: bool | None) -> None:
        """Report the bytes; a larger need that is noted later is reported when it is noted."""
        self._told = self._most
        self._is_kept = is_kept if self.start_bytes is None else None
        self._report(self._most, self._is_kept)


_FIRST_BYTES = 1 << 16
"""Size up to which a buffer is copied before the first forward, which may write to it."""

_VERSION = attrgetter("_version")
_CONSTANT_STEPS = 3
"""Steps in a row that find the same Python state, after which it is read no more."""


class StepNotes:
    """Notes that a part needs of the step in which it runs.

    With `preserves_rng` it runs again with the random numbers of the first forward.
    """

    __slots__ = ("preserves_rng",)

    def __init__(self, *, preserves_rng: bool = True) -> None:
        self.preserves_rng = preserves_rng

    def report(self, needed_bytes: int, is_kept: bool | None) -> None:
        """Take the bytes that a forward which ran again has needed.

        `is_kept` is True if a backward under the plan has run, and kept its values; ``None`` if the
        bytes are those of the whole step.
        """

    def report_kept(self, more_bytes: int) -> None:
        """Take the bytes by which a further backward under the plan begins above the first one."""


_ALONE = StepNotes()
STEP: ContextVar[StepNotes] = ContextVar("step", default=_ALONE)
"""Notes of the running step."""


class Unit:
    """Modules that run together, with their children, and the buffers that their forward writes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.parameters = [slot for m in self.modules for slot in core.parameter_slots(m)]
        self.buffers = [slot for m in self.modules for slot in core.buffer_slots(m)]
        self.slots = [*self.parameters, *self.buffers]
        self.read_parameters = core.reader(self.parameters)
        self.read_buffers = core.reader(self.buffers)
        self._versions: list[tuple[int, int]] | None = None
        self._written: set[int] = set()
        self._generators = generators(self.modules)
        self._dependencies: Dependencies | None = None
        self._latest: list[Any] | None = None
        self._constant_steps = 0

    def keep_state(self) -> None:
        """Never take the Python state for constant."""
        self._constant_steps, self._latest = -1, None

    def flags(self) -> list[bool]:
        """Return the training flag of every module."""
        return [module.training for module in self.modules]

    def note_written(self) -> Iterable[int]:
        """Note which buffers forwards write to; return the numbers of those to copy."""
        if not self.buffers:
            return ()
        values = list(self.read_buffers())
        now = [*zip(map(id, values), _versions(values), strict=True)]
        before, self._versions = self._versions, now
        if before is None:
            return [k for k, v in enumerate(values) if v is None or _bytes(v) <= _FIRST_BYTES]
        pairs = enumerate(zip(now, before, strict=True))
        self._written.update(k for k, (new, old) in pairs if new != old)
        return self._written

    def surroundings(self) -> Surroundings | None:
        """Return the Python state of a forward that begins; ``None`` once it has proved constant.

        Tensors of an earlier forward live as long as what is returned.
        """
        if self._constant_steps >= _CONSTANT_STEPS:
            return None
        found = None if self._dependencies is None else self._dependencies.recorded()
        if found is None:
            self._dependencies = Dependencies((type(m).__name__, m) for m in self.modules)
            found = self._dependencies.recorded()
        if found is None:
            self._constant_steps, self._dependencies, self._latest = _CONSTANT_STEPS, None, None
            return None
        lasting = set(map(id, (*self.read_parameters(), *self.read_buffers())))
        found[0].forget(lasting)
        draws = list(map(state_of, self._generators))
        if self._constant_steps >= 0:
            states = hash(pickle.dumps([draw.args[-1] for draw in draws]))
            values = [states, *found[1]]
            before, self._latest = self._latest, [_weakly(value, lasting) for value in values]
            if before is not None:
                is_constant = len(before) == len(values)
                is_constant &= all(map(_is_still, before, values, repeat(lasting)))
                self._constant_steps = self._constant_steps + 1 if is_constant else -1
            if self._constant_steps not in range(_CONSTANT_STEPS):
                self._latest = None
            if self._constant_steps == _CONSTANT_STEPS:
                self._dependencies = None
        return Surroundings(Record(found), draws)


class Surroundings(NamedTuple):
    """Python state in which a forward began."""

    record: Record
    """State that its code depends on."""
    draws: list[partial[Any]]
    """Functions that put generators of Python and NumPy back."""

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the state back inside; generators stay as they are then."""
        with self.record.put_back(()):
            self._put_generators_back()
            yield

    def restore(self) -> None:
        """Put the state and the generators back for good."""
        self.record.restore((), [])
        self._put_generators_back()

    def _put_generators_back(self) -> None:
        for draw in self.draws:
            draw()


def _weakly(value: Any, lasting: Collection[int]) -> Any:
    if isinstance(value, torch.Tensor):
        # What a module holds could not be swapped with a weak reference (torch.__future__).
        return id(value) if id(value) in lasting else weakref.ref(value)
    return value


def _is_still(before: Any, now: Any, lasting: Collection[int]) -> bool:
    if isinstance(before, weakref.ref):
        return is_same(before(), now)
    return is_same(before, _weakly(now, lasting))


def _bytes(tensor: torch.Tensor) -> int:
    return sum(part.nbytes for part in core.strided_parts(tensor))


def _versions(values: Sequence[Any]) -> list[int]:
    try:
        return list(map(_VERSION, values))
    except (AttributeError, RuntimeError):
        return [0 if v is None or v.is_inference() else v._version for v in values]


class Level(NamedTuple):
    """Numbers of one node's outputs among those of a part, and of earlier ones of other nodes."""

    own: Sequence[int]
    earlier: Sequence[int]


class Rerun:
    """State of a part, of its arguments and of random generators when its forward begins.

    `value` holds the arguments, nested; containers are copied. With `is_whole` the part is the
    whole model, whose arguments are the caller's; those of a smaller part live no longer than its
    plan wants.

    `surroundings` is the Python state until no other backward comes, ``None`` where it is not
    known, or constant. `is_batched` is True in a backward that makes batches of gradients which are
    to be differentiated. `leave` is a weak reference to a function that frees what the plan keeps:
    after a backward with ``create_graph``, all others run the forward again too. `needs` counts the
    bytes that the part needs when it runs again.
    """

    def __init__(
        self, unit: Unit, value: Any, device: torch.device, *, is_whole: bool = True
    ) -> None:
        self._unit, self._device, self._is_whole = unit, device, is_whole
        self._notes = STEP.get()
        self._modes = Modes(devices.type_of(device))
        self._flags = unit.flags()
        self._kept = [*unit.read_parameters(), *unit.read_buffers()]
        self._before: dict[int, torch.Tensor | None] = {}
        first = len(unit.parameters)
        for k in unit.note_written():
            buffer, self._kept[first + k] = self._kept[first + k], None
            self._before[k] = None if buffer is None else buffer.detach().clone()
        self._versions = _versions(self._kept)
        tensors = tree_tensors(value)
        self._value = with_tensors(value, tensors if is_whole else let_go(tensors))
        repeats = self._notes.preserves_rng
        self._set_generators = RngTracker(device).kept() if repeats else None
        self.surroundings = unit.surroundings() if repeats else None
        self._inputs = _versions(tensors)
        self.arguments = set(map(id, tensors))
        self._is_used = self._is_over = self._is_left = self.is_batched = False
        self._first_level = 0
        self._tape: tuple[Sequence[torch.Tensor], dict[int, torch.Tensor]] | None = None
        self.needs = Needs(device, self._notes.report)
        self.leave: Callable[[], Any] | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """Modules of the part, and their children."""
        return self._unit.modules

    def copies(self) -> list[torch.Tensor]:
        """Return the tensors that were made to keep the state."""
        return [value for value in self._before.values() if value is not None]

    def keep_state(self) -> None:
        """Have the Python state read in all later forwards, also where it is constant."""
        self._unit.keep_state()

    def is_wanted(
        self,
        given: Iterable[torch.Tensor | None],
        leaves: Iterable[torch.Tensor | None],
        *,
        repeats: bool = False,
        has_changed: bool = False,
    ) -> bool:
        """Return whether the running backward is one that a plan cannot give.

        `given` are the gradients of the outputs of the running node, which makes those of `leaves`,
        parameters and others; with `repeats` the plan keeps what a second backward needs; with
        `has_changed` its code reads other values than in the forward. Raises RuntimeError if this
        is half of the backward of a pipeline's stage, or if the graph was not kept for it.
        """
        self._tape = None  # Of a backward that has failed.
        if self._is_over:
            raise RuntimeError(
                "trying to backward through the model a second time, what it kept is freed: pass "
                "retain_graph=True to the first backward"
            )
        keeps = core.keeps_graph()
        is_split = keeps and self._splits_backward(leaves)
        if is_split and backwards.in_split_backward():
            raise RuntimeError(SPLIT_BACKWARD)
        is_used, self._is_over = self._is_left or (self._is_used and not repeats), not keeps
        is_batched = any(
            gradient is not None and backwards.is_batched(gradient) for gradient in given
        )
        self.is_batched = is_batched and torch.is_grad_enabled()
        # Arguments of smaller parts may be gone: their code makes all gradients in each backward.
        is_split &= self._is_whole or not repeats
        is_wanted = is_split or is_used or torch.is_grad_enabled() or is_batched or has_changed
        if keeps and not is_wanted:
            level = devices.level(self._device)
            if self._is_used:
                self._notes.report_kept(level - self._first_level)
            else:
                self._first_level = level
        self._is_used |= not is_wanted
        if self._is_over and not is_wanted:
            self._drop()
        return is_wanted

    def _splits_backward(self, leaves: Iterable[torch.Tensor | None]) -> bool:
        """Return whether the running backward leaves gradients of parameters to another one."""
        own = set(map(id, leaves))
        parameters = self._unit.read_parameters()
        return core.splits_backward(p for p in parameters if p is not None and id(p) in own)

    def _drop(self) -> None:
        """Drop the arguments and states: no other backward comes."""
        self._value, self._before, self._kept = None, {}, []
        self._set_generators = self.surroundings = None

    def output(self, forward: Callable[[Any], Any], apart: dict[int, torch.Tensor]) -> Any:
        """Return the result of the part's forward, run again from the same state with a tape.

        The tensors that stand for arguments are put into `apart`, by the ids of the arguments.
        Raises RuntimeError if a parameter, a buffer or an argument was written to since the first
        forward began; a parameter may have been by a forward that writes the same values again when
        it runs again.
        """
        unit, value, is_differentiable = self._unit, self._arguments(), torch.is_grad_enabled()
        written = self._written(value)
        ends = [(k, self._kept[k]._version, self._kept[k].detach().clone()) for k in written]
        with ExitStack() as stack:
            # The tensors get back the versions with which both graphs have saved them.
            begins = [(self._kept[k], self._versions[k]) for k in written]
            stack.enter_context(backwards.versions_set(begins))
            stack.enter_context(backwards.outside_transforms())
            stack.enter_context(_training(unit.modules, self._flags))
            roots = [(type(module).__name__, module) for module in unit.modules]
            stack.enter_context(trial(roots, (), self._device, is_guarded=False))
            stack.enter_context(generators_kept(unit.modules))
            if self.surroundings is not None:
                stack.enter_context(self.surroundings.put_back())
            stack.enter_context(self._modes)
            stack.enter_context(torch.enable_grad())
            value, kept = apart_of((value, self._kept), apart, is_differentiable)
            for (where, name), tensor in zip(unit.slots, kept, strict=True):
                if tensor is not None and tensor is not where[name]:
                    # `torch.func.functional_call` has put it in for one forward, say.
                    where[name] = tensor
            stack.enter_context(buffers_copied(unit.buffers))
            for k, before in self._before.items():
                where, name = unit.buffers[k]
                if before is not None:
                    where[name] = before.clone()
            if self._set_generators is not None:
                self._set_generators()
            try:
                result = forward(value)
                for k, version, copy in ends:
                    if self._kept[k]._version != version or not torch.equal(self._kept[k], copy):
                        raise _changed(f"parameter {unit.slots[k][1]}")
            except BaseException:
                for k, _, copy in ends:
                    self._kept[k].data.copy_(copy)
                raise
            return result

    def _arguments(self) -> Any:
        """Return the arguments in containers of their own; RuntimeError if one is gone."""
        leaves, spec = core.tree_flatten(self._value)
        found = list(map(present, leaves))
        if any(new is None and old is not None for new, old in zip(found, leaves, strict=True)):
            raise RuntimeError(
                "this backward, with create_graph=True say, has to run a part of the model again, "
                "whose plan has freed its input: raise mem_limit, or use the plain model "
                "(chk.module) for such a backward"
            )
        return core.tree_unflatten(found, spec)

    def gradients(
        self,
        forward: Callable[[Any], Sequence[torch.Tensor]],
        given: Sequence[torch.Tensor | None],
        wanted: Sequence[torch.Tensor],
        mine: Sequence[weakref.ref[torch.Tensor]] = (),
        level: Level | None = None,
    ) -> dict[int, torch.Tensor | None]:
        """Return gradients of the tensors in `wanted` that are asked for, by their ids.

        `forward` returns the part's outputs, whose gradients are `given`. `mine` are these outputs
        as the caller has them: what is computed of them from now on joins the new graph, so that
        sums of gradients are made in the order of plain autograd.

        `level` are the outputs of the running node, all by default, and earlier ones, beyond which
        no gradient goes: theirs are returned by their numbers. With a level, more nodes of the
        part may run in this backward, with the outputs of the same forward.
        """
        is_one = level is None
        level = Level(range(len(given)), ()) if level is None else level
        asked = {id(t): t for t in wanted if backwards.is_asked_for(t)}
        roots = [k for k, gradient in enumerate(given) if gradient is not None]
        if not roots:
            return {}
        if not (asked or level.earlier):
            self._arguments()  # The argument that is asked for may be gone.
            return {}
        with CollectorPause():  # Between two readings of the level it would free other memory.
            if self._tape is None:
                self._tape = self._taped(forward, len(given), mine)
                if not is_one:
                    ends.check_after_backward(self._end)
            outputs, apart = self._tape
            roots = [k for k in roots if outputs[k].requires_grad]
            earlier = [outputs[k] for k in level.earlier]
            hooks = core.hooks_of(asked.values())
            with core.without_hooks(hooks), backwards.cut(earlier):
                found = torch.autograd.grad(
                    [outputs[k] for k in roots],
                    [*(apart.get(k, tensor) for k, tensor in asked.items()), *earlier],
                    [given[k] for k in roots],
                    create_graph=torch.is_grad_enabled(),
                    retain_graph=None if is_one else True,
                    allow_unused=True,
                )
            if torch.is_grad_enabled() and mine:
                with backwards.outside_transforms():
                    for k in level.own:
                        join(mine[k](), outputs[k])
            del outputs, earlier
            self.needs.note()
            if is_one:
                self._end()
        return dict(zip([*asked, *level.earlier], found, strict=True))

    def _end(self) -> None:
        """Drop the forward that ran again; after the last backward the arguments too."""
        if self._tape is not None:
            self._tape[1].clear()
            self._tape = None
            self.needs.note()
            self.needs.tell(self._is_used)
        if self._is_over:
            self._drop()

    def _taped(
        self,
        forward: Callable[[Any], Sequence[torch.Tensor]],
        count: int,
        mine: Sequence[weakref.ref[torch.Tensor]],
    ) -> tuple[Sequence[torch.Tensor], dict[int, torch.Tensor]]:
        """Return the outputs of the part's forward, run again once in a backward."""
        if self.leave is not None and torch.is_grad_enabled():
            if (release := self.leave()) is not None:
                release()
            self._is_left = True
        self.needs.begin()
        apart = dict[int, torch.Tensor]()
        outputs = self.output(forward, apart)
        self.needs.note()
        if any(output is reference() for output in outputs for reference in mine):
            raise RuntimeError(
                "this backward has to run the model's forward again, and does not find all of its "
                "results there: use the plain model (chk.module) for such a backward"
            )
        if len(outputs) != count:
            raise RuntimeError(
                f"the forward returned {len(outputs)} tensors when it ran again for this "
                f"backward, and {count} before: it depends on a state that is not "
                "restored. Use the plain model (chk.module) for such a backward"
            )
        return outputs, apart

    def _written(self, value: Any) -> list[int]:
        """Return the numbers of the parameters written to since the beginning."""
        pairs = zip(_versions(self._kept), self._versions, strict=True)
        found = [k for k, (now, before) in enumerate(pairs) if now != before]
        count = len(self._unit.parameters)
        changed = [f"buffer {self._unit.slots[k][1]}" for k in found if k >= count]
        if _versions(tree_tensors(value)) != self._inputs:
            changed.append("an argument")
        if changed:
            raise _changed(changed[0])
        return found


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} of the model was changed in place since its forward began, by that forward or "
        "after it, and this backward has to run it again: change it after the backward, or use the "
        "plain model (chk.module) for such a backward"
    )


@contextmanager
def _training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Give modules these training flags inside."""
    before = [module.training for module in modules]
    try:
        for module, training in zip(modules, flags, strict=True):
            module.training = training
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def let_go(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return tensors of the caller's, and weak references to those that were computed."""
    return [
        t if type(t) is nn.Parameter or t.grad_fn is None else TensorWeakRef(t) for t in tensors
    ]


def present(leaf: Any) -> Any:
    """Return a leaf of arguments; ``None`` for a tensor that is gone."""
    return leaf() if isinstance(leaf, TensorWeakRef) else leaf
