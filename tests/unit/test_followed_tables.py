"""app/creek/service.py: tables join together, else one by one, and leave when others stay."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_pgrepl.errors import PublicationError, SourceConnectionError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.creek import service
from airflow_provider_pgrepl.replication.app.creek.service import FollowedTables
from airflow_provider_pgrepl.replication.postgres.names import TableName

A, B, BAD = (TableName("public", name) for name in ("a", "b", "bad"))


class Source:
    """A source whose publication has `tables`, or that raises the exception in `tables`."""

    def __init__(self) -> None:
        self.tables: Any = frozenset({A})

    def has_news(self) -> bool:
        return True

    def published(self) -> frozenset[TableName]:
        if isinstance(self.tables, Exception):
            raise self.tables
        return frozenset(self.tables)


class Followed(FollowedTables):
    """Followed tables whose apps end at once: they take all tables but BAD."""

    def __init__(self, source: Source) -> None:
        self.added: list[str] = []
        self.in_lake = {A}
        super().__init__(source, None, self._app)  # type: ignore[arg-type]

    def _app(self, names: str) -> Any:
        self.added.append(names)
        tables = {TableName.parse(name) for name in names.split(",")}
        code = process.WILL_NOT_HELP if BAD in tables else process.DONE
        if code == process.DONE:
            self.in_lake |= tables
        return Ended(code)

    def taken(self) -> frozenset[TableName]:
        return frozenset(self.in_lake)


class Ended:
    def __init__(self, code: int) -> None:
        self._code = code

    def start(self) -> None:
        """Do nothing: the app has already ended."""

    def ended(self) -> int:
        return self._code

    def ask_to_end(self) -> None:
        """Do nothing: the app has already ended."""

    def wait(self) -> None:
        """Do nothing: the app has already ended."""


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[TableName]:
    found: list[TableName] = []
    monkeypatch.setattr(service, "remove_tables", lambda _, tables: found.extend(sorted(tables)))
    return found


def follow(tables: Followed) -> None:
    for _ in range(8):
        tables.follow()
    tables.end()


def test_one_that_cannot_be_taken_keeps_no_other_out_and_is_not_tried_again(removed):
    source = Source()
    tables = Followed(source)
    source.tables = {A, B, BAD}
    follow(tables)
    assert tables.added == [
        "public.b,public.bad",
        "public.b",
        "public.bad",
    ]
    assert tables.taken() == {A, B}
    # BAD is tried again once it has left and come back.
    source.tables = {A, B}
    follow(tables)
    source.tables = {A, B, BAD}
    follow(tables)
    assert tables.added[3:] == ["public.bad"]


def test_unpublished_table_is_removed_once_new_table_is_added(removed):
    source = Source()
    tables = Followed(source)
    source.tables = {B}
    follow(tables)
    assert tables.added == ["public.b"]
    assert removed[0] == A


def test_the_last_table_stays(removed, caplog):
    source = Source()
    tables = Followed(source)
    source.tables = set()
    follow(tables)
    assert removed == []
    assert caplog.text.count("no table of the pipeline is in the publication any more") == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PublicationError("the publication p was dropped"), "tables are not followed: the publication p"),
        (SourceConnectionError("away"), "the publication was not looked at: away"),
    ],
)
def test_a_source_that_cannot_be_asked_is_asked_again(removed, caplog, error, says):
    source = Source()
    tables = Followed(source)
    source.tables = error
    follow(tables)
    assert says in caplog.text
    source.tables = {A, B}
    follow(tables)
    assert tables.added == ["public.b"]
