"""A process group for tensors of the simulated device: gloo's collectives, by way of the host.

It has the collectives that FSDP2 and rotor call. Copies are made in the current stream, as a
device's own library would queue its work there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["register"]

NAME = "simlink"

Tensors = Sequence[torch.Tensor]


def _done(outputs: Tensors) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(outputs)
    return torch._C._distributed_c10d._create_work_from_future(future)


class _Link(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def _by_host(self, outputs: Tensors, inputs: Tensors, call: Callable[[Any, Any], Any]) -> Any:
        given = [tensor.detach().cpu() for tensor in inputs]
        made = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        call(made, given).wait()
        for output, value in zip(outputs, made, strict=True):
            output.detach().copy_(value)
        return _done(outputs)

    def _in_place(self, tensors: Tensors, call: Callable[[Any], Any]) -> Any:
        def filled(made: Any, given: Any) -> Any:
            for output, value in zip(made, given, strict=True):
                output.copy_(value)
            return call(made)

        return self._by_host(tensors, tensors, filled)

    def all_gather_single(self, output: Any, value: Any, opts: Any = None) -> Any:
        def gather(made: Any, given: Any) -> Any:
            return self._gloo.allgather([list(made[0].chunk(self._size))], given)

        return self._by_host([output], [value], gather)

    def reduce_scatter_single(self, output: Any, value: Any, opts: Any = None) -> Any:
        def reduce(made: Any, given: Any) -> Any:
            reduction = dist.AllreduceOptions()
            if opts is not None:
                reduction.reduceOp = opts.reduceOp
            work = self._gloo.allreduce(given, reduction)
            work.wait()
            made[0].copy_(given[0].chunk(self._size)[self._rank].view_as(made[0]))
            return work

        return self._by_host([output], [value], reduce)

    # Their names before PyTorch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._by_host(outputs[0], inputs, lambda a, b: self._gloo.allgather([a], b))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._in_place(tensors, lambda made: self._gloo.allreduce(made, opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = dist.BroadcastOptions() if opts is None else opts
        return self._in_place(tensors, lambda made: self._gloo.broadcast(made, opts))

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def register() -> str:
    """Make the group known to PyTorch; return the name of its backend."""
    dist.Backend.register_backend(NAME, _Link, devices=["cpu", "sim"])
    return NAME
