"""Recipes of operations that can run again: operator and arguments, without any tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core, dispatch
from rotor.dtr.operators import Operator

Flags = tuple[Any, ...]
Needs = _core.Needs


# A tensor argument, by which node it lies on, and how; it keeps neither tensor nor storage. The
# handler in C makes such tuples too: (node, shape, stride, offset, dtype, device, bits); `bits`
# says whether it is lazily conjugated and negated, ``None`` for neither.
Spec = tuple[Any, ...]


def spec_of(tensor: torch.Tensor, node: int) -> Spec:
    """Return the recipe of a tensor argument."""
    conjugate, negative = tensor.is_conj(), tensor.is_neg()
    return (
        node,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        (conjugate, negative) if conjugate or negative else None,
    )


def tensor_on(storage: torch.UntypedStorage, spec: Spec) -> torch.Tensor:
    """Return the tensor of a recipe, on a storage."""
    _, shape, stride, offset, dtype, device, bits = spec
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(storage, offset, shape, stride)
    if bits is not None:
        tensor = dispatch.unconjugated(tensor, *bits)
    return tensor


def pattern(value: Any, nodes: dict[int, int]) -> Any:
    """Return an argument with a `Spec` in the place of each tensor; nodes by the tensor's ``id``.

    Tuples become lists: a tuple is a `Spec`.
    """
    if isinstance(value, torch.Tensor):
        return spec_of(value, nodes[id(value)])
    if isinstance(value, list | tuple):
        return [pattern(item, nodes) for item in value]
    return value


def filled(value: Any, tensor_of: Callable[[Spec], torch.Tensor]) -> Any:
    """Return the argument with tensors in the place of every `Spec`."""
    if isinstance(value, tuple):
        return tensor_of(value)
    if isinstance(value, list):
        return [filled(item, tensor_of) for item in value]
    return value


class Record:
    """An operation that may run again.

    Attributes
    ----------
    operator
        Overload that ran.
    args, kwargs
        Its arguments, with `Spec` for tensors.
    outputs
        Of each output node: the index of the result that lies on it, or -1 where the operation
        writes to its origin.
    origins
        The nodes that it writes to, parallel to `outputs`; -1 for none.
    grad_enabled, flags
        The settings that it ran under.
    generator, state
        The random number generator, and its state before.
    needs, counted_bytes
        What it takes, which may become known later; the part of its workspace that the book
        knows.
    module
        Path of the module that ran it, empty for the outermost one; ``None``: not noted.
    sums
        Checksums of what it made first, parallel to `outputs` as far as that is new; ``None``:
        not noted.
    """

    __slots__ = (
        "args",
        "counted_bytes",
        "flags",
        "generator",
        "grad_enabled",
        "kwargs",
        "module",
        "needs",
        "operator",
        "origins",
        "outputs",
        "state",
        "sums",
    )

    def __init__(
        self,
        operator: Operator,
        args: list[Any],
        kwargs: dict[str, Any] | None,
        outputs: Sequence[int],
        origins: Sequence[int],
        grad_enabled: bool,
        flags: Flags,
        generator: torch.Generator | None,
        state: torch.Tensor | None,
        needs: Needs,
        counted_bytes: int,
        module: str | None = None,
    ) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs or {}
        self.outputs = outputs
        self.origins = origins
        self.grad_enabled = grad_enabled
        self.flags = flags
        self.generator = generator
        self.state = state
        self.needs = needs
        self.counted_bytes = counted_bytes
        self.module = module
        self.sums: list[int | torch.Tensor] | None = None

    def nodes(self) -> set[int]:
        """Return the nodes that its arguments lie on."""
        return {spec[0] for spec in self._specs()}

    def spec_of_node(self, node: int) -> Spec:
        """Return the first of its arguments that lies on a node."""
        return next(spec for spec in self._specs() if spec[0] == node)

    def _specs(self) -> Iterator[Spec]:
        waiting: list[Any] = [*reversed(self.kwargs.values()), *reversed(self.args)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                yield value
            elif isinstance(value, list):
                waiting.extend(reversed(value))

    def run(
        self, storage_of: Callable[[int], torch.UntypedStorage], *, fills_memory: bool = False
    ) -> list[torch.Tensor]:
        """Run it on these storages of its nodes, as it ran first.

        Parameters
        ----------
        storage_of
            Returns the storage of a node.
        fills_memory
            Memory that operators allocate is filled, which shows what they leave as it was.

        Returns
        -------
        list
            Its results in order.
        """

        def tensor_of(spec: Spec) -> torch.Tensor:
            return tensor_on(storage_of(spec[0]), spec)

        now = torch.is_grad_enabled()
        flags = dispatch.backend_flags() if self.flags is not None else None
        state = None
        try:
            core.set_grad_enabled(self.grad_enabled)
            if flags != self.flags:
                dispatch.write_flags(self.flags)
            if self.generator is not None:
                state = self.generator.get_state()
                assert self.state is not None
                self.generator.set_state(self.state)
            with dispatch.BelowAutograd(), filled_memory() if fills_memory else nullcontext():
                results = self.operator.replay(
                    *filled(self.args, tensor_of),
                    **{name: filled(value, tensor_of) for name, value in self.kwargs.items()},
                )
        finally:
            if state is not None and self.generator is not None:
                self.generator.set_state(state)
            if flags != self.flags and flags is not None:
                dispatch.write_flags(flags)
            core.set_grad_enabled(now)
        return tensors_of(results)


def tensors_of(results: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's results, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, list | tuple):
        return [tensor for item in results for tensor in tensors_of(item)]
    return []


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill what operators allocate: not a number, the largest integer, or true."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            yield
        finally:
            settings.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
