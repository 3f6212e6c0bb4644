"""The sequences of a source whose values the lake records, and their values.

A sequence's value is read by its OID: a name may lead to another object a moment later, and planning a query
on that object could run code of its owner. PostgreSQL 18 has `pg_get_sequence_data`. Earlier versions have
`pg_sequence_last_value`, which returns NULL for a sequence that was not used yet: the value that such a
sequence begins with can only be selected from it.

A sequence's row has no older version for older snapshots, and no rollback restores it: a read returns every
value that `nextval` has returned before, in open and failed transactions as well.
https://www.postgresql.org/docs/current/functions-sequence.html

Every 32 values `nextval` writes a record to the WAL, of the value 32 calls ahead (SEQ_LOG_VALS in
src/backend/commands/sequence.c). A standby, and a server after a crash, therefore has a value up to 32 calls
ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import psycopg2.errors

from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName, show_quoted
from airflow_provider_pgrepl.replication.source.connection import Connection, one_moment, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from .owner_code import with_fixed_places

_GETS_DATA_BY_OID = 180_000
_AT_ONCE = 100
"""Sequences read in one transaction. `pg_sequence_last_value` locks each until its end, and the server's
table of locks is small: max_locks_per_transaction times max_connections, 6,400 by default."""
_LOCK_WAIT_MS = 200
_NEXT_LOCK_WAIT_MS = 1
"""Wait for a lock after the reading has waited for one in vain. 0 would mean to wait without a limit."""

# Owned by a column: deptype "a" for serial and OWNED BY, "i" for identity. Used by a default: deptype "n"
# from the default to the sequence. https://www.postgresql.org/docs/current/catalog-pg-depend.html
_SEQUENCES = """
WITH RECURSIVE tables (oid) AS (
    (SELECT oid FROM pg_catalog.unnest(%(oids)s::oid[]) AS given (oid)
    UNION
    SELECT c.oid
    FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::name[]), pg_catalog.unnest(%(names)s::name[]))
        AS given (schema, name)
        JOIN pg_catalog.pg_namespace n ON n.nspname = given.schema
        JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = given.name)
    UNION
    SELECT i.inhrelid FROM tables t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
), owners (sequence, relation, attnum) AS (
    SELECT d.objid, d.refobjid, d.refobjsubid FROM pg_catalog.pg_depend d
    WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.refclassid = 'pg_catalog.pg_class'::regclass
        AND d.objsubid = 0 AND d.refobjsubid > 0 AND d.deptype IN ('a', 'i')
        AND d.objid IN (SELECT seqrelid FROM pg_catalog.pg_sequence)
), used (sequence, relation, attnum, by_default) AS (
    SELECT sequence, relation, attnum, false FROM owners WHERE relation IN (SELECT oid FROM tables)
    UNION ALL
    SELECT d.refobjid, a.adrelid, a.adnum, true
    FROM pg_catalog.pg_attrdef a JOIN pg_catalog.pg_depend d
        ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = a.oid
        AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype = 'n'
    WHERE a.adrelid IN (SELECT oid FROM tables)
)
SELECT DISTINCT ON (n.nspname, c.relname)
    c.oid::bigint, n.nspname, c.relname, tn.nspname, tc.relname, col.attname,
    pg_catalog.format_type(s.seqtypid, NULL), s.seqincrement,
    pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_sequence_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_sequence s
    JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid AND c.relpersistence = 'p'
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN used u ON u.sequence = c.oid
    LEFT JOIN pg_catalog.pg_class tc ON tc.oid = u.relation
    LEFT JOIN pg_catalog.pg_namespace tn ON tn.oid = tc.relnamespace
    LEFT JOIN pg_catalog.pg_attribute col ON col.attrelid = u.relation AND col.attnum = u.attnum
WHERE u.sequence IS NOT NULL OR NOT (
    n.nspname IN ('pg_catalog', 'information_schema', '_pgrepl')
    OR c.oid IN (SELECT sequence FROM owners)
    OR EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
        AND d.objid = c.oid AND d.deptype = 'e')
)
ORDER BY n.nspname, c.relname, u.by_default, tn.nspname, tc.relname, u.attnum
"""
_DATA = """
SELECT given.oid::bigint, read.last_value, read.is_called FROM pg_catalog.unnest(%s::oid[]) AS given (oid),
    LATERAL pg_catalog.pg_get_sequence_data(given.oid::regclass) AS read (last_value, is_called)
"""
_LAST_VALUES = """
SELECT oid::bigint, pg_catalog.pg_sequence_last_value(oid) FROM pg_catalog.unnest(%s::oid[]) AS given (oid)
"""
_VERIFIED_NAMES = """
SELECT c.oid::bigint, n.nspname, c.relname
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::oid[]) AND c.relkind = 'S'
    AND pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', n.nspname, c.relname)) = c.oid
"""
_LOCKED = """
SELECT l.relation::bigint FROM pg_catalog.pg_locks l
    JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = pg_catalog.current_database()
WHERE l.locktype = 'relation' AND l.relation = ANY (%s::oid[]) AND l.pid <> pg_catalog.pg_backend_pid()
    AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
_CHANGED_MEANWHILE = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.InsufficientPrivilege,
    psycopg2.errors.UndefinedTable,
    psycopg2.errors.InternalError_,  # a dropped relation, up to PostgreSQL 16
)


@dataclass(frozen=True)
class Sequence:
    """A sequence: its name, the column that uses it, its type as in SQL, and its increment.

    `column`: the column that owns it or, without an owner, the first one whose default uses it. None if no
    table of the pipeline uses it.
    """

    name: TableName
    column: ColumnName | None
    data_type: str
    increment: int


@dataclass(frozen=True)
class SequenceValue:
    """The value of a sequence: `nextval` returned `last_value` last or, if not `is_called`, returns it
    next."""

    sequence: Sequence
    last_value: int
    is_called: bool

    def is_ahead_of(self, other: SequenceValue) -> bool:
        """Return True if this value comes later. False if the sequences run in different directions."""
        is_up = self.sequence.increment > 0
        if is_up != (other.sequence.increment > 0):
            return False
        sign = 1 if is_up else -1
        return (sign * self.last_value, self.is_called) > (sign * other.last_value, other.is_called)


@dataclass(frozen=True)
class SequenceReading:
    """The values of a source's sequences, by name, and for each sequence without one the reason, as a
    clause."""

    values: Mapping[TableName, SequenceValue] = field(default_factory=dict)
    unread: Mapping[TableName, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Listed:
    oid: int
    sequence: Sequence
    is_readable: bool


def refused_sequences(
    connection: Connection, table_oids: Collection[int], table_names: Collection[TableName] = ()
) -> dict[TableName, str]:
    """Return the sequences of `read_sequences` that the current role may not read, with the GRANT for each.

    Raises SourceError.
    """
    with source_errors("listing the sequences"):
        listed = _list(connection, table_oids, table_names)
        role = row(connection, "SELECT pg_catalog.quote_ident(current_user)")[0]
    return {one.sequence.name: _grant(one, role) for one in listed if not one.is_readable}


def read_sequences(
    connection: Connection,
    table_oids: Collection[int],
    table_names: Collection[TableName] = (),
    *,
    trusts_owners: bool,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SequenceReading:
    """Read the values of the sequences that may have numbered rows of these tables.

    These are the permanent sequences that a column of the tables, or of their partitions and children, owns
    or uses in its default, and those that no column of any table owns, because applications call them by
    name. The latter exclude those of extensions. Waits once up to 0.2 s for a lock of another session on a
    sequence.

    :param table_oids: the recorded OIDs of the pipeline's tables
    :param table_names: their names: a table that was created again has another OID
    :param trusts_owners: the setting `trust_table_owners`
    :param is_stopped: asked before each 100 sequences. If it returns True, the others are not read
    :raises SourceError:
    """
    with source_errors("reading the sequences"):
        by_oid = {one.oid: one for one in _list(connection, table_oids, table_names)}
        readable = [oid for oid, one in by_oid.items() if one.is_readable]
        found: dict[int, tuple[int, bool] | None] = {}
        reader = _Reader(connection, trusts_owners)
        for begin in range(0, len(readable), _AT_ONCE):
            if is_stopped():
                break
            found |= reader.read(readable[begin : begin + _AT_ONCE])
        role = row(connection, "SELECT pg_catalog.quote_ident(current_user)")[0]
    values = {
        by_oid[oid].sequence.name: SequenceValue(by_oid[oid].sequence, *value)
        for oid, value in found.items()
        if value is not None
    }
    unread = {
        one.sequence.name: _reason(one, found, role)
        for one in by_oid.values()
        if one.sequence.name not in values
    }
    return SequenceReading(values, unread)


def _list(
    connection: Connection, table_oids: Collection[int], table_names: Collection[TableName]
) -> list[_Listed]:
    given = {
        "oids": sorted(table_oids),
        "schemas": [name.schema for name in table_names],
        "names": [name.name for name in table_names],
    }
    return [
        _Listed(
            oid,
            Sequence(
                TableName(schema, name),
                None if table is None else ColumnName(TableName(table_schema, table), column),
                data_type,
                increment,
            ),
            is_readable,
        )
        for oid, schema, name, table_schema, table, column, data_type, increment, is_readable in rows(
            connection, _SEQUENCES, given
        )
    ]


def _grant(one: _Listed, role: str) -> str:
    sequence = one.sequence.name
    # No raw line breaks: they would let an owner forge lines of the log.
    return (
        f"role {role} may not read it: GRANT USAGE ON SCHEMA {show_quoted(sequence.schema)} TO {role};"
        f" GRANT SELECT ON SEQUENCE {show_quoted(sequence.schema)}.{show_quoted(sequence.name)} TO {role}"
    )


def _reason(one: _Listed, found: Mapping[int, object], role: str) -> str:
    if not one.is_readable:
        return _grant(one, role)
    if one.oid in found:
        return (
            "it was not used yet. Before PostgreSQL 18 its value can be read only if the owner of its schema"
            " cannot create schemas, or with trust_table_owners"
        )
    return "it is locked by another session, or was changed meanwhile"


class _Reader:
    """Reads values of sequences in chunks. Waits once for a lock of another session.

    From then on it leaves out sequences on which pg_locks shows a conflicting lock: with many locked
    sequences, the waits would add up, and each failed statement is an error in the server's log.
    """

    def __init__(self, connection: Connection, trusts_owners: bool) -> None:
        self._connection, self._trusts_owners = connection, trusts_owners
        self._wait_ms = _LOCK_WAIT_MS

    def read(self, oids: Items[int]) -> dict[int, tuple[int, bool] | None]:
        """Return the values by OID, without those of sequences that are locked or changed meanwhile.

        None stands for a value that must not be read.
        """
        if self._wait_ms == _LOCK_WAIT_MS:
            try:
                return self._read(oids)
            except psycopg2.errors.LockNotAvailable:
                self._wait_ms = _NEXT_LOCK_WAIT_MS
            except _CHANGED_MEANWHILE:
                pass
        return self._read_or_halve(self._without_locked(oids))

    def _without_locked(self, oids: Items[int]) -> list[int]:
        locked = {oid for (oid,) in rows(self._connection, _LOCKED, (list(oids),))}
        return [oid for oid in oids if oid not in locked]

    def _read_or_halve(self, oids: Items[int]) -> dict[int, tuple[int, bool] | None]:
        try:
            return self._read(oids)
        except _CHANGED_MEANWHILE:
            if self._connection.closed or len(oids) == 1:
                return {}
        middle = len(oids) // 2
        return self._read_or_halve(oids[:middle]) | self._read_or_halve(oids[middle:])

    def _read(self, oids: Items[int]) -> dict[int, tuple[int, bool] | None]:
        connection = self._connection
        with one_moment(connection):
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = {self._wait_ms}")
            if connection.server_version >= _GETS_DATA_BY_OID:
                data = rows(connection, _DATA, (list(oids),))
                return {oid: (value, is_called) for oid, value, is_called in data if value is not None}
            # This locks the sequences: none of them can be renamed or dropped until the transaction ends.
            last = dict(rows(connection, _LAST_VALUES, (list(oids),)))
            found: dict[int, tuple[int, bool] | None] = {
                oid: None if value is None else (value, True) for oid, value in last.items()
            }
            return found | self._select([oid for oid, value in last.items() if value is None])

    def _select(self, locked: Collection[int]) -> dict[int, tuple[int, bool]]:
        """Return the values of those locked sequences that can be selected by name without risk."""
        firm = locked if self._trusts_owners else with_fixed_places(self._connection, locked)
        # Do not use the listed names: another relation may have them since.
        named = rows(self._connection, _VERIFIED_NAMES, (list(firm),))
        parts = [
            f"SELECT {oid}, last_value, is_called FROM {TableName(*name).sql}"  # noqa: S608 - quoted names
            for oid, *name in named
        ]
        found = rows(self._connection, " UNION ALL ".join(parts)) if parts else []
        return {oid: (value, is_called) for oid, value, is_called in found}
