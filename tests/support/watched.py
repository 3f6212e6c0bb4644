"""A pipeline whose source has its event trigger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import copy

from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.event_trigger.sql import function_name
from tests.support.received import Received

SHAPE = [
    "create type mood as enum ('sad', 'glad')",
    "create type place as (street text, number int)",
    "create domain short as varchar(10)",
    "create table t(id int primary key, v text, m mood, p place[], s short, n numeric(5,2))",
    "create table other(id int primary key)",
]


class Watched(Received):
    """Received, with an event trigger."""

    def begin_watched(self, *tables: str) -> list[Watched]:
        """Set up as the snapshot app does, with tables copied; the pipeline as one of each."""
        with self.source() as source:
            trigger.install(source, self.pipeline)
            position = self.begin() - 1
            watching = trigger.read_watching(source, self.pipeline)
            relations = [
                find_relation(source, TableName.parse(table), self.pipeline.publication) for table in tables
            ]
        assert watching is not None
        views = []
        for relation in relations:
            assert relation is not None
            self.oid = relation.oid
            self.index.add(Epoch(1), RelationRecord.of_catalog(relation), EffectiveFrom(position, watching))
            views.append(copy(self))
        return views

    @property
    def index(self) -> RelationIndex:
        return RelationIndex(relations_uri(self.pipeline.lake_root))

    def now(self) -> Relation | None:
        """Return the relation of `t` as the catalog has it now."""
        with self.source() as source:
            return read_relation(source, self.oid, self.pipeline.publication)

    def versions(self, *ops: str) -> list[int]:
        """Return the relation version of each row of the table. Asserts that positions are in order."""
        rows = self.changelog_rows(*ops)
        places = [(row["commit_lsn"], row["ordinal"]) for row in self.changelog_rows()]
        assert places == sorted(set(places))
        return [row["relation_version"] for row in rows if row["relation_id"] == self.oid]

    def records(self) -> list[RelationRecord]:
        """Return the table's relations as they were announced."""
        rows = self.changelog_rows("R")
        return [RelationRecord.from_json(row["new"][0]) for row in rows if row["relation_id"] == self.oid]


def insert(key: int, table: str = "t") -> str:
    return f"insert into {table} (id) values ({key})"


@contextlib.contextmanager
def weak_role(watched: Watched) -> Iterator[str]:
    """Yield a role without privileges; it is dropped after the test."""
    name = f"weak_{watched.pipeline.name}"
    with watched.source() as source, source.cursor() as cursor:
        cursor.execute(f"create role {name}")
        cursor.execute(f"grant all on schema public to {name}")
        try:
            yield name
        finally:
            cursor.execute(
                f"reassign owned by {name} to current_user; drop owned by {name}; drop role {name}"
            )


def function(watched: Watched) -> str:
    return f"_pgrepl.{function_name(watched.pipeline.name)}()"
