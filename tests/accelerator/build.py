"""Building of the shared library, once for each state of its sources and version of PyTorch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["NotBuilt", "library"]

_HERE = Path(__file__).resolve().parent
_BUILT = _HERE.parent.parent / "build" / "accelerator"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wno-interference-size"]


class NotBuilt(RuntimeError):
    """A machine without a C++ compiler or PyTorch's headers, or with an accelerator of its own."""


def _needs() -> tuple[str, Path]:
    """Return the compiler and PyTorch's folder."""
    if sys.platform != "linux":
        raise NotBuilt(f"the simulated accelerator of the tests is for Linux, not {sys.platform}")
    if torch.cuda.is_available() or torch.xpu.is_available():
        raise NotBuilt("the simulated accelerator is for machines without another one")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotBuilt(
            "the simulated accelerator of the tests is built by g++, which is missing here: "
            "install g++, or name a compiler in CXX"
        )
    folder = Path(torch.__file__).parent
    if not (folder / "include" / "c10" / "core" / "CachingDeviceAllocator.h").exists():
        raise NotBuilt(f"PyTorch's C++ headers are missing: no {folder}/include/c10")
    return compiler, folder


def library() -> Path:
    """Return the path of the shared library, built if it is not there."""
    compiler, folder = _needs()
    sources = sorted(_HERE.glob("*.cpp"))
    state = hashlib.sha256(f"{torch.__version__} {compiler} {_FLAGS}".encode())
    for path in [*sources, *sorted(_HERE.glob("*.h"))]:
        state.update(path.name.encode() + path.read_bytes())
    wanted = _BUILT / state.hexdigest()[:16] / "sim.so"
    if wanted.exists():
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wanted.parent) as place:

        def compiled(source: Path) -> str:
            made = f"{place}/{source.stem}.o"
            _run(compiler, *_FLAGS, "-isystem", f"{folder}/include", "-c", str(source), "-o", made)
            return made

        # The one that takes longest comes first.
        sources.sort(key=lambda path: path.stem != "autocast")
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, sources))
        made, libraries = f"{place}/sim.so", f"{folder}/lib"
        found = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
        _run(compiler, "-shared", "-o", made, *objects, *found)
        os.replace(made, wanted)  # Complete or absent, whoever builds at the same time.
    return wanted


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
