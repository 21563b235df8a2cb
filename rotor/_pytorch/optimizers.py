"""Optimizers of the process, and the bytes of states that their first steps will make."""

from __future__ import annotations

import gc
import inspect
import math
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from rotor._pytorch import core
from rotor._pytorch.dispatch import DispatchMode
from rotor._pytorch.fsdp import local

ASSUMED = ("Adam", 2)
"""Optimizer that is assumed before one is seen, and its states per parameter."""

_SAMPLE = 8192
"""Most elements of a parameter on which an optimizer is tried that computes with its values."""

_known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that were seen, with the number of their parameters with a state."""

_changes = 0
_is_watching = False


def watch() -> None:
    """Notice, from now on, optimizers that step and have other states than before."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    global _changes
    count = len(optimizer.state)
    if _known.get(optimizer) != count:
        _known[optimizer] = count
        _changes += 1


def number_of_changes() -> int:
    """Return how often states were seen to come, or an optimizer was seen first."""
    return _changes


def find(parameters: Iterable[torch.Tensor]) -> None:
    """Look for the optimizers of the process, unless these parameters have known ones."""
    held = {id(p) for optimizer in list(_known) for p in parameters_of(optimizer)}
    if all(id(parameter) in held for parameter in parameters):
        return
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and "state" in vars(found):
            _known.setdefault(found, len(found.state))


def made_bytes(device: torch.device) -> int:
    """Return the bytes of the known optimizers' states on a device."""
    states = {
        state
        for optimizer in list(_known)
        for state in _tensors(optimizer)
        if state.device == device
    }
    return sum(state.untyped_storage().nbytes() for state in states)


def coming_bytes(parameters: Iterable[torch.Tensor], device: torch.device) -> tuple[int, str]:
    """Return the bytes of states still to be made on a device, and the optimizer's name.

    Parameters that train and belong to no known optimizer are taken to get Adam's states.
    """
    total, names = 0, list[str]()
    held: set[int] = set()
    for optimizer in list(_known):
        own = {id(p) for p in parameters_of(optimizer)}
        if not own <= held:
            missing = missing_bytes(optimizer, device)
            total += missing
            names += [type(optimizer).__name__] if missing else []
            held |= own
    others = [
        p for p in parameters if id(p) not in held and p.device == device and not core.is_away(p)
    ]
    if others:
        total += ASSUMED[1] * sum(local(p).nbytes for p in others if p.requires_grad)
        names.append(ASSUMED[0])
    return total, " and ".join(dict.fromkeys(names))


def states_of(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return the number of states of a parameter's size, made or still to be made, rounded up."""
    known = optimizer.state.get(parameter, {}).values()
    tensors = [state for state in known if isinstance(state, torch.Tensor)]
    made = [state.nbytes for state in tensors if state.layout == torch.strided]
    if made:
        return -(-sum(made) // parameter.nbytes)
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    place = torch.device("cpu")
    shape, dtype = parameter.shape, parameter.dtype
    found = [_tried_bytes(optimizer, group, shape, dtype, place) for group in groups]
    return -(-max(found, default=0) // parameter.nbytes)


def held_in_step(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return how many tensors of a parameter's size a step of it alone holds, rounded up.

    Itself, its gradient, and its states are among them; 0 if the optimizer does not have it.
    """
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    if not groups:
        return 0
    shape, dtype = parameter.shape, parameter.dtype
    sample = shape if shape.numel() <= _SAMPLE else torch.Size([_SAMPLE])
    for place, tried in (("meta", shape), ("cpu", sample)):
        held = _Held()
        if _states(optimizer, groups[0], tried, dtype, torch.device(place), held) is not None:
            return -(-held.most_bytes // (tried.numel() * dtype.itemsize))
    return 2 + states_of(optimizer, parameter) + ASSUMED[1]


class _Held(DispatchMode):
    """Context that counts the bytes of noted tensors, and of what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Any, int]] = {}
        self.most_bytes = 0

    def note(self, value: Any) -> Any:
        """Return a value, whose tensors count as long as they live; scalars do not."""
        for tensor in core.tree_flatten(value)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                known = core.storage_reference(tensor), tensor.untyped_storage().nbytes()
                self._known[core.storage_identity(tensor)] = known
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(nbytes for _, nbytes in self._known.values()))
        return value

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.note(operator(*args, **(kwargs or {})))


def of(parameters: Iterable[torch.Tensor]) -> Optimizer:
    """Return the optimizer of the process that has these parameters; ValueError: none, or more."""
    trained = [p for p in parameters if p.requires_grad]
    find(trained)
    wanted = {id(p) for p in trained}
    found = [one for one in list(_known) if not wanted.isdisjoint(map(id, parameters_of(one)))]
    if len(found) != 1:
        names = ", ".join(type(one).__name__ for one in found)
        raise ValueError(
            f"the parameters of the model are those of {len(found)} optimizers ({names}), and one "
            "is to have its states in a second tier: make one, of all of them"
            if found
            else "no optimizer has the parameters of the model yet: make it before the first "
            "training forward, and after the model is on its device"
        )
    return found[0]


def unwrapped(optimizer: Any) -> tuple[Any, list[Any]]:
    """Return the optimizer that others wrap, such as Accelerate's and Lightning's, and these.

    A scheduler, which has an optimizer too, is none.
    """
    outer = []
    while hasattr(optimizer, "param_groups") and isinstance(
        inner := getattr(optimizer, "optimizer", None), Optimizer
    ):
        outer.append(optimizer)
        optimizer = inner
    return optimizer, outer


def each_unwrapped(given: Any) -> list[tuple[Any, list[Any]]]:
    """Return the results of `unwrapped` for one optimizer, or for each of several."""
    is_several = isinstance(given, list | tuple) and given
    return list(map(unwrapped, given if is_several else [given]))


def replace_step(optimizer: Optimizer, step: Callable[..., Any], outer: Iterable[Any]) -> None:
    """Have an optimizer, and those that wrap it, take steps by another function.

    A scheduler looks for a mark on the step, and for one on the optimizer that it has been taken.
    """

    def marked(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    vars(marked)["_wrapped_by_lr_sched"] = True
    made = types.MethodType(Optimizer.profile_hook_step(marked), optimizer)
    optimizer.step = made  # type: ignore[method-assign]
    for one in outer:
        if any(getattr(value, "__name__", "") == "step" for value in vars(one).values()):
            # The former step that a wrapper keeps is looked up again, as in a copy.
            one.__setstate__(one.__getstate__())


def updated_state(scaler: Any) -> dict[str, Any]:
    """Return the state in which the next update leaves a scaler of gradients, which stays."""
    twin: Any = object.__new__(type(scaler))
    vars(twin).update(vars(scaler))
    is_used = scaler.is_enabled() and any(
        state["found_inf_per_device"] for state in twin._per_optimizer_states.values()
    )
    if is_used:
        twin._scale, twin._growth_tracker = twin._scale.clone(), twin._growth_tracker.clone()
        twin.update()
    found: dict[str, Any] = twin.state_dict()
    return found


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters in all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    leaves, _ = core.tree_flatten(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def missing_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes of states that an optimizer has still to make on a device."""
    total = 0
    for group in optimizer.param_groups:
        missing = Counter(
            (local(p).shape, p.dtype)
            for p in group["params"]
            if p.requires_grad
            and p.device == device
            and not core.is_away(p)
            and not optimizer.state.get(p)
        )
        for (shape, dtype), count in missing.items():
            total += count * _tried_bytes(optimizer, group, shape, dtype, device)
    return total


def small_states(optimizer: Optimizer, parameter: torch.Tensor, below_bytes: int) -> list[int]:
    """Return the sizes of the states below some bytes that a first step makes for a parameter.

    Such as those of rows and columns; they are found on a smaller parameter. Scalars are left out.
    """
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    shape = parameter.shape
    if not groups or len(shape) > len(_SIDES):
        return []
    sample = torch.Size(map(min, shape, _SIDES))
    found = []
    for state in _states(optimizer, groups[0], sample, parameter.dtype, torch.device("cpu")) or ():
        sides = list(state.shape)
        if len(sides) == len(shape):
            sides = [d if n == k else n for n, k, d in zip(sides, sample, shape, strict=True)]
        size = math.prod(sides) * state.itemsize
        if state.numel() > 1 and size < below_bytes:
            found.append(size)
    return found


_SIDES = (61, 59, 53, 47, 43)
"""Sides, at most, of a parameter on which an optimizer is tried."""


def _tried_bytes(
    optimizer: Optimizer, group: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the bytes of the state that an optimizer makes for a parameter alone."""
    size, bits = shape.numel(), _bits(optimizer)
    sample = shape if size <= _SAMPLE else torch.Size([_SAMPLE])
    for place, tried in ((torch.device("meta"), shape), (device, sample)):
        states = _states(optimizer, group, tried, dtype, place)
        if states is not None:
            found = sum(s.untyped_storage().nbytes() for s in states)
            return found * size // max(tried.numel(), 1)
    # bitsandbytes keeps the largest of each block, and small states in 32 bits.
    least = getattr(getattr(optimizer, "args", None), "min_8bit_size", None)
    if least is not None and size < least:
        bits = 32
    scales = 4 * -(-size // _BLOCK) if least is not None and bits == 8 else 0
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    count = 1 if "Optimizer1State" in kinds else ASSUMED[1]
    return count * (size * (bits or 8 * dtype.itemsize) // 8 + scales)


_BLOCK = 256
"""Elements of a quantised state with a scale of their own."""


def _bits(optimizer: Optimizer) -> int | None:
    """Return the bits of an element of quantised states."""
    name = type(optimizer).__name__.lower()
    return next((bits for bits in (4, 8) if f"{bits}bit" in name), None)


def _states(
    optimizer: Optimizer,
    group: Any,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    held: _Held | None = None,
) -> set[torch.Tensor] | None:
    """Return the states on a device that a twin of an optimizer makes for a parameter alone.

    What a second step has in memory is noted in `held`.

    The twin shares attributes with the optimizer: one that holds tensors or other optimizers in
    them could step these, and is not tried; ``None`` then.
    """
    is_plain = _bits(optimizer) is None and all(
        _is_plain(value) for key, value in vars(optimizer).items() if key not in _OWN
    )
    if not is_plain:
        return None
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [parameter]}]
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(twin)
            if held is not None:
                held.note([parameter, parameter.grad, *_tensors(twin)])
                with held:
                    inspect.unwrap(type(optimizer).step)(twin)
    except Exception:  # An optimizer of others may ask for anything.
        return None
    return {s for s in _tensors(twin) if s.device == device}


_OWN = ("state", "param_groups", "step")
"""Attributes of an optimizer that its twin has for itself; schedulers put a step there."""


def _is_plain(value: Any) -> bool:
    """Return whether a value holds nothing that an optimizer could step."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or callable(value) or isinstance(value, str | int | float | complex)
