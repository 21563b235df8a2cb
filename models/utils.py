"""Small pieces that make it easy to write a network as a ``torch.nn.Sequential``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import Flatten as Flatten

__all__ = [
    "Apply",
    "Flatten",
    "Model",
    "ReLUAtEnd",
    "ReLUatEnd",
    "Residual",
    "branch_off",
    "model_options",
    "named",
    "on_first",
]

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


class Model(nn.Sequential):
    """A ``torch.nn.Sequential`` whose subclasses may have their own constructors.

    A slice of it is a plain ``torch.nn.Sequential`` that shares its stages and keeps their names.
    """

    @overload
    def __getitem__(self, idx: int) -> nn.Module: ...
    @overload
    def __getitem__(self, idx: slice) -> nn.Sequential: ...
    def __getitem__(self, idx: int | slice) -> nn.Module:
        """Return one stage, or a Sequential of several."""
        if isinstance(idx, slice):
            children = [
                (name, child)
                for name, child in self.named_modules(remove_duplicate=False)
                if name and "." not in name
            ]
            return nn.Sequential(OrderedDict(children[idx]))
        return super().__getitem__(idx)


class ReLUAtEnd(nn.Sequential):
    """Stages in sequence, then a ReLU that works in place: one stage of a chain.

    The ReLU overwrites what the last stage returned instead of keeping both, so the last stage
    must not need its own output for its gradient (convolutions, linear layers and normalisations
    do not; activations such as ``Sigmoid`` do, and autograd raises then).

    Parameters
    ----------
    *args
        Modules, or one ordered dictionary of named modules, as for ``torch.nn.Sequential``.
    """

    def forward(self, input: Any) -> Tensor:
        """Return ``relu(stages(input))``."""
        return torch.relu_(super().forward(input))


class ReLUatEnd(nn.Module):
    """One module, then a ReLU that works in place, by its published name and attributes.

    `ReLUAtEnd` takes several, and keeps their names in the state.

    Parameters
    ----------
    module
        A module whose gradient does not need its own output.

    Attributes
    ----------
    module, relu
        The module, and the ReLU.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Tensor:
        """Return ``relu(module(x))``."""
        out: Tensor = self.relu(self.module(x))
        return out


class Residual(nn.Module):
    """``body(x) + shortcut(x)``: one stage of a chain.

    Parameters
    ----------
    body
        The residual function; must return the shape that the shortcut returns, and must not
        change its input, which the shortcut reads too.
    shortcut
        The other path of the input; the identity if None.

    Raises
    ------
    ValueError
        The first layer of `body` works in place.
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        first = _first_layer(body)
        if getattr(first, "inplace", False):
            raise ValueError(
                f"the body of a Residual begins with {first}, which would overwrite the input "
                "that the shortcut reads; give it inplace=False"
            )
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths, in the shape that both return."""
        out: Tensor = self.body(x)
        return out + (x if self.shortcut is None else self.shortcut(x))


class Apply(nn.Module):
    """A function of tensors as a stage without parameters.

    Parameters
    ----------
    function
        Called with the stage's input and `arguments`. To be pickled with the model it has to be
        importable by name, so no lambda.
    **arguments
        Keyword arguments of every call.
    """

    def __init__(self, function: Callable[..., Any], **arguments: Any) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments

    def forward(self, x: Any) -> Any:
        """Return ``function(x, **arguments)``."""
        return self.function(x, **self.arguments)

    def extra_repr(self) -> str:
        """Return the function and its arguments, as text."""
        name = getattr(self.function, "__name__", repr(self.function))
        return ", ".join([name, *(f"{key}={value!r}" for key, value in self.arguments.items())])


def named(**stages: nn.Module) -> nn.Sequential:
    """Build a Sequential whose stages have names: ``named(conv=nn.Conv2d(3, 8, 3), act=...)``."""
    return nn.Sequential(OrderedDict(stages))


def on_first(module: _ModuleT) -> _ModuleT:
    """Let a stage act on the first element of a tuple and pass the rest along unchanged.

    Given anything but a tuple the stage works as before. The module is changed and returned. Its
    parameters keep their names, it remains an instance of its class, and it can be copied and
    pickled.

    Parameters
    ----------
    module
        A module of one input.

    Returns
    -------
    nn.Module
        `module`, changed.
    """
    return _mix_in(module, _OnFirst)


def branch_off(module: _ModuleT) -> _ModuleT:
    """Turn a side branch into a stage: in training it returns ``(x, module(x))``, else ``x``.

    Later stages have to be wrapped by `on_first`, up to the one that takes the pair. The module is
    changed and returned, as by `on_first`.

    Parameters
    ----------
    module
        A module of one input; it must not change it.

    Returns
    -------
    nn.Module
        `module`, changed.
    """
    return _mix_in(module, _BranchOff)


def model_options(
    function: str,
    given: Mapping[str, Any],
    accepted: type,
    fixed: Mapping[str, Any] | None = None,
    *,
    pretrained: Any = False,
) -> dict[str, Any]:
    """Check the keyword arguments of a function that builds a model of a known size.

    Parameters
    ----------
    function
        Its name, for messages.
    given
        Keyword arguments of the call.
    accepted
        The ``TypedDict`` of accepted arguments.
    fixed
        Arguments fixed by the size: they may be repeated in `given`, not contradicted.
    pretrained
        True if weights are asked for, as in torchvision; ``weights`` in `given` asks too.

    Returns
    -------
    dict
        The constructor's arguments, `fixed` included.

    Raises
    ------
    ValueError
        Pretrained weights are asked for, or a fixed argument is contradicted.
    TypeError
        An argument is unknown.
    """
    options = dict(given)
    weights = options.pop("weights", None)
    pretrained = options.pop("pretrained", pretrained)
    if weights is not None or pretrained:
        asked = f"pretrained={pretrained!r}" if weights is None else f"weights={weights!r}"
        raise ValueError(
            f"{function}({asked}): rotor downloads no weights; build the model without this "
            "argument and give a state_dict in torchvision's format to model.load_state_dict"
        )
    names = sorted(accepted.__annotations__.keys() - {"weights", "pretrained"})
    unknown = sorted(options.keys() - set(names))
    if unknown:
        raise TypeError(
            f"{function}() has no argument {', '.join(unknown)}; it takes {', '.join(names)}"
        )
    for name, value in (fixed or {}).items():
        if options.setdefault(name, value) != value:
            raise ValueError(
                f"{function}() has {name}={value!r} by definition, not {options[name]!r}; "
                "use the class for other sizes"
            )
    return options


class _Mixin(nn.Module):
    """Class that comes before a module's own class in a class made by `_mixed_class`."""

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        bases = type(self).__bases__
        if len(bases) == 2 and issubclass(bases[0], _Mixin):
            return _rebuild, bases, self.__getstate__()
        return super().__reduce_ex__(protocol)


class _OnFirst(_Mixin):
    def forward(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return (super().forward(x[0]), *x[1:])
        return super().forward(x)


class _BranchOff(_Mixin):
    def forward(self, x: Any) -> Any:
        return (x, super().forward(x)) if self.training else x


_MIXED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _mix_in(module: _ModuleT, mixin: type[nn.Module]) -> _ModuleT:
    if not isinstance(module, mixin):
        cast(Any, module).__class__ = _mixed_class(mixin, type(module))
    return module


def _mixed_class(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    mixed = _MIXED.get((mixin, base))
    if mixed is None:
        name = base.__name__ + mixin.__name__.strip("_")
        attributes = {"__doc__": base.__doc__, "__module__": base.__module__}
        mixed = _MIXED.setdefault((mixin, base), type(name, (mixin, base), attributes))
    return mixed


def _rebuild(mixin: type[nn.Module], base: type[nn.Module]) -> nn.Module:
    cls = _mixed_class(mixin, base)
    return cls.__new__(cls)


def _first_layer(module: nn.Module) -> nn.Module:
    while isinstance(module, nn.Sequential) and len(module) > 0:
        module = module[0]
    return module
