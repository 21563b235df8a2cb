"""The types of the C core say what is there: `_core.pyi` against the extension."""

from __future__ import annotations

import ast
import inspect
from importlib import resources
from typing import Any

import pytest

from rotor import _core

STUB = ast.parse(resources.files("rotor").joinpath("_core.pyi").read_text(encoding="utf-8"))
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
# Classes in Python derive from them.
BASES = {"FunctionMode", "OperatorMode"}
VALUES = {
    node.target.id
    for node in STUB.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("__")}


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Those that may be set."""
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def is_data(member: Any) -> bool:
    return inspect.isgetsetdescriptor(member) or inspect.ismemberdescriptor(member)


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter in the stub, self and cls left out."""
    arguments = node.args
    assert arguments.vararg is None
    assert arguments.kwarg is None
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = []
    for index, argument in enumerate(positional):
        only = index < len(arguments.posonlyargs)
        kind = "POSITIONAL_ONLY" if only else "POSITIONAL_OR_KEYWORD"
        found.append((argument.arg, kind, index >= first_default))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "KEYWORD_ONLY", default is not None))
    return [entry for entry in found if entry[0] not in ("self", "cls")]


def real_parameters(function: Any) -> list[tuple[str, str, bool]]:
    return [
        (p.name, p.kind.name, p.default is not p.empty)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "$self")
    ]


def test_the_module_has_the_names_of_the_stub():
    assert public(dir(_core)) == set(FUNCTIONS) | set(CLASSES) | VALUES


def test_kinds():
    assert {name for name in public(dir(_core)) if isinstance(getattr(_core, name), type)} == set(
        CLASSES
    )
    assert all(callable(getattr(_core, name)) for name in FUNCTIONS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions(name):
    function = getattr(_core, name)
    assert real_parameters(function) == parameters(FUNCTIONS[name])
    assert inspect.getdoc(function)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_classes(name):
    cls, node = getattr(_core, name), CLASSES[name]
    stubbed = methods_of(node)
    counts = {"n_fields", "n_sequence_fields", "n_unnamed_fields"}  # of a structure sequence
    own = public(vars(cls)) - (counts if issubclass(cls, tuple) else set())
    assert own == public(stubbed) | attributes_of(node)
    assert inspect.getdoc(cls)
    for attribute in attributes_of(node):
        assert is_data(vars(cls)[attribute])
        assert inspect.getdoc(vars(cls)[attribute])
    for method_name in public(stubbed):
        member, stub = vars(cls)[method_name], stubbed[method_name]
        assert is_data(member) == is_property(stub)
        assert inspect.getdoc(member)
        if not is_property(stub):
            assert real_parameters(member) == parameters(stub)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_classes_are_final_and_made_as_the_stub_says(name):
    cls, node = getattr(_core, name), CLASSES[name]
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if name in BASES:
        assert decorators == []
        assert issubclass(type("Derived", (cls,), {}), cls)
    else:
        assert decorators == ["final"]
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Derived", (cls,), {})
    with pytest.raises(TypeError, match="immutable type"):
        cls.attribute = 1
    if "__new__" not in methods_of(node) and name not in BASES:
        with pytest.raises(TypeError, match="cannot create"):
            cls()


def test_the_package_says_that_it_is_typed():
    marker = resources.files("rotor").joinpath("py.typed")
    assert marker.is_file()
