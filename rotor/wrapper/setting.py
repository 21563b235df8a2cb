"""Options of a wrapped model as attributes: checked where they may change, refused elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from rotor.graph.planner import OPTIONS as GRAPH_OPTIONS
from rotor.units import parse_bytes

__all__ = ["Setting", "check_names", "checked_limit", "checked_loss_bytes", "plan_anew"]


class Setting:
    """Option of a wrapped model, kept in the settings of its driver.

    Parameters
    ----------
    check
        Function that returns a checked value, or raises; ``None``: the option cannot be changed.
    changed
        Function of the driver, called after a change.
    """

    def __init__(
        self,
        check: Callable[[Any], Any] | None = None,
        changed: Callable[[Any], object] | None = None,
    ) -> None:
        self._check = check
        self._changed = changed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(model._driver.settings, self._name)

    def __set__(self, model: Any, value: Any) -> None:
        if self._check is None:
            raise AttributeError(
                f"{self._name} of a model with a limit cannot be changed: wrap the model anew, by "
                f"rotor.{model._shown_name}(model.module, {self._name}=...)"
            )
        setattr(model._driver.settings, self._name, self._check(value))
        if self._changed is not None:
            self._changed(model._driver)


def checked_limit(limit: int | str | None) -> int | None:
    """Return a limit in bytes; ``None`` for the default one."""
    return None if limit is None else parse_bytes(limit)


def checked_loss_bytes(size: int | str) -> int:
    """Return the bytes that the loss needs; 0 where they are not known."""
    return parse_bytes(size, name="loss_tmp_memory_usage") if size else 0


def plan_anew(driver: Any) -> None:
    """Drop all plans of a driver: the following steps are planned by its settings as they are."""
    driver.context.plans = {}
    driver.order.ask_again()
    for engine in driver.engines:
        engine.begin_planning()


def check_names(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an option that looks like a misspelt one of the known."""
    for name in options:
        near = difflib.get_close_matches(name, [*known, *GRAPH_OPTIONS], 1)
        if near and near[0] != name:
            raise TypeError(f"unknown option {name!r}: did you mean {near[0]}?")
