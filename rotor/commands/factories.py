"""Models, samples and losses of a command line: callables in modules and files, shapes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, devices
from rotor.chain import read_json
from rotor.commands.checks import check_types, parse_input, source_of
from rotor.common.calls import sample_call
from rotor.common.tensor_trees import map_tensors, output_tensors, tree_tensors
from rotor.common.undisturbed import training_flags_kept
from rotor.engines.graph.costs import estimate
from rotor.engines.graph.costs.estimate import Machine
from rotor.engines.graph.costs.recorded import Profile
from rotor.fit import batches

__all__ = ["Input", "Made", "draw", "inputs", "load", "make"]


@dataclass(frozen=True)
class Input:
    """Description of a tensor to be drawn.

    Attributes
    ----------
    shape
        Its shape.
    dtype
        Its type; floating ones are drawn from a normal distribution.
    high
        Whole numbers are drawn from 0 up to this bound, itself excluded.
    name
        The argument of the model that it goes to; ``None``: by position.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    high: int | None = None
    name: str | None = None

    def draw(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor of random numbers; MemoryError if there is no room for it."""
        high = 2 if self.dtype == torch.bool else self.high
        try:
            if self.dtype.is_floating_point or self.dtype.is_complex:
                drawn = torch.randn(self.shape, generator=generator)
            else:
                assert high is not None
                drawn = torch.randint(high, self.shape, generator=generator)
            return drawn.to(device=device, dtype=self.dtype)
        except RuntimeError as error:
            if not batches.is_out_of_memory(error):
                raise
            raise MemoryError(f"no memory for an input of {self}: give a smaller one") from None

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{f'{self.name}=' if self.name else ''}{shape} {str(self.dtype)[6:]}"


@dataclass(frozen=True)
class Made:
    """A model, and the sample that came with it.

    Attributes
    ----------
    model
        The model.
    sample
        Sample as the constructor of `rotor.Checkpointable` takes it; ``None`` if none came.
    """

    model: nn.Module
    sample: Any = None


def load(name: str) -> Callable[..., Any]:
    """Return the callable of a name.

    Parameters
    ----------
    name
        ``package.module:callable``, ``path/file.py:callable``, or a name of `rotor.models`.

    Returns
    -------
    callable
        The callable, not called yet.

    Raises
    ------
    ValueError
        The file, module or callable does not exist; or importing it fails.
    """
    where, wanted = source_of(name)
    module = _file(Path(where)) if where.endswith(".py") or "/" in where else _module(where)
    found: Any = module
    for part in wanted.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = sorted(
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and (getattr(value, "__module__", None) or "").startswith(module.__name__)
        )
        listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise ValueError(f"{where} has no callable {wanted!r}; it has {listed or 'none'}")
    called: Callable[..., Any] = found
    return called


def _module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(
                f"no module {name!r}: expected package.module:callable, "
                "path/file.py:callable, or a name of rotor.models"
            ) from error
        raise ValueError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _file(path: Path) -> Any:
    name = f"rotor_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # A capture looks globals up by the module's name.
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"running {path} failed: {type(error).__name__}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"running {path} failed: {type(error).__name__}: {error}. A factory is imported with "
            "all code at the top level of its file: guard it with if __name__ == '__main__', or "
            f"use rotor run {path}"
        ) from error
    return module


def make(name: str, arguments: Mapping[str, Any] | None = None) -> Made:
    """Call a factory.

    Parameters
    ----------
    name
        Name of a module, or of a callable, as for `load`, that returns a module, or a module and a
        sample.
    arguments
        Keyword arguments for it.

    Returns
    -------
    Made
        The module, and the sample if the factory returned one.

    Raises
    ------
    ValueError
        It cannot be found, fails, or returns something else.
    """
    function = load(name)
    if isinstance(function, nn.Module) and arguments:
        raise ValueError(f"{name} is a module, not a function that makes one: leave --arg out")
    try:
        made = function if isinstance(function, nn.Module) else function(**(arguments or {}))
    except (Exception, SystemExit) as error:
        raise ValueError(f"calling {name} failed: {type(error).__name__}: {error}") from error
    sample = None
    if isinstance(made, tuple) and len(made) == 2:
        made, sample = made
    if isinstance(made, nn.Module):
        return Made(made, sample)
    kind = "a class" if inspect.isclass(made) else f"{type(made).__name__}"
    raise ValueError(f"{name} gave {kind}, expected an nn.Module, or (an nn.Module, a sample)")


def parse_dtype(text: str) -> torch.dtype:
    """Return a type of PyTorch's by its name, such as ``int64``; ValueError if none has it."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {text!r}, expected one such as float32 or int64")
    return found


def inputs(
    shapes: Sequence[str], dtypes: Sequence[str] = (), highs: Sequence[int] = ()
) -> list[Input]:
    """Return inputs from the options of a command line.

    Parameters
    ----------
    shapes
        Text such as ``32,3,224,224`` or ``ids=8x128``.
    dtypes
        One for all, or one for each; float32 by default.
    highs
        One for all, or one for each input of whole numbers.

    Returns
    -------
    list of Input
        One for each shape, in their order.

    Raises
    ------
    ValueError
        An option cannot be read, their numbers do not match, or whole numbers have no bound.
    """
    parsed = [parse_input(shape) for shape in shapes]
    whole = check_types(len(parsed), dtypes, highs)
    kinds = [parse_dtype(dtype) for dtype in dtypes] or [torch.float32]
    if len(kinds) == 1:
        kinds *= len(parsed)
    high_of = dict(zip(whole, list(highs) * (len(whole) if len(highs) == 1 else 1), strict=True))
    return [
        Input(shape, kind, high_of.get(k), name)
        for k, ((name, shape), kind) in enumerate(zip(parsed, kinds, strict=True))
    ]


def draw(given: Sequence[Input], device: torch.device, seed: int = 0) -> Any:
    """Return a sample as the constructor of `rotor.Checkpointable` takes it.

    Parameters
    ----------
    given
        Inputs as `inputs` read them.
    device
        Their device.
    seed
        Seed of their values.

    Returns
    -------
    object
        A tensor, a tuple of tensors, or a dictionary of them.

    Raises
    ------
    ValueError
        Named and unnamed inputs are mixed.
    """
    generator = torch.Generator().manual_seed(seed)
    named = [one for one in given if one.name is not None]
    if named and len(named) != len(given):
        raise ValueError("some --input have names and some have none: name all of them, or none")
    tensors = [one.draw(device, generator) for one in given]
    if named:
        return {str(one.name): tensor for one, tensor in zip(given, tensors, strict=True)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a sample with its tensors on a device."""
    leaves, spec = core.tree_flatten(value)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return core.tree_unflatten(moved, spec)


def check_forward(model: nn.Module, sample: Any, *, one: bool) -> Any:
    """Run a model forward once, without gradients, in evaluation mode; return the output.

    With `one` the sample is one argument. Raises ValueError if it does not suit the model.
    """
    args, kwargs = sample_call(sample, is_one=one)
    try:
        with training_flags_kept(model), torch.no_grad():
            model.eval()
            return model(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the model does not run on this input: {type(error).__name__}: {error}"
            f"{_hint(model, (args, kwargs), str(error))}"
        ) from error


def check_loss(name: str, loss: Callable[[Any], Any], output: Any) -> None:
    """Raise ValueError if a loss by its name in ``--loss`` is none of this output of a model."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())

    expected = "expected a function of the model's output alone that returns a scalar"
    try:
        found = loss(map_tensors(output, leaf))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"--loss {name} does not run on the model's output: {type(error).__name__}: {error}; "
            f"{expected}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        is_tensor = isinstance(found, torch.Tensor)
        kind = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
        raise ValueError(f"--loss {name} gives {kind} for the model's output; {expected}")


def _hint(model: nn.Module, given: Any, message: str) -> str:
    """Return what to do about real numbers in the place of ids; empty if that is no cause."""
    if "Long" not in message or not any(t.is_floating_point() for t in tree_tensors(given)):
        return ""
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    return f". For ids give --dtype int64 --high {sizes[0] if sizes else 'N'}"


def device_of(name: str | None) -> torch.device:
    """Return the device of a name; by default the accelerator, if one is available.

    Raises ValueError if this machine has no such device, or rotor does not support its type.
    """
    try:
        return devices.chosen(name)
    except ValueError as error:
        raise ValueError(f"--device {error}") from None


def profile_of(path: str) -> Profile | Machine:
    """Return the profile, or the speeds of a machine, in a file; ValueError if it holds neither."""
    try:
        found = read_json(Path(path))
        is_machine = isinstance(found, dict) and found.get("format") == estimate.FORMAT
        return Machine.from_dict(found) if is_machine else Profile.from_dict(found)
    except ValueError as error:
        raise ValueError(f"--profile {path}: {error}") from None


def loss_of(name: str) -> Callable[[Any], torch.Tensor]:
    """Return the loss of a name: a function of the model's output alone.

    The names are "cross_entropy", "mse" and "sum", with targets of zeros, and those of callables,
    as for `load`, which raises ValueError if there is no such callable.
    """
    known = {"cross_entropy": _cross_entropy, "mse": _mse, "sum": batches.sum_of}
    return known.get(name) or load(name)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a name, for the parameters of a model; ValueError: it makes none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        made: Any = (_OPTIMIZERS.get(name) or load(name))(trained)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"calling {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"{name} gave {type(made).__name__}, expected an optimizer of torch.optim")
    return made


def has_own_loss(output: Any) -> bool:
    """Return whether an output holds the loss."""
    return isinstance(output, Mapping) and output.get("loss") is not None


def likely_loss(output: Any) -> torch.Tensor:
    """Return the loss of an output that has one, else one as large in memory as most are.

    Every output that needs a gradient is normalised as a cross-entropy does, in float32.
    """
    if has_own_loss(output):
        return batches.sum_of(output)
    found = [t for t in output_tensors(output) if t.requires_grad and t.dim()]
    return batches.sum_of([nn.functional.log_softmax(t, -1, dtype=torch.float32) for t in found])


def _scores(output: Any) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, dict) else None
    found = [logits] if isinstance(logits, torch.Tensor) else output_tensors(output)
    if not found or found[0].dim() < 2:
        raise ValueError(
            "--loss cross_entropy: the output has no dimension of classes; give FILE.py:FUNCTION"
        )
    return found[0]


def _cross_entropy(output: Any) -> torch.Tensor:
    """Return the cross-entropy; classes are the last dimension, or the second of four and more."""
    scores = _scores(output)
    if scores.dim() == 3:
        scores = scores.flatten(0, 1)
    shape = (scores.shape[0], *scores.shape[2:])
    labels = torch.zeros(shape, dtype=torch.int64, device=scores.device)
    return nn.functional.cross_entropy(scores, labels)


def _mse(output: Any) -> torch.Tensor:
    found = output_tensors(output)[0]
    return nn.functional.mse_loss(found, torch.zeros_like(found))
