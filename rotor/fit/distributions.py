"""Lengths of a data set: from a file, or drawn from a distribution. Needs no PyTorch."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_DRAWN = 1000
_DISTRIBUTIONS = {"uniform": 2, "normal": 4, "lognormal": 4}


def lengths_of(text: str, seed: int = 0) -> Counter[int]:
    """Return how often each length comes, in a file of whole numbers or in a distribution.

    Of a distribution a thousand lengths are drawn: ``uniform:LEAST,MOST``,
    ``normal:MEAN,SPREAD,LEAST,MOST`` or ``lognormal:MEDIAN,SIGMA,LEAST,MOST``. Raises ValueError if
    the text is neither, or holds no length.
    """
    name, _, rest = text.partition(":")
    if name in _DISTRIBUTIONS:
        return _drawn(name, rest, seed)
    if not Path(text).is_file():
        raise ValueError(
            f"lengths {text!r}: neither a file nor a distribution; expected a file of whole "
            "numbers, uniform:LEAST,MOST, normal:MEAN,SPREAD,LEAST,MOST or "
            "lognormal:MEDIAN,SIGMA,LEAST,MOST"
        )
    words = Path(text).read_text(encoding="utf-8").replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal() or not int(word)), None)
    if wrong is not None or not words:
        found = "no number" if wrong is None else repr(wrong)
        raise ValueError(f"lengths {text!r}: found {found}, expected whole numbers of 1 or more")
    return Counter(map(int, words))


def _drawn(name: str, rest: str, seed: int) -> Counter[int]:
    try:
        numbers = [float(word) for word in rest.split(",")]
    except ValueError:
        numbers = []
    *shape, least, most = numbers if len(numbers) == _DISTRIBUTIONS[name] else (0.0, 0.0, -1.0)
    if not 1 <= least <= most or (name == "lognormal" and shape[0] <= 0):
        raise ValueError(
            f"lengths '{name}:{rest}': expected {_DISTRIBUTIONS[name]} numbers, the last two the "
            "least and the most, of 1 or more, such as lognormal:90,0.5,16,256"
        )
    rng = random.Random(seed)
    draws: dict[str, Callable[[], float]] = {
        "uniform": lambda: rng.uniform(least - 0.5, most + 0.5),
        "normal": lambda: rng.gauss(*shape),
        "lognormal": lambda: rng.lognormvariate(math.log(shape[0]), shape[1]),
    }
    return Counter(
        min(max(round(draws[name]()), math.ceil(least)), math.floor(most)) for _ in range(_DRAWN)
    )
