"""Stand-in for the extension in a folder where it was not built, such as a clone.

The extension, which is beside this file where rotor is built or installed, comes before it. Here it
has the package that is installed elsewhere for Python take the place of the folder.
"""

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_here = Path(__file__).parent
_installed = [
    folder
    for folder in (Path(entry or ".").resolve() / "rotor" for entry in sys.path)
    if any((folder / f"_core{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
]
if not _installed:
    raise ImportError(
        f"{_here} is the source of rotor, which is not built for this Python: run `pip install -e "
        f".` in {_here.parent}, or `pip install .` there"
    )
sys.modules["rotor"].__path__[:] = [str(_installed[0])]
del sys.modules[__name__]
importlib.import_module(__name__)
