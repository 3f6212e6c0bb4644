"""Tables on which the source rejects UPDATE and DELETE because a publication publishes them.

PostgreSQL checks this when such a statement begins (CheckCmdReplicaIdentity), so the application's statement
fails. The columns that a publication must include are documented with CREATE PUBLICATION:
https://www.postgresql.org/docs/current/sql-createpublication.html

Also finds publications FOR ALL TABLES, which send the tables of schema `_pgrepl` to subscribers that lack
them. A subscriber stops at the first row of a table that it does not have.
https://www.postgresql.org/docs/current/logical-replication-subscription.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.errors import PublicationError, one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA, Relation
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from .relations import COLUMN_LISTS_SINCE, GENERATED_COLUMNS_SINCE, Membership, memberships

_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relreplident::text,
    (SELECT pg_catalog.array_agg(k.attnum) FROM pg_catalog.pg_index i,
            LATERAL unnest((i.indkey::int2[])[0 : i.indnkeyatts - 1]) AS k (attnum)
        WHERE i.indrelid = c.oid AND i.indisvalid AND CASE c.relreplident
            WHEN 'd' THEN i.indisprimary AND i.indimmediate WHEN 'i' THEN i.indisreplident ELSE false END),
    EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indisprimary
        AND i.indimmediate)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::oid[]) AND c.relkind IN ('r', 'p')
"""
_COLUMNS = """
SELECT a.attrelid::bigint, a.attnum, a.attname::text, a.attgenerated::text FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
_OPERATIONS = "SELECT pubupdate, pubdelete FROM pg_catalog.pg_publication WHERE pubname = %s"
_FILTERED = """
SELECT m.oid::bigint, found.part[1]::int FROM pg_catalog.pg_publication_rel m,
    LATERAL pg_catalog.regexp_matches(m.prqual::text, ':varattno (\\d+)', 'g') AS found (part)
WHERE m.oid = ANY (%s::oid[]) AND m.prqual IS NOT NULL
"""
# PostgreSQL does not record which publications the reader of a slot uses.
_PUBLICATIONS = """
SELECT pg_catalog.quote_ident(p.pubname) FROM pg_catalog.pg_publication p
WHERE p.puballtables AND (p.pubname <> %(used)s OR EXISTS (
    SELECT FROM pg_catalog.pg_replication_slots s
    WHERE s.database = pg_catalog.current_database() AND s.plugin = 'pgoutput' AND NOT s.temporary
    AND s.slot_name <> %(slot)s))
ORDER BY 1
"""
_HAS_TABLES = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relkind = 'r' AND c.relpersistence = 'p')
"""


RESNAPSHOT_OF_ALTERED = (
    "after that, every table of each pipeline that already uses the publication must be resnapshotted"
)
"""The price of ALTER PUBLICATION … SET (…): the receiver cannot tell which changes it has hidden."""


@dataclass(frozen=True)
class RefusedChanges:
    """The reason why the source rejects changes of a published table, and the statements that resolve it.

    `fix`: the statement that lets the table stay in the publication, or "" if it must leave it. `leave`: the
    statements that take it out. `lacks_identity`: the table has no replica identity.
    """

    table: TableName
    operations: str
    reason: str
    fix: str
    leave: str
    lacks_identity: bool = False

    def __str__(self) -> str:
        return f"{self.table}: {self.problem}; {self.cure}"

    @property
    def cure(self) -> str:
        return f"{self.fix}; or {self.leave}" if self.fix else self.leave

    @property
    def problem(self) -> str:
        return f"while it is published, the source refuses {self.operations} on it, because {self.reason}"


def read_refused(
    connection: Connection, relations: Iterable[Relation], publication: str, *, planned: bool = False
) -> dict[int, RefusedChanges]:
    """Return the tables, by oid, whose changes the source rejects, or will reject once they are published.

    A partitioned table is included if any of its partitions is. `planned`: see `read_relations`. A table that
    is not in the publication is checked as if it were, without a column list.
    """
    holders = {relation.oid: [relation.oid, *_leaves(relation)] for relation in relations}
    oids = sorted({oid for some in holders.values() for oid in some})
    with source_errors("looking for refused changes"):
        operations = _operations(rows(connection, _OPERATIONS, (publication,)), planned=planned)
        if not operations or not oids:
            return {}
        members = memberships(connection, oids, publication, planned=planned)
        filtered = _filtered_columns(connection, members)
        tables = {oid: tuple(more) for oid, *more in rows(connection, _TABLES, (oids,))}
        columns: dict[int, list[tuple[int, str, str]]] = {oid: [] for oid in oids}
        for oid, *column in rows(connection, _COLUMNS, (oids,)):
            columns[oid].append(tuple(column))
    version = connection.server_version
    found = {
        oid: _Published(
            publication, operations, version, members[oid], filtered.get(members[oid].oid, set())
        ).judge(tables[oid], columns[oid])
        for oid in tables
    }
    by_table = {oid: next(filter(None, map(found.get, some)), None) for oid, some in holders.items()}
    return {oid: refused for oid, refused in by_table.items() if refused is not None}


def _leaves(relation: Relation) -> Iterator[int]:
    return (part.oid for part in relation.partitions if part.relkind in ("r", ""))


def _operations(found: list[tuple[bool, bool]], *, planned: bool) -> str:
    if not found:
        return "UPDATE and DELETE" if planned else ""
    update, delete = found[0]
    return " and ".join(["UPDATE"] * update + ["DELETE"] * delete)


def _filtered_columns(connection: Connection, members: dict[int, Membership]) -> dict[int, set[int]]:
    """Return the columns that row filters use, by membership."""
    if connection.server_version < COLUMN_LISTS_SINCE:
        return {}
    found: dict[int, set[int]] = {}
    for member, attnum in rows(connection, _FILTERED, (sorted({one.oid for one in members.values()}),)):
        found.setdefault(member, set()).add(attnum)
    return found


@dataclass(frozen=True)
class _Published:
    """One published table: its publication, membership and row filter."""

    publication: str
    operations: str
    version: int
    member: Membership
    filtered: set[int]

    def judge(self, facts: tuple[Any, ...], columns: list[tuple[int, str, str]]) -> RefusedChanges | None:
        """Return why the source rejects changes of the table, or None if it accepts them.

        `facts`: a row of _TABLES without its oid. `columns`: rows of _COLUMNS without the oid.
        """
        schema, name, identity, key, has_primary_key = facts
        table = TableName(schema, name)
        if identity != "f" and not key:
            reason = {"n": "its replica identity is NOTHING", "i": "its replica identity index is gone"}
            return self._refused(
                table,
                reason.get(identity, "it has no replica identity"),
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…), REPLICA IDENTITY USING INDEX … or REPLICA"
                " IDENTITY FULL",
                lacks_identity=True,
            )
        named = {attnum: column for attnum, column, _ in columns}
        needed = set(named) if identity == "f" else set(key or ())
        listed = self.member.columns
        if listed is not None and (identity == "f" or not needed <= listed):
            what = "FULL" if identity == "f" else "not covered by it"
            return self._refused(
                table,
                f"the publication has a column list for it, and its replica identity is {what}",
                leave=self._without_list(table),
            )
        if unsent := self._unpublished(columns, needed):
            return self._refused_for_generated(table, identity, has_primary_key, unsent)
        if self.filtered and not self.filtered <= needed and not self.member.links:
            names = ", ".join(show_identifier(named[a]) for a in sorted(self.filtered - needed) if a in named)
            return self._refused(
                table,
                f"the publication's row filter uses {names}, which its replica identity does not hold",
                f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL",
            )
        return None

    def _unpublished(self, columns: list[tuple[int, str, str]], needed: set[int]) -> list[tuple[str, str]]:
        """Return generated columns of the identity that are not published. Servers before 18 accept them."""
        if self.version < GENERATED_COLUMNS_SINCE or self.member.columns is not None:
            return []
        return [
            (column, generated)
            for attnum, column, generated in columns
            if attnum in needed
            and (generated == "v" or (generated == "s" and not self.member.stored_generated))
        ]

    def _refused_for_generated(
        self, table: TableName, identity: str, has_primary_key: bool, unsent: list[tuple[str, str]]
    ) -> RefusedChanges:
        names = ", ".join(show_identifier(column) for column, _ in unsent)
        one = len(unsent) == 1
        if all(kind == "s" for _, kind in unsent):
            publication = quote_identifier(self.publication)
            fix = f"ALTER PUBLICATION {publication} SET (publish_generated_columns = stored)"
            fix += f"; {RESNAPSHOT_OF_ALTERED}"
        elif has_primary_key and identity == "f":
            fix = f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT"
        else:
            fix = f"ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX …, or drop the column"
        holds = "is FULL and so holds" if identity == "f" else "holds"
        return self._refused(
            table,
            f"its replica identity {holds} the generated column{'' if one else 's'} {names}, which"
            f" {'is' if one else 'are'} not published",
            fix,
        )

    def _leave(self, table: TableName) -> str:
        return f"ALTER PUBLICATION {quote_identifier(self.publication)} DROP TABLE {table.sql}"

    def _without_list(self, table: TableName) -> str:
        return (
            f"{self._leave(table)}; ALTER PUBLICATION {quote_identifier(self.publication)} ADD TABLE"
            f" {table.sql} (…), with every column of the replica identity in the list, without a list if that"
            " is FULL, and with the row filter that it had; then resnapshot the table. Do not use SET TABLE,"
            " which removes all other tables"
        )

    def _refused(
        self,
        table: TableName,
        reason: str,
        fix: str = "",
        *,
        leave: str = "",
        lacks_identity: bool = False,
    ) -> RefusedChanges:
        leave = leave or f"{self._leave(table)}; its changes are then not replicated"
        return RefusedChanges(table, self.operations, reason, fix, leave, lacks_identity)


def all_tables_publications(connection: Connection, slot: str, used: str = "") -> list[str]:
    """Return the publications FOR ALL TABLES that another reader than that of `slot` may use, quoted.

    `used`: the publication that the reader of `slot` uses, or "" if it has created its own.
    """
    with source_errors("looking for publications FOR ALL TABLES"):
        return [name for (name,) in rows(connection, _PUBLICATIONS, {"slot": slot, "used": used})]


def check_not_published(connection: Connection, slot: str, used: str, hint: str) -> None:
    """Raise PublicationError if a publication would send the tables of schema `_pgrepl` to subscribers."""
    found = all_tables_publications(connection, slot, used)
    if found:
        raise PublicationError(f"{_sends(found)}. Its subscribers lack these tables, and stop", hint)


def all_tables_warning(connection: Connection, slot: str, used: str = "") -> str | None:
    """Return a warning about publications that send the tables of schema `_pgrepl`, or None without any."""
    with source_errors("looking for the tables of schema _pgrepl"):
        if not row(connection, _HAS_TABLES, (STATE_SCHEMA,))[0]:
            return None
    found = all_tables_publications(connection, slot, used)
    if not found:
        return None
    return (
        f"{_sends(found)}: a subscriber that lacks them stops. Create them there (pg_dump --schema-only"
        f" --schema={STATE_SCHEMA}), or publish a list of tables"
    )


def _sends(names: list[str]) -> str:
    several = len(names) > 1
    return (
        f"publication{'s' if several else ''} {', '.join(map(one_line, names))}"
        f" {'are' if several else 'is'} FOR ALL TABLES, and {'send' if several else 'sends'} the tables of"
        f" schema {STATE_SCHEMA} too"
    )
