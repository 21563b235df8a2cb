"""Measured costs of operations: each distinct one runs alone, on made-up inputs of its layout.

Times are medians until stable; the workspace is the memory given out beside the outputs, as
`glance` sees it. Measuring needs no more memory than one operation. Results are kept on disk, by
device, threads and PyTorch version (`rotor.common.cache`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from rotor._pytorch import core, devices, dispatch, scripts
from rotor.common import cache
from rotor.common.tensor_trees import extent_of, tree_tensors
from rotor.common.undisturbed import generators_kept, random_states_kept
from rotor.engines.graph.costs.repeating import UNTESTED, Orders, events_of, orders_within, tested
from rotor.engines.graph.tracing.fetches import is_collective
from rotor.engines.graph.tracing.groups import groups_among, prepare
from rotor.engines.graph.tracing.lowering import Lowered, Task, at_path
from rotor.meter import allocator as memory
from rotor.timing import measure_ns

logger = logging.getLogger("rotor")

_SECONDS_PER_OPERATION = 0.5


_RANDOM_BLOCK = 1 << 10
_BYTES_PER_NS = (4, 500)  # On the CPU, and on an accelerator.
_MOST_DEPTH = 30
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
_OVERHEAD_NS = 5_000
_RUNS_OF_SCRIPTS = 3  # The first learns of the forward, the second of the backward.


@dataclass(frozen=True)
class Cost:
    """Costs of one run of an operation."""

    ns: int
    workspace_bytes: int
    """Bytes needed beside its inputs and outputs."""
    made_bytes: tuple[int, ...] = ()
    """Real sizes of the storages that it makes."""
    flags: int = UNTESTED
    """Observations of two runs (`rotor.engines.graph.costs.repeating`)."""
    orders: Orders | None = None
    """Possible orders of its allocations on an accelerator; None if not recorded."""

    def to_row(self) -> list[int]:
        """Return the cost as a row of a table, which `cost_of_row` reads."""
        row = [self.ns, self.workspace_bytes, *self.made_bytes, self.flags]
        if self.orders is not None:
            row += [len(self.orders), *(len(order) for order in self.orders)]
            row += [entry for order in self.orders for entry in order]
        return row


_HERE = "device"
_NUMBERS = (type(None), bool, int, float)


def _described(value: Any, device: torch.device, known: dict[fx.Node, Any]) -> Any:
    """Return an argument as a part of an operation's key: layouts of tensors, constants as given.

    The step's device is described without its name, since profiles are kept by device.
    """
    if type(value) in _NUMBERS:
        return repr(value)
    if isinstance(value, fx.Node):
        found = known.get(value)
        if found is None:
            found = known[value] = _described(value.meta.get("val"), device, known)
        return found
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            str(value.dtype),
            _HERE if value.device == device else str(value.device),
            tuple(value.shape),
            value.stride() if value.layout == torch.strided else str(value.layout),
        )
    if isinstance(value, list | tuple):
        return tuple([_described(item, device, known) for item in value])
    if isinstance(value, dict):
        return tuple(
            [(name, _described(item, device, known)) for name, item in sorted(value.items())]
        )
    if isinstance(value, torch.device):
        here = value.type == device.type and value.index in (None, device.index)
        return _HERE if here else repr(value)
    return repr(value)


_CLONING = ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
"""Operators that clone the whole storage of an argument, and not its elements alone."""


def clones_storage(task: Task) -> bool:
    """Return whether an operation may clone more of an argument's storage than the argument."""
    name = str(getattr(task.node, "target", ""))
    return name.startswith("aten.") and name.split(".")[1] in _CLONING


def _elements_of_storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage().nbytes()) // value.itemsize


def _places(task: Task) -> Any:
    """Return the storages in which the arguments lie, where an operation clones them whole."""
    assert task.node is not None
    if not clones_storage(task):
        return ()
    values = [node.meta.get("val") for node in task.node.all_input_nodes]
    return tuple(
        (value.storage_offset(), _elements_of_storage(value))
        for value in values
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    )


def keys_of(lowered: Lowered, device: torch.device) -> list[str]:
    """Return the key of each operation, captured on a device; empty for the loss."""
    known: dict[fx.Node, Any] = {}
    return [
        repr(
            (
                str(task.node.target),
                _described(task.node.args, device, known),
                _described(task.node.kwargs, device, known),
                *_places(task),
            )
        )
        if task.node is not None
        else ""
        for task in lowered.tasks
    ]


def cost_of_row(row: Sequence[int] | None, made: int) -> Cost | None:
    """Return the cost in a row of a table, for an operation that makes so many storages.

    Rows of earlier versions end before the flags, which were not tested then, or before the orders.
    """
    if row is None or len(row) < 2 + made:
        return None
    flags = row[2 + made] if len(row) > 2 + made else UNTESTED
    orders: Orders | None = None
    if len(row) > 3 + made:
        count, rest = row[3 + made], list(row[4 + made :])
        lengths, rest = rest[:count], rest[count:]
        if sum(lengths) != len(rest):
            return None
        orders = tuple(tuple(rest.pop(0) for _ in range(length)) for length in lengths)
    return Cost(row[0], row[1], tuple(row[2 : 2 + made]), flags, orders)


def holds_whole_numbers(value: Any) -> bool:
    """Return whether a value is a tensor of whole numbers, which may be indices."""
    return (
        isinstance(value, torch.Tensor)
        and not (value.dtype.is_floating_point or value.dtype.is_complex)
        and value.dtype != torch.bool
    )


class Arguments:
    """Maker of arguments to run operations with.

    The model's own tensors, and views of them, are taken as they are; computed values are
    replaced by random floats, and by `whole` for integers (they may be indices).
    """

    def __init__(self, lowered: Lowered, primals: Sequence[Any]) -> None:
        self.lowered = lowered
        self.real: dict[fx.Node, Any] = dict(zip(lowered.primals, primals, strict=False))
        self.whole = 0
        self.are_shared = False
        """True if all ranks run the operations together, so that collectives may run."""
        self._depth = 0
        self._in_storage = False
        self._blocks: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, task: Task) -> tuple[Any, Any, Any]:
        """Return the function, its arguments by position and by name."""
        assert task.node is not None
        if is_collective(task.node) and not self.are_shared:
            raise ValueError("all ranks run it together, or none")
        self._in_storage = clones_storage(task)
        return (
            core.callable_of(task.node.target),
            self._made_up(task.node.args),
            self._made_up(task.node.kwargs),
        )

    def _made_up(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if isinstance(value, torch.Tensor):
            return self._like(value)
        if isinstance(value, list | tuple):
            return type(value)([self._made_up(item) for item in value])
        if isinstance(value, dict):
            return {name: self._made_up(item) for name, item in value.items()}
        return value

    def _of_node(self, node: fx.Node) -> Any:
        if node in self.real:
            return self.real[node]
        if node.op == "get_attr":
            return core.attribute(self.lowered.module, str(node.target))
        value = self.lowered.values.get(node)
        if value is not None and value.kind == "view" and not value.storages:
            function = core.callable_of(node.target)
            return function(*self._made_up(node.args), **self._made_up(node.kwargs))
        found = node.meta.get("val")
        if value is not None and node.op == "call_function" and holds_whole_numbers(found):
            # Indices and opaque states must be valid: their makers are run.
            made = self._made_by(node)
            if made is not None:
                return made
        return self._made_up(found)

    def _made_by(self, node: fx.Node) -> Any:
        if self._depth > _MOST_DEPTH or is_collective(node):
            return None
        self._depth += 1
        try:
            if node.target is operator.getitem:
                made = self._made_by(node.args[0])  # type: ignore[arg-type]
                return None if made is None else made[node.args[1]]
            function = core.callable_of(node.target)
            return function(*self._made_up(node.args), **self._made_up(node.kwargs))
        except FAILURES:
            return None
        finally:
            self._depth -= 1

    def _like(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided:
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        begin, extent = 0, extent_of(value.shape, value.stride())
        if self._in_storage:
            begin, extent = int(value.storage_offset()), max(extent, _elements_of_storage(value))
        flat = torch.empty(extent, dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            self._fill(flat)
        else:
            flat.fill_(True if value.dtype == torch.bool else self.whole)
        return flat.as_strided(value.shape, value.stride(), begin)

    def _fill(self, flat: torch.Tensor) -> None:
        """Fill a tensor with repeats of one random block: drawing costs more than operations do."""
        kind = (flat.dtype, flat.device)
        if kind not in self._blocks:
            drawn = torch.empty(_RANDOM_BLOCK, dtype=flat.dtype, device=flat.device)
            self._blocks[kind] = drawn.uniform_(0.1, 1.0)
        block = self._blocks[kind]
        end = flat.numel() - flat.numel() % _RANDOM_BLOCK
        flat[:end].view(-1, _RANDOM_BLOCK).copy_(block)
        flat[end:].copy_(block[: flat.numel() - end])


def environment_of(device: torch.device) -> str:
    """Return the key of a table of costs: PyTorch, the device, threads, and an accelerator's flags.

    Flags choose an accelerator's kernels: precisions, determinism, searches for algorithms.
    """
    parts = (torch.__version__, devices.name_of(device), torch.get_num_threads())
    if device.type == "cpu":
        return repr(parts)
    return repr((*parts, dispatch.backend_flags(), devices.libraries(device)))


def choose_kernels(
    tasks: Iterable[Task], lowered: Lowered, device: torch.device, primals: Sequence[Any]
) -> None:
    """Compile kernels, and have both threads of a step search the algorithms of convolutions.

    `tasks` include operations whose costs are known. This comes before a step runs.
    """
    tasks = list(tasks)
    prepare(groups_among(task.node for task in tasks))
    if not devices.searches(device):
        return
    found = [task for task in tasks if "convolution" in str(task.node and task.node.target)]
    arguments = Arguments(lowered, primals)

    def run() -> None:
        for task in found:
            with suppress(*FAILURES):
                function, args, kwargs = arguments.of(task)
                function(*args, **kwargs)

    with isolated(device):
        run()
        devices.run_in_backward(device, run)


def warm_up_scripts(lowered: Lowered, primals: Sequence[Any]) -> None:
    """Run calls of scripts until their executors run the code that they will keep.

    Raise CaptureError if that code gives results of another layout.
    """
    calls = [task for task in lowered.tasks if scripts.runs_script(task.node)]
    arguments = Arguments(lowered, primals)
    for task in calls:
        assert task.node is not None
        with isolated(task.node.args[1][0].meta["val"].device):  # type: ignore[index, union-attr]
            function, args, kwargs = arguments.of(task)
            for _ in range(_RUNS_OF_SCRIPTS):
                made = function(*args, **kwargs)
        for tensor, planned in zip(made, task.node.meta["val"], strict=True):
            if (tensor.stride(), tensor.dtype) != (planned.stride(), planned.dtype):
                raise scripts.refused(args[0], "makes results of a layout of its own")


def distinct_operations(
    lowered: Lowered, keys: Sequence[str], device: torch.device
) -> tuple[dict[str, Task], dict[str, Cost]]:
    """Return the distinct operations by key, and the costs of those that are kept on disk."""
    distinct = {key: task for key, task in zip(keys, lowered.tasks, strict=True) if key}
    store = cache.load("profile", environment_of(device))
    known: dict[str, Cost] = {}
    for key, task in distinct.items():
        cost = cost_of_row(store.get(key), len(task.made))
        is_whole = cost is not None and (device.type == "cpu" or cost.orders is not None)
        if cost is not None and is_whole and cost.flags != UNTESTED:
            known[key] = cost
    return distinct, known


def in_order(lowered: Lowered, keys: Sequence[str], known: Mapping[str, Cost]) -> list[Cost]:
    """Return the cost of every operation from the costs by key; the loss's is zero."""
    no_cost = Cost(0, 0, tuple(planned_bytes(lowered, lowered.tasks[lowered.loss])))
    return [known[key] if key else no_cost for key in keys]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Return a context to run operations without gradients and casts; it restores random states."""
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        random_states_kept(device),
        generators_kept(),
    ):
        yield


def planned_bytes(lowered: Lowered, task: Task) -> list[int]:
    """Return the sizes of an operation's new storages by its fake tensors."""
    return [lowered.storages[storage][0] for storage in task.made.values()]


def orders_of(
    tasks: Sequence[Task],
    wholes: Sequence[int],
    sizes: Sequence[Sequence[int]],
    arguments: Arguments,
    device: torch.device,
) -> list[Orders]:
    """Return the orders of the allocations within operations on an accelerator.

    By operation, `wholes` have the made-up whole number that it takes, and `sizes` the bytes that
    it makes.
    """

    def calls() -> Iterator[Callable[[], Any]]:
        for task, arguments.whole in zip(tasks, wholes, strict=True):
            yield _call(task, arguments)

    events = events_of(calls(), device)
    return [orders_within(*one) for one in zip(events, sizes, strict=True)]


def _call(task: Task, arguments: Arguments) -> Callable[[], Any]:
    """Return a run of an operation on made-up arguments."""
    function, args, kwargs = arguments.of(task)
    return partial(function, *args, **kwargs)


def tested_alone(task: Task, arguments: Arguments, device: torch.device) -> int:
    """Run an operation twice on made-up arguments; return its flags."""
    return tested(task, _call(task, arguments), device)


def sizes_of(task: Task, result: Any, given: Any, planned: list[int]) -> list[int]:
    """Return the bytes of the resulting storages; the planned bytes where one is not new."""
    known = {core.storage_identity(tensor) for tensor in tree_tensors(given)}
    found = []
    for path, size in zip(task.made, planned, strict=True):
        tensor = at_path(result, path)
        if isinstance(tensor, torch.Tensor) and core.storage_identity(tensor) not in known:
            size = memory.storage_bytes([tensor])
        found.append(size)
    return found


def wholes_for(task: Task, device: torch.device) -> tuple[int, ...]:
    """Return made-up whole numbers to try: some operations take no 0, as a number of heads.

    An index out of bounds is an error on the CPU; on an accelerator it is an assertion of a kernel,
    after which no kernel of the process runs. There, 1 is tried if all dimensions have it.
    """
    assert task.node is not None
    values = [source.meta.get("val") for source in task.node.all_input_nodes]
    is_safe = device.type == "cpu" or all(1 not in t.shape for t in tree_tensors(values))
    return (0, 1) if is_safe else (0,)


def estimated_ns(task: Task, device: torch.device) -> int:
    """Return a time by the bytes read and made, for operations that cannot run alone."""
    assert task.node is not None
    nodes = [*task.node.all_input_nodes, task.node]
    tensors = tree_tensors([node.meta.get("val") for node in nodes])
    total = sum(t.numel() * t.element_size() for t in tensors)
    return _OVERHEAD_NS + total // _BYTES_PER_NS[device.type != "cpu"]


Found = TypeVar("Found")


def found_alone(
    task: Task, arguments: Arguments, device: torch.device, run: Callable[[], Found]
) -> Found | None:
    """Return what a run of an operation on made-up arguments finds; None if it does not run."""
    for arguments.whole in wholes_for(task, device):
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            reason = str(error)
    assert task.node is not None
    logger.info(
        "%s of %s is estimated by its bytes, for it does not run alone: %s",
        task.node.format_node(),
        task.module or "the model",
        reason,
    )
    return None


def timed(task: Task, arguments: Arguments, device: torch.device) -> int | None:
    """Return the nanoseconds of a run; None if the operation does not run on made-up arguments."""

    def run() -> int:
        return measure_ns(_call(task, arguments), device, max_seconds=_SECONDS_PER_OPERATION)

    return found_alone(task, arguments, device, run)
