"""KnownRelations: what a reader of changes knows of the tables that they are of."""

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
    """Tables by oid, which stays when one is renamed, and by name, which another may get."""

    oids: frozenset[int] = frozenset()
    names: frozenset[TableName] = frozenset()

    def has(self, oid: int, names: Collection[TableName]) -> bool:
        return oid in self.oids or not self.names.isdisjoint(names)


@dataclass(frozen=True)
class TableSelection:
    """Tables by name and by schema (None: all), as they were called when a change came; but for some, or some
    of them alone. `prefixes`: of which logical messages are wanted besides, `*` for all."""

    names: frozenset[TableName] | None = None
    schemas: frozenset[str] = frozenset()
    without: TableGroup | None = None
    only: TableGroup | None = None
    prefixes: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, tables: Collection[str] | None, prefixes: Collection[str] = ()) -> Self:
        """`schema.name` and `schema.*`; None is all. Raises ConfigError."""
        if tables is None:
            return cls(prefixes=frozenset(prefixes))
        if not tables and not prefixes:
            raise ConfigError("tables: none is named", "name some, or give None for all")
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
        """Whether no table's changes are left out."""
        return self.names is None and self.only is None and self.without is None

    @property
    def has_messages(self) -> bool:
        """Whether any logical message is wanted. They have no table, which is NO_RELATION."""
        is_out = self.without is not None and _MESSAGES in self.without.oids
        return bool(self.prefixes) and not is_out and (self.only is None or _MESSAGES in self.only.oids)

    def has_prefix(self, prefix: str) -> bool:
        """Whether the logical messages of a prefix are wanted, if any are."""
        return not self.prefixes.isdisjoint((prefix, _ALL_PREFIXES))

    def leaving_out(self, tables: TableGroup) -> Self:
        """The same but for these tables, and no others."""
        return replace(self, without=tables if tables.oids else None)

    def taking_only(self, tables: TableGroup) -> Self:
        """The same but for all others."""
        return replace(self, only=tables)

    def may_have(self, oid: int, names: Collection[TableName]) -> bool:
        """Whether a table may be wanted that has had all these names, and none else."""
        if self.without is not None:
            is_of_others = bool(names) and self.without.names.issuperset(names)
            if oid in self.without.oids or is_of_others:
                return False
        return replace(self, without=None).has(oid, names)

    def has(self, oid: int, names: Collection[TableName]) -> bool:
        """Whether a table is wanted; `names`: those that it has, by the stream and by the catalog."""
        if self.without is not None and self.without.has(oid, names):
            return False
        if self.only is not None and not self.only.has(oid, names):
            return False
        return self.names is None or any(name in self.names or name.schema in self.schemas for name in names)


class KnownRelations:
    """The relation index, read again when a version comes that it did not have."""

    def __init__(self, lake_root: str) -> None:
        self._uri = relations_uri(lake_root)
        self._records: dict[int, RelationRecord] = {}
        self._read()

    def find(self, version: int) -> RelationRecord:
        """The relation of a version. Raises ChangelogError when it is not in the index."""
        if version not in self._records:
            self._read()
        if version not in self._records:
            raise ChangelogError(
                f"the relation {version} of a change is not in the relation index",
                "look at the lake's folder _pgrepl/relations: it may have been deleted or put back",
            )
        return self._records[version]

    def names(self, oid: int | None = None) -> set[TableName]:
        """All that a table was ever called, by the stream or the catalog; without `oid`, of all tables."""
        return set[TableName]().union(
            *(
                record.names
                for record in self._records.values()
                if oid in (None, record.message.oid) and record.standing is None
            )
        )

    def records(self, oid: int) -> list[RelationRecord]:
        """All that stream and catalog ever said of a table."""
        return [one for one in self._records.values() if one.message.oid == oid]

    def columns(self, oid: int) -> set[ColumnName]:
        """All that a table's columns were ever called, by the stream or the catalog."""
        found: set[ColumnName] = set()
        for record in self._records.values():
            if record.message.oid == oid and record.standing is None:
                columns = {column.name for column in record.message.columns}
                if record.catalog is not None:
                    both = (*record.catalog.columns, *record.catalog.unpublished)
                    columns |= {column.name for column in both}
                found |= {ColumnName(table, name) for table in record.names for name in columns}
        return found

    def attnums(self) -> dict[int, frozenset[int]]:
        """The attnums of all columns that the catalog had, by the oid of their table."""
        found: dict[int, frozenset[int]] = {}
        for record in self._records.values():
            if record.standing is None:
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
        """A column as the stream has it, of which the catalog said nothing when it came: its type is what the
        table is known to have had under the type's oid. Where that is several, or none, it is a text."""
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
    """Of tables that the changelog has had. Raises ConfigError."""
    wanted, known = TableSelection.parse(tables), relations.names()
    if unknown := sorted(map(str, (wanted.names or frozenset()) - known)):
        raise ConfigError(
            f"tables: the changelog has never had {', '.join(unknown)}",
            f"it has had {', '.join(sorted(map(str, known))) or 'none'}; a table is known from its first"
            " change or snapshot on",
        )
    return wanted
