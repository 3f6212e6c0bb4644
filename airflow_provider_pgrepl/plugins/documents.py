"""The plugin that serves the documents of the installed version in Airflow, without internet access."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from airflow.plugins_manager import AirflowPlugin

from airflow_provider_pgrepl.links.task import DOCUMENTS_PREFIX, LAKE_PAGE, PAGE_PREFIX
from airflow_provider_pgrepl.replication.runtime.spark_submit import shipped_folder

_FIRST = "docs/README.md"
_OTHERS = {".png": "image/png", ".svg": "image/svg+xml", "": "text/plain; charset=utf-8"}
"""Content types by file suffix of files other than pages: pictures, and the license without a suffix."""
_STYLE = (
    ":root{color-scheme:light dark}body{max-width:62rem;margin:2rem auto;padding:0 1rem;"
    "font:16px/1.5 system-ui,sans-serif}table{border-collapse:collapse}td,th{border:1px solid #8886;"
    "padding:.3rem .6rem;vertical-align:top}code{font-size:.9em}pre{overflow:auto;padding:.7rem;"
    "background:#8882}img{max-width:100%}"
)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class DocumentPages:
    """An ASGI application that serves Markdown files of a folder, their pictures, and the page of a lake.

    It does not use FastAPI, which every component of Airflow would have to import with the plugin. It
    requires no login, because the documents are public: they are part of the package.
    """

    def __init__(self, folder: Callable[[], Path | None]) -> None:
        self._folder = folder

    async def __call__(self, scope: MutableMapping[str, Any], _: object, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        query = parse_qs(bytes(scope.get("query_string", b"")).decode("ascii", "replace"))
        status, headers, body = self.answer(path.strip("/"), query.get("path", [""])[0])
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def answer(self, path: str, lake: str = "") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body for a path in the folder, or for the page of the lake `lake`."""
        kind = [(b"content-type", b"text/html; charset=utf-8")]
        if path == "":
            return 307, [(b"location", f"{DOCUMENTS_PREFIX}/{_FIRST}".encode())], b""
        if path == LAKE_PAGE:
            return 200, kind, _of_lake(lake).encode()
        if page := self.pages().get(path):
            return 200, kind, render(page.read_text(encoding="utf-8")).encode()
        if other := self._others().get(path):
            return 200, [(b"content-type", _OTHERS[other.suffix].encode())], other.read_bytes()
        return 404, kind, b"There is no such page."

    def pages(self) -> dict[str, Path]:
        """Return the files of all pages, by path."""
        return self._found("*.md", "docs/**/*.md")

    def _others(self) -> dict[str, Path]:
        return self._found("LICENSE", "docs/**/*.png", "docs/**/*.svg")

    def _found(self, *patterns: str) -> dict[str, Path]:
        folder = self._folder()
        if folder is None:
            return {}
        files = (file for pattern in patterns for file in folder.glob(pattern))
        return {file.relative_to(folder).as_posix(): file for file in files}


@lru_cache(maxsize=64)
def render(text: str) -> str:
    """Return Markdown as an HTML page. Headings get the anchors to which the documents link."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    title = ""
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            title = title or inline.content
            opening.attrSet("id", re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-"))
    return _page(title, markdown.renderer.render(tokens, markdown.options, {}))


def _of_lake(path: str) -> str:
    """Return the HTML page with the path of a lake, and with links on how to read it."""
    reading, layout = (f'<a href="docs/reference/{name}.md">' for name in ("reading", "lake-layout"))
    return _page(
        "Lake",
        f"<h1>Lake</h1><p>On the worker and on all executors: <code>{html.escape(path)}</code></p>"
        f"<p>{reading}How it is read</a>, {layout}what lies where</a></p>",
    )


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


class PgReplPlugin(AirflowPlugin):
    """The plugin that serves the documents and the page "Replication", and adds both to Airflow's menus."""

    name = "pgrepl"
    external_views = [  # noqa: RUF012 - Airflow's own form
        {
            "name": "PostgreSQL replication",
            "href": f"{DOCUMENTS_PREFIX}/{_FIRST}",
            "destination": "nav",
            "category": "docs",
        },
        {
            "name": "Replication",
            # Relative, because Airflow may be below a path.
            "href": f"{PAGE_PREFIX.removeprefix('/')}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "replication",
        },
    ]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:
        # Only the API server asks for the applications. Other components would import FastAPI for nothing.
        from .replication import page_app

        documents = DocumentPages(lambda: shipped_folder("documents", "docs/README.md"))
        return [
            {
                "app": documents,
                "url_prefix": DOCUMENTS_PREFIX,
                "name": "PostgreSQL replication: documents",
            },
            {"app": page_app(), "url_prefix": PAGE_PREFIX, "name": "PostgreSQL replication: page"},
        ]
