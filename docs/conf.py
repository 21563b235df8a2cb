"""Sphinx settings; built by `make docs` with warnings as errors and without network."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "rotor"
author = "the rotor developers"
copyright = "the rotor developers"
release = metadata.version("rotor")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "short_names",
    "tutorial_pages",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
autosummary_generate = False
exclude_patterns = ["_build"]
default_role = "py:obj"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4

# The pages are the same where a framework is absent.
autodoc_mock_imports = ["transformers", "lightning", "pytorch_lightning"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
add_module_names = False

nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r"[a-z][a-z0-9_]*|rotor experiment run|pip install .*"),  # parameters, commands
    ("py:obj", r"[A-Z_]+"),  # constants of the module
    ("py:.*", r"(torch|nn|abc|enum|transformers|lightning)\..*"),
    ("py:class", r"rotor\..*\._\w+|rotor\._\w+\..*"),  # private bases
    (
        "py:class",
        r"rotor\..*\.((BuiltIn|Candidate)Algorithm|MeteredEngine|PublishedChain|Recall|TransparentModule)",
    ),
    ("py:obj", r"(Key|K_graph)\.\w+"),  # fields
]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["fit.js"]
html_title = f"rotor {release}"
html_copy_source = False
# The link to the code is that of the package's metadata, where it has one.
_links = dict(
    entry.split(", ", 1) for entry in metadata.metadata("rotor").get_all("Project-URL") or []
)
if "Source" in _links:
    html_theme_options = {
        "source_repository": _links["Source"],
        "source_branch": "main",
        "source_directory": "docs/",
    }
