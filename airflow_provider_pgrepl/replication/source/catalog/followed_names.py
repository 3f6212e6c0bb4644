"""The names of renamed tables: a pipeline may have a table under the name with which it was copied, while the
source has another one (`on_rename: follow`).

A table keeps its name only as long as the source has no other table with it. If a table takes the name of
another one, tables were swapped or replaced. Both stop then, because the pipeline file means other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection

from .relations import any_exists, find_tables


@dataclass(frozen=True)
class FollowedNames:
    """The names in a pipeline of tables that may have other names at the source.

    `recorded`: the name with which each table was copied last, by OID. It is also needed of tables that are
    not followed.
    """

    pipeline: Pipeline
    recorded: Mapping[int, TableName] = field(default_factory=dict)

    @classmethod
    def read(cls, pipeline: Pipeline, read_recorded: Callable[[], Mapping[int, TableName]]) -> Self:
        """Read the recorded names, unless the pipeline follows no table. Raises what the reading raises."""
        found = cls(pipeline)
        return cls(pipeline, read_recorded()) if found.follows_any else found

    @property
    def follows_any(self) -> bool:
        """True if a setting of the pipeline is to follow tables."""
        return "follow" in (self.pipeline.on_rename, *self._choices.values())

    def find(self, connection: Connection, oid: int, now: TableName) -> TableName:
        """Return the pipeline's name of the table that has the name `now` at the source.

        Both differ only if the pipeline follows the table, no other table has the name with which it was
        copied, and it has not taken the name with which another table was copied that still exists.
        """
        name = self.recorded.get(oid, now)
        if name == now or not self._follows(name):
            return now
        others = [other for other, copied_as in self.recorded.items() if copied_as == now and other != oid]
        if others and any_exists(connection, others):
            return now
        return name if find_tables(connection, [name]).get(name, oid) == oid else now

    def apply(self, connection: Connection, relation: Relation) -> Relation:
        """Return the relation under its name in the pipeline."""
        now = relation.source_table
        return relation.followed_as(self.find(connection, relation.oid, now))

    def followed(self) -> dict[int, TableName]:
        """Return the names with which tables were copied that are followed, by OID."""
        return {oid: name for oid, name in self.recorded.items() if self._follows(name)}

    def _follows(self, name: TableName) -> bool:
        return self._choices.get(name, self.pipeline.on_rename) == "follow"

    @cached_property
    def _choices(self) -> dict[TableName, str]:
        return {
            TableName.parse(name): policies["on_rename"]
            for name, policies in self.pipeline.per_table.items()
            if "on_rename" in policies
        }
