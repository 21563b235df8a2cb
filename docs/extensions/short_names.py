"""Links for names in single backticks that leave their module out, as docstrings write them.

A Sphinx extension. Among the documented objects of such a name, the one whose module is nearest to
that of the docstring is meant.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode


def shared(first: str, second: str) -> int:
    """How many parts two dotted names begin with in common."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contents: nodes.TextElement
) -> nodes.reference | None:
    """The link that a short name stands for."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("obj", "class", "exc"):
        return None
    target = node["reftarget"]
    here = node.get("py:module") or ""
    objects: dict[str, Any] = env.domains["py"].objects  # type: ignore[attr-defined]
    found = [name for name in objects if name.endswith(f".{target}")]
    if not found or target.islower():  # lower case: parameters
        return None
    best = max(found, key=lambda name: (shared(name, here), -len(name)))
    entry = objects[best]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contents, best)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
