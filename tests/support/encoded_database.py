"""Databases in other encodings than UTF-8, and rows that no client can be sent as UTF-8."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from demo.postgres import Server
from tests.conftest import closing_connection, drop_slots
from tests.support.replicated import execute

NOT_UTF8 = {"SQL_ASCII": "Köln".encode("latin-1"), "WIN1252": b"x\x81y"}
"""A text for each encoding that a database takes and the server cannot convert; SQLSTATE 22021 and 22P05."""


@contextlib.contextmanager
def encoded_database(server: Server, encoding: str) -> Iterator[str]:
    """The DSN of a database of this encoding, with a table `t(a int primary key, b text)`."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    execute(
        server.dsn(),
        f"create database {name} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'",
    )
    dsn = server.dsn(name)
    execute(dsn, "create table t(a int primary key, b text)")
    yield dsn
    with closing_connection(server.dsn()) as connection, connection.cursor() as cursor:
        drop_slots(cursor, name)
    execute(server.dsn(), f"drop database {name} with (force)")


def insert_bytes(dsn: str, value: bytes, key: int = 1) -> None:
    """Insert a text as the database's own encoding has it."""
    with closing_connection(dsn) as connection:
        connection.set_client_encoding(connection.info.parameter_status("server_encoding"))
        connection.cursor().execute(b"insert into t values (%d, '%b')" % (key, value))
