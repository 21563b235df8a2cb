"""The rules of the C sources, read from their includes, functions and calls (docs/c-core.md)."""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The units of C: a unit is a source and the header of its name. Each uses units of the levels below
# only, by what it includes and by the functions that it calls, or of its own without a circle.
C_LEVELS = {
    "csrc/rotor": [
        ["core"],
        ["bits", "chain", "checksum_blocks", "dataflow", "heuristics"],
        ["link", "bound"],
        ["probe", "probe_cuda", "timing", "vector", "envelope"],
        [
            "blocks",
            "checksum",
            "classes",
            "graph",
            "live",
            "log_json",
            "log_names",
            "log_writer",
            "program",
            "sequence",
            "tier",
        ],
        ["blocks_piece", "floating"],
        ["persistent", "persistent_kernel", "frontier", "revolve"],
        ["log_commands", "log_reader", "log_fields", "log_instructions", "log"],
        ["eviction_private", "eviction_check", "eviction_pool", "eviction_tier"],
        ["neighbourhoods", "regions", "eviction"],
        ["replay_private", "replay_tensors", "replay"],
        ["recorder_private", "recorder_check", "recorder_keeping", "recorder_nodes"],
        ["recorder_needs", "recorder"],
        ["recorder_queries"],
        ["planner_random", "planner_stop", "planner_levels"],
        ["planner_slots"],
        ["planner_spans"],
        ["planner_greedy_tier", "planner_prefetch", "planner_sequence"],
        ["planner_clocks", "planner_edits"],
        [*("planner_greedy", "planner_search", "planner_pool", "planner", "planner_curve")],
    ],
    "csrc/python": [
        ["support"],
        ["bind_blocks", "bind_candidate", "bind_chain", "bind_checksum", "bind_live", "bind_log"],
        ["bind_log_writer", "bind_tier"],
        [
            "bind_planner",
            "bind_probe",
            "bind_pending",
            "bind_timing",
            "bind_solvers",
            "bind_replay",
        ],
        ["bind_dtr_book", "bind_dtr_types"],
        ["bind_dtr_nodes", "bind_dtr"],
        [
            "bind_dtr_private",
            "bind_dtr_settings",
            "bind_dtr_kernel",
            "bind_dtr_needs",
            "bind_dtr_odd",
            "bind_dtr_reading",
            "bind_dtr_record",
            "bind_dtr_replay",
            "bind_dtr_table",
        ],
        ["bind_dtr_handler", "bind_dtr_session"],
        ["bind_dtr_modes"],
        ["module"],
    ],
}
C_SYSTEM_HEADERS = re.compile(
    r"(assert|ctype|dlfcn|errno|fcntl|float|inttypes|limits|mach/mach|malloc|malloc/malloc|math|"
    r"pthread|signal|stdbool|stddef|stdint|stdio|stdlib|string|sys/\w+|time|unistd|x86intrin|immintrin)\.h"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def c_files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).glob("*.[ch]"))
    assert found
    return found


def c_code(path: Path) -> str:
    """A C file without its comments and string literals, includes kept."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    return re.sub(r'(?<!include )"(\\.|[^"\\\n])*"', '""', text)


def includes(path: Path) -> tuple[list[str], list[str]]:
    """The headers that a file includes: of the project, of the system."""
    text = c_code(path)
    own = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE)
    system = re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, flags=re.MULTILINE)
    return own, system


def test_the_core_knows_no_python():
    for path in c_files("csrc/rotor"):
        own, system = includes(path)
        outside = [name for name in own if not (ROOT / "csrc/rotor" / name).is_file()]
        assert outside == [], f"{relative(path)} includes headers from outside the core"
        unknown = [name for name in system if not C_SYSTEM_HEADERS.fullmatch(name)]
        assert unknown == [], f"{relative(path)} includes headers that are not C11 or POSIX"
        assert not re.search(r"\bPy[A-Z]\w+|\bPyObject\b", c_code(path)), relative(path)


def test_the_binding_has_the_only_python_h():
    assert any("Python.h" in includes(path)[1] for path in c_files("csrc/python"))
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file() and path.parent.name != "python":
            assert "Python.h" not in path.read_text(encoding="utf-8"), relative(path)


def c_functions(path: Path) -> dict[str, bool]:
    """The functions that a C file defines, and whether each is static."""
    pattern = r"^(?!\s|else\b)([\w\s*()\",]*?[\s*])(\w+)\(([^;{}]*)\) \{$"
    found = re.findall(pattern, c_code(path), flags=re.MULTILINE)
    return {name: "static" in before for before, name, _ in found if name != "KERNEL"}


@cache
def c_uses(folder: str) -> dict[str, set[str]]:
    """The units of a folder, and the units of the same folder that each uses."""
    files = c_files(folder)
    headers = {path.name: path.stem for path in files}
    owners = {
        name: path.stem
        for path in files
        for name, is_static in c_functions(path).items()
        if not is_static
    }
    uses: dict[str, set[str]] = {path.stem: set() for path in files}
    for path in files:
        uses[path.stem] |= {headers[name] for name in includes(path)[0] if name in headers}
        if path.suffix == ".c":
            words = re.findall(r"\w+", c_code(path))
            uses[path.stem] |= {owners[word] for word in words if word in owners}
    return {unit: used - {unit} for unit, used in uses.items()}


@pytest.mark.parametrize("folder", sorted(C_LEVELS))
def test_c_units_use_units_below_without_circles(folder):
    levels = {unit: level for level, units in enumerate(C_LEVELS[folder]) for unit in units}
    uses = c_uses(folder)
    assert sum(map(len, uses.values())) > len(uses)
    assert set(uses) == set(levels), f"give units a level in C_LEVELS of {__file__}"
    upward = {
        f"{unit} uses {used}" for unit in uses for used in uses[unit] if levels[used] > levels[unit]
    }
    assert upward == set()
    assert len(list(TopologicalSorter(uses).static_order())) == len(uses)


@pytest.mark.parametrize("folder", sorted(C_LEVELS))
def test_c_functions_have_names_of_their_own(folder):
    prefix = "rotor_" if folder == "csrc/rotor" else "py_"
    places: dict[str, list[str]] = {}
    for path in c_files(folder):
        for name, is_static in c_functions(path).items():
            assert is_static or name.startswith(prefix) or name == "PyInit__core", name
            places.setdefault(name, []).append(path.name)
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_c_types_have_names_of_their_own():
    places: dict[str, set[str]] = {}
    for path in [*c_files("csrc/rotor"), *c_files("csrc/python")]:
        named = re.findall(r"^(?:\} |typedef [^;{}]*?)(\w+_t);", c_code(path), flags=re.MULTILINE)
        for name in named:
            places.setdefault(name, set()).add(path.name)
    assert len(places) > 80
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_functions_that_python_calls_begin_with_py():
    entry = r"\{\s*\"\w+\",\s*(?:\(PyCFunction\)\(void \(\*\)\(void\)\)|\w+\()?(\w+)\)?,"
    called = set()
    for path in c_files("csrc/python"):
        called |= set(re.findall(entry, path.read_text(encoding="utf-8")))
    functions = {name for path in c_files("csrc/python") for name in c_functions(path)}
    assert len(called & functions) > 60
    assert {name for name in called & functions if not name.startswith("py_")} == set()


def test_the_core_allocates_in_one_place():
    calls = re.compile(
        r"(?<![\w.>])(malloc|calloc|realloc|free|strdup|printf|puts|exit|abort)\s*\("
    )
    for path in c_files("csrc/rotor"):
        if path.name != "core.c":
            found = calls.findall(c_code(path))
            assert found == [], f"{relative(path)}: allocate with rotor_malloc, return a status"


@pytest.mark.parametrize("path", c_files("csrc/rotor"), ids=lambda path: path.name)
def test_what_a_c_function_holds_is_freed_at_its_end(path):
    early = re.compile(r"^ {8,}\w*(?:_free|dlclose)\([^\n]*\n\s+return\b", flags=re.MULTILINE)
    assert early.findall(c_code(path)) == [], "goto out, and free there (docs/c-core.md)"
