"""Lines of a model's code that captured operations come from."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["source_line"]

_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+), in [^\n]*\n(?: *([^\n]*))?', re.MULTILINE)
_LIBRARY = str(Path(torch.__file__).parent)
_ENGINES = str(Path(__file__).parents[1])
_LONGEST = 100


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """Return file, line and code of the innermost frame outside PyTorch; empty if unknown.

    The stack trace has frames as Python prints them, the innermost last.
    """
    for path, line, code in reversed(_FRAME.findall(stack_trace)):
        if path.startswith((_LIBRARY, _ENGINES)):
            continue
        place = f"{'/'.join(Path(path).parts[-2:])}:{line}"
        text = code.strip()
        if not text or text.startswith("File "):
            return place
        return f"{place}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    return ""
