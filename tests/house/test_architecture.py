"""The rules of the tree, read from its imports and includes (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]

# From the bottom up: folders, and single modules beside them. A module may import what lower layers
# have, and its own folder; imports within functions count.
LAYERS = [
    ["_core", "errors", "units"],
    ["chain", "_pytorch"],
    ["common", "timing", ""],
    ["meter", "algorithms"],
    ["graph", "simrd"],
    ["report", "dtr", "tier"],
    ["engines"],
    ["wrapper", "memory", "inspection"],
    ["fit", "rkgb", "rockmate", "integrations", "experiments", "models"],
    ["commands"],
    ["__main__"],
]
# The same within the folder of the engines: what they share comes first.
ENGINES = [
    ["contract", "peers", "learning", "proofs", "around"],
    ["chain", "plain"],
    ["graph"],
    ["dynamic"],
    ["parts"],
    ["sequential"],
]
MOST_LAYERS, MOST_NAMES = 11, 23

WITHOUT_TORCH = (
    "errors",
    "units",
    "chain",
    "algorithms",
    "graph",
    "simrd",
    "report",
    "experiments",
)
"""Folders that need no PyTorch, but for these modules."""
WITH_TORCH = ("rotor.experiments.worker",)

MOST_LINES = 620

# `Tensor._version` is what PyTorch's own documentation calls the version counter.
ALLOWED_PRIVATE = {"_version"}
# Overrides the part of nn.Module that is made to be overridden, and shares its dictionaries.
SHARES_MODULES = "rotor/wrapper/transparent.py"
PRIVATE_FOLDER = "rotor/_pytorch/"


class Import(NamedTuple):
    name: str
    is_lazy: bool
    is_typing: bool


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "models":
        parts.insert(0, "rotor")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {module_name(path): path for path in python_files("rotor", "models")}


def imports_of(path: Path) -> Iterator[Import]:
    """Everything imported anywhere in a file, with the full names of modules."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, is_lazy: bool, is_typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, is_lazy, is_typing)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in MODULES or full == "rotor._core"
                yield Import(full if is_module else base, is_lazy, is_typing)
        lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = is_typing or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy, typing_only)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def place_of(module: str, layers: list[list[str]], depth: int) -> tuple[int, str]:
    """The number of a module's layer, and the name that it has there."""
    parts = module.split(".")
    name = parts[depth] if len(parts) > depth else ""
    for index, members in enumerate(layers):
        if name in members:
            return index, name
    raise AssertionError(f"{module} has no layer: give {name} one in {__file__}")


def arrows(module: str) -> set[str]:
    """The modules of this package that a module imports, anywhere in it."""
    found = {i.name for i in imports_of(MODULES[module]) if not i.is_typing}
    return {name for name in found if name.split(".")[0] == "rotor" and name != module}


def test_folders_are_few():
    assert len(LAYERS) <= MOST_LAYERS
    names = {path.stem for path in (ROOT / "rotor").iterdir() if path.suffix in ("", ".py")}
    names -= {"__init__", "__main__", "__pycache__", "_core", "models"}
    assert len(names) <= MOST_NAMES, sorted(names)
    assert names | {"_core", "models", "__main__", ""} == {name for row in LAYERS for name in row}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows_point_down(module):
    own, folder = place_of(module, LAYERS, 1)
    upward = []
    for name in arrows(module):
        layer, other = place_of(name, LAYERS, 1)
        if layer > own or (layer == own and other != folder):
            upward.append(name)
    assert upward == [], f"{module} imports from layers that are not below its own"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("rotor.engines.")))
def test_arrows_between_engines_point_down(module):
    own, folder = place_of(module, ENGINES, 2)
    for name in arrows(module):
        if name.startswith("rotor.engines."):
            layer, other = place_of(name, ENGINES, 2)
            assert layer < own or (layer == own and (own == 0 or other == folder)), name


def test_no_circles():
    graph = {module: arrows(module) - {module} for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)


def test_no_circles_of_types():
    """Imports for hints alone count too, but for those of packages."""
    files = {module: path for module, path in MODULES.items() if path.name != "__init__.py"}
    graph = {m: {i.name for i in imports_of(path)} & files.keys() for m, path in files.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)


def test_planning_folders_do_not_name_torch():
    for module, path in MODULES.items():
        folder = place_of(module, LAYERS, 1)[1]
        if folder in WITHOUT_TORCH and module not in WITH_TORCH:
            roots = {i.name.split(".")[0] for i in imports_of(path) if not i.is_typing}
            assert "torch" not in roots, module


def test_planning_works_without_torch():
    script = """
import sys
sys.modules["torch"] = None
import rotor, rotor.chain, rotor.algorithms, rotor.units, rotor.common.progress
chain = rotor.Chain([1, 2], [2, 1], [4, 4, 4], [8, 8], [0, 0], [0, 0])
for name in rotor.algorithms.names():
    sequence = rotor.algorithms.get(name)().solve(chain, "1 KB")
    assert sequence.peak_bytes <= 1000 and str(sequence).endswith("B_0"), name
assert rotor.units.parse_bytes("1 KiB") == 1024
try:
    rotor.Checkpointable
except ImportError as error:
    assert "torch" in str(error)
else:
    raise AssertionError("torch was importable")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_nothing_imports_models_from_the_root():
    for path in python_files("rotor", "models", "tests", "benchmarks"):
        roots = {i.name.split(".")[0] for i in imports_of(path)}
        assert "models" not in roots, f"{relative(path)}: import rotor.models, not models"


@cache
def private_names() -> set[str]:
    """Names with one underscore of PyTorch's objects, as far as they can be listed."""
    objects = [nn.Module, nn.Module(), nn.Sequential(), torch.Tensor, torch.autograd.Function]
    objects += [torch, torch.autograd, torch.autograd.Variable, torch.cuda, torch.nn, torch.utils]
    objects += [torch.autograd.profiler, torch.UntypedStorage]
    names = {name for thing in objects for name in dir(thing)}
    return {name for name in names if re.fullmatch(r"_[A-Za-z]\w*", name)} - ALLOWED_PRIVATE


def defined_names(tree: ast.AST) -> set[str]:
    """Names that the classes of a file give their own attributes and methods."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_uses(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, own = private_names(), defined_names(tree)
    own |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            on_self = ast.unparse(node.value) in ("self", "cls")
            on_torch = ast.unparse(node.value).split(".")[0] in ("torch", "nn")
            if on_torch or not (on_self and node.attr in own):
                found.append(f"{relative(path)}:{node.lineno} {ast.unparse(node)}")
    for name, _, _ in imports_of(path):
        parts = name.split(".")
        if parts[0] == "torch" and any(p.startswith("_") and p != "__future__" for p in parts[1:]):
            found.append(f"{relative(path)} imports {name}")
    return found


def test_private_names_of_pytorch_are_in_one_folder():
    assert {"_parameters", "_execution_engine", "_C", "_backward_hooks"} <= private_names()
    assert len(private_uses(ROOT / PRIVATE_FOLDER / "core.py")) > 10
    found = []
    for path in python_files("rotor", "models"):
        if not relative(path).startswith(PRIVATE_FOLDER) and relative(path) != SHARES_MODULES:
            found += private_uses(path)
    assert found == [], f"move these to {PRIVATE_FOLDER}"


def test_transparent_modules_touch_only_what_modules_override():
    used = {use.rpartition(".")[2] for use in private_uses(ROOT / SHARES_MODULES)}
    assert used <= {"_apply", "_load_from_state_dict"}


# Private names of a module, and what is in rotor._core and rotor._pytorch, are for the module's own
# tests; everything else is tested by public names.
PRIVATE_IN_TESTS = {
    "gpu.test_cuda": ["_core"],
    "eager_inductor": [
        "_pytorch.inductor",
        "_pytorch.symbols",
        "engines.graph.tracing.groups",
    ],
    "installed": ["_core"],
    "oracles.dtr_operators": ["_pytorch.core", "_pytorch.dispatch", "dtr.recall", "dtr.runtime"],
    "published.test_rockmate": ["rockmate"],
    "capture.test_graph_rewrite": ["_pytorch.cudnn"],
    "engines.test_background_generous": ["_core"],
    "algorithms.test_chain": ["_core"],
    "wrapper.test_checksums": ["common.checksums"],
    "wrapper.test_total_on_the_cpu": ["_core"],
    "devices.test_devices": ["_pytorch.devices"],
    "dynamic.test_dtr_guard": ["_pytorch.dispatch", "_pytorch.pointers", "dtr.recall"],
    "dynamic.test_dtr_handler": [
        "_core",
        "_pytorch.dispatch",
        "dtr.recall",
        "dtr.runtime",
        "dtr.signatures",
    ],
    "dynamic.test_dtr_other_threads": ["_pytorch.pointers", "dtr.recall"],
    "dynamic.test_dtr_repeating": ["dtr.recall"],
    "dynamic.test_dtr_runtime": ["_core", "_pytorch.pointers", "dtr.signatures"],
    "dynamic.test_dtr_sources": ["dtr.recall"],
    "dynamic.test_dynamic_limits": ["_core", "engines.dynamic.step"],
    "house.test_earlier_pytorch": ["_pytorch.core", "_pytorch.fsdp"],
    "engines.test_extending": ["algorithms"],
    "engines.test_fixed_cost": ["_core"],
    "commands.test_fitting": ["fit.search"],
    "capture.test_graph_engine": ["_pytorch.core"],
    "capture.test_graph_estimate": ["engines.graph.costs.estimate"],
    "capture.test_graph_inductor": ["_pytorch.draws", "_pytorch.inductor"],
    "wrapper.test_integration_transformers": ["integrations.planned"],
    "wrapper.test_lists_that_change": ["_core", "dtr.recall"],
    "devices.test_memory": ["_core", "_pytorch.core", "_pytorch.ends", "_pytorch.profiler"],
    "algorithms.test_persistent": ["_core"],
    "capture.test_precision_settings": ["_pytorch.dispatch"],
    "devices.test_probe": ["_core"],
    "algorithms.test_progress": ["common.progress"],
    "rkgb.test_rkgb_graphs": ["rkgb.units"],
    "devices.test_sim_benchmarks": ["_core"],
    "devices.test_sim_blocks": ["_core"],
    "distributed.fsdp_worker": ["_pytorch.fsdp"],
    "wrapper.test_sharers": ["_pytorch.core", "_pytorch.devices", "common.ranks"],
    "devices.test_sim_meter": ["_pytorch.devices"],
    "devices.test_sim_pools": ["_pytorch.devices"],
    "devices.test_sim_defects": ["_pytorch.devices"],
    "devices.test_sim_engines": ["_pytorch.devices"],
    "devices.test_sim_first_step": ["_pytorch.devices", "wrapper.reporting"],
    "simrd.test_simrd_log_writer": ["_core"],
    "simrd.test_simrd_logs": ["_core"],
    "simrd.test_simrd_python": ["_core"],
    "simrd.test_simrd_simulate": ["_core"],
    "house.test_stubs": ["_core"],
    "algorithms.test_timing": ["_core", "_pytorch.devices"],
    "devices.test_memory_cuda": ["_core", "_pytorch.devices", "_pytorch.ends"],
    "wrapper.test_wrapping": ["common.model_state"],
    "graph.test_integer_program": ["algorithms._integer_program"],
    "engines.test_varying_memory": ["_pytorch.devices"],
    "background_models": ["wrapper.reporting"],
    "versions": ["_pytorch.core", "_pytorch.pointers", "_pytorch.regions"],
}


@cache
def owners_of_private_names() -> dict[str, set[str]]:
    """Modules of the package by the names with one underscore that they define."""
    owners: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in defined_names(tree) - private_names():
            if re.fullmatch(r"_[A-Za-z]\w*", name):
                owners.setdefault(name, set()).add(module.removeprefix("rotor."))
    return owners


def private_names_in(path: Path) -> list[set[str]]:
    """The modules that may own each private name of the package which a test file names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners, own = owners_of_private_names(), defined_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node.value).split(".")[0]
            if root not in ("self", "cls", "torch", "nn", "os") and node.attr not in own:
                found.append(owners.get(node.attr, set()))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.rpartition(".")
            if module in MODULES and re.fullmatch(r"_(?!core$)[A-Za-z]\w*", name):
                found.append({module.removeprefix("rotor.")})
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and ast.unparse(node.args[0])[:6] != "torch.":
                found.append(owners.get(str(name.value), set()))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rotor"):
            base = str(node.module).removeprefix("rotor").removeprefix(".")
            names = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            found += [{n} if base == "_pytorch" or n == "_core" else {base}
                      for n in names if re.search(r"(^|\.)_[A-Za-z]", n)]  # fmt: skip
    return [modules for modules in found if modules]


def test_private_names_are_tested_by_their_own_tests():
    used: dict[str, set[str]] = {}
    wrong = []
    for path in python_files("tests"):
        name = ".".join(path.relative_to(ROOT / "tests").with_suffix("").parts)
        allowed = set(PRIVATE_IN_TESTS.get(name, []))
        for modules in private_names_in(path):
            if modules & allowed:
                used.setdefault(name, set()).update(modules & allowed)
            else:
                wrong.append(f"{name} uses a private name of {sorted(modules)}")
    assert wrong == [], "use public names"
    assert used == {name: set(modules) for name, modules in PRIVATE_IN_TESTS.items()}


def test_nothing_prints():
    for path in python_files("rotor", "models"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            assert not is_print, f"{relative(path)}:{node.lineno} prints: use logging"


def test_no_cpp():
    """Allow C++ for the simulated accelerator alone: PyTorch's devices are registered in it."""
    wrong = {".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".pyx"}
    for folder in ("csrc", "rotor", "models", "tests"):
        found = [path for path in (ROOT / folder).rglob("*") if path.suffix in wrong]
        assert {path.parent for path in found} <= {ROOT / "tests/accelerator"}


def test_files_are_short():
    files = python_files("rotor", "models", "tests", "benchmarks")
    for folder in ("csrc/rotor", "csrc/python", "tests/c", "tests/accelerator"):
        files += sorted([*(ROOT / folder).glob("*.[ch]"), *(ROOT / folder).glob("*.cpp")])
    lengths = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_every_algorithm_is_exported_and_documented():
    from rotor import algorithms

    for name in algorithms.names():
        found = algorithms.get(name)
        assert found.name == name
        assert found.__name__ in algorithms.__all__
        assert getattr(algorithms, found.__name__) is found
        page = ROOT / "docs" / "algorithms" / f"{name}.md"
        assert page.is_file(), f"{relative(page)} is missing"
        assert found.__name__ in page.read_text(encoding="utf-8")


def test_public_names_exist():
    import rotor

    for name in rotor.__all__:
        assert getattr(rotor, name) is not None
    assert set(rotor.__all__) <= set(dir(rotor))
