"""Module that wraps another and behaves as it does: names, states, copies, attributes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from rotor._pytorch import fsdp, traces
from rotor.common.frames import fold
from rotor.common.places import is_library
from rotor.common.substitutes import PatchedForwards

_SHARED = frozenset(vars(nn.Module())) - {"training"}


class ShownForward:
    """Method ``forward`` of a wrapper; bound, it has the signature of the wrapped module's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._function = function

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is not None:
            return _BoundForward(self._function, wrapper)
        if traces.is_symbolic():
            raise RuntimeError(
                "torch.fx traces a model with a limit: its graph would be one without. Trace the "
                "model before, rotor.Checkpointable(torch.fx.symbolic_trace(model), ...), or trace "
                "chk.module for a graph without a limit"
            )
        return self._function


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors show the model's code and the caller's alone."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)  # ROTOR_FULL_TRACEBACK=1: all
        except Exception as error:
            fold(error)
            raise

    return call


def own_call_of(
    module: nn.Module, forward: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the call of a module whose class has a ``__call__`` of its own; else `plain`.

    Where that calls the module's forward, `forward` runs in its place.
    """
    if type(module).__call__ is nn.Module.__call__:
        return plain
    kind = next(base for base in type(module).__mro__ if "__call__" in vars(base))
    if is_library(kind.__module__):
        return plain

    def call(*args: Any, **kwargs: Any) -> Any:
        def planned(*args: Any, **kwargs: Any) -> Any:
            with patched.paused():
                return forward(*args, **kwargs)

        with PatchedForwards([module], lambda *_: planned) as patched:
            return module(*args, **kwargs)

    return call


class _BoundForward:
    """Method ``forward`` of one wrapper."""

    def __init__(self, function: Callable[..., Any], wrapper: Any) -> None:
        self.__func__ = function
        self.__self__ = wrapper
        self.__name__ = "forward"
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)  # ROTOR_FULL_TRACEBACK=1: all
        except Exception as error:
            fold(error)
            raise

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.module.forward)

    @property
    def __code__(self) -> Any:
        """Code of the model's forward, in which programs look for names of arguments."""
        return self.__self__.module.forward.__code__


class TransparentModule(nn.Module):
    """Wrapper with the parameters, buffers, children, hooks and keys of `module`, without a prefix.

    The dictionaries in which a module keeps them are the wrapped module's own, shared; methods that
    a module may override are passed on. A name that both have is the wrapper's, every other
    attribute is the wrapped module's, for reading and for writing.
    """

    module: Any
    _shown_name = "TransparentModule"

    def __init__(self, module: nn.Module) -> None:
        # nn.Module.__init__ would make dictionaries of its own, and set the training flag.
        self._share(module)

    def _share(self, module: nn.Module) -> None:
        own = self.__dict__
        own["module"] = module
        own.pop("training", None)
        for name in _SHARED:
            own[name] = getattr(module, name)
        own.update(fsdp.states_of(module))

    @property
    def __class__(self) -> Any:
        """Class of the wrapped module, for those who ask an object; ``type`` is the wrapper's."""
        module = self.__dict__.get("module")
        return type(self) if module is None else type(module)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        # A class of fully_shard derives from one of its own and the shown one: the wrapper takes
        # it. Classes of lazy modules and of parametrizations are for the wrapped module.
        shown = type(self.__dict__["module"])
        if shown not in cls.__bases__ or len(cls.__bases__) == 1:
            self.__dict__["module"].__class__ = cls
            return
        bases = tuple([type(self) if base is shown else base for base in cls.__bases__])
        body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        vars(object)["__class__"].__set__(self, type(cls.__name__, bases, body))

    @property
    def training(self) -> bool:
        """True if the wrapped module is in training mode."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["module"].training = mode

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name == "__deepcopy__":  # Its own would copy the module alone.
            raise AttributeError(f"{self._shown_name} has no attribute {name!r}")
        try:
            value = getattr(module, name)
            if inspect.ismethod(value) and value.__self__ is module:
                # A method of the user's may call the model: bound to the wrapper, it calls that.
                is_own = not is_library(value.__func__.__module__)
                return MethodType(value.__func__, self) if is_own else self._returning(value)
            return value
        except AttributeError:
            if hasattr(type(module), name):
                raise
        raise AttributeError(
            f"{self._shown_name} has no attribute {name!r}, nor has the {type(module).__name__} "
            "that it wraps",
            name=name,
            obj=self,
        )

    def _returning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns the wrapper in the place of the wrapped module."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            return self if found is self.module else found

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SHARED:
            self.__dict__[name] = value
            self.module.__dict__[name] = value
        elif name == "module":
            raise AttributeError(
                "the wrapped model stays the one that it is: wrap the other one, or load its "
                "values by load_state_dict()"
            )
        elif name in self.__dict__ or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.module)})

    def __prepare_scriptable__(self) -> nn.Module:
        # PyTorch would put the answer in the place of a wrapper within a larger model.
        raise RuntimeError(
            "torch.jit.script compiles a model with a limit: the script would be one without. "
            "Give it chk.module, the plain model"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unmade, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _SHARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share(self.__dict__["module"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.module[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.module[index]

    def __iadd__(self, other: Any) -> Any:
        return self._returning(operator.iadd)(self.module, other)

    def __imul__(self, other: Any) -> Any:
        return self._returning(operator.imul)(self.module, other)

    # -- methods that a module may override, and visits of the wrapped module itself

    def train(self, mode: bool = True) -> Self:
        """Set training mode of the wrapped module."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's ``state_dict``; keys carry no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the wrapped module and inner ones; FSDP2 finds a sharded wrapper in its place."""
        inner: Iterator[tuple[str, nn.Module]] = self.module.named_modules(
            memo, prefix, remove_duplicate
        )
        if not fsdp.is_unit(self):
            return inner
        return ((name, self if module is self.module else module) for name, module in inner)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply `fn` to the wrapped module and its inner ones."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        return self


def _unmade(cls: Any) -> Any:
    """Return an object of a class without a state."""
    return cls.__new__(cls)
