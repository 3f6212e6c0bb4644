"""The tables of a copy: no consumer deletes rows that it has not written."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.creek.copy_database import (
    AppliedStreamPosition,
    ConsumerTableState,
    CopyDatabase,
    TableFailedError,
)
from airflow_provider_pgrepl.replication.creek.messages import Row
from airflow_provider_pgrepl.replication.creek.table_shape import ShapeColumn, TableShape
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.conftest import closing_connection
from tests.support.replicated import execute

ORDERS, DEALS, TARGET = (TableName("public", name) for name in ("orders", "deals", "copied"))
SHAPE = TableShape(
    (ShapeColumn("id", "id", "integer", True, False), ShapeColumn("v", "v", "text", False, True))
)
WHOLE = TableShape(tuple(replace(column, is_key=True, is_nullable=True) for column in SHAPE.columns))
"""The same columns where the whole row identifies a row."""


def take(dsn: str, consumer: str, source: TableName, *ids: int) -> None:
    """Take a table whole, as a consumer does at its first start."""
    with closing(CopyDatabase(dsn, consumer, "shop")) as copy:
        copy.read()
        load(copy, source, SHAPE, *({"id": number, "v": f"of {consumer}"} for number in ids))


def load(copy: CopyDatabase, source: TableName, shape: TableShape, *rows: Row) -> ConsumerTableState:
    stream = AppliedStreamPosition(datetime.now(UTC).isoformat(), 5)
    with copy.loading(source, TARGET, shape, stream) as loading:
        loading.add(rows)
        header: Any = SimpleNamespace(lsn=100, position="1:0/1:0")
        return loading.finish(header, stream, 5)


def apply(
    copy: CopyDatabase,
    table: ConsumerTableState,
    shape: TableShape,
    stream: AppliedStreamPosition = AppliedStreamPosition("made", 6),  # noqa: B008 - it is frozen
    **fields: Any,
) -> ConsumerTableState:
    given = {"id": "", "lsn": table.stamp + 1, "before": None, "after": None, "unchanged": (), **fields}
    change: Any = SimpleNamespace(sequence=6, **given)
    return copy.apply({ORDERS: table}, [(ORDERS, shape, change)], 6, stream)[ORDERS]


def ids(dsn: str) -> list[Any]:
    return [found for (found,) in asked(dsn, "select id from copied order by id")]


def asked(dsn: str, sql: str) -> list[Any]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


@pytest.mark.parametrize(("consumer", "source"), [("bi", ORDERS), ("reports", DEALS)])
def test_target_that_another_consumer_or_source_has_is_rejected(dsn, consumer, source):
    take(dsn, "reports", ORDERS, 1, 2)
    with pytest.raises(TableFailedError, match=r"holds the rows of public\.orders of shop, which"):
        take(dsn, consumer, source, 9)
    assert ids(dsn) == [1, 2]
    take(dsn, "reports", ORDERS, 3)
    assert ids(dsn) == [3]


def test_process_that_another_one_of_the_same_name_has_replaced_is_fenced(dsn):
    """While a table is behind, the position in the stream stays the same."""
    with (
        closing(CopyDatabase(dsn, "reports", "shop")) as first,
        closing(CopyDatabase(dsn, "reports", "shop")) as second,
    ):
        first.read()
        table = load(first, ORDERS, WHOLE, {"id": 1, "v": "a"})
        stream, _ = second.read()
        with pytest.raises(FencedError, match="another process of consumer reports has begun"):
            apply(first, table, WHOLE, stream, op="c", after={"id": 2, "v": "b"})
        apply(second, table, WHOLE, stream, op="c", after={"id": 2, "v": "b"})
    assert ids(dsn) == [1, 2]


def test_rows_that_no_consumer_has_written_stay(dsn):
    execute(dsn, "create table copied (id int primary key, v text)", "insert into copied values (7, 'mine')")
    with pytest.raises(TableFailedError, match="has rows that no consumer has written: nothing was changed"):
        take(dsn, "reports", ORDERS, 1)
    assert ids(dsn) == [7]
    execute(dsn, "truncate copied")
    take(dsn, "reports", ORDERS, 1)
    assert ids(dsn) == [1]


def test_table_that_was_left_out_is_known_as_the_consumers_when_it_is_named_again(dsn):
    take(dsn, "reports", ORDERS, 1)
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        copy.read()
        copy.keep_only([])
        assert copy.read()[1] == {}
    with pytest.raises(TableFailedError, match="consumer reports keeps there"):
        take(dsn, "bi", DEALS, 9)
    take(dsn, "reports", ORDERS, 2)
    assert ids(dsn) == [2]


def test_insert_without_all_values_stops_its_table_until_it_is_copied_again(dsn):
    """An UPDATE that moved a row into a row filter is sent so: NULL would be wrong."""
    take(dsn, "reports", ORDERS, 1)
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        stream, kept = copy.read()
        change: Any = SimpleNamespace(
            op="c", id="", lsn=200, before=None, after={"id": 2, "v": None}, unchanged=("v",), sequence=6
        )
        with pytest.raises(TableFailedError, match=r"moved into .* row filter, .* did not send v"):
            copy.apply(kept, [(ORDERS, SHAPE, change)], 6, stream)
    assert ids(dsn) == [1]


@pytest.mark.parametrize("leaves", ["drop table copied", "alter table copied rename to kept"])
def test_rows_of_another_table_of_the_targets_name_stay(dsn, leaves):
    take(dsn, "reports", ORDERS, 1)
    made = "create table copied (id int primary key, v text)"
    execute(dsn, leaves, made, "insert into copied values (7, 'mine'), (1, 'mine')")
    with pytest.raises(TableFailedError, match=r"is another table .* nothing was changed"):
        take(dsn, "reports", ORDERS, 2)
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        stream, kept = copy.read()
        change: Any = SimpleNamespace(op="t", id="", lsn=200)
        with pytest.raises(TableFailedError, match="is another table"):
            copy.apply(kept, [(ORDERS, SHAPE, change)], 6, stream)
    assert ids(dsn) == [1, 7]
    execute(dsn, "truncate copied")
    take(dsn, "reports", ORDERS, 2)
    take(dsn, "reports", ORDERS, 3)
    assert ids(dsn) == [3]


@pytest.mark.parametrize("leaves", ["drop table copied", "alter table copied rename to kept"])
def test_rows_of_another_table_stay_in_the_run_that_loaded_the_first_one(dsn, leaves):
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        copy.read()
        table = load(copy, ORDERS, SHAPE, {"id": 1, "v": "a"})
        table = apply(copy, table, SHAPE, op="c", after={"id": 2, "v": "b"})
        execute(dsn, leaves, SHAPE.create_sql(TARGET), "insert into copied values (7, 'mine')")
        with pytest.raises(TableFailedError, match=r"is another table .* nothing was changed"):
            apply(copy, table, SHAPE, op="t")
        copy.write_failed(table)
        assert copy.read()[1] == {ORDERS: table}
    assert ids(dsn) == [7]


@pytest.mark.parametrize("kind", ["character(3)", "bit(3)", "character(3)[]", "bit(3)[]", "varchar(3)"])
def test_values_of_a_target_with_a_length_are_whole(dsn, kind):
    execute(dsn, f"create table copied (id {kind} primary key, v text)")
    shape = TableShape((ShapeColumn("id", "id", "text", True, False), SHAPE.columns[1]))
    first, second, third = (["101"], ["100"], ["110"]) if kind.endswith("[]") else ("101", "100", "110")
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        copy.read()
        table = load(copy, ORDERS, shape, {"id": first, "v": None}, {"id": second, "v": None})
        table = apply(copy, table, shape, op="u_pk", before={"id": second}, after={"id": third, "v": None})
        apply(copy, table, shape, op="d", before={"id": first})
    assert asked(dsn, "select id::text from copied") == [("{110}" if kind.endswith("[]") else "110",)]


def test_deletion_without_a_key_leaves_the_rows_of_other_partitions(dsn):
    parts = (f"create table part_{n} partition of copied for values in ({n})" for n in (1, 2, 3))
    execute(dsn, "create table copied (id int, v text) partition by list (id)", *parts)
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        copy.read()
        table = load(copy, ORDERS, WHOLE, *({"id": number, "v": "a"} for number in (1, 2, 3)))
        apply(copy, table, WHOLE, op="d", before={"id": 2, "v": "a"})
    assert ids(dsn) == [1, 3]


def test_update_of_a_row_whose_columns_are_all_of_the_identitys_index_leaves_one_row(dsn):
    """The schema is that of REPLICA IDENTITY FULL; the update has the key, which it left, as its old row."""
    row = {"id": 1, "v": "a"}
    with closing(CopyDatabase(dsn, "reports", "shop")) as copy:
        copy.read()
        table = load(copy, ORDERS, WHOLE, row)
        apply(copy, table, WHOLE, op="u", before=row, after=row)
    assert ids(dsn) == [1]


def test_numbers_of_an_array_have_the_scale_that_they_have_at_the_source(dsn):
    items = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
    field = {"name": "n", "type": {"type": "array", "items": items}, "pgKey": False, "pgType": "_numeric"}
    shape = TableShape.parse(json.dumps({"name": "orders", "type": "record", "fields": [field]}))
    execute(dsn, shape.create_sql(TARGET))
    kind = "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = 'copied'::regclass"
    assert ("numeric(6,2)[]",) in asked(dsn, kind)


def test_view_is_no_target(dsn):
    """It may show no row of a table that has some, and take what is deleted there."""
    view = "create view copied as select id, v from base where active"
    execute(dsn, "create table base (id int primary key, v text, active bool default false)", view)
    with pytest.raises(TableFailedError, match=r"public\.copied is not a table"):
        take(dsn, "reports", ORDERS, 1)


def test_state_of_an_earlier_version_records_the_target_when_it_writes(dsn):
    take(dsn, "reports", ORDERS, 1)
    execute(
        dsn,
        "alter table _pgrepl_consumer.tables drop column target_oid, drop column missing_after",
        "alter table _pgrepl_consumer.streams drop column run",
    )
    take(dsn, "reports", ORDERS, 2)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select target_oid = 'copied'::regclass::oid::bigint from _pgrepl_consumer.tables")
        assert cursor.fetchall() == [(True,)]
