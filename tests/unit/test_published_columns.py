"""events/columns.py: what a rule hides is in no event, whatever column and table are called."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import ConfigError, DriftError, TargetError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.creek.snapshot import SnapshotRows
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.formats.json import KeyedEvents
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Partition, Relation
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from airflow_provider_pgrepl.replication.settings.publisher_sections import ColumnRules, RowFilter
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, LakeType, TableOptions
from airflow_provider_pgrepl.replication.values import typed_column
from tests.support.examples import examples
from tests.support.histories import Known, Table, histories

CHOICES = TableOptions()
SALT, USERS = b"a salt", TableName("public", "users")
FATES = ("exclude", "hash", "mask", "rename", "hash and rename", "none")


def hashed(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(SALT + text.encode()).hexdigest()


def masked(text: str | None) -> str | None:
    return None if text is None else "***"


def rules_of(fates: dict[ColumnName, str]) -> ColumnRules:
    def having(word: str) -> frozenset[ColumnName]:
        return frozenset(column for column, fate in fates.items() if word in fate)

    renamed = {column: f"{column.name} at the target" for column in having("rename")}
    return ColumnRules(having("exclude"), having("hash"), having("mask"), renamed)


@examples(200, *HealthCheck)
@given(histories(), st.data())
def test_rules_change_what_they_name_and_nothing_else(
    history: tuple[list[Table], pa.Table], data: st.DataObject
):
    tables, rows = history
    assume(len({table.record.name for table in tables}) == len(tables))
    known, options = Known(*(one.record for one in tables)), {one.record.name: one.options for one in tables}
    fates = {
        ColumnName(table.record.name, column.name): data.draw(
            st.sampled_from(("hash", "rename", "none") if column.is_identity else FATES)
        )
        for table in tables
        for column in table.record.message.columns
    }
    given = (known, options.__getitem__, TableSelection.parse(None))
    few = data.draw(st.sampled_from([0, 1 << 30]))
    try:
        wanted = KeyedEvents(*given, few=few).of(rows)
    except Exception:
        return
    found = KeyedEvents(*given, PublishedColumns(known, rules_of(fates), SALT), few=few).of(rows)
    changes = [row for row in rows.to_pylist() if row["op"] in "IUDT"]
    for event, other, row in zip(found, wanted, changes, strict=True):
        if (event.left is None) != (other.left is None):
            # NULL and JSON's null are one key as they are, and not by their hashes.
            continue
        record = known.find(row["relation_version"])
        body, expected = json.loads(event.body), json.loads(other.body)
        for side, texts in (("data", row["new"]), ("old", row["old"])):
            assert body[side] == _expected(expected[side], texts, record, fates, row)
        names = (_name(ColumnName(record.name, name), fates) for name in expected.get("unchanged", ()))
        assert body.get("unchanged", []) == [name for name in names if name is not None]
        assert {**body, "data": 0, "old": 0, "unchanged": 0, "op": 0} == {
            **expected,
            **dict.fromkeys(("data", "old", "unchanged", "op"), 0),
        }


def _name(column: ColumnName, fates: dict[ColumnName, str]) -> str | None:
    fate = fates[column]
    if "exclude" in fate:
        return None
    return f"{column.name} at the target" if "rename" in fate else column.name


def _expected(
    side: dict[str, Any] | None,
    texts: list[str | None] | None,
    record: RelationRecord,
    fates: dict[ColumnName, str],
    row: dict[str, Any],
) -> dict[str, Any] | None:
    if side is None:
        return None
    found = {}
    for index, column in enumerate(record.message.columns):
        full = ColumnName(record.name, column.name)
        name, fate = _name(full, fates), fates[full]
        if column.name not in side or name is None:
            continue
        of = row["old"] if index in (row["unchanged"] or ()) and row["old"] else texts
        assert of is not None
        found[name] = (
            hashed(of[index])
            if "hash" in fate
            else masked(of[index])
            if "mask" in fate
            else side[column.name]
        )
    return found


# --- columns and tables that are renamed, and names that are wrong ---


def users(*columns: tuple[str, int], table: TableName = USERS, keys: int = 1) -> RelationRecord:
    """Return a record of a table with text columns, each given as name and attnum."""
    made = (Column(name, attnum, 25, -1, "text", is_key=attnum <= keys) for name, attnum in columns)
    return RelationRecord.of_catalog(Relation(16_400, table, tuple(made)))


def published(record: RelationRecord, *others: RelationRecord, **rules: Any) -> dict[str, str]:
    """Return the source's column by published name, with `#` before one that is hidden."""
    columns = dict(enumerate(record.catalog.columns)) if record.catalog else {}
    given = {"exclude_columns": (), "hash_columns": (), "mask_columns": (), "rename_columns": {}, **rules}
    found = PublishedColumns(Known(record, *others), ColumnRules.parse(**given), SALT)
    return {
        one.name: ("#" if one.hide else "") + one.source.name
        for one in found.of_stream(record, columns).values()
    }


def test_a_hidden_column_stays_hidden_when_it_or_its_table_is_renamed():
    before, after = (
        users(("id", 1), ("email", 2)),
        users(("id", 1), ("mail", 2), table=TableName("crm", "people")),
    )
    rules = {"hash_columns": ("public.users.email",)}
    assert published(before, after, **rules) == {"id": "id", "email": "#email"}
    assert published(after, before, **rules) == {"id": "id", "mail": "#mail"}
    assert published(after, before, exclude_columns=("public.users.email",)) == {"id": "id"}


def test_all_columns_are_hidden_when_column_identity_is_unknown():
    known = users(("id", 1), ("email", 2), ("name", 3))
    odd = replace(users(("a", 1), ("b", 2)), catalog=None)
    columns = {
        index: Column(one.name, index + 1, 25, -1, "text") for index, one in enumerate(odd.message.columns)
    }
    rules = ColumnRules.parse((), ("public.users.email",), (), {})
    found = PublishedColumns(Known(known, odd), rules, SALT).of_stream(odd, columns)
    assert all(one.hide for one in found.values())


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"hash_columns": ("public.users.emial",)}, "emial, which the publisher's settings name, was never"),
        ({"rename_columns": {"public.users.emial": "x"}}, "emial, which"),
        ({"mask_columns": ("public.users.id",)}, "id of public.users is of its key"),
        ({"exclude_columns": ("public.users.id",)}, "id of public.users is of its key"),
        ({"rename_columns": {"public.users.email": "id"}}, "two columns of public.users are called id"),
    ],
)
def test_column_rules_incompatible_with_table_raise_drift_error(rules, says):
    with pytest.raises(DriftError, match=says):
        published(users(("id", 1), ("email", 2)), **rules)


def test_rules_of_another_table_do_not_concern_it():
    assert published(users(("id", 1)), hash_columns=("public.others.email",)) == {"id": "id"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hash_columns": ["email"]}, r"hash_columns\[0\]: 'email' is not a column's full name"),
        (
            {"hash_columns": ["a.b.c"], "mask_columns": ["a.b.c"]},
            "c is named by hash_columns and by mask",
        ),
        (
            {"exclude_columns": ["a.b.c"], "rename_columns": {"a.b.c": "d"}},
            "exclude_columns and by rename",
        ),
        ({"rename_columns": {"a.b.c": 1}}, r"rename_columns\[.a\.b\.c.\]: 1 must be a string"),
        ({"rename_columns": {"a.b.c": ""}}, "is no name of a column"),
        ({"rename_columns": {"a.b.c": "x", "a.b.d": "x"}}, "two columns of a.b are to be called 'x'"),
        ({"rename_columns": ["a.b.c"]}, "must be an object"),
        ({"rename_columns": {"a.b.c": "\ud800"}}, "half a character"),
        ({"rename_columns": {"a.b.c": "x", 'a."b".c': "y"}}, "are the same"),
    ],
)
def test_rules_that_cannot_be_are_refused(given, says):
    with pytest.raises(ConfigError, match=rf"publishers\.p.*{says}"):
        parse_publisher("shop", "p", {"target": "kafka", **given})


def test_hashed_and_renamed_goes_together():
    given = {"hash_columns": ["a.b.c"], "rename_columns": {"a.b.c": "d"}}
    assert parse_publisher("shop", "p", {"target": "kafka", **given}).column_rules.all


PARENT, PART = TableName("public", "users"), TableName("public", "users_1")


def partitioned(oid: int = 16_400, part: int = 16_401) -> RelationRecord:
    record = users(("id", 1), ("email", 2))
    assert record.catalog is not None
    catalog = replace(record.catalog, oid=oid, relkind="p", partitions=(Partition(part, PART, 1),))
    return RelationRecord.of_catalog(catalog)


def detached() -> RelationRecord:
    made = (Column("email", 1, 25, -1, "text"), Column("id", 2, 25, -1, "text", is_key=True))
    return RelationRecord.of_catalog(Relation(16_401, PART, made))


def test_rules_of_a_partitioned_table_are_missed_at_a_partition_that_was_detached():
    rules = {"hash_columns": ("public.users.email",)}
    with pytest.raises(DriftError, match=r"has settings for public\.users alone"):
        published(detached(), partitioned(), **rules)
    both = {"hash_columns": ("public.users.email", "public.users_1.email")}
    assert published(detached(), partitioned(), **both) == {"email": "#email", "id": "id"}
    assert published(detached(), partitioned()) == {"email": "email", "id": "id"}
    assert published(partitioned(), **rules) == {"id": "id", "email": "#email"}


def test_rules_of_a_table_are_missed_where_it_became_a_partition():
    with pytest.raises(DriftError, match=r"has settings for public\.users_1 alone"):
        published(partitioned(), detached(), hash_columns=("public.users_1.email",))


def test_a_row_filter_of_a_partitioned_table_is_missed_at_its_partition():
    rows = RowFilter.parse({"public.users": {"email": "a"}})
    found = PublishedColumns(Known(detached(), partitioned()), filter=rows)
    with pytest.raises(DriftError, match="alone"):
        found.of_stream(detached(), {})


# --- columns that came after the publisher began (new_columns) ---


def begun(record: RelationRecord, *others: RelationRecord, **rules: Any) -> list[str]:
    """Return the published columns of a publisher that began with attnums 1 and 2."""
    columns = dict(enumerate(record.catalog.columns)) if record.catalog else {}
    given = {"exclude_columns": (), "hash_columns": (), "mask_columns": (), "rename_columns": {}, **rules}
    known, parsed = Known(record, *others), ColumnRules.parse(**given)
    found = PublishedColumns(known, parsed, SALT, initial_columns={16_400: frozenset({1, 2})})
    return [one.name for one in found.of_stream(record, columns).values()]


FIRST = users(("id", 1), ("email", 2))
GROWN = users(("id", 1), ("email", 2), ("ssn", 3))


def test_a_column_that_no_rule_names_stops_its_table_when_it_is_new():
    assert begun(FIRST) == ["id", "email"]
    with pytest.raises(DriftError, match=r"no rule names \(new_columns\): ssn") as caught:
        begun(GROWN, FIRST)
    assert "rename_columns with its own name" in caught.value.hint
    with pytest.raises(DriftError, match=r"\(new_columns\): ssn"):
        begun(GROWN, FIRST, hash_columns=("public.users.email",))


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"exclude_columns": ("public.users.ssn",)}, ["id", "email"]),
        ({"mask_columns": ("public.users.ssn",)}, ["id", "email", "ssn"]),
        ({"rename_columns": {"public.users.ssn": "ssn"}}, ["id", "email", "ssn"]),
    ],
)
def test_a_rule_for_a_new_column_says_what_becomes_of_it(rules, names):
    assert begun(GROWN, FIRST, **rules) == names


def test_columns_are_new_by_their_attnums_and_not_by_their_names():
    renamed = users(("id", 1), ("mail", 2))
    assert begun(renamed, FIRST) == ["id", "mail"]
    with pytest.raises(DriftError, match=r"\(new_columns\): email"):
        begun(users(("id", 1), ("mail", 2), ("email", 3)), FIRST)


def test_a_column_whose_attnum_cannot_be_told_is_new():
    odd = replace(users(("a", 1), ("b", 2)), catalog=None)
    columns = {0: Column("a", 1, 25, -1, "text"), 1: Column("b", 2, 25, -1, "text")}
    found = PublishedColumns(Known(odd), initial_columns={16_400: frozenset({1, 2})})
    with pytest.raises(DriftError, match=r"\(new_columns\): a, b"):
        found.of_stream(odd, columns)


def test_a_table_that_was_made_again_is_new_as_a_whole():
    again = replace(FIRST, message=replace(FIRST.message, oid=16_500))
    with pytest.raises(DriftError, match=r"\(new_columns\): email, id"):
        begun(again, FIRST)


def test_a_snapshot_has_no_new_column_either():
    assert GROWN.catalog is not None
    known, initial_columns = Known(GROWN), {16_400: frozenset({1, 2})}
    with pytest.raises(DriftError, match=r"\(new_columns\): ssn"):
        _ = SnapshotRows(
            GROWN.catalog, CHOICES, PublishedColumns(known, initial_columns=initial_columns)
        ).schema


# --- snapshots on creek's wire ---


def snapshot_of(relation: Relation, options: TableOptions = CHOICES, **rules: Any) -> SnapshotRows:
    given = {"exclude_columns": (), "hash_columns": (), "mask_columns": (), "rename_columns": {}, **rules}
    known = Known(RelationRecord.of_catalog(relation))
    return SnapshotRows(relation, options, PublishedColumns(known, ColumnRules.parse(**given), SALT))


def test_a_snapshots_rows_are_hidden_as_those_of_the_stream():
    relation = Relation(
        16_400,
        USERS,
        (
            Column("id", 1, 23, -1, "integer", is_key=True),
            Column("age", 2, 23, -1, "integer"),
            Column("born", 3, 1082, -1, "date"),
            Column("password", 4, 25, -1, "text"),
        ),
    )
    snapshot = snapshot_of(
        relation,
        hash_columns=("public.users.id", "public.users.age"),
        mask_columns=("public.users.born",),
        exclude_columns=("public.users.password",),
        rename_columns={"public.users.id": "who"},
    )
    texts = {"id": ["7", "8"], "age": ["41", None], "born": ["2001-02-03", None], "password": ["x", None]}
    rows = pa.table(
        {
            one.name: typed_column(one, USERS, CHOICES).parse(pa.array(texts[one.name], pa.string()))
            for one in relation.columns
        }
    )
    schema = fastavro.parse_schema(dict(snapshot.schema))  # type: ignore[arg-type,call-overload]
    first, second = (
        fastavro.schemaless_reader(io.BytesIO(row), schema, None) for row in snapshot.encode(rows)
    )
    assert first == {"who": hashed("7"), "age": hashed("41"), "born": "***"}
    assert second == {"who": hashed("8"), "age": None, "born": None}


def test_a_number_whose_text_the_lake_lacks_has_no_hash_in_a_snapshot():
    relation = Relation(
        16_400, USERS, (Column("id", 1, 23, -1, "int", is_key=True), Column("n", 2, 1700, -1, "numeric"))
    )
    decimal = TableOptions(others=ColumnOptions(unconstrained_numeric=LakeType("decimal", 20, 4)))
    assert snapshot_of(relation, decimal)
    assert snapshot_of(relation, hash_columns=("public.users.n",))
    with pytest.raises(TargetError, match=r"n of public\.users is a decimal in the lake"):
        snapshot_of(relation, decimal, hash_columns=("public.users.n",))
