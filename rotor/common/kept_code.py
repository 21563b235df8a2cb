"""Compiled Python sources that are kept on disk beside the tables of `rotor.common.cache`.

Compiling the code of a large graph takes up to a tenth of its step. A file holds one code object as
Python's ``marshal`` writes it, for one source and one interpreter.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
from types import CodeType

from rotor.common import cache

__all__ = ["compiled"]

_KIND = "code"
_LEAST_CHARACTERS = 10_000
"""Length of a source below which compiling takes less time than reading the file."""

_DIGITS = 24


def compiled(source: str) -> CodeType:
    """Return the code of a module's source; its filename is ``<rotor program ...>``."""
    text = f"{sys.implementation.cache_tag} {sys.hexversion} {sys.flags.optimize}\n{source}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    filename = f"<rotor program {digest[:_DIGITS]}>"
    if len(source) < _LEAST_CHARACTERS:
        return compile(source, filename, "exec")
    kept = cache.load_bytes(_KIND, digest)
    if kept is not None:
        # The content is undamaged and has this digest, so this version of Python has written it.
        code: CodeType = marshal.loads(kept)
        return code
    code = compile(source, filename, "exec")
    cache.store_bytes(_KIND, digest, marshal.dumps(code))
    return code
