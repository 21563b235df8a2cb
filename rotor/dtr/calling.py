"""The path of the module that runs, for messages about what it computed."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rotor import _core


class ModulePaths:
    """A context that tells a handler the path of the module that runs in this thread.

    The handler notes the path with each operation. The outermost module, `root`, has an empty path;
    ``None`` stands for any module that is called in no other. Modules that the outermost one does
    not hold have the path of the one that calls them.
    """

    def __init__(self, handler: _core.Handler, root: nn.Module | None = None) -> None:
        self._handler = handler
        self._root = root
        self._hooks: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._thread = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        self._filters = warnings.catch_warnings()
        self._filters.__enter__()
        try:
            # A module that was compiled calls these hooks twice, each time from begin to end.
            warnings.filterwarnings(
                "ignore", message=r"Using `torch\.compile\(module\)` when there are"
            )
            self._thread = threading.get_ident()
            if self._root is not None:
                self._enter("", self._root)
            self._hooks.append(register_module_forward_pre_hook(self._begins))
            self._hooks.append(register_module_forward_hook(self._ends, always_call=True))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._filters.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._names = {}
        self._running = []
        self._handler.module = None

    def _begins(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._enter(self._names.get(module, self._running[-1]) if self._running else "", module)

    def _enter(self, path: str, module: nn.Module) -> None:
        if not self._running:
            self._names = {part: name for name, part in module.named_modules()}
        self._running.append(path)
        self._handler.module = path

    def _ends(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()
            self._handler.module = self._running[-1] if self._running else None
