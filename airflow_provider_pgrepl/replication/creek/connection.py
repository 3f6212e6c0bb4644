"""The connection to the database of a copy, and the schema in which its consumers keep their places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2
import psycopg2.extensions

from airflow_provider_pgrepl.errors import ConfigError, TargetError, TargetUnavailableError

_STATE = """
CREATE SCHEMA IF NOT EXISTS _pgrepl_consumer;
CREATE TABLE IF NOT EXISTS _pgrepl_consumer.streams (
    consumer text, database text, made text NOT NULL, sequence bigint NOT NULL,
    PRIMARY KEY (consumer, database));
CREATE TABLE IF NOT EXISTS _pgrepl_consumer.tables (
    consumer text, database text, source text, target text NOT NULL,
    stamp bigint NOT NULL, change text NOT NULL, sequence bigint NOT NULL, error text NOT NULL,
    PRIMARY KEY (consumer, database, source));
ALTER TABLE _pgrepl_consumer.tables ADD COLUMN IF NOT EXISTS target_oid bigint NOT NULL DEFAULT 0;
"""
_IS_MADE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
               WHERE attrelid = to_regclass('_pgrepl_consumer.tables') AND attname = 'target_oid')
"""


def connect(dsn: str, name: str) -> psycopg2.extensions.connection:
    """Raises ConfigError, which shows nothing of the DSN, and psycopg2's errors."""
    connection: psycopg2.extensions.connection | None = None
    with suppress(psycopg2.ProgrammingError):
        connection = psycopg2.connect(dsn, application_name=name, client_encoding="UTF8")
    if connection is None:
        raise ConfigError(
            "the connection string of the copy's database cannot be read",
            "give it as postgresql://user:password@host:5432/database; what is special in a password is"
            " percent-encoded",
        )
    return connection


def make_state(cursor: Any) -> None:
    """Make the schema where it is missing, or of an earlier version. Raises TargetError without the right."""
    failed = ""
    try:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('_pgrepl_consumer'))")
        cursor.execute(_IS_MADE)
        if cursor.fetchone() == (False,):
            cursor.execute(_STATE)
    except (psycopg2.OperationalError, psycopg2.InterfaceError):
        raise
    except psycopg2.Error as error:
        failed = type(error).__name__
    if failed:
        raise TargetError(
            f"the schema _pgrepl_consumer cannot be made in the copy's database: {failed}",
            "grant CREATE on the database to the consumer's role, for its first start",
        )


@contextmanager
def answering() -> Iterator[None]:
    """Raises TargetUnavailableError for what a lost connection raises."""
    failed = ""
    try:
        yield
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        failed = type(error).__name__
    if failed:
        raise TargetUnavailableError(
            f"the database of the copy does not answer: {failed}",
            "is it there, and are host and login right? What is applied is kept, and the rest comes again",
        )
