"""A memory limit for the ``Trainer`` of Hugging Face Transformers, as a callback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from rotor.common.frames import warn_caller
from rotor.errors import MemoryLimitWarning
from rotor.integrations.planned import Limited

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "rotor.integrations.transformers needs Transformers and Accelerate: "
        "`pip install transformers accelerate`, or in a clone of rotor "
        '`pip install ".[transformers]"`'
    ) from error

__all__ = ["RotorCallback"]


class RotorCallback(Limited, TrainerCallback):
    """Callback that trains the model of a ``Trainer`` in a given number of bytes.

    ``Trainer(..., callbacks=[RotorCallback(mem_limit="8GiB")])`` is enough. The model stays the
    same: it is saved, loaded, evaluated and used for generation as before. If batches have labels,
    the model's own loss is part of the plan, and the limit holds from the first step.

    Parameters
    ----------
    mem_limit
        The most bytes that one forward and backward may have allocated on the model's device above
        the level at which the forward began: bytes, or text such as "8GiB". ``None``: 90 % of the
        memory that is free when the first step begins.
    all_gradients
        True: your own loss is computed from outputs of the model other than ``loss``, though
        batches have labels. Then every output has a gradient; memory for it, and for an unknown
        loss, is set aside.
    **options
        Options of `rotor.Checkpointable`, such as ``engine`` or ``effort``. ``offload_state=True``
        takes the optimizer of the ``Trainer`` when training begins.

    Attributes
    ----------
    model
        The `rotor.Checkpointable` that plans; ``None`` before the ``Trainer`` is made, or before
        its optimizer is taken.

    Raises
    ------
    TypeError, ValueError
        Errors of `rotor.Checkpointable`; when the ``Trainer`` is made, also if one of its arguments
        does not go with a limit: ``torch_compile``, the first FSDP, DeepSpeed, several GPUs in
        one process, a model cut over the devices of a process.
    """

    def __init__(
        self, mem_limit: int | str | None = None, *, all_gradients: bool = False, **options: Any
    ) -> None:
        super().__init__(mem_limit, options)
        self._all_gradients = all_gradients

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Check the arguments and wrap the model when the ``Trainer`` has been made."""
        if model is not None:
            self._install(args, model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **given: Any
    ) -> None:
        """Install the plan before the first step."""
        if model is not None:
            self._install(args, model)
            self._take(given.get("optimizer"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the plain model after the last step."""
        if self._planned is None:
            return
        self._planned.remove()
        if not self._planned.ran and state.global_step:
            warn_caller(
                "the Trainer never called the forward of its model, so nothing was limited",
                MemoryLimitWarning,
            )

    def _install(self, args: Any, model: nn.Module) -> None:
        _check(args, model)
        planned = self._plan(model, None if self._all_gradients else _has_labels)
        try:
            planned.install()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}. Give RotorCallback to Trainer(callbacks=[...]) rather than to "
                "add_callback, and a model that has no other hooks in the place of its forward"
            ) from None


def _has_labels(arguments: Mapping[str, Any]) -> bool:
    """Return whether a model that is called with these arguments computes its loss."""
    return any(
        value is not None and ("label" in name or name in ("start_positions", "end_positions"))
        for name, value in arguments.items()
    )


def _check(args: Any, model: nn.Module) -> None:
    refused = {
        "torch_compile=True compiles the model as a whole: leave it out, and give RotorCallback "
        'backend="inductor" for compiled kernels': args.torch_compile or _compiles(),
        "the first FSDP, in the arguments or in Accelerate's configuration, has flat parameters, "
        "which cannot be planned: set fsdp_version to 2 there": _shards_flat(),
        "deepspeed, in the arguments or in Accelerate's configuration, has an engine of its own, "
        "which is not planned: leave it out": args.deepspeed or _plugin("deepspeed_plugins"),
        "the model is cut over devices of this process (device_map), and a plan is for a model on "
        "one: load it so, or with tp_plan, and start a process for each device with torchrun": len(
            {parameter.device for parameter in model.parameters()}
        )
        > 1,
        f"the Trainer would use {args.n_gpu} GPUs in one process (DataParallel): start a process "
        "for each with torchrun, or set CUDA_VISIBLE_DEVICES to one": args.n_gpu > 1,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ValueError(f"a limit does not go with these arguments: {reason}")


def _plugin(name: str) -> Any:
    """Return a plugin of Accelerate, which its launcher sets without the arguments; or None."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.AcceleratorState._shared_state.get(name)


def _compiles() -> bool:
    # A plugin for dynamo always exists; it may do nothing.
    found = _plugin("dynamo_plugin")
    return found is not None and str(found.backend).rpartition(".")[2] != "NO"


def _shards_flat() -> bool:
    found = _plugin("fsdp_plugin")
    return found is not None and getattr(found, "fsdp_version", 1) != 2
