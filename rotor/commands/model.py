"""Options that commands on models share: the model's name, its input, its engine."""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rotor.commands import add_options, tell
from rotor.commands.checks import check_model, parse_argument
from rotor.units import parse_bytes

if TYPE_CHECKING:
    from rotor.wrapper.checkpointable import Checkpointable


LIMIT = 'such as 700MiB, "8 GB", 1e9 or, of what is free on the device, 50%%'
"""Forms of ``--limit``, for its help."""

UNKNOWN = (
    "a loss as large in memory as a cross-entropy of the outputs: yours is unknown\n"
    "(--loss cross_entropy, mse, or FILE.py:FUNCTION)"
)
"""Noun phrase for `rotor.commands.factories.likely_loss`."""


def add_model(sub: argparse.ArgumentParser) -> None:
    """Add the options that name a model, its input, and the engine."""
    sub.add_argument(
        "factory",
        metavar="FACTORY",
        help="function that makes the model: package.module:callable, path/file.py:callable, or a "
        "name of rotor.models, such as resnet18; the callable returns a module, or a module and a "
        "sample of its input, or is a module itself",
    )
    group = sub.add_argument_group("model")
    for name, metavar, text in _REPEATED:
        kind = int if name == "--high" else str
        group.add_argument(name, action="append", default=[], type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--device", default=None, help="device of the model (default: the accelerator, else cpu)"
    )
    group.add_argument(
        "--engine",
        default="auto",
        choices=("auto", "chain", "graph", "dynamic"),
        help="engine (default: auto: chain for an nn.Sequential, else graph)",
    )
    loss = (
        "loss that is planned with the model: cross_entropy, mse, sum, or FILE.py:FUNCTION, a "
        "function of the output (default: unknown, 4 x the output is set aside for it)"
    )
    add_options(group, {"--loss LOSS": loss})
    group.add_argument(
        "--effort",
        choices=("fast", "default"),
        help="effort of planning a graph (default: fast for many plans, else default)",
    )
    add_options(group, {"--seed N": "seed of parameters and inputs (default: 0)"}, seed=0)
    sub.set_defaults(announce=True, check=check_model)


_REPEATED = (
    (
        "--input",
        "SHAPE",
        "shape of an input, such as 32,3,224,224, or NAME=8,128 for a keyword argument; once for "
        "each",
    ),
    ("--dtype", "TYPE", "type of the inputs: one for all, or one for each (default: float32)"),
    ("--high", "N", "draw inputs of whole numbers from 0 to N - 1"),
    ("--arg", "NAME=VALUE", "keyword argument for the callable, such as layers=4; once for each"),
)
"""Options that may be given several times."""

PROFILE = {
    "--profile FILE": "plan for the machine on which `rotor measure --save FILE` recorded it, or "
    "whose speeds are in the file (rotor.graph.Machine); measure nothing here"
}
"""Option that plans for another machine."""

MESH = {
    "--mesh SIZES": "plan one process of a mesh that need not be here, such as dp=8,tp=4: "
    "FACTORY(mesh=...) gives a model that is spread over it, without values; with --profile"
}
"""Option that plans for many devices."""


def mesh_sizes(arguments: argparse.Namespace) -> dict[str, int] | None:
    """Return the sizes of the mesh of a command line, by dimension; ``None`` without one."""
    text: str | None = getattr(arguments, "mesh", None)
    if text is None:
        return None
    if getattr(arguments, "profile", None) is None:
        raise ValueError(f"--mesh {text}: nothing can be measured on it: give --profile too")
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in pairs if size.strip().isdecimal()}
    if len(sizes) != len(pairs) or not all(sizes) or min(sizes.values()) < 1:
        raise ValueError(f"--mesh {text}: expected names and sizes, such as dp=8,tp=4")
    return sizes


OFFLOAD = {
    "--offload TIER": "plan with a second tier of memory: disk, disk:FOLDER or, for accelerators, "
    "host",
    "--offload-limit BYTES": "most bytes of a step there, such as 16GiB",
    "--host-limit BYTES": "with --offload host: most bytes of the memory there; what exceeds it is "
    "on a disk",
    "--offload-state OPTIMIZER": "have parameters, gradients and the states of an optimizer there "
    "too, and count in the limit what of them is in memory: sgd (with momentum), adam, adamw, "
    "adafactor, or FILE.py:FUNCTION of the parameters",
}
"""Options of a second tier."""

TOTAL = (
    "most bytes of the whole process on the device, such as 8GiB, or card: all that it has; the "
    "limit of a step follows"
)
"""Help of ``--total``, a limit for the whole process."""


def offload_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `rotor.Checkpointable` for a second tier; none without one."""
    offload = getattr(arguments, "offload", None)
    limits = {name: getattr(arguments, name, None) for name in ("offload_limit", "host_limit")}
    for name in (*limits, "offload_state"):
        if offload is None and getattr(arguments, name, None):
            shown = f"--{name.replace('_', '-')}"
            raise ValueError(f"{shown} is for --offload: give --offload disk, or leave it out")
    return {} if offload is None else {"offload": offload, **limits}


_SMALL_BYTES = 1 << 20


def within_total(arguments: argparse.Namespace, subject: Subject, limit: int | None) -> int | None:
    """Return the limit of a step that follows from ``--total``, or the given one if it is less.

    The room that the former is taken from is then that of the command line. Raises ValueError for
    another machine, where parts of the total are not known.
    """
    total = total_of(arguments)
    if total is None:
        return limit
    if subject.profile is not None:
        raise ValueError("--total is of this machine, and --profile of another: give --limit")
    from rotor.meter.room import Room

    room = Room(subject.model, total)
    found = room.take(subject.device)
    tell(arguments, str(room.latest))
    if limit is not None and limit <= found:
        return limit
    arguments.room = room
    return found


def total_of(arguments: argparse.Namespace) -> int | str | None:
    """Return the total of a command line, in bytes or "card"; ``None`` without one."""
    text: str | None = arguments.total
    if text is not None and "%" in text:
        raise ValueError(f"--total {text}: expected bytes or card, as --limit alone takes a %")
    return text if text in (None, "card") else parse_bytes(text, name="--total")


def limit_of(arguments: argparse.Namespace) -> int | None:
    """Return the limit of a command line in bytes, and question one below 1 MiB.

    A percentage is one of what is free on the device, or on the machine that is planned for.
    """
    total_of(arguments)  # Raises its errors before those of the limit.
    text: str | None = arguments.limit
    if text is None:
        return None
    share = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*%\s*", text)
    found = _free_share(arguments, share[1]) if share else parse_bytes(text, name="--limit")
    if found < _SMALL_BYTES:
        number = text.strip().rstrip("BbIiKkMm ")
        tell(
            arguments,
            f"--limit {text} is {found} bytes, less than 1 MiB: was {number}MiB or {number}GiB "
            "meant?",
        )
    return found


def _free_share(arguments: argparse.Namespace, percent: str) -> int:
    from rotor.commands import factories
    from rotor.meter.allocator import free_bytes

    path = getattr(arguments, "profile", None)
    if path is not None:
        free = factories.profile_of(path).free_bytes
    else:
        free = free_bytes(factories.device_of(getattr(arguments, "device", None)))
    if free is None:
        raise ValueError("the profile does not say what is free on that machine: give bytes")
    if not 0 < float(percent) <= 100:
        raise ValueError(
            f"--limit {percent}%: expected more than 0% and at most 100% of {free} bytes"
        )
    return max(int(free * float(percent) / 100), 1)


class Subject:
    """The model of a command line and its sample, on its device.

    `sample` is as the constructor of `rotor.Checkpointable` takes it, and `inputs` are its shapes,
    for people; empty if the callable gave the sample. `engine` is "graph" if a profile is given.
    `profile` is the `rotor.graph.Profile` of the machine that is planned for,
    ``None`` for this one. `loss` is a function of the output, ``None`` if it is unknown; `output`
    is the output of the model, after `check`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from rotor._pytorch import core, fsdp
        from rotor.commands import factories
        from rotor.engines.chain.stages import is_plain_sequential
        from rotor.tier.offload import trial_tier

        path = getattr(arguments, "profile", None)
        self.profile = None if path is None else factories.profile_of(path)
        self.offload = offload_of(arguments)
        self.mode: Any = nullcontext()
        """Context in which the model is made and captured."""
        self.engine: str = arguments.engine if path is None else "graph"
        given = factories.inputs(arguments.input, arguments.dtype, arguments.high)
        self.name: str = arguments.factory
        self.device = factories.device_of(arguments.device)
        torch.manual_seed(arguments.seed)
        others = dict(parse_argument(text) for text in arguments.arg)
        sizes = mesh_sizes(arguments)
        if sizes is not None:
            others["mesh"] = fsdp.pretended_mesh(sizes)
            self.mode = core.fake_mode()
        with self.mode:
            made = factories.make(self.name, others)
            sample = made.sample
            if given:
                sample = factories.draw(given, self.device, arguments.seed)
        if sample is None:
            raise ValueError(
                f"{self.name} gave a model without a sample: give --input, such as "
                "--input 32,3,224,224"
            )
        self.inputs = [str(one) for one in given]
        self.model = made.model if sizes else made.model.to(self.device)
        self.sample = factories.to_device(sample, self.device)
        optimizer = getattr(arguments, "offload_state", None)
        if optimizer is not None:
            if self.profile is not None:
                raise ValueError(
                    "--offload-state moves parameters of this machine, and --profile is of another"
                )
            self.offload["offload_state"] = factories.optimizer_of(optimizer, self.model)
            tier, limit = self.offload["offload"], self.offload.pop("host_limit")
            self.offload["offload"] = trial_tier(tier, self.engine, limit)
        # Chains of stages take one argument, of any type.
        self.is_one = self.engine != "graph" and is_plain_sequential(self.model)
        self.output: Any = None
        self.loss_name: str | None = arguments.loss
        self.loss = None if arguments.loss is None else factories.loss_of(arguments.loss)

    def check(self) -> None:
        """Raise ValueError if the model does not run on its sample, or the loss on its output.

        Models for other machines do not run here.
        """
        from rotor.commands import factories

        if self.profile is not None:
            return
        self.output = factories.check_forward(self.model, self.sample, one=self.is_one)
        if self.loss is not None:
            factories.check_loss(str(self.loss_name), self.loss, self.output)

    def knows_loss(self) -> bool:
        """Return whether the loss is given, or an output of the model."""
        from rotor.commands.factories import has_own_loss

        return self.loss is not None or has_own_loss(self.output)

    def described(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        found = {
            "model": self.name,
            "inputs": self.inputs,
            "device": str(self.device),
            "loss": self.loss_name,
        }
        return found if self.profile is None else found | {"profile": str(self.profile)}

    def heading(self) -> str:
        """Return a line on the machine that is planned for, if it is another one."""
        return "" if self.profile is None else f"for {self.profile}\n"


def wrapped(
    subject: Subject, arguments: argparse.Namespace, limit: int | None = None, effort: str = ""
) -> Checkpointable:
    """Return the model in a `rotor.Checkpointable`, measured on its sample and not planned yet."""
    from rotor.common.calls import sample_call
    from rotor.wrapper.checkpointable import Checkpointable

    options = dict(subject.offload)
    if subject.engine not in ("chain", "dynamic") and (arguments.effort or effort):
        options["effort"] = arguments.effort or effort
    if subject.profile is not None:
        options["profile"] = subject.profile
    with subject.mode:
        model = Checkpointable(
            subject.model,
            mem_limit=limit,
            engine=subject.engine,
            loss_fn=subject.loss,
            verbosity=-1,
            **options,
        )
        if subject.loss is None:
            model.measure_sample(subject.sample)
        else:
            args, kwargs = sample_call(subject.sample, is_one=subject.is_one)
            model.measure(*args, targets=(), **kwargs)
    return model
