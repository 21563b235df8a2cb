"""Parameters, gradients and optimizer states of a model whose homes are in a second tier.

Between steps they are tensors without bytes, which fetch what an operation needs. A captured step
runs on *shells* in the place of the parameters, which claim bytes and hold none: its operations
read what the step fetches. A gradient goes to its home as soon as autograd has accumulated it. The
optimizer's own step runs for one parameter after the other, with all that belongs to it fetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotor._pytorch import core, optimizers, pointers
from rotor.common.frames import warn_caller
from rotor.errors import CaptureError, MemoryLimitWarning
from rotor.meter import allocator
from rotor.tier.checks import check_model, check_optimizers, goes_away
from rotor.tier.homes import AwayTensor, Home, Tickets
from rotor.tier.interface import Tier
from rotor.tier.offload import check_device, known_speed
from rotor.tier.recovery import FinishedSteps
from rotor.tier.updates import LEAST_BYTES, Updates
from rotor.tier.weights import Weight, Weights, weights_of
from rotor.units import exact_bytes

_METERED_UPDATES = 2

_COUNTER_BYTES = 16
"""Bytes of the scalars in the state of a parameter, such as the number of its steps."""

LARGE_BYTES = 1 << 18
"""Size of blocks that go back to the system once they are freed."""


class AwayState:
    """Homes of a model's parameters, gradients and optimizer states.

    Large parameters of `module` lose their bytes; each stays the object that it was. `optimizer`,
    or each of several, changes each of its parameters by itself: with `update` "device" where the
    model computes, with "host" in the memory of the tier. `weights`, as of `weights_of`, gives the
    values of parameters and buffers on the meta device, and `limit` the bytes that an update may
    have, ``None`` for any.
    ValueError or TypeError before anything has changed: the optimizer does not suit, or does not
    hold the model's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        tier: Tier,
        update: str | None = None,
        weights: Weights | None = None,
        limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        parameters = list(dict.fromkeys(module.parameters()))
        given = optimizers.each_unwrapped(optimizer)
        check_optimizers(parameters, [one for one, _ in given])
        check_model(module, update)
        source = _Source(module, weights, tier)
        check_device(tier, source.device)
        self.tier = tier
        self.update = update or ("host" if tier.has_memory else "device")
        if self.update == "host" and not tier.has_memory and tier.device_types != {"cpu"}:
            raise ValueError(
                f'update="host" computes in the memory of the tier, and {tier!r} has none: leave '
                "update out"
            )
        self.module = module
        self._paths = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        self._adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._shells: dict[int, nn.Parameter] = {}
        self._homes: dict[int, Home] = {}
        self._owners: dict[int, weakref.ref[nn.Parameter]] = {}
        self._expected: set[int] = set()
        self._leaving: list[tuple[Home, tuple[torch.Tensor, Tickets]]] = []
        self.device = source.device
        self.updates = Updates(tier, is_on_host=self.update == "host")
        self._limit = limit
        self._finished = FinishedSteps.of(module, [one for one, _ in given], tier)
        if tier.beneath is not None:
            # While there is room for it.
            known_speed(tier, source.device, limit())
        if source.device.type == "cpu":
            pointers.give_large_blocks_back(LARGE_BYTES)
        made = [(p, self._successor(p, source)) for p in parameters if goes_away(p) or p.is_meta]
        buffers = source.buffers()
        with pointers.no_references(module):
            for parameter, other in made:
                self._hand_over(parameter, other)
        for (values, name), buffer in buffers:
            values[name] = buffer
        for one, _ in given:
            self._keep_all(one)
        self._lead(given)
        if self._finished is not None:
            self._finished.record(0)
        _watch()
        _living.add(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model whose parameters are in a second tier cannot be copied or pickled: save "
            "model.state_dict() and optimizer.state_dict(), and wrap a new model"
        )

    def adopt(self, optimizer: Any) -> None:
        """Have other optimizers in the place of the present ones, whose states stay where they are.

        Raises the errors of the class if it does not suit. Nothing has changed.
        """
        given = optimizers.each_unwrapped(optimizer)
        several = [one for one, _ in given]
        check_optimizers(list(self.module.parameters()), several)
        if self._finished is not None:
            self._finished.follow(several, self._keep_all)
        else:
            for one in several:
                self._keep_all(one)
        for former in self.optimizers:
            vars(former).pop("step", None)
        for hook in self._loaded:
            hook.remove()
        self._lead(given)

    def _lead(self, given: Sequence[tuple[Optimizer, list[Any]]]) -> None:
        """Have the steps of optimizers, whose states are at home, run by the homes."""
        self._optimizers = [weakref.ref(one) for one, _ in given]
        self._adopted.update(one for one, _ in given)
        self._metered, self._has_warned = 0, False
        self._loaded = [one.register_load_state_dict_post_hook(self._keep_all) for one, _ in given]
        for one, outer in given:
            optimizers.replace_step(one, _stepping(self), outer)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers whose states have homes, without those that are gone."""
        return [one for reference in self._optimizers if (one := reference()) is not None]

    @property
    def optimizer(self) -> Any:
        """The only one of `optimizers`, the list of several, or ``None``."""
        found = self.optimizers
        return found if len(found) > 1 else next(iter(found), None)

    def _trained_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of the model that an optimizer trains."""
        own = set(map(id, optimizers.parameters_of(optimizer)))
        return [p for p in self.module.parameters() if p.requires_grad and id(p) in own]

    def check_step(self, optimizer: Any) -> None:
        """Raise RuntimeError if an optimizer would step on parameters that have another one."""
        inner, _ = optimizers.unwrapped(optimizer)
        if inner not in self.optimizers and any(
            self.has(p) and (p.requires_grad or p.grad is not None)
            for group in getattr(inner, "param_groups", ())
            for p in group["params"]
        ):
            raise RuntimeError(
                f"this {type(inner).__name__} is not the optimizer that the parameters have in a "
                "second tier, and its states would stay in memory: have it take over, by "
                "model.offload_state = optimizer, where model is what rotor.Checkpointable returned"
            )

    def _keep_all(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            self.updates.keep(state, {})

    def _successor(self, parameter: nn.Parameter, source: _Source) -> torch.Tensor:
        """Return what a parameter becomes: a tensor at home, or one with values."""
        if not goes_away(parameter):
            values = source.values_of(parameter, copies=True)
            return nn.Parameter(values, parameter.requires_grad)
        home = Home(self.tier, parameter.detach(), source.device, lasts=True)
        home.write(source.values_of(parameter))
        away: torch.Tensor = AwayTensor.of(home)
        away._is_param = True
        if parameter.grad is not None:
            self._add(away, parameter.grad)
            self.settle()
        return away

    def _hand_over(self, parameter: nn.Parameter, other: torch.Tensor) -> None:
        """Have a parameter be what it becomes; one with a home loses its bytes."""
        is_trained = parameter.requires_grad
        torch.utils.swap_tensors(parameter, other)
        if not isinstance(parameter, AwayTensor):
            return
        home = parameter.home
        storage = pointers.empty_shell(home.device, home.nbytes)
        values = torch.empty(0, dtype=home.dtype, device=home.device)
        shell = nn.Parameter(values.set_(storage, 0, home.shape, home.stride), False)
        self._shells[id(parameter)] = shell
        self._homes[core.storage_identity(shell)] = home
        owner: weakref.ref[Any] = weakref.ref(parameter)
        self._owners[id(shell)] = owner
        parameter.add_gradient = partial(_taken, weakref.ref(self), owner)
        if parameter.is_floating_point() or parameter.is_complex():
            # The garbage collector sees no cycle through such a hook; frozen parameters keep it.
            hook = partial(_came, weakref.ref(self))
            parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
            parameter.requires_grad_(is_trained)

    # -- steps

    def home_of(self, tensor: Any) -> Home | None:
        """Return the home of the parameter that a shell stands for; ``None`` for other tensors.

        A step that is captured anew as it runs has other tensors on the storages of shells.
        """
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        return self._homes.get(core.storage_identity(tensor)) if is_plain else None

    def parameter_of(self, tensor: Any) -> Any:
        """Return the parameter for which a shell stands; another tensor itself."""
        owner = self._owners.get(id(tensor))
        return tensor if owner is None else owner()

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Have the next gradients of these parameters leave while captured code goes on."""
        self._expected = set(map(id, parameters))

    def is_expected(self, parameter: torch.Tensor) -> bool:
        """Return whether captured code waits for the gradient of a parameter to leave."""
        return id(parameter) in self._expected and not core.has_accumulation_hooks(parameter, 1)

    def has(self, parameter: Any) -> bool:
        """Return whether a parameter has a home."""
        shell = self._shells.get(id(parameter))
        return shell is not None and self.parameter_of(shell) is parameter

    def resident_bytes(self) -> int:
        """Return the bytes in memory of parameters, their gradients and states, and of buffers."""
        states = [list(optimizer.state.values()) for optimizer in self._adopted]
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [p.grad for p in self.module.parameters() if p.grad is not None]
        tensors += [t for t in core.tree_flatten(states)[0] if isinstance(t, torch.Tensor)]
        return allocator.storage_bytes([t for t in tensors if t.device == self.device])

    def owned_bytes(self) -> int:
        """Return the bytes in memory of what the model owns, states still to be made included."""
        return self.resident_bytes() + self.coming_bytes()

    def bytes_by_name(self) -> dict[str, int]:
        """Return the bytes in the tier and in memory, and those that an update of all moves."""
        away = [p for p in self.module.parameters() if self.has(p)]
        trained = [p for p in away if p.requires_grad]
        gradients = sum(p.nbytes for p in trained)
        made = [
            v for one in self.optimizers for p in trained for v in one.state.get(p, {}).values()
        ]
        states = sum(v.nbytes for v in made if isinstance(v, AwayTensor)) + self._states_to_come()
        is_moved = not (self.update == "host" and self.tier.has_memory)
        return {
            "parameters": sum(p.nbytes for p in away),
            "gradients": gradients,
            "states": states,
            "resident": self.owned_bytes(),
            "update_reads": is_moved * (2 * gradients + states),
            "update_writes": is_moved * (gradients + states),
        }

    def coming_bytes(self) -> int:
        """Return the bytes of states still to be made that stay in memory."""
        return sum(map(self._coming_bytes_of, self.optimizers))

    def _coming_bytes_of(self, optimizer: Optimizer) -> int:
        waiting = [p for p in self._trained_by(optimizer) if not optimizer.state.get(p)]
        rounding = allocator.rounded_bytes(1, self.device) - 1
        here = [p for p in waiting if rounding and not self.has(p)]
        states = sum(optimizers.states_of(optimizer, p) for p in here)
        made = optimizers.missing_bytes(optimizer, self.device)
        away = {(p.shape, p.dtype): p for p in waiting if self.has(p)}
        small = {
            form: sum(
                allocator.rounded_bytes(size, self.device)
                for size in optimizers.small_states(optimizer, p, LEAST_BYTES)
            )
            for form, p in away.items()
        }
        made += sum(small[p.shape, p.dtype] for p in waiting if self.has(p))
        return made + _COUNTER_BYTES * len(waiting) + rounding * states

    def coming_home_bytes(self) -> int:
        """Return the bytes of the homes of gradients and states that do not exist yet."""
        trained = [p for p in self.module.parameters() if self.has(p) and p.requires_grad]
        return self._states_to_come() + sum(p.nbytes for p in trained if p.grad is None)

    def _states_to_come(self) -> int:
        """Return the bytes of the states of parameters with homes that do not exist yet."""
        total = 0
        for optimizer, group in [(one, g) for one in self.optimizers for g in one.param_groups]:
            # Alike parameters of a group have alike states, which are tried once.
            counts: dict[Any, int] = {}
            for p in group["params"]:
                if self.has(p) and p.requires_grad and not optimizer.state.get(p):
                    form = p.shape, p.dtype
                    if form not in counts:
                        counts[form] = optimizers.states_of(optimizer, p)
                    total += counts[form] * p.nbytes
        return total

    def least_update_bytes(self) -> int:
        """Return bytes within which each parameter can be updated, about."""
        if not self.optimizers or (self.update == "host" and self.tier.has_memory):
            return 0
        needed = [0]
        for one in self.optimizers:
            trained = [p for p in self._trained_by(one) if isinstance(p, AwayTensor)]
            away = {(p.shape, p.dtype): p for p in trained}
            needed += [self.updates.least_bytes(one, p) for p in away.values()]
        return max(needed) + self.absent_bytes()

    def absent_bytes(self) -> int:
        """Return the bytes of gradients still to be made that stay in memory."""
        trained = [p for p in self.module.parameters() if p.requires_grad and p.grad is None]
        return sum(p.nbytes for p in trained if not self.has(p))

    @contextmanager
    def shells(self, slots: Sequence[core.Slot]) -> Iterator[None]:
        """Have shells stand for the parameters in the context, in the slots of a module.

        Raises CaptureError if a parameter was replaced, or added.
        """
        changed: list[tuple[core.Slot, Any]] = []
        try:
            for values, name in slots:
                parameter = values[name]
                shell = self._shells.get(id(parameter))
                if shell is not None:
                    changed.append(((values, name), parameter))
                    values[name] = shell.requires_grad_(parameter.requires_grad)
                else:
                    self._check_known(name, parameter)
            yield
        finally:
            for (values, name), parameter in changed:
                values[name] = parameter

    def _check_known(self, name: str, parameter: torch.Tensor) -> None:
        """Raise CaptureError if a parameter would have got a home if it had been there."""
        if goes_away(parameter) or isinstance(parameter, AwayTensor):
            named = self.module.named_parameters(remove_duplicate=False)
            path = next((path for path, p in named if p is parameter), name)
            what = "replaced" if path in self._paths else "added"
            raise CaptureError(
                f"parameter {path} was {what} after its model was wrapped with offload_state=: "
                "wrap the model again, with an optimizer of its parameters"
            )

    def take(self, parameter: torch.Tensor | None, gradient: torch.Tensor) -> None:
        """Add to the gradient of a parameter, which is in the tier when this returns."""
        if parameter is not None:
            self._add(parameter, gradient)
            self.settle()

    def settle(self) -> None:
        """Wait until the gradients that have left memory are in the tier."""
        while self._leaving:
            home, (_, tickets) = self._leaving.pop()
            home.wait(tickets)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        known = parameter.grad
        if known is None and isinstance(gradient, AwayTensor):
            parameter.grad = gradient
        elif known is None:
            home = Home(self.tier, parameter)
            self._leaving.append((home, home.begin_write(gradient)))
            parameter.grad = AwayTensor.of(home)
        else:
            with torch.no_grad():
                known += gradient

    # -- updates

    def run_update(self, optimizer: Optimizer) -> None:
        """Run an optimizer's step; see that its bytes keep the limit, in the first ones."""
        self.settle()
        if self._finished is not None:
            with self._finished.step():
                self._update(optimizer)
            return
        try:
            self._update(optimizer)
        except OSError as error:
            error.add_note(
                "the step of the optimizer is half done: load what was saved before; in a folder "
                "with a name, offload='disk:FOLDER', the last finished step would be there"
            )
            raise

    def _update(self, optimizer: Optimizer) -> None:
        limit_bytes = self._limit()
        if self._metered == _METERED_UPDATES * len(self._optimizers) or limit_bytes is None:
            self.updates.run(optimizer)
            return
        try:
            meter = allocator.meter(self.device)
            meter.start()
        except allocator.MeterBusyError:
            self.updates.run(optimizer)
            return
        try:
            self.updates.run(optimizer)
        finally:
            meter.stop()
        self._metered += 1
        peak_bytes = meter.peak_bytes
        own = self.resident_bytes()
        if own + peak_bytes > limit_bytes and not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"the update of one parameter by {type(optimizer).__name__} takes "
                f"{exact_bytes(peak_bytes)} beside {exact_bytes(own)} that stay in memory, and the "
                f"limit is {exact_bytes(limit_bytes)}: give at least {own + peak_bytes} bytes, or "
                "an optimizer with fewer states",
                MemoryLimitWarning,
            )


_living: weakref.WeakSet[AwayState] = weakref.WeakSet()


@cache
def _watch() -> None:
    """Have other optimizers raise before they step on parameters with homes, from now on."""
    # The hook stays: one that the garbage collector removes breaks a step that runs its hooks.
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    for state in list(_living):
        state.check_step(optimizer)


def _taken(
    known: weakref.ref[AwayState], owner: weakref.ref[nn.Parameter], gradient: torch.Tensor
) -> None:
    """Add to the gradient of a parameter."""
    state = known()
    if state is not None:
        state.take(owner(), gradient)


def _came(known: weakref.ref[AwayState], parameter: torch.Tensor) -> None:
    """Move the gradient that autograd has accumulated to the tier."""
    state, gradient = known(), parameter.grad
    if state is None or gradient is None or isinstance(gradient, AwayTensor):
        return
    if gradient.layout == torch.strided:
        parameter.grad = None
        if state.is_expected(parameter):
            state._add(parameter, gradient)
        else:
            state.take(parameter, gradient)


class _Source:
    """Values of a model's parameters and buffers: their own, or those of a file."""

    def __init__(self, module: nn.Module, weights: Weights | None, tier: Tier) -> None:
        self._module = module
        self._find = None if weights is None else weights_of(weights)
        self._names: dict[int, list[str]] = {}
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            self._names.setdefault(id(tensor), []).append(name)
        tensors = [*module.parameters(), *module.buffers()]
        places = {t.device for t in tensors if not t.is_meta}
        self.device = next(iter(places), torch.device("cpu"))
        found = torch.accelerator.current_accelerator()
        if not places and found is not None and not tier.reaches(self.device):
            self.device = torch.device(found.type, torch.accelerator.current_device_index())
        self._check(tensors)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        lacking, filled = [], []
        for tensor in tensors:
            weight, name = self._weight_of(tensor), self._names[id(tensor)][0]
            if not tensor.is_meta:
                if (
                    weight is not None
                    and weight.shape is not None
                    and isinstance(tensor, nn.Parameter)
                ):
                    filled.append(name)
            elif weight is None:
                lacking.append(name)
            elif weight.shape not in (None, tuple(tensor.shape)):
                raise ValueError(
                    f"{name} is of shape {weight.shape} in the weights, and "
                    f"{tuple(tensor.shape)} in the model"
                )
        if filled or (self._find is not None and not any(t.is_meta for t in tensors)):
            found = f"{', '.join(filled[:3])} has" if filled else "all of the model have"
            raise ValueError(
                f"weights= has the values of what is on the meta device, and {found} values "
                "already: take these over by load_state_dict(), and leave them out of weights=, or "
                'make the model within torch.device("meta")'
            )
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ValueError(
                f"{', '.join(lacking[:3])}{more} have no values, on the meta device: give "
                "weights=, a safetensors file that has them, and make buffers that a model "
                "computes before it is wrapped"
            )

    def _weight_of(self, tensor: torch.Tensor) -> Weight | None:
        if self._find is None:
            return None
        found = map(self._find, self._names[id(tensor)])
        return next((weight for weight in found if weight is not None), None)

    def values_of(self, tensor: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
        """Return the values of a parameter or buffer, on the device of the model.

        With `copies` they are not the source's own, which may be given to several models.
        """
        if not tensor.is_meta:
            return tensor.detach()
        weight = self._weight_of(tensor)
        assert weight is not None
        values: Any = weight.read()
        is_tensor = isinstance(values, torch.Tensor)
        if not is_tensor or values.shape != tensor.shape or values.is_meta:
            kind = type(values).__name__
            if is_tensor:
                kind = f"tensor of shape {tuple(values.shape)} on {values.device}"
            raise ValueError(
                f"weights gave a {kind} for {self._names[id(tensor)][0]}, expected a tensor with "
                f"values, of shape {tuple(tensor.shape)}"
            )
        made: torch.Tensor = values.detach().to(self.device, tensor.dtype, copy=copies)
        return made

    def buffers(self) -> list[tuple[core.Slot, torch.Tensor]]:
        """Return the slots of buffers on the meta device, and their values."""
        slots = [slot for module in self._module.modules() for slot in core.buffer_slots(module)]
        found = [(slot, core.value_in(slot)) for slot in slots]
        return [(s, self.values_of(b, copies=True)) for s, b in found if b.is_meta]


def _stepping(state: AwayState) -> Any:
    """Return a step of optimizers, by the homes of a model."""

    def step(optimizer: Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state.run_update(optimizer)
        return loss

    return step
