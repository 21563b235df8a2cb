"""One record in the place of several, such as what all ranks have measured. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def joined(every: Sequence[T], *, mean: Collection[str] = (), least: Collection[str] = ()) -> T:
    """Return the record with the largest value of each field among all.

    The fields in `mean` get the mean as a whole number, those in `least` the smallest value. Lists,
    tuples and records within are joined by element; a flag is true if it is in one record, or, in
    `least`, in all.
    """
    first: Any = every[0]

    def of(name: str, column: Sequence[Any]) -> Any:
        if all(value == column[0] for value in column):
            return column[0]
        kind = type(column[0])
        if kind in (list, tuple):
            return kind(of(name, values) for values in zip(*column, strict=True))
        if is_dataclass(kind):
            return joined(column, mean=mean, least=least)
        if name in mean:
            return sum(column) // len(column)
        return min(column) if name in least else max(column)

    names = [field.name for field in fields(first)]
    values = {name: of(name, [getattr(one, name) for one in every]) for name in names}
    return replace(first, **values)  # type: ignore[no-any-return]
