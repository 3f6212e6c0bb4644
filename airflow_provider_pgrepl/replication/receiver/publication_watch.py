"""The recorder of publication changes in the changelog.

The stream does not report them. A publication that leaves changes out, and is altered back before the next
check, looks the same as before; but other transactions wrote its catalog rows. So before received changes
become durable, a digest of these rows is compared with the one in the changelog. If they differ, one row for
each table records its publication status, between the durable changes and the next ones. The applier
compares it with the status under which the table was copied, and stops the tables that may lack changes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STATUS_ORDINAL
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStatus
from airflow_provider_pgrepl.replication.source.catalog.partitions import say_had_rows
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.publication import Publishing
from airflow_provider_pgrepl.replication.source.server import written_lsn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Said:
    """A digest for which rows of `relation_ids` were recorded once.

    `read_lsn`: the source's WAL position after the digest was read. A table that was copied before it, but is
    past the durable LSN, does not see those rows. They are recorded again when everything up to `read_lsn` is
    durable; only then is the digest stored.
    """

    digest: int
    read_lsn: LSN
    relation_ids: frozenset[int]


class PublicationWatch:
    """A recorder of publication changes. Only the thread that owns `connection` may use it."""

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
        self._known: dict[int, PublicationStatus] = {}

    def look(self) -> None:
        """Record the publication status of tables in the changelog if the publication has changed.

        Called before received changes become durable. Raises SourceConnectionError, FencedError,
        LakeUnavailableError.
        """
        # Read the index each time, so that tables copied since the last call are included.
        publishing = Publishing(self._writer.epoch_record.publication, self._index.relation_ids())
        digest = publishing.digest(self._connection)
        if digest == self._writer.published:
            return
        if self._said is None or self._said.digest != digest:
            self._say_first(publishing, digest)
        elif self._writer.durable_lsn >= self._said.read_lsn:
            self._writer.published = digest
            self._say(self._read_status(publishing, self._said.relation_ids))
            self._said = None

    def _say_first(self, publishing: Publishing, digest: int) -> None:
        if not publishing.oids:
            self._writer.published = digest
            return
        statuses = self._read_status(publishing, publishing.oids)
        moved = {oid: found for oid, found in statuses.items() if found != self._known.get(oid)}
        self._say(moved)
        self._known = statuses
        unsaid = frozenset() if self._said is None else self._said.relation_ids
        self._said = _Said(digest, written_lsn(self._connection), unsaid | moved.keys())

    def _read_status(self, publishing: Publishing, oids: Collection[int]) -> dict[int, PublicationStatus]:
        some = Publishing(publishing.publication, sorted(oids))
        return some.read_status(self._connection, self._index.names)

    def _say(self, statuses: dict[int, PublicationStatus]) -> None:
        if statuses:
            # For new tables, and after a start, this may be the first record and not a change.
            level = logging.INFO if statuses.keys() & self._known.keys() else logging.DEBUG
            log.log(level, "recorded in the changelog how %d tables are published now", len(statuses))
            self._writer.append_between(self._rows(statuses))

    def _rows(self, statuses: dict[int, PublicationStatus]) -> pa.Table:
        return pa.Table.from_pylist([self._row(*item) for item in sorted(statuses.items())], ROW_SCHEMA)

    def _row(self, relation_id: int, status: PublicationStatus) -> dict[str, object]:
        partitions = say_had_rows(
            self._connection, relation_id, status.partitions, trusts_owners=self._trusts_owners
        )
        record = RelationRecord.of_publication_status(relation_id, replace(status, partitions=partitions))
        return {
            "epoch": self._writer.epoch,
            "commit_lsn": self._writer.durable_lsn,
            "ordinal": STATUS_ORDINAL,
            "relation_id": relation_id,
            "relation_version": record.version,
            "op": "R",
            "new": [record.to_json()],
        }
