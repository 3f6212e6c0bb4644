"""The documents as Airflow serves them, and the links of a task."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from airflow_provider_pgrepl.links.task import DocumentationLink, LakeLink, StatusLink
from airflow_provider_pgrepl.plugins.documents import DocumentPages, PgReplPlugin

ROOT = Path(__file__).parents[2]
PAGES = DocumentPages(lambda: ROOT)


def answer(path: str, root_path: str = "/pgrepl") -> tuple[int, str]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": f"{root_path}{path}", "root_path": root_path}
    asyncio.run(PAGES(scope, None, send))
    return sent[0]["status"], sent[1]["body"].decode(errors="replace")


@pytest.mark.thorough("test_airflow_serves_them_and_has_them_in_its_menu; unit/test_documents")
def test_every_link_and_picture_of_the_documents_is_served() -> None:
    lost = []
    for path in PAGES.pages():
        status, page = answer(f"/{path}")
        assert status == 200
        for link in re.findall(r'(?:href|src)="([^"]+)"', page):
            if "://" in link:
                continue
            target, _, anchor = urljoin(f"/{path}", link).partition("#")
            found, body = answer(target)
            if found != 200 or (anchor and f'id="{anchor}"' not in body):
                lost.append((path, link))
    assert lost == []


@pytest.mark.parametrize(
    "path", ["/nothing.md", "/pyproject.toml", "/../etc/passwd", "/docs/../pyproject.toml", "//etc/passwd"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert answer(path)[0] == 404


def test_pictures_are_served_as_pictures() -> None:
    status, headers, body = PAGES.answer("docs/tutorial/pictures/dags.png")
    assert (status, headers) == (200, [(b"content-type", b"image/png")])
    assert body == (ROOT / "docs" / "tutorial" / "pictures" / "dags.png").read_bytes()
    assert "img{max-width:100%}" in answer("/docs/tutorial/first-pipeline.md")[1]


def test_tables_are_tables_and_markup_in_a_page_stays_text() -> None:
    page = answer("/docs/reference/operators.md")[1]
    assert "<table>" in page
    assert "<script" not in page


def test_the_address_without_a_page_leads_to_the_first_one() -> None:
    assert answer("/")[0] == 307


def test_the_page_of_a_lake_shows_its_path_and_no_markup_of_it() -> None:
    page = PAGES.answer("lake", "/data/<script>")[2].decode()
    assert "<code>/data/&lt;script&gt;</code>" in page
    assert "<script" not in page
    assert (
        PAGES.answer("docs/reference/reading.md")[0]
        == PAGES.answer("docs/reference/lake-layout.md")[0]
        == 200
    )


def test_without_documents_there_are_no_pages() -> None:
    assert DocumentPages(lambda: None).answer("docs/README.md")[0] == 404


def test_airflow_serves_them_and_has_them_in_its_menu(airflow_db: None) -> None:
    from airflow import plugins_manager

    apps, _ = plugins_manager.get_fastapi_plugins()
    assert [app["url_prefix"] for app in apps if "PostgreSQL" in app["name"]] == [
        "/pgrepl",
        "/pgrepl-page",
    ]
    assert PgReplPlugin.external_views[0]["href"] == "/pgrepl/docs/README.md"


@dataclass
class Key:
    """A task instance, by name."""

    dag_id: str = "shop"
    task_id: str = "replicate"
    run_id: str = "scheduled__2026-01-01T00:00:00+00:00"
    map_index: int = -1


class Operator:
    def __init__(self, lake: str) -> None:
        self.pipeline = {"name": "shop", "tables": ["public.*"], "lake": lake}


def test_the_links_lead_to_status_lake_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.com/airflow/")
    operator = Operator("/data/my lake")
    run = "scheduled__2026-01-01T00%3A00%3A00%2B00%3A00"
    own = "https://example.com/airflow"
    assert StatusLink().get_link(operator, ti_key=Key()) == f"{own}/dags/shop/runs/{run}/tasks/replicate/xcom"
    assert StatusLink().get_link(operator, ti_key=Key(map_index=2)).endswith("/tasks/replicate/mapped/2/xcom")
    assert LakeLink().get_link(operator, ti_key=Key()) == f"{own}/pgrepl/lake?path=%2Fdata%2Fmy+lake"
    assert DocumentationLink().get_link(operator, ti_key=Key()) == f"{own}/pgrepl/docs/reference/operators.md"


def test_a_pipeline_that_cannot_be_read_has_no_lake_to_link_to() -> None:
    operator = Operator("/lake")
    operator.pipeline = "/nowhere/pipeline.json"  # type: ignore[assignment]
    assert LakeLink().get_link(operator, ti_key=Key()) == ""
