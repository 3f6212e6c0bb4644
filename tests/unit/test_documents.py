"""The documents say what the code does: links, listings, examples, lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.changelog import relation_index
from airflow_provider_pgrepl.replication.changelog.layout import (
    DURABLE_APP,
    EPOCH_APP,
    LAYOUT_VERSION,
    RECEIVER_APP,
    TABLE_SCHEMA,
    CommitRecord,
    EpochRecord,
)
from airflow_provider_pgrepl.replication.lake import consistent_points
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.state.tables import TableState, may_follow
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, typed_column
from airflow_provider_pgrepl.replication.values.registry import _BUILT_IN as FAMILIES

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PIPELINE = Pipeline(name="documents", lake="/lake", tables=("public.*",))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def code(page: Path, language: str) -> list[str]:
    return [text for kind, text in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(prose(page))
    }


def rows(page: Path, first_header: str) -> Iterator[list[str]]:
    return rows_of(page.read_text(encoding="utf-8"), first_header)


def rows_of(text: str, first_header: str) -> Iterator[list[str]]:
    """The rows of the first table whose first column has this header."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_header} |"):
            next(lines)
            break
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in re.split(r"(?<=\s)\|(?=\s)", line.strip().strip("|"))]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", cell)


def of_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_every_link_leads_somewhere(page):
    lost = []
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page.parent.joinpath(path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            lost.append(target)
    assert not lost


def test_the_index_leads_to_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        index.parent.joinpath(target.partition("#")[0]).resolve() for target in _LINK.findall(prose(index))
    }
    assert [of_page(page) for page in PAGES if page != index and page not in linked] == []


@pytest.mark.parametrize(
    ("page", "limit"),
    [("README.md", 130), ("ARCHITECTURE.md", 300)]
    + [(of_page(page), 60) for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))],
)
def test_pages_stay_short(page, limit):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= limit


def test_changelog_entries_have_at_most_three_lines_below_a_subject():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- .*(?:\n  .*)*$", text, re.MULTILINE)
    assert [entry for entry in entries if entry.count("\n") > 2] == []
    *_, first = re.split(r"^## .*$", text, maxsplit=1, flags=re.MULTILINE)
    other = re.sub(r"^(?:- .*(?:\n  .*)*|#{2,3} .*)$", "", first, flags=re.MULTILINE).split()
    assert not other, f"text outside entries: {' '.join(other)}"
    assert len(text.splitlines()) <= 250


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=of_page)
def test_guide_begins_with_its_result(page):
    assert re.match(r"# .+\n\nAt the end, ", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=of_page)
def test_drawing_is_shown_named_and_readable_on_dark_pages(picture):
    text = picture.read_text(encoding="utf-8")
    drawing = ElementTree.fromstring(text)
    texts = {child.tag.rpartition("}")[2]: child.text for child in drawing}
    assert drawing.get("aria-label") or (texts["title"] and texts["desc"])
    assert "prefers-color-scheme: dark" in text
    shown = {
        page.parent.joinpath(target).resolve() for page in PAGES for target in _LINK.findall(prose(page))
    }
    assert picture in shown


def test_index_lists_decisions_by_number_and_title():
    listed = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((decisions/.+)\) \|$", prose(ROOT / "docs" / "README.md"), re.MULTILINE
    )
    titles = [
        (*re.match(r"# (\d+)\. (.+)\n", page.read_text(encoding="utf-8")).groups(), f"decisions/{page.name}")
        for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))
    ]
    assert listed == titles


def test_every_file_that_the_architecture_names_is_there():
    core = ROOT / "airflow_provider_pgrepl" / "replication"
    places = [core, core.parent, ROOT, ROOT / "docs"]
    for page in (ROOT / "ARCHITECTURE.md", *(ROOT / "docs" / "decisions").glob("*.md")):
        named = [name for name in names(prose(page)) if re.fullmatch(r"[\w/]+(\.py|/)", name)]
        assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_make_target_that_is_named_is_there():
    known = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        commands = re.findall(r"(?:`|^\s*)make ([a-z0-9]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(commands) <= known, of_page(page)


def test_every_type_of_the_registry_is_in_the_list_of_types_and_looks_as_it_says():
    listed = set()
    for type_name, oid, shown in listed_types():
        if oid is None:
            continue
        column = Column("c", 1, oid, typmod(type_name), type_name)
        assert str(typed_column(column, TableName("public", "t"), TableOptions()).lake_type) == shown, (
            type_name
        )
        listed.add(oid)
    assert set(FAMILIES) <= listed


def test_the_list_of_types_says_of_each_what_is_exact():
    for cells in rows(REFERENCE / "types.md", "PostgreSQL"):
        assert len(cells) == 5, cells
        assert cells[3], cells


def listed_types() -> Iterator[tuple[str, int | None, str]]:
    """Name, oid and lake type of each row of the list; types without a fixed oid have a dash there."""
    for cells in rows(REFERENCE / "types.md", "PostgreSQL"):
        (type_name,), (shown,) = names(cells[0]), names(cells[2])
        yield type_name, None if cells[1] == "–" else int(cells[1]), shown


def typmod(type_name: str) -> int:
    """Return the typmod of numeric(p,s), or -1: other types in the list need none."""
    found = re.fullmatch(r"numeric\((\d+),(\d+)\)", type_name)
    return -1 if found is None else ((int(found[1]) << 16) | int(found[2])) + 4


def test_every_table_state_is_listed():
    page = REFERENCE / "states.md"
    assert [names(cells[0])[0] for cells in rows(page, "state")] == [state.value for state in TableState]


def test_documented_state_transitions_match_code():
    listed = {
        (names(cells[0]) or [""])[0]: set(names(cells[1])) for cells in rows(REFERENCE / "states.md", "from")
    }
    allowed = {
        now.value: {then.value for then in TableState if then != now and may_follow(now, then)}
        for now in TableState
    }
    assert listed == {"": {then.value for then in TableState if may_follow(None, then)}, **allowed}


@pytest.mark.parametrize(
    ("heading", "schema"),
    [
        ("Changelog", TABLE_SCHEMA),
        ("Consistent points", consistent_points.SCHEMA),
        ("Relations", relation_index.SCHEMA),
    ],
)
def test_the_columns_of_our_own_lake_tables_are_listed(heading, schema):
    page = REFERENCE / "lake-layout.md"
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    listed = [(names(cells[0])[0], cells[1]) for cells in rows_of(section, "column")]
    assert listed == [(field.name, shown(field.type)) for field in schema]


def shown(kind: pa.DataType) -> str:
    plain = {pa.string(): "string", pa.map_(pa.string(), pa.int64()): "map<string, int64>"}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return str(kind).replace("item: ", "").replace("element: ", "")
    return plain.get(kind, str(kind))


def test_lake_layout_page_lists_commit_record_fields_and_app_ids():
    text = prose(REFERENCE / "lake-layout.md")
    listed = set(names(text))
    for record in (EpochRecord, CommitRecord):
        assert {field.name for field in fields(record)} <= listed
    assert {RECEIVER_APP, EPOCH_APP, DURABLE_APP, COMMIT_LSN, COMMIT_TS} <= listed
    assert f"layout version **{LAYOUT_VERSION}**" in text


def test_python_in_the_documents_is_python():
    for page in PAGES:
        for number, text in enumerate(code(page, "python"), 1):
            compile(text, f"{of_page(page)}, example {number}", "exec")


def pipelines(page: Path) -> list[Pipeline]:
    """The complete pipeline files of a page, which name the lake, as the apps read them."""
    found = [json.loads(text) for text in code(page, "json") if '"lake":' in text]
    return [Pipeline.from_dict(fields) for fields in found]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=of_page)
def test_pipeline_file_of_guide_is_valid(page):
    taken_over = "--take-over" in page.read_text(encoding="utf-8")
    modes = [pipeline.publication_mode for pipeline in pipelines(page)]
    if taken_over:
        assert set(modes) <= {"use"}, "pgrepl snapshot --take-over rejects this pipeline file"


def test_guide_from_debezium_has_a_pipeline_file():
    assert pipelines(ROOT / "docs" / "how-to" / "move-from-debezium.md")
