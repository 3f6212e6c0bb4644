"""postgres/relation.py: names as people, SQL and the lake write them; a relation's text and version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from tests.support.examples import examples

NAMES = st.text(st.sampled_from('aZ0_ ."%/*ü漢-\\+U&\n\r\t\x1b\x7f\u202e\U000e0001'), min_size=1, max_size=8)
RELATION = Relation(
    7,
    TableName("Sales", 'a"b'),
    (Column("id", 1, 20, -1, "bigint", is_key=True), Column("ü", 2, 25, -1, "text", xmin=5)),
)


@examples(100)
@given(NAMES, NAMES)
def test_a_name_reads_what_it_writes(schema: str, name: str) -> None:
    table = TableName(schema, name)
    assert TableName.parse(str(table)) == table
    assert TableName.parse(table.sql) == table


@examples(100)
@given(NAMES, NAMES)
def test_a_name_that_is_shown_has_nothing_that_a_terminal_obeys(schema: str, name: str) -> None:
    assert str(TableName(schema, name)).isprintable()


def test_unprintable_table_name_is_written_as_unicode_escaped_identifier() -> None:
    assert str(TableName("public", "two\nlines\\")) == 'public.U&"two\\000Alines\\\\"'
    assert str(TableName("public", "\U000e0001")) == 'public.U&"\\+0E0001"'


@examples(100)
@given(st.lists(st.tuples(NAMES, NAMES), max_size=5, unique=True))
def test_every_table_has_a_path_of_its_own_apart_from_ours(tables: list[tuple[str, str]]) -> None:
    paths = [TableName(*table).path for table in tables]
    assert len(set(paths)) == len(paths)
    for path in paths:
        schema, name = path.split("/")
        assert schema[0] not in "._"
        assert name[0] not in "._"


def test_names_are_quoted_only_where_they_must_be() -> None:
    assert str(TableName("public", "orders")) == "public.orders"
    assert str(TableName("Public", 'o"x')) == '"Public"."o""x"'
    assert TableName("public", "order").sql == '"public"."order"'


@pytest.mark.parametrize("text", ["", "orders", "a.b.c", ".b", "a.", '"a.b', 'a."b', '""."b"', 'a"b.c'])
def test_parsing_unqualified_or_malformed_table_name_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a schema-qualified table name"):
        TableName.parse(text)


def test_a_relation_survives_its_json() -> None:
    again = Relation.from_json(RELATION.to_json())
    assert again == RELATION
    assert again.version == RELATION.version


def test_any_difference_makes_another_version() -> None:
    others = [
        replace(RELATION, oid=8),
        replace(RELATION, relfilenode=1),
        replace(RELATION, membership_xmin=1),
        replace(RELATION, columns=RELATION.columns[:1]),
        replace(RELATION, columns=RELATION.columns[::-1]),
        replace(RELATION, columns=(replace(RELATION.columns[0], xmin=9), RELATION.columns[1])),
    ]
    versions = {relation.version for relation in [RELATION, *others]}
    assert len(versions) == len(others) + 1
    assert all(0 < version < 2**63 for version in versions)
