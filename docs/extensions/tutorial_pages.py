"""Makes pages of the tutorials: executes them, and writes text, code, output and pictures.

A Sphinx extension. Executed notebooks are kept in ``_build/tutorials``; those whose source has
changed are executed again. ``-D tutorials_execute=0`` writes pages without output.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

SECONDS = 600
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def executed(source: Path, store: Path, version: str) -> Any:
    """The notebook with its output, from the store where the source is the same."""
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
    path = store / f"{source.stem}.{digest}.ipynb"
    if path.is_file():
        return nbformat.read(path, as_version=4)
    logger.info("executing %s", source.name)
    notebook = jupytext.read(source)
    store.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(store)}},
    )
    client.execute()
    for old in store.glob(f"{source.stem}.*.ipynb"):
        old.unlink()
    nbformat.write(notebook, path)
    return notebook


def fenced(text: str, language: str) -> str:
    """Text between fences."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def outputs(cell: Any, stem: str, folder: Path, count: int) -> tuple[list[str], int]:
    """What a cell printed and drew; pictures become files."""
    parts: list[str] = []
    printed = ""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
            continue
        data = output.data
        if "image/png" in data or "image/svg+xml" in data:
            count += 1
            is_png = "image/png" in data
            name = f"{stem}_{count}.{'png' if is_png else 'svg'}"
            content = (
                base64.b64decode(data["image/png"])
                if is_png
                else data["image/svg+xml"].encode("utf-8")
            )
            (folder / name).write_bytes(content)
            if printed:
                parts.append(fenced(printed, "text"))
                printed = ""
            parts.append(f"![output of the cell above]({name})")
        elif "text/plain" in data:
            printed += data["text/plain"] + "\n"
    if printed.strip():
        parts.append(fenced(_ESCAPES.sub("", printed), "text"))
    return parts, count


def page_of(notebook: Any, stem: str, folder: Path) -> str:
    """The notebook as MyST Markdown."""
    parts: list[str] = []
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"\]\((\d\d_\w+)\.ipynb\)", r"](\1.md)", cell.source)
            parts.append(text.replace("](../docs/", "](../"))
        else:
            parts.append(fenced(cell.source, "python"))
            found, count = outputs(cell, stem, folder, count)
            parts += found
    return "\n\n".join(parts) + "\n"


def write_pages(app: Sphinx) -> None:
    """Write a page for each tutorial into the documentation's ``tutorials`` folder."""
    docs = Path(app.srcdir)
    folder = docs / "tutorials"
    for source in sorted((docs.parent / "tutorials").glob("[0-9]*.py")):
        if app.config.tutorials_execute:
            notebook = executed(source, docs / "_build" / "tutorials", app.config.release)
        else:
            notebook = jupytext.read(source)
        text = page_of(notebook, source.stem, folder)
        path = folder / f"{source.stem}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_config_value("tutorials_execute", True, "env", bool)
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
