"""A program that is written while it is simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rotor import _core
from rotor.simrd.heuristics import HeuristicLike
from rotor.simrd.results import Failure, LockedSet
from rotor.simrd.settings import forwarded, make_settings
from rotor.simrd.simulate import failure_of, locked_set
from rotor.units import check_count, parse_bytes

_STATUS = ("ok", "oom", "thrash")
_LARGEST = 1 << 42


class Interactive:
    """Runs a program one operation at a time under a budget: what comes next may depend on it.

    Parameters
    ----------
    heuristic, runtime, seed, rebuild_classes_every, sample, ignore_small
        As for `rotor.simrd.simulate`.
    budget_bytes
        The budget, a number of bytes or text such as "700MiB"; None for none.
    remat_limit_ns
        Rematerializations may take this long in all.

    Raises
    ------
    ValueError, TypeError
        As `rotor.simrd.simulate` does.

    Notes
    -----
    After a failure (see `status`) the figures can be read, and nothing more runs.

    Examples
    --------
    >>> run = Interactive("DTR", budget_bytes=8)
    >>> x = run.constant("x", 4)
    >>> (y,) = run.op("relu", [x], bytes=[4], cost_ns=10)
    >>> (z,) = run.op("relu", [y], bytes=[4], cost_ns=10)
    >>> run.status
    'oom'
    """

    def __init__(
        self,
        heuristic: HeuristicLike = "DTREqClass",
        *,
        budget_bytes: int | str | None,
        runtime: str = "V2EagerOptimized",
        remat_limit_ns: float = math.inf,
        seed: int = 0,
        rebuild_classes_every: int = 0,
        sample: bool = False,
        ignore_small: bool = False,
    ) -> None:
        if isinstance(remat_limit_ns, bool) or not remat_limit_ns >= 0:
            raise ValueError(f"remat_limit_ns = {remat_limit_ns}, expected 0 or more")
        limit = None if budget_bytes is None else parse_bytes(budget_bytes, "budget_bytes")
        _, settings = make_settings(
            heuristic,
            runtime,
            budget_bytes=limit,
            remat_limit_ns=remat_limit_ns,
            seed=seed,
            no_dealloc=False,
            rebuild_classes_every=rebuild_classes_every,
            sample=sample,
            ignore_small=ignore_small,
        )
        self._writer = _core.LogWriter()
        self._log = _core.Log(False)
        self._replay = settings.replay(self._log)
        self._names: set[str] = set()

    def op(
        self,
        name: str,
        inputs: Sequence[str],
        *,
        bytes: Sequence[int],
        cost_ns: int,
        aliases: Sequence[int] | None = None,
    ) -> list[str]:
        """Run a new operation and gives the names of its outputs.

        Parameters
        ----------
        name
            Of the operation.
        inputs
            Names of tensors; evicted ones are rematerialized.
        bytes
            Size of each output.
        cost_ns
            Time of the operation, ns.
        aliases
            Of each output, -1 for a storage of its own, else the position among `inputs` of the
            tensor that it is a view of; its own by default.

        Returns
        -------
        list of str
            Names of the outputs, one for each of `bytes`.

        Raises
        ------
        RuntimeError
            The run has failed already.
        KeyError
            No tensor has an input's name.
        ValueError
            A size or time is out of range, an alias has no input, lengths differ.
        """
        self._check()
        args = list(inputs)
        for argument in args:
            self._tensor(argument)
        sizes = [check_count(size, f"bytes[{i}]", 0, _LARGEST) for i, size in enumerate(bytes)]
        views = [-1] * len(sizes) if aliases is None else list(aliases)
        views = [check_count(v, f"aliases[{i}]", -1, len(args) - 1) for i, v in enumerate(views)]
        if len(views) != len(sizes):
            raise ValueError(f"aliases has {len(views)} entries, expected {len(sizes)}")
        time_ns = check_count(cost_ns, "cost_ns", 0, _LARGEST)
        outputs = [self._fresh_name() for _ in sizes]
        self._writer.call(name, args, outputs, time_ns)
        for output, size, view in zip(outputs, sizes, views, strict=True):
            self._writer.memory(output, size)
            self._writer.alias(output, view)
        self._run()
        return outputs

    def constant(self, name: str, bytes: int) -> str:
        """Bring a constant into memory, for good, and gives its name.

        Raises
        ------
        RuntimeError
            The run has failed already.
        ValueError
            A tensor of this name exists already, or the size is out of range.
        """
        self._check()
        if name in self._names:
            raise ValueError(f"a tensor named {name!r} exists already")
        size = check_count(bytes, "bytes", 0, _LARGEST)
        self._writer.constant(name)
        self._writer.memory(name, size)
        self._names.add(name)
        self._run()
        return name

    def release(self, name: str) -> None:
        """Drop the program's reference to a tensor.

        Raises
        ------
        RuntimeError
            The run has failed already.
        KeyError
            No tensor has this name.
        ValueError
            The program has no reference to it any more.
        """
        self._check()
        if self._log.references(self._tensor(name)) < 1:
            raise ValueError(f"{name!r} was released before")
        self._writer.release(name)
        self._run()

    def is_defined(self, name: str) -> bool:
        """Return whether a tensor is in memory.

        Raises
        ------
        KeyError
            No tensor has this name.
        """
        return self._replay.is_defined(self._tensor(name))

    @property
    def status(self) -> str:
        """Either "ok", "oom" or "thrash"."""
        return _STATUS[self._replay.outcome]

    @property
    def failure(self) -> Failure | None:
        """Why it ended, None while it is ok."""
        return failure_of(self._log, self._replay) if self._replay.outcome else None

    @property
    def locked(self) -> LockedSet:
        """Storages that cannot be evicted now."""
        return locked_set(self._log, self._replay)

    clock: int = forwarded("_replay.clock", "The clock, ns; it begins at 1.")
    memory: int = forwarded("_replay.memory", "Bytes in memory.")
    max_memory: int = forwarded("_replay.max_memory", "The most bytes that were in memory.")
    model_compute: int = forwarded(
        "_replay.model_compute_ns", "Time of the program's own executions, ns."
    )
    remat_compute: int = forwarded(
        "_replay.remat_compute_ns", "Time of rematerializing executions, ns."
    )
    n_evict: int = forwarded("_replay.evictions", "Evictions, eager releases included.")
    n_remat: int = forwarded("_replay.remats", "Rematerializing executions.")
    n_model_ops: int = forwarded(
        "_replay.model_executions", "The program's own executions, constants included."
    )
    n_eval: int = forwarded("_replay.evaluations", "Evaluations of the heuristic.")

    def _tensor(self, name: str) -> int:
        tensor = self._log.lookup(name)
        if tensor < 0:
            raise KeyError(name)
        return tensor

    def _fresh_name(self) -> str:
        name = f"t{len(self._names)}"
        while name in self._names:
            name += "'"
        self._names.add(name)
        return name

    def _check(self) -> None:
        if self._replay.outcome:
            raise RuntimeError(f"the run has ended, its status is {self.status!r}")

    def _run(self) -> None:
        self._log.feed(self._writer.take())
        self._replay.run()
