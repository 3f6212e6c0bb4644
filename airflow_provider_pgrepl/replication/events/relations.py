"""The tables that a reader of changes knows, from the relation index, and its selection of tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from airflow_provider_pgrepl.errors import ChangelogError, ConfigError
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column

_ALL_OF_SCHEMA = ".*"
_ALL_PREFIXES, _MESSAGES = "*", 0


@dataclass(frozen=True)
class TableGroup:
    """Tables by oid, which a rename does not change, and by name, which another table may get later."""

    oids: frozenset[int] = frozenset()
    names: frozenset[TableName] = frozenset()

    def has(self, oid: int, names: Collection[TableName]) -> bool:
        return oid in self.oids or not self.names.isdisjoint(names)


@dataclass(frozen=True)
class TableSelection:
    """The tables that a reader wants.

    `names` and `schemas` select tables by the names that they had when a change was received; `names` None
    selects all. `without` excludes tables, `only` restricts the selection to some. `prefixes`: the prefixes
    of logical messages that are also wanted; `*` selects all.
    """

    names: frozenset[TableName] | None = None
    schemas: frozenset[str] = frozenset()
    without: TableGroup | None = None
    only: TableGroup | None = None
    prefixes: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, tables: Collection[str] | None, prefixes: Collection[str] = ()) -> Self:
        """Parse `schema.name` and `schema.*`; None selects all tables. Raises ConfigError."""
        if tables is None:
            return cls(prefixes=frozenset(prefixes))
        if not tables and not prefixes:
            raise ConfigError(
                "tables: none is named",
                'name some, as "public.orders" or "public.*", or leave it out for all',
            )
        patterns = [text for text in tables if text.endswith(_ALL_OF_SCHEMA)]
        try:
            names = frozenset(TableName.parse(text) for text in tables if text not in patterns)
            schemas = frozenset(TableName.parse(f"{text[:-1]}any").schema for text in patterns)
        except ValueError as error:
            raise ConfigError(
                f"tables: {error}", "name a table as schema.name, or a schema's as schema.*"
            ) from None
        return cls(names, schemas, prefixes=frozenset(prefixes))

    @property
    def is_of_all(self) -> bool:
        """Return True if no table is excluded."""
        return self.names is None and self.only is None and self.without is None

    @property
    def has_messages(self) -> bool:
        """Return True if logical messages of any prefix are wanted. Their relation is NO_RELATION."""
        is_out = self.without is not None and _MESSAGES in self.without.oids
        return bool(self.prefixes) and not is_out and (self.only is None or _MESSAGES in self.only.oids)

    def has_prefix(self, prefix: str) -> bool:
        """Return True if `prefixes` selects the logical messages of a prefix.

        Call it only if `has_messages` is True.
        """
        return not self.prefixes.isdisjoint((prefix, _ALL_PREFIXES))

    def leaving_out(self, tables: TableGroup) -> Self:
        """Return a copy that excludes these tables, and no others."""
        return replace(self, without=tables if tables.oids else None)

    def taking_only(self, tables: TableGroup) -> Self:
        """Return a copy that is restricted to these tables."""
        return replace(self, only=tables)

    def may_have(self, oid: int, names: Collection[TableName]) -> bool:
        """Return True if a table may be wanted under one of `names`: all names that it has had."""
        if self.without is not None:
            is_of_others = bool(names) and self.without.names.issuperset(names)
            if oid in self.without.oids or is_of_others:
                return False
        return replace(self, without=None).has(oid, names)

    def has(self, oid: int, names: Collection[TableName]) -> bool:
        """Return True if a table is wanted. `names`: its names in the stream and in the catalog."""
        if self.without is not None and self.without.has(oid, names):
            return False
        if self.only is not None and not self.only.has(oid, names):
            return False
        return self.names is None or any(name in self.names or name.schema in self.schemas for name in names)


class KnownRelations:
    """The records of the relation index, which is read again when an unknown version occurs."""

    def __init__(self, lake_root: str) -> None:
        self._uri = relations_uri(lake_root)
        self._records: dict[int, RelationRecord] = {}
        self._read()

    def find(self, version: int) -> RelationRecord:
        """Return the record of a relation version. Raises ChangelogError if the index does not have it."""
        if version not in self._records:
            self._read()
        if version not in self._records:
            raise ChangelogError(
                f"the relation {version} of a change is not in the relation index",
                "check the lake's folder _pgrepl/relations: it may have been deleted, or restored"
                " from a copy",
            )
        return self._records[version]

    def names(self, oid: int | None = None) -> set[TableName]:
        """Return all names that a table, or without `oid` any table, has had in the stream or the catalog."""
        return set[TableName]().union(
            *(
                record.names
                for record in self._records.values()
                if oid in (None, record.message.oid) and record.publication_status is None
            )
        )

    def records(self, oid: int) -> list[RelationRecord]:
        """Return all records of a table, from the stream and from the catalog."""
        return [one for one in self._records.values() if one.message.oid == oid]

    def columns(self, oid: int) -> set[ColumnName]:
        """Return all names that a table's columns have had, in the stream or in the catalog."""
        found: set[ColumnName] = set()
        for record in self._records.values():
            if record.message.oid == oid and record.publication_status is None:
                columns = {column.name for column in record.message.columns}
                if record.catalog is not None:
                    both = (*record.catalog.columns, *record.catalog.unpublished)
                    columns |= {column.name for column in both}
                found |= {ColumnName(table, name) for table in record.names for name in columns}
        return found

    def attnums(self) -> dict[int, frozenset[int]]:
        """Return the attnums of all columns that the catalog has had, by the oid of their table."""
        found: dict[int, frozenset[int]] = {}
        for record in self._records.values():
            if record.publication_status is None:
                catalog = record.catalog
                both = (*catalog.columns, *catalog.unpublished) if catalog else ()
                known = found.get(record.message.oid, frozenset())
                found[record.message.oid] = known | {column.attnum for column in both}
        return found

    def kin(self, oid: int) -> set[TableName]:
        """Return the names of the tables that had this one as a partition, or that it had as partitions."""
        related: set[int] = set()
        for record in self._records.values():
            parts = {part.oid for part in record.catalog.partitions} if record.catalog else set[int]()
            if record.message.oid == oid:
                related |= parts
            elif oid in parts:
                related.add(record.message.oid)
        return set[TableName]().union(*map(self.names, related))

    def column(self, oid: int, sent: WireColumn, index: int) -> Column:
        """Return a column of the stream that the catalog did not describe when it was received.

        It gets the type that the table's known columns have for the same type oid and typmod. If these have
        several types, or there are none, the column has no known type and its values are text.
        """
        known = [
            column
            for record in self._records.values()
            if record.message.oid == oid and record.catalog is not None
            for column in record.catalog.columns
        ]
        alike = [
            column for column in known if (column.type_oid, column.typmod) == (sent.type_oid, sent.typmod)
        ]
        is_key = any(column.is_key for column in known if column.name == sent.name)
        if len({column.pg_type for column in alike}) == 1:
            return replace(alike[0], name=sent.name, attnum=index + 1, is_key=is_key)
        return Column(sent.name, index + 1, sent.type_oid, sent.typmod, f"oid {sent.type_oid}", is_key=is_key)

    def _read(self) -> None:
        self._records |= RelationIndex(self._uri).by_version()


def known_selection(tables: Collection[str] | None, relations: KnownRelations) -> TableSelection:
    """Return the selection of tables that the changelog has had. Raises ConfigError for an unknown table."""
    wanted, known = TableSelection.parse(tables), relations.names()
    if unknown := sorted(map(str, (wanted.names or frozenset()) - known)):
        raise ConfigError(
            f"tables: the changelog has never had {', '.join(unknown)}",
            f"it has had {', '.join(sorted(map(str, known))) or 'none'}; a table is known from its first"
            " change or snapshot on",
        )
    return wanted
