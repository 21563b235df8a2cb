"""Builds the extension rotor._core, states the license and what a package index shows.

Everything else is in pyproject.toml.

Environment: ROTOR_DEBUG=1 builds without optimisation, with assertions and with the checks of
invariants (csrc/rotor/eviction_check.h, recorder_check.h), ROTOR_SANITIZE=1 with the address and
undefined-behaviour sanitizers, ROTOR_WERROR=1 turns warnings into errors. GITHUB_REPOSITORY and
GITHUB_SHA, which a workflow on GitHub has, are where links of the README lead on a package index.
"""

import os
import re
import sys
from glob import glob
from pathlib import Path

import setuptools
from setuptools import Extension, setup

# pyproject.toml has two forms for a license, and setuptools before 77 refuses the present one.
is_current = hasattr(setuptools.Distribution().metadata, "license_expression")
license_text = {"license_expression" if is_current else "license": "BSD-3-Clause"}

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wsign-conversion",
    "-Wshadow",
    "-Wmissing-prototypes",
    "-Wstrict-prototypes",
    "-Wpointer-arith",
    "-Wundef",
    "-Wvla",
]

compile_args = ["-std=c11", "-fvisibility=hidden", *WARNINGS]
link_args = []
macros: list[tuple[str, str | None]] = []
libraries = []

if os.environ.get("ROTOR_WERROR") == "1":
    compile_args.append("-Werror")
if os.environ.get("ROTOR_DEBUG") == "1":
    compile_args += ["-O0", "-g", "-UNDEBUG"]
    macros.append(("ROTOR_CHECKS", None))
else:
    compile_args += ["-O3", "-g0"]
if os.environ.get("ROTOR_SANITIZE") == "1":
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"]
    link_args += sanitizers
if sys.platform.startswith("linux"):
    libraries += ["dl", "m", "pthread"]
    macros.append(("_GNU_SOURCE", None))

LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)\s]+)\)")


def index_text(text: str, repository: str, commit: str) -> str:
    """Return the README with links that work outside of the repository; as words without one."""

    def link(match: re.Match[str]) -> str:
        picture, label, path = match.groups()
        label = LINK.sub(link, label)
        if not repository:
            return label
        view = "raw" if picture else "blob"
        return f"{picture}[{label}](https://github.com/{repository}/{view}/{commit}/{path})"

    return LINK.sub(link, text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
places = (os.environ.get("GITHUB_REPOSITORY", ""), os.environ.get("GITHUB_SHA", "HEAD"))

setup(
    **license_text,
    long_description=index_text(readme, *places),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "rotor._core",
            sources=sorted(glob("csrc/rotor/*.c") + glob("csrc/python/*.c")),
            depends=sorted(glob("csrc/rotor/*.h") + glob("csrc/python/*.h")),
            include_dirs=["csrc/rotor"],
            define_macros=macros,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            libraries=libraries,
        )
    ],
)
