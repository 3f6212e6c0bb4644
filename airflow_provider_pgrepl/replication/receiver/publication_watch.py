"""PublicationWatch: says in the changelog that what decides what is published has moved.

The stream says nothing of it: a publication that leaves changes out, and is set back before anybody looks,
is again what it was. What cannot come back is which transaction wrote the rows of the catalog. So before
anything received becomes durable, these are compared with what the changelog tells; where they differ, a row
for each table says how it is published now, between what is durable and what follows. The applier compares
it with what the table was copied under, and stops the tables that may lack changes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STANDING_ORDINAL
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStanding
from airflow_provider_pgrepl.replication.source.catalog.partitions import say_had_rows
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.publication import Publishing
from airflow_provider_pgrepl.replication.source.server import written_lsn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Said:
    """A digest of which rows of some tables have spoken once. `read_lsn`: the source was there when read.

    A table that was copied before that, but stands further on than what is durable, does not see those rows.
    It sees what is said again when all up to `read_lsn` is durable; only then this is over.
    """

    digest: int
    read_lsn: LSN
    relation_ids: frozenset[int]


class PublicationWatch:
    """Uses a connection, of whose thread it is."""

    def __init__(
        self,
        connection: Connection,
        writer: ChangelogWriter,
        index: RelationIndex,
        *,
        trusts_owners: bool = False,
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._index = index
        self._trusts_owners = trusts_owners
        self._said: _Said | None = None
        self._known: dict[int, PublicationStanding] = {}

    def look(self) -> None:
        """To be called before what was received becomes durable. Raises SourceConnectionError, FencedError,
        LakeUnavailableError."""
        # Tables that were copied since are to hear of it, too.
        publishing = Publishing(self._writer.epoch_record.publication, self._index.relation_ids())
        digest = publishing.digest(self._connection)
        if digest == self._writer.published:
            return
        if self._said is None or self._said.digest != digest:
            self._say_first(publishing, digest)
        elif self._writer.durable_lsn >= self._said.read_lsn:
            self._writer.published = digest
            self._say(self._standings(publishing, self._said.relation_ids))
            self._said = None

    def _say_first(self, publishing: Publishing, digest: int) -> None:
        if not publishing.oids:
            self._writer.published = digest
            return
        standings = self._standings(publishing, publishing.oids)
        moved = {oid: found for oid, found in standings.items() if found != self._known.get(oid)}
        self._say(moved)
        self._known = standings
        unsaid = frozenset() if self._said is None else self._said.relation_ids
        self._said = _Said(digest, written_lsn(self._connection), unsaid | moved.keys())

    def _standings(self, publishing: Publishing, oids: Collection[int]) -> dict[int, PublicationStanding]:
        some = Publishing(publishing.publication, sorted(oids))
        return some.standings(self._connection, self._index.names)

    def _say(self, standings: dict[int, PublicationStanding]) -> None:
        if standings:
            # Of new tables, and at a start, it may only not have been said before.
            level = logging.INFO if standings.keys() & self._known.keys() else logging.DEBUG
            log.log(level, "recorded in the changelog how %d tables are published now", len(standings))
            self._writer.append_between(self._rows(standings))

    def _rows(self, standings: dict[int, PublicationStanding]) -> pa.Table:
        return pa.Table.from_pylist([self._row(*item) for item in sorted(standings.items())], ROW_SCHEMA)

    def _row(self, relation_id: int, standing: PublicationStanding) -> dict[str, object]:
        partitions = say_had_rows(
            self._connection, relation_id, standing.partitions, trusts_owners=self._trusts_owners
        )
        record = RelationRecord.of_standing(relation_id, replace(standing, partitions=partitions))
        return {
            "epoch": self._writer.epoch,
            "commit_lsn": self._writer.durable_lsn,
            "ordinal": STANDING_ORDINAL,
            "relation_id": relation_id,
            "relation_version": record.version,
            "op": "R",
            "new": [record.to_json()],
        }
