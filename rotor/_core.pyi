"""Types of the C core; `tests/test_stubs.py` holds them to the extension."""

from collections.abc import Callable
from os import PathLike
from typing import Any, final

# -- the module itself (csrc/python/module.c)

def same_bytes(a: Any, b: Any, /) -> bool: ...

# -- chains (csrc/python/bind_chain.c)

@final
class Chain:
    def __new__(
        cls,
        forward_ns: Any,
        backward_ns: Any,
        x: Any,
        xbar: Any,
        fe_tmp: Any,
        fn_tmp: Any,
        b_tmp: Any,
        grad: Any,
        pgrad: Any,
        loss_tmp: int,
        hold_output: bool,
        /,
    ) -> Chain: ...
    @property
    def ideal_ns(self) -> int: ...
    def simulate(self, ops: Any, /) -> tuple[int, int, bytearray, bytearray]: ...

# -- solved tables, frontier and persistent (csrc/python/bind_solvers.c)

@final
class Table:
    def sequence(self, budget: int, /) -> bytearray: ...
    def curve(self) -> tuple[bytearray, bytearray] | None: ...

def frontier(
    chain: Chain, max_table_bytes: int, progress: Callable[[int, int], object] | None, /
) -> Table: ...
def persistent(
    chain: Chain,
    budget: int,
    slots: int,
    max_table_bytes: int,
    progress: Callable[[int, int], object] | None,
    /,
) -> bytearray | None: ...
def persistent_minimum(
    chain: Chain,
    budget: int,
    max_table_bytes: int,
    progress: Callable[[int, int], object] | None,
    /,
) -> tuple[int, bytearray | None]: ...

# -- classic solvers (csrc/python/bind_classic.c)

def floating(
    chain: Chain,
    budget: int,
    slots: int,
    max_table_bytes: int,
    progress: Callable[[int, int], object] | None,
    /,
) -> bytearray: ...
def floating_curve(
    chain: Chain,
    budget: int,
    slots: int,
    max_table_bytes: int,
    progress: Callable[[int, int], object] | None,
    /,
) -> tuple[bytearray, bytearray]: ...
def griewank_heterogeneous(
    chain: Chain,
    max_table_bytes: int,
    progress: Callable[[int, int], object] | None,
    /,
) -> Table: ...
def revolve(stages: int, checkpoints: int, /) -> bytearray: ...

# -- clocks and probes (csrc/python/bind_probe.c)

def clock_ns() -> int: ...
def thread_cpu_ns() -> int: ...
def process_cpu_ns() -> int: ...
def probe_memory(root: str | bytes | PathLike[str] = "/") -> dict[str, int]: ...
def reset_peak_rss(root: str | bytes | PathLike[str] = "/") -> bool: ...
def cuda_memory(
    device: int, cuda_library: str | None = None, nvml_library: str | None = None
) -> dict[str, Any]: ...
