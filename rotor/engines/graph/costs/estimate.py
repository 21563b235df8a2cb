"""Estimated costs of operations on a machine that is not at hand: a roofline of a few figures.

An operation takes the time to launch it, and the longer of its arithmetic and its memory traffic
(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Nothing is run: sizes come from the
captured graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rotor._pytorch import devices
from rotor.chain import Saved, check_header
from rotor.common.accounting import rounded_bytes
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.fetches import is_collective
from rotor.engines.graph.tracing.lowering import Lowered, Task, at_path
from rotor.timing import measure_ns

logger = logging.getLogger("rotor")

FORMAT = "rotor.machine"
VERSION = 1
_NS = 1_000_000_000
_LOW_PRECISION_BYTES = 2

_SIDES = (768, 4096)  # On the CPU, and on an accelerator.
_COPIED_BYTES = (1 << 25, 1 << 28)  # On the CPU, and on an accelerator.
_SECONDS_PER_FIGURE = 0.3
_LAUNCHES = 500
"""Operations in a row: more than an accelerator's queue hides behind the kernel before them."""

_AS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        "aten._scaled_dot_product_flash_attention",
        3,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten._scaled_dot_product_flash_attention_backward",
        4,
    ),
}
"""Operations with the formula of another, and the number of first arguments that it takes."""

_GATHERS = frozenset(
    f"aten.{name}" for name in ("embedding", "index", "_unsafe_index", "gather", "index_select")
)
"""Operations that read as much of their first argument as they make."""


@dataclass(frozen=True)
class Machine(Saved):
    """Speeds of a machine, for plans made elsewhere.

    Parameters
    ----------
    name
        Name for people.
    flops_per_second
        Floating-point operations a second, in float32 and wider.
    bytes_per_second
        Memory traffic, bytes read and written a second.
    launch_seconds
        Time of every operation, even the smallest.
    low_precision_flops_per_second
        The same in types of two bytes and less; ``None``: as in float32.
    device
        Type of the device, such as "cpu" or an accelerator's: the rounding of its allocator. The
        CPU's gives the size asked for, the caching allocator of accelerators multiples of 512
        bytes.
    link_bytes_per_second
        Bytes a second that it sends to other devices in a collective operation; ``None``: as memory
        traffic.

    Raises
    ------
    TypeError, ValueError
        A figure is not a positive number (`launch_seconds` may be 0); the device is another.

    Notes
    -----
    An operation is estimated at ``launch + max(flops / flops_per_second, bytes /
    bytes_per_second)``; on an accelerator, which is launched ahead of its work, at the largest of
    the three. The flops come from PyTorch's ``torch.utils.flop_counter`` where it has
    a formula (matrix products, convolutions, attention), else one for each element of the outputs.
    The bytes are the elements of the inputs and outputs, a broadcast element counted once;
    a gather reads as much of its table as it makes. Views cost nothing. Workspaces are assumed to
    be empty: if they are not, the first metered step shows it. A collective sends its whole tensor,
    an all-reduce twice; on the CPU, gathers and scatters of gloo take its bytes once more.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    low_precision_flops_per_second: float | None = None
    device: str = "cpu"
    link_bytes_per_second: float | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def free_bytes(self) -> int | None:
        """``None``: the figures do not include the amount of memory."""
        return None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be text, got {self.name!r}")
        for name in ("flops_per_second", "bytes_per_second", "launch_seconds"):
            _check_figure(name, getattr(self, name), zero=name == "launch_seconds")
        if self.low_precision_flops_per_second is not None:
            _check_figure("low_precision_flops_per_second", self.low_precision_flops_per_second)
        if self.link_bytes_per_second is not None:
            _check_figure("link_bytes_per_second", self.link_bytes_per_second)
        if not devices.is_type(self.device):
            raise ValueError(
                f"device is {self.device!r}, expected one of cpu, {devices.default_type()}"
            )

    @classmethod
    def measure(cls, device: torch.device | str = "cpu", name: str | None = None) -> Self:
        """Return the figures of a device of this machine, in about a second.

        Parameters
        ----------
        device
            A CPU or CUDA device. Matrix products are timed in float32, with TF32 as it is set, and
            in bfloat16; a copy; and the addition of two numbers. On the CPU with the threads that
            PyTorch has now.
        name
            By default that of the device.

        Returns
        -------
        Machine
            The measured speeds.

        Raises
        ------
        ValueError
            The device is of another type.
        """
        device = torch.device(device)
        kind = device.type
        if kind != "cpu" and not devices.count(kind):
            raise ValueError(
                f"expected the CPU or an accelerator that is here, got {str(device)!r}"
            )
        name = devices.name_of(device) if name is None else name
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            one = torch.ones(1, device=device)
            launch_ns = _timed(lambda: _added(one), device) // _LAUNCHES
            speeds = [_flops_per_second(device, t) for t in (torch.float32, torch.bfloat16)]
            source = torch.ones(_COPIED_BYTES[kind != "cpu"], dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            copy_ns = max(_timed(lambda: target.copy_(source), device), 1)
        return cls(
            name=name,
            flops_per_second=speeds[0],
            bytes_per_second=2 * source.numel() * _NS / copy_ns,
            launch_seconds=launch_ns / _NS,
            low_precision_flops_per_second=speeds[1],
            device=kind,
        )

    def seconds(self, flops: int, moved_bytes: int, low_precision: bool = False) -> float:
        """Return the time of one operation.

        Parameters
        ----------
        flops
            Floating-point operations.
        moved_bytes
            Bytes read and written.
        low_precision
            True if it computes in a type of two bytes or less.

        Returns
        -------
        float
            Seconds.
        """
        speed = self.flops_per_second
        if low_precision and self.low_precision_flops_per_second is not None:
            speed = self.low_precision_flops_per_second
        work = max(flops / speed, moved_bytes / self.bytes_per_second)
        return (
            self.launch_seconds + work if self.device == "cpu" else max(self.launch_seconds, work)
        )

    def rounded_bytes(self, nbytes: int) -> int:
        """Bytes that the allocator of this machine counts for a block of `nbytes`."""
        return rounded_bytes(nbytes, self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the machine as plain data, for JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the machine that `to_dict` wrote.

        Raise ValueError for another format or version, or a field that is missing, unknown or
        wrong.
        """
        fields = check_header(data, FORMAT, VERSION)
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"malformed machine: {error}") from error


def _check_figure(name: str, value: Any, *, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} = {value}, expected a positive number")


def _timed(call: Callable[[], object], device: torch.device) -> int:
    return measure_ns(call, device, max_seconds=_SECONDS_PER_FIGURE)


def _added(one: torch.Tensor) -> None:
    for _ in range(_LAUNCHES):
        one + one


def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDES[device.type != "cpu"]
    # Products of equal numbers take less power, so that clocks are higher.
    drawn = torch.rand(side, side, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    a, b = (drawn.to(device, dtype) for _ in range(2))
    return 2 * side**3 * _NS / max(_timed(lambda: a @ b, device), 1)


def made_tensor(lowered: Lowered, task: Task, path: tuple[int, ...]) -> torch.Tensor:
    """Return the fake tensor that is the root of an operation's new storage."""
    if task.node is None:
        path, value = path[1:], lowered.tangents[path[0]].meta["val"]
    else:
        value = task.node.meta["val"]
    found: torch.Tensor = at_path(value, path)
    return found


def made_bytes(lowered: Lowered, task: Task, device_type: str) -> tuple[int, ...]:
    """Return the sizes of an operation's new storages, as rounded by this type's allocator."""
    made = [made_tensor(lowered, task, path).untyped_storage().nbytes() for path in task.made]
    return tuple([rounded_bytes(size, device_type) for size in made])


def estimate(lowered: Lowered, machine: Machine) -> list[Cost]:
    """Return the cost of every operation, captured on any device, on a machine; 0 for the loss."""
    return [estimated(lowered, task, machine) for task in lowered.tasks]


def estimated(lowered: Lowered, task: Task, machine: Machine) -> Cost:
    """Return the cost of one operation on a machine."""
    made = made_bytes(lowered, task, machine.device)
    if task.node is None:
        return Cost(0, 0, made)
    if is_collective(task.node):
        return _of_collective(task.node, machine, made)
    low = _is_low_precision(task.node)
    seconds = machine.seconds(flops_of(task.node), moved_bytes(task.node), low)
    return Cost(round(seconds * _NS), 0, made)


def _of_collective(node: fx.Node, machine: Machine, made: tuple[int, ...]) -> Cost:
    sent = max(sum(map(_touched_bytes, _operand_tensors(node))), sum(made))
    name = _name(node)
    needs_copy = machine.device == "cpu" and ("all_gather" in name or "reduce_scatter" in name)
    speed = machine.link_bytes_per_second or machine.bytes_per_second
    seconds = machine.launch_seconds + sent * (1 + ("all_reduce" in name)) / speed
    return Cost(round(seconds * _NS), sent if needs_copy else 0, made)


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return tree_tensors(node.meta.get("val"))


def _operand_tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        yield from _tensors_of(source)


def _is_low_precision(node: fx.Node) -> bool:
    """Return whether an operation is of low precision, by its first operand or its result."""
    for tensor in (*_operand_tensors(node), *_tensors_of(node)):
        if tensor.dtype.is_floating_point:
            return tensor.element_size() <= _LOW_PRECISION_BYTES
    return False


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(packet)


def flops_of(node: fx.Node) -> int:
    """Return the floating-point operations of a call, by PyTorch's formula or one per element.

    A multiplication and an addition count as two.
    """
    return int(flops_expression(node))


def flops_expression(node: fx.Node) -> Any:
    """Return `flops_of`, as an expression if sizes are symbols."""
    name = _name(node)
    formulas: dict[str, Any] = {str(target): found for target, found in flop_registry.items()}
    other, count = _AS.get(name, (name, None))
    formula = formulas.get(other)
    if formula is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        try:
            return formula(
                *args[:count], **kwargs if count is None else {}, out_val=node.meta["val"]
            )
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            logger.info("the formula for the flops of %s does not apply: %s", name, error)
    return sum(tensor.numel() for tensor in _tensors_of(node))


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, each repeated by broadcasting counted once."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    count = math.prod(size if stride or not size else 1 for size, stride in sizes)
    return count * tensor.element_size()


def moved_bytes(node: fx.Node) -> int:
    """Return the bytes that a call reads and writes, each operand once."""
    written = sum(_touched_bytes(tensor) for tensor in _tensors_of(node))
    table = node.args[0] if _name(node) in _GATHERS and node.args else None
    read = sum(
        _touched_bytes(tensor)
        for source in node.all_input_nodes
        if source is not table
        for tensor in _tensors_of(source)
    )
    return written + read + (written if isinstance(table, fx.Node) else 0)
