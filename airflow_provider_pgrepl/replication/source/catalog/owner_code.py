"""Code of a table's owner that would run with this role's rights if a SELECT on the table were planned.

To plan a SELECT, PostgreSQL evaluates constant parts of the expressions of indexes, their predicates,
extended statistics and constraints, and so runs their functions as the current role. `COPY table TO` plans
nothing. So a SELECT is planned only on a table whose expressions call functions of superusers and of the
current role alone, and only if no other expression can be added between this check and the planning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import BusyError, TableError, one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_REFERENCE = errors.reference("connection")

# An extension's owner may add own functions to it, so membership in an extension proves nothing. Objects that
# every database has are not in pg_depend. Only superusers can create operator classes.
_CODE = """
WITH RECURSIVE tables (asked, oid) AS (
    SELECT c.oid, c.oid FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION
    SELECT t.asked, i.inhparent FROM tables t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relispartition
        JOIN pg_catalog.pg_inherits i ON i.inhrelid = t.oid
), holders (asked, what, classid, objid) AS (
    SELECT t.asked, pg_catalog.format('index %%I', c.relname), 'pg_catalog.pg_class'::regclass::oid, c.oid
    FROM tables t JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
        JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    UNION ALL
    SELECT t.asked, pg_catalog.format('statistics object %%I', s.stxname),
        'pg_catalog.pg_statistic_ext'::regclass::oid, s.oid
    FROM tables t JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = t.oid
    UNION ALL
    SELECT t.asked, pg_catalog.format('constraint %%I', k.conname),
        'pg_catalog.pg_constraint'::regclass::oid, k.oid
    FROM tables t JOIN pg_catalog.pg_constraint k ON k.conrelid = t.oid
    UNION ALL
    SELECT t.asked, pg_catalog.format('generated column %%I', a.attname),
        'pg_catalog.pg_attrdef'::regclass::oid, d.oid
    FROM tables t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attgenerated <> ''
        JOIN pg_catalog.pg_attrdef d ON d.adrelid = t.oid AND d.adnum = a.attnum
    UNION ALL
    SELECT t.asked, pg_catalog.format('policy %%I', p.polname), 'pg_catalog.pg_policy'::regclass::oid, p.oid
    FROM tables t JOIN pg_catalog.pg_policy p ON p.polrelid = t.oid
), used (asked, what, classid, objid) AS (
    SELECT * FROM holders
    UNION
    SELECT t.asked, 'partition key', d.refclassid, d.refobjid
    FROM tables t JOIN pg_catalog.pg_depend d
        ON d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = t.oid
        AND d.refclassid = ANY (ARRAY['pg_catalog.pg_proc', 'pg_catalog.pg_operator']::regclass[])
    UNION
    SELECT used.asked, used.what, part.classid, part.objid FROM used, LATERAL (
        SELECT d.refclassid, d.refobjid FROM pg_catalog.pg_depend d
        WHERE d.classid = used.classid AND d.objid = used.objid AND d.refclassid = ANY (
            ARRAY['pg_catalog.pg_proc', 'pg_catalog.pg_operator', 'pg_catalog.pg_type']::regclass[])
        UNION ALL
        SELECT 'pg_catalog.pg_constraint'::regclass::oid, k.oid FROM pg_catalog.pg_constraint k
        WHERE used.classid = 'pg_catalog.pg_type'::regclass AND k.contypid = used.objid
        UNION ALL
        SELECT 'pg_catalog.pg_class'::regclass::oid, y.typrelid FROM pg_catalog.pg_type y
        WHERE used.classid = 'pg_catalog.pg_type'::regclass AND y.oid = used.objid AND y.typrelid <> 0
    ) AS part (classid, objid)
    WHERE used.classid <> 'pg_catalog.pg_proc'::regclass
)
SELECT DISTINCT used.asked::bigint, used.what, pg_catalog.format('%%I.%%I', n.nspname, p.proname),
    pg_catalog.quote_ident(r.rolname)
FROM used JOIN pg_catalog.pg_proc p ON p.oid = used.objid
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace JOIN pg_catalog.pg_roles r ON r.oid = p.proowner
WHERE used.classid = 'pg_catalog.pg_proc'::regclass AND NOT r.rolsuper AND r.rolname <> current_user
ORDER BY 1, 2, 3
"""

# A role that owns a schema, directly or as a member of the owner, and may create schemas, can replace a
# locked table by another one. The owner of the database is trusted not to.
_STANDING = """
SELECT c.oid::bigint, r.rolsuper OR r.rolname = current_user,
    s.rolsuper OR s.rolname IN (current_user, 'pg_database_owner') OR s.oid = d.datdba
        OR NOT EXISTS (SELECT FROM pg_catalog.pg_roles m
            WHERE NOT m.rolsuper AND m.rolname <> current_user AND m.oid <> d.datdba
            AND pg_catalog.has_database_privilege(m.oid, d.oid, 'CREATE')
            AND pg_catalog.pg_has_role(m.oid, s.oid, 'USAGE'))
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace JOIN pg_catalog.pg_roles s ON s.oid = n.nspowner
    JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
WHERE c.oid = ANY (%s::oid[])
"""


@dataclass(frozen=True)
class OwnerCode:
    """An object of a table that calls a function of another role, which is no superuser. Names as in SQL."""

    what: str
    function: str
    role: str

    def __str__(self) -> str:
        return one_line(f"its {self.what} calls {self.function}, a function of role {self.role}")


def read_owner_code(connection: Connection, oids: Iterable[int]) -> dict[int, list[OwnerCode]]:
    """Return code that planning a SELECT on these tables, or on the tables above them, may run, by oid."""
    found: dict[int, list[OwnerCode]] = defaultdict(list)
    with source_errors("looking for code of tables' owners"):
        for oid, *code in rows(connection, _CODE, {"oids": sorted(set(oids))}):
            found[oid].append(OwnerCode(*code))
    return dict(found)


def refused_code(connection: Connection, table: TableName, code: Iterable[OwnerCode]) -> TableError:
    """Return the error for a table with such code."""
    role = row(connection, "SELECT pg_catalog.quote_ident(current_user)")[0]
    return TableError(
        f"{table}: {'; '.join(map(str, code))}. Reading the table would run this code with the"
        f" rights of role {role}",
        "let a superuser own the function (ALTER FUNCTION … OWNER TO …), drop the policy, default or"
        f" view that calls it, or set trust_table_owners to true, {_REFERENCE}",
    )


def unsafe_to_select(table: TableName) -> TableError:
    """Return the error for a table that needs a SELECT, but cannot be locked against code of its owner."""
    return TableError(
        f"{table}: a row filter, or a generated column that is published, cannot be copied without planning"
        " a query on it, in which its owner could have code run with our rights",
        "GRANT MAINTAIN on the table (PostgreSQL 17), make the role a member of the owning role, or set"
        f" trust_table_owners to true, {_REFERENCE}",
    )


def shut_owners_out(
    connection: Connection,
    check: Connection,
    leaves: Mapping[int, TableName],
) -> dict[int, list[OwnerCode]] | None:
    """Lock these tables against new code of untrusted roles, and return the code that they have, by oid.

    The lock lasts until the transaction of `connection` ends, or `let_owners_in` releases it. It is not
    needed if all owners are trusted. Returns None if the role may not lock the tables against code, or the
    lock would not help. `check` reads the current catalog. Raises BusyError if another session holds a
    conflicting lock.
    """
    with source_errors("asking who owns the tables"):
        standing = rows(check, _STANDING, (list(leaves),))
        owners_trusted = all(is_trusted for _, is_trusted, _ in standing)
        places_firm = bool(standing) and all(is_firm for _, _, is_firm in standing)
        if not places_firm or not (owners_trusted or _lock(connection, leaves.values())):
            return None
    return read_owner_code(check, leaves)


def with_fixed_places(connection: Connection, oids: Iterable[int]) -> set[int]:
    """Return those of these relations whose schema no untrusted role can replace by another schema.

    Raises psycopg2's errors.
    """
    return {oid for oid, _, is_firm in rows(connection, _STANDING, (list(oids),)) if is_firm}


def let_owners_in(connection: Connection) -> None:
    """Release the lock that `shut_owners_out` took. Earlier locks of the transaction stay."""
    with source_errors("releasing a lock"), connection.cursor() as cursor:
        cursor.execute("ROLLBACK TO SAVEPOINT unlocked")


def _lock(connection: Connection, tables: Iterable[TableName]) -> bool:
    """Lock tables against CREATE INDEX and CREATE STATISTICS, but not against writers.

    Return False if the role may not lock them, or on a standby. Does not wait for the lock, and raises
    BusyError: the transaction holds other locks, and a session of the application that waits for one of them
    could fail because of a deadlock.
    """
    names = ", ".join(f"ONLY {table.sql}" for table in tables)
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT unlocked")
        try:
            cursor.execute(f"LOCK TABLE {names} IN SHARE UPDATE EXCLUSIVE MODE NOWAIT")
        except psycopg2.Error as error:
            if connection.closed:
                raise
            cursor.execute("ROLLBACK TO SAVEPOINT unlocked")
            if isinstance(error, psycopg2.errors.LockNotAvailable):
                raise BusyError(
                    "the table is locked by another session, which alters, vacuums or analyzes it"
                ) from None
            # The role may not lock the tables, or the server is a standby.
            return False
    return True
