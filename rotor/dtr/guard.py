"""Restoration of evicted tensors before reads that bypass PyTorch's operators.

Eviction takes the bytes of a storage. Operators are seen and have their inputs brought back;
``tensor.numpy()`` and its like read memory themselves, and would find none. The guard is a mode
over PyTorch's functions that knows them. It acts in the thread that entered the budget, in the
backwards that this thread runs, and in those of other threads that begin in the session's graph.

Exports by DLPack are seen in every thread. What the guard does not see raises, in whatever thread,
where it reads an evicted tensor: access to such storages is forbidden (`rotor._pytorch.pointers`).
An address that was taken while a tensor was in memory is not followed: of ``data_ptr()`` in another
thread, of an extension, of an operator that another thread runs while its input is evicted.
`Session.pin` makes a tensor safe for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rotor import _core
from rotor._pytorch import dispatch, pointers
from rotor._pytorch.pointers import Place
from rotor.common.tensor_trees import tree_tensors

if TYPE_CHECKING:
    from rotor.dtr.runtime import Session


def _functions(owner: Any, names: str) -> list[Callable[..., Any]]:
    found = [getattr(owner, name, None) for name in names.split()]
    return [function for function in found if function is not None]


# Functions that no longer need the bytes when they return, and run no operator that could evict.
_READ = frozenset(_functions(torch.Tensor, "__repr__ __format__ tolist"))

# Functions whose results share the bytes, or that read several tensors.
_SHARED = frozenset(
    _functions(
        torch.Tensor,
        "numpy __array__ data_ptr const_data_ptr mutable_data_ptr untyped_storage storage "
        "share_memory_ __deepcopy__ __reduce_ex__ apply_ map_ map2_ as_subclass _make_subclass",
    )
).union({torch.Tensor.__cuda_array_interface__.__get__, torch.Tensor.data.__set__})  # type: ignore[attr-defined]

# Functions that read lengths, sizes and indices by pointer, and all else by operators.
_INDEXED = frozenset(
    _functions(torch.Tensor, "tensor_split")
    + _functions(torch, "tensor_split ctc_loss _pad_packed_sequence")
    + _functions(torch, "lstm gru rnn_tanh rnn_relu quantized_lstm quantized_gru")
    + _functions(functional, "ctc_loss")
)

# Functions that read elements of lists without operators, and tensors with them.
_COLLECTING = frozenset(
    _functions(torch, "tensor as_tensor asarray") + _functions(torch.Tensor, "new_tensor")
)

# Functions that write with code of their own.
_WRITTEN = frozenset(_functions(torch.Tensor, "apply_ map_ map2_"))


class Guard(_core.FunctionMode, TorchFunctionMode):  # type: ignore[misc]
    """Mode that brings back tensors that functions of PyTorch read without operators."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        # Functions of the session alone: methods of the guard would keep it.
        self.watched: Any = {}
        for prepare, functions in _PREPARATIONS.items():
            self.watched |= dict.fromkeys(functions, partial(prepare, session))

    @property
    def places(self) -> list[Place]:
        """Places that guard backwards and exports too.

        PyTorch takes a mode off the stack around a function that the mode has seen, so also around
        ``Tensor.backward``, in which hooks and `torch.autograd.Function` read tensors.
        """
        return [
            dispatch.backwards_within(self, self._joined),
            *pointers.dlpack_after(self._session.pin),
        ]

    @contextmanager
    def _joined(self, outputs: Any) -> Iterator[None]:
        """Have a session see another thread's backward, if that begins in the session's graph."""
        roots = [root for root in tree_tensors(outputs) if root.layout is torch.strided]
        if any(self._session.reference(root) is not None for root in roots):
            with self._session, self:
                yield
        else:
            yield


def _read(session: Session, args: Any, _: Any) -> None:
    session.materialize(args[0])


def _collect(session: Session, args: Any, _: Any) -> None:
    for tensor in _listed([value for value in args if isinstance(value, list | tuple)]):
        session.pin(tensor)


def _share(session: Session, args: Any, kwargs: dict[str, Any] | None) -> None:
    for tensor in tree_tensors((args, kwargs)):
        session.pin(tensor)


def _index(session: Session, args: Any, kwargs: dict[str, Any] | None) -> None:
    for tensor in tree_tensors((args, kwargs)):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            session.pin(tensor)


def _write(session: Session, args: Any, kwargs: dict[str, Any] | None) -> None:
    _share(session, args, kwargs)
    session.give_up(args[0])


_PREPARATIONS = {
    _read: _READ,
    _collect: _COLLECTING,
    _share: _SHARED,
    _index: _INDEXED,
    _write: _WRITTEN,
}


def _listed(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _listed(value)
