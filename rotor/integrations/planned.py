"""A module that keeps its identity, and whose training forward runs under a limit.

Frameworks hold a model in many places: an optimizer, a saver, an evaluation loop, wrappers of
their own. So the model is not wrapped. While training lasts, the module has its own ``forward``,
which calls `rotor.Checkpointable`; class, keys, attributes and methods stay.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from rotor._pytorch import core
from rotor._pytorch.optimizers import unwrapped
from rotor.common.frames import fold, warn_caller
from rotor.wrapper.checkpointable import Checkpointable

__all__ = ["Limited", "PlannedForward"]

_SLOT = "_rotor_planned"
_NOT_COMPILED = "the module trains within a limit by a plan: torch.compile leaves it out"
_MANY_SHAPES = 8


class Limited:
    """Base of a callback: plans at most one module, and reports on it.

    Parameters
    ----------
    mem_limit
        Limit of `rotor.Checkpointable`.
    options
        Its other arguments.

    Attributes
    ----------
    model
        The `rotor.Checkpointable` that plans; ``None`` before it is made.
    """

    _begin = "train"
    """Call that starts the training, for messages."""

    def __init__(self, mem_limit: int | str | None, options: Mapping[str, Any]) -> None:
        self.model: Checkpointable | None = None
        self._planned: PlannedForward | None = None
        self._settings = {"mem_limit": mem_limit, **options}
        self._takes_optimizer = options.get("offload_state") is True

    def report(self, path: str | os.PathLike[str] | None = None, *, snapshot: bool = False) -> str:
        """Return limit, predicted and measured peak, and time: `rotor.Checkpointable.report`.

        Raises
        ------
        ValueError
            No step was trained yet; also errors of `rotor.Checkpointable.report`.
        """
        if self.model is None:
            raise ValueError(
                f"no plan was made: give this callback to a Trainer, and {self._begin}"
            )
        return self.model.report(path, snapshot=snapshot)

    def _plan(
        self, module: nn.Module, has_loss: Callable[[Mapping[str, Any]], bool] | None
    ) -> PlannedForward:
        """Plan the forward of a module, and no other's; it is not installed yet."""
        if self._planned is None or self._planned.module is not module:
            self._remove()
            self._planned = PlannedForward(module, has_loss=has_loss, **self._settings)
            self.model = self._planned.model
        return self._planned

    def _take(self, optimizer: Any) -> None:
        """Take the optimizer of the framework, if its states are to be in the second tier."""
        if self._takes_optimizer and self._planned is not None:
            self._planned.take(optimizer)
            self.model = self._planned.model

    def _remove(self) -> None:
        if self._planned is not None:
            self._planned.remove()


class PlannedForward:
    """Replacement of a module's training forward by `rotor.Checkpointable`.

    Parameters
    ----------
    module
        Any module; its instance must not have its own ``forward`` already.
    has_loss
        Function of a call's keyword arguments: True if the output holds the loss, as ``loss`` or
        first in a tuple. Then only the loss has a gradient, it is part of the plan, and the limit
        holds from the first step; a backward from another output is an error. Without it, the
        loss is outside of the module.
    **settings
        Arguments of `rotor.Checkpointable`, such as ``mem_limit``. With ``offload_state=True``
        calls are plain before `take` names the optimizer.

    Attributes
    ----------
    module
        The module.
    active
        True if calls are planned; otherwise the plain module runs.
    ran
        True if a call was planned.

    Raises
    ------
    TypeError, ValueError
        Errors of `rotor.Checkpointable`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        has_loss: Callable[[Mapping[str, Any]], bool] | None = None,
        **settings: Any,
    ) -> None:
        self.active = False
        self.ran = False
        self.module = module
        self._has_loss = has_loss
        self._settings = settings
        self._warned = False
        self._model: Checkpointable | None = None
        self._model = self.model

    def __getstate__(self) -> dict[str, Any]:
        # A copy is made before the copy of its module is complete; it wraps that at its first run.
        # The optimizer is not that of a copy, whose parameters are in memory.
        away = {"offload_state": True} if self._settings.get("offload_state") else {}
        return self.__dict__ | {"_model": None, "_settings": self._settings | away}

    @property
    def model(self) -> Checkpointable | None:
        """The `rotor.Checkpointable` that plans; ``None`` before the optimizer is known."""
        if self._model is None and self._settings.get("offload_state") is not True:
            loss_fn = None if self._has_loss is None else _loss_alone
            self._model = Checkpointable(self.module, loss_fn=loss_fn, **self._settings)
            if self._settings.get("offload_state"):
                self.module.register_state_dict_post_hook(_fill)
        return self._model

    def take(self, optimizer: Any) -> None:
        """Have parameters, gradients and the states of an optimizer live in the second tier.

        It takes over from that of an earlier training.

        Raises
        ------
        TypeError, ValueError
            Errors of `rotor.Checkpointable`.
        """
        known = self._settings["offload_state"]
        if known is True:
            self._model = None
            self._settings["offload_state"] = optimizer
            try:
                self._model = self.model
            except BaseException:
                self._settings["offload_state"] = True
                raise
        elif self._model is not None and unwrapped(known)[0] is not unwrapped(optimizer)[0]:
            self._model.offload_state = self._settings["offload_state"] = optimizer

    def install(self) -> None:
        """Have the module's training forwards planned from now on.

        Raises
        ------
        RuntimeError
            Another function has replaced the forward of this instance.
        """
        slots = self.module.__dict__
        if slots.get(_SLOT) is not self:
            if "forward" in slots:
                raise RuntimeError(
                    f"the forward of {type(self.module).__name__} has been replaced already, "
                    "by rotor or by mixed precision, offloading or the like: install the limit "
                    "first"
                )
            slots[_SLOT] = self
            function = _forward_like(type(self.module).forward)
            slots["forward"] = types.MethodType(function, self.module)
        self.active = True

    def remove(self) -> None:
        """Run the plain module from now on."""
        self.active = False
        slots = self.module.__dict__
        function = getattr(slots.get("forward"), "__func__", None)
        # Functions that others have put around our forward stay, and find it inactive.
        if slots.get(_SLOT) is self and getattr(function, "_is_of_rotor", False):
            del slots["forward"], slots[_SLOT]

    def bring_back(self) -> None:
        """Have parameters that are in a second tier be new ones, in the CPU's memory."""
        made: dict[int, nn.Parameter] = {}
        for module in self.module.modules():
            for slots, name in core.parameter_slots(module):
                value = slots[name]
                if core.is_away(value):
                    if id(value) not in made:
                        values = value.detach().clone().cpu()
                        made[id(value)] = nn.Parameter(values, value.requires_grad)
                    slots[name] = made[id(value)]
        self._model, self._settings["offload_state"] = None, True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, planned if it trains."""
        module = self.module
        forward = module.__dict__.pop("forward")
        try:
            trains = self.active and module.training and torch.is_grad_enabled()
            if not trains or (model := self.model) is None:
                return module.forward(*args, **kwargs)
            self.ran = True
            if self._has_loss is None or not self._has_loss(kwargs):
                return model.forward(*args, **kwargs)
            return _guarded(model.forward(*args, targets=(None,), **kwargs))
        finally:
            module.__dict__["forward"] = forward
            self._warn_of_shapes()

    def _warn_of_shapes(self) -> None:
        # Shapes that share a captured graph cost next to nothing.
        plans = {} if self._model is None else self._model.plans
        steps = [getattr(plan, "step", plan) for plan in plans.values()]
        count = len({id(getattr(step, "captured", step)) for step in steps})
        if count > _MANY_SHAPES and not self._warned:
            self._warned = True
            warn_caller(
                f"batches of {count} different shapes were planned, one after the other: pad them "
                "to a few lengths, which takes less time than planning for each",
                UserWarning,
            )


def _fill(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Give values that are in a second tier bytes, in the CPU's memory: savers read that."""
    made: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if core.is_away(value) and not isinstance(value, nn.Parameter):
            if id(value.home) not in made:
                made[id(value.home)] = value.clone().cpu()
            state[name] = made[id(value.home)]


def _forward_like(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in the place of a module's ``forward``, with its signature."""

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__dict__[_SLOT].run(*args, **kwargs)  # ROTOR_FULL_TRACEBACK=1: all
        except Exception as error:
            fold(error)
            raise

    core.leave_untraced(forward, _NOT_COMPILED)
    vars(forward)["_is_of_rotor"] = True
    return forward


def _beside_loss(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an output with all tensors but those of the loss changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return (
            tuple([changed(part) for part in value]) if isinstance(value, tuple | list) else value
        )

    if isinstance(output, Mapping):
        made: Any = type(output)
        return made(**{k: v if k == "loss" else changed(v) for k, v in output.items()})
    if isinstance(output, tuple | list):
        return (output[0], *[changed(value) for value in output[1:]])
    return output


def _loss_alone(output: Any, *_: Any) -> Any:
    """Return an output in which the loss alone has a gradient."""
    return _beside_loss(output, torch.Tensor.detach)


vars(_loss_alone)["returns_output"] = True


def _guarded(output: Any) -> Any:
    """Return the same output; a backward from anything in it but the loss is an error."""
    token = torch.empty(0, requires_grad=True)

    def guarded(tensor: torch.Tensor) -> torch.Tensor:
        is_free = tensor.is_floating_point() and not tensor.requires_grad
        return _NoGradient.apply(tensor, token) if is_free else tensor

    return _beside_loss(output, guarded)


class _NoGradient(Function):
    """Identity on a tensor; a backward through it raises that its gradient was not planned."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            # DistributedDataParallel visits all outputs, if it looks for unused parameters.
            return None, None
        raise RuntimeError(
            "this step was planned for the loss that the model returns, and a backward comes from "
            "another of its outputs: where the loss is computed from the outputs, give "
            "RotorCallback(all_gradients=True)"
        )
