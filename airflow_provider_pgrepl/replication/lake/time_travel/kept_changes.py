"""KeptChanges: the changelog as it was at one moment, with the relations that it refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.time_travel.moment import Moment
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import open_storage

HEADS = ["commit_lsn", "ordinal", "xid", "relation_id", "relation_version", "op"]
"""What says where a row stands and which relation it obeys; no values."""


@dataclass(frozen=True)
class KeptChanges:
    """Finds rows of single relations in the live files of the moment's epoch. Raises ChangelogError when a
    file is gone."""

    moment: Moment
    index: RelationIndex

    @property
    def uri(self) -> str:
        return str(self.moment.changelog.table_uri).rstrip("/")

    def files(self, relation_id: int, above: LSN, upto: LSN | None = None) -> list[ChangelogFile]:
        """Files that can hold the relation's rows above an LSN, up to another, in order."""
        found = reader.live_files(self.moment.changelog, self.moment.epoch, above)
        return [
            file for file in found if file.may_hold(relation_id) and (upto is None or file.min_lsn <= upto)
        ]

    def rows(
        self, files: Sequence[ChangelogFile], relation_id: int, above: LSN, upto: LSN | None = None
    ) -> pa.Table:
        """The HEADS of the relation's rows in these files, in order."""
        filesystem, root = open_storage(self.uri)
        paths = [file.path for file in files]
        rows = reader.read_rows(filesystem, root, paths, relation_id, above, HEADS)
        return rows if upto is None else rows.filter(pc.less_equal(rows["commit_lsn"], int(upto)))

    @cached_property
    def records(self) -> list[RelationRecord]:
        """Every relation version ever received."""
        return self.index.all()

    def find_record(self, relation_id: int, version: int) -> RelationRecord | None:
        """The relation of a version; None when nothing says any more what it was."""
        found = self.index.find(relation_id, version)
        return found or reader.find_relation_record(self.uri, relation_id, version)
