"""Steps of an optimizer for one parameter after the other, each with all that belongs to it.

Parameters, gradients and states are fetched for the optimizer's own code, and written when it has
changed them. Where each element is updated by itself, a large parameter is updated in pieces.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from rotor._core import PIECE_BYTES
from rotor._pytorch import optimizers
from rotor.tier.homes import AwayTensor, Home
from rotor.tier.interface import Tier

_SCALARS_BYTES = 1 << 12
"""Bytes, at most, of the scalars of a parameter's states while it is updated."""

LEAST_BYTES = 1 << 12
"""Size of the smallest tensor that gets a home."""

_BY_ELEMENT = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""Optimizers that update each element of a parameter by itself."""


class Updates:
    """Runner of an optimizer's steps on tensors at home in `tier`, in which states get homes.

    With `is_on_host` it computes in the memory of the tier, where states then stay as well.
    """

    def __init__(self, tier: Tier, *, is_on_host: bool) -> None:
        self._tier = tier
        self._is_on_host = is_on_host
        self._place = torch.device("cpu") if is_on_host else None
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def run(self, optimizer: Optimizer) -> None:
        """Run one step.

        Raise ValueError, before anything has changed, if the optimizer changes settings of its
        groups in each step.
        """
        groups = optimizer.param_groups
        for group in groups:
            listed = group["params"]
            trained = [p for p in listed if p.grad is not None]
            for parameter in trained:
                optimizer.state[parameter]  # States come in the order of the group.
            away = [p for p in trained if isinstance(p, AwayTensor)]
            try:
                optimizer.param_groups = [group]
                for parameter in away:
                    self._update(optimizer, group, parameter)
                group["params"] = [p for p in listed if not isinstance(p, AwayTensor)]
                _step(optimizer)
            finally:
                group["params"] = listed
                optimizer.param_groups = groups
                for parameter in trained:
                    if not optimizer.state[parameter]:
                        del optimizer.state[parameter]

    def least_bytes(self, optimizer: Optimizer, parameter: AwayTensor) -> int:
        """Return bytes within which a parameter can be updated."""
        by_element = type(optimizer) in _BY_ELEMENT and not self._is_on_host
        size = min(parameter.home.nbytes, PIECE_BYTES) if by_element else parameter.home.nbytes
        count = optimizers.held_in_step(optimizer, parameter)
        return count * (size + self._tier.alignment_bytes) + _SCALARS_BYTES

    def keep(self, state: Any, before: Any) -> Any:
        """Move a state's large tensors to the tier, to the homes of `before`; return the state."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and self._is_at_home(before.get(name), value):
                state[name] = before[name]
            elif isinstance(value, torch.Tensor) and self._goes_away(value):
                known = _home_like(before.get(name), value)
                home = known or Home(self._tier, value, lasts=True)
                home.write(value)
                state[name] = AwayTensor.of(home)
        return state

    def _is_at_home(self, known: Any, value: torch.Tensor) -> bool:
        """Return whether a value is that of a home, with whose own memory the host computes."""
        memory = self._in_memory(known) if isinstance(known, AwayTensor) else None
        return memory is not None and memory.data_ptr() == value.data_ptr()

    def _goes_away(self, value: torch.Tensor) -> bool:
        if isinstance(value, AwayTensor) or value.layout != torch.strided:
            return False
        # Of the host's memory, a tier with a limit counts what the host makes, too.
        is_counted = self._is_on_host and self._tier.beneath is not None
        is_known = is_counted or self._tier.reaches(value.device)
        return value.nbytes >= LEAST_BYTES and is_known

    def _update(self, optimizer: Optimizer, group: Any, parameter: AwayTensor) -> None:
        home, gradient = parameter.home, parameter.grad
        state = optimizer.state.get(parameter, {})
        large = [v for v in state.values() if isinstance(v, AwayTensor)]
        is_plain = all(isinstance(v, AwayTensor) or v.numel() == 1 for v in _tensors(state))
        if (
            len(home.offsets) > 1
            and self._may_fetch_pieces([parameter, gradient, *large])
            and type(optimizer) in _BY_ELEMENT
            and isinstance(gradient, AwayTensor)
            and _has_form_of(gradient, home)
            and is_plain
            and all(_has_form_of(value, home) for value in large)
        ):
            self._update_by_pieces(optimizer, group, parameter, gradient)
        else:
            self._update_whole(optimizer, group, parameter)
        # A backward whose forward came before has to see that.
        parameter.home.version += 1
        torch.autograd.graph.increment_version(parameter)

    def _may_fetch_pieces(self, values: list[Any]) -> bool:
        """Return whether pieces take less memory: where not all is in the host's own."""
        if not self._is_on_host:
            return True
        is_away = any(isinstance(v, AwayTensor) and not v.home.tier.has_memory for v in values)
        return self._tier.beneath is not None and is_away

    def _update_whole(self, optimizer: Optimizer, group: Any, parameter: AwayTensor) -> None:
        before = optimizer.state.get(parameter, {})
        values = self._taken(parameter)
        made = nn.Parameter(values)
        made.grad = self._taken(parameter.grad)
        state = {name: self._taken(value) for name, value in before.items()}
        after = self._stepped(optimizer, group, made, state)
        if self._in_memory(parameter) is None:
            parameter.home.write(made.detach())
        # Fused kernels note no change of what they write: states are always written.
        del values, made, state
        optimizer.state[parameter] = self.keep(after, before)

    def _update_by_pieces(
        self, optimizer: Optimizer, group: Any, parameter: AwayTensor, gradient: AwayTensor
    ) -> None:
        before = optimizer.state.get(parameter, {})
        homes = {name: v.home for name, v in before.items() if isinstance(v, AwayTensor)}
        after: dict[str, Any] = {}
        for number in range(len(parameter.home.offsets)):
            made = nn.Parameter(parameter.home.fetch_part(number, self._place))
            made.grad = gradient.home.fetch_part(number, self._place)
            state = {
                name: homes[name].fetch_part(number, self._place)
                if name in homes
                else _copied(value)
                for name, value in before.items()
            }
            after = self._stepped(optimizer, group, made, state)
            parameter.home.write_part(number, made.detach())
            shape = made.shape
            del made, state
            for name, value in list(after.items()):
                if isinstance(value, torch.Tensor) and value.shape == shape:
                    if name not in homes:
                        form = _like(parameter, value)
                        homes[name] = Home(self._tier, form, value.device, lasts=True)
                    homes[name].write_part(number, value)
                    after[name] = value = None
        optimizer.state[parameter] = {
            name: AwayTensor.of(homes[name]) if name in homes else value
            for name, value in after.items()
        }

    def _stepped(self, optimizer: Optimizer, group: Any, made: nn.Parameter, state: Any) -> Any:
        """Return the state after a step of one parameter, which changes it."""
        if state:
            optimizer.state[made] = dict(state)
        group["params"] = [made]
        settings = None if optimizer in self._checked else _settings(group)
        try:
            _step(optimizer)
        finally:
            group["params"] = []
            after = optimizer.state.pop(made, {})
        if settings is not None and _settings(group) != settings:
            group.update(settings)
            raise ValueError(
                f"{type(optimizer).__name__} changes settings of its groups in each step, which "
                "cannot run for one parameter after the other: use an optimizer of torch.optim, or "
                "leave offload_state out"
            )
        self._checked.add(optimizer)
        return after

    def _taken(self, value: Any) -> Any:
        """Return a value with its bytes, where the optimizer computes."""
        if not isinstance(value, AwayTensor):
            return value
        in_memory = self._in_memory(value)
        return value.fetched(self._place) if in_memory is None else in_memory

    def _in_memory(self, value: AwayTensor) -> torch.Tensor | None:
        """Return the bytes of a home with which the host computes; ``None`` elsewhere."""
        return value.home.in_memory() if self._is_on_host and not value.steps else None


def _step(optimizer: Optimizer) -> None:
    """Run an optimizer's own step, without the hooks on its steps."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are no tensors."""
    return {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor)}


def _tensors(state: Any) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _has_form_of(value: AwayTensor, home: Home) -> bool:
    """Return whether the elements of a tensor at home lie in memory as those of another one."""
    mine = value.home
    is_same = mine.shape == home.shape and mine.stride == home.stride
    return is_same and mine.dtype == home.dtype and not value.steps


def _like(parameter: AwayTensor, piece: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values of a parameter's form, and a piece's type."""
    return torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=piece.dtype, device="meta"
    )


def _home_like(known: Any, value: torch.Tensor) -> Home | None:
    """Return the home of a tensor, if another one fits in it."""
    if not isinstance(known, AwayTensor) or known.steps:
        return None
    home = known.home
    is_same = home.shape == value.shape and home.dtype == value.dtype
    return home if is_same and home.device == value.device else None
