"""PostgreSQL's error codes, and the error classes that decide about a retry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    PgReplError,
    PrivilegeError,
    Retry,
    ServerSettingError,
    SourceConnectionError,
    SourceError,
)
from airflow_provider_pgrepl.replication.source.server_errors import translate

LOCKS = "You might need to increase max_locks_per_transaction."


def translated(code: str, hint: str = "") -> PgReplError:
    error: Any = SimpleNamespace(
        pgcode=code,
        diag=SimpleNamespace(
            message_primary="it failed", message_hint=hint, source_function="", source_file=""
        ),
    )
    return translate(error, "reading")


@pytest.mark.parametrize(
    ("code", "hint", "kind"),
    [
        ("40001", "", BusyError),  # serialization_failure, also a conflict with recovery
        ("40P01", "", BusyError),  # deadlock_detected
        ("08006", "", SourceConnectionError),  # connection_failure
        ("53000", "", SourceConnectionError),  # insufficient_resources
        ("53100", "", SourceConnectionError),  # disk_full
        ("53200", "", SourceConnectionError),  # out_of_memory, temporary
        ("53300", "", SourceConnectionError),  # too_many_connections
        ("57014", "", SourceConnectionError),  # query_canceled
        ("57P01", "", SourceConnectionError),  # admin_shutdown
        ("58030", "", SourceConnectionError),  # io_error
        ("53200", LOCKS, ServerSettingError),  # out_of_memory, of the lock table
        ("53400", "", ServerSettingError),  # configuration_limit_exceeded
        ("42501", "", PrivilegeError),  # insufficient_privilege
        ("0A000", "", SourceError),  # feature_not_supported
        ("22P02", "", SourceError),  # invalid_text_representation
        ("25006", "", SourceError),  # read_only_sql_transaction
        ("28P01", "", SourceError),  # invalid_password, of a running session
        ("42P01", "", SourceError),  # undefined_table
        ("55000", "", SourceError),  # object_not_in_prerequisite_state
        ("XX000", "", SourceError),  # internal_error
    ],
)
def test_a_retry_is_for_what_passes_by_itself(code: str, hint: str, kind: type[PgReplError]) -> None:
    error = translated(code, hint)
    assert type(error) is kind
    assert (error.retry is Retry.TIMED) == (kind in (SourceConnectionError, BusyError))
    assert f"SQLSTATE {code}" in error.message


def test_the_hint_of_the_server_is_kept_unless_it_may_quote_a_value() -> None:
    assert translated("55000", "Do this.").hint == "Do this."
    assert translated("53200", LOCKS).hint == LOCKS
    assert translated("P0001", "The value is secret.").hint == ""
    assert translated("22P02", "The value is secret.").hint == ""
