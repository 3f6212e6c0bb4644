"""The tables that a transaction certainly did not change, determined with pg_walinspect.

The query reads WAL records and file numbers, not values. So the server can answer it for a transaction that
it cannot send.
https://www.postgresql.org/docs/current/pgwalinspect.html
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import psycopg2

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier

from .connection import Connection, patience, rows
from .server_errors import describe

log = logging.getLogger(__name__)

_READING_WAL_S = 600.0

_SCHEMA = """
SELECT n.nspname FROM pg_catalog.pg_extension e
    JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_extension'::regclass AND d.refobjid = e.oid
        AND d.classid = 'pg_catalog.pg_proc'::regclass AND d.deptype = 'e'
    JOIN pg_catalog.pg_proc p ON p.oid = d.objid AND p.proname = 'pg_get_wal_records_info'
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE e.extname = 'pg_walinspect'
"""

# A transaction that ended under its own xid is not part of another one. Other xids may be part of the
# transaction in question (savepoints have their own xids), and count as part of it.
_WRITTEN = """
WITH records AS (
    SELECT xid::text::bigint AS xid, resource_manager AS manager, record_type AS kind,
        coalesce(block_ref, '') AS blocks
    FROM %schema%.pg_get_wal_records_info(%(begin)s::pg_lsn,
        CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END)
    WHERE start_lsn <= %(commit)s::pg_lsn AND xid::text <> '0'
), others AS (
    SELECT xid FROM records WHERE manager = 'Transaction' AND kind IN ('COMMIT', 'ABORT') AND xid <> %(xid)s
)
SELECT DISTINCT manager, kind, found.file[1]::bigint, found.file[2]::bigint, found.file[3]::bigint
FROM records
    LEFT JOIN LATERAL pg_catalog.regexp_matches(blocks, 'rel (\\d+)/(\\d+)/(\\d+)', 'g')
        AS found (file) ON true
WHERE xid NOT IN (SELECT xid FROM others)
"""

_RELATIONS = """
WITH leaves AS (
    SELECT t.oid AS root, coalesce(p.relid, t.oid) AS oid
    FROM unnest(%(oids)s::oid[]) AS t (oid) LEFT JOIN LATERAL pg_catalog.pg_partition_tree(t.oid) AS p ON true
)
SELECT l.root::bigint, c.oid::bigint, c.reltoastrelid::bigint, c.relkind = 'p'
FROM leaves l JOIN pg_catalog.pg_class c ON c.oid = l.oid
"""

_FILE = "SELECT pg_catalog.pg_filenode_relation(%s::oid, %s::oid)::oid::bigint"
_DATABASE = "SELECT oid::bigint FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"

_ROWS = frozenset({"Heap", "Heap2"})
_NO_ROWS = frozenset(
    {
        *(
            "XLOG",
            "Transaction",
            "Storage",
            "CLOG",
            "Database",
            "Tablespace",
            "MultiXact",
            "RelMap",
            "Standby",
        ),
        *("Btree", "Hash", "Gin", "Gist", "Sequence", "SPGist", "BRIN", "CommitTs", "ReplicationOrigin"),
        *("Generic", "LogicalMessage"),
    }
)
"""PostgreSQL's resource managers that write no rows.

An unlisted manager may belong to a table access method, whose records this package cannot read.
"""
_CATALOG_ONLY = "NEW_CID"
_FIRST_USER_OID = 16_384


class _UnclearError(Exception):
    """The written tables cannot be determined."""


def untouched_tables(
    connection: Connection, oids: Collection[int], restart_lsn: LSN, commit_lsn: LSN, xid: int
) -> frozenset[int]:
    """Return those of `oids` that the transaction with this commit LSN certainly did not change.

    `restart_lsn`: the restart_lsn of a slot that has not passed the transaction, before all its records. The
    result is empty if pg_walinspect is not installed, the role may not use it, or a file no longer exists.
    """
    try:
        schemas = rows(connection, _SCHEMA)
        if not schemas:
            return frozenset()
        place = {"begin": str(restart_lsn), "commit": str(commit_lsn), "xid": xid}
        query = _WRITTEN.replace("%schema%", quote_identifier(schemas[0][0]))
        with patience(connection, _READING_WAL_S):
            records = rows(connection, query, place)
        return _without(connection, oids, _written(connection, records))
    except psycopg2.Error as error:
        log.info("pg_walinspect does not tell which tables were changed: %s", describe(error))
    except _UnclearError as error:
        log.info("pg_walinspect does not tell which tables were changed: %s", error)
    return frozenset()


def _written(connection: Connection, records: list[tuple[str, str, int, int, int]]) -> set[int]:
    """Return the oids of the relations whose rows were written. Raises _UnclearError."""
    database = rows(connection, _DATABASE)[0][0]
    files = set()
    for manager, kind, *file in records:
        if manager in _NO_ROWS or kind.partition("+")[0] == _CATALOG_ONLY:
            continue
        if manager not in _ROWS or file[2] is None:
            raise _UnclearError(f"a record of {manager} {kind} names no file")
        if file[1] in (0, database):
            files.add((file[0], file[2]))
    found = {file: rows(connection, _FILE, file)[0][0] for file in files}
    if None in found.values():
        raise _UnclearError("a table was rewritten since")
    return set(found.values())


def _without(connection: Connection, oids: Collection[int], written: set[int]) -> frozenset[int]:
    parts = rows(connection, _RELATIONS, {"oids": list(oids)})
    touched = {root for root, oid, toast, _ in parts if {oid, toast} & written}
    known = {oid for part in parts for oid in part[1:3]}
    if any(oid >= _FIRST_USER_OID for oid in written - known):
        # Another table was written, which may have been a partition at that time.
        touched |= {oid for _, oid, _, is_partitioned in parts if is_partitioned}
    return frozenset({root for root, *_ in parts} - touched)
