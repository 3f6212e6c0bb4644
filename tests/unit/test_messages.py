"""pgoutput/messages.py: Relation, Truncate and Message as PostgreSQL sends them."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.pgoutput.messages import (
    LogicalMessage,
    RelationMessage,
    TruncateMessage,
    WireColumn,
    parse_message,
    parse_relation,
    parse_truncate,
    without_content,
)
from tests.support import wire_bytes as wire


def body(message: bytes) -> bytes:
    return message[25:]


def test_a_relation_names_its_columns_types_and_identity() -> None:
    sent = wire.put_relation(
        2**32 - 1, "Größe", 'a"b', [("id", 20, -1, True), ("", 1700, 786438, False)], "f"
    )
    assert parse_relation(body(sent)) == RelationMessage(
        2**32 - 1, "Größe", 'a"b', "f", (WireColumn("id", 20, -1, True), WireColumn("", 1700, 786438, False))
    )


def test_an_empty_schema_stands_for_pg_catalog() -> None:
    assert parse_relation(body(wire.put_relation(1, "", "t", []))).schema == "pg_catalog"


@pytest.mark.parametrize(
    ("options", "cascade", "restart"),
    [(0, False, False), (1, True, False), (2, False, True), (3, True, True)],
)
def test_a_truncate_names_its_tables_and_options(options: int, cascade: bool, restart: bool) -> None:
    assert parse_truncate(body(wire.put_truncate([7, 9], options))) == TruncateMessage(
        (7, 9), cascade, restart
    )


@pytest.mark.parametrize("transactional", [True, False])
def test_a_message_is_prefix_and_bytes(transactional: bool) -> None:
    sent = wire.put_message(2**40, "präfix", b"\x00\xff", transactional=transactional)
    assert parse_message(body(sent)) == LogicalMessage(transactional, 2**40, "präfix", b"\x00\xff")


@pytest.mark.parametrize(
    ("parse", "data", "says"),
    [
        (parse_relation, b"R\0\0\0\1public", "inside a name"),
        (parse_relation, b"R\0\0\0\1\xff\0t\0d\0\0", "not UTF-8"),
        (parse_relation, b"R\0\0\0\1s\0t\0d\0\2", "inside a name|too early"),
        (parse_truncate, b"T\xff\xff\xff\xff\0\0\0\0\1", "too early"),
        (parse_truncate, b"T\0\0\0\0\0x", "after its last field"),
        (parse_message, b"M\0\0\0\0\0\0\0\0\1p\0\xff\xff\xff\xffx", "too early"),
    ],
)
def test_broken_messages_are_refused(parse: object, data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        parse(data)


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 10])
def test_a_content_is_left_out_beyond_a_size(content: bytes) -> None:
    message = memoryview(wire.put_message(80, "ü p", content, transactional=False))
    assert without_content(message, 25, len(content)) is message
    if content:
        short = bytes(without_content(message, 25, len(content) - 1))
        found = parse_message(body(short))
        assert found == LogicalMessage(False, 80, "ü p", b"", left_out=len(content))


def test_removing_message_content_leaves_large_insert_unchanged() -> None:
    row = memoryview(wire.put_insert(1, ["x" * 100]))
    assert without_content(row, 25, 1) is row


@pytest.mark.parametrize("cut", range(25, 42))
def test_a_message_that_ends_too_early_is_refused_or_left_to_who_parses_it(cut: int) -> None:
    message = memoryview(wire.put_message(80, "prefix", b"content", transactional=True))[: cut + 1]
    with pytest.raises(WireError):
        parse_message(body(bytes(without_content(message, 25, 1))))
