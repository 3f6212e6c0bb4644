"""source/server_errors.py: what is said of PostgreSQL's errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_provider_pgrepl.errors import BusyError, Retry, TableSnapshotError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import _refused
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, _failed
from airflow_provider_pgrepl.replication.source.server_errors import describe, translate

SECRET = "ann@example.com"


class ServerError(Exception):
    """An error as psycopg2 raises it."""

    def __init__(self, code: str, message: str, raised_by: str = "") -> None:
        super().__init__(message)
        self.pgcode = code
        self.diag = SimpleNamespace(
            message_primary=message, message_hint=message, source_function=raised_by, source_file="x.c"
        )


@pytest.mark.parametrize("code", ["22P02", "23505", "23514", "P0001", "44000", "CU001"])
def test_error_of_a_class_that_quotes_values_is_described_by_its_code_alone(code: str) -> None:
    assert describe(ServerError(code, f"Key (mail)=({SECRET})")) == f"ServerError (SQLSTATE {code})"


@pytest.mark.parametrize("code", ["42P01", "55P03", "57014", "08006"])
def test_error_that_a_function_raises_under_a_code_of_the_server_shows_no_text(code: str) -> None:
    error = ServerError(code, f"no address of {SECRET}", "exec_stmt_raise")
    assert describe(error) == f"ServerError (SQLSTATE {code})"
    assert SECRET not in repr(translate(error, "copying")) + translate(error, "copying").hint


def test_error_of_another_class_is_described_by_its_message() -> None:
    assert describe(ServerError("42P01", 'relation "t" does not exist')) == (
        'relation "t" does not exist (SQLSTATE 42P01)'
    )


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_rollback_for_another_transaction_becomes_retryable_error(code: str) -> None:
    error = ServerError(code, "canceling statement due to conflict with recovery")
    general = translate(error, "asking")
    assert isinstance(general, BusyError)
    assert general.retry is Retry.TIMED
    of_copy = _failed(error, CopyRange(1, TableName("public", "t"), "COPY t TO STDOUT", 1))
    assert isinstance(of_copy, TableSnapshotError)
    assert "hot_standby_feedback" in of_copy.hint


def test_refused_connection_does_not_repeat_the_password() -> None:
    """libpq quotes parts of a connection string that it could not use."""
    error = _refused("host=db user=me password=hunter22", 'invalid value "hunter22" of an option')
    assert "hunter22" not in f"{error.message} {error.hint}"
    assert 'invalid value "***" of an option' in error.message
