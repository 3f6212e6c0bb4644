"""The settings of the documentation site, which `make docs` builds into .docs/.

The pages are the Markdown files that Airflow's UI shows. MyST reads them with markdown-it-py, as the plugin
of Airflow does. Only the API reference below docs_site/api is made of docstrings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
_INDEX = "docs/README"
_SECTIONS = {
    "Tutorial": ["docs/tutorial/*"],
    "How-to guides": ["docs/how-to/*"],
    "Reference": ["docs/reference/*", "docs_site/api/*"],
    "Explanation": ["docs/explanation/*", "ARCHITECTURE", "docs/benchmarks", "docs/soak"],
    "Project": ["README", "CHANGELOG", "CONTRIBUTING", "docs/decisions/*"],
}
"""The sections of the site's menu, each with patterns of its pages."""

_NEVER_CREATED = ("Lake", "LakeTable", "ChangeStream", "Snapshot", "StoredSnapshot", "StreamBounds")

project = "airflow-provider-pgrepl"
author = "The authors of airflow-provider-pgrepl"
root_doc = _INDEX
include_patterns = ["*.md", "docs/**", "docs_site/api/*"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 6
default_role = "code"  # docstrings have single backquotes, as Markdown
add_module_names = False
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
suppress_warnings = ["misc.highlighting_failure"]  # SQL with commands of psql
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False


def _add_menu(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the site's menu to the index page, in which GitHub and Airflow would show it as code."""
    if docname == _INDEX:
        source[0] += "".join(_menu(caption, patterns) for caption, patterns in _SECTIONS.items())


def _menu(caption: str, patterns: list[str]) -> str:
    pages = "\n".join(f"/{pattern}" for pattern in patterns)
    return f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n:maxdepth: 1\n\n{pages}\n```\n"


def _hide_signature(
    _app: Sphinx,
    what: str,
    name: str,
    _object: Any,
    _options: Any,
    _arguments: str | None,
    _returned: str | None,
) -> tuple[str, None] | None:
    """Return an empty signature for classes that users get from functions and never create."""
    return ("", None) if what == "class" and name.rpartition(".")[2] in _NEVER_CREATED else None


def setup(app: Sphinx) -> None:
    """Register the handlers that add the menu and hide signatures."""
    app.connect("source-read", _add_menu)
    app.connect("autodoc-process-signature", _hide_signature)
