"""Executes the tutorials and writes them, with what they printed and drew, as notebooks.

    python tutorials/make_notebooks.py [NAME ...]

One after another, each in a folder of its own; names such as ``01_first_steps`` choose.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).resolve().parent
SECONDS = 900
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
KEPT = ("image/png", "image/svg+xml", "text/plain")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


def read(source: Path) -> Any:
    """Return the notebook of a source, without output; the same source gives the same one."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.metadata = nbformat.from_dict({})
        cell.id = f"cell-{number:02d}"
    return notebook


def without_machine(text: str, folders: dict[str, str]) -> str:
    """Return text without colours, and without the places of this machine's folders."""
    for folder, name in folders.items():
        text = text.replace(folder, name)
    return re.sub(
        r"(/tmp|/var/folders)/[\w./-]*?(?=[\w.-]*(\s|['\",:)]|$))", "", ESCAPES.sub("", text)
    )


def joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with pieces of one stream in a row as one."""
    found: list[Any] = []
    for output in outputs:
        before = found[-1] if found else None
        if (
            before is not None
            and output.output_type == before.output_type == "stream"
            and output.name == before.name
        ):
            before.text += output.text
        else:
            found.append(output)
    return found


def tidy(notebook: Any, folders: dict[str, str]) -> None:
    """Keep of the outputs what a reader sees, and nothing of this machine."""
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = without_machine(output.text, folders)
            elif "data" in output:
                output.metadata = nbformat.from_dict({})
                data = {kind: output.data[kind] for kind in KEPT if kind in output.data}
                if "text/plain" in data:
                    data["text/plain"] = without_machine(data["text/plain"], folders)
                output.data = nbformat.from_dict(data)
    notebook.metadata = nbformat.from_dict(METADATA)


def executed(source: Path) -> Any:
    """Return the notebook of a source with its output."""
    notebook = read(source)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROTOR_CACHE_DIR"] = str(Path(folder) / "cache")
        nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute()
        root = str(HERE.parent)
        tidy(notebook, {folder: ".", f"{root}/": "", sys.prefix: "python", str(Path.home()): "~"})
    nbformat.validate(notebook)
    return notebook


def main() -> int:
    """Write the notebooks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sources = sorted(HERE.glob("[0-9]*.py"))
    parser.add_argument("names", nargs="*", choices=[[], *(path.stem for path in sources)])
    names = parser.parse_args().names
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    for source in sources:
        if names and source.stem not in names:
            continue
        began = time.perf_counter()
        notebook = executed(source)
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        size = source.with_suffix(".ipynb").stat().st_size
        print(
            f"{source.stem}: {time.perf_counter() - began:.0f} s, {size / 2**10:.0f} KiB",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
