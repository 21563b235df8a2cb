"""A memory limit for the ``Trainer`` of Lightning, as a callback."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from rotor.common.frames import warn_caller
from rotor.errors import MemoryLimitWarning
from rotor.integrations.planned import Limited

__all__ = ["RotorCallback"]

# The same code under two names; a Trainer takes the callbacks of either.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_SHARDING = {"FSDPStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"}


def _callback() -> Any:
    """Return the base class of callbacks: of the package in use, else of an installed one."""
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise ImportError(
        "rotor.integrations.lightning needs Lightning: `pip install lightning`, or in a clone of "
        'rotor `pip install ".[lightning]"`'
    )


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _callback()


class RotorCallback(Limited, Callback):
    """Callback that trains the model inside of a ``LightningModule`` in a given number of bytes.

    ``Trainer(..., callbacks=[RotorCallback(mem_limit="8GiB")])`` is enough: during ``fit``, the
    forward of one module in the ``LightningModule`` is planned. Module, names and checkpoints stay
    the same; validation runs the plain module.

    Parameters
    ----------
    mem_limit
        The most bytes that one forward, loss and backward may have allocated on the model's device
        above the level at which the module's forward began: bytes, or text such as "8GiB".
        ``None``: 90 % of the memory that is free when the first step begins.
    module
        The dotted name of the module in the ``LightningModule``; "" is the ``LightningModule``'s
        own ``forward``. By default the only child that has parameters.
    all_gradients
        True: the loss is computed from the module's output, as usual. False: the module
        computes the loss, and returns it as ``loss``, or first in a tuple; then it is part of the
        plan, and the limit holds from the first step, else from the second.
    **options
        Options of `rotor.Checkpointable`, such as ``engine`` or ``effort``. ``offload_state=True``
        takes the optimizer of the ``LightningModule``.

    Attributes
    ----------
    model
        The `rotor.Checkpointable` that plans; ``None`` before ``fit``.

    Raises
    ------
    TypeError, ValueError
        Errors of `rotor.Checkpointable`; when ``fit`` begins, also if the named module does not
        exist, several children have parameters and none is named, or the strategy shards the model.

    Warns
    -----
    MemoryLimitWarning
        At the end, if ``training_step`` never called the module.
    """

    _begin = "call fit"

    def __init__(
        self,
        mem_limit: int | str | None = None,
        *,
        module: str | None = None,
        all_gradients: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(mem_limit, options)
        self._name = module
        self._all_gradients = all_gradients

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the plan when ``fit`` begins."""
        _check(trainer.strategy)
        found = _found(pl_module, self._name)
        self._plan(found, None if self._all_gradients else _always).install()
        if self._takes_optimizer and len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers gave {len(trainer.optimizers)} optimizers, and "
                "offload_state=True is for one, of all parameters: give one, or leave it out"
            )
        self._take(trainer.optimizers[0] if trainer.optimizers else None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the plain module when ``fit`` ends."""
        self._leave()
        if self._planned is not None and not self._planned.ran and trainer.global_step:
            warn_caller(
                f"training_step never called {self._shown(pl_module)}, so nothing was limited: "
                "give RotorCallback(module=) the name of what it calls",
                MemoryLimitWarning,
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the plain module when ``fit`` fails or is interrupted."""
        self._leave()

    def _leave(self) -> None:
        self._remove()
        if self._takes_optimizer and self.model is not None:
            # Lightning moves the module to the CPU, as parameters in a second tier cannot be.
            assert self._planned is not None
            if any(p.device.type != "cpu" for p in self.model.module.parameters()):
                self._planned.bring_back()

    def _shown(self, pl_module: nn.Module) -> str:
        assert self.model is not None
        names = [name for name, part in pl_module.named_modules() if part is self.model.module]
        return f"self.{names[0]}" if names and names[0] else "self(...)"


def _check(strategy: Any) -> None:
    """Raise ValueError for a strategy that shards the model, or that is built on such a one."""
    if _SHARDING.isdisjoint(kind.__name__ for kind in type(strategy).__mro__):
        return
    raise ValueError(
        f"a limit does not go with {type(strategy).__name__}, which shards the model: use the "
        'strategy "ddp", or fully_shard in a loop of your own'
    )


def _always(_: Any) -> bool:
    return True


def _found(pl_module: nn.Module, name: str | None) -> nn.Module:
    """Return the module to plan."""
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"RotorCallback(module={name!r}): {error}") from None
    children = [
        child
        for child, part in pl_module.named_children()
        if next(part.parameters(), None) is not None
    ]
    if len(children) == 1:
        return pl_module.get_submodule(children[0])
    shown = ", ".join(map(repr, children)) or "none"
    raise ValueError(
        f"which module of {type(pl_module).__name__} is the model? The children with parameters "
        f'are: {shown}. Give RotorCallback(module=) the name of one, or "" for the forward of '
        f"{type(pl_module).__name__} itself"
    )
