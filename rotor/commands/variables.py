"""Variables of a script that hold a module, and where a line about one belongs in it."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

from torch import nn

OWN = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_BRANCHES = (ast.If, ast.Try, ast.Match)


def is_of_user(filename: str) -> bool:
    """Return whether code is the user's own: in a file outside of installed packages."""
    return not filename.startswith((*_INSTALLED, OWN, "<"))


def variable_of(module: nn.Module) -> tuple[str, str]:
    """Return the variable of the running script that holds a module, and where a line belongs.

    A parameter of a function is taken where no function around it has another variable.
    """
    parameter = "", ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            name = _name_in(frame.f_locals, module)
            code = frame.f_code if name else None
            name = name or _name_in(frame.f_globals, module)
            if code is not None and name in inspect.getargs(code).args:
                path, line = Path(code.co_filename).name, code.co_firstlineno
                parameter = name, f" at the beginning of {code.co_name}(), line {line} of {path}"
            elif name:
                return name, _place(frame, name, is_local=code is not None)
        frame = frame.f_back
    return parameter


def _name_in(names: dict[str, Any], module: nn.Module) -> str:
    holders = []
    for name, value in names.items():
        if value is module:
            return name
        if name == "self" or not isinstance(value, type | types.ModuleType | nn.Module):
            held = getattr(value, "__dict__", None)
            found = [held, held.get("_modules")] if isinstance(held, dict) else []
            holders += [(name, attributes) for attributes in found]
    for holder, attributes in holders:
        if isinstance(attributes, dict):
            for name, value in attributes.items():
                if value is module:
                    return f"{holder}.{name}"
    return ""


def _place(frame: types.FrameType, name: str, *, is_local: bool) -> str:
    """Return the place after the last assignment to a variable that a frame has run, as text."""
    path = Path(frame.f_code.co_filename)
    try:
        tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    is_attribute = "." in name
    scope = _definition(tree, frame.f_code) if is_local and not is_attribute else tree
    at: types.FrameType | None = frame
    while at is not None and scope is tree and at.f_code.co_name != "<module>":
        at = at.f_back
    running = 0 if at is None or at.f_code.co_filename != frame.f_code.co_filename else at.f_lineno
    parents = {child: node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
    lines = []
    for node in parents:
        if isinstance(getattr(node, "ctx", None), ast.Store) and (
            getattr(node, "attr", None) == name.rpartition(".")[2]
            if is_attribute
            else getattr(node, "id", None) == name and _owner(node, scope, parents) is scope
        ):
            lines.append(_line_after(node, parents, running))
    run = [line for line in lines if line < running] or lines
    return f" after line {max(run)} of {path.name}" if run else ""


def _definition(tree: ast.AST, code: types.CodeType) -> ast.AST:
    """Return the definition of a function; the whole file for the code of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.lineno, *(one.lineno for one in node.decorator_list)
            if node.name == code.co_name and code.co_firstlineno in lines:
                return node
    return tree


def _owner(node: ast.AST, scope: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """Return the function or class to which a variable belongs, or a scope around all."""
    while node is not scope:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            break
    return node


def _line_after(node: ast.AST, parents: dict[ast.AST, ast.AST], running: int) -> int:
    """Return the line after which a variable is assigned, in whichever branch that was.

    Branches in which line number `running` is are not over; 0: it is not known.
    """
    while not isinstance(node, ast.stmt):
        node = parents[node]
    body = getattr(node, "body", None)
    line: int = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    while isinstance(node := parents[node], (*_BRANCHES, ast.ExceptHandler, ast.match_case)):
        end = getattr(node, "end_lineno", None) or 0
        if isinstance(node, _BRANCHES) and running > end:
            line = max(line, end)
    return line
