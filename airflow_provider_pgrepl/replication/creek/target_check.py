"""Checks that a target is the table that a consumer has filled: nothing is deleted from another one.

A name is no evidence: the owner may have dropped or renamed the table, and made another one of that name.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_pgrepl.replication.creek.failures import table_failed
from airflow_provider_pgrepl.replication.creek.kept_table import KeptTable
from airflow_provider_pgrepl.replication.postgres.names import TableName

_TABLES = ("r", "p")
_FOUND = "SELECT oid::bigint, relkind::text FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass(%s)"
_OTHERS = """
SELECT consumer, database, source FROM _pgrepl_consumer.tables
WHERE target = %s AND (consumer, database, source) <> (%s, %s, %s) ORDER BY 1, 2, 3
"""
_OWN = """
SELECT target_oid FROM _pgrepl_consumer.tables
WHERE target = %s AND (consumer, database, source) = (%s, %s, %s)
"""


def check_target(cursor: Any, whose: tuple[str, str], source: TableName, target: TableName) -> None:
    """Raise TableFailedError for a target that another consumer or source keeps, that is no table, or that
    has rows which this consumer has not written.

    Of two that take one target at once, the second waits for the first to be recorded or to fail.
    """
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"_pgrepl_consumer {target}",))
    of = (str(target), *whose, str(source))
    cursor.execute(_OTHERS, of)
    if (found := cursor.fetchone()) is not None:
        consumer, database, other = found
        raise table_failed(
            source,
            f"{target} holds the rows of {other} of {database}, which consumer {consumer} keeps there",
            "give each source a target of its own; if that consumer is given up, delete its row from"
            " _pgrepl_consumer.tables",
        )
    cursor.execute(_FOUND, (target.sql,))
    if (found := cursor.fetchone()) is None:
        return
    oid, kind = found
    if kind not in _TABLES:
        raise table_failed(
            source, f"{target} is not a table: nothing was changed", "name another target, or rename that one"
        )
    cursor.execute(_OWN, of)
    recorded = cursor.fetchone()
    cursor.execute(f"SELECT EXISTS (SELECT FROM {target.sql})")  # noqa: S608 - a quoted name
    (has_rows,) = cursor.fetchone()
    if has_rows and recorded is None:
        raise table_failed(
            source,
            f"{target} has rows that no consumer has written: nothing was changed",
            f"name another target; or empty it (TRUNCATE {target}) if nobody needs its rows",
        )
    if has_rows and recorded is not None:
        _check_oid(source, target, recorded[0], oid)


def check_kept(cursor: Any, table: KeptTable) -> None:
    """Raise TableFailedError if a table of the target's name is another one than was filled."""
    cursor.execute(_FOUND, (table.target.sql,))
    if (found := cursor.fetchone()) is not None:
        _check_oid(table.source, table.target, table.target_oid, found[0])


def _check_oid(source: TableName, target: TableName, recorded: int, oid: int) -> None:
    # 0: an earlier version has not recorded it.
    if recorded in (0, oid):
        return
    raise table_failed(
        source,
        f"{target} is another table (oid {oid}) than the one that the consumer has filled (oid {recorded}),"
        " which was dropped or renamed: nothing was changed",
        f"name another target, or rename that table. If nobody needs its rows, TRUNCATE {target} and take it"
        f" whole: --resnapshot {target}. If the consumer filled it, as after a restore, set"
        f" its target_oid in _pgrepl_consumer.tables to {oid}",
    )
