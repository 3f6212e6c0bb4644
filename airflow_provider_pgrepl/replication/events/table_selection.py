"""TableSelection: of which tables a reader of changes wants those."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName

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
