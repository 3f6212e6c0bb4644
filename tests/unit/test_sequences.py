"""Recorded values of sequences: which rows follow, what is said about them, and the printed SQL."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.sequences import (
    RecordedSequences,
    merge_values,
    to_json,
    to_sql,
    to_text,
)
from airflow_provider_pgrepl.replication.lake.sequences import RecordedValue
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.sequences import (
    Sequence,
    SequenceReading,
    SequenceValue,
)

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def value(name: str, last: int, *, is_called: bool = True, increment: int = 1) -> SequenceValue:
    return SequenceValue(Sequence(TableName("public", name), None, "bigint", increment), last, is_called)


def recorded(one: SequenceValue, epoch: int = 1, lsn: int = 10) -> RecordedValue:
    return RecordedValue(one, epoch, LSN(lsn), NOW)


def merged(before: SequenceValue, now: SequenceValue, *, epoch_before: int) -> SequenceValue:
    name = now.sequence.name
    rows = merge_values(SequenceReading({name: now}), {name: recorded(before, epoch_before)}, 2, LSN(5), NOW)
    return rows[0].value


@pytest.mark.parametrize(
    ("before", "now", "is_kept"),
    [
        (value("s", 5), value("s", 4), True),
        (value("s", 5), value("s", 5), False),
        (value("s", 5), value("s", 5, is_called=False), True),
        (value("s", 5, is_called=False), value("s", 5), False),
        (value("s", -5, increment=-1), value("s", -4, increment=-1), True),
        (value("s", -5, increment=-1), value("s", 1), False),
        (value("s", 5), value("s", -1, increment=-1), False),
        (value("s", -5, increment=-1), value("s", -6, increment=-1), False),
    ],
)
def test_value_of_an_earlier_epoch_is_kept_if_the_source_is_before_it(before, now, is_kept):
    assert merged(before, now, epoch_before=1) == (before if is_kept else now)
    assert merged(before, now, epoch_before=2) == now


def test_sequence_that_was_not_read_keeps_its_row_and_a_dropped_one_loses_it():
    before = {one.sequence.name: recorded(one) for one in (value("gone", 1), value("locked", 2))}
    locked = TableName("public", "locked")
    rows = merge_values(SequenceReading({}, {locked: "it is locked"}), before, 1, LSN(20), NOW)
    assert rows == [before[locked]]


@pytest.mark.parametrize(
    ("schema", "name", "literal", "identifier"),
    [
        ("public", "plain", """'"public"."plain"'""", '"public"."plain"'),
        ("S", "it's", """'"S"."it''s"'""", '"S"."it\'s"'),
        ("a.b", 'double"', '\'"a.b"."double"""\'', '"a.b"."double"""'),
        ("s", "back\\slash", """E'"s"."back\\\\slash"'""", '"s"."back\\slash"'),
        ("s", "two\nlines", """E'"s"."two\\u000Alines"'""", '"s".U&"two\\000Alines"'),
        ("s", "kä𝄞", """E'"s"."k\\u00E4\\U0001D11E"'""", '"s".U&"k\\00E4\\+01D11E"'),
    ],
)
def test_names_in_sql_have_only_ascii_and_mean_the_same_in_every_session(schema, name, literal, identifier):
    one = SequenceValue(Sequence(TableName(schema, name), None, "bigint", 1), 7, False)
    *comments, line = to_sql(RecordedSequences([recorded(one)], 1, LSN(10))).split("\n")
    assert all(comment.startswith("-- ") for comment in comments)
    assert line == (
        f"begin; select pg_catalog.pg_sequence_last_value({literal});"
        f" select pg_catalog.setval({literal}, 7, false) from {identifier}"
        " where (last_value, is_called) < (7, false); commit;"
    )


def test_value_from_before_the_last_point_is_named_with_its_age():
    found = RecordedSequences([recorded(value("s", 7), lsn=10), recorded(value("t", 8), lsn=20)], 1, LSN(20))
    text = to_text(found, NOW + timedelta(minutes=3))
    assert "2 sequences, valid for all transactions up to 0/A of epoch 1, read 3 min ago" in text
    assert "public.s: recorded at 0/A, before the last consistent point 0/14: " in text
    assert "public.t: " not in text
    assert RecordedSequences([recorded(value("s", 7), lsn=20)], 1, LSN(20)).problem == ""


def test_values_of_an_earlier_epoch_hide_neither_late_ones_nor_those_without_a_value():
    values = [recorded(value("former", 7), epoch=1, lsn=90), recorded(value("late", 8), epoch=2, lsn=10)]
    unread = {TableName("public", "locked"): "role r may not read it"}
    found = RecordedSequences(values, 2, LSN(20), unread)
    former, late, without = found.problems
    assert former.startswith("public.former: recorded in an earlier epoch. The present source is before this")
    assert "or its value could not be read there" in former
    assert late.startswith("public.late: recorded at 0/A, before the last consistent point 0/14")
    assert without == "no value is recorded of public.locked (role r may not read it)"
    assert found.problem == f"{former}. {late}"
    for text in (to_text(found, NOW), to_sql(found)):
        assert all(problem in text for problem in found.problems)
    assert json.loads(to_json(found))["unread"] == [
        {"schema": "public", "sequence": "locked", "reason": "role r may not read it"}
    ]


def test_long_lists_of_names_are_cut():
    values = [recorded(value(f"s{number:02}", 7)) for number in range(14)]
    problem = RecordedSequences(values, 2, None).problem
    assert "public.s09 and 4 more: recorded in an earlier epoch" in problem


def test_sequences_need_lake_tables():
    with pytest.raises(ConfigError, match="sequences: they are recorded at consistent points"):
        Pipeline(name="p", lake="/lake", tables=("public.t",), sequences=True, lake_tables="none")
