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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName, quote_identifier
from airflow_provider_pgrepl.replication.source.catalog.owner_code import has_fixed_places
from airflow_provider_pgrepl.replication.source.connection import Connection, one_moment, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_GETS_DATA_BY_OID = 180_000
_AT_ONCE = 100
"""Sequences read in one transaction. `pg_sequence_last_value` locks each until its end, and the server's
table of locks is small: max_locks_per_transaction times max_connections, 6,400 by default."""
_LOCK_WAIT_MS = 200

# Owned by a column: deptype "a" for serial and OWNED BY, "i" for identity. Used by a default: deptype "n"
# from the default to the sequence. https://www.postgresql.org/docs/current/catalog-pg-depend.html
_SEQUENCES = """
WITH RECURSIVE tables (oid) AS (
    SELECT oid FROM pg_catalog.unnest(%(oids)s::oid[]) AS given (oid)
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

    @property
    def progress(self) -> tuple[int, bool]:
        """A key by which a later value is greater, also of a descending sequence."""
        return (self.last_value if self.sequence.increment > 0 else -self.last_value), self.is_called


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


def refused_sequences(connection: Connection, table_oids: Collection[int]) -> dict[TableName, str]:
    """Return the sequences of `read_sequences` that the current role may not read, with the GRANT for each.

    Raises SourceError.
    """
    with source_errors("listing the sequences"):
        listed = _list(connection, table_oids)
        role = row(connection, "SELECT pg_catalog.quote_ident(current_user)")[0]
    return {one.sequence.name: _grant(one, role) for one in listed if not one.is_readable}


def read_sequences(
    connection: Connection, table_oids: Collection[int], *, trusts_owners: bool
) -> SequenceReading:
    """Read the values of the sequences that may have numbered rows of these tables.

    These are the permanent sequences that a column of the tables, or of their partitions and children, owns
    or uses in its default, and those that no column of any table owns, because applications call them by
    name. The latter exclude those of extensions. Waits up to 0.2 s for a lock of another session on a
    sequence.

    :param table_oids: the OIDs of the pipeline's tables
    :param trusts_owners: the setting `trust_table_owners`
    :raises SourceError:
    """
    with source_errors("reading the sequences"):
        by_oid = {one.oid: one for one in _list(connection, table_oids)}
        readable = [oid for oid, one in by_oid.items() if one.is_readable]
        found: dict[int, tuple[int, bool] | None] = {}
        for begin in range(0, len(readable), _AT_ONCE):
            chunk = [by_oid[oid] for oid in readable[begin : begin + _AT_ONCE]]
            found |= _read_unless_changed(connection, chunk, trusts_owners)
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


def _list(connection: Connection, table_oids: Collection[int]) -> list[_Listed]:
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
            connection, _SEQUENCES, {"oids": sorted(table_oids)}
        )
    ]


def _grant(one: _Listed, role: str) -> str:
    sequence = one.sequence.name
    schema = quote_identifier(sequence.schema)
    return (
        f"role {role} may not read it: GRANT USAGE ON SCHEMA {schema} TO {role};"
        f" GRANT SELECT ON SEQUENCE {sequence.sql} TO {role}"
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


def _read_unless_changed(
    connection: Connection, chunk: list[_Listed], trusts_owners: bool
) -> dict[int, tuple[int, bool] | None]:
    """Return the values of these sequences by OID, without those that are locked or changed meanwhile.

    None stands for a value that must not be read.
    """
    try:
        return _read_chunk(connection, chunk, trusts_owners)
    except _CHANGED_MEANWHILE:
        if connection.closed or len(chunk) == 1:
            return {}
    middle = len(chunk) // 2
    halves = chunk[:middle], chunk[middle:]
    return {
        oid: value
        for half in halves
        for oid, value in _read_unless_changed(connection, half, trusts_owners).items()
    }


def _read_chunk(
    connection: Connection, chunk: Iterable[_Listed], trusts_owners: bool
) -> dict[int, tuple[int, bool] | None]:
    oids = [one.oid for one in chunk]
    with one_moment(connection):
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {_LOCK_WAIT_MS}")
        if connection.server_version >= _GETS_DATA_BY_OID:
            data = rows(connection, _DATA, (oids,))
            return {oid: (value, is_called) for oid, value, is_called in data if value is not None}
        # This locks the sequences: none of them can be renamed or dropped until the transaction ends.
        last = dict(rows(connection, _LAST_VALUES, (oids,)))
        unused = [oid for oid, value in last.items() if value is None]
        found: dict[int, tuple[int, bool] | None] = {
            oid: (value, True) for oid, value in last.items() if value is not None
        }
        if unused and not (trusts_owners or has_fixed_places(connection, unused)):
            return found | dict.fromkeys(unused)
        # Do not use the listed names: another relation may have them since.
        names = {oid: TableName(*name) for oid, *name in rows(connection, _VERIFIED_NAMES, (unused,))}
        return found | _select(connection, names)


def _select(connection: Connection, names: Mapping[int, TableName]) -> dict[int, tuple[int, bool] | None]:
    """Return the values of locked sequences, selected by name."""
    parts = [
        f"SELECT {oid}, last_value, is_called FROM {name.sql}"  # noqa: S608 - quoted names
        for oid, name in names.items()
    ]
    found = rows(connection, " UNION ALL ".join(parts)) if parts else []
    return {oid: (value, is_called) for oid, value, is_called in found}
